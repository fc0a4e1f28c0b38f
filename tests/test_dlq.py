"""Dead letters: how jobs become ones, are looked at, retried and forgotten."""

import pytest
from psycopg.types.json import Jsonb

from harness import Background, raises, wait_blocked, wait_until


@pytest.fixture
def dlq(db):
    enable(db)
    return db


def enable(db, queue="default", **settings):
    db.execute(
        "SELECT awa.configure_queue(%s, %s)", queue, Jsonb({"dlq_enabled": True} | settings)
    )


def bury(db, count=1, queue="default", kind="k", **columns):
    ids = db.insert(count, queue=queue, kind=kind, **columns)
    for job in db.claim(queue, max_jobs=count):
        db.execute("SELECT awa.fail(%s, 'broken', terminal => true)", job.receipt)
    return ids


def letters(db):
    return db.column("SELECT job_id FROM awa.dlq ORDER BY job_id")


def reason(db, job_id):
    return db.value("SELECT dlq_reason FROM awa.dlq WHERE job_id = %s", job_id)


def stats(db, queue="default"):
    """available, scheduled, dlq, failed_total"""
    return db.row(
        "SELECT available, scheduled, dlq, failed_total FROM awa.queue_stats WHERE queue = %s",
        queue,
    )


def retry(db, job_id, opts=None, conn=None):
    return (conn or db.conn).value(
        "SELECT awa.dlq_retry(%s, %s)::text", job_id, Jsonb(opts or {})
    )


def retry_many(db, filter):
    return db.value("SELECT awa.dlq_retry_many(%s)", Jsonb(filter))


def purge(db, filter):
    return db.value("SELECT awa.dlq_purge(%s)", Jsonb(filter))


def test_off_by_default(db):
    job_id, = bury(db)
    assert letters(db) == [] and db.state(job_id) == "failed"
    assert stats(db) == (0, 0, 0, 1)


def test_setting(db):
    def configure(value):
        return db.value(
            "SELECT awa.configure_queue('q', %s)->'dlq_enabled'", Jsonb({"dlq_enabled": value})
        )

    assert configure(True) is True
    assert configure(None) is False
    for wrong in ("yes", 1, {}):
        with raises("22023"):
            configure(wrong)


def test_reasons(dlq):
    last, terminal, both, lost = dlq.insert(4, max_attempts=1)
    one, two, three = dlq.claim(max_jobs=3)
    dlq.execute("SELECT awa.fail(%s, 'no', retry_after => '0')", one.receipt)
    assert dlq.value("SELECT awa.fail(%s, 'never', terminal => true)::text", two.receipt) == "failed"
    dlq.execute("SELECT awa.fail(%s, 'never', terminal => true)", three.receipt)
    worker = dlq.connect()
    runtime = worker.value("SELECT awa.register_runtime()")
    dlq.claim(conn=worker, runtime=runtime)
    worker.close()
    wait_until(lambda: lost in letters(dlq), what="the rescued job a dead letter")
    assert reason(dlq, last) == reason(dlq, lost) == "max_attempts_exhausted"
    assert reason(dlq, terminal) == reason(dlq, both) == "terminal_error"
    assert dlq.state(last) == dlq.state(lost) == "failed"
    assert stats(dlq) == (0, 0, 4, 4)


def test_not_before_the_last_attempt(dlq):
    job_id, = dlq.insert(max_attempts=2)
    for expected in ("retryable", "failed"):
        wait_until(lambda: dlq.state(job_id) == "available", what="the job available")
        job, = dlq.claim()
        state = dlq.value("SELECT awa.fail(%s, 'x', retry_after => '0')::text", job.receipt)
        assert state == expected and (letters(dlq) == [job_id]) == (state == "failed")


def test_cancelled_jobs_are_no_letters(dlq):
    dlq.insert(2)
    one, = dlq.claim()
    dlq.execute("SELECT awa.cancel_attempt(%s, 'no')", one.receipt)
    two, = dlq.claim()
    dlq.execute("SELECT awa.cancel_job(%s, force => true)", two.job_id)
    assert letters(dlq) == [] and stats(dlq)[2] == 0


