"""The growth of cost: enqueue, drain and latency at a tenth, one and ten times the size."""

from .. import acts
from . import latency
from .cell import Cell

JOBS = 1_000_000
FACTORS = (0.1, 1, 10)


def run(r):
    for factor in FACTORS:
        grown(r, r.size(JOBS * factor))


def grown(r, jobs):
    rig = r.rig
    bare = f"COPY of 1,000 rows, {jobs:,} rows"
    r.alternate(
        lambda: r.measure(bare, lambda: acts.copy(rig, jobs), jobs, "DO loop", dead=False),
        lambda: r.measure(
            f"insert_jobs of 1,000, {jobs:,} jobs",
            lambda: acts.enqueue(rig.conn, "growth", jobs), jobs, "DO loop", bare, dead=False),
    )
    rig.conn.execute("TRUNCATE bare, bare_acks")
    latency.way(r, "wait_for_jobs, then claim", r.size(300, 50), f", {jobs:,} wait elsewhere")
    r.measure(f"claim(500) + complete_many, {jobs:,} jobs",
              lambda: acts.drain(rig.conn, "growth", 500), jobs, "DO loop", dead=False)
    rig.expect("growth", completed_total=jobs)
    rig.balance()


CELLS = [
    Cell("growth", "Enqueue, drain and latency at a tenth, one and ten times the size.", run,
         rounds=3),
]
