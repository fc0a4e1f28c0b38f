"""cancel_job and its kin: whatever the job does, one act ends it."""

import pytest

from harness import Background, Database, raises, wait_blocked, wait_until


LATER = "SELECT awa.insert_job('k', queue => %s, run_at => now() + interval '1 h')"


def cancel(db, job_id, *arguments, conn=None):
    marks = ", %s" * len(arguments)
    return (conn or db.conn).value(f"SELECT awa.cancel_job(%s{marks})::text", job_id, *arguments)


def counts(db, queue="default"):
    return db.row(
        "SELECT scheduled, available, running, retryable, cancelled_total"
        " FROM awa.queue_stats WHERE queue = %s",
        queue,
    )


def requested(db, *receipts):
    return db.column("SELECT awa.cancel_requested(%s)", list(receipts))


def test_a_ready_job(db):
    first, second, third = db.insert(3)
    assert cancel(db, second, "not needed") == "cancelled"
    found = db.job(second)
    assert (found.state, found.attempt) == ("cancelled", 0)
    assert "not needed" in str(found.errors) and found.finalized_at is not None
    assert counts(db) == (0, 2, 0, 0, 1)
    assert [job.job_id for job in db.claim(max_jobs=10)] == [first, third]


def test_a_roll_back_gives_it_back_to_its_place(db):
    ids = db.insert(5)
    conn = db.connect()
    conn.begin()
    assert cancel(db, ids[0], conn=conn) == "cancelled"
    assert cancel(db, ids[2], conn=conn) == "cancelled"
    assert cancel(db, ids[2], conn=conn) == "cancelled"
    db.check()
    conn.rollback_sql()
    assert [db.state(job_id) for job_id in ids] == ["available"] * 5
    assert [job.job_id for job in db.claim(max_jobs=10)] == ids


def test_nobody_claims_it_while_the_cancel_is_open(db):
    job_id, = db.insert()
    conn = db.connect()
    conn.begin()
    cancel(db, job_id, conn=conn)
    assert db.claim() == [] and db.state(job_id) == "available"
    conn.commit_sql()
    assert db.claim() == [] and db.state(job_id) == "cancelled"


def test_a_savepoint_takes_the_cancel_back(db):
    job_id, = db.insert()
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT s")
    cancel(db, job_id, conn=conn)
    conn.execute("ROLLBACK TO s")
    conn.commit_sql()
    assert [job.job_id for job in db.claim()] == [job_id]


def test_two_cancels_at_once_have_one_winner(db):
    job_id, = db.insert()
    first, second = db.connect(), db.connect()
    first.begin()
    cancel(db, job_id, "first", conn=first)
    other = Background(cancel, db, job_id, "second", conn=second)
    wait_blocked(db.conn, second.info.backend_pid)
    first.commit_sql()
    assert other.result() == "cancelled"
    assert "first" in str(db.job(job_id).errors) and "second" not in str(db.job(job_id).errors)
    assert counts(db)[4] == 1


def test_a_job_backing_off(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'broken', '30 s')", job.receipt)
    assert cancel(db, job_id, "enough") == "cancelled"
    found = db.job(job_id)
    assert (found.state, found.attempt) == ("cancelled", 1)
    assert "broken" in str(found.errors) and "enough" in str(found.errors)
    assert counts(db) == (0, 0, 0, 0, 1)


def test_a_roll_back_gives_it_back_to_its_time(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'broken', '1 s')", job.receipt)
    due = db.job(job_id).run_at
    conn = db.connect()
    conn.begin()
    cancel(db, job_id, conn=conn)
    wait_until(lambda: db.value("SELECT clock_timestamp() > %s + interval '0.2 s'", due))
    assert db.claim() == []
    conn.rollback_sql()
    job, = wait_until(db.claim, 2)
    assert (job.job_id, job.attempt) == (job_id, 2)


def test_jobs_that_came_back_keep_their_order(db):
    ids = db.insert(4)
    for job in db.claim(max_jobs=4):
        db.execute("SELECT awa.fail(%s, 'x', '0')", job.receipt)
    wait_until(lambda: counts(db)[1] == 4, 2)
    conn = db.connect()
    conn.begin()
    cancel(db, ids[1], conn=conn)
    conn.rollback_sql()
    assert cancel(db, ids[2]) == "cancelled"
    assert [job.job_id for job in db.claim(max_jobs=10)] == [ids[0], ids[1], ids[3]]


