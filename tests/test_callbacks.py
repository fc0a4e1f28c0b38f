"""Callbacks: attempts that wait for somebody outside."""

import datetime
import uuid

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness import Background, DebugPoints, raises, wait_blocked, wait_until

HOUR = "1 hour"


def rebuild(db):
    with db.server.connect(db.name) as conn:
        conn.execute("SELECT awa.rebuild()")


def register(db, receipt, timeout=HOUR, conn=None):
    return (conn or db.conn).value("SELECT awa.register_callback(%s, %s)", receipt, timeout)


def wait(db, receipt, conn=None):
    (conn or db.conn).execute("SELECT awa.wait_for_callback(%s)", (receipt,))


def resolve(db, how, callback, *arguments, conn=None):
    cast = "" if how in ("resume", "heartbeat", "cancel") else "::text"
    name = f"{how}_callback" if how in ("heartbeat", "cancel") else f"{how}_external"
    marks = ", %s" * len(arguments)
    return (conn or db.conn).value(f"SELECT awa.{name}(%s{marks}){cast}", callback, *arguments)


def running(db, **columns):
    """A running attempt without an owner: the record of its claim."""
    db.insert(**columns)
    job, = db.claim(deadline=HOUR)
    return job


def park(db, timeout=HOUR, job=None, conn=None):
    """A parked attempt and its callback."""
    job = job or running(db)
    callback = register(db, job.receipt, timeout, conn)
    wait(db, job.receipt, conn)
    return job, callback


def counts(db, queue="default"):
    """running, waiting_external, available, retryable, completed, failed, cancelled"""
    return db.row(
        "SELECT running, waiting_external, available, retryable, completed_total, failed_total,"
        " cancelled_total FROM awa.queue_stats WHERE queue = %s",
        queue,
    )


def stale(db, receipt):
    """The receipt is good for nothing but callbacks."""
    for call in (
        "complete(%s)", "fail(%s, 'x')", "snooze(%s, '1 s')", "cancel_attempt(%s, 'x')",
    ):
        with raises("AW001"):
            db.execute(f"SELECT awa.{call}", receipt)
    assert db.rows("SELECT * FROM awa.complete_many(%s)", [receipt]) == [(receipt, False)]
    assert db.value("SELECT awa.release(%s)", [receipt]) == 0
    assert db.rows("SELECT * FROM awa.extend(%s, '1 s')", [receipt]) == []


# Parking


def test_a_parked_job_is_seen(db):
    before = db.value("SELECT clock_timestamp()")
    job, callback = park(db)
    found = db.job(job.job_id)
    assert found.state == "waiting_external" and found.callback_id == callback
    ahead = found.callback_timeout_at - before
    assert datetime.timedelta(minutes=59) < ahead < datetime.timedelta(minutes=61)
    assert (found.deadline_at, found.run_lease, found.attempt) == (None, job.receipt, 1)
    assert counts(db) == (0, 1, 0, 0, 0, 0, 0)
    assert db.column("SELECT id FROM awa.list_jobs(state => 'waiting_external')") == [job.job_id]
    depth = "SELECT value FROM awa.metrics WHERE name = 'awa_queue_depth' AND labels->>'state' = %s"
    assert (db.value(depth, "waiting_external"), db.value(depth, "running")) == (1, 0)
    assert db.claim() == []
    db.check()


def test_registered_but_running(db):
    job = running(db)
    callback = register(db, job.receipt)
    found = db.job(job.job_id)
    assert (found.state, found.callback_id) == ("running", callback)
    assert found.callback_timeout_at is not None and counts(db) == (1, 0, 0, 0, 0, 0, 0)
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.job(job.job_id).callback_id is None
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0
    with raises("P0002"):
        resolve(db, "complete", callback)


def test_a_parked_receipt_is_stale(db):
    job, callback = park(db)
    stale(db, job.receipt)
    assert db.state(job.job_id) == "waiting_external"
    # To wait again is to wait still; another token replaces the first.
    wait(db, job.receipt)
    again = register(db, job.receipt, "2 hours")
    assert db.job(job.job_id).callback_id == again and db.state(job.job_id) == "waiting_external"
    with raises("P0002"):
        resolve(db, "complete", callback)
    assert resolve(db, "complete", again) == "completed"


def test_only_the_last_token_is_good(db):
    job = running(db)
    first, second = register(db, job.receipt), register(db, job.receipt)
    assert first != second
    wait(db, job.receipt)
    for how in ("complete", "retry", "resume"):
        with raises("P0002"):
            resolve(db, how, first)
    with raises("P0002"):
        resolve(db, "fail", first, "x")
    with raises("P0002"):
        resolve(db, "heartbeat", first, HOUR)
    assert resolve(db, "cancel", first) is False
    assert resolve(db, "complete", second) == "completed"


def test_unknown_tokens(db):
    db.insert()
    for how in ("complete", "retry", "resume"):
        with raises("P0002"):
            resolve(db, how, uuid.uuid4())
    assert resolve(db, "cancel", uuid.uuid4()) is False


def test_bad_arguments(db):
    job = running(db)
    for timeout in ("0", "-1 s", None, "178000000 years"):
        with raises("22023"):
            register(db, job.receipt, timeout)
    for call in (
        "register_callback(NULL, '1 s')", "wait_for_callback(NULL)", "complete_external(NULL)",
        "fail_external(NULL, 'x')", "retry_external(NULL)", "resume_external(NULL)",
        "heartbeat_callback(NULL, '1 s')", "cancel_callback(NULL)", "callback_result(NULL)",
        f"register_callback({job.receipt}, '1 s', '{{\"filter\": 1}}')",
    ):
        with raises("22023"):
            db.execute(f"SELECT awa.{call}")
    callback = register(db, job.receipt)
    wait(db, job.receipt)
    with raises("22023"):
        resolve(db, "heartbeat", callback, "0")
    for receipt in (job.receipt + 1, 1):
        with raises("AW001"):
            register(db, receipt)
        with raises("AW001"):
            wait(db, receipt)
        with raises("AW001"):
            db.value("SELECT awa.callback_result(%s)", receipt)


