"""A lane is there when it is first needed: nobody waits for anybody, and it is one."""

import pytest
from psycopg.types.json import Jsonb

from harness import Background, raises

SESSIONS = 16

# Each uses the lane (q, 3) for the first time; %s is a number of the session.
PATHS = {
    "insert_job": "SELECT awa.insert_job('k', queue => 'q', priority => 3)",
    "insert_jobs": """SELECT * FROM awa.insert_jobs('[{"kind": "k", "queue": "q", "priority": 3}]')""",
    "batch": "SELECT * FROM awa.insert_jobs_compat_batch('{k}', '{q}', NULL, priorities => '{3}')",
    "compat": "SELECT awa.insert_job_compat('k', 'q', p_priority => 3::smallint)",
    "view": "INSERT INTO awa.jobs (kind, queue, priority) VALUES ('k', 'q', 3)",
    "unique": "SELECT awa.insert_job('k', queue => 'q', priority => 3, unique_key => %s)",
    "deferred": "SELECT awa.insert_job('k', queue => 'q', priority => 3,"
                " run_at => now() + interval '20 ms')",
    "compat deferred": "SELECT awa.insert_job_compat('k', 'q', p_state => 'scheduled',"
                       " p_priority => 3::smallint)",
}


def use(conn, path, number):
    text = PATHS[path]
    conn.rows(text, *([f"key {number}"] if "%s" in text else []))


def sessions(db, count=SESSIONS):
    """With a short lock_timeout: who waits for another one fails."""
    opened = [db.connect() for _ in range(count)]
    for conn in opened:
        conn.execute("SET lock_timeout = '100ms'; SET statement_timeout = '10s'")
    return opened


def drain(db, count):
    """All jobs of q, by one claim each until there are so many."""
    found = []
    while len(found) < count:
        db.value("CALL awa.wait_for_jobs('{q}', '2 s')")
        jobs = db.claim("q", count)
        assert jobs, f"only {len(found)} of {count} jobs came"
        found += jobs
    return found


def lanes(db):
    """Distinct lanes; a lane may have several equal rows."""
    return db.rows("SELECT DISTINCT lane_id, priority, shard, queue FROM awa.queue_lanes")


@pytest.mark.parametrize("path", PATHS)
def test_first_use_by_many_at_once(db, path):
    calls = [Background(use, conn, path, at) for at, conn in enumerate(sessions(db))]
    for call in calls:
        call.result()
    jobs = drain(db, SESSIONS)
    assert len({job.job_id for job in jobs}) == SESSIONS
    assert len(lanes(db)) == 1


