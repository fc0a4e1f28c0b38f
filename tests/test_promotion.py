"""run_at: scheduled jobs become available on time."""

from datetime import timedelta

from psycopg.types.json import Jsonb

from harness import wait_until


def schedule(conn, delay, queue="default"):
    return conn.value(
        "SELECT awa.insert_job('k', queue => %s, run_at => clock_timestamp() + %s::interval)",
        queue, delay,
    )


def test_within_20_ms(db):
    """The best of some: a loaded machine may be late, the engine may not."""
    late = []
    for _ in range(6):
        job_id = schedule(db.conn, "150 ms")
        job, = wait_until(lambda: db.claim(wait="2 s"))
        now = db.value("SELECT clock_timestamp()")
        assert job.job_id == job_id and now >= job.run_at
        late.append(now - job.run_at)
    assert min(late) < timedelta(milliseconds=20), late
    assert max(late) < timedelta(seconds=1), late


def test_never_early(db):
    ids = [schedule(db.conn, f"{delay} ms") for delay in (400, 200, 300, 100)]
    order = []
    while len(order) < 4:
        for job in db.claim(wait="1 s"):
            assert job.run_at <= db.value("SELECT clock_timestamp()")
            order.append(job.job_id)
    assert order == [ids[3], ids[1], ids[2], ids[0]]


def test_a_nearer_one_is_not_kept_by_a_farther_one(db):
    schedule(db.conn, "1 day")
    near = schedule(db.conn, "100 ms")
    assert [job.job_id for job in wait_until(lambda: db.claim(wait="1 s"))] == [near]


def test_thousands_at_one_moment(db):
    due = db.value("SELECT clock_timestamp() + interval '300 ms'")
    jobs = [{"kind": "k", "args": n, "run_at": due.isoformat()} for n in range(10_000)]
    db.rows("SELECT * FROM awa.insert_jobs(%s)", Jsonb(jobs))
    assert db.count(state="scheduled") == 10_000
    wait_until(lambda: db.value("SELECT available FROM awa.queue_stats") == 10_000, 20)
    got = []
    while rows := db.claim(max_jobs=2500):
        got += [row.args for row in rows]
    assert sorted(got) == list(range(10_000))


def test_commits_after_its_time(db):
    conn = db.connect()
    conn.begin()
    job_id = schedule(conn, "50 ms")
    run_at = conn.value("SELECT run_at FROM awa.get_job(%s)", job_id)
    wait_until(lambda: db.value("SELECT clock_timestamp() > %s", run_at))
    assert db.claim() == []
    conn.commit_sql()
    assert [job.job_id for job in wait_until(lambda: db.claim(wait="1 s"))] == [job_id]


def test_keeps_its_id_and_columns(db):
    job_id = db.value(
        "SELECT awa.insert_job('k', '{\"x\": 1.0}', 'q', 3, clock_timestamp() + interval '100 ms',"
        " 9, '{t}', '{\"m\": 2}', 'key')"
    )
    before = db.job(job_id)
    job, = wait_until(lambda: db.claim("q", wait="1 s"))
    assert (job.job_id, job.priority, job.max_attempts, job.tags) == (job_id, 3, 9, ["t"])
    assert (job.run_at, job.created_at) == (before.run_at, before.created_at)
    assert job.metadata["m"] == 2
    assert db.value("SELECT awa.insert_job('k', unique_key => 'key')") == job_id


def test_rolled_back_and_savepoint(db):
    conn = db.connect()
    conn.begin()
    schedule(conn, "50 ms")
    conn.execute("SAVEPOINT s")
    schedule(conn, "50 ms")
    conn.execute("ROLLBACK TO s")
    conn.rollback_sql()
    kept = schedule(conn, "60 ms")
    assert [job.job_id for job in wait_until(lambda: db.claim(max_jobs=10, wait="1 s"))] == [kept]


def test_long_queue_names_are_promoted_like_others(db):
    """One odd queue must not hold back the promotion of all."""
    for queue in ("n" * 200, "é" * 200, "q"):
        schedule(db.conn, "100 ms", queue)
    for queue in ("n" * 200, "é" * 200, "q"):
        assert wait_until(lambda queue=queue: db.claim(queue, wait="1 s"))


def test_a_paused_queue_promotes_but_gives_nothing(db):
    db.execute("SELECT awa.pause_queue('q')")
    job_id = schedule(db.conn, "50 ms", "q")
    db.wait_state(job_id, "available")
    assert db.claim("q") == []
    db.execute("SELECT awa.resume_queue('q')")
    assert len(db.claim("q")) == 1


def test_who_holds_a_due_job_holds_up_nobody_else(db):
    """An open transaction has deleted it: the others are promoted, and it comes back."""
    held = db.value("SELECT awa.insert_job('k', run_at => now() + interval '1 s')")
    holder = db.connect()
    holder.begin()
    holder.execute("DELETE FROM awa.deferred_jobs WHERE job_id = %s", (held,))
    db.execute("SELECT awa.insert_job('k', run_at => now() + interval '1.1 s')")
    (job,) = db.claim(wait="10 s") or db.claim(wait="10 s")
    assert job.job_id != held
    # The worker does everything else meanwhile.
    db.insert()
    db.claim(deadline="50 ms")
    wait_until(lambda: db.value("SELECT retryable FROM awa.queue_stats") == 1, 5)
    holder.rollback_sql()
    db.wait_state(held, "available")


def test_a_queue_of_scheduled_jobs_exists(db):
    db.execute("SELECT awa.insert_job('k', queue => 'later', run_at => now() + interval '1 h')")
    assert db.value("SELECT awa.resume_queue('later')") is False


def test_what_commits_late_is_found_behind_what_was_promoted(db):
    late = db.connect()
    late.begin()
    early = schedule(late, "100 ms")
    for _ in range(2):
        db.wait_state(schedule(db.conn, "200 ms"), "available")
    late.commit_sql()
    db.wait_state(early, "available")


def test_a_pinned_horizon_does_not_slow_promotion_down(db):
    """The index keeps the entries of promoted jobs: nobody looks at them again."""
    holder = db.connect()
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    holder.execute("SELECT count(*) FROM awa.deferred_jobs")
    gone, turns = 10_000, 20
    due = db.value("SELECT clock_timestamp() + interval '500 ms'")
    jobs = [{"kind": "k", "run_at": due.isoformat()} for _ in range(gone)]
    db.rows("SELECT * FROM awa.insert_jobs(%s)", Jsonb(jobs))
    wait_until(lambda: db.value("SELECT available FROM awa.queue_stats") == gone, 20)
    read = ("SELECT idx_tup_read FROM pg_stat_all_indexes"
            " WHERE indexrelid = 'awa.deferred_jobs_run_at'::regclass")
    # What the worker has done so far is told by its statistics after a while.
    wait_until(lambda: db.value(read) >= gone, 90, what="the worker's statistics")
    before = db.value(read)
    for _ in range(turns):
        db.wait_state(schedule(db.conn, "10 ms"), "available")
    wait_until(lambda: db.value(read) >= before + turns, 90, what="the worker's statistics")
    # Once a minute everything is looked at; each turn would be 400,000.
    assert db.value(read) - before < 5 * gone
