"""Starts of the server: memory is rebuilt from the tables, whatever happened before."""

import datetime
import signal

import pytest
from psycopg.types.json import Jsonb

from harness import claim, kill_backend, raises, wait_until


def flush(db):
    """An ordinary commit: it flushes the log up to itself, the claims before it included."""
    db.execute("CREATE TABLE IF NOT EXISTS public.flushed (x int)")


@pytest.fixture(params=["fast", "immediate", "kill -9"])
def restart(request, own_db):
    def do(**settings):
        server = own_db.server
        if request.param == "kill -9":
            server.kill_postmaster()
            server.settings |= settings
            server.start()
        else:
            server.restart(request.param, settings)
        own_db.wait_served()

    return do


def test_everything_is_as_before(own_db, restart):
    db = own_db
    available = db.insert(5)
    scheduled = db.value("SELECT awa.insert_job('k', run_at => now() + interval '1 day')")
    done = db.insert(3, queue="done")
    for job in db.claim("done", 3):
        db.execute("SELECT awa.complete(%s)", job.receipt)
    later = db.insert(1, queue="later")
    job, = db.claim("later")
    db.execute("SELECT awa.fail(%s, 'x', '1 hour')", job.receipt)
    failed = db.insert(1, queue="failed")
    job, = db.claim("failed")
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
    db.insert(1, queue="paused")
    db.execute("SELECT awa.pause_queue('paused')")
    stats = "SELECT queue, paused, scheduled, available, running, retryable, completed_total, failed_total FROM awa.queue_stats ORDER BY 1"
    before = db.rows(stats)
    restart()
    assert db.rows(stats) == before
    db.check()
    assert db.state(scheduled) == "scheduled"
    assert [db.state(job) for job in done] == 3 * ["completed"]
    assert [db.state(job) for job in later + failed] == ["retryable", "failed"]
    assert [job.job_id for job in db.claim(max_jobs=10)] == available
    assert db.claim("paused") == [] and db.claim("done") == []


def test_running_attempts_are_completed_by_their_receipts(own_db, restart):
    db = own_db
    ids = db.insert(1500)
    jobs = db.claim(max_jobs=700) + db.claim(max_jobs=700)
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs[::7]])
    flush(db)
    restart()
    rest = [job.receipt for n, job in enumerate(jobs) if n % 7]
    assert all(done for _, done in db.rows("SELECT * FROM awa.complete_many(%s)", rest))
    assert db.row("SELECT * FROM awa.complete_many(%s)", [jobs[0].receipt])[1] is False
    assert [job.job_id for job in db.claim(max_jobs=1000)] == ids[1400:]


def test_receipts_are_never_issued_twice(own_db, restart):
    db = own_db
    seen = []
    for _ in range(3):
        db.insert(20)
        seen += [job.receipt for job in db.claim(max_jobs=20)]
        flush(db)
        restart()
    assert len(set(seen)) == 60 and seen == sorted(seen)


def test_ids_are_never_issued_twice(own_db, restart):
    db = own_db
    seen = []
    for _ in range(3):
        seen += db.insert(20)
        # Jobs of transactions that never committed have used up their ids, too.
        lost = db.connect()
        lost.begin()
        seen += lost.column("SELECT job_id FROM awa.insert_jobs(%s)", Jsonb([{"kind": "k"}] * 20))
        restart()
    assert len(set(seen)) == 120
    assert db.count() == 60


def test_session_owners_are_dead_after_a_start(own_db, restart):
    db = own_db
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime('r')")
    job_id, = db.insert()
    job, = claim(conn, runtime=runtime)
    flush(db)
    restart()
    db.wait_state(job_id, "retryable")
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", job.receipt)


def test_deadlines_get_a_fresh_period(own_db, restart):
    """They become at least the end of replay plus heartbeat_staleness."""
    db = own_db
    job_id, = db.insert()
    job, = db.claim(deadline="3 s")
    flush(db)
    restart()
    left = db.value(
        "SELECT extract(epoch FROM deadline_at - clock_timestamp()) FROM awa.get_job(%s)", job_id
    )
    assert left > 60
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_uncommitted_work_is_gone(own_db, restart):
    db = own_db
    ids = db.insert(6)
    held, = db.claim()
    flush(db)
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.insert_job('lost')")
    conn.execute("SELECT awa.complete(%s)", (held.receipt,))
    claim(conn, max_jobs=2)
    restart()
    assert [db.state(job) for job in ids] == ["running"] + 5 * ["available"]
    assert db.count() == 6
    db.execute("SELECT awa.complete(%s)", held.receipt)
    assert [job.job_id for job in db.claim(max_jobs=10)] == ids[1:]