@pytest.mark.parametrize("path", PATHS)
def test_nobody_waits_for_open_transactions(db, path):
    """Each is still open when the next one comes; every other one rolls back."""
    opened = sessions(db)
    for at, conn in enumerate(opened):
        conn.begin()
        use(conn, path, at)
    for at, conn in enumerate(opened):
        if at % 2:
            conn.commit_sql()
        else:
            conn.rollback_sql()
    assert len(drain(db, SESSIONS // 2)) == SESSIONS // 2
    assert len(lanes(db)) == 1
    # Those that follow use the same.
    db.execute("SELECT awa.insert_job('k', queue => 'q', priority => 3)")
    assert len(drain(db, 1)) == 1 and len(lanes(db)) == 1


def test_all_paths_at_once_inside_transactions(db):
    """Two sessions a path; the first of each rolls back, long after the others began."""
    opened = sessions(db, 2 * len(PATHS))
    for conn in opened:
        conn.begin()
    paths = [path for path in PATHS for _ in range(2)]
    calls = [
        Background(use, conn, path, at)
        for at, (conn, path) in enumerate(zip(opened, paths, strict=True))
    ]
    for call in calls:
        call.result()
    for at, conn in enumerate(opened):
        conn.commit_sql() if at % 2 else conn.rollback_sql()
    assert len(drain(db, len(PATHS))) == len(PATHS)
    assert len(lanes(db)) == 1


def test_all_of_them_roll_back(db):
    opened = sessions(db)
    for conn in opened:
        conn.begin()
    calls = [Background(use, conn, "insert_job", at) for at, conn in enumerate(opened)]
    for call in calls:
        call.result()
    for conn in opened:
        conn.rollback_sql()
    assert db.claim("q") == []
    db.execute("SELECT awa.insert_job('k', queue => 'q', priority => 3)")
    assert len(drain(db, 1)) == 1
    assert len(lanes(db)) == 1


def test_retries_into_a_lane_of_their_own(db):
    """Jobs that come back with another priority, by sixteen sessions at once."""
    db.execute("SELECT awa.configure_queue('q', '{\"dlq_enabled\": true}')")
    ids = db.insert(SESSIONS, queue="q")
    for job in db.claim("q", SESSIONS):
        db.value("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
    opened = sessions(db)
    for conn in opened:
        conn.begin()
    calls = [
        Background(conn.value, "SELECT awa.dlq_retry(%s, %s)", job, Jsonb({"priority": 3}))
        for conn, job in zip(opened, ids, strict=True)
    ]
    for call in calls:
        assert call.result() == "available"
    for at, conn in enumerate(opened):
        conn.commit_sql() if at % 2 else conn.rollback_sql()
    assert len(drain(db, SESSIONS // 2)) == SESSIONS // 2
    assert len([lane for lane in lanes(db) if lane[1] == 3]) == 1


def test_retries_of_failed_jobs(db):
    """Their lane is gone from memory: the queue was never used since the start."""
    ids = db.insert(SESSIONS, queue="q", priority=3)
    for job in db.claim("q", SESSIONS):
        db.value("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
    db.execute("SELECT awa.rebuild()")
    opened = sessions(db)
    calls = [
        Background(conn.value, "SELECT awa.retry_job(%s)", job)
        for conn, job in zip(opened, ids, strict=True)
    ]
    for call in calls:
        assert call.result() == "available"
    assert len(drain(db, SESSIONS)) == SESSIONS
    assert len(lanes(db)) == 1


def test_releases_and_new_jobs_meet(db):
    """Attempts come back while others enqueue to the same lane for the first time."""
    db.insert(SESSIONS, queue="q", priority=3)
    receipts = [job.receipt for job in db.claim("q", SESSIONS)]
    opened = sessions(db, 2 * SESSIONS)
    calls = [
        Background(conn.value, "SELECT awa.release(%s)", [receipt])
        for conn, receipt in zip(opened[:SESSIONS], receipts, strict=True)
    ]
    calls += [
        Background(use, conn, "insert_job", at) for at, conn in enumerate(opened[SESSIONS:])
    ]
    for call in calls:
        call.result()
    assert len(drain(db, 2 * SESSIONS)) == 2 * SESSIONS
    assert len(lanes(db)) == 1


def test_a_prepared_queue(db):
    db.execute("SELECT awa.prepare_queue('q')")
    assert db.value("SELECT available FROM awa.queue_stats WHERE queue = 'q'") == 0
    db.execute("SELECT awa.prepare_queue('q')")
    calls = [Background(use, conn, "insert_job", at) for at, conn in enumerate(sessions(db))]
    for call in calls:
        call.result()
    assert len(drain(db, SESSIONS)) == SESSIONS and len(lanes(db)) == 1
    for name in ("", "x" * 201, "a\nb"):
        with raises("23514"):
            db.execute("SELECT awa.prepare_queue(%s)", name)
    with raises("22023"):
        db.execute("SELECT awa.prepare_queue(NULL)")


def test_queues_are_prepared_at_once(db):
    """In one transaction each, in opposite orders, which row locks would not survive."""
    opened = sessions(db)
    names = [f"p{n}" for n in range(8)]

    def prepare(conn, at):
        for name in names if at % 2 else reversed(names):
            conn.execute("SELECT awa.prepare_queue(%s)", (name,))

    calls = [Background(prepare, conn, at) for at, conn in enumerate(opened)]
    for call in calls:
        call.result()
    assert db.value("SELECT count(*) FROM awa.queue_stats WHERE queue LIKE 'p%%'") == 8
    assert all(
        db.value("SELECT available FROM awa.queue_stats WHERE queue = %s", name) == 0
        for name in names
    )


@pytest.mark.parametrize("shards", [1, 8])
def test_first_use_of_many_lanes_in_opposite_orders(db, shards):
    """Each session uses 8 new lanes in an order of its own, all in open transactions."""
    for n in range(2):
        db.execute(
            "SELECT awa.configure_queue(%s, %s)", f"q{n}", Jsonb({"enqueue_shards": shards})
        )
    all_lanes = [(f"q{n}", priority) for n in range(2) for priority in range(1, 5)]

    def walk(conn, at):
        conn.begin()
        order = all_lanes[at % 8:] + all_lanes[:at % 8]
        for queue, priority in order if at % 2 else reversed(order):
            conn.execute(
                "SELECT awa.insert_job('k', queue => %s, priority => %s)", (queue, priority)
            )

    opened = sessions(db)
    calls = [Background(walk, conn, at) for at, conn in enumerate(opened)]
    for call in calls:
        call.result()
    for at, conn in enumerate(opened):
        conn.commit_sql() if at % 2 else conn.rollback_sql()
    for queue in ("q0", "q1"):
        assert len(db.claim(queue, 100)) == SESSIONS // 2 * 4
    distinct = lanes(db)
    assert len({lane[1:] for lane in distinct}) == len(distinct) == len({lane[0] for lane in distinct})