def test_waiting_without_a_callback(db):
    job = running(db)
    with raises("55000"):
        wait(db, job.receipt)
    callback = register(db, job.receipt)
    assert resolve(db, "cancel", callback) is True
    assert resolve(db, "cancel", callback) is False
    assert db.job(job.job_id).callback_id is None
    with raises("55000"):
        wait(db, job.receipt)
    assert db.state(job.job_id) == "running"
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_a_parked_callback_cannot_be_cancelled(db):
    _, callback = park(db)
    with raises("55000"):
        resolve(db, "cancel", callback)
    assert resolve(db, "complete", callback) == "completed"
    assert resolve(db, "cancel", callback) is False


# Resolving


def test_complete(db):
    job, callback = park(db)
    assert resolve(db, "complete", callback, Jsonb({"paid": 12.50})) == "completed"
    assert db.value("SELECT awa.get_result(%s)::text", job.job_id) == '{"paid": 12.5}'
    found = db.job(job.job_id)
    assert (found.state, found.callback_id, found.callback_timeout_at) == ("completed", None, None)
    assert counts(db) == (0, 0, 0, 0, 1, 0, 0)
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0
    for how in ("complete", "retry", "resume"):
        with raises("P0002"):
            resolve(db, how, callback)
    with raises("AW001"):
        wait(db, job.receipt)


def test_complete_wakes_who_waits_for_the_result(db):
    job, callback = park(db)
    waiter = Background(
        db.connect().value, "SELECT awa.get_result(%s, '2 s')::text", job.job_id
    )
    resolve(db, "complete", callback, Jsonb(1))
    assert waiter.result() == "1"


def test_complete_while_running(db):
    job = running(db)
    callback = register(db, job.receipt)
    assert resolve(db, "complete", callback) == "completed"
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)
    with raises("AW001"):
        wait(db, job.receipt)


def test_fail(db):
    job, callback = park(db)
    assert resolve(db, "fail", callback, "card declined") == "failed"
    found = db.job(job.job_id)
    assert found.state == "failed" and found.errors[0]["error"] == "card declined"
    assert counts(db) == (0, 0, 0, 0, 0, 1, 0)
    with raises("P0002"):
        resolve(db, "complete", callback)


def test_fail_while_running(db):
    job = running(db)
    assert resolve(db, "fail", register(db, job.receipt), "x") == "failed"
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)


def test_retry_starts_over(db):
    job_id, = db.insert(max_attempts=2)
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'first', '0')", job.receipt)
    job, = wait_until(lambda: db.claim(deadline=HOUR))
    assert job.attempt == 2
    _, callback = park(db, job=job)
    assert resolve(db, "retry", callback) == "available"
    found = db.job(job_id)
    assert (found.state, found.attempt, found.callback_id) == ("available", 0, None)
    assert found.errors[0]["error"] == "first"
    assert counts(db) == (0, 0, 1, 0, 0, 0, 0)
    again, = db.claim()
    assert (again.job_id, again.attempt) == (job_id, 1) and again.receipt > job.receipt
    with raises("AW001"):
        wait(db, job.receipt)
    with raises("P0002"):
        resolve(db, "retry", callback)


def test_retry_and_heartbeat_want_a_parked_attempt(db):
    job = running(db)
    callback = register(db, job.receipt)
    with raises("55000"):
        resolve(db, "retry", callback)
    with raises("55000"):
        resolve(db, "heartbeat", callback, HOUR)
    wait(db, job.receipt)
    assert resolve(db, "retry", callback) == "available"


def test_resume(db):
    db.execute("SELECT awa.insert_job('k', metadata => '{\"mine\": 1.10}')")
    job, = db.claim(deadline=HOUR)
    _, callback = park(db, job=job)
    assert resolve(db, "resume", callback, Jsonb({"ok": True})) == job.receipt
    found = db.job(job.job_id)
    assert (found.state, found.attempt, found.callback_id) == ("running", 1, None)
    assert found.metadata == {"mine": 1.10, "_awa_callback_result": {"ok": True}}
    assert found.deadline_at is not None and found.run_lease == job.receipt
    assert counts(db) == (1, 0, 0, 0, 0, 0, 0)
    result = "SELECT awa.callback_result(%s)"
    assert db.value(result, job.receipt) == {"ok": True}
    wait(db, job.receipt)  # it was resumed: goes on
    assert db.state(job.job_id) == "running"
    for how in ("complete", "resume"):
        with raises("P0002"):
            resolve(db, how, callback)
    db.check()
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.job(job.job_id).metadata == {"mine": 1.10}
    with raises("AW001"):
        db.value(result, job.receipt)


def test_early_resume(db):
    job = running(db)
    callback = register(db, job.receipt)
    assert db.value("SELECT awa.callback_result(%s)", job.receipt) is None
    assert resolve(db, "resume", callback, Jsonb([1])) == job.receipt
    wait(db, job.receipt)
    assert db.state(job.job_id) == "running"
    assert db.value("SELECT awa.callback_result(%s)", job.receipt) == [1]
    # The next one is waited for.
    callback = register(db, job.receipt)
    wait(db, job.receipt)
    assert db.state(job.job_id) == "waiting_external"
    assert resolve(db, "complete", callback) == "completed"


