"""list_jobs, job_attempts, dump_job and terminal_jobs."""

import pytest

from harness import raises, wait_until


def listed(db, **filters):
    named = ", ".join(f"{name} => %({name})s" for name in filters)
    with db.conn.cursor() as cur:
        cur.execute(f"SELECT id FROM awa.list_jobs({named})", filters)
        return [row[0] for row in cur.fetchall()]


def attempts(db, job_id):
    return db.rows(
        "SELECT attempt, outcome, error FROM awa.job_attempts(%s)", job_id
    )


def test_list_newest_first(db):
    ids = db.insert(5)
    assert listed(db) == ids[::-1]
    assert listed(db, max_rows=2) == [ids[4], ids[3]]
    assert listed(db, before_id=ids[3], max_rows=2) == [ids[2], ids[1]]
    assert listed(db, max_rows=0) == []
    with raises("22023"):
        listed(db, max_rows=-1)


def test_list_filters(db):
    one, = db.insert(queue="a", kind="x", tags=["red", "big"])
    two, = db.insert(queue="b", kind="x")
    three, = db.insert(queue="a", kind="y", run_at="2100-01-01")
    assert listed(db, queue="a") == [three, one]
    assert listed(db, kind="x") == [two, one]
    assert listed(db, tag="red") == [one]
    assert listed(db, tag="re") == []
    assert listed(db, state="scheduled") == [three]
    assert listed(db, state="available", queue="b") == [two]
    assert listed(db, queue="c") == []


def test_attempts_in_place(db):
    runtime = db.value("SELECT awa.register_runtime('w', 'heartbeat')")
    job_id, = db.insert()
    assert attempts(db, job_id) == []
    for text in ("one", "two"):
        job, = wait_until(lambda: db.claim(runtime=runtime), 3)
        db.execute("SELECT awa.fail(%s, %s, '0')", job.receipt, text)
    job, = wait_until(db.claim, 3)
    found = db.rows("SELECT * FROM awa.job_attempts(%s)", job_id)
    assert [(row[0], row[5], row[6]) for row in found] == [
        (1, "retryable", "one"), (2, "retryable", "two"), (3, None, None),
    ]
    assert [row[2] for row in found] == [runtime, runtime, None]
    assert found[2][1] == job.receipt and found[2][4] is None
    assert found[0][3] <= found[0][4] <= found[1][3]
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert attempts(db, job_id)[2] == (3, "completed", None)


def test_attempts_of_every_outcome(db):
    job_id, = db.insert()
    for call in ("release(ARRAY[%s]::bigint[])", "snooze(%s, '0')", "fail(%s, 'x', '0')",
                 "cancel_attempt(%s, 'why')"):
        job, = wait_until(db.claim, 3)
        db.execute(f"SELECT awa.{call}", job.receipt)
    assert attempts(db, job_id) == [
        (1, "released", None), (1, "snoozed", None), (1, "retryable", "x"),
        (2, "cancelled", "why"),
    ]


def test_a_failed_job_carries_the_errors_of_all_its_attempts(db):
    job_id = db.value("SELECT awa.insert_job('k', max_attempts => 3)")
    for text in ("one", "two", "three"):
        job, = wait_until(db.claim, 3)
        db.execute("SELECT awa.fail(%s, %s, '0')", job.receipt, text)
    errors = db.job(job_id).errors
    assert [(error["attempt"], error["error"]) for error in errors] == [
        (1, "one"), (2, "two"), (3, "three")
    ]


def test_a_long_backoff_carries_them_too(db):
    job_id, = db.insert()
    for text, delay in (("one", "0"), ("two", "1 h")):
        job, = wait_until(db.claim, 3)
        db.execute("SELECT awa.fail(%s, %s, %s)", job.receipt, text, delay)
    assert [error["error"] for error in db.job(job_id).errors] == ["one", "two"]
    assert attempts(db, job_id) == [(1, "retryable", "one"), (2, "retryable", "two")]


def test_reads_of_nothing(db):
    assert attempts(db, 1) == [] and attempts(db, None) == []
    assert db.value("SELECT awa.dump_job(1)") is None
    assert db.value("SELECT awa.dump_job(NULL)") is None


