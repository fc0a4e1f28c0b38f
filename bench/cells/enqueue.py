"""Bulk enqueueing, beside COPY into a bare table."""

from .. import acts
from ..clients import Peers
from .cell import Cell

JOBS = 200_000


def run(r):
    jobs = r.size(JOBS)
    r.alternate(
        *(step for producers in (1, 2) for step in (
            lambda n=producers: from_client(r, jobs, n),
            lambda n=producers: in_server(r, jobs, n),
        ))
    )


def from_client(r, jobs, producers):
    calls = max(1, jobs // producers // acts.BATCH)
    done = calls * producers * acts.BATCH
    client = f"psycopg, {producers} process(es)"
    bare = f"COPY of 1,000 rows from a client, {producers} producer(s)"
    copy = Peers(r.rig, "copy", calls, count=producers)
    insert = Peers(r.rig, "insert_jobs", "client", calls, count=producers)
    r.alternate(
        lambda: r.measure(bare, copy.run, client=client),
        lambda: r.measure(f"insert_jobs of 1,000 from a client, {producers} producer(s)",
                          insert.run, client=client, beside=bare),
    )
    r.rig.expect("client", available=done)


def in_server(r, jobs, producers):
    client = f"{producers} DO loop(s)"
    bare = f"COPY of 1,000 rows in the server, {producers} producer(s)"
    r.alternate(
        lambda: r.measure(
            bare, lambda: acts.copy_together(r.rig, jobs, producers), jobs, client),
        lambda: r.measure(
            f"insert_jobs of 1,000 in the server, {producers} producer(s)",
            lambda: acts.enqueue_together(r.rig, "server", jobs, producers), jobs, client, bare),
    )
    r.rig.expect("server", available=jobs)


CELLS = [Cell("enqueue", "Bulk enqueue, 1,000 jobs a call and commit, args of 200 bytes.", run)]
