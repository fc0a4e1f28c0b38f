"""on_conflict replace and debounce, and throttle: what a second producer of a key does."""

import pytest
from psycopg.types.json import Jsonb

from harness import Background, raises, wait_blocked, wait_until


def insert(db, key="a", conn=None, opts=None, **columns):
    job = {"kind": "k", "unique_key": key, "opts": opts or {}} | columns
    row = (conn or db.conn).row(
        "SELECT job_id, duplicate FROM awa.insert_jobs(%s)", Jsonb([job])
    )
    return row


def replace(db, how="replace", **columns):
    return insert(db, opts={"on_conflict": how} | columns.pop("opts", {}), **columns)


def test_replace_a_ready_job(db):
    job_id, _ = insert(
        db, args={"n": 1}, tags=["old"], metadata={"m": 1}, priority=3, max_attempts=7
    )
    created = db.job(job_id).created_at
    assert replace(
        db, args={"n": 2}, tags=["new"], metadata={"m": 2}, priority=1, kind="other",
        queue="elsewhere", max_attempts=3,
    ) == (job_id, True)
    found = db.job(job_id)
    assert (found.args, found.tags, found.metadata, found.priority) == (
        {"n": 2}, ["new"], {"m": 2}, 1,
    )
    assert (found.kind, found.queue, found.max_attempts, found.created_at) == (
        "k", "default", 7, created,
    )
    assert replace(db) == (job_id, True)
    job, = db.claim(max_jobs=9)
    assert (job.job_id, job.args, job.metadata, job.tags, job.priority, job.attempt) == (
        job_id, {}, None, None, 2, 1,
    )
    assert db.row("SELECT available, running, cancelled_total FROM awa.queue_stats") == (0, 1, 0)
    assert insert(db) == (job_id, True)
    db.execute("SELECT awa.complete(%s)", job.receipt)
    second, duplicate = replace(db)
    assert second != job_id and not duplicate


def test_a_new_job_is_a_new_job(db):
    for how in ("replace", "debounce"):
        job_id, duplicate = replace(db, how, key=how, args=[how])
        assert not duplicate and db.job(job_id).args == [how]


@pytest.mark.parametrize("how", ["replace", "debounce"])
def test_a_running_job_stays(db, how):
    job_id, _ = insert(db, args=[1])
    job, = db.claim()
    conn = db.connect()
    conn.begin()
    assert replace(db, how, args=[2], conn=conn) == (job_id, True)
    # The producer's open transaction is in nobody's way.
    db.execute("SET statement_timeout = '5s'")
    db.execute("SELECT awa.complete(%s)", job.receipt)
    conn.commit_sql()
    assert db.job(job_id).args == [1]


@pytest.mark.parametrize("how", ["replace", "debounce"])
def test_a_parked_job_stays(db, how):
    job_id, _ = insert(db, args={"n": 1})
    job, = db.claim(deadline="1 h")
    db.execute("SELECT awa.register_callback(%s, '1 h')", job.receipt)
    db.execute("SELECT awa.wait_for_callback(%s)", job.receipt)
    assert replace(db, how, args={"n": 2}) == (job_id, True)
    found = db.job(job_id)
    assert (found.state, found.args) == ("waiting_external", {"n": 1})


def test_a_holder_that_is_done_stays(db):
    opts = {"unique_states": ["available", "running", "completed", "cancelled"]}
    job_id, _ = insert(db, opts=opts, args=[1])
    db.execute("SELECT awa.complete(%s)", db.claim()[0].receipt)
    assert replace(db, args=[2]) == (job_id, True)
    other, _ = insert(db, key="b", opts=opts, args=[1])
    db.execute("SELECT awa.cancel_job(%s)", other)
    assert replace(db, key="b", args=[2]) == (other, True)
    assert db.job(job_id).args == db.job(other).args == [1]


def test_replace_keeps_the_time(db):
    job_id, _ = insert(db, run_at="2100-01-01", args=[1])
    assert replace(db, args=[2], run_at="2200-01-01") == (job_id, True)
    found = db.job(job_id)
    assert (found.state, found.args, found.run_at.year) == ("scheduled", [2], 2100)
    assert db.value("SELECT scheduled FROM awa.queue_stats") == 1