def test_dump(db):
    job_id = db.value("SELECT awa.insert_job('k', '{\"n\": 1.10}', tags => ARRAY['t'])")
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'x', '1 h')", job.receipt)
    dump = db.value("SELECT awa.dump_job(%s)", job_id)
    assert (dump["id"], dump["kind"], dump["state"], dump["tags"]) == (
        job_id, "k", "retryable", ["t"]
    )
    assert [(a["attempt"], a["error"]) for a in dump["attempts"]] == [(1, "x")]
    assert db.value("SELECT (awa.dump_job(%s) -> 'args')::text", job_id) == '{"n": 1.10}'


def test_terminal_jobs(db):
    ids = db.insert(4)
    done, failed, gone, _ = db.claim(max_jobs=4)
    db.execute("SELECT awa.complete(%s)", done.receipt)
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", failed.receipt)
    db.execute("SELECT awa.cancel_attempt(%s, 'x')", gone.receipt)
    assert db.rows("SELECT id, state::text FROM awa.terminal_jobs ORDER BY id") == [
        (ids[0], "completed"), (ids[1], "failed"), (ids[2], "cancelled")
    ]
    columns = "SELECT attname, atttypid FROM pg_attribute WHERE attrelid = %s::regclass" \
        " AND attnum > 0 ORDER BY attnum"
    assert db.rows(columns, "awa.terminal_jobs") == db.rows(columns, "awa.jobs")


def test_a_caller_sees_the_queues_it_may_read(db):
    mine, = db.insert(queue="mine")
    theirs, = db.insert(queue="theirs")
    db.execute("CREATE ROLE looker LOGIN")
    try:
        db.execute("GRANT USAGE ON SCHEMA awa TO looker")
        db.execute("GRANT EXECUTE ON FUNCTION awa.list_jobs, awa.job_attempts, awa.dump_job"
                   " TO looker")
        db.execute("INSERT INTO awa.queue_acl VALUES ('looker'::regrole, 'reader', 'mine')")
        conn = db.connect(user="looker")
        assert conn.column("SELECT id FROM awa.list_jobs()") == [mine]
        assert conn.value("SELECT awa.dump_job(%s) ->> 'queue'", mine) == "mine"
        assert conn.value("SELECT awa.dump_job(%s)", theirs) is None
    finally:
        db.close_sessions()
        db.execute("DELETE FROM awa.queue_acl")
        db.execute("DROP OWNED BY looker")
        db.execute("DROP ROLE looker")


@pytest.mark.parametrize("call", ["count(*) FROM awa.list_jobs()",
                                  "count(*) FROM awa.terminal_jobs",
                                  "count(*) FROM awa.job_attempts(%(id)s)",
                                  "awa.dump_job(%(id)s) ->> 'kind'"])
def test_read_only_transactions_read(db, call):
    job_id, = db.insert()
    conn = db.connect()
    conn.execute("BEGIN READ ONLY")
    conn.execute(f"SELECT {call}", {"id": job_id})


def test_a_standby_reads(own_db):
    job_id, = own_db.insert()
    job, = own_db.claim()
    own_db.execute("SELECT awa.complete(%s, '7')", job.receipt)
    standby = own_db.server.make_standby().start()
    try:
        with standby.connect(own_db.name) as conn:
            wait_until(lambda: conn.column("SELECT id FROM awa.terminal_jobs") == [job_id], 20)
            assert conn.column("SELECT id FROM awa.list_jobs()") == [job_id]
            assert conn.value("SELECT outcome FROM awa.job_attempts(%s)", job_id) == "completed"
            assert conn.value("SELECT awa.dump_job(%s) ->> 'state'", job_id) == "completed"
            assert conn.value("SELECT awa.get_result(%s, '1 s')", job_id) == 7
            for call in ("cancel_job(1)", "retry_job(1)", "delete_job(1)", "retry_failed()",
                         "discard_failed()", "snooze(1, '1 s')", "cancel_attempt(1, 'x')",
                         "configure_queue('q', '{}')", "cancel_by_unique_key('a')",
                         "cancel_requested('{1}')"):
                with raises("25006"):
                    conn.execute(f"SELECT awa.{call}")
    finally:
        standby.destroy()
