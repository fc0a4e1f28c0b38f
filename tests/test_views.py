"""awa.jobs, get_job and queue_stats: what a dashboard reads."""

import pytest

from harness import Background, claim, wait_until

JOB_COLUMNS = """
    id:bigint kind:text queue:text args:jsonb state:awa.job_state priority:smallint
    attempt:smallint max_attempts:smallint run_at:timestamptz heartbeat_at:timestamptz
    deadline_at:timestamptz attempted_at:timestamptz finalized_at:timestamptz
    created_at:timestamptz errors:jsonb[] metadata:jsonb tags:text[] unique_key:bytea
    unique_states:bit callback_id:uuid callback_timeout_at:timestamptz callback_filter:text
    callback_on_complete:text callback_on_fail:text callback_transform:text run_lease:bigint
    progress:jsonb
""".split()

STATS_COLUMNS = (
    "queue paused scheduled available running retryable waiting_external dlq completed_total"
    " failed_total cancelled_total oldest_available_age enqueue_rate complete_rate"
).split()


def test_columns_of_jobs(db):
    names = db.column(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'awa.jobs'::regclass AND attnum > 0"
        " ORDER BY attnum"
    )
    assert names == [column.split(":")[0] for column in JOB_COLUMNS]
    types = dict(db.rows(
        "SELECT attname, atttypid::regtype::text FROM pg_attribute"
        " WHERE attrelid = 'awa.jobs'::regclass AND attnum > 0"
    ))
    long = {"timestamptz": "timestamp with time zone"}
    expected = dict(column.split(":") for column in JOB_COLUMNS)
    assert types == {name: long.get(type_, type_) for name, type_ in expected.items()}


def test_columns_of_queue_stats(db):
    cur = db.execute("SELECT * FROM awa.queue_stats")
    assert [column.name for column in cur.description] == STATS_COLUMNS


@pytest.fixture
def one_of_each(db):
    """A job in every state that the core knows, by state."""
    ids = {}
    for state in ("running", "completed", "retryable", "failed"):
        ids[state], = db.insert(queue=state)
    conn = db.connect()
    for state, end in (
        ("completed", "awa.complete(%s)"),
        ("retryable", "awa.fail(%s, 'x', '1 hour')"),
        ("failed", "awa.fail(%s, 'x', terminal => true)"),
    ):
        job, = claim(conn, state)
        conn.execute(f"SELECT {end}", (job.receipt,))
    claim(conn, "running")
    ids["available"], = db.insert()
    ids["scheduled"] = db.value("SELECT awa.insert_job('k', run_at => now() + interval '1 day')")
    return ids


def test_every_state_is_in_jobs_exactly_once(db, one_of_each):
    found = db.rows("SELECT id, state::text FROM awa.jobs ORDER BY id")
    assert found == sorted((id, state) for state, id in one_of_each.items())


def test_get_job_and_jobs_agree(db, one_of_each):
    for job_id in one_of_each.values():
        assert db.row("SELECT * FROM awa.get_job(%s)", job_id) == db.row(
            "SELECT * FROM awa.jobs WHERE id = %s", job_id
        )


@pytest.mark.parametrize("job_id", [0, -1, 1, 2**62, 2**63 - 1, -(2**63), None])
def test_get_job_of_nothing(db, job_id):
    assert db.rows("SELECT * FROM awa.get_job(%s::bigint)", job_id) == []


def test_columns_of_a_fresh_and_a_running_job(db):
    job_id = db.value("SELECT awa.insert_job('k')")
    fresh = db.job(job_id)
    assert fresh.run_lease in (0, None) and fresh.deadline_at is None
    assert fresh.callback_id is None and fresh.progress is None
    job, = db.claim()
    running = db.job(job_id)
    assert running.run_lease == job.receipt and running.deadline_at == job.deadline_at
    assert (running.created_at, running.args) == (fresh.created_at, fresh.args)


def test_queue_stats_equal_a_scan(db, one_of_each):
    scan = db.rows("""
        SELECT queue,
            count(*) FILTER (WHERE state = 'scheduled'), count(*) FILTER (WHERE state = 'available'),
            count(*) FILTER (WHERE state = 'running'), count(*) FILTER (WHERE state = 'retryable'),
            count(*) FILTER (WHERE state = 'completed'), count(*) FILTER (WHERE state = 'failed')
        FROM awa.jobs GROUP BY 1 ORDER BY 1
    """)
    stats = db.rows("""
        SELECT queue, scheduled, available, running, retryable, completed_total, failed_total
        FROM awa.queue_stats ORDER BY 1
    """)
    assert stats == scan


def test_oldest_available_age(db):
    db.insert(2)
    age = db.value("SELECT extract(epoch FROM oldest_available_age) FROM awa.queue_stats")
    assert 0 <= age < 60
    db.claim(max_jobs=2)
    assert not db.value("SELECT oldest_available_age > interval '0' FROM awa.queue_stats")


def test_a_snapshot_is_a_snapshot(db):
    """One repeatable read transaction sees each job once, in the state of its snapshot."""
    ids = db.insert(50)
    conn = db.connect()
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    before = conn.rows("SELECT id, state::text FROM awa.jobs ORDER BY id")
    jobs = db.claim(max_jobs=30)
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs[:10]])
    db.insert(5)
    assert conn.rows("SELECT id, state::text FROM awa.jobs ORDER BY id") == before
    assert [row[0] for row in before] == ids
    conn.commit_sql()
    assert db.value("SELECT count(*) FROM awa.jobs") == 55


def test_an_idle_reader_holds_no_lock(db):
    """A dashboard that sits in its transaction must not hold reclamation back."""
    db.insert(5)
    conn = db.connect()
    conn.begin()
    conn.rows("SELECT * FROM awa.jobs")
    conn.rows("SELECT * FROM awa.get_job(1)")
    conn.rows("SELECT * FROM awa.queue_stats")
    held = db.column(
        "SELECT relation::regclass::text FROM pg_locks WHERE pid = %s AND locktype = 'relation'"
        " AND relation::regclass::text ~ '_(1[0-5]|[0-9])$'",
        conn.pid,
    )
    assert held == []
    conn.commit_sql()


def test_readers_while_jobs_move(db):
    """No job is missing and none is twice in any read, whatever moves meanwhile."""
    ids = db.insert(200)
    stop = []

    def churn():
        conn = db.server.connect(db.name)
        while not stop:
            jobs = claim(conn, max_jobs=20)
            conn.execute("SELECT awa.release(%s)", ([job.receipt for job in jobs],))
        conn.close()

    movers = [Background(churn) for _ in range(3)]
    try:
        for _ in range(60):
            assert db.column("SELECT id FROM awa.jobs ORDER BY id") == ids
            assert db.state(ids[17]) in ("available", "running")
    finally:
        stop.append(True)
        for mover in movers:
            mover.result()


def test_filters_and_joins_work_on_the_view(db):
    db.insert(10, queue="a")
    db.insert(3, queue="b")
    assert db.rows("SELECT queue, count(*) FROM awa.jobs GROUP BY 1 ORDER BY 1") == [
        ("a", 10), ("b", 3),
    ]
    assert db.value("SELECT count(*) FROM awa.jobs WHERE (args->>'n')::int > 7") == 2
    assert wait_until(lambda: db.value("SELECT sum(available) FROM awa.queue_stats") == 13)
