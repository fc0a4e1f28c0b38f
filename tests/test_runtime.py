"""Session runtimes: their attempts come back the moment their session ends, however it ends."""

import signal
import time

import pytest

from harness import claim, kill_backend, raises, wait_until


def registered(db, **arguments):
    conn = db.connect()
    return conn, conn.value("SELECT awa.register_runtime('worker')")


def test_register_and_deregister(db):
    conn, runtime = registered(db)
    ids = db.insert(3)
    jobs = claim(conn, max_jobs=2, runtime=runtime)
    conn.execute("SELECT awa.complete(%s)", (jobs[0].receipt,))
    assert conn.value("SELECT awa.deregister_runtime(%s)", runtime) == 1
    assert [db.state(job) for job in ids] == ["completed", "available", "available"]
    assert db.job(ids[1]).attempt == 0
    with raises("AW002"):
        claim(conn, runtime=runtime)
    with raises("AW001"):
        conn.execute("SELECT awa.complete(%s)", (jobs[1].receipt,))


def test_deregister_without_release(db):
    conn, runtime = registered(db)
    db.insert()
    job, = claim(conn, runtime=runtime)
    assert conn.value("SELECT awa.deregister_runtime(%s, false)", runtime) == 0
    assert db.state(job.job_id) == "running"
    conn.close()
    db.execute("SELECT awa.complete(%s)", job.receipt)


@pytest.mark.parametrize("how", ["close", "terminate", "vanish", "reset"])
def test_the_end_of_the_session_rescues_at_once(db, how):
    conn, runtime = registered(db)
    job_id, = db.insert()
    job, = claim(conn, runtime=runtime)
    start = time.monotonic()
    if how == "close":
        conn.close()
    elif how == "terminate":
        kill_backend(conn.pid, signal.SIGTERM)
    elif how == "vanish":
        conn.pgconn.finish()
    else:
        # DISCARD ALL is not the end of a session.
        conn.execute("DISCARD ALL")
        assert db.state(job_id) == "running"
        conn.execute("SELECT awa.complete(%s)", (job.receipt,))
        return
    db.wait_state(job_id, "retryable", 5)
    assert time.monotonic() - start < 3
    found = db.job(job_id)
    assert found.attempt == 1
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)
    with raises("AW002"):
        db.claim(runtime=runtime)


def test_a_rescued_job_runs_again_after_its_backoff(db):
    conn, runtime = registered(db)
    job_id, = db.insert()
    claim(conn, runtime=runtime)
    conn.close()
    db.wait_state(job_id, "retryable")
    start = time.monotonic()
    job, = wait_until(db.claim, 5)
    assert 1.5 < time.monotonic() - start < 3.5
    assert (job.job_id, job.attempt) == (job_id, 2)


def test_the_last_attempt_of_a_dead_owner_fails(db):
    conn, runtime = registered(db)
    job_id = db.value("SELECT awa.insert_job('k', max_attempts => 1)")
    claim(conn, runtime=runtime)
    conn.close()
    db.wait_state(job_id, "failed")


def test_only_the_dead_owners_attempts_come_back(db):
    (one, runtime), (two, other) = registered(db), registered(db)
    ids = db.insert(6)
    mine = claim(one, max_jobs=2, runtime=runtime)
    theirs = claim(two, max_jobs=2, runtime=other)
    leases = db.claim(max_jobs=2)
    one.close()
    for job in mine:
        db.wait_state(job.job_id, "retryable")
    assert [db.state(job) for job in ids] == 2 * ["retryable"] + 4 * ["running"]
    for job in theirs + leases:
        db.execute("SELECT awa.complete(%s)", job.receipt)


def test_thousands_of_attempts_come_back_within_a_second(db):
    conn, runtime = registered(db)
    db.insert(10_000)
    assert len(claim(conn, max_jobs=10_000, runtime=runtime)) == 10_000
    conn.close()
    start = time.monotonic()
    wait_until(
        lambda: db.value("SELECT running FROM awa.queue_stats WHERE queue = 'default'") == 0, 10
    )
    assert time.monotonic() - start < 3
    assert db.count(state="retryable") == 10_000


def test_a_plain_lease_outlives_its_session(db):
    conn = db.connect()
    job_id, = db.insert()
    job, = claim(conn)
    pid = conn.pid
    conn.close()
    wait_until(lambda: not db.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid))
    assert db.state(job_id) == "running"
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_a_runtime_may_be_named_from_any_session(db):
    conn, runtime = registered(db)
    job_id, = db.insert()
    db.claim(runtime=runtime)
    conn.close()
    db.wait_state(job_id, "retryable")


def test_a_session_that_ends_while_it_completes(db):
    """The close is undone with its transaction, then the owner is found dead."""
    conn, runtime = registered(db)
    job_id, = db.insert()
    job, = claim(conn, runtime=runtime)
    conn.begin()
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    kill_backend(conn.pid, signal.SIGTERM)
    db.wait_state(job_id, "retryable")


def test_another_session_completing_is_not_disturbed(db):
    """Its close is in flight when the owner dies: the close wins."""
    conn, runtime = registered(db)
    job_id, = db.insert()
    job, = claim(conn, runtime=runtime)
    other = db.connect()
    other.begin()
    other.execute("SELECT awa.complete(%s)", (job.receipt,))
    pid = conn.pid
    conn.close()
    wait_until(lambda: not db.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid))
    other.commit_sql()
    assert db.state(job_id) == "completed"


def test_rolled_back_close_of_a_dead_owner_is_rescued(db):
    """The abort that reopens the item queues the owner pass again."""
    conn, runtime = registered(db)
    job_id, = db.insert()
    job, = claim(conn, runtime=runtime)
    other = db.connect()
    other.begin()
    other.execute("SELECT awa.complete(%s)", (job.receipt,))
    pid = conn.pid
    conn.close()
    wait_until(lambda: not db.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid))
    other.rollback_sql()
    db.wait_state(job_id, "retryable")


def test_registration_rolls_back(db):
    conn = db.connect()
    conn.begin()
    runtime = conn.value("SELECT awa.register_runtime('r')")
    conn.rollback_sql()
    db.insert()
    with raises("AW002"):
        claim(conn, runtime=runtime)


def test_several_runtimes_in_one_session(db):
    conn, one = registered(db)
    two = conn.value("SELECT awa.register_runtime('second')")
    assert one != two
    ids = db.insert(2)
    claim(conn, runtime=one)
    claim(conn, runtime=two)
    conn.execute("SELECT awa.deregister_runtime(%s)", (one,))
    assert [db.state(job) for job in ids] == ["available", "running"]
    conn.close()
    db.wait_state(ids[1], "retryable")


def test_refuses(db):
    for arguments in ("liveness => 'hope'", "opts => '{\"x\": 1}'", "heartbeat_timeout => '-1 s'"):
        with raises("22023"):
            db.execute(f"SELECT awa.register_runtime('r', {arguments})")
