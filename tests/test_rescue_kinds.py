"""What all three passes keep: limits, a transaction a batch, bad rows, no gate."""

import pytest
from harness import wait_until
from test_rescue import sizes, wait_sizes

HOUR = "1 hour"
KINDS = ("owner", "deadline", "callback")


def wait_counted(db, kind, attempts):
    """Over all passes; see wait_sizes."""
    wait_until(lambda: sum(count for _, _, count in sizes(db, kind)) == attempts)


def lose(db, kind, count, queue="default"):
    """New jobs whose attempts are lost, all at one moment."""
    db.insert(count, queue=queue)
    abandon(db, kind, count, queue)


def abandon(db, kind, count, queue="default"):
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime('lost')") if kind == "owner" else None
    deadline = {"owner": "0", "deadline": "200 ms", "callback": HOUR}[kind]
    jobs = db.claim(queue, count, conn=conn, runtime=runtime, deadline=deadline)
    receipts = [job.receipt for job in jobs]
    if kind == "callback":
        each = " FROM unnest(%s::bigint[]) r"
        conn.execute(f"SELECT awa.register_callback(r, '1 hour'){each}", (receipts,))
        conn.execute(f"SELECT awa.wait_for_callback(r){each}", (receipts,))
        conn.execute("SELECT awa.heartbeat_callback(callback_id, '1 us') FROM awa.jobs"
                     " WHERE queue = %s AND callback_id IS NOT NULL", (queue,))
    conn.close()


def lost(db, queue="default"):
    return db.value(
        "SELECT coalesce(sum(running + waiting_external), 0)::int FROM awa.queue_stats"
        " WHERE queue = %s", queue)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_ends_at_max_rows_and_the_next_one_follows(rescue_by_hand, kind):
    db = rescue_by_hand(rescue_batch_size="100", rescue_pass_max_rows="250")
    lose(db, kind, 600)
    wait_until(lambda: lost(db) == 0, 20)
    # 100 + 100 + 50, a second's rest, again, and what is left
    wait_sizes(db, kind, [("drained", 1, 100), ("max_rows", 2, 500)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("knob", ["rescue_pass_max_rows", "rescue_pass_budget"])
def test_zero_is_one_batch_an_interval(rescue_by_hand, knob, kind):
    db = rescue_by_hand(rescue_batch_size="100", **{knob: "0"})
    lose(db, kind, 300)
    wait_until(lambda: lost(db) == 200)
    # What is lost in between starts no other pass; by hand there is no interval.
    lose(db, kind, 10, queue="other")
    assert lost(db) == 200
    assert db.rows("SELECT kind, rescued FROM awa.rescue(%s)", kind) == [(kind, 100)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_transaction(rescue_by_hand, kind):
    db = rescue_by_hand(rescue_batch_size="100")
    lose(db, kind, 400)
    wait_until(lambda: lost(db) == 0, 20)
    leaves = " UNION ALL ".join(
        f"SELECT xmin, tableoid FROM awa.lease_claim_closures_{n}" for n in range(16))
    transactions = db.value(f"SELECT count(DISTINCT xmin::text) FROM ({leaves}) c")
    # Those that a deadline ends may fall due on both sides of a batch's end.
    assert 4 <= transactions <= 5
    wait_counted(db, kind, 400)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 60, 99])
def test_a_bad_row_stops_nobody_else(rescue_by_hand, kind, position):
    """Its last attempt cannot be written where another row has its id."""
    db = rescue_by_hand()
    ids = db.insert(100, max_attempts=1)
    bad = ids[position]
    row = ("INSERT INTO awa.done_entries SELECT %s, 'failed', now(), NULL, NULL, 'x', 2, 0, now(),"
           " now(), 1, 1, 'k', '{}'")
    db.execute("ALTER TABLE awa.done_entries DISABLE TRIGGER USER")
    db.execute(row, bad)
    abandon(db, kind, 100)
    wait_until(lambda: lost(db) == 1)
    assert db.value("SELECT failed_total FROM awa.queue_stats WHERE queue = 'default'") == 99
    assert "is set aside" in db.server.log()
    db.execute("DELETE FROM awa.done_entries WHERE queue = 'x'")
    db.execute("ALTER TABLE awa.done_entries ENABLE TRIGGER USER")
    assert db.state(bad) == ("waiting_external" if kind == "callback" else "running")


@pytest.mark.parametrize("kind", KINDS)
def test_no_pause_and_no_halt_stops_it(db, kind):
    db.execute("SELECT awa.halt_runtime_scope()")
    lose(db, kind, 5, queue="q")
    db.execute("SELECT awa.pause_queue('q')")
    wait_until(lambda: lost(db, "q") == 0, 10)
    assert db.value("SELECT retryable FROM awa.queue_stats WHERE queue = 'q'") == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_age_of_the_oldest_and_the_size_of_a_pass(rescue_by_hand, kind):
    db = rescue_by_hand(rescue_pass_max_rows="0", rescue_batch_size="1")
    age = ("SELECT value FROM awa.metrics WHERE labels->>'kind' = %s"
           " AND name = 'awa_maintenance_rescue_oldest_attempt_age_seconds'")
    assert db.value(age, kind) == 0
    lose(db, kind, 3)
    wait_until(lambda: db.value(age, kind) > 0)
    assert {other: db.value(age, other) for other in KINDS if other != kind} == {
        other: 0 for other in KINDS if other != kind}
    wait_until(lambda: lost(db) == 2)
    assert db.rows("SELECT * FROM awa.rescue(%s, 10)", kind) == [(kind, 2, "drained")]
    assert db.value(age, kind) == 0
    wait_counted(db, kind, 3)