def test_debounce_moves_the_time(db):
    job_id, _ = replace(db, "debounce", run_at="2100-01-01", args=[1])
    assert replace(db, "debounce", args=[2], run_at="2200-01-01") == (job_id, True)
    found = db.job(job_id)
    assert (found.state, found.args, found.run_at.year) == ("scheduled", [2], 2200)
    assert replace(db, "debounce", args=[3]) == (job_id, True)
    assert db.state(job_id) == "available"
    assert replace(db, "debounce", args=[4], run_at="2150-01-01") == (job_id, True)
    assert db.state(job_id) == "scheduled" and db.claim() == []
    assert db.row("SELECT scheduled, available FROM awa.queue_stats") == (1, 0)
    assert replace(db, "debounce", args=[5], run_at="2001-01-01") == (job_id, True)
    job, = db.claim(max_jobs=5)
    assert (job.job_id, job.args, job.run_at.year) == (job_id, [5], 2001)


@pytest.mark.parametrize("delay", ["30 s", "1 h"])
@pytest.mark.parametrize("how", ["replace", "debounce"])
def test_a_job_in_backoff(db, how, delay):
    job_id, _ = insert(db, args=[1])
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'broken', retry_after => %s)", job.receipt, delay)
    due = db.job(job_id).run_at
    assert replace(db, how, args=[2]) == (job_id, True)
    found = db.job(job_id)
    assert found.args == [2] and found.attempt == 1 and "broken" in str(found.errors)
    if how == "replace":
        assert (found.state, found.run_at) == ("retryable", due)
        assert db.value("SELECT retryable FROM awa.queue_stats") == 1
    else:
        job, = db.claim()
        assert (job.job_id, job.attempt, job.args) == (job_id, 2, [2])


def test_a_snoozed_job(db):
    job_id, _ = insert(db, args=[1])
    db.execute("SELECT awa.snooze(%s, '30 s')", db.claim()[0].receipt)
    assert replace(db, args=[2]) == (job_id, True)
    assert (db.state(job_id), db.job(job_id).args) == ("scheduled", [2])


def test_a_mask_that_changes_with_the_time(db):
    """Its key is held in one of the states only, so it goes with the state."""
    opts = {"unique_states": ["available"], "on_conflict": "debounce"}
    job_id, _ = insert(db, opts=opts)
    assert insert(db, opts=opts, run_at="2100-01-01") != (job_id, True)
    assert insert(db, opts=opts) == (job_id, True)


def test_in_one_array(db):
    rows = db.rows(
        "SELECT job_id, duplicate FROM awa.insert_jobs(%s, %s)",
        Jsonb([{"kind": "k", "unique_key": "a", "args": [n], "priority": n} for n in (1, 2, 3)]),
        Jsonb({"on_conflict": "replace"}),
    )
    assert [duplicate for _, duplicate in rows] == [False, True, True]
    job, = db.claim(max_jobs=5)
    assert {job_id for job_id, _ in rows} == {job.job_id}
    assert (job.args, job.priority) == ([3], 3)


def test_what_rolls_back(db):
    job_id, _ = insert(db, args=[1])
    conn = db.connect()
    conn.begin()
    replace(db, args=[2], conn=conn)
    # To everybody else the job is neither gone nor changed, and cannot be claimed.
    assert db.claim() == [] and db.job(job_id).args == [1]
    conn.rollback_sql()
    job, = db.claim(max_jobs=5)
    assert (job.job_id, job.args) == (job_id, [1])


def test_two_replace_one_after_the_other(db):
    job_id, _ = insert(db, args=[1])
    one, two = db.connect(), db.connect()
    one.begin()
    replace(db, args=[2], conn=one)
    other = Background(replace, db, args=[3], conn=two)
    wait_blocked(db.conn, two.info.backend_pid)
    one.commit_sql()
    assert other.result() == (job_id, True)
    job, = db.claim(max_jobs=5)
    assert (job.job_id, job.args) == (job_id, [3])


@pytest.mark.parametrize("commits", [True, False])
def test_a_claim_is_faster(db, commits):
    job_id, _ = insert(db, args=[1])
    worker, producer = db.connect(), db.connect()
    worker.begin()
    assert [job.job_id for job in db.claim(conn=worker)] == [job_id]
    other = Background(replace, db, args=[2], conn=producer)
    wait_blocked(db.conn, producer.info.backend_pid)
    worker.commit_sql() if commits else worker.rollback_sql()
    assert other.result() == (job_id, True)
    assert db.job(job_id).args == ([1] if commits else [2])


def test_the_holder_ends_meanwhile(db):
    job_id, _ = insert(db, args=[1])
    one, two = db.connect(), db.connect()
    one.begin()
    one.execute("SELECT awa.cancel_job(%s)", (job_id,))
    other = Background(replace, db, args=[2], conn=two)
    wait_blocked(db.conn, two.info.backend_pid)
    one.commit_sql()
    second, duplicate = other.result()
    assert second != job_id and not duplicate and db.job(second).args == [2]


