"""fail, release and extend."""

from datetime import timedelta

import pytest

from harness import claim, raises, wait_until


def seconds_until_due(db, job_id):
    return db.value(
        "SELECT extract(epoch FROM run_at - clock_timestamp())::float8 FROM awa.get_job(%s)", job_id
    )


def test_fail_backs_off_by_two_seconds_and_up_to_a_quarter(db):
    job_id, = db.insert()
    job, = db.claim()
    assert db.value("SELECT awa.fail(%s, 'broken')", job.receipt) == "retryable"
    found = db.job(job_id)
    assert (found.state, found.attempt) == ("retryable", 1)
    assert "broken" in str(found.errors)
    assert 1.5 < seconds_until_due(db, job_id) <= 2.5
    assert db.claim() == []
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)


def test_retry_after_zero_is_claimable_at_once(db):
    job_id, = db.insert()
    for attempt in range(1, 6):
        job, = wait_until(db.claim, 1)
        assert (job.job_id, job.attempt) == (job_id, attempt)
        db.execute("SELECT awa.fail(%s, 'again', retry_after => '0')", job.receipt)


def test_retry_after_zero_takes_less_than_50_ms(db):
    """The fastest of some: a loaded machine may be late, the engine may not."""
    fastest = timedelta(days=1)
    db.insert()
    for _ in range(10):
        job, = wait_until(db.claim, 1)
        failed = db.value(
            "SELECT clock_timestamp() FROM awa.fail(%s, 'again', '0')", job.receipt
        )
        job, = wait_until(db.claim, 1, every=0.001)
        fastest = min(fastest, db.value("SELECT clock_timestamp()") - failed)
        db.execute("SELECT awa.release(%s)", [job.receipt])
    assert fastest < timedelta(milliseconds=50)


@pytest.mark.parametrize("attempts", [2, 3, 6])
def test_backoff_doubles(db, attempts):
    job_id, = db.insert()
    for _ in range(attempts - 1):
        job, = wait_until(db.claim, 1)
        db.execute("SELECT awa.fail(%s, 'again', '0')", job.receipt)
    job, = wait_until(db.claim, 1)
    db.execute("SELECT awa.fail(%s, 'now for long')", job.receipt)
    assert 2**attempts - 1 < seconds_until_due(db, job_id) <= 2**attempts * 1.25


def test_backoff_never_overflows_up_to_attempt_1000(db):
    job_id = db.value("SELECT awa.insert_job('k', max_attempts => 1000)")
    db.execute("SET awa.claim_wait_max = '2s'")
    for attempt in range(1, 1001):
        job, = db.claim(wait="2 s")
        assert job.attempt == attempt
        if attempt in (43, 44, 45, 62, 63, 64, 500, 999):
            conn = db.connect()
            conn.begin()
            assert conn.value("SELECT awa.fail(%s, 'x')", job.receipt) == "retryable"
            due = conn.value(
                "SELECT run_at - clock_timestamp() FROM awa.get_job(%s)", job_id
            )
            conn.rollback_sql()
            conn.close()
            assert timedelta(hours=23) < due <= timedelta(hours=24)
        state = db.value("SELECT awa.fail(%s, 'x', '0')", job.receipt)
        assert state == ("retryable" if attempt < 1000 else "failed")
    assert db.state(job_id) == "failed"


def test_the_last_attempt_fails(db):
    job_id = db.value("SELECT awa.insert_job('k', max_attempts => 2)")
    for expected in ("retryable", "failed"):
        job, = wait_until(db.claim, 1)
        assert db.value("SELECT awa.fail(%s, 'why', '0')", job.receipt) == expected
    found = db.job(job_id)
    assert (found.state, found.attempt) == ("failed", 2)
    assert found.finalized_at is not None and "why" in str(found.errors)
    assert db.claim() == []
    assert db.value("SELECT failed_total FROM awa.queue_stats") == 1


def test_terminal(db):
    job_id, = db.insert()
    job, = db.claim()
    assert db.value("SELECT awa.fail(%s, 'no use', terminal => true)", job.receipt) == "failed"
    assert db.state(job_id) == "failed"


def test_fail_refuses(db):
    db.insert()
    job, = db.claim()
    with raises("22023"):
        db.execute("SELECT awa.fail(NULL, 'x')")
    with raises("22023"):
        db.execute("SELECT awa.fail(%s, 'x', retry_after => '-1 s')", job.receipt)
    with raises("AW001"):
        db.execute("SELECT awa.fail(%s, 'x')", job.receipt + 1)
    assert db.state(job.job_id) == "running"


def test_error_text_is_kept_to_8_kib(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, %s, terminal => true)", job.receipt, "é" * 100_000)
    text = str(db.job(job_id).errors)
    assert "éé" in text and len(text.encode()) < 9000