def test_several_callbacks_in_a_row(db):
    job = running(db)
    tokens = []
    for step, payload in enumerate([{"step": 0}, None, {"step": 2}]):
        callback = register(db, job.receipt)
        assert callback not in tokens
        tokens.append(callback)
        wait(db, job.receipt)
        for former in tokens[:-1]:
            with raises("P0002"):
                resolve(db, "resume", former)
        arguments = [] if payload is None else [Jsonb(payload)]
        assert resolve(db, "resume", callback, *arguments) == job.receipt
        assert db.value("SELECT awa.callback_result(%s)", job.receipt) == payload, step
        db.check()
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0


# Owners and deadlines


def with_owner(db, deadline="0", heartbeat=False):
    """A runtime on a connection of its own, and a job it has claimed."""
    db.insert()
    conn = db.connect()
    options = "liveness => 'heartbeat', heartbeat_timeout => '1 s'" if heartbeat else ""
    runtime = conn.value(f"SELECT awa.register_runtime({options})")
    job, = db.claim(conn=conn, runtime=runtime, deadline=deadline)
    return conn, runtime, job


def test_the_end_of_its_owner_does_not_touch_a_parked_job(db):
    conn, _, job = with_owner(db)
    _, callback = park(db, job=job, conn=conn)
    conn.close()
    wait_until(lambda: db.value(
        "SELECT value FROM awa.metrics WHERE name = 'awa_capacity_used'"
        " AND labels->>'setting' = 'awa.max_runtimes'") == 0)
    for kind in ("owner", "deadline", "callback"):
        assert db.value("SELECT rescued FROM awa.rescue(%s)", kind) == 0
    assert db.state(job.job_id) == "waiting_external"
    db.check()
    # Nobody is left to own it: a plain lease with the queue's deadline.
    db.execute("SELECT awa.configure_queue('default', '{\"attempt_deadline\": \"400 ms\"}')")
    assert resolve(db, "resume", callback) == job.receipt
    assert db.job(job.job_id).deadline_at is not None
    wait_until(lambda: db.state(job.job_id) == "retryable")
    assert "deadline" in str(db.job(job.job_id).errors)


def test_a_living_owner_keeps_a_resumed_attempt(db):
    conn, runtime, job = with_owner(db)
    _, callback = park(db, job=job)
    resolve(db, "resume", callback)
    assert (db.state(job.job_id), db.job(job.job_id).deadline_at) == ("running", None)
    db.execute("SELECT awa.rescue()")
    assert db.state(job.job_id) == "running"
    conn.close()
    wait_until(lambda: db.state(job.job_id) == "retryable", 5)
    assert "owner" in str(db.job(job.job_id).errors)


def test_owner_and_deadline_rescue_take_the_other_attempts_of_a_claim(db):
    ids = db.insert(3)
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime()")
    jobs = db.claim(conn=conn, max_jobs=3, runtime=runtime, deadline="0")
    _, callback = park(db, job=jobs[1])
    conn.close()
    wait_until(lambda: counts(db)[:2] == (0, 1))
    assert [db.state(job_id) for job_id in ids] == ["retryable", "waiting_external", "retryable"]
    db.check()
    rebuild(db)
    assert resolve(db, "resume", callback) == jobs[1].receipt
    rebuild(db)
    db.execute("SELECT awa.rescue()")
    assert db.state(ids[1]) == "running"
    db.execute("SELECT awa.complete(%s)", jobs[1].receipt)


def test_a_deadline_stands_still_while_it_is_parked(db):
    db.insert()
    job, = db.claim(deadline="300 ms")
    _, callback = park(db, job=job)
    wait_until(lambda: db.value("SELECT clock_timestamp() > %s + interval '300 ms'", job.deadline_at))
    assert db.value("SELECT rescued FROM awa.rescue('deadline')") == 0
    assert db.state(job.job_id) == "waiting_external"
    resolve(db, "resume", callback)
    assert db.state(job.job_id) == "running", "it has a fresh deadline"
    wait_until(lambda: db.state(job.job_id) == "retryable", 3)


def test_holding_and_leaving_in_order(db):
    conn, runtime, job = with_owner(db, heartbeat=True)
    _, callback = park(db, job=job)
    wait_until(lambda: db.value("SELECT clock_timestamp() > %s", job.created_at))
    db.rows("SELECT * FROM awa.heartbeat(%s, '{}')", runtime)
    assert db.state(job.job_id) == "waiting_external"
    assert db.value("SELECT awa.deregister_runtime(%s)", runtime) == 0
    assert db.state(job.job_id) == "waiting_external"
    db.check()
    assert resolve(db, "resume", callback) == job.receipt
    assert db.job(job.job_id).deadline_at is not None
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_a_dead_owner_cannot_park(db):
    conn, runtime, job = with_owner(db)
    other = db.connect()
    with DebugPoints(db).at("rescue_owner") as rescue:
        conn.close()
        rescue.wait()
        waiting = Background(register, db, job.receipt, conn=other)
        wait_blocked(db.conn, other.info.backend_pid)
    with raises("AW001"):
        waiting.result()


# Time-outs


def test_a_timeout_counts_as_an_attempt(db):
    job, callback = park(db, "200 ms")
    wait_until(lambda: db.state(job.job_id) == "retryable", 2)
    found = db.job(job.job_id)
    assert found.attempt == 1 and found.errors[0]["error"] == "callback timed out"
    assert (found.callback_id, found.callback_timeout_at) == (None, None)
    assert counts(db) == (0, 0, 0, 1, 0, 0, 0)
    with raises("P0002"):
        resolve(db, "complete", callback)
    passes = db.value("""
        SELECT sum(value) FROM awa.metrics
        WHERE name = 'awa_maintenance_rescue_pass_size_sum' AND labels->>'kind' = 'callback'
    """)
    assert passes == 1


