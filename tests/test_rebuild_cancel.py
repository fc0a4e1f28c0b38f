"""Cancels and their kin, wherever the job is, under a memory that is rebuilt meanwhile."""

import random
import threading
import time

import psycopg
import pytest
from harness import Background, raises, wait_blocked, wait_until

# In an order in which each claim finds its own job first.
PLACES = ("retryable", "timed", "running", "returned", "ready", "scheduled")


def rebuild(db):
    with db.server.connect(db.name) as conn:
        conn.execute("SELECT awa.rebuild()")


def place(db, where, queue):
    """A job that waits there; the attempt's receipt if it has one open."""
    if where == "scheduled":
        return db.value("SELECT awa.insert_job('k', queue => %s, run_at => now() + '1 hour'::interval)",
                        queue), None
    job_id, = db.insert(queue=queue)
    if where == "ready":
        return job_id, None
    claimed, = db.claim(queue, deadline="1 hour")
    assert claimed.job_id == job_id
    receipt = claimed.receipt
    delay = {"returned": "0", "timed": "50 s", "retryable": "1 hour"}.get(where)
    if delay is None:
        return job_id, receipt
    db.execute("SELECT awa.fail(%s, 'x', retry_after => %s)", receipt, delay)
    return job_id, None


def place_all(db, queue):
    return {where: place(db, where, queue) for where in PLACES}


def counts(db, queue):
    return db.row(
        "SELECT scheduled, available, running, retryable, cancelled_total"
        " FROM awa.queue_stats WHERE queue = %s",
        queue,
    )


# scheduled, available, running, retryable, cancelled_total of a queue with a job in each place
BEFORE = (1, 2, 1, 2, 0)
ASKED = (0, 0, 1, 0, 5)
FORCED = (0, 0, 0, 0, 6)
DELETED = (0, 0, 1, 0, 0)


def act(conn, how, jobs):
    for where, (job_id, _) in jobs.items():
        if how == "delete":
            if where != "running":
                conn.execute("SELECT awa.delete_job(%s)", (job_id,))
        else:
            conn.execute("SELECT awa.cancel_job(%s, 'why', %s)", (job_id, how == "force"))


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("how, after", [("ask", ASKED), ("force", FORCED), ("delete", DELETED)])
def test_an_open_transaction(db, how, after, end):
    db.execute("SELECT awa.prepare_queue('q')")
    jobs, others = place_all(db, "q"), place_all(db, "q2")
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT a")
    act(conn, how, jobs)
    conn.execute("RELEASE a")
    conn.execute("SAVEPOINT b")
    act(conn, how, others)
    rebuild(db)
    assert counts(db, "q") == BEFORE and counts(db, "q2") == BEFORE
    assert not db.claim("q", 10, deadline="1 hour"), "nobody gets what is being cancelled"
    db.check()
    conn.execute("ROLLBACK TO b")
    db.check()
    rebuild(db)
    conn.execute(end)
    db.check()
    assert counts(db, "q2") == BEFORE
    assert counts(db, "q") == (after if end == "COMMIT" else BEFORE)
    finish(db, "q", jobs, how if end == "COMMIT" else "nothing")
    finish(db, "q2", others, "nothing")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("forget", ["rebuild", "restart", "crash"])
@pytest.mark.parametrize("how, after", [("ask", ASKED), ("force", FORCED), ("delete", DELETED)])
def test_a_prepared_transaction(own_db, how, after, forget, end):
    db = own_db
    jobs = place_all(db, "q")
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT a")
    act(conn, how, jobs)
    conn.execute("RELEASE a")
    conn.execute("PREPARE TRANSACTION 'life'")
    if forget == "rebuild":
        rebuild(db)
        rebuild(db)
    else:
        db.server.restart("fast" if forget == "restart" else "immediate")
        db.wait_served()
    db.check()
    assert counts(db, "q") == BEFORE
    assert not db.claim("q", 10, deadline="1 hour")
    db.execute(f"{end} PREPARED 'life'")
    wait_until(lambda: db.value("SELECT bool_and(ok) FROM awa.check()"))
    assert counts(db, "q") == (after if end == "COMMIT" else BEFORE)
    rebuild(db)
    assert counts(db, "q") == (after if end == "COMMIT" else BEFORE)
    finish(db, "q", jobs, how if end == "COMMIT" else "nothing")


def finish(db, queue, jobs, how):
    """Each job is in the state that the act left it in, and goes on from there."""
    receipt = jobs["running"][1]
    waiting = {"nothing": None, "ask": "cancelled", "force": "cancelled", "delete": "gone"}[how]
    for where, (job_id, _) in jobs.items():
        if where == "running":
            continue
        before = {"timed": "retryable", "retryable": "retryable", "scheduled": "scheduled"}
        before = before.get(where, "available")
        expected = {None: before, "gone": None}.get(waiting, waiting)
        assert db.state(job_id) == expected, where
    asked = db.column("SELECT awa.cancel_requested(%s)", [receipt])
    assert asked == ([receipt] if how == "ask" else [])
    if how == "force":
        with raises("AW001"):
            db.execute("SELECT awa.complete(%s)", receipt)
    else:
        state = db.value("SELECT awa.fail(%s, 'x', retry_after => '0')::text", receipt)
        assert state == ("cancelled" if how == "ask" else "retryable")
    left = 3 if how == "nothing" else 1 if how == "delete" else 0
    found = []
    wait_until(lambda: found.extend(db.claim(queue, 10, deadline="1 hour")) or len(found) >= left)
    assert len(found) == left


