"""Producers: the client of the other system, and batches of every size."""

from harness import Database

from .. import acts
from ..clients import Peers
from .cell import Cell

JOBS = 100_000
# Jobs a call, and jobs in all.
BATCHES = ((1, 5_000), (10, 20_000), (100, 50_000), (1_000, 100_000), (10_000, 200_000))


def clients(r):
    """awa-pg into this extension, awa-pg into the tables that it makes itself, and psycopg."""
    calls = max(1, r.size(JOBS) // acts.BATCH)
    done = calls * acts.BATCH
    rig = r.rig
    theirs = Database(rig.server, f"theirs{r.number}", extension=False)
    try:
        bare = "COPY of 1,000 rows, psycopg"
        steps = [
            (bare, ("copy", calls), None),
            ("insert_jobs of 1,000, psycopg", ("insert_jobs", "own", calls), bare),
            ("insert_jobs_compat_batch of 1,000, psycopg", ("compat_batch", "batch", calls), bare),
            ("insert_many_copy of 1,000, awa-pg 0.6.9, this extension",
             ("awa_pg", "extension", url(rig.database), "insert_many_copy", "copied", calls), bare),
            ("insert_many_copy of 1,000, awa-pg 0.6.9, its own tables",
             ("awa_pg", "own", url(theirs), "insert_many_copy", "copied", calls), bare),
            ("enqueue_many_copy of 1,000, awa-pg 0.6.9, its own tables",
             ("awa_pg", "own", url(theirs), "enqueue_many_copy", "enqueued", calls), bare),
        ]
        r.alternate(*(
            lambda name=name, role=role, beside=beside:
                r.measure(name, Peers(rig, *role).run, client="1 process", beside=beside)
            for name, role, beside in steps
        ))
        for queue in ("own", "batch", "copied"):
            rig.expect(queue, available=done)
        found = theirs.value("SELECT count(*) FROM awa.jobs WHERE state = 'available'")
        if found != 2 * done:
            raise RuntimeError(f"the other system has {found} jobs, not {2 * done}")
    finally:
        theirs.drop()


def url(database):
    return f"postgresql://postgres@127.0.0.1:{database.server.port}/{database.name}"


def batches(r):
    for keyed in (False, True):
        for batch, jobs in BATCHES:
            one_size(r, batch, r.size(jobs, batch), keyed)


def one_size(r, batch, jobs, keyed):
    name = f"insert_jobs of {batch:,}" + (", each with a unique key" if keyed else "")
    queue = f"{'keyed' if keyed else 'plain'}{batch}"
    r.measure(name, lambda: acts.enqueue_made(r.rig.conn, queue, jobs, batch, keyed, r.number),
              jobs, "DO loop that makes the jobs")
    r.rig.expect(queue, available=jobs)


CELLS = [
    Cell("clients", "Bulk enqueue by awa-pg 0.6.9 and by psycopg, 1,000 jobs a call.", clients),
    Cell("batches", "WAL of an enqueue by the size of its batch, with and without keys.", batches),
]
