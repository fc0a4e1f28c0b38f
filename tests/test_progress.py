"""set_progress: what an attempt says about itself, and what the next one learns of it."""

import pytest
from psycopg.types.json import Jsonb

from harness import Background, raises, wait_blocked, wait_until


def say(db, receipt, percent=None, message=None, metadata=None, conn=None):
    (conn or db.conn).execute(
        "SELECT awa.set_progress(%s, %s, %s, %s)",
        (receipt, percent, message, None if metadata is None else Jsonb(metadata)),
    )


def shown(db, job_id):
    return db.job(job_id).progress


def rows(db):
    return db.value("SELECT count(*) FROM awa.attempt_state")


def test_merge(db):
    job_id, = db.insert()
    assert shown(db, job_id) is None
    job, = db.claim()
    assert job.progress is None
    say(db, job.receipt, 30, "half of a third", {"a": 1, "b": {"x": 1}})
    say(db, job.receipt, metadata={"b": {"y": 2}, "c": None})
    expected = {
        "percent": 30, "message": "half of a third", "metadata": {"a": 1, "b": {"y": 2}, "c": None},
    }
    assert shown(db, job_id) == expected
    assert db.value("SELECT progress FROM awa.jobs WHERE id = %s", job_id) == expected
    say(db, job.receipt, message="more")
    assert shown(db, job_id) == expected | {"message": "more"}
    assert rows(db) == 1


@pytest.mark.parametrize("given, kept", [(-5, 0), (0, 0), (100, 100), (2**31 - 1, 100)])
def test_clamp(db, given, kept):
    job_id, = db.insert()
    say(db, db.claim()[0].receipt, given)
    assert shown(db, job_id)["percent"] == kept


def test_refuses(db):
    db.insert()
    job, = db.claim()
    with raises("22023"):
        say(db, None, 1)
    with raises("22023"):
        say(db, job.receipt, 1, metadata=[1])
    with raises("AW001"):
        say(db, job.receipt + 1, 1)
    db.execute("SELECT awa.complete(%s)", job.receipt)
    with raises("AW001"):
        say(db, job.receipt, 1)


def test_completion_clears(db):
    job_id, other = db.insert(2)
    one, two = db.claim(max_jobs=2)
    say(db, one.receipt, 50)
    say(db, two.receipt, 50)
    db.execute("SELECT awa.complete(%s)", one.receipt)
    db.execute("SELECT awa.complete_many(%s)", [two.receipt])
    assert shown(db, job_id) is None and shown(db, other) is None
    assert rows(db) == 0


ENDS = {
    "retry": "SELECT awa.fail({}, 'broken', retry_after => '0')",
    "long retry": "SELECT awa.fail({}, 'broken', retry_after => '1h')",
    "snooze": "SELECT awa.snooze({}, '0')",
    "release": "SELECT awa.release(ARRAY[{}::bigint])",
    "fail": "SELECT awa.fail({}, 'broken', terminal => true)",
    "cancel": "SELECT awa.cancel_attempt({}, 'no')",
}


@pytest.mark.parametrize("end", ENDS)
def test_kept_after(db, end):
    job_id, = db.insert()
    job, = db.claim()
    say(db, job.receipt, 40, "so far")
    db.execute(ENDS[end].format(job.receipt))
    found = db.job(job_id)
    assert (found.progress["percent"], found.progress["message"]) == (40, "so far")
    assert rows(db) == 0
    assert ("broken" in str(found.errors)) == ("retry" in end or end == "fail")
    if end in ("retry", "snooze", "release"):
        wait_until(lambda: db.state(job_id) == "available", what="the job available again")
        again, = db.claim()
        assert again.progress["percent"] == 40
        assert again.attempt == (2 if end == "retry" else 1)
        # What it says now goes on from there, and it is kept when it says nothing more.
        say(db, again.receipt, metadata={"k": 1})
        assert shown(db, job_id)["percent"] == 40
        db.execute("SELECT awa.complete(%s)", again.receipt)
        assert shown(db, job_id) is None