def test_who_cancels_waits_for_a_cancel_from_before_the_rebuild(db):
    job_id, = db.insert()
    first, second = db.connect(), db.connect()
    first.begin()
    first.execute("SAVEPOINT a")
    first.execute("SELECT awa.cancel_job(%s, 'first')", (job_id,))
    rebuild(db)
    other = Background(second.value, "SELECT awa.cancel_job(%s, 'second')::text", job_id)
    wait_blocked(db.conn, second.info.backend_pid)
    first.rollback_sql()
    assert other.result() == "cancelled"
    assert "second" in str(db.job(job_id).errors)


def test_a_savepoint_that_is_gone_holds_nothing(db):
    ids = db.insert(2)
    receipt = db.claim(deadline="1 hour")[0].receipt
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT a")
    for job_id in ids:
        conn.execute("SELECT awa.cancel_job(%s)", (job_id,))
    rebuild(db)
    conn.execute("ROLLBACK TO a")
    conn.execute("SELECT awa.complete(%s)", (receipt,))
    assert conn.value("SELECT awa.cancel_job(%s)::text", ids[1]) == "cancelled"
    conn.commit_sql()
    assert [db.state(job_id) for job_id in ids] == ["completed", "cancelled"]


def test_a_request_to_stop_outlives_a_close_that_rolls_back(db):
    job_id, = db.insert()
    receipt = db.claim(deadline="1 hour")[0].receipt
    assert db.value("SELECT awa.cancel_job(%s)::text", job_id) == "running"
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.complete(%s)", (receipt,))
    rebuild(db)
    conn.rollback_sql()
    assert db.column("SELECT awa.cancel_requested(%s)", [receipt]) == [receipt]
    rebuild(db)
    assert db.value("SELECT awa.fail(%s, 'x')::text", receipt) == "cancelled"


def test_an_attempt_of_an_open_claim_is_asked_to_stop(db):
    db.insert(2)
    conn = db.connect()
    conn.begin()
    first, second = db.claim(max_jobs=2, conn=conn, deadline="1 hour")
    for job in (first, second):
        assert conn.value("SELECT awa.cancel_job(%s)::text", job.job_id) == "running"
        conn.execute("SAVEPOINT a")
    rebuild(db)
    conn.commit_sql()
    receipts = [first.receipt, second.receipt]
    assert sorted(db.column("SELECT awa.cancel_requested(%s)", receipts)) == receipts
    assert db.value("SELECT awa.release(%s)", receipts) == 0, "none is given back"
    assert db.count(state="cancelled") == 2


def test_rebuilds_under_cancels(db):
    """Cancelers, workers and producers: each job ends once, and no count is off."""
    stop, errors = threading.Event(), []
    made = []

    def run(body, number):
        def loop():
            dice = random.Random(number)
            try:
                with db.server.connect(db.name) as conn:
                    while not stop.is_set():
                        try:
                            body(conn, dice)
                        except psycopg.Error as error:
                            conn.rollback_sql()
                            # Somebody else was faster, or memory is being rebuilt.
                            if error.sqlstate not in ("AW001", "AW003", "40P01", "55000", "P0002"):
                                raise
            except Exception as error:
                errors.append(error)
        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def end(conn, dice):
        time.sleep(dice.choice((0, 0, 0.01)))
        conn.execute("COMMIT" if dice.random() < 0.7 else "ROLLBACK")

    def produce(conn, dice):
        made.extend(conn.column(
            "SELECT job_id FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object('kind', 'k',"
            " 'run_at', CASE WHEN n %% 5 = 0 THEN clock_timestamp() + interval '1 hour' END))"
            " FROM generate_series(1, %s) n))", dice.choice((1, 5, 40))))
        time.sleep(0.02)

    def work(conn, dice):
        claimed = db.claim(max_jobs=dice.choice((1, 5, 20)), conn=conn, deadline="1 hour")
        conn.begin()
        for job in claimed:
            conn.execute(dice.choice((
                "SELECT awa.complete(%s)", "SELECT awa.snooze(%s, '30 s')",
                "SELECT awa.snooze(%s, '1 hour')", "SELECT awa.release(ARRAY[%s])",
                "SELECT awa.fail(%s, 'x', retry_after => '10 ms')",
            )), (job.receipt,))
        end(conn, dice)

    def cancel(conn, dice):
        conn.begin()
        for _ in range(dice.randint(1, 4)):
            if made:
                conn.execute("SAVEPOINT s")
                job_id = dice.choice(made[-300:])
                if dice.random() < 0.8:
                    conn.execute("SELECT awa.cancel_job(%s, 'x', %s)", (job_id, dice.random() < 0.3))
                else:
                    conn.execute("SELECT awa.delete_job(%s)", (job_id,))
                if dice.random() < 0.3:
                    conn.execute("ROLLBACK TO s")
        end(conn, dice)

    bodies = [produce, produce, work, work, work, cancel, cancel, cancel]
    threads = [run(body, number) for number, body in enumerate(bodies)]
    until = time.monotonic() + 10
    rebuilds = 0
    try:
        while time.monotonic() < until and not errors:
            rebuild(db)
            rebuilds += 1
            time.sleep(0.2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    if errors:
        raise errors[0]
    assert rebuilds > 5
    db.check()
    before = db.rows("SELECT * FROM awa.queue_stats")
    rebuild(db)
    db.check()
    strip = [row[:11] for row in before]
    assert [row[:11] for row in db.rows("SELECT * FROM awa.queue_stats")] == strip
