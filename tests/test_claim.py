"""claim and claim_from: order, batches, arguments, and what a job looks like when claimed."""

from collections import Counter
from datetime import timedelta

import pytest

from harness import Background, claim, raises, wait_until

COLUMNS = (
    "receipt job_id kind queue priority attempt max_attempts args metadata tags"
    " progress run_at created_at deadline_at"
).split()


def complete(db, jobs):
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs])


def test_columns(db):
    job_id, = db.insert()
    before = db.value("SELECT clock_timestamp()")
    cur = db.execute("SELECT * FROM awa.claim('default')")
    assert [column.name for column in cur.description] == COLUMNS
    row = dict(zip(COLUMNS, cur.fetchone(), strict=True))
    assert (row["job_id"], row["kind"], row["queue"]) == (job_id, "k", "default")
    assert (row["attempt"], row["args"], row["progress"]) == (1, {"n": 0}, None)
    assert timedelta(minutes=4) < row["deadline_at"] - before < timedelta(minutes=6)
    assert row["created_at"] <= before and row["run_at"] <= before
    job = db.job(job_id)
    assert (job.state, job.attempt, job.run_lease) == ("running", 1, row["receipt"])
    assert job.deadline_at == row["deadline_at"] and job.attempted_at >= before


def test_unused_queue_gives_nothing(db):
    assert db.claim("never used", 10) == []
    assert db.value("SELECT count(*) FROM awa.queue_stats WHERE queue = 'never used'") == 0


def test_fifo_in_a_lane(db):
    ids = db.insert(3000)
    got = []
    while jobs := db.claim(max_jobs=700):
        got += [job.job_id for job in jobs]
        complete(db, jobs)
    assert got == ids


def test_priority_first_then_fifo(db):
    order = [3, 1, 4, 2, 1, 3, 2, 4]
    ids = [db.value("SELECT awa.insert_job('k', priority => %s)", p) for p in order]
    expected = [id for _, id in sorted(zip(order, ids, strict=True))]
    got = [db.claim()[0].job_id for _ in order[:3]]
    got += [job.job_id for job in db.claim(max_jobs=100)]
    assert got == expected


def test_receipts_are_unique_and_exceed_doubles(db):
    db.insert(500)
    receipts = [job.receipt for _ in range(5) for job in db.claim(max_jobs=100)]
    assert len(set(receipts)) == 500
    assert all(receipt > 2**53 for receipt in receipts)


def test_max_jobs(db):
    db.insert(20)
    assert len(db.claim(max_jobs=None)) == 1
    assert db.claim(max_jobs=0) == []
    assert len(db.claim(max_jobs=7)) == 7
    assert len(db.claim(max_jobs=10_000)) == 12
    for bad in (-1, 10_001):
        with raises("22023"):
            db.claim(max_jobs=bad)


def test_one_call_is_one_claim(db):
    """LIMIT and an unread cursor do not shrink it: every popped job is claimed."""
    db.insert(10)
    db.rows("SELECT receipt FROM awa.claim('default', 5) LIMIT 1")
    assert db.count(state="running") == 5
    conn = db.connect()
    conn.begin()
    conn.execute("DECLARE c CURSOR FOR SELECT receipt FROM awa.claim('default', 5)")
    conn.execute("FETCH 1 FROM c")
    conn.commit_sql()
    assert db.count(state="running") == 10


def test_deadline_argument(db):
    db.insert(2)
    job, = db.claim(deadline="1 hour")
    now = db.value("SELECT clock_timestamp()")
    assert timedelta(minutes=59) < job.deadline_at - now < timedelta(minutes=61)
    for bad in ("-1 second", "0"):
        with raises("22023"):
            db.claim(deadline=bad)
    assert db.count(state="available") == 1


def test_no_deadline_needs_a_runtime(db):
    runtime = db.value("SELECT awa.register_runtime('r')")
    db.insert()
    job, = db.claim(runtime=runtime, deadline="0")
    assert job.deadline_at is None
    assert db.job(job.job_id).deadline_at is None
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_deadline_of_the_job(db):
    db.execute("SELECT awa.insert_job('k', opts => '{\"deadline\": \"2 hours\"}')")
    job, = db.claim()
    now = db.value("SELECT clock_timestamp()")
    assert timedelta(minutes=119) < job.deadline_at - now < timedelta(minutes=121)


def test_a_passed_deadline_is_rescued(db):
    job_id, = db.insert()
    job, = db.claim(deadline="50 ms")
    db.wait_state(job_id, "retryable")
    found = db.job(job_id)
    assert found.attempt == 1
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)
    delay = found.run_at - db.value("SELECT clock_timestamp()")
    assert timedelta(0) < delay < timedelta(seconds=2.6)


def test_the_last_attempt_that_passes_its_deadline_fails(db):
    job_id = db.value("SELECT awa.insert_job('k', max_attempts => 1)")
    db.claim(deadline="50 ms")
    db.wait_state(job_id, "failed")


def test_unknown_runtime(db):
    db.insert()
    with raises("AW002"):
        db.claim(runtime="00000000-0000-4000-8000-000000000000")
    assert db.count(state="available") == 1