def test_the_last_attempt_fails(db):
    job = running(db, max_attempts=1)
    park(db, "100 ms", job)
    wait_until(lambda: db.state(job.job_id) == "failed", 2)
    assert db.job(job.job_id).errors[0]["error"] == "callback timed out"


@pytest.mark.parametrize("how, reason", [
    ("timeout", "callback_timeout"), ("fail", "terminal_error"),
])
def test_dead_letters(db, how, reason):
    db.execute("SELECT awa.configure_queue('default', '{\"dlq_enabled\": true}')")
    job = running(db, max_attempts=1)
    _, callback = park(db, "100 ms" if how == "timeout" else HOUR, job)
    if how == "fail":
        assert resolve(db, "fail", callback, "broken") == "failed"
    wait_until(lambda: db.column("SELECT dlq_reason FROM awa.dlq") == [reason], 2)
    assert db.job(job.job_id).state == "failed"
    assert db.row("SELECT waiting_external, dlq, failed_total FROM awa.queue_stats") == (0, 1, 1)
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0
    assert db.value("SELECT awa.dlq_retry(%s)::text", job.job_id) == "available"


def test_a_timeout_with_attempts_left_is_no_dead_letter(db):
    db.execute("SELECT awa.configure_queue('default', '{\"dlq_enabled\": true}')")
    job = running(db, max_attempts=2)
    park(db, "50 ms", job)
    wait_until(lambda: db.state(job.job_id) == "retryable", 2)
    assert db.value("SELECT count(*) FROM awa.dlq") == 0


def test_a_timeout_that_passes_before_it_parks(db):
    job = running(db)
    register(db, job.receipt, "50 ms")
    timeout = db.job(job.job_id).callback_timeout_at
    wait_until(lambda: db.value("SELECT clock_timestamp() > %s", timeout))
    assert db.state(job.job_id) == "running", "it is nobody's business while it runs"
    wait(db, job.receipt)
    wait_until(lambda: db.state(job.job_id) == "retryable", 2)


def test_many_timeouts(db):
    db.insert(600)
    jobs = db.claim(max_jobs=600, deadline=HOUR)
    receipts = [job.receipt for job in jobs]
    db.execute("SELECT awa.register_callback(r, '1 hour') FROM unnest(%s::bigint[]) r", receipts)
    db.execute("SELECT awa.wait_for_callback(r) FROM unnest(%s::bigint[]) r", receipts)
    assert counts(db)[:2] == (0, 600)
    db.check()
    db.execute("SELECT awa.heartbeat_callback(callback_id, '1 us') FROM awa.jobs")
    wait_until(lambda: counts(db)[1] == 0)
    assert counts(db)[3] == 600


def test_a_heartbeat_gives_more_time(db):
    job, callback = park(db, "300 ms")
    until = resolve(db, "heartbeat", callback, HOUR)
    assert db.job(job.job_id).callback_timeout_at == until
    db.check()
    wait_until(lambda: db.value(
        "SELECT clock_timestamp() > %s - interval '1 hour' + interval '500 ms'", until))
    assert db.value("SELECT rescued FROM awa.rescue('callback')") == 0
    assert db.state(job.job_id) == "waiting_external"
    # Shorter is right, too.
    resolve(db, "heartbeat", callback, "50 ms")
    wait_until(lambda: db.state(job.job_id) == "retryable", 2)
    with raises("P0002"):
        resolve(db, "heartbeat", callback, HOUR)


def test_the_second_of_two_times_out(db):
    job, callback = park(db)
    resolve(db, "resume", callback)
    park(db, "100 ms", job)
    wait_until(lambda: db.state(job.job_id) == "retryable", 2)


def test_a_heartbeat_and_the_rescue(db):
    """The time-out is found, and put off before it is carried out."""
    job, callback = park(db, "100 ms")
    conn = db.connect()
    conn.begin()
    resolve(db, "heartbeat", callback, HOUR, conn=conn)
    timeout = db.job(job.job_id).callback_timeout_at
    wait_until(lambda: db.value("SELECT clock_timestamp() > %s + interval '100 ms'", timeout))
    assert db.value("SELECT rescued FROM awa.rescue('callback')") == 0
    conn.commit_sql()
    assert db.value("SELECT rescued FROM awa.rescue('callback')") == 0
    assert db.state(job.job_id) == "waiting_external"
    conn.begin()
    resolve(db, "heartbeat", callback, "1 us", conn=conn)
    conn.rollback_sql()
    assert db.value("SELECT rescued FROM awa.rescue('callback')") == 0


# Operators


def test_cancelling_a_parked_job(db):
    job, callback = park(db)
    assert db.value("SELECT awa.cancel_job(%s, 'no')::text", job.job_id) == "cancelled"
    assert "no" in str(db.job(job.job_id).errors)
    assert counts(db) == (0, 0, 0, 0, 0, 0, 1)
    with raises("P0002"):
        resolve(db, "complete", callback)


def test_deleting_a_parked_job(db):
    job, callback = park(db, job=running(db, unique_key="u"))
    assert db.value("SELECT awa.delete_job(%s)", job.job_id) is True
    assert db.state(job.job_id) is None and counts(db) is not None
    assert counts(db) == (0, 0, 0, 0, 0, 0, 0)
    with raises("P0002"):
        resolve(db, "complete", callback)
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0
    assert db.insert(unique_key="u")[0] != job.job_id


def test_retrying_a_parked_job(db):
    job, callback = park(db)
    assert db.value("SELECT awa.retry_job(%s)::text", job.job_id) == "available"
    assert db.job(job.job_id).attempt == 0
    with raises("P0002"):
        resolve(db, "complete", callback)


def test_cancelled_by_its_key(db):
    job, _ = park(db, job=running(db, unique_key="u"))
    assert db.value("SELECT awa.cancel_by_unique_key('u')") == job.job_id
    assert db.state(job.job_id) == "cancelled"


