"""From the commit of a job to a worker that has it, on an idle system."""

import time

from harness import wait_until

from ..clients import Peers
from ..measure import percentiles
from .cell import Cell

JOBS = 1000
INSERT = "SELECT awa.insert_job('k', '{}', 'latency')"
BARE = "INSERT INTO bare (queue, args) VALUES ('q', '{}'); NOTIFY latency"
WAYS = {
    "NOTIFY, then a read of a bare table": ("listen", BARE),
    "wait_for_jobs, then claim": ("wait", INSERT),
    "claim(wait)": ("claim", INSERT),
}


def run(r):
    jobs = r.size(JOBS, 50)
    r.alternate(*(lambda name=name: way(r, name, jobs) for name in WAYS))


def way(r, name, jobs, queue_is=""):
    role, query = WAYS[name]
    from_commit, from_call = trips(r.rig, role, query, jobs)
    if role != "listen":
        r.rig.expect("latency", completed_total=jobs)
        r.rig.wait_count("latency", "running", 0)
    values = percentiles(from_commit)
    values |= {f"with_commit_{key}": value for key, value in percentiles(from_call).items()}
    r.note(name + queue_is, values, "psycopg, two processes", jobs)


def trips(rig, role, query, jobs):
    """Milliseconds from the answer to the commit, and from its sending, to the worker."""
    producer, observer = rig.connect(), rig.connect()
    worker = Peers(rig, role, "latency", jobs)
    worker.go()
    from_commit, from_call = [], []
    for _ in range(jobs):
        wait_until(lambda: asleep(observer, worker.pids[0], role), 20, "a waiting worker", 0.001)
        sent = time.monotonic_ns()
        producer.execute(query)
        committed = time.monotonic_ns()
        taken = int(worker.read())
        # The worker can have it before the answer reaches the producer: that is no time.
        from_commit.append(max(0, taken - committed) / 1e6)
        from_call.append((taken - sent) / 1e6)
    worker.stop()
    producer.close()
    observer.close()
    return from_commit, from_call


def asleep(observer, pid, role):
    state, event, query = observer.row(
        "SELECT state, wait_event_type, query FROM pg_stat_activity WHERE pid = %s", pid)
    if role == "listen":
        return state == "idle" and query.startswith(("LISTEN", "SELECT args"))
    return state == "active" and event in ("Extension", "IPC", "Timeout") and "wait" in query


CELLS = [
    Cell("latency", "Commit to claim on an idle system, one job at a time.", run),
]
