"""complete, complete_many and complete_and_claim."""

import pytest

from harness import Background, claim, raises, wait_blocked

COUNTS = "SELECT available, running, completed_total FROM awa.queue_stats WHERE queue = 'default'"


def test_complete(db):
    job_id, = db.insert()
    job, = db.claim()
    assert db.value("SELECT awa.complete(%s)", job.receipt) in (None, "")
    found = db.job(job_id)
    assert (found.state, found.attempt) == ("completed", 1)
    assert found.finalized_at >= found.attempted_at
    assert db.row(COUNTS) == (0, 0, 1)


def test_complete_twice(db):
    db.insert()
    job, = db.claim()
    db.execute("SELECT awa.complete(%s)", job.receipt)
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.row(COUNTS) == (0, 0, 1)


@pytest.mark.parametrize("receipt", [0, 1, -1, 2**62, 2**63 - 1, -(2**63)])
def test_unknown_receipt(db, receipt):
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s::bigint)", receipt)
    assert db.row("SELECT * FROM awa.complete_many(%s::bigint[])", [receipt]) == (receipt, False)


def test_null_receipt(db):
    with raises("22023"):
        db.execute("SELECT awa.complete(NULL)")
    with raises("22023"):
        db.execute("SELECT awa.complete_many('{NULL}')")


def test_neighbours_of_a_claim_are_not_receipts(db):
    """A receipt is looked up: next to a claim's last item there is nothing."""
    db.insert(3)
    jobs = db.claim(max_jobs=3)
    last = max(job.receipt for job in jobs)
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", last + 1)
    assert db.count(state="running") == 3


def test_complete_many_reports_in_input_order(db):
    db.insert(4)
    receipts = [job.receipt for job in db.claim(max_jobs=4)]
    db.execute("SELECT awa.complete(%s)", receipts[1])
    asked = [receipts[3], 17, receipts[1], receipts[0], receipts[3], receipts[2]]
    assert db.rows("SELECT receipt, completed FROM awa.complete_many(%s)", asked) == [
        (receipts[3], True), (17, False), (receipts[1], False),
        (receipts[0], True), (receipts[2], True),
    ]
    assert db.row(COUNTS) == (0, 0, 4)
    assert db.rows("SELECT * FROM awa.complete_many('{}')") == []


def test_complete_many_over_claims_lanes_and_segments(db):
    for queue in "abc":
        db.insert(50, queue=queue)
    jobs = [job for queue in "abc" for _ in range(5) for job in db.claim(queue, 10)]
    receipts = [job.receipt for job in jobs][::-1]
    rows = db.rows("SELECT receipt, completed FROM awa.complete_many(%s)", receipts)
    assert rows == [(receipt, True) for receipt in receipts]


def test_complete_and_claim(db):
    ids = db.insert(5)
    jobs = db.claim(max_jobs=2)
    cur = db.execute(
        "SELECT * FROM awa.complete_and_claim(%s, 'default', 2)",
        [job.receipt for job in jobs] + [42],
    )
    assert [column.name for column in cur.description][:2] == ["receipt", "job_id"]
    assert [row[1] for row in cur.fetchall()] == ids[2:4]
    assert [db.state(job) for job in ids] == 2 * ["completed"] + 2 * ["running"] + ["available"]


def test_complete_and_claim_without_receipts_or_jobs(db):
    assert db.rows("SELECT * FROM awa.complete_and_claim('{}', 'default', 5)") == []
    db.insert()
    assert len(db.rows("SELECT * FROM awa.complete_and_claim('{}', 'default', 5)")) == 1


def test_complete_with_work_in_one_transaction(db):
    db.execute("CREATE TABLE results (job bigint)")
    db.insert(2)
    first, second = db.claim(max_jobs=2)
    conn = db.connect()
    conn.begin()
    conn.execute("INSERT INTO results VALUES (%s)", (first.job_id,))
    conn.execute("SELECT awa.complete(%s)", (first.receipt,))
    conn.commit_sql()
    db.execute("SELECT awa.complete(%s)", second.receipt)
    conn.begin()
    conn.execute("INSERT INTO results VALUES (%s)", (second.job_id,))
    with raises("AW001"):
        conn.execute("SELECT awa.complete(%s)", (second.receipt,))
    conn.commit_sql()
    assert db.column("SELECT job FROM results") == [first.job_id]