@pytest.mark.parametrize("how, end", [
    ("complete", "completed"), ("fail", "cancelled"), ("retry", "cancelled"),
    ("timeout", "cancelled"), ("resume", "running"),
])
def test_a_request_to_stop_comes_before_the_callback(db, how, end):
    job = running(db)
    callback = register(db, job.receipt)
    assert db.value("SELECT awa.cancel_job(%s, 'stop')::text", job.job_id) == "running"
    wait(db, job.receipt)
    assert db.state(job.job_id) == "waiting_external"
    db.check()
    if how == "timeout":
        resolve(db, "heartbeat", callback, "1 us")
    elif how == "resume":
        resolve(db, "resume", callback)
        assert db.column("SELECT awa.cancel_requested(%s)", [job.receipt]) == [job.receipt]
    else:
        arguments = ["x"] if how == "fail" else []
        assert resolve(db, how, callback, *arguments) == end
    wait_until(lambda: db.state(job.job_id) == end)


# Unique keys

ALL = ["scheduled", "available", "running", "completed", "retryable", "failed", "cancelled"]


def holds(db, key="u"):
    return db.column("SELECT job_id FROM awa.job_unique_claims WHERE unique_key = %s", key.encode())


@pytest.mark.parametrize("how", ["complete", "fail", "retry", "resume", "cancel", "timeout"])
@pytest.mark.parametrize("mask", ["default", "parked", "running", "end"])
def test_the_key_is_held_as_the_mask_says(db, mask, how):
    states = {
        "default": ["scheduled", "available", "running", "retryable", "waiting_external"],
        "parked": ["waiting_external"],
        "running": ["available", "running", "retryable"],
        "end": ["completed", "failed", "cancelled"],
    }[mask]
    job_id = db.value(
        "SELECT awa.insert_job('k', unique_key => 'u', opts => %s)",
        Jsonb({"unique_states": states}),
    )

    def check(state):
        assert db.state(job_id) == state
        assert holds(db) == ([job_id] if state in states else []), state
        db.check()

    job, = db.claim(deadline=HOUR)
    _, callback = park(db, job=job)
    check("waiting_external")
    if how == "cancel":
        db.execute("SELECT awa.cancel_job(%s)", job_id)
        check("cancelled")
    elif how == "timeout":
        resolve(db, "heartbeat", callback, "1 us")
        wait_until(lambda: db.state(job_id) == "retryable")
        check("retryable")
    else:
        resolve(db, how, callback, *(["x"] if how == "fail" else []))
        check({"complete": "completed", "fail": "failed", "retry": "available",
               "resume": "running"}[how])


def test_a_key_that_another_job_has_got_meanwhile(db):
    opts = Jsonb({"unique_states": ["available", "running"]})
    insert = "SELECT awa.insert_job('k', unique_key => 'u', opts => %s)"
    db.execute(insert, opts)
    job, = db.claim(deadline=HOUR)
    _, callback = park(db, job=job)
    other = db.value(insert, opts)
    assert other != job.job_id
    for how in ("resume", "retry"):
        with raises("23505"):
            resolve(db, how, callback)
    assert db.state(job.job_id) == "waiting_external"
    # And the other way round.
    parked = Jsonb({"unique_states": ["waiting_external"]})
    db.execute(insert.replace("'u'", "'v'"), parked)
    db.execute(insert.replace("'u'", "'v'"), parked)
    db.execute("SELECT awa.cancel_job(%s)", other)
    first, second = db.claim(max_jobs=2, deadline=HOUR)
    park(db, job=first)
    register(db, second.receipt)
    with raises("23505"):
        wait(db, second.receipt)
    assert db.state(second.job_id) == "running"


# Transactions


def test_a_roll_back_takes_everything_back(db):
    conn = db.connect()
    job = running(db)
    conn.begin()
    register(db, job.receipt, conn=conn)
    conn.rollback_sql()
    assert db.job(job.job_id).callback_id is None
    callback = register(db, job.receipt)
    conn.begin()
    wait(db, job.receipt, conn=conn)
    assert db.state(job.job_id) == "running" and counts(db)[:2] == (1, 0)
    conn.rollback_sql()
    assert db.state(job.job_id) == "running" and counts(db)[:2] == (1, 0)
    wait(db, job.receipt)
    for how in ("complete", "retry", "resume"):
        conn.begin()
        resolve(db, how, callback, conn=conn)
        db.check()
        conn.rollback_sql()
        assert db.state(job.job_id) == "waiting_external" and counts(db)[:2] == (0, 1)
        db.check()
    assert resolve(db, "complete", callback) == "completed"


def test_all_in_one_transaction(db):
    """Claimed, parked, resumed, parked again and completed: each sees what came before."""
    db.insert()
    conn = db.connect()
    conn.begin()
    job, = db.claim(conn=conn, deadline=HOUR)
    _, callback = park(db, job=job, conn=conn)
    with raises("AW001"), conn.transaction():
        conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    resolve(db, "resume", callback, Jsonb(1), conn=conn)
    assert conn.value("SELECT awa.callback_result(%s)", job.receipt) == 1
    conn.execute("SAVEPOINT a")
    _, second = park(db, job=job, conn=conn)
    with raises("P0002"), conn.transaction():
        resolve(db, "resume", callback, conn=conn)
    conn.execute("ROLLBACK TO a")
    with raises("P0002"), conn.transaction():
        resolve(db, "resume", second, conn=conn)
    _, third = park(db, job=job, conn=conn)
    conn.commit_sql()
    assert db.state(job.job_id) == "waiting_external" and counts(db)[:2] == (0, 1)
    db.check()
    conn.begin()
    resolve(db, "resume", third, conn=conn)
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    with raises("AW001"), conn.transaction():
        wait(db, job.receipt, conn=conn)
    conn.commit_sql()
    assert db.state(job.job_id) == "completed"


