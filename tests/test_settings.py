"""configure_queue: every setting, at once."""

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from harness import raises, wait_until


def configure(db, settings, queue="default", conn=None):
    return (conn or db.conn).value("SELECT awa.configure_queue(%s, %s)", queue, Jsonb(settings))


DEFAULTS = {
    "priority": 2, "max_attempts": 25, "attempt_deadline": "5 min", "priority_aging": "1 min",
    "backoff": {"base": "1 s", "factor": 2.0, "jitter": 0.25, "max": "24 h"},
    "enqueue_shards": 1, "ordering": "lane", "dlq_enabled": False, "failed_retention": "72 h",
    "completed_retention": "0 s",  # of the test servers
}


def test_the_settings_in_force_come_back(db):
    assert configure(db, {}) == DEFAULTS
    changed = {"priority": 4, "attempt_deadline": "1500 ms"}
    assert configure(db, changed) == DEFAULTS | changed
    assert configure(db, {"max_attempts": 3}) == DEFAULTS | changed | {"max_attempts": 3}
    assert configure(db, {"priority": None}) == DEFAULTS | {
        "attempt_deadline": "1500 ms", "max_attempts": 3
    }
    for name in ("failed_retention", "completed_retention"):
        assert configure(db, {name: "-1"})[name] == "-1"


def test_what_comes_back_can_be_given(db):
    settings = configure(db, {
        "priority": 1, "max_attempts": 7, "attempt_deadline": "90 s", "priority_aging": "0",
        "backoff": {"base": "10 ms", "max": "1 s"}, "enqueue_shards": 4, "ordering": "serial", "failed_retention": "1 h",
        "completed_retention": "7 days",
    })
    assert configure(db, settings, "other") == settings


@pytest.mark.parametrize("settings", [
    {"priority": 0}, {"priority": 5}, {"priority": "2"}, {"max_attempts": 0},
    {"max_attempts": 1001}, {"attempt_deadline": "-1 s"}, {"attempt_deadline": 5},
    {"attempt_deadline": "soon"}, {"priority_aging": "-1 s"}, {"backoff": 1},
    {"backoff": {"bass": "1 s"}}, {"backoff": {"factor": 0.5}}, {"backoff": {"jitter": 2}},
    {"backoff": {"base": "-1 s"}}, {"enqueue_shards": 0}, {"enqueue_shards": 65},
    {"ordering": "random"}, {"failed_retention": "-2"}, {"completed_retention": "-2"}, {"colour": "red"},
])
def test_refused(db, settings):
    with raises("22023") as caught:
        configure(db, settings)
    assert next(iter(settings)) in str(caught.error)


@pytest.mark.parametrize("name", [
    "rate_limit", "max_running", "max_running_per_key", "max_depth", "notify",
])
def test_what_has_no_effect_yet_is_refused(db, name):
    with raises("0A000") as caught:
        configure(db, {name: None})
    assert name in str(caught.error)


def test_nulls(db):
    for arguments in ((None, "{}"), ("q", None), ("q", "[]")):
        with raises("22023"):
            db.execute("SELECT awa.configure_queue(%s, %s)", *arguments)


def test_defaults_of_new_jobs(db):
    db.insert()
    configure(db, {"priority": 4, "max_attempts": 3})
    job_id, = db.insert()
    found = db.job(job_id)
    assert (found.priority, found.max_attempts) == (4, 3)


def test_attempt_deadline_at_once(db):
    db.insert(2)
    job, = db.claim()
    assert db.value("SELECT %s - clock_timestamp()", job.deadline_at) > timedelta(minutes=4)
    configure(db, {"attempt_deadline": "10 s"})
    job, = db.claim()
    assert db.value("SELECT %s - clock_timestamp()", job.deadline_at) < timedelta(seconds=11)


def test_no_attempt_deadline(db):
    db.insert(2)
    configure(db, {"attempt_deadline": "0"})
    runtime = db.value("SELECT awa.register_runtime()")
    job, = db.claim(runtime=runtime)
    assert job.deadline_at is None
    job, = db.claim()
    assert job.deadline_at is not None


def test_backoff_at_once(db):
    job_id, = db.insert()
    job, = db.claim()
    other = db.connect()
    configure(db, {"backoff": {"base": "1 h", "jitter": 0}}, conn=other)
    db.execute("SELECT awa.fail(%s, 'x')", job.receipt)
    wait = db.value("SELECT run_at - clock_timestamp() FROM awa.get_job(%s)", job_id)
    assert timedelta(minutes=119) < wait <= timedelta(hours=2)


def test_a_change_that_rolls_back(db):
    conn = db.connect()
    conn.begin()
    configure(db, {"priority": 1}, conn=conn)
    conn.execute("SELECT awa.insert_job('k')")
    conn.rollback_sql()
    job_id, = db.insert()
    assert db.job(job_id).priority == 2 and configure(db, {}) == DEFAULTS


def test_failed_retention_of_a_queue(db):
    configure(db, {"failed_retention": "500 ms"}, "short")
    configure(db, {"failed_retention": "-1"}, "long")
    ids = {}
    for queue in ("short", "long", "default"):
        ids[queue], = db.insert(queue=queue)
        job, = db.claim(queue)
        db.execute("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
    def is_forgotten():
        db.rows("SELECT * FROM awa.maintain()")
        return db.state(ids["short"]) is None

    wait_until(is_forgotten, 5)
    assert (db.state(ids["long"]), db.state(ids["default"])) == ("failed", "failed")


def test_settings_and_pauses_hold_after_a_restart_before_anything_else(own_db):
    own_db.insert(queue="paused")
    own_db.insert(queue="quick")
    own_db.execute("SELECT awa.pause_queue('paused')")
    configure(own_db, {"attempt_deadline": "10 s"}, "quick")
    own_db.close_sessions()
    own_db.server.restart()
    own_db.wait_served()
    assert own_db.claim("paused") == []
    assert own_db.value("SELECT awa.claim_outcome()") == "paused"
    job, = own_db.claim("quick")
    left = own_db.value("SELECT %s - clock_timestamp()", job.deadline_at)
    assert left < timedelta(seconds=11)


def test_privileges(db):
    db.execute("CREATE ROLE configurer LOGIN")
    try:
        db.execute("GRANT USAGE ON SCHEMA awa TO configurer")
        db.execute("GRANT EXECUTE ON FUNCTION awa.configure_queue TO configurer")
        conn = db.connect(user="configurer")
        with raises("42501"):
            configure(db, {}, conn=conn)
        db.execute("INSERT INTO awa.queue_acl VALUES ('configurer'::regrole, 'operator', 'mine')")
        assert configure(db, {"priority": 1}, "mine", conn)["priority"] == 1
    finally:
        db.close_sessions()
        db.execute("DELETE FROM awa.queue_acl")
        db.execute("DROP OWNED BY configurer")
        db.execute("DROP ROLE configurer")
