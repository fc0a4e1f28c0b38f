"""Draining a backlog, every job acknowledged."""

from .. import acts
from ..clients import Peers
from .cell import Cell

JOBS = 1_000_000
# Jobs of the backlog that are drained by claims of a size: a flush a claim takes its time.
SMALL_CLAIMS = ((1, 10_000), (10, 100_000), (100, JOBS))


def run(r):
    jobs = r.size(JOBS)
    r.alternate(
        lambda: bare(r, jobs, 500),
        lambda: whole(r, jobs, "claim(500) + complete_many in the server", "DO loop",
                      lambda: acts.drain(r.rig.conn, "drain", 500)),
        lambda: whole(r, jobs, "complete_and_claim(500) in the server", "DO loop",
                      lambda: acts.drain_in_one_call(r.rig.conn, "drain", 500)),
        lambda: from_client(r, jobs, 500),
    )
    for claim, part in SMALL_CLAIMS:
        small(r, jobs, r.size(part, max(claim, 100)), claim)


def bare_name(claim):
    return f"read {claim} rows of a bare table by key, commit one row"


def bare(r, jobs, claim):
    r.rig.conn.execute("TRUNCATE bare")
    acts.copy(r.rig, jobs)
    r.measure(bare_name(claim), lambda: acts.read_bare(r.rig.conn, jobs, claim), jobs, "DO loop")


def whole(r, jobs, name, client, work, claim=500):
    acts.enqueue(r.rig.conn, "drain", jobs)
    r.measure(name, work, jobs, client, bare_name(claim))
    r.rig.expect("drain", completed_total=jobs)
    r.rig.balance()


def from_client(r, jobs, claim):
    peer = Peers(r.rig, "drain", "drain", claim)
    whole(r, jobs, f"claim({claim}) + complete_many from a client", "psycopg, text args read",
          peer.run)


def small(r, jobs, part, claim):
    """Claims `part` of a backlog of `jobs`, then clears the rest, unmeasured."""
    script = (
        f"SELECT array_agg(receipt) AS receipts FROM awa.claim('drain', {claim}) \\gset\n"
        "SELECT count(*) FROM awa.complete_many(:receipts);\n"
    )
    acts.enqueue(r.rig.conn, "drain", jobs)
    part = min(part, jobs)
    r.alternate(
        lambda: bare(r, max(part, acts.BATCH), claim),
        lambda: r.measure(
            f"claim({claim}) + complete_many", lambda: r.rig.pgbench(script, each=part // claim),
            part, "pgbench -c 1", bare_name(claim)),
    )
    r.rig.expect("drain", available=jobs - part, completed_total=part)
    r.rig.balance()
    acts.drain(r.rig.conn, "drain", 500)
    r.rig.expect("drain", available=part - jobs, completed_total=jobs - part)
    r.rig.balance()


CELLS = [
    Cell("drain", "Drain of a backlog of 1,000,000 jobs, every job acknowledged.", run),
]
