"""A request to stop ends the waits of the owner at once."""

import signal
import time

import pytest
from harness import Background, claim, kill_backend, raises, wait_in, wait_until

LONG = "60 s"


@pytest.fixture(params=["wait_for_jobs", "claim"])
def kind(request, db):
    db.execute(f"ALTER DATABASE {db.name} SET awa.claim_wait_max = '{LONG}'")
    return request.param


def owner(db, count=1, liveness="session"):
    """A session with a runtime, and its attempts."""
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime('w', %s)", liveness)
    db.insert(count, queue="mine")
    return conn, runtime, claim(conn, "mine", count, runtime=runtime)


def wait(conn, kind, runtime=None):
    """The wait of a worker: whether it came back with something to do."""
    if kind == "wait_for_jobs":
        return conn.value("CALL awa.wait_for_jobs('{mine}', %s)", LONG)
    return bool(claim(conn, "mine", runtime=runtime, wait=LONG))


def waiting(db, conn, kind, runtime=None):
    call = Background(wait, conn, kind, runtime)
    wait_in(db.conn, conn.pid, kind)
    wait_until(lambda: db.value(
        "SELECT wait_event_type IN ('Extension', 'IPC', 'Timeout') FROM pg_stat_activity"
        " WHERE pid = %s", conn.pid))
    return call


def ask(db, job):
    assert db.value("SELECT awa.cancel_job(%s)::text", job.job_id) == "running"


def asked(conn, runtime):
    return conn.column("SELECT receipt FROM awa.heartbeat(%s)", runtime)


@pytest.mark.parametrize("liveness", ["session", "heartbeat"])
def test_a_waiting_owner_is_told_at_once(db, kind, liveness):
    conn, runtime, (job,) = owner(db, liveness=liveness)
    call = waiting(db, conn, kind, runtime)
    start = time.monotonic()
    ask(db, job)
    assert call.result(5) is False
    assert time.monotonic() - start < 2
    assert asked(conn, runtime) == [job.receipt]
    assert conn.column("SELECT awa.cancel_requested(%s)", [job.receipt]) == [job.receipt]
    if kind == "claim":
        assert conn.value("SELECT awa.claim_outcome()") == "empty"


def test_it_waits_on_afterwards(db, kind):
    """A request ends one wait; who goes on with its attempt is not disturbed again."""
    conn, runtime, (job,) = owner(db)
    call = waiting(db, conn, kind, runtime)
    ask(db, job)
    assert call.result(5) is False
    call = waiting(db, conn, kind, runtime)
    ask(db, job)
    db.insert(queue="mine")
    assert call.result(5) is True


def test_nobody_else_is(db, kind):
    conn, runtime, (job,) = owner(db)
    other, its, _ = owner(db)
    call, others = waiting(db, conn, kind, runtime), waiting(db, other, kind, its)
    lease = waiting(db, db.connect(), kind)
    ask(db, job)
    assert call.result(5) is False
    assert not others.done and not lease.done
    db.insert(2, queue="mine")
    assert others.result(5) and lease.result(5)


def test_a_request_between_two_waits_ends_the_next_one(db, kind):
    conn, runtime, (job,) = owner(db)
    ask(db, job)
    start = time.monotonic()
    assert wait(conn, kind, runtime) is False
    assert time.monotonic() - start < 5
    call = waiting(db, conn, kind, runtime)
    db.insert(queue="mine")
    assert call.result(5) is True


def test_a_heartbeat_before_the_wait_has_told_it(db, kind):
    conn, runtime, (job,) = owner(db)
    ask(db, job)
    assert asked(conn, runtime) == [job.receipt]
    call = waiting(db, conn, kind, runtime)
    db.insert(queue="mine")
    assert call.result(5) is True


def test_jobs_that_are_there_come_first(db, kind):
    conn, runtime, (job,) = owner(db)
    ask(db, job)
    db.insert(queue="mine")
    assert wait(conn, kind, runtime) is True
    if kind == "wait_for_jobs":
        db.claim("mine")
    assert wait(conn, kind, runtime) is False


def test_at_the_commit_and_not_for_a_rollback(db, kind):
    conn, runtime, jobs = owner(db, 2)
    call = waiting(db, conn, kind, runtime)
    other = db.connect()
    other.begin()
    other.execute("SELECT awa.cancel_job(%s)", (jobs[0].job_id,))
    assert not call.done
    other.rollback_sql()
    other.begin()
    other.execute("SELECT awa.cancel_job(%s)", (jobs[1].job_id,))
    assert not call.done
    other.commit_sql()
    assert call.result(5) is False
    assert asked(conn, runtime) == [jobs[1].receipt]


def test_a_claim_in_another_session_that_names_the_runtime(db):
    """As behind a pool of connections."""
    db.execute(f"ALTER DATABASE {db.name} SET awa.claim_wait_max = '{LONG}'")
    conn, runtime, (job,) = owner(db, liveness="heartbeat")
    other = db.connect()
    here, there = waiting(db, conn, "wait_for_jobs"), waiting(db, other, "claim", runtime)
    ask(db, job)
    assert there.result(5) is False and here.result(5) is False


def test_a_key_names_the_job(db, kind):
    conn, runtime, _ = owner(db)
    db.execute("SELECT awa.insert_job('k', queue => 'mine', unique_key => 'u')")
    (job,) = claim(conn, "mine", runtime=runtime)
    call = waiting(db, conn, kind, runtime)
    assert db.value("SELECT awa.cancel_by_unique_key('u')") == job.job_id
    assert call.result(5) is False


def test_a_woken_waiter_that_was_told_passes_the_job_on(db, kind):
    """A job and a request at the same time: whoever waits behind gets the job."""
    conn, runtime, (job,) = owner(db)
    first = waiting(db, conn, kind, runtime)
    second = waiting(db, db.connect(), kind)
    other = db.connect()
    other.begin()
    other.execute("SELECT awa.cancel_job(%s)", (job.job_id,))
    other.execute("SELECT awa.insert_job('k', queue => 'mine')")
    other.commit_sql()
    assert first.result(5) is False and second.result(5) is True


def test_the_end_of_a_session_that_waits(db, kind):
    conn, runtime, (job,) = owner(db)
    call = waiting(db, conn, kind, runtime)
    kill_backend(conn.pid, signal.SIGTERM)
    with raises("57P01"):
        call.result(5)
    db.wait_state(job.job_id, "retryable")
