"""retry_job, delete_job, retry_failed, discard_failed, retention and expiry."""

import pytest

from harness import Background, Database, raises, wait_blocked, wait_until


def fail(db, count=1, queue="default", kind="k", **columns):
    ids = db.insert(count, queue=queue, kind=kind, **columns)
    for job in db.claim(queue, max_jobs=count):
        db.execute("SELECT awa.fail(%s, 'broken', terminal => true)", job.receipt)
    return ids


def counts(db, queue="default"):
    return db.row(
        "SELECT available, running, failed_total, cancelled_total"
        " FROM awa.queue_stats WHERE queue = %s",
        queue,
    )


def retry(db, job_id, conn=None):
    return (conn or db.conn).value("SELECT awa.retry_job(%s)::text", job_id)


def delete(db, job_id):
    return db.value("SELECT awa.delete_job(%s)", job_id)


def test_retry_a_failed_job(db):
    job_id, = fail(db)
    before = db.job(job_id).run_lease
    assert retry(db, job_id) == "available"
    found = db.job(job_id)
    assert (found.state, found.attempt) == ("available", 0)
    assert "broken" in str(found.errors)
    assert counts(db) == (1, 0, 1, 0)
    job, = db.claim()
    assert (job.job_id, job.attempt) == (job_id, 1) and job.receipt > before
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.state(job_id) == "completed"


def test_retry_a_cancelled_job_again_and_again(db):
    job_id, = db.insert()
    for _ in range(3):
        db.execute("SELECT awa.cancel_job(%s)", job_id)
        assert db.state(job_id) == "cancelled"
        assert retry(db, job_id) == "available"
    assert [job.job_id for job in db.claim(max_jobs=9)] == [job_id]
    assert counts(db) == (0, 1, 0, 3)


def test_retry_refuses(db):
    job_id, = db.insert()
    with raises("55000"):
        retry(db, job_id)
    job, = db.claim()
    with raises("55000"):
        retry(db, job_id)
    db.execute("SELECT awa.complete(%s)", job.receipt)
    with raises("55000"):
        retry(db, job_id)
    with raises("P0002"):
        retry(db, 1)
    with raises("22023"):
        retry(db, None)


def test_retry_takes_the_key_again(db):
    first, = fail(db, unique_key="a")
    second, = db.insert(unique_key="a")
    assert second != first
    with raises("23505") as caught:
        retry(db, first)
    assert caught.error.diag.constraint_name == "idx_awa_jobs_unique"
    assert db.state(first) == "failed"
    db.execute("SELECT awa.cancel_job(%s)", second)
    assert retry(db, first) == "available"
    assert db.insert(unique_key="a") == [first]


def test_a_retry_that_rolls_back(db):
    job_id, = fail(db)
    conn = db.connect()
    conn.begin()
    retry(db, job_id, conn)
    conn.rollback_sql()
    assert db.state(job_id) == "failed" and db.claim() == []


def test_two_retries_revive_a_job_once(db):
    job_id, = fail(db)
    one, two = db.connect(), db.connect()
    one.begin()
    retry(db, job_id, one)
    other = Background(retry, db, job_id, two)
    wait_blocked(db.conn, two.info.backend_pid)
    one.commit_sql()
    with raises("55000"):
        other.result()
    assert len(db.claim(max_jobs=5)) == 1


def test_a_retried_job_survives_a_crash(own_db):
    job_id, = fail(own_db)
    retry(own_db, job_id)
    own_db.close_sessions()
    own_db.server.crash()
    own_db.wait_served()
    assert own_db.state(job_id) == "available" and counts(own_db) == (1, 0, 1, 0)
    assert [job.job_id for job in own_db.claim(max_jobs=5)] == [job_id]


def test_retry_failed(db):
    red = fail(db, 3, kind="red")
    blue = fail(db, 2, kind="blue")
    other = fail(db, 2, queue="other", kind="red")
    gone, = db.insert()
    db.execute("SELECT awa.cancel_job(%s)", gone)
    assert db.value("SELECT awa.retry_failed('default', 'red')") == 3
    assert sorted(job.job_id for job in db.claim(max_jobs=9)) == red
    assert db.value("SELECT awa.retry_failed(kind => 'red')") == 2
    assert sorted(job.job_id for job in db.claim("other", max_jobs=9)) == other
    assert db.value("SELECT awa.retry_failed()") == 2
    assert sorted(job.job_id for job in db.claim(max_jobs=9)) == blue
    assert db.value("SELECT awa.retry_failed()") == 0
    assert db.state(gone) == "cancelled"


def test_retry_failed_leaves_those_that_lost_their_key(db):
    first, = fail(db, unique_key="a")
    free, = fail(db)
    db.insert(unique_key="a")
    assert db.value("SELECT awa.retry_failed()") == 1
    assert (db.state(first), db.state(free)) == ("failed", "available")


