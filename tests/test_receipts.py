"""Stale, doubled and forged receipts, through every function that takes one."""

import random

import pytest
from harness import raises, wait_until

FORGED = (0, 1, -1, -(1 << 63), (1 << 63) - 1)
# Each refuses a receipt that does not own its job.
SINGLE = {
    "complete": "awa.complete(%s)",
    "complete with a result": "awa.complete(%s, '{}')",
    "fail": "awa.fail(%s, 'x')::text",
    "fail for good": "awa.fail(%s, 'x', terminal => true)::text",
    "snooze": "awa.snooze(%s, '1 s')",
    "cancel_attempt": "awa.cancel_attempt(%s, 'x')",
    "set_progress": "awa.set_progress(%s, 50)",
    "register_callback": "awa.register_callback(%s, '1 h')",
    "wait_for_callback": "awa.wait_for_callback(%s)",
    "callback_result": "awa.callback_result(%s)",
}
# Each leaves such a receipt out, or says so.
MANY = {
    "complete_many": ("SELECT * FROM awa.complete_many(%s)", lambda r: [(r, False)]),
    "complete_and_claim": ("SELECT * FROM awa.complete_and_claim(%s, 'none')", lambda r: []),
    "release": ("SELECT awa.release(%s)", lambda r: [(0,)]),
    "extend": ("SELECT * FROM awa.extend(%s, '1 h')", lambda r: []),
    "cancel_requested": ("SELECT * FROM awa.cancel_requested(%s)", lambda r: []),
}


def completed(db):
    job, = running(db)
    db.execute("SELECT awa.complete(%s)", job.receipt)
    return job.receipt


def failed(db):
    job, = running(db)
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
    return job.receipt


def released(db):
    job, = running(db)
    db.execute("SELECT awa.release(%s)", [job.receipt])
    return job.receipt


def cancelled(db):
    job, = running(db)
    db.execute("SELECT awa.cancel_job(%s, force => true)", job.job_id)
    return job.receipt


def past_its_deadline(db):
    job, = running(db, deadline="10 ms")
    db.wait_state(job.job_id, "retryable")
    return job.receipt


def of_a_dead_session(db):
    conn = db.connect()
    job, = running(db, conn=conn, runtime=conn.value("SELECT awa.register_runtime()"))
    conn.close()
    db.wait_state(job.job_id, "retryable")
    return job.receipt


def of_a_silent_owner(db):
    runtime = db.value("SELECT awa.register_runtime('w', 'heartbeat', '1 s')")
    job, = running(db, runtime=runtime)
    db.wait_state(job.job_id, "retryable")
    return job.receipt


def claimed_again(db):
    """The job has a new owner, whose attempt must not be touched."""
    job, = running(db)
    db.execute("SELECT awa.release(%s)", [job.receipt])
    again, = db.claim()
    assert again.job_id == job.job_id
    return job.receipt


def rolled_back(db):
    conn = db.connect()
    conn.begin()
    job, = running(db, conn=conn)
    conn.rollback_sql()
    return job.receipt


def running(db, **arguments):
    db.insert()
    return db.claim(**arguments)


STALE = (completed, failed, released, cancelled, past_its_deadline, of_a_dead_session,
         of_a_silent_owner, claimed_again, rolled_back)


def picture(db):
    return db.rows("SELECT id, state::text, attempt, run_lease, progress::text, callback_id"
                   " FROM awa.jobs ORDER BY 1")


def refused(db, receipt):
    """By every function, and nothing is changed by any."""
    before = picture(db)
    for name, call in SINGLE.items():
        with raises("AW001"):
            db.rows(f"SELECT {call}", receipt)
            raise AssertionError(f"{name} took receipt {receipt}")
    for name, (call, expected) in MANY.items():
        assert db.rows(call, [receipt]) == expected(receipt), name
        assert db.rows(call, [receipt, receipt]) == expected(receipt), name
    assert picture(db) == before


@pytest.mark.parametrize("make", STALE)
def test_stale(db, make):
    refused(db, make(db))


def test_forged(db):
    """Also beside one that is good, and those between the receipts of claims."""
    db.insert(3)
    good = [job.receipt for job in db.claim(max_jobs=3)]
    dice = random.Random(1)
    forged = [*FORGED, good[0] - 1, good[-1] + 1, *(dice.getrandbits(62) for _ in range(20))]
    for receipt in forged:
        refused(db, receipt)
    found = dict(db.rows("SELECT * FROM awa.complete_many(%s)", [*forged, good[0]]))
    assert found == dict.fromkeys(forged, False) | {good[0]: True}
    assert db.value("SELECT awa.release(%s)", [*forged, good[1]]) == 1
    assert db.rows("SELECT receipt FROM awa.extend(%s, '1 h')", [*forged, good[2]]) == [(good[2],)]


@pytest.mark.parametrize("call", [call for call in SINGLE.values() if "callback" not in call
                                  and "progress" not in call])
def test_used_twice(db, call):
    job, = running(db)
    db.rows(f"SELECT {call}", job.receipt)
    refused(db, job.receipt)
    job, = running(db)
    db.execute("BEGIN")
    db.rows(f"SELECT {call}", job.receipt)
    with raises("AW001"):
        db.rows(f"SELECT {call}", job.receipt)
    db.execute("ROLLBACK")
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_doubled_in_one_call(db):
    db.insert(4)
    one, two, three, four = (job.receipt for job in db.claim(max_jobs=4))
    assert db.rows("SELECT * FROM awa.complete_many(%s)", [one, one, one]) == [(one, True)]
    assert db.value("SELECT awa.release(%s)", [two, two]) == 1
    assert len(db.rows("SELECT * FROM awa.extend(%s, '1 h')", [three, three])) == 1
    db.rows("SELECT * FROM awa.complete_and_claim(%s, 'none')", [three, three])
    db.execute("SELECT awa.cancel_job(id) FROM awa.jobs WHERE run_lease = %s", four)
    assert db.column("SELECT awa.cancel_requested(%s)", [four, four]) == [four]
    assert db.row("SELECT completed_total, available, running FROM awa.queue_stats"
                  " WHERE queue = 'default'") == (2, 1, 1)


def test_heartbeats_that_hold_too_much_or_too_little(db):
    """`holding` gives back what it does not name, never what others hold."""
    runtime = db.value("SELECT awa.register_runtime('w', 'heartbeat', '1 s')")
    other = db.value("SELECT awa.register_runtime('o', 'heartbeat', '1 h')")
    gone = completed(db)
    db.insert(3)
    held, left = db.claim(max_jobs=2, runtime=runtime, deadline="0")
    theirs, = db.claim(runtime=other, deadline="0")
    forged = [*FORGED, gone, held.receipt + 1000, theirs.receipt]
    beat = "SELECT * FROM awa.heartbeat(%s, %s)"

    def given_back():
        assert db.rows(beat, runtime, [*forged, held.receipt, held.receipt]) == []
        return db.state(left.job_id) == "available"

    wait_until(given_back)
    assert db.job(left.job_id).attempt == 0
    assert [db.state(job.job_id) for job in (held, theirs)] == ["running", "running"]
    refused(db, left.receipt)
    for job in (held, theirs):
        db.execute("SELECT awa.complete(%s)", job.receipt)


def test_null(db):
    for call in SINGLE.values():
        with raises("22023"):
            db.rows(f"SELECT {call}", None)
    for call, _ in MANY.values():
        for argument in (None, [None]):
            with raises("22023"):
                db.rows(call.replace("%s", "%s::bigint[]"), argument)