def test_a_job_of_the_same_transaction(db):
    conn = db.connect()
    conn.begin()
    insert(db, conn=conn)
    with raises("55000"):
        replace(db, conn=conn)
    conn.rollback_sql()


def test_survives_rebuild_and_crash(own_db):
    db = own_db
    ready, _ = insert(db, args=[1])
    later, _ = insert(db, key="b", args=[1], run_at="2100-01-01")
    replace(db, args=[2])
    replace(db, key="b", args=[2])
    db.execute("SELECT awa.rebuild()")
    replace(db, args=[3])
    replace(db, "debounce", key="b", args=[3])
    db.close_sessions()
    db.server.crash()
    db.wait_served()
    found = {job.job_id: job.args for job in db.claim(max_jobs=9)}
    assert found == {ready: [3], later: [3]}


def test_access(db):
    db.execute("DROP ROLE IF EXISTS conflicting")
    db.execute("CREATE ROLE conflicting LOGIN")
    db.execute("SELECT awa.grant_access('conflicting', 'producer', ARRAY['mine'])")
    job_id, _ = insert(db, args=[1], queue="theirs")
    conn = db.connect(user="conflicting")
    try:
        with raises("42501"):
            replace(db, args=[2], queue="mine", conn=conn)
        assert db.job(job_id).args == [1]
    finally:
        conn.close()
        db.execute("SELECT awa.revoke_access('conflicting')")
        db.execute("DROP ROLE conflicting")


# throttle


def throttled(db, window="1 h", **columns):
    return insert(db, opts={"throttle": window} | columns.pop("opts", {}), **columns)


def test_throttle(db):
    job_id, duplicate = throttled(db)
    assert not duplicate
    assert throttled(db) == (job_id, True)
    db.execute("SELECT awa.complete(%s)", db.claim()[0].receipt)
    # It is done, and its key free, but the window is open.
    assert throttled(db) == (job_id, True)
    assert throttled(db, opts={"on_conflict": "error"}) == (job_id, True)
    assert throttled(db, key="b")[1] is False
    # Others do not ask.
    assert insert(db)[1] is False


def test_throttle_by_arguments(db):
    opts = {"throttle": "1 h", "unique_by": ["args"]}
    jobs = [{"kind": "k", "args": [n], "opts": opts} for n in (1, 2, 1)]
    rows = db.rows("SELECT job_id, duplicate FROM awa.insert_jobs(%s)", Jsonb(jobs))
    assert [duplicate for _, duplicate in rows] == [False, False, True]
    assert rows[0][0] == rows[2][0]
    assert len(db.claim(max_jobs=9)) == 2


def test_a_window_closes(db):
    first, _ = throttled(db, "100 ms")
    db.execute("SELECT awa.complete(%s)", db.claim()[0].receipt)
    wait_until(lambda: throttled(db, "100 ms")[1] is False, what="the window closed")
    wait_until(lambda: db.column(
        "SELECT 1 FROM awa.maintain() m, awa.job_throttles WHERE step = 'retention'"
    ) == [] or db.value("SELECT count(*) FROM awa.job_throttles") == 0, what="the window forgotten")


def test_a_job_that_was_none_opens_no_window(db):
    job_id, _ = insert(db)
    assert throttled(db) == (job_id, True)
    db.execute("SELECT awa.complete(%s)", db.claim()[0].receipt)
    second, duplicate = throttled(db)
    assert not duplicate and second != job_id


def test_throttle_rolls_back(db):
    conn = db.connect()
    conn.begin()
    first, _ = throttled(db, conn=conn)
    other = db.connect()
    waiting = Background(throttled, db, conn=other)
    wait_blocked(db.conn, other.info.backend_pid)
    conn.rollback_sql()
    second, duplicate = waiting.result()
    assert not duplicate and second != first
    assert throttled(db) == (second, True)


def test_throttle_where_the_state_holds_no_key(db):
    opts = {"unique_states": ["running"]}
    first, duplicate = throttled(db, opts=opts)
    assert not duplicate
    assert throttled(db, opts=opts) == (first, True)
    assert [job.job_id for job in db.claim(max_jobs=5)] == [first]


def test_throttle_refuses(db):
    with raises("22023"):
        db.execute("SELECT awa.insert_job('k', opts => '{\"throttle\": \"1 h\"}')")
    for wrong in ("0", "-1 s", 5, "soon"):
        with raises("22023"):
            throttled(db, wrong)
    with raises("22023"):
        insert(db, opts={"on_conflict": "ignore"})


def test_throttle_survives_a_crash(own_db):
    job_id, _ = throttled(own_db)
    own_db.close_sessions()
    own_db.server.crash()
    own_db.wait_served()
    assert throttled(own_db) == (job_id, True)