# Progress


def say(db, receipt, percent, conn=None):
    (conn or db.conn).execute("SELECT awa.set_progress(%s, %s)", (receipt, percent))


def progress(db, job):
    return db.job(job.job_id).progress["percent"]


def test_progress_goes_through_a_callback(db):
    job = running(db)
    say(db, job.receipt, 30)
    _, callback = park(db, job=job)
    assert progress(db, job) == 30
    with raises("AW001"):
        say(db, job.receipt, 40)
    resolve(db, "resume", callback, Jsonb("x"))
    say(db, job.receipt, 50)
    assert progress(db, job) == 50
    assert db.value("SELECT awa.callback_result(%s)", job.receipt) == "x"
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 1
    rebuild(db)
    assert progress(db, job) == 50
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0


@pytest.mark.parametrize("end, attempt", [("timeout", 2), ("retry", 1), ("fail", None)])
def test_progress_outlives_the_end_of_a_parked_attempt(db, end, attempt):
    job = running(db)
    say(db, job.receipt, 30)
    _, callback = park(db, "100 ms" if end == "timeout" else HOUR, job)
    if end != "timeout":
        resolve(db, end, callback, *(["broken"] if end == "fail" else []))
    wait_until(lambda: db.state(job.job_id) != "waiting_external", 2)
    assert progress(db, job) == 30
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0
    if attempt:
        again, = wait_until(lambda: db.claim(deadline=HOUR))
        assert (again.attempt, again.progress["percent"]) == (attempt, 30)


@pytest.mark.parametrize("commits", [True, False])
def test_progress_and_parking_in_one_transaction(db, commits):
    job = running(db)
    conn = db.connect()
    conn.begin()
    say(db, job.receipt, 10, conn)
    _, callback = park(db, job=job, conn=conn)
    with raises("AW001"), conn.transaction():
        say(db, job.receipt, 20, conn)
    resolve(db, "resume", callback, conn=conn)
    say(db, job.receipt, 30, conn)
    park(db, job=job, conn=conn)
    conn.commit_sql() if commits else conn.rollback_sql()
    db.check()
    if commits:
        assert db.state(job.job_id) == "waiting_external" and progress(db, job) == 30
    else:
        assert db.state(job.job_id) == "running" and db.job(job.job_id).progress is None


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_strict_transactions(db, level):
    job = running(db)
    conn = db.connect()
    conn.execute(f"BEGIN ISOLATION LEVEL {level}")
    conn.execute("SELECT count(*) FROM awa.jobs")
    callback = register(db, job.receipt)  # after the snapshot
    wait(db, job.receipt)
    assert resolve(db, "resume", callback, conn=conn) == job.receipt
    conn.commit_sql()
    assert db.state(job.job_id) == "running"


def test_read_only(db):
    job, callback = park(db)
    conn = db.connect()
    conn.execute("BEGIN READ ONLY")
    with raises("25006"):
        resolve(db, "complete", callback, conn=conn)
    conn.rollback_sql()


# Races


RESOLVERS = [("complete",), ("fail", "x"), ("retry",), ("resume",)]


@pytest.mark.parametrize("second", RESOLVERS, ids=lambda how: how[0])
@pytest.mark.parametrize("first", RESOLVERS, ids=lambda how: how[0])
def test_one_of_two_resolvers_wins(db, first, second):
    job, callback = park(db)
    a, b = db.connect(), db.connect()
    a.begin()
    resolve(db, first[0], callback, *first[1:], conn=a)
    other = Background(resolve, db, second[0], callback, *second[1:], conn=b)
    wait_blocked(db.conn, b.info.backend_pid)
    a.commit_sql()
    with raises("P0002"):
        other.result()
    ends = {"complete": "completed", "fail": "failed", "retry": "available", "resume": "running"}
    assert db.state(job.job_id) == ends[first[0]]


@pytest.mark.parametrize("second", RESOLVERS, ids=lambda how: how[0])
def test_the_second_wins_if_the_first_rolls_back(db, second):
    job, callback = park(db)
    a, b = db.connect(), db.connect()
    a.begin()
    resolve(db, "complete", callback, conn=a)
    other = Background(resolve, db, second[0], callback, *second[1:], conn=b)
    wait_blocked(db.conn, b.info.backend_pid)
    a.rollback_sql()
    other.result()
    ends = {"complete": "completed", "fail": "failed", "retry": "available", "resume": "running"}
    assert db.state(job.job_id) == ends[second[0]]


def test_many_resolvers_at_once(db):
    points = DebugPoints(db)
    job, callback = park(db)
    conns = [db.connect() for _ in range(6)]
    with points.at("callback_found") as found:
        calls = [
            Background(resolve, db, *how, conn=conn)
            for conn, how in zip(conns, [
                ("complete", callback), ("fail", callback, "x"), ("retry", callback),
                ("resume", callback), ("complete", callback), ("resume", callback),
            ])
        ]
        found.wait(6)
    won = []
    for call in calls:
        try:
            won.append(call.result())
        except psycopg.Error as error:
            assert error.diag.sqlstate == "P0002"
    assert len(won) == 1


def test_resume_races_with_parking(db):
    """Whoever comes first, the attempt goes on."""
    job = running(db)
    callback = register(db, job.receipt)
    a, b = db.connect(), db.connect()
    a.begin()
    resolve(db, "resume", callback, conn=a)
    parking = Background(wait, db, job.receipt, conn=b)
    wait_blocked(db.conn, b.info.backend_pid)
    a.commit_sql()
    parking.result()
    assert db.state(job.job_id) == "running"
    callback = register(db, job.receipt)
    a.begin()
    wait(db, job.receipt, conn=a)
    resuming = Background(resolve, db, "resume", callback, conn=b)
    wait_blocked(db.conn, b.info.backend_pid)
    a.commit_sql()
    assert resuming.result() == job.receipt
    assert db.state(job.job_id) == "running"