def test_what_is_seen(dlq):
    job_id, = bury(dlq, tags=["a"], metadata={"m": 1}, max_attempts=5, priority=3)
    row = dlq.row(
        "SELECT queue, kind, args, attempt, dlq_reason, last_error, priority, max_attempts,"
        " metadata, tags, cardinality(errors), dlq_at <= clock_timestamp() FROM awa.dlq"
    )
    assert row == (
        "default", "k", {"n": 0}, 1, "terminal_error", "broken", 3, 5, {"m": 1}, ["a"], 1, True,
    )
    found = dlq.job(job_id)
    assert found.state == "failed" and "broken" in str(found.errors)
    assert dlq.column("SELECT id FROM awa.terminal_jobs") == [job_id]
    assert dlq.column("SELECT outcome FROM awa.job_attempts(%s)", job_id) == ["failed"]
    assert dlq.value("SELECT awa.dump_job(%s)->>'state'", job_id) == "failed"
    assert dlq.value("SELECT awa.cancel_job(%s)::text", job_id) == "failed"
    with raises("55000"):
        dlq.execute("SELECT awa.retry_job(%s)", job_id)
    assert dlq.value("SELECT awa.retry_failed()") == 0
    assert letters(dlq) == [job_id]


def test_retry(dlq):
    job_id, = bury(dlq, priority=4)
    before = dlq.job(job_id).run_lease
    assert retry(dlq, job_id) == "available"
    assert letters(dlq) == [] and stats(dlq) == (1, 0, 0, 1)
    assert "broken" in str(dlq.job(job_id).errors)
    job, = dlq.claim()
    assert (job.job_id, job.attempt, job.priority) == (job_id, 1, 4) and job.receipt > before
    dlq.execute("SELECT awa.complete(%s)", job.receipt)
    with raises("55000"):
        retry(dlq, job_id)
    with raises("P0002"):
        retry(dlq, 1)
    with raises("22023"):
        retry(dlq, None)


def test_retry_with_changes(dlq):
    one, two = bury(dlq, 2)
    assert retry(dlq, one, {"priority": 1, "queue": "other"}) == "available"
    job, = dlq.claim("other")
    assert (job.job_id, job.queue, job.priority) == (one, "other", 1)
    assert retry(dlq, two, {"run_at": "2100-01-01"}) == "scheduled"
    assert dlq.state(two) == "scheduled" and dlq.job(two).attempt == 0
    assert stats(dlq) == (0, 1, 0, 2)
    assert dlq.value("SELECT awa.cancel_job(%s)::text", two) == "cancelled"


@pytest.mark.parametrize("opts, code", [
    ({"priority": 5}, "23514"), ({"priority": "1"}, "22023"), ({"queue": ""}, "23514"),
    ({"queue": 1}, "22023"), ({"run_at": "soon"}, "22023"), ({"colour": 1}, "22023"),
])
def test_retry_refuses(dlq, opts, code):
    job_id, = bury(dlq)
    with raises(code):
        retry(dlq, job_id, opts)
    assert letters(dlq) == [job_id]


def test_unique_conflict_leaves_the_letter(dlq):
    first, = bury(dlq, unique_key="a")
    other, = bury(dlq)
    second, = dlq.insert(unique_key="a")
    assert second != first
    with raises("23505") as caught:
        retry(dlq, first)
    assert caught.error.diag.constraint_name == "idx_awa_jobs_unique"
    assert retry_many(dlq, {"queue": "default"}) == 1
    assert letters(dlq) == [first] and reason(dlq, first) == "terminal_error"
    dlq.execute("SELECT awa.cancel_job(%s)", second)
    assert retry(dlq, first) == "available"
    assert dlq.insert(unique_key="a") == [first]


