"""Attempts whose owner has died."""

import time

from harness import wait_until

from .. import acts
from .cell import Cell

ATTEMPTS = 1_600_000
BARE = "UPDATE bare SET queue = 'again'"


def run(r):
    jobs = r.size(ATTEMPTS)
    r.alternate(lambda: bare(r, jobs), lambda: rescue(r, jobs))


def bare_name(jobs):
    return f"UPDATE of {jobs:,} rows of a bare table"


def bare(r, jobs):
    r.rig.conn.execute("TRUNCATE bare")
    acts.copy(r.rig, jobs)
    r.measure(bare_name(jobs), lambda: r.rig.conn.execute(BARE), jobs, "one statement")


def rescue(r, jobs):
    acts.enqueue(r.rig.conn, "lost", jobs)
    worker = r.rig.connect()
    runtime = worker.value("SELECT awa.register_runtime('lost')")
    held = 0
    while held < jobs:
        held += worker.value("SELECT count(*) FROM awa.claim('lost', 10000, %s)", runtime)
    assert r.rig.counts("lost")["running"] == jobs
    course = []
    r.measure("rescue of the attempts of a session that ended",
              lambda: watch(r, worker, jobs, course), jobs, "one session", bare_name(jobs))
    flatness(r, jobs, course)
    finish(r, jobs)


def watch(r, worker, jobs, course):
    """Ends the session, and notes how many still run until none does."""
    start = time.monotonic()
    worker.close()

    def none_runs():
        running = r.rig.counts("lost")["running"]
        course.append((time.monotonic() - start, jobs - running))
        return running == 0

    wait_until(none_runs, 1200, what=lambda: f"the last rescue: {course[-1]}")


def flatness(r, jobs, course):
    """Whether the last tenth took longer than the first."""
    def when(share):
        return next(at for at, done in course if done >= jobs * share)

    r.note("rescue: until so many were rescued", {
        "first_seconds": next(at for at, done in course if done > 0),
        "tenth_seconds": when(0.1), "half_seconds": when(0.5), "nine_tenths_seconds": when(0.9),
        "all_seconds": when(1.0)})


def finish(r, jobs):
    """They come back after their backoff."""
    def all_done():
        acts.drain_in_one_call(r.rig.conn, "lost", 5000)
        counts = r.rig.counts("lost")
        return counts["available"] + counts["retryable"] + counts["running"] == 0

    wait_until(all_done, 600, what=lambda: f"all completed: {r.rig.counts('lost')}")
    r.rig.expect("lost", completed_total=jobs)


CELLS = [
    Cell("rescue", "1,600,000 attempts of a session that ended.", run,
         settings={"awa.max_open_claims": 1 << 21, "awa.max_timers": 65536}),
]
