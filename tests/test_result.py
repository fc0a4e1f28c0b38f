"""get_result: the result of a job, waited for in the server."""

import time

import pytest

from harness import Background, raises, wait_until


def test_a_result_digit_for_digit(db):
    job_id, = db.insert()
    job, = db.claim()
    assert db.value("SELECT awa.get_result(%s)", job_id) is None
    db.execute("SELECT awa.complete(%s, '{\"sum\": 1.10}')", job.receipt)
    assert db.value("SELECT awa.get_result(%s)::text", job_id) == '{"sum": 1.10}'


def test_ends_without_a_result(db):
    ids = db.insert(3)
    one, two, three = db.claim(max_jobs=3)
    db.execute("SELECT awa.complete(%s)", one.receipt)
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", two.receipt)
    db.execute("SELECT awa.cancel_attempt(%s, 'x')", three.receipt)
    start = time.monotonic()
    assert [db.value("SELECT awa.get_result(%s, '2 s')", job_id) for job_id in ids] == [None] * 3
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize("end", [
    "complete(%(receipt)s, '7')", "fail(%(receipt)s, 'x', terminal => true)",
    "cancel_job(%(id)s, 'x', true)",
])
def test_any_end_wakes_the_waiter(db, end):
    job_id, = db.insert()
    job, = db.claim()
    conn = db.connect()
    began = time.monotonic()
    waiting = Background(conn.value, "SELECT awa.get_result(%s, '2 s')", job_id)
    in_wait = "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = %s"
    wait_until(lambda: db.value(in_wait, conn.pid))
    assert not waiting.done
    db.conn.execute(f"SELECT awa.{end}", {"receipt": job.receipt, "id": job_id})
    assert waiting.result() == (7 if end.startswith("complete") else None)
    assert time.monotonic() - began < 1.5


def test_the_wait_has_an_end(db):
    job_id, = db.insert()
    db.execute("SET awa.claim_wait_max = '200ms'")
    start = time.monotonic()
    assert db.value("SELECT awa.get_result(%s, '1 h')", job_id) is None
    assert 0.15 < time.monotonic() - start < 2


def test_arguments(db):
    assert db.value("SELECT awa.get_result(1, '2 s')") is None
    for arguments in ((None, "0"), (1, "-1 s")):
        with raises("22023"):
            db.execute("SELECT awa.get_result(%s, %s)", *arguments)


def test_producers_read_the_results_of_their_queues(db):
    job_id, = db.insert(queue="mine")
    other, = db.insert(queue="theirs")
    db.execute("CREATE ROLE asker LOGIN")
    try:
        db.execute("GRANT USAGE ON SCHEMA awa TO asker")
        db.execute("GRANT EXECUTE ON FUNCTION awa.get_result TO asker")
        db.execute("INSERT INTO awa.queue_acl VALUES ('asker'::regrole, 'producer', 'mine')")
        conn = db.connect(user="asker")
        assert conn.value("SELECT awa.get_result(%s)", job_id) is None
        with raises("42501"):
            conn.value("SELECT awa.get_result(%s)", other)
    finally:
        db.close_sessions()
        db.execute("DELETE FROM awa.queue_acl")
        db.execute("DROP OWNED BY asker")
        db.execute("DROP ROLE asker")
