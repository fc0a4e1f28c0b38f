"""Every function in every isolation level: no stale answers, no serialization failures."""

import pytest

from harness import Background, claim, raises, wait_blocked, wait_until

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture(params=LEVELS)
def begin(request):
    def start(conn):
        conn.execute(f"BEGIN ISOLATION LEVEL {request.param}")
        conn.execute("SELECT 1")  # takes the snapshot

    return start


def test_claim_of_a_job_younger_than_the_snapshot(db, begin):
    conn = db.connect()
    begin(conn)
    job_id, = db.insert()
    job, = claim(conn)
    assert (job.job_id, job.args) == (job_id, {"n": 0})
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.commit_sql()
    assert db.state(job_id) == "completed"


def test_complete_of_a_claim_younger_than_the_snapshot(db, begin):
    conn = db.connect()
    begin(conn)
    db.insert()
    job, = db.claim()
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.commit_sql()
    assert db.state(job.job_id) == "completed"


def test_stale_receipt_closed_after_the_snapshot(db, begin):
    db.insert()
    job, = db.claim()
    conn = db.connect()
    begin(conn)
    db.execute("SELECT awa.complete(%s)", job.receipt)
    with raises("AW001"):
        conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.rollback_sql()


def test_unique_key_taken_after_the_snapshot(db, begin):
    conn = db.connect()
    begin(conn)
    holder = db.value("SELECT awa.insert_job('k', unique_key => 'u')")
    assert conn.value("SELECT awa.insert_job('k', unique_key => 'u')") == holder
    conn.commit_sql()


def test_concurrent_claims_and_completions_never_conflict(db, begin):
    """No 40001: what is decided in memory leaves no serialization trace."""
    db.insert(300)

    def work():
        conn = db.server.connect(db.name)
        done = 0
        while True:
            begin(conn)
            jobs = claim(conn, max_jobs=5)
            for job in jobs:
                conn.execute("SELECT awa.complete(%s)", (job.receipt,))
            conn.execute("SELECT awa.insert_job('extra', queue => 'other')")
            conn.commit_sql()
            done += len(jobs)
            if not jobs:
                conn.close()
                return done

    assert sum(call.result(60) for call in [Background(work) for _ in range(4)]) == 300


def test_second_close_waits_in_every_level(db, begin):
    db.insert()
    job, = db.claim()
    one, two = db.connect(), db.connect()
    begin(one)
    one.execute("SELECT awa.complete(%s)", (job.receipt,))
    begin(two)
    call = Background(two.execute, "SELECT awa.complete(%s)", (job.receipt,))
    wait_blocked(db.conn, two.pid)
    one.rollback_sql()
    call.result()
    two.commit_sql()
    assert wait_until(lambda: db.state(job.job_id) == "completed")


def test_read_only_transactions_read(db, begin):
    db.insert()
    conn = db.connect()
    conn.execute("BEGIN READ ONLY")
    assert conn.value("SELECT count(*) FROM awa.jobs") == 1
    assert conn.rows("SELECT * FROM awa.queue_stats")
    conn.execute("SAVEPOINT s")
    with raises("25006"):
        conn.execute("SELECT awa.insert_job('k')")
    conn.execute("ROLLBACK")