def test_errors_of_all_attempts_are_kept(db):
    """Those of retries in place, of one over the disk, and of the last one; each cut alone."""
    job_id, = db.insert(max_attempts=4)
    long = "x" * 10_000
    for error, delay in (("a", "0"), (long, "0"), ("c\\u0000 \\x \U0001f980", "0"), ("d", None)):
        wait_until(lambda: db.state(job_id) == "available", what="the job available")
        job, = db.claim()
        if error == long:
            # Progress goes to another body, and the errors so far with it.
            db.execute("SELECT awa.set_progress(%s, 50)", job.receipt)
        db.execute("SELECT awa.fail(%s, %s, retry_after => %s)", job.receipt, error, delay)
    found = db.job(job_id)
    assert found.state == "failed"
    texts = [entry["error"] for entry in found.errors]
    assert [entry["attempt"] for entry in found.errors] == [1, 2, 3, 4]
    assert all(entry["at"].endswith(("Z", "+00:00")) for entry in found.errors)
    assert (texts[0], texts[2], texts[3]) == ("a", "c\\u0000 \\x \U0001f980", "d")
    assert len(texts[1]) <= 8192 and texts[1].startswith("x" * 8000)
    assert texts[1].endswith("(cut, 10000 bytes in all)") and texts[1].count("cut") == 1
    attempts = db.rows("SELECT attempt, outcome, error FROM awa.job_attempts(%s)", job_id)
    assert [(n, error) for n, _, error in attempts] == list(enumerate(texts, 1))
    assert [outcome for _, outcome, _ in attempts] == ["retryable"] * 3 + ["failed"]
    dump = db.value("SELECT awa.dump_job(%s)", job_id)
    assert [a["error"] for a in dump["attempts"]] == [e["error"] for e in dump["errors"]] == texts


def test_long_delays_leave_the_hot_path_and_come_back(db):
    """Over a minute a job waits in deferred_jobs; the state is the same."""
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'later', '2 hours')", job.receipt)
    assert db.state(job_id) == "retryable"
    assert 7100 < seconds_until_due(db, job_id) <= 7200
    assert db.claim() == []


def test_fail_rolls_back(db):
    job_id, = db.insert()
    job, = db.claim()
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.fail(%s, 'x', '0')", (job.receipt,))
    conn.rollback_sql()
    assert db.state(job_id) == "running"
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_release_uses_no_attempt(db):
    ids = db.insert(3)
    for _ in range(3):
        jobs = wait_until(lambda: db.claim(max_jobs=3), 1)
        assert [job.attempt for job in jobs] == [1] * len(jobs)
        assert db.value("SELECT awa.release(%s)", [job.receipt for job in jobs]) == len(jobs)
    assert [db.state(job) for job in ids] == 3 * ["available"]
    assert [db.job(job).attempt for job in ids] == [0, 0, 0]


def test_release_counts_only_what_was_open(db):
    db.insert(3)
    jobs = db.claim(max_jobs=3)
    db.execute("SELECT awa.complete(%s)", jobs[0].receipt)
    receipts = [job.receipt for job in jobs]
    assert db.value("SELECT awa.release(%s)", [*receipts, 99, receipts[2]]) == 2
    assert db.value("SELECT awa.release(%s)", receipts) == 0
    assert db.value("SELECT awa.release('{}')") == 0


def test_released_job_can_be_claimed_in_the_same_transaction_only_after_commit(db):
    db.insert()
    job, = db.claim()
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.release(%s)", ([job.receipt],))
    assert claim(conn) == []
    conn.commit_sql()
    assert wait_until(lambda: claim(conn), 1)[0].job_id == job.job_id


def test_extend(db):
    db.insert(2)
    jobs = db.claim(max_jobs=2, deadline="1 hour")
    db.execute("SELECT awa.complete(%s)", jobs[1].receipt)
    rows = db.rows(
        "SELECT receipt, deadline_at FROM awa.extend(%s, '1 hour')",
        [jobs[1].receipt, jobs[0].receipt],
    )
    assert rows == [(jobs[0].receipt, jobs[0].deadline_at + timedelta(hours=1))]
    assert db.job(jobs[0].job_id).deadline_at == rows[0][1]
    with raises("22023"):
        db.execute("SELECT awa.extend(%s, '-1 s')", [jobs[0].receipt])


def test_extended_attempts_are_not_rescued(db):
    """Two claims with the same deadline: the one that is extended stays."""
    short, long = db.insert(2)
    jobs = db.claim(max_jobs=1, deadline="300 ms") + db.claim(max_jobs=1, deadline="300 ms")
    assert [job.job_id for job in jobs] == [short, long]
    db.execute("SELECT * FROM awa.extend(%s, '1 hour')", [jobs[1].receipt])
    db.wait_state(short, "retryable")
    assert db.state(long) == "running"
    db.execute("SELECT awa.complete(%s)", jobs[1].receipt)
