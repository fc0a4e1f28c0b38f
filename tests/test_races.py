"""Debug points: one backend stops in a window that is otherwise microseconds wide.

The names are those of the points in the engine. An armed point stops every
backend that comes by, until it is released.
"""

import contextlib
import signal

import psycopg
import pytest

from harness import Background, DebugPoints, claim, kill_backend, raises, wait_blocked, wait_until


@pytest.fixture
def points(db):
    return DebugPoints(db)


def test_visible_but_callback_not_run(db, points):
    """Committed rows that memory does not know yet: nobody takes them, nobody errs."""
    producer = db.connect()
    with points.at("commit_before_callback") as point:
        call = Background(producer.value, "SELECT awa.insert_job('k')")
        point.wait()
        assert db.value("SELECT count(*) FROM awa.jobs") == 1
        assert db.claim(max_jobs=10) == []
        # check() must wait for the callback rather than report a difference.
        checker = db.connect()
        checking = Background(checker.rows, "SELECT invariant, ok FROM awa.check()")
        wait_blocked(db.conn, checker.pid)
        point.release()
        job_id = call.result()
        assert all(ok for _, ok in checking.result())
    job, = db.claim(max_jobs=10)
    assert job.job_id == job_id


def test_visible_completion_but_callback_not_run(db, points):
    db.insert()
    job, = db.claim()
    closer, second = db.connect(), db.connect()
    with points.at("commit_before_callback") as point:
        call = Background(closer.execute, "SELECT awa.complete(%s)", (job.receipt,))
        point.wait()
        again = Background(second.execute, "SELECT awa.complete(%s)", (job.receipt,))
        wait_blocked(db.conn, second.pid)
        point.release()
        call.result()
        with raises("AW001"):
            again.result()


@pytest.mark.parametrize("end", ["go on", "cancel", "terminate"])
def test_popped_but_not_read(db, points, end):
    """Jobs in the hands of a claim that has not read them yet."""
    ids = db.insert(2)
    claimer = db.connect()
    with points.at("claim_popped") as point:
        call = Background(claim, claimer, "default", 2)
        point.wait()
        # Their rows are there for all to see, but they are nobody else's.
        assert db.count(state="available") == 2
        assert db.value("CALL awa.wait_for_jobs('{default}', '0')") is False
        if end == "cancel":
            db.execute("SELECT pg_cancel_backend(%s)", claimer.pid)
        elif end == "terminate":
            kill_backend(claimer.pid, signal.SIGTERM, wait=False)
        point.release()
    if end == "go on":
        assert [job.job_id for job in call.result()] == ids
    else:
        with pytest.raises(psycopg.Error):
            call.result()
        got = wait_until(lambda: db.claim(max_jobs=10))
        assert [job.job_id for job in got] == ids


@pytest.mark.parametrize("end", ["commit", "terminate"])
def test_closing_but_not_committed(db, points, end):
    """The owner of the attempt dies while another session is closing it."""
    owner = db.connect()
    runtime = owner.value("SELECT awa.register_runtime('r')")
    job_id, = db.insert()
    job, = claim(owner, runtime=runtime)
    closer = db.connect()
    with points.at("close_taken") as point:
        call = Background(closer.execute, "SELECT awa.complete(%s)", (job.receipt,))
        point.wait()
        owner.close()
        assert db.state(job_id) == "running"
        if end == "terminate":
            kill_backend(closer.pid, signal.SIGTERM, wait=False)
        point.release()
    if end == "commit":
        call.result()
        assert db.state(job_id) == "completed"
    else:
        db.wait_state(job_id, "retryable")


def test_lock_taken_but_not_truncated(db, points):
    """Producers, claimers and readers go on beside a truncation that is stuck."""
    db.insert(10)
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in db.claim(max_jobs=10)])
    maintainer = db.connect()
    with points.at("truncate_locked") as point:
        db.rows("SELECT * FROM awa.maintain()")  # seals; a second pass may truncate
        call = Background(maintainer.rows, "SELECT * FROM awa.maintain()")
        point.wait()
        ids = db.insert(5, queue="q")
        assert [job.job_id for job in db.claim("q", 10)] == ids
        point.release()
        call.result()
    assert [db.state(job) for job in ids] == 5 * ["running"]


def test_truncation_killed_under_its_lock(db, points):
    ids = db.insert(3, queue="kept")
    db.insert(10)
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in db.claim(max_jobs=10)])
    maintainer = db.connect()
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in db.claim("kept", 1)])
    rest = db.claim("kept", 2)
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in rest])
    with points.at("truncate_locked") as point:
        call = Background(maintainer.rows, "SELECT * FROM awa.maintain() UNION ALL SELECT * FROM awa.maintain()")
        point.wait()
        kill_backend(maintainer.pid, signal.SIGTERM, wait=False)
        point.release()
    # Terminated before or after its last statement's end: both are in order.
    with contextlib.suppress(psycopg.Error):
        call.result()
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'kept'") == len(ids)