def test_a_replaced_token_loses_the_race(db):
    job = running(db)
    callback = register(db, job.receipt)
    a, b = db.connect(), db.connect()
    a.begin()
    register(db, job.receipt, conn=a)
    late = Background(resolve, db, "complete", callback, conn=b)
    wait_blocked(db.conn, b.info.backend_pid)
    a.commit_sql()
    with raises("P0002"):
        late.result()
    assert db.state(job.job_id) == "running"


def test_the_rescue_and_a_resolver(db):
    job, callback = park(db)
    conn = db.connect()
    conn.begin()
    resolve(db, "heartbeat", callback, "1 us", conn=conn)
    assert resolve(db, "complete", callback, conn=conn) == "completed"
    assert db.value("SELECT rescued FROM awa.rescue('callback')") == 0
    conn.commit_sql()
    assert db.state(job.job_id) == "completed"
    with DebugPoints(db).at("rescue_callback") as rescue:
        job, callback = park(db, "1 us")
        rescue.wait()
        late = Background(resolve, db, "complete", callback, conn=conn)
        wait_blocked(db.conn, conn.info.backend_pid)
    with raises("P0002"):
        late.result()
    assert db.state(job.job_id) == "retryable"


def test_an_interrupted_act_leaves_nothing(db):
    job, callback = park(db)
    conn = db.connect()
    with DebugPoints(db).at("callback_written") as written:
        call = Background(resolve, db, "resume", callback, conn=conn)
        written.wait()
        db.execute("SELECT pg_cancel_backend(%s)", conn.info.backend_pid)
        with raises("57014"):
            call.result()
    assert db.state(job.job_id) == "waiting_external"
    db.check()
    assert resolve(db, "resume", callback) == job.receipt


# Memory that is rebuilt


def forget(db, how):
    if how == "rebuild":
        rebuild(db)
    else:
        db.server.restart("fast" if how == "restart" else "immediate")
        db.wait_served()
        db.check()


@pytest.mark.parametrize("how", ["rebuild", "restart", "crash"])
def test_parked_attempts_are_remembered(own_db, how):
    db = own_db
    conn, _, owned = with_owner(db)
    _, first = park(db, job=owned, conn=conn)
    job, callback = park(db)
    asked = running(db)
    asked_callback = register(db, asked.receipt)
    db.execute("SELECT awa.cancel_job(%s)", asked.job_id)
    wait(db, asked.receipt)
    registered = running(db)
    token = register(db, registered.receipt)
    short, _ = park(db, "2 s")
    resumed, early = park(db)
    resolve(db, "resume", early, Jsonb("x"))
    found = db.rows("SELECT id, state::text, callback_id, callback_timeout_at FROM awa.jobs ORDER BY 1")
    before = counts(db)
    assert before[:2] == (2, 4)
    forget(db, how)
    assert counts(db) == before
    assert db.rows(
        "SELECT id, state::text, callback_id, callback_timeout_at FROM awa.jobs ORDER BY 1"
    ) == found
    assert db.value("SELECT rescued FROM awa.rescue('owner')") == 0
    db.check()
    stale(db, job.receipt)
    assert db.value("SELECT awa.callback_result(%s)", resumed.receipt) == "x"
    db.execute("SELECT awa.complete(%s)", resumed.receipt)
    assert resolve(db, "resume", first) == owned.receipt
    db.execute("SELECT awa.rescue()")
    assert db.state(owned.job_id) == "running"
    if how != "rebuild":
        assert db.job(owned.job_id).deadline_at is not None
    forget(db, how)
    if how == "rebuild":
        assert db.state(owned.job_id) == "running"
    else:
        db.execute("SELECT awa.rescue()")
        assert db.state(owned.job_id) == "running", "it is a lease, not an orphan"
    assert resolve(db, "complete", callback) == "completed"
    assert resolve(db, "fail", asked_callback, "x") == "cancelled"
    wait(db, registered.receipt)
    assert resolve(db, "retry", token) == "available"
    wait_until(lambda: db.state(short.job_id) == "retryable", 5)
    wait(db, owned.receipt)
    db.execute("SELECT awa.complete(%s)", owned.receipt)


ACTS = ["register", "wait", "resume", "heartbeat", "complete", "fail", "retry", "cancel", "delete"]


def attempt_for(db, act):
    if act in ("register", "wait"):
        job = running(db)
        return job, register(db, job.receipt)
    return park(db)


def perform(db, conn, act, job, callback):
    if act == "register":
        register(db, job.receipt, conn=conn)
    elif act == "wait":
        wait(db, job.receipt, conn=conn)
    elif act == "cancel":
        conn.execute("SELECT awa.cancel_job(%s)", (job.job_id,))
    elif act == "delete":
        conn.execute("SELECT awa.delete_job(%s)", (job.job_id,))
    else:
        arguments = {"fail": ["x"], "heartbeat": ["2 hours"]}.get(act, [])
        resolve(db, act, callback, *arguments, conn=conn)


AFTER = {
    "register": "running", "wait": "waiting_external", "resume": "running",
    "heartbeat": "waiting_external", "complete": "completed", "fail": "failed",
    "retry": "available", "cancel": "cancelled", "delete": None,
}