def test_second_close_waits_for_the_first_to_commit(db):
    db.insert()
    job, = db.claim()
    one, two = db.connect(), db.connect()
    one.begin()
    one.execute("SELECT awa.complete(%s)", (job.receipt,))
    with raises("AW001"):
        db_savepoint(one, "SELECT awa.complete(%s)", job.receipt)
    call = Background(two.execute, "SELECT awa.complete(%s)", (job.receipt,))
    wait_blocked(db.conn, two.pid)
    one.commit_sql()
    with raises("AW001"):
        call.result()


def test_second_close_goes_on_after_a_rollback(db):
    db.insert()
    job, = db.claim()
    one, two = db.connect(), db.connect()
    one.begin()
    one.execute("SELECT awa.complete(%s)", (job.receipt,))
    call = Background(two.execute, "SELECT awa.complete(%s)", (job.receipt,))
    wait_blocked(db.conn, two.pid)
    one.rollback_sql()
    call.result()
    assert db.state(job.job_id) == "completed"


def test_second_close_waits_for_a_savepoint(db):
    db.insert()
    job, = db.claim()
    one, two = db.connect(), db.connect()
    one.begin()
    one.execute("SAVEPOINT s")
    one.execute("SELECT awa.complete(%s)", (job.receipt,))
    call = Background(two.value, "SELECT completed FROM awa.complete_many(%s)", [job.receipt])
    wait_blocked(db.conn, two.pid)
    one.execute("ROLLBACK TO s")
    one.rollback_sql()
    assert call.result() is True


def test_close_of_an_uncommitted_claim_waits_for_it(db):
    """A receipt can reach another session before the claim's commit does."""
    db.insert()
    one, two = db.connect(), db.connect()
    one.begin()
    job, = claim(one)
    call = Background(two.execute, "SELECT awa.complete(%s)", (job.receipt,))
    wait_blocked(db.conn, two.pid)
    one.commit_sql()
    call.result()
    assert db.state(job.job_id) == "completed"


def test_lock_timeout_ends_the_wait(db):
    db.insert()
    job, = db.claim()
    one, two = db.connect(), db.connect()
    one.begin()
    one.execute("SELECT awa.complete(%s)", (job.receipt,))
    two.execute("SET lock_timeout = '50ms'")
    with raises("55P03"):
        two.execute("SELECT awa.complete(%s)", (job.receipt,))
    one.commit_sql()
    assert db.state(job.job_id) == "completed"


def test_opposite_orders_are_a_deadlock_that_is_seen(db):
    db.insert(2)
    a, b = (job.receipt for job in db.claim(max_jobs=2))
    one, two = db.connect(), db.connect()
    for conn, receipt in ((one, a), (two, b)):
        conn.begin()
        conn.execute("SELECT awa.complete(%s)", (receipt,))
    call = Background(one.execute, "SELECT awa.complete(%s)", (b,))
    wait_blocked(db.conn, one.pid)
    codes = []
    for attempt in (lambda: two.execute("SELECT awa.complete(%s)", (a,)), call.result):
        try:
            attempt()
        except Exception as error:
            codes.append(error.diag.sqlstate)
            (two if attempt != call.result else one).execute("ROLLBACK")
    assert codes.count("40P01") == 1, codes
    one.execute("ROLLBACK")
    two.execute("ROLLBACK")


def test_result_is_accepted(db):
    db.insert()
    job, = db.claim()
    db.execute("SELECT awa.complete(%s, '{\"sum\": 1.50}')", job.receipt)
    assert db.state(job.job_id) == "completed"


def test_claim_and_complete_in_one_transaction(db):
    job_id, = db.insert()
    conn = db.connect()
    for end in (conn.rollback_sql, conn.commit_sql):
        conn.begin()
        job, = claim(conn)
        conn.execute("SELECT awa.complete(%s)", (job.receipt,))
        end()
        expected = "available" if end == conn.rollback_sql else "completed"
        assert db.state(job_id) == expected


def db_savepoint(conn, query, *params):
    """Runs a statement that may fail without spoiling the transaction."""
    conn.execute("SAVEPOINT try")
    try:
        return conn.execute(query, params)
    finally:
        conn.execute("ROLLBACK TO try")
