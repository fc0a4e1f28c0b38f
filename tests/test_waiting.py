"""CALL wait_for_jobs: wakes at the commit, holds no snapshot, takes no job with it."""

import os
import signal
import socket
import statistics
import time

import psycopg
import pytest

from harness import Background, claim, kill_backend, raises, wait_in, wait_until

WAIT = "CALL awa.wait_for_jobs(%s, %s)"


def waiting(db, conn, queues=("q",), timeout="20 s"):
    """A call in the background that is known to be waiting."""
    call = Background(conn.value, WAIT, list(queues), timeout)
    wait_in(db.conn, conn.pid, "wait_for_jobs")
    wait_until(
        lambda: db.value(
            "SELECT wait_event_type IN ('Extension', 'IPC', 'Timeout') FROM pg_stat_activity"
            " WHERE pid = %s",
            conn.pid,
        )
    )
    return call


def test_jobs_that_are_there_answer_at_once(db):
    db.insert(queue="q")
    assert db.value(WAIT, ["other", "q"], "10 s") is True
    assert db.value("CALL awa.wait_for_jobs('{q}', '10 s', NULL)") is True


def test_timeout(db):
    start = time.monotonic()
    assert db.value(WAIT, ["q"], "100 ms") is False
    assert 0.1 <= time.monotonic() - start < 2
    assert db.value(WAIT, ["q"], "0") is False


def test_refuses(db):
    with raises("22023"):
        db.value(WAIT, ["q"], "-1 s")


@pytest.mark.parametrize("make_ready", ["insert", "scheduled", "release", "fail", "rollback", "resume"])
def test_wakes_for_every_way_a_job_becomes_ready(db, make_ready):
    conn, other = db.connect(), db.connect()
    if make_ready in ("release", "fail", "rollback"):
        db.insert(queue="q")
        if make_ready == "rollback":
            other.begin()
        job, = claim(other, "q")
    if make_ready == "resume":
        db.execute("SELECT awa.pause_queue('q')")
        db.insert(queue="q")
    call = waiting(db, conn)
    assert not call.done
    {
        "insert": lambda: db.insert(queue="q"),
        "scheduled": lambda: db.execute(
            "SELECT awa.insert_job('k', queue => 'q', run_at => now() + interval '200 ms')"
        ),
        "release": lambda: db.execute("SELECT awa.release(%s)", [job.receipt]),
        "fail": lambda: db.execute("SELECT awa.fail(%s, 'x', '100 ms')", job.receipt),
        "rollback": lambda: other.rollback_sql(),
        "resume": lambda: db.execute("SELECT awa.resume_queue('q')"),
    }[make_ready]()
    assert call.result(10) is True
    assert len(claim(conn, "q")) == 1


def test_wakes_at_the_commit_not_at_the_insert(db):
    conn, producer = db.connect(), db.connect()
    call = waiting(db, conn)
    producer.begin()
    producer.execute("SELECT awa.insert_job('k', queue => 'q')")
    assert db.claim("q") == []
    assert not call.done
    producer.commit_sql()
    assert call.result(5) is True


def test_wakes_within_milliseconds(db):
    conn = db.connect()
    taken = []
    for _ in range(15):
        call = waiting(db, conn)
        db.insert(queue="q")
        start = time.monotonic()
        assert call.result(5) is True
        taken.append(time.monotonic() - start)
        db.claim("q")
    assert statistics.median(taken) < 0.05, taken


def test_as_many_waiters_wake_as_there_are_jobs(db):
    conns = [db.connect() for _ in range(6)]
    calls = [waiting(db, conn) for conn in conns]
    db.insert(2, queue="q")
    wait_until(lambda: sum(call.done for call in calls) == 2)
    assert len(db.claim("q", 10)) == 2
    db.insert(4, queue="q")
    for call in calls:
        assert call.result(5) is True


def test_holds_no_snapshot_while_it_waits(db):
    conn = db.connect()
    call = waiting(db, conn)
    assert db.row(
        "SELECT backend_xmin, backend_xid FROM pg_stat_activity WHERE pid = %s", conn.pid
    ) == (None, None)
    assert db.value("SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'relation'", conn.pid) == 0
    db.insert(queue="q")
    call.result()


def test_after_a_write_in_the_same_transaction(db):
    conn = db.connect()
    db.execute("CREATE TABLE t (x int)")
    conn.begin()
    conn.execute("INSERT INTO t VALUES (1)")
    with raises("25001"):
        conn.execute(WAIT, (["q"], "1 s"))
    conn.rollback_sql()


def test_inside_a_transaction_block_it_waits_briefly(db):
    conn = db.connect()
    conn.execute("SET awa.claim_wait_max = '200ms'")
    conn.begin()
    start = time.monotonic()
    assert conn.value(WAIT, ["q"], "1 hour") is False
    assert time.monotonic() - start < 5
    conn.commit_sql()


@pytest.mark.parametrize("how", ["cancel", "terminate", "vanish"])
def test_an_interrupted_waiter_takes_no_job(db, how):
    conn = db.connect()
    call = waiting(db, conn)
    pid = conn.pid
    if how == "cancel":
        db.execute("SELECT pg_cancel_backend(%s)", pid)
        with raises("57014"):
            call.result(5)
    elif how == "terminate":
        kill_backend(pid, signal.SIGTERM)
        with raises("57P01"):
            call.result(5)
    else:
        # The client goes without a word; the server must notice by itself. The thread keeps
        # its socket: a closed one's number would be the next connection's.
        with socket.socket(fileno=os.dup(conn.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)
        wait_until(
            lambda: not db.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid),
            3,
            what="end of the vanished client's backend",
        )
        with pytest.raises(psycopg.OperationalError):
            call.result(5)
    db.insert(queue="q")
    assert len(db.claim("q", 10)) == 1


def test_two_queues_one_waiter(db):
    conn = db.connect()
    call = waiting(db, conn, ["a", "b"])
    db.insert(queue="b")
    assert call.result(5) is True
    assert len(db.claim("b")) == 1


def test_called_from_a_procedure(db):
    db.execute("""
        CREATE PROCEDURE waits(INOUT seen boolean DEFAULT NULL) LANGUAGE plpgsql AS $$
        BEGIN CALL awa.wait_for_jobs('{q}', '100 ms', seen); END $$
    """)
    assert db.value("CALL waits()") is False
    db.insert(queue="q")
    assert db.value("CALL waits()") is True