def test_scheduled_jobs_fall_due_while_the_server_is_down(own_db):
    db = own_db
    job_id = db.value("SELECT awa.insert_job('k', run_at => now() + interval '300 ms')")
    due = db.job(job_id).run_at
    db.server.stop("immediate")
    wait_until(lambda: datetime.datetime.now(datetime.UTC) > due)
    db.server.start()
    db.wait_served()
    job, = wait_until(lambda: db.claim())
    assert job.job_id == job_id


def test_a_killed_backend_in_every_role(own_db):
    """SIGKILL of a backend makes the postmaster re-initialise shared memory under us."""
    db = own_db
    ids = db.insert(30)
    jobs = db.claim(max_jobs=10)
    flush(db)
    victim = db.connect()
    victim.begin()
    victim.execute("SELECT awa.complete(%s)", (jobs[0].receipt,))
    claim(victim, max_jobs=5)
    victim.execute("SELECT awa.insert_job('lost')")
    kill_backend(victim.pid, signal.SIGKILL)
    db.server.wait_log("all server processes terminated")
    db.server.boots += 1
    db.server.wait_ready()
    db.wait_served()
    assert all(
        done
        for _, done in db.rows(
            "SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs]
        )
    )
    got = [job.job_id for job in db.claim(max_jobs=100)]
    assert got == ids[10:]


def test_producing_works_while_replaying(own_db):
    """Right after a start a producer never waits, nor gets an error."""
    db = own_db
    db.insert(2000)
    db.server.crash()
    conn = db.server.connect(db.name)
    job_id = conn.value("SELECT awa.insert_job('early')")
    conn.close()
    db.wait_served()
    kinds = []
    while jobs := db.claim(max_jobs=1000):
        kinds += [job.kind for job in jobs]
    assert kinds.count("early") == 1 and len(kinds) == 2001
    assert job_id


def test_a_promoted_standby_serves(own_db):
    db = own_db
    ids = db.insert(10)
    jobs = db.claim(max_jobs=4)
    flush(db)
    standby = db.server.make_standby().start()
    try:
        with standby.connect(db.name) as conn:
            wait_until(lambda: conn.value("SELECT count(*) FROM awa.jobs") == 10)
            assert conn.value("SELECT state::text FROM awa.get_job(%s)", ids[5]) == "available"
            for call in ("awa.claim('default')", "awa.insert_job('k')", "awa.complete(1)"):
                with raises("25006"):
                    conn.execute(f"SELECT * FROM {call}")
        db.close_sessions()
        db.server.stop("immediate")
        standby.promote()
        old, db.server = db.server, standby
        db.wait_served()
        assert db.row("SELECT * FROM awa.complete_many(%s)", [jobs[0].receipt])[1] is True
        more = db.claim(max_jobs=10)
        assert [job.job_id for job in more] == ids[4:]
        assert not {job.receipt for job in more} & {job.receipt for job in jobs}
        db.check()
        db.server = old
    finally:
        standby.destroy()


def test_rebuild_changes_nothing(db):
    ids = db.insert(20)
    jobs = db.claim(max_jobs=5)
    db.execute("SELECT awa.complete(%s)", jobs[0].receipt)
    db.execute("SELECT awa.rebuild()")
    db.wait_served()
    db.check()
    db.execute("SELECT awa.complete(%s)", jobs[1].receipt)
    assert [job.job_id for job in db.claim(max_jobs=100)] == ids[5:]


def test_jobs_deferred_before_the_replay_are_counted_once(own_db):
    """Producers do not wait for the replay: what they add meanwhile is not its business."""
    own_db.execute("SELECT awa.insert_job('k', run_at => now() + interval '1 day')")
    own_db.server.reload(awa__enabled="off")
    own_db.server.restart()
    own_db.execute("SELECT awa.insert_job('k', run_at => now() + interval '1 day')")
    own_db.server.reload(awa__enabled=None)
    own_db.wait_served()
    assert own_db.value("SELECT scheduled FROM awa.queue_stats WHERE queue = 'default'") == 2


@pytest.mark.parametrize("how", ["rebuild", "fast", "immediate"])
def test_a_paused_queue_stays_paused(own_db, how):
    own_db.insert(2)
    own_db.execute("SELECT awa.pause_queue('default')")
    if how == "rebuild":
        own_db.execute("SELECT awa.rebuild()")
    else:
        own_db.server.restart(how)
        own_db.wait_served()
    assert not own_db.claim()
    assert own_db.value("SELECT awa.resume_queue('default')")
    assert len(own_db.claim(max_jobs=2)) == 2


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_pause_that_is_prepared_outlives_a_restart(own_db, end):
    own_db.insert(2)
    conn = own_db.connect()
    conn.begin()
    conn.execute("SELECT awa.pause_queue('default')")
    conn.execute("PREPARE TRANSACTION 'p'")
    own_db.server.restart()
    own_db.wait_served()
    assert len(own_db.claim()) == 1
    own_db.execute(f"{end} PREPARED 'p'")
    assert len(own_db.claim()) == (end == "ROLLBACK")