def test_claim_from_takes_over_several_queues(db):
    low = db.insert(2, queue="a", priority=4)
    high = db.insert(2, queue="b", priority=1)
    mid = db.insert(2, queue="c", priority=2)
    rows = db.rows("SELECT queue, job_id FROM awa.claim_from('{a,b,c,nothing}', 10)")
    # Several calls' worth may be needed: fewer than max_jobs is allowed.
    while len(rows) < 6:
        more = db.rows("SELECT queue, job_id FROM awa.claim_from('{a,b,c,nothing}', 10)")
        assert more
        rows += more
    assert [job for _, job in rows] == high + mid + low
    assert {(queue, job) for queue, job in rows} == (
        {("a", j) for j in low} | {("b", j) for j in high} | {("c", j) for j in mid}
    )
    assert db.rows("SELECT * FROM awa.claim_from('{}', 10)") == []


def test_a_queue_named_twice_is_one_queue(db):
    db.insert(3, queue="a")
    assert len(db.rows("SELECT * FROM awa.claim_from('{a,a}', 10)")) == 3


def test_paused_queue(db):
    db.insert(2, queue="q")
    assert db.value("SELECT awa.pause_queue('q', 'me')") is True
    assert db.value("SELECT awa.pause_queue('q')") is False
    assert db.claim("q") == []
    assert db.value("SELECT paused FROM awa.queue_stats WHERE queue = 'q'")
    db.insert(1, queue="q")
    assert db.value("SELECT awa.resume_queue('q')") is True
    assert db.value("SELECT awa.resume_queue('q')") is False
    assert len(db.claim("q", 10)) == 3


def test_a_paused_queue_still_completes(db):
    db.insert(1, queue="q")
    job, = db.claim("q")
    db.execute("SELECT awa.pause_queue('q')")
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.state(job.job_id) == "completed"


def test_pause_and_prepare_create_the_queue(db):
    db.execute("SELECT awa.prepare_queue('p')")
    db.execute("SELECT awa.pause_queue('s')")
    assert db.rows("SELECT queue, paused FROM awa.queue_stats ORDER BY 1") == [
        ("p", False), ("s", True),
    ]


def test_wait_wakes_on_commit(db):
    other = db.connect()
    call = Background(claim, other, "q", 1, wait="10 s")
    wait_until(
        lambda: db.value("SELECT state FROM pg_stat_activity WHERE pid = %s", other.pid) == "active"
    )
    job_id, = db.insert(queue="q")
    job, = call.result(10)
    assert job.job_id == job_id


def test_wait_is_capped(db):
    db.execute("SET awa.claim_wait_max = '100ms'")
    start = db.value("SELECT clock_timestamp()")
    assert db.claim("q", wait="1 hour") == []
    assert db.value("SELECT clock_timestamp()") - start < timedelta(seconds=1.5)
    with raises("22023"):
        db.claim("q", wait="-1 s")


def test_claim_outcome_counts_rollback_as_no_attempt(db):
    job_id, = db.insert()
    conn = db.connect()
    for _ in range(3):
        conn.begin()
        assert len(claim(conn)) == 1
        conn.rollback_sql()
    assert (db.job(job_id).state, db.job(job_id).attempt) == ("available", 0)
    job, = wait_until(lambda: claim(conn))
    assert job.attempt == 1


@pytest.mark.parametrize("claimers", [8])
def test_parallel_claimers_never_share_a_job(db, claimers):
    ids = db.insert(4000)

    def drain():
        conn = db.server.connect(db.name)
        mine = []
        while jobs := claim(conn, max_jobs=37):
            mine += [job.job_id for job in jobs]
            conn.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs])
        conn.close()
        return mine

    calls = [Background(drain) for _ in range(claimers)]
    seen = Counter(job for call in calls for job in call.result(60))
    assert seen == Counter(ids)


def test_claims_in_one_transaction_add_up(db):
    db.insert(10)
    conn = db.connect()
    conn.begin()
    jobs = claim(conn, max_jobs=4) + claim(conn, max_jobs=4)
    conn.commit_sql()
    assert len({job.receipt for job in jobs}) == 8
    complete(db, jobs)
    assert db.count(state="available") == 2


def test_read_only_transaction(db):
    db.insert()
    conn = db.connect()
    conn.execute("SET default_transaction_read_only = on")
    for call in ("awa.claim('default')", "awa.insert_job('k')", "awa.complete(1)"):
        with raises("25006"):
            conn.execute(f"SELECT * FROM {call}")
    assert len(conn.rows("SELECT * FROM awa.jobs")) == 1
    assert db.count(state="available") == 1


def test_claim_under_a_statement_timeout(db):
    """A timeout in a waiting claim loses nothing."""
    conn = db.connect()
    conn.execute("SET statement_timeout = '100ms'")
    with raises("57014"):
        claim(conn, "q", wait="2 s")
    db.insert(queue="q")
    assert len(claim(conn, "q")) == 1


def test_expired_waiter_takes_nothing(db):
    conn = db.connect()
    claim(conn, "q", wait="50 ms")
    db.insert(queue="q")
    assert len(db.claim("q")) == 1


def test_a_claim_can_be_extended_before_it_commits(db):
    db.insert()
    conn = db.connect()
    conn.begin()
    job, = db.claim(conn=conn, deadline="1 minute")
    (receipt, deadline), = conn.rows("SELECT * FROM awa.extend(%s, '1 hour')", [job.receipt])
    assert receipt == job.receipt and deadline > job.deadline_at
    conn.commit_sql()
    db.execute("SELECT awa.complete(%s)", job.receipt)