def test_a_mask_with_failed_holds_the_key(dlq):
    opts = {"unique_states": ["available", "running", "failed"]}
    first, = bury(dlq, unique_key="a", opts=opts)
    assert dlq.insert(unique_key="a") == [first]
    assert purge(dlq, {"ids": [first]}) == 1
    second, = bury(dlq, unique_key="a", opts=opts)
    assert second != first
    assert dlq.value("SELECT awa.delete_job(%s)", second) is True
    third, = bury(dlq, unique_key="a", opts=opts)
    assert third not in (first, second)
    assert retry(dlq, third) == "available" and dlq.insert(unique_key="a") == [third]


def test_two_retries_revive_a_job_once(dlq):
    job_id, = bury(dlq)
    one, two = dlq.connect(), dlq.connect()
    one.begin()
    retry(dlq, job_id, conn=one)
    other = Background(retry, dlq, job_id, conn=two)
    wait_blocked(dlq.conn, two.info.backend_pid)
    one.commit_sql()
    with raises("55000"):
        other.result()
    assert len(dlq.claim(max_jobs=5)) == 1


def test_what_rolls_back(dlq):
    job_id, = bury(dlq)
    conn = dlq.connect()
    for call in (
        "awa.dlq_retry(%s)", "awa.dlq_purge(jsonb_build_object('ids', ARRAY[%s::bigint]))",
        "awa.delete_job(%s)",
    ):
        conn.begin()
        conn.execute(f"SELECT {call}", (job_id,))
        conn.rollback_sql()
        assert letters(dlq) == [job_id] and stats(dlq) == (0, 0, 1, 1)
    dlq.insert()
    job, = dlq.claim()
    conn.begin()
    conn.execute("SELECT awa.fail(%s, 'x', terminal => true)", (job.receipt,))
    conn.rollback_sql()
    assert letters(dlq) == [job_id] and stats(dlq)[2:] == (1, 1)


def test_move(db):
    failed, cancelled, running = db.insert(3)
    one, two = db.claim(max_jobs=2)
    db.execute("SELECT awa.fail(%s, 'broken', terminal => true)", one.receipt)
    db.execute("SELECT awa.cancel_attempt(%s, 'no')", two.receipt)

    def move(job_id, reason="by hand"):
        return db.value("SELECT awa.dlq_move(%s, %s)", job_id, reason)

    assert move(failed) is True
    assert move(failed) is False
    assert letters(db) == [failed] and reason(db, failed) == "by hand"
    assert db.state(failed) == "failed" and stats(db)[2:] == (1, 1)
    for job_id in (cancelled, running):
        with raises("55000"):
            move(job_id)
    with raises("P0002"):
        move(1)
    with raises("22023"):
        move(failed, None)
    assert retry(db, failed) == "available"


def test_filters(dlq):
    enable(dlq, "other")
    red = bury(dlq, 2, kind="red", tags=["x"])
    blue = bury(dlq, 2, kind="blue")
    other = bury(dlq, 2, queue="other", kind="red")
    for wrong in (
        {}, {"queue": None}, {"allow_all": False}, {"colour": "red"}, [], None, "x",
        {"ids": "1"}, {"ids": ["x"]}, {"kind": 1}, {"state": "dead"}, {"allow_all": "yes"},
    ):
        for act in (purge, retry_many):
            with raises("22023"):
                act(dlq, wrong)
    with raises("22023"):
        dlq.execute("SELECT awa.dlq_purge(NULL)")
    assert len(letters(dlq)) == 6
    assert purge(dlq, {"state": "cancelled"}) == 0
    assert purge(dlq, {"before": "2020-01-01"}) == 0
    assert purge(dlq, {"after": "2100-01-01"}) == 0
    assert retry_many(dlq, {"tag": "x", "kind": "blue"}) == 0
    assert retry_many(dlq, {"tag": "x", "queue": "default", "state": "failed"}) == 2
    assert letters(dlq) == sorted(blue + other)
    assert purge(dlq, {"ids": [blue[0], str(other[0]), 1]}) == 2
    assert retry_many(dlq, {"queue": "other"}) == 1
    assert purge(dlq, {"allow_all": True}) == 1
    assert letters(dlq) == [] and stats(dlq)[2] == 0 and stats(dlq, "other")[2] == 0
    assert sorted(job.job_id for job in dlq.claim(max_jobs=9)) == red
    assert dlq.state(blue[1]) is None


