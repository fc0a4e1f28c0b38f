"""Ten million jobs that wait: memory, claims at the head, starts."""

from .. import acts
from ..measure import percentiles, private_kilobytes
from .cell import Cell

JOBS = 10_000_000
STEP = 1_000_000
CLAIMS = 500
SHARED = "SELECT coalesce(sum(allocated_size), 0) FROM pg_shmem_allocations WHERE name ~* 'awa'"
PROCESSES = "SELECT pid FROM pg_stat_activity WHERE backend_type ~* 'awa' AND datname IS NOT NULL"


def run(r):
    jobs = r.size(JOBS)
    head(r, "with 10,000 ready", r.size(10_000))
    fill(r, jobs)
    head(r, f"with {jobs:,} ready", 0)
    memory(r, jobs)
    for mode, name in (("fast", "clean stop"), ("immediate", "crash after a checkpoint")):
        r.rig.conn.execute("CHECKPOINT")
        answers, claims = r.rig.restart(mode)
        r.note(f"start after a {name}, {jobs:,} ready",
               {"answers_seconds": answers, "first_claim_seconds": claims}, "psycopg")
        head(r, f"after a {name}", 0)
    r.rig.balance()
    empty(r)


def fill(r, jobs):
    def enqueue():
        for done in range(0, jobs, STEP):
            acts.enqueue(r.rig.conn, "backlog", min(STEP, jobs - done))
            r.say(f"{min(done + STEP, jobs):,} of {jobs:,} enqueued")

    r.measure("insert_jobs of 1,000 in the server", enqueue, jobs, "DO loop", dead=False)
    r.rig.expect("backlog", available=jobs)


def head(r, name, jobs):
    """The time of claims at the head of the lane; the jobs are done then."""
    if jobs:
        acts.enqueue(r.rig.conn, "backlog", jobs)
    claims = r.size(CLAIMS, 10)
    for size in (1, 10):
        script = (
            f"SELECT array_agg(receipt) AS receipts FROM awa.claim('backlog', {size}) \\gset\n"
            "SELECT count(*) FROM awa.complete_many(:receipts);\n"
        )
        done = r.rig.pgbench(script, each=claims, log=True)
        r.note(f"claim({size}) + complete_many at the head, {name}",
               percentiles(done["latencies_ms"]), "pgbench -c 1", claims * size)
        r.rig.expect("backlog", available=-claims * size, completed_total=claims * size)
    if jobs:
        r.rig.expect("backlog", available=jobs)
        r.rig.balance()
        empty(r)


def memory(r, jobs):
    worker = r.rig.conn.column(PROCESSES)
    r.note(f"memory, {jobs:,} ready", {
        "shared_allocated_kb": float(r.rig.conn.value(SHARED)) / 1024,
        "worker_private_kb": sum(map(private_kilobytes, worker)),
    })


def empty(r):
    left = r.rig.counts("backlog")["available"]
    r.measure("complete_and_claim(500) of what is left",
              lambda: acts.drain_in_one_call(r.rig.conn, "backlog", 500), left, "DO loop",
              dead=False)
    r.rig.expect("backlog", available=-left, completed_total=left)


CELLS = [
    Cell("backlog", "10,000,000 ready jobs: memory, claims at the head, restart to first claim.",
         run, rounds=1),
]