def test_discard_failed(db):
    ids = fail(db, 3, kind="red")
    kept, = fail(db, kind="blue")
    assert db.value("SELECT awa.discard_failed(kind => 'red')") == 3
    assert [db.state(job_id) for job_id in ids] == [None] * 3
    assert db.state(kept) == "failed"
    assert counts(db) == (0, 0, 4, 0)


def test_a_discarded_job_frees_a_key_that_failed_jobs_hold(db):
    opts = {"unique_states": ["available", "running", "failed"]}
    job_id, = fail(db, unique_key="a", opts=opts)
    assert db.insert(unique_key="a", opts=opts) == [job_id]
    assert db.value("SELECT awa.discard_failed()") == 1
    assert db.insert(unique_key="a", opts=opts) != [job_id]


def test_delete(db):
    ready, kept = db.insert(2)
    later = db.value("SELECT awa.insert_job('k', run_at => now() + '1 h')")
    failed, = fail(db, queue="f")
    for job_id in (ready, later, failed):
        assert delete(db, job_id) is True
        assert db.state(job_id) is None
        with raises("P0002"):
            delete(db, job_id)
    assert [job.job_id for job in db.claim(max_jobs=5)] == [kept]
    with raises("55000"):
        delete(db, kept)
    job = db.job(kept)
    db.execute("SELECT awa.complete(%s)", job.run_lease)
    with raises("55000"):
        delete(db, kept)
    assert counts(db) == (0, 0, 0, 0)


@pytest.mark.parametrize("columns", [{}, {"run_at": "2100-01-01"}])
def test_delete_frees_the_key(db, columns):
    first, = db.insert(unique_key="a", **columns)
    delete(db, first)
    assert db.insert(unique_key="a") != [first]


def test_a_delete_that_rolls_back(db):
    ids = db.insert(3)
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.delete_job(%s)", (ids[1],))
    conn.rollback_sql()
    assert [job.job_id for job in db.claim(max_jobs=5)] == ids


def test_failed_retention(new_server):
    database = Database(new_server({"awa.failed_retention": "1s"}))
    opts = {"unique_states": ["available", "running", "failed"]}
    job_id, = fail(database, unique_key="a", opts=opts)
    gone, = database.insert()
    database.execute("SELECT awa.cancel_job(%s)", gone)
    wait_until(lambda: database.state(job_id) is None and database.state(gone) is None, 10)
    assert counts(database) == (0, 0, 1, 1)
    assert database.insert(unique_key="a", opts=opts) != [job_id]
    database.check()


def test_expiry_of_a_ready_job(db):
    late, = db.insert(opts={"expires_at": "2000-01-01"}, unique_key="a")
    fresh, = db.insert(opts={"expires_at": "2100-01-01"})
    assert [job.job_id for job in db.claim()] == [fresh]
    found = db.job(late)
    assert found.state == "cancelled" and "expired" in str(found.errors)
    assert counts(db) == (0, 1, 0, 1)
    assert db.insert(unique_key="a") != [late]


def test_only_expired_jobs(db):
    db.insert(3, opts={"expires_at": "2000-01-01"})
    assert db.claim(max_jobs=2) == []
    assert db.value("SELECT awa.claim_outcome()") == "empty"
    assert counts(db) == (0, 0, 0, 3)


def test_expiry_of_a_scheduled_job(db):
    job_id = db.value(
        "SELECT awa.insert_job('k', run_at => now() + '500 ms',"
        " opts => jsonb_build_object('expires_at', now() + '200 ms'))"
    )
    db.wait_state(job_id, "cancelled")
    assert "expired" in str(db.job(job_id).errors) and counts(db) == (0, 0, 0, 1)


def test_what_was_claimed_in_time_does_not_expire(db):
    db.execute(
        "SELECT awa.insert_job('k', opts => jsonb_build_object('expires_at', now() + '1 s'))"
    )
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'x', '1100 ms')", job.receipt)
    job, = wait_until(db.claim, 5)
    assert job.attempt == 2


@pytest.mark.parametrize("states", [["available"], ["running"], ["available", "cancelled"]])
def test_an_expired_job_leaves_its_key_as_its_states_say(db, states):
    opts = {"unique_states": states, "expires_at": "2000-01-01"}
    db.insert(unique_key="a", opts=opts)
    assert db.claim() == []
    db.check()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("call", [
    "awa.retry_job(%(id)s)", "awa.delete_job(%(id)s)", "awa.retry_failed()",
    "awa.discard_failed()", "awa.dlq_move(%(id)s, 'x')",
])
def test_a_job_that_failed_after_the_snapshot(db, level, call):
    """It is there, but this transaction cannot touch it: it has to begin again."""
    job_id, = db.insert()
    conn = db.connect()
    conn.execute(f"BEGIN ISOLATION LEVEL {level}")
    conn.execute("SELECT count(*) FROM awa.jobs")
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", db.claim()[0].receipt)
    with raises("40001"):
        conn.execute(f"SELECT {call}", {"id": job_id})
    conn.execute("ROLLBACK")
    assert db.state(job_id) == "failed"