def test_discard_and_delete(dlq):
    one, two = bury(dlq, 2)
    assert dlq.value("SELECT awa.delete_job(%s)", one) is True
    assert letters(dlq) == [two]
    assert dlq.value("SELECT awa.discard_failed('default')") == 1
    assert letters(dlq) == [] and stats(dlq) == (0, 0, 0, 2)


def test_retention(own_server, own_db):
    enable(own_db, failed_retention="0")
    opts = {"unique_states": ["available", "running", "failed"]}
    job_id, = bury(own_db, unique_key="a", opts=opts)
    own_db.execute("SELECT count(*) FROM awa.maintain()")
    assert letters(own_db) == [job_id]
    own_server.reload(**{"awa.dlq_retention": "0"})
    wait_until(
        lambda: own_db.value("SHOW awa.dlq_retention") in ("0", "0s"), what="the new setting"
    )
    own_db.execute("SELECT count(*) FROM awa.maintain()")
    wait_until(lambda: letters(own_db) == [], what="the letter gone")
    assert stats(own_db) == (0, 0, 0, 1)
    assert own_db.insert(unique_key="a") != [job_id]


def test_counts_are_summed_up(dlq):
    bury(dlq, 150)
    rows = "SELECT count(*) FROM awa.queue_changes"
    assert dlq.value(rows) == 150
    dlq.execute("SELECT count(*) FROM awa.maintain()")
    wait_until(lambda: dlq.value(rows) == 1, what="one row")
    assert stats(dlq)[2] == 150
    assert purge(dlq, {"allow_all": True}) == 150 and stats(dlq)[2] == 0


def test_survives_rebuild_and_crash(own_db):
    enable(own_db)
    one, two = bury(own_db, 2)
    own_db.execute("SELECT awa.rebuild()")
    assert stats(own_db) == (0, 0, 2, 2)
    assert retry(own_db, one) == "available"
    own_db.close_sessions()
    own_db.server.crash()
    own_db.wait_served()
    assert letters(own_db) == [two] and stats(own_db) == (1, 0, 1, 2)
    assert [job.job_id for job in own_db.claim(max_jobs=5)] == [one]


def test_access(dlq):
    enable(dlq, "hidden")
    mine, = bury(dlq)
    theirs, = bury(dlq, queue="hidden")
    for name, profile in (("dlq_reader", "reader"), ("dlq_operator", "operator")):
        dlq.execute(f"DROP ROLE IF EXISTS {name}")
        dlq.execute(f"CREATE ROLE {name} LOGIN")
        dlq.execute("SELECT awa.grant_access(%s, %s, ARRAY['default'])", name, profile)
    reader, operator = dlq.connect(user="dlq_reader"), dlq.connect(user="dlq_operator")
    try:
        for conn in (reader, operator):
            assert conn.column("SELECT job_id FROM awa.dlq") == [mine]
        with raises("42501"):
            retry(dlq, mine, conn=reader)
        for call in (
            "awa.dlq_retry(%s)", "awa.dlq_move(%s, 'x')", "awa.delete_job(%s)",
        ):
            with raises("42501"):
                operator.execute(f"SELECT {call}", (theirs,))
        with raises("42501"):
            retry(dlq, mine, {"queue": "hidden"}, conn=operator)
        with raises("42501"):
            operator.execute("SELECT awa.dlq_purge('{\"queue\": \"hidden\"}')")
        assert operator.value("SELECT awa.dlq_retry_many('{\"allow_all\": true}')") == 1
        assert letters(dlq) == [theirs]
    finally:
        reader.close()
        operator.close()
        for name in ("dlq_reader", "dlq_operator"):
            dlq.execute("SELECT awa.revoke_access(%s)", name)
            dlq.execute(f"DROP OWNED BY {name}")
            dlq.execute(f"DROP ROLE {name}")