def test_a_scheduled_job(db):
    job_id = db.value("SELECT awa.insert_job('k', run_at => now() + '1 h')")
    assert cancel(db, job_id, "no") == "cancelled"
    assert db.value("SELECT count(*) FROM awa.deferred_jobs") == 0
    assert counts(db) == (0, 0, 0, 0, 1)
    assert "no" in str(db.job(job_id).errors)


def test_a_scheduled_job_rolled_back(db):
    job_id = db.value("SELECT awa.insert_job('k', run_at => now() + '1 h')")
    conn = db.connect()
    conn.begin()
    cancel(db, job_id, conn=conn)
    conn.rollback_sql()
    assert db.state(job_id) == "scheduled" and counts(db) == (1, 0, 0, 0, 0)


def test_cancels_of_scheduled_jobs_do_not_wait_for_one_another(db):
    ids = [[db.value(LATER, queue) for queue in ("a", "b")] for _ in range(2)]
    one, two = db.connect(), db.connect()
    for conn in (one, two):
        conn.begin()
        conn.execute("SET LOCAL lock_timeout = '5s'")
    cancel(db, ids[0][0], conn=one)
    cancel(db, ids[1][1], conn=two)
    cancel(db, ids[0][1], conn=one)
    cancel(db, ids[1][0], conn=two)
    one.commit_sql()
    two.rollback_sql()
    totals = "SELECT cancelled_total, scheduled FROM awa.queue_stats WHERE queue IN ('a', 'b')"
    assert db.rows(totals) == [(1, 1), (1, 1)]


def test_a_snoozed_job(db):
    job_id, = db.insert()
    job, = db.claim()
    db.execute("SELECT awa.snooze(%s, '30 s')", job.receipt)
    assert cancel(db, job_id) == "cancelled"
    assert counts(db) == (0, 0, 0, 0, 1)


def test_a_running_job_is_asked(db):
    job_id, = db.insert()
    job, = db.claim()
    assert requested(db, job.receipt) == []
    assert cancel(db, job_id, "please") == "running"
    assert cancel(db, job_id) == "running"
    assert db.state(job_id) == "running"
    assert requested(db, job.receipt, job.receipt + 1) == [job.receipt]


@pytest.mark.parametrize("end", [
    "awa.fail(%s, 'x')", "awa.fail(%s, 'x', terminal => true)", "awa.snooze(%s, '1 s')",
    "awa.release(ARRAY[%s]::bigint[])", "awa.cancel_attempt(%s, 'x')",
])
def test_any_end_but_completion_cancels_what_was_asked(db, end):
    job_id, = db.insert()
    job, = db.claim()
    cancel(db, job_id, "please")
    db.execute(f"SELECT {end}", job.receipt)
    assert db.state(job_id) == "cancelled"
    assert "please" in str(db.job(job_id).errors)
    assert counts(db) == (0, 0, 0, 0, 1)
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0


@pytest.mark.parametrize("call", ["complete(%s)", "complete_many(ARRAY[%s]::bigint[])"])
def test_completion_wins_over_a_request(db, call):
    job_id, = db.insert()
    job, = db.claim()
    cancel(db, job_id)
    db.execute(f"SELECT awa.{call}", job.receipt)
    assert db.state(job_id) == "completed"
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0


def test_fail_tells_that_the_job_is_cancelled(db):
    job_id, = db.insert()
    job, = db.claim()
    cancel(db, job_id)
    assert db.value("SELECT awa.fail(%s, 'x')::text", job.receipt) == "cancelled"


def test_heartbeats_tell_the_owner(db):
    runtime = db.value("SELECT awa.register_runtime('w', 'heartbeat')")
    ids = db.insert(2)
    one, two = db.claim(max_jobs=2, runtime=runtime)
    assert db.rows("SELECT * FROM awa.heartbeat(%s)", runtime) == []
    cancel(db, ids[1])
    assert db.rows("SELECT * FROM awa.heartbeat(%s)", runtime) == [(two.receipt, ids[1])]
    db.execute("SELECT awa.complete(%s)", two.receipt)
    assert db.rows("SELECT * FROM awa.heartbeat(%s)", runtime) == []
    db.execute("SELECT awa.complete(%s)", one.receipt)


def test_a_rescued_job_that_was_asked_is_cancelled(db):
    job_id, = db.insert()
    db.claim(deadline="300 ms")
    cancel(db, job_id)
    db.wait_state(job_id, "cancelled")