def picture(db):
    return db.rows("SELECT id, state::text, callback_id, callback_timeout_at FROM awa.jobs ORDER BY 1")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_open_transactions_at_a_rebuild(db, end):
    attempts = {act: attempt_for(db, act) for act in ACTS}
    before = picture(db)
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT a")
    for act, (job, callback) in attempts.items():
        perform(db, conn, act, job, callback)
    conn.execute("RELEASE a")
    stats = counts(db)
    rebuild(db)
    assert counts(db) == stats and picture(db) == before
    db.check()
    # Nobody else gets at them.
    other = db.connect()
    other.execute("SET lock_timeout = '50 ms'")
    for act, (job, callback) in attempts.items():
        with raises("55P03"):
            other.value("SELECT awa.resume_external(%s)", callback)
    conn.execute(end)
    db.check()
    expected = AFTER if end == "COMMIT" else {
        act: "running" if act in ("register", "wait") else "waiting_external" for act in ACTS
    }
    assert {act: db.state(job.job_id) for act, (job, _) in attempts.items()} == expected
    rebuild(db)
    db.check()
    assert {act: db.state(job.job_id) for act, (job, _) in attempts.items()} == expected


def test_a_transaction_with_savepoints_at_a_rebuild(db):
    """Of the rows that it wrote about an attempt, the last is rolled back after the rebuild."""
    job, callback = park(db)
    conn = db.connect()
    conn.begin()
    resolve(db, "resume", callback, conn=conn)
    conn.execute("SAVEPOINT a")
    _, second = park(db, job=job, conn=conn)
    rebuild(db)
    conn.execute("ROLLBACK TO a")
    rebuild(db)
    conn.commit_sql()
    assert db.state(job.job_id) == "running" and counts(db)[:2] == (1, 0)
    db.check()
    conn.begin()
    conn.execute("SAVEPOINT a")
    _, third = park(db, job=job, conn=conn)
    conn.execute("RELEASE a")
    rebuild(db)
    resolve(db, "resume", third, conn=conn)
    conn.commit_sql()
    assert db.state(job.job_id) == "running" and counts(db)[:2] == (1, 0)
    db.check()


@pytest.mark.parametrize("how", ["rebuild", "restart", "crash"])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_prepared_transactions(own_db, how, end):
    db = own_db
    attempts = {act: attempt_for(db, act) for act in ACTS}
    before, stats = picture(db), counts(db)
    conn = db.connect()
    conn.begin()
    for act, (job, callback) in attempts.items():
        perform(db, conn, act, job, callback)
    conn.execute("PREPARE TRANSACTION 'callbacks'")
    forget(db, how)
    assert counts(db) == stats and picture(db) == before
    db.execute(f"{end} PREPARED 'callbacks'")
    wait_until(lambda: db.value("SELECT bool_and(ok) FROM awa.check()"))
    expected = AFTER if end == "COMMIT" else {
        act: "running" if act in ("register", "wait") else "waiting_external" for act in ACTS
    }
    assert {act: db.state(job.job_id) for act, (job, _) in attempts.items()} == expected
    forget(db, how)
    assert {act: db.state(job.job_id) for act, (job, _) in attempts.items()} == expected


def test_parked_and_resumed_in_a_prepared_transaction(db):
    job = running(db)
    conn = db.connect()
    conn.begin()
    _, callback = park(db, job=job, conn=conn)
    resolve(db, "resume", callback, conn=conn)
    _, callback = park(db, job=job, conn=conn)
    conn.execute("PREPARE TRANSACTION 'p'")
    db.check()
    db.execute("COMMIT PREPARED 'p'")
    assert counts(db)[:2] == (0, 1)
    assert resolve(db, "complete", callback) == "completed"


def test_a_standby_shows_parked_jobs(own_db):
    db = own_db
    job, callback = park(db)
    standby = db.server.make_standby().start()
    try:
        with standby.connect(db.name) as conn:
            found = wait_until(lambda: conn.rows(
                "SELECT state::text, callback_id FROM awa.get_job(%s)", job.job_id))
            assert found == [("waiting_external", callback)]
            with raises("25006"):
                conn.execute("SELECT awa.complete_external(%s)", (callback,))
        standby.promote()
        with standby.connect(db.name) as conn:
            wait_until(lambda: not conn.value("SELECT pg_is_in_recovery()"))
            assert conn.value("SELECT awa.complete_external(%s)::text", callback) == "completed"
            assert conn.value("SELECT bool_and(ok) FROM awa.check()")
    finally:
        standby.destroy()


def test_a_parked_job_outlives_its_segment(own_db):
    """Rotation goes on around it."""
    db = own_db
    job, callback = park(db)
    for _ in range(3):
        db.execute("SELECT awa.maintain()")
    assert db.state(job.job_id) == "waiting_external"
    assert resolve(db, "complete", callback) == "completed"


# Access


def test_workers_of_the_queue_alone(db):
    role = f"w_{db.name}"
    db.execute(f"CREATE ROLE {role} LOGIN")
    db.execute("SELECT awa.grant_access(%s, 'worker', '{mine}')", role)
    try:
        conn = db.connect(user=role)
        other = running(db)
        callback = register(db, other.receipt)
        for call, value in (
            ("register_callback(%s, '1 s')", other.receipt), ("wait_for_callback(%s)", other.receipt),
            ("callback_result(%s)", other.receipt), ("complete_external(%s)", callback),
            ("fail_external(%s, 'x')", callback), ("retry_external(%s)", callback),
            ("resume_external(%s)", callback), ("heartbeat_callback(%s, '1 s')", callback),
            ("cancel_callback(%s)", callback),
        ):
            with raises("42501"):
                conn.execute(f"SELECT awa.{call}", (value,))
        db.insert(queue="mine")
        job, = db.claim("mine", conn=conn)
        _, callback = park(db, job=job, conn=conn)
        assert resolve(db, "resume", callback, conn=conn) == job.receipt
    finally:
        db.close_sessions()
        db.execute(f"SELECT awa.revoke_access('{role}')")
        db.execute(f"DROP ROLE {role}")
