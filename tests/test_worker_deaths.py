"""The worker is killed, or its server stopped, in the middle of each of its steps."""

import signal
import time

import pytest
from psycopg.types.json import Jsonb

from harness import Background, Database, DebugPoints, Server, kill_backend, wait_until

WORKER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'awa worker' AND datname = %s"


@pytest.fixture(scope="module")
def room():
    server = Server({"awa.heartbeat_staleness": "1s"},
                    name="deaths", durable=True)
    # On the command line it could not be changed.
    del server.settings["awa.rotate_interval"]
    server.init().start()
    database = Database(server)
    yield database
    server.destroy()


def enqueue(db, queue, **columns):
    return db.value("SELECT job_id FROM awa.insert_jobs(%s)",
                    Jsonb([{"kind": "k", "queue": queue} | columns]))


def soon(db, millis):
    return db.value("SELECT (clock_timestamp() + %s * interval '1 ms')::text", millis)


def replay(db, queue):
    enqueue(db, queue)
    Background(db.connect().execute, "SELECT awa.rebuild()")
    return lambda: claims(db, queue)


def promote(db, queue):
    enqueue(db, queue, run_at=soon(db, 100))
    return lambda: claims(db, queue)


def fence(db, queue):
    enqueue(db, queue)
    runtime = db.value("SELECT awa.register_runtime('silent', 'heartbeat', '1 s')")
    db.claim(queue, runtime=runtime)
    return lambda: claims(db, queue)


def rescue_owner(db, queue):
    enqueue(db, queue)
    with db.server.connect(db.name) as conn:
        runtime = conn.value("SELECT awa.register_runtime('mortal')")
        db.claim(queue, conn=conn, runtime=runtime)
    return lambda: claims(db, queue)


def rescue_deadline(db, queue):
    enqueue(db, queue)
    db.claim(queue, deadline="50 ms")
    return lambda: claims(db, queue)


def rescue_callback(db, queue):
    enqueue(db, queue)
    (job,) = db.claim(queue, deadline="1 hour")
    db.execute("SELECT awa.register_callback(%s, '50 ms')", job.receipt)
    db.execute("SELECT awa.wait_for_callback(%s)", job.receipt)
    return lambda: db.state(job.job_id) != "waiting_external"


def note_ended(db, queue):
    with db.server.connect(db.name) as conn:
        runtime = conn.value("SELECT awa.register_runtime('mortal')")
    ended = "SELECT ended_at IS NOT NULL FROM awa.runtimes WHERE runtime = %s"
    return lambda: db.column(ended, runtime) != [False]


def retention(db, queue):
    job = enqueue(db, queue)
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", db.claim(queue)[0].receipt)
    # The worker looks now and then, and when a setting has changed.
    db.server.reload(awa__failed_retention="0")
    return lambda: db.state(job) is None


def turnover(db, queue):
    db.insert(30, queue=queue)
    receipts = [job.receipt for job in db.claim(queue, 30)]
    db.rows("SELECT * FROM awa.complete_many(%s)", receipts)
    return lambda: (db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = %s", queue) == 30
                    and db.count(queue) == 0)


def claims(db, queue):
    """The job is there for others, with a claim that works."""
    jobs = db.claim(queue, deadline="1 hour")
    for job in jobs:
        db.execute("SELECT awa.complete(%s)", job.receipt)
    return len(jobs) == 1


STEPS = {
    "replay": replay, "fence": fence, "promote": promote,
    "rescue_owner": rescue_owner, "rescue_deadline": rescue_deadline,
    "rescue_callback": rescue_callback, "runtimes": note_ended, "retention": retention, "rotate": turnover,
    "list": turnover, "truncate": turnover,
}
CASES = [(step, how) for step in STEPS for how in ("killed", "stopped")]
# Inside a step: the totals are written, and memory does not know yet. It waits for nobody.
CASES.append(("ends_counted", "killed"))


@pytest.mark.parametrize("step, how", CASES)
def test_dies_in_a_step(room, step, how):
    db, queue = room, f"{step}-{how}"
    work = STEPS.get(step, turnover)
    turns = work is turnover
    db.execute("SELECT awa.configure_queue(%s, '{\"backoff\": {\"base\": \"10 ms\"}}')", queue)
    db.server.reload(awa__rotate_interval="100ms" if turns else "1h",
                     awa__failed_retention=None)
    points = DebugPoints(db)
    points.arm(step)
    done = work(db, queue)
    points.wait(step, timeout=20)
    (pid,) = db.column(WORKER, db.name)
    if how == "killed":
        size = len(db.server.log())
        kill_backend(pid, signal.SIGKILL)
        db.server.wait_log("database system is ready to accept connections", since=size)
        db.server.boots += 1
    else:
        start = time.monotonic()
        db.server.stop()
        assert time.monotonic() - start < 5
        db.server.start()
    # The armed point was forgotten with the memory of the server.
    db.close_sessions()
    db.wait_served()
    wait_until(done, 20, what=f"{step} by the next worker")
    db.check()


def test_every_step_is_among_them(room):
    """A new step needs a line above, or a reason here."""
    known = {row[0] for row in room.rows("SELECT step FROM awa.maintain()")}
    # The receipts last for days, runtimes that ended for hours, and what is indexed has stayed
    # for long; "count" is the second half of what "ends_counted" stops, for
    # a memory short of room; the others write nothing.
    assert known - STEPS.keys() == {
        "receipts", "forget_runtimes", "index", "count", "doubts", "return", "control", "debug"}