def test_a_request_that_rolls_back(db):
    job_id, = db.insert()
    job, = db.claim()
    conn = db.connect()
    conn.begin()
    cancel(db, job_id, conn=conn)
    conn.rollback_sql()
    assert requested(db, job.receipt) == []
    assert db.value("SELECT awa.fail(%s, 'x', '1 h')::text", job.receipt) == "retryable"


def test_force(db):
    job_id, = db.insert()
    job, = db.claim()
    assert cancel(db, job_id, "now", True) == "cancelled"
    assert db.state(job_id) == "cancelled" and "now" in str(db.job(job_id).errors)
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)
    assert counts(db) == (0, 0, 0, 0, 1)


def test_force_after_a_request(db):
    job_id, = db.insert()
    job, = db.claim()
    cancel(db, job_id, "please")
    assert cancel(db, job_id, "now", True) == "cancelled"
    assert requested(db, job.receipt) == []
    assert db.value("SELECT count(*) FROM awa.attempt_state") == 0


def test_finished_jobs_keep_their_state(db):
    ids = db.insert(3)
    one, two, three = db.claim(max_jobs=3)
    db.execute("SELECT awa.complete(%s)", one.receipt)
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", two.receipt)
    db.execute("SELECT awa.cancel_attempt(%s, 'x')", three.receipt)
    assert [cancel(db, job_id, "late", True) for job_id in ids] == [
        "completed", "failed", "cancelled"
    ]
    assert counts(db)[4] == 1


def test_unknown_and_null(db):
    with raises("P0002"):
        cancel(db, 1)
    with raises("22023"):
        cancel(db, None)


def test_a_job_of_the_same_transaction(db):
    conn = db.connect()
    conn.begin()
    job_id = conn.value("SELECT awa.insert_job('k')")
    with raises("55000"):
        cancel(db, job_id, conn=conn)
    conn.rollback_sql()


def test_a_claim_that_is_still_open_is_waited_for(db):
    job_id, = db.insert()
    worker, other = db.connect(), db.connect()
    worker.begin()
    db.claim(conn=worker)
    waiting = Background(cancel, db, job_id, conn=other)
    wait_blocked(db.conn, other.info.backend_pid)
    worker.commit_sql()
    assert waiting.result() == "running"


def test_the_key_goes_free(db):
    first = db.value("SELECT awa.insert_job('k', unique_key => 'a')")
    cancel(db, first)
    second = db.value("SELECT awa.insert_job('k', unique_key => 'a', run_at => now() + '1 h')")
    assert second != first
    cancel(db, second)
    assert db.value("SELECT awa.insert_job('k', unique_key => 'a')") not in (first, second)


def test_by_unique_key(db):
    job_id = db.value("SELECT awa.insert_job('k', unique_key => 'a')")
    call = "SELECT awa.cancel_by_unique_key(%s)"
    assert db.value(call, "b") is None
    assert db.value(call, "a") == job_id
    assert db.state(job_id) == "cancelled"
    assert db.value(call, "a") is None
    job_id = db.value("SELECT awa.insert_job('k', unique_key => 'a')")
    job, = db.claim()
    assert db.value(call, "a") == job_id and db.state(job_id) == "running"
    assert requested(db, job.receipt) == [job.receipt]
    with raises("22023"):
        db.value(call, None)


def test_prepared_transactions(db):
    ready, running, scheduled, kept = *db.insert(2), db.value(
        "SELECT awa.insert_job('k', run_at => now() + '1 h')"
    ), db.value("SELECT awa.insert_job('k', priority => 4)")
    db.execute("SELECT awa.cancel_job(%s)", ready)
    ready, = db.insert()
    job, = db.claim()
    assert job.job_id == running
    for gid, ids in (("yes", (ready, running, scheduled)), ("no", (kept,))):
        conn = db.connect()
        conn.begin()
        for job_id in ids:
            cancel(db, job_id, conn=conn)
        conn.execute(f"PREPARE TRANSACTION '{gid}'")
    db.execute("SELECT awa.rebuild()")
    db.check()
    db.execute("COMMIT PREPARED 'yes'")
    db.execute("ROLLBACK PREPARED 'no'")
    wait_until(lambda: requested(db, job.receipt) == [job.receipt], 3)
    assert [db.state(job_id) for job_id in (ready, running, scheduled, kept)] == [
        "cancelled", "running", "cancelled", "available"
    ]
    assert [job.job_id for job in db.claim(max_jobs=5)] == [kept]