def test_kept_through_attempts_that_say_nothing(db):
    job_id, = db.insert()
    job, = db.claim()
    say(db, job.receipt, 10)
    db.execute("SELECT awa.fail(%s, 'a', retry_after => '0')", job.receipt)
    for error in "bc":
        wait_until(lambda: db.state(job_id) == "available", what="the job available again")
        job, = db.claim()
        assert job.progress["percent"] == 10 and shown(db, job_id)["percent"] == 10
        db.execute("SELECT awa.fail(%s, %s, retry_after => '0')", job.receipt, error)
    assert shown(db, job_id)["percent"] == 10
    assert [e["error"] for e in db.job(job_id).errors] == ["a", "b", "c"]


def test_release_goes_at_once_and_to_a_paused_queue(db):
    job_id, = db.insert()
    job, = db.claim()
    say(db, job.receipt, 10)
    db.execute("SELECT awa.pause_queue('default')")
    assert db.value("SELECT awa.release(%s)", [job.receipt]) == 1
    assert db.state(job_id) == "available"
    db.execute("SELECT awa.resume_queue('default')")
    again, = db.claim()
    assert (again.attempt, again.progress["percent"]) == (1, 10)


def test_rescue_keeps(db):
    job_id, = db.insert()
    worker = db.connect()
    runtime = worker.value("SELECT awa.register_runtime()")
    job, = db.claim(conn=worker, runtime=runtime)
    say(db, job.receipt, 70, conn=worker)
    worker.close()
    wait_until(lambda: db.state(job_id) != "running", what="the job rescued")
    assert shown(db, job_id)["percent"] == 70 and rows(db) == 0


def test_asked_to_stop_and_progress_in_either_order(db):
    for first in ("ask", "say"):
        job_id, = db.insert()
        job, = db.claim()
        acts = {
            "ask": lambda: db.execute("SELECT awa.cancel_job(%s, 'enough')", job_id),
            "say": lambda: say(db, job.receipt, 5),
        }
        acts.pop(first)()
        acts.popitem()[1]()
        assert db.column("SELECT awa.cancel_requested(%s)", [job.receipt]) == [job.receipt]
        assert shown(db, job_id)["percent"] == 5
        db.execute("SELECT awa.fail(%s, 'stopped')", job.receipt)
        found = db.job(job_id)
        assert found.state == "cancelled" and "enough" in str(found.errors)
        assert found.progress["percent"] == 5 and rows(db) == 0


def test_one_transaction_says_and_completes(db):
    job_id, = db.insert()
    conn = db.connect()
    conn.begin()
    job, = db.claim(conn=conn)
    say(db, job.receipt, 1, conn=conn)
    say(db, job.receipt, 2, conn=conn)
    conn.execute("SAVEPOINT s")
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    with raises("AW001"):
        say(db, job.receipt, 3, conn=conn)
    conn.execute("ROLLBACK TO s")
    say(db, job.receipt, 4, conn=conn)
    conn.commit_sql()
    assert shown(db, job_id)["percent"] == 4
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert rows(db) == 0


def test_one_transaction_says_and_extends(db):
    job_id, = db.insert()
    job, = db.claim(deadline="1 min")
    conn = db.connect()
    conn.begin()
    say(db, job.receipt, 1, conn=conn)
    (receipt, deadline), = conn.rows("SELECT * FROM awa.extend(%s, '1 h')", [job.receipt])
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    assert conn.rows("SELECT * FROM awa.extend(%s, '1 h')", [job.receipt]) == []
    conn.rollback_sql()
    assert receipt == job.receipt
    # Deadlines are no part of the transaction.
    assert db.rows("SELECT * FROM awa.extend(%s, '0')", [job.receipt]) == [(receipt, deadline)]
    assert db.state(job_id) == "running" and rows(db) == 0


