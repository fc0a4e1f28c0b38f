"""snooze and cancel_attempt: what a worker may do with an attempt beside completing or failing it."""

import pytest

from harness import raises, wait_until


def counts(db, queue="default"):
    return db.row(
        "SELECT scheduled, available, running, retryable, cancelled_total"
        " FROM awa.queue_stats WHERE queue = %s",
        queue,
    )


def test_a_snoozed_job_is_scheduled_and_used_no_attempt(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.snooze(%s, '30 s')", job.receipt)
    found = db.job(job_id)
    assert (found.state, found.attempt, found.errors) == ("scheduled", 0, None)
    assert counts(db) == (1, 0, 0, 0, 0)
    assert db.claim() == []
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)


@pytest.mark.parametrize("delay", ["0", "300 ms"])
def test_a_short_snooze_comes_back_as_the_same_attempt(db, delay):
    job_id, = db.insert()
    for _ in range(3):
        job, = wait_until(db.claim, 3)
        assert (job.job_id, job.attempt) == (job_id, 1)
        db.execute("SELECT awa.snooze(%s, %s)", job.receipt, delay)
    wait_until(lambda: counts(db) == (0, 1, 0, 0, 0), 3)


def test_a_long_snooze_waits_on_disk(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.snooze(%s, '2 min')", job.receipt)
    assert db.rows("SELECT job_id, state::text, attempts FROM awa.deferred_jobs") == [
        (job_id, "scheduled", 0)
    ]
    assert db.state(job_id) == "scheduled"
    assert counts(db) == (1, 0, 0, 0, 0)


def test_attempts_before_a_snooze_still_count(db):
    db.value("SELECT awa.insert_job('k', max_attempts => 2)")
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'once', '0')", job.receipt)
    for _ in range(3):
        job, = wait_until(db.claim, 3)
        assert job.attempt == 2
        db.execute("SELECT awa.snooze(%s, '0')", job.receipt)
    job, = wait_until(db.claim, 3)
    assert db.value("SELECT awa.fail(%s, 'twice')", job.receipt) == "failed"


def test_a_snooze_that_rolls_back(db):
    job_id, = db.insert()
    job, = db.claim()
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.snooze(%s, '1 s')", (job.receipt,))
    conn.rollback_sql()
    assert db.state(job_id) == "running"
    db.execute("SELECT awa.complete(%s)", job.receipt)


@pytest.mark.parametrize("end", ["restart", "crash"])
def test_a_snooze_survives(own_db, end):
    short, long = own_db.insert(2)
    for job, delay in zip(own_db.claim(max_jobs=2), ("50 s", "1 h"), strict=True):
        own_db.execute("SELECT awa.snooze(%s, %s)", job.receipt, delay)
    own_db.close_sessions()
    if end == "restart":
        own_db.server.restart()
    else:
        own_db.server.crash()
    own_db.wait_served()
    assert [own_db.state(short), own_db.state(long)] == ["scheduled", "scheduled"]
    assert counts(own_db) == (2, 0, 0, 0, 0)


def test_a_key_that_scheduled_jobs_do_not_hold_moves_with_a_snooze(db):
    opts = '{"unique_states": ["available", "running"]}'
    first = db.value("SELECT awa.insert_job('k', unique_key => 'a', opts => %s)", opts)
    job, = db.claim()
    db.execute("SELECT awa.snooze(%s, '300 ms')", job.receipt)
    second = db.value("SELECT awa.insert_job('k', unique_key => 'a', opts => %s)", opts)
    assert second != first
    db.wait_state(first, "cancelled")


def test_snooze_refuses(db):
    db.insert()
    job, = db.claim()
    for arguments in ((None, "1 s"), (job.receipt, None), (job.receipt, "-1 s")):
        with raises("22023"):
            db.execute("SELECT awa.snooze(%s, %s)", *arguments)
    with raises("AW001"):
        db.execute("SELECT awa.snooze(%s, '1 s')", job.receipt + 1)


def test_cancel_attempt(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.cancel_attempt(%s, 'no longer wanted')", job.receipt)
    found = db.job(job_id)
    assert (found.state, found.attempt) == ("cancelled", 1)
    assert "no longer wanted" in str(found.errors) and found.finalized_at is not None
    assert counts(db) == (0, 0, 0, 0, 1)
    assert db.claim() == []
    with raises("AW001"):
        db.execute("SELECT awa.cancel_attempt(%s, 'again')", job.receipt)


def test_cancel_attempt_without_a_reason_leaves_no_error(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.cancel_attempt(%s, NULL)", job.receipt)
    assert (db.state(job_id), db.job(job_id).errors) == ("cancelled", None)


def test_cancel_attempt_frees_the_key(db):
    first = db.value("SELECT awa.insert_job('k', unique_key => 'a')")
    job, = db.claim()
    db.execute("SELECT awa.cancel_attempt(%s, 'x')", job.receipt)
    assert db.value("SELECT awa.insert_job('k', unique_key => 'a')") != first


def test_cancel_attempt_refuses(db):
    with raises("22023"):
        db.execute("SELECT awa.cancel_attempt(NULL, 'x')")
    with raises("AW001"):
        db.execute("SELECT awa.cancel_attempt(1, 'x')")