def test_a_rebuild_under_an_open_cancel(db):
    ids = db.insert(4)
    job, = db.claim()
    conns = [db.connect(), db.connect()]
    for conn, job_id in zip(conns, ids[1:3], strict=True):
        conn.begin()
        cancel(db, job_id, conn=conn)
    db.execute("SELECT awa.rebuild()")
    conns[0].commit_sql()
    conns[1].rollback_sql()
    wait_until(lambda: counts(db) == (0, 2, 1, 0, 1), 5)
    # The worker settles what transactions of an earlier memory did, one after the other.
    claimed = []
    wait_until(lambda: claimed.extend(db.claim(max_jobs=5)) or len(claimed) >= 2, 5)
    assert sorted(job.job_id for job in claimed) == ids[2:]
    db.execute("SELECT awa.complete(%s)", job.receipt)


@pytest.mark.parametrize("end", ["restart", "crash"])
def test_it_all_survives(own_db, end):
    ids = own_db.insert(3)
    later = own_db.value("SELECT awa.insert_job('k', run_at => now() + '1 h')")
    job, = own_db.claim(deadline="1 h")
    for job_id in (ids[0], ids[1], later):
        own_db.execute("SELECT awa.cancel_job(%s, 'why')", job_id)
    own_db.close_sessions()
    if end == "restart":
        own_db.server.restart()
    else:
        own_db.server.crash()
    own_db.wait_served()
    assert [own_db.state(job_id) for job_id in (*ids, later)] == [
        "running", "cancelled", "available", "cancelled"
    ]
    assert requested(own_db, job.receipt) == [job.receipt]
    assert counts(own_db) == (0, 1, 1, 0, 2)
    own_db.execute("SELECT awa.fail(%s, 'x')", job.receipt)
    assert own_db.state(ids[0]) == "cancelled"


def test_cancelled_jobs_do_not_keep_their_segment(new_server):
    database = Database(new_server({"awa.rotate_interval": "100ms"}))
    ids = database.insert(20)
    for job_id in ids:
        cancel(database, job_id)
    wait_until(
        lambda: database.value("SELECT generation > 0 FROM awa.segments WHERE segment = 0"), 20
    )
    assert counts(database) == (0, 0, 0, 0, 20)
    assert database.state(ids[0]) == "cancelled"
    database.check()


def test_a_job_in_a_cold_chunk(new_server):
    server = new_server({"awa.max_chunks": 64})
    database = Database(server)
    first, *_, last = [database.insert(1024)[0] for _ in range(100)]
    assert cancel(database, last + 5) == "cancelled"
    assert cancel(database, first + 5) == "cancelled"
    assert counts(database) == (0, 100 * 1024 - 2, 0, 0, 2)
    database.check()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_every_isolation_level(db, isolation):
    conn = db.connect()
    conn.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    conn.value("SELECT count(*) FROM awa.jobs")
    ids = db.insert(2)
    job, = db.claim()
    assert cancel(db, ids[0], conn=conn) == "running"
    assert cancel(db, ids[1], conn=conn) == "cancelled"
    conn.commit_sql()
    assert requested(db, job.receipt) == [job.receipt]


def test_read_only(db):
    job_id, = db.insert()
    conn = db.connect()
    conn.execute("BEGIN READ ONLY")
    with raises("25006"):
        cancel(db, job_id, conn=conn)


def test_privileges(db):
    db.execute("CREATE ROLE canceller LOGIN")
    db.execute("GRANT USAGE ON SCHEMA awa TO canceller")
    db.execute("GRANT EXECUTE ON FUNCTION awa.cancel_job, awa.cancel_requested TO canceller")
    try:
        job_id, = db.insert()
        conn = db.connect(user="canceller")
        with raises("42501"):
            cancel(db, job_id, conn=conn)
        assert db.state(job_id) == "available"
        db.execute("INSERT INTO awa.queue_acl VALUES ('canceller'::regrole, 'operator', 'default')")
        assert cancel(db, job_id, conn=conn) == "cancelled"
    finally:
        db.close_sessions()
        db.execute("DELETE FROM awa.queue_acl")
        db.execute("DROP OWNED BY canceller")
        db.execute("DROP ROLE canceller")