def test_many_words_in_one_transaction(db):
    job_id, = db.insert()
    job, = db.claim()
    conn = db.connect()
    conn.begin()
    conn.execute(
        "SELECT awa.set_progress(%s, n %% 100) FROM generate_series(1, 1000) n", (job.receipt,)
    )
    conn.commit_sql()
    assert shown(db, job_id)["percent"] == 0 and rows(db) == 1
    db.check()
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_in_a_prepared_transaction(own_db):
    job_id, = own_db.insert()
    job, = own_db.claim()
    conn, other = own_db.connect(), own_db.connect()
    conn.begin()
    say(own_db, job.receipt, 60, conn=conn)
    conn.execute("PREPARE TRANSACTION 'said'")
    closing = Background(
        other.execute, "SELECT awa.fail(%s, 'broken', terminal => true)", (job.receipt,)
    )
    wait_blocked(own_db.conn, other.info.backend_pid)
    own_db.execute("COMMIT PREPARED 'said'")
    closing.result()
    assert shown(own_db, job_id)["percent"] == 60 and rows(own_db) == 0


@pytest.mark.parametrize("commits", [True, False])
def test_closers_wait_for_what_is_said(db, commits):
    job_id, = db.insert()
    job, = db.claim()
    conn, other = db.connect(), db.connect()
    conn.begin()
    say(db, job.receipt, 60, conn=conn)
    closing = Background(
        other.execute, "SELECT awa.fail(%s, 'broken', terminal => true)", (job.receipt,)
    )
    wait_blocked(db.conn, other.info.backend_pid)
    conn.commit_sql() if commits else conn.rollback_sql()
    closing.result()
    found = db.job(job_id)
    assert found.state == "failed" and rows(db) == 0
    assert found.progress == (
        {"percent": 60, "message": None, "metadata": {}} if commits else None
    )


def test_saying_waits_for_a_closer(db):
    db.insert()
    job, = db.claim()
    conn, other = db.connect(), db.connect()
    conn.begin()
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    saying = Background(say, db, job.receipt, 60, conn=other)
    wait_blocked(db.conn, other.info.backend_pid)
    conn.commit_sql()
    with raises("AW001"):
        saying.result()


def test_two_who_say_at_once(db):
    job_id, = db.insert()
    job, = db.claim()
    conn, other = db.connect(), db.connect()
    other.execute("SET default_transaction_isolation = 'repeatable read'")
    other.begin()
    other.execute("SELECT 1")
    conn.begin()
    say(db, job.receipt, 10, metadata={"a": 1}, conn=conn)
    saying = Background(say, db, job.receipt, 20, metadata={"b": 2}, conn=other)
    wait_blocked(db.conn, other.info.backend_pid)
    conn.commit_sql()
    saying.result()
    other.commit_sql()
    assert shown(db, job_id)["metadata"] == {"a": 1, "b": 2}
    assert rows(db) == 1


def test_survives_rebuild_and_crash(own_db):
    job_id, other = own_db.insert(2)
    one, two = own_db.claim(max_jobs=2, deadline="1h")
    say(own_db, one.receipt, 33)
    own_db.execute("SELECT awa.rebuild()")
    assert shown(own_db, job_id)["percent"] == 33
    say(own_db, one.receipt, 34)
    own_db.close_sessions()
    own_db.server.crash()
    own_db.wait_served()
    assert shown(own_db, job_id)["percent"] == 34
    own_db.execute("SELECT awa.fail(%s, 'broken', terminal => true)", one.receipt)
    own_db.execute("SELECT awa.complete(%s)", two.receipt)
    assert shown(own_db, job_id)["percent"] == 34 and rows(own_db) == 0


def test_open_over_a_rebuild(db):
    """A row of an open transaction that memory has forgotten: who closes finds it."""
    job_id, = db.insert()
    job, = db.claim()
    conn, other = db.connect(), db.connect()
    conn.begin()
    say(db, job.receipt, 60, conn=conn)
    db.execute("SELECT awa.rebuild()")
    closing = Background(
        other.execute, "SELECT awa.fail(%s, 'broken', terminal => true)", (job.receipt,)
    )
    wait_blocked(db.conn, other.info.backend_pid)
    conn.commit_sql()
    closing.result()
    assert shown(db, job_id)["percent"] == 60 and rows(db) == 0
