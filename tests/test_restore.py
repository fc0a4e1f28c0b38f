"""pg_dump and restore: a restored database starts by itself and forgets nothing."""

import subprocess

import psycopg
import pytest
from harness import Background, Database, DebugPoints, place, raises, wait_blocked, wait_until

STATS = (
    "SELECT queue, paused, scheduled, available, running, retryable, completed_total,"
    " failed_total, cancelled_total FROM awa.queue_stats ORDER BY 1"
)
JOBS = "SELECT id, state::text, queue, attempt, args::text FROM awa.jobs ORDER BY 1"


def run(*command):
    subprocess.run(
        place.as_server_user(command), check=True, cwd="/", env=place.environment(),
        capture_output=True,
    )


def restore(db, server, way, path):
    tool = [server.bin / ("psql" if way.startswith("plain") else "pg_restore")]
    home = ["-h", db.server.home, "-p", db.server.port, "-U", "postgres"]
    run(db.server.bin / "pg_dump", *home, "-F", "p" if way.startswith("plain") else "c",
        "-f", path, db.name)
    copy = Database(server, extension=False)
    tool += ["-h", server.home, "-p", server.port, "-U", "postgres", "-d", copy.name]
    if way.startswith("plain"):
        tool += ["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", path]
    else:
        tool += ["--exit-on-error", path]
    if way.endswith("single"):
        tool.append("--single-transaction")
    run(*tool)
    copy.wait_served()
    return copy


@pytest.mark.parametrize("way", ["plain", "custom", "plain-single", "custom-single"])
def test_every_state_survives_a_restore(own_db, new_server, way):
    db = own_db
    # A source that has come far: its numbers are ahead of those of a new database.
    for _ in range(8):
        db.execute("SELECT awa.rebuild()")
    ids = db.insert(20, queue="a")
    a = db.claim("a", 8, deadline="1 hour")
    db.execute("SELECT awa.complete(%s, '{}')", a[0].receipt)
    db.execute("SELECT awa.fail(%s, 'x', retry_after => '50 s')", a[1].receipt)
    db.execute("SELECT awa.fail(%s, 'x', retry_after => '1 hour')", a[2].receipt)
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", a[3].receipt)
    db.execute("SELECT awa.release(%s)", [a[4].receipt])
    last = db.value(
        "SELECT awa.insert_job('k', queue => 'a', run_at => now() + interval '1 day',"
        " unique_key => 'u')"
    )
    db.insert(2, queue="p")
    db.execute("SELECT awa.pause_queue('p')")
    stats, jobs = db.rows(STATS), db.rows(JOBS)

    server = new_server()
    copy = restore(db, server, way, f"{db.server.home}/dump")
    wait_until(lambda: copy.rows(STATS) == stats, what=lambda: f"{stats}, not {copy.rows(STATS)}")
    assert copy.rows(JOBS) == jobs
    copy.check()
    assert not copy.claim("p")
    assert copy.rows("SELECT queue, paused FROM awa.queue_meta") == [("p", True)]
    assert copy.value("SELECT awa.insert_job('k', queue => 'a', unique_key => 'u')") == last
    new = copy.insert(1, queue="a")[0]
    assert new > max([*ids, last])
    with raises("AW001"):
        copy.execute("SELECT awa.complete(%s)", a[0].receipt)
    claimed = copy.claim("a", 5)
    assert min(j.receipt for j in claimed) > max(j.receipt for j in a)
    # The sequence of the dump is behind what the copy has used since.
    server.restart()
    copy.wait_served()
    copy.check()
    left = [j.job_id for j in copy.claim("a", 100)]
    assert new in left and len(left) == 9
    later = copy.insert(1, queue="a")[0]
    assert later > new
    server.restart()
    copy.wait_served()
    assert [j.job_id for j in copy.claim("a", 100)] == [later]
    copy.check()


def test_a_row_of_a_segment_takes_the_place_of_a_seed_that_is_being_written(own_server):
    db = Database(own_server, extension=False)
    with DebugPoints(db).at("segments_seeded") as seeded:
        db.execute("CREATE EXTENSION awa")
        seeded.wait()
        restorer = db.connect()
        pid = restorer.info.backend_pid
        row = "INSERT INTO awa.segments VALUES (0, 7, 'current', now(), false)"
        restoring = Background(restorer.execute, row)
        wait_blocked(db.conn, pid)
    restoring.result()
    assert db.value("SELECT generation FROM awa.segments WHERE segment = 0") == 7


def test_rows_deleted_by_hand_leave_memory(db):
    ids = db.insert(4)
    db.claim(max_jobs=2, deadline="1 hour")
    db.execute("DELETE FROM awa.ready_entries_0 WHERE position = %s", ids[3])
    wait_until(lambda: db.value("SELECT available FROM awa.queue_stats") == 1)
    # Its claims never were: whoever had them is robbed, by hand.
    db.execute("DELETE FROM awa.lease_claim_batches_0")
    wait_until(lambda: db.value("SELECT available FROM awa.queue_stats") == 3)
    db.check()
    assert [job.job_id for job in db.claim(max_jobs=5)] == ids[:3]


def test_rows_put_into_tables_by_hand_reach_memory(db):
    db.insert(1)
    db.execute("SELECT awa.insert_job('k', run_at => now() + interval '1 hour')")
    db.execute("UPDATE awa.deferred_jobs SET run_at = now() + interval '300 ms'")

    def all_run():
        try:
            db.claim(max_jobs=5, deadline="1 hour")
        except psycopg.Error as error:
            assert error.sqlstate == "AW003", error  # memory is rebuilt under the claim
        return db.count(state="running") == 2

    wait_until(all_run)
    db.insert(3, queue="h")
    db.execute("INSERT INTO awa.queues SELECT 'h', '{}', now(), 'me', now(), 0, 0, 0")
    wait_until(lambda: not db.claim("h", 0) and db.value(
        "SELECT paused FROM awa.queue_stats WHERE queue = 'h'"))
    assert not db.claim("h")
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.insert_job('k', queue => 'x')")
    conn.execute("DELETE FROM awa.ready_entries_0")
    conn.execute("SELECT awa.insert_job('k', queue => 'x')")
    conn.rollback_sql()
    db.check()
