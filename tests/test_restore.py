"""pg_dump and restore: a restored database starts by itself and forgets nothing."""

import subprocess

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness import (
    Background, Database, DebugPoints, Server, place, raises, wait_blocked, wait_until,
)

STATS = (
    "SELECT queue, paused, scheduled, available, running, retryable, completed_total,"
    " failed_total, cancelled_total FROM awa.queue_stats ORDER BY 1"
)
JOBS = "SELECT id, state::text, queue, attempt, args::text FROM awa.jobs ORDER BY 1"


def lost(queue, paused, scheduled, available, running, retryable, *totals):
    return queue, paused, scheduled, available, 0, retryable + running, *totals


def run(*command):
    subprocess.run(
        place.as_server_user(command), check=True, cwd="/", env=place.environment(),
        capture_output=True,
    )


def restore(db, server, way, path):
    """`way`: a format, and how it is restored: plain-single, custom-data, directory-parallel."""
    kind, _, how = way.partition("-")
    tool = [server.bin / ("psql" if kind == "plain" else "pg_restore")]
    dump = [db.server.bin / "pg_dump", "-d", db.conninfo(), "-F", kind[0], "-f", path]
    copy = Database(server, extension=how == "data")
    tool += ["-d", copy.conninfo()]
    if kind == "plain":
        tool += ["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", path]
    else:
        tool += ["--exit-on-error", path]
    if how == "single":
        tool.append("--single-transaction")
    elif how == "parallel":
        dump += ["-j", "2"] if kind == "directory" else []
        tool += ["-j", "2"]
    elif how == "data":
        dump.append("--data-only")
        tool += [] if kind == "plain" else ["--data-only"]
    elif how == "schema":
        dump.append("--schema-only")
    run(*dump)
    run(*tool)
    copy.wait_served()
    return copy


WAYS = ["plain", "custom", "directory", "plain-single", "custom-single", "directory-parallel",
        "custom-parallel", "plain-data", "custom-data"]


@pytest.fixture(scope="module")
def target():
    """A server for what is restored; its databases have names that no source has."""
    server = Server({"awa.rescue_interval": "100ms"}, name="target").init().start()
    with server.connect() as conn:
        conn.execute("CREATE ROLE dumped LOGIN")
    yield server
    server.destroy()


@pytest.mark.parametrize("way", ["plain", "custom-single", "directory-parallel", "plain-data"])
def test_every_state_survives_a_restore(own_db, new_server, way):
    db = own_db
    db.execute("SELECT awa.configure_queue('a', '{\"backoff\": {\"base\": \"1 hour\"}}')")
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
    # Attempts that were running have lost their owners: nobody here works on them.
    stats = [lost(*row) for row in db.rows(STATS)]
    jobs = [(id, "retryable" if state == "running" else state, *rest)
            for id, state, *rest in db.rows(JOBS)]

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
    for job in a:
        with raises("AW001"):
            copy.execute("SELECT awa.complete(%s)", job.receipt)
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


@pytest.fixture(scope="module")
def full():
    """A database with one of everything, and what there is to say about it."""
    server = Server({"awa.rescue_interval": "100ms"}, name="full").init().start()
    full = Full(Database(server))
    yield full
    server.destroy()


class Full:
    def __init__(self, db):
        self.db = db
        db.execute("CREATE ROLE dumped LOGIN")
        db.execute("SELECT awa.grant_access('dumped', 'worker', '{q,p*}')")
        db.execute("SELECT awa.configure_queue('q', %s)", Jsonb(
            {"dlq_enabled": True, "max_attempts": 7, "attempt_deadline": "90 s",
             "backoff": {"base": "1 hour"}, "failed_retention": "9 days"}))
        self.halt = db.value("SELECT awa.halt_runtime_scope(reason => 'dumped')")
        self.held = db.value("SELECT awa.insert_job('k', queue => 'q', unique_key => 'held',"
                             " tags => '{a,b}', metadata => '{\"m\": 1.0}')")
        self.throttled = db.value("SELECT awa.insert_job('k', queue => 'q', unique_key => 'often',"
                                  " opts => '{\"throttle\": \"1 hour\"}')")
        (self.running,) = db.claim("q", deadline="1 hour")
        assert self.running.job_id == self.held
        db.execute("SELECT awa.set_progress(%s, 40, 'on its way')", self.running.receipt)
        (job,) = db.claim("q")
        db.execute("SELECT awa.complete(%s, '{\"r\": 1}')", job.receipt)
        self.runtime = db.value("SELECT awa.register_runtime('beats', 'heartbeat', '1 hour')")
        db.insert(1, queue="q")
        (self.owned,) = db.claim("q", runtime=self.runtime)
        self.parked, self.callbacks = [], []
        for _ in range(3):
            db.insert(1, queue="q")
            (job,) = db.claim("q", deadline="1 hour")
            self.callbacks.append(
                db.value("SELECT awa.register_callback(%s, '2 hours')", job.receipt))
            db.execute("SELECT awa.wait_for_callback(%s)", job.receipt)
            self.parked.append(job)
        self.dead = db.insert(2, queue="q", max_attempts=1)
        for job in db.claim("q", 2):
            db.execute("SELECT awa.fail(%s, 'no such address')", job.receipt)
        (self.failed,) = db.insert(1, queue="plain")
        db.execute("SELECT awa.fail(%s, 'x', terminal => true)", db.claim("plain")[0].receipt)
        (self.cancelled,) = db.insert(1, queue="plain")
        db.execute("SELECT awa.cancel_job(%s, 'not now')", self.cancelled)
        db.execute("SELECT awa.insert_job('k', queue => 'q', run_at => now() + interval '1 day')")
        db.insert(1, queue="q")
        db.execute("SELECT awa.fail(%s, 'again', '1 hour')", db.claim("q")[0].receipt)
        self.waiting = db.insert(5, queue="q", priority=3)
        db.insert(2, queue="paused")
        db.execute("SELECT awa.pause_queue('paused', 'me')")
        self.known = self.say(db)

    @staticmethod
    def say(db):
        """What must be equal; running attempts have come back as lost ones."""
        rows = db.rows("SELECT id, kind, queue, args::text, priority, attempt, max_attempts,"
                       " run_at, created_at, metadata::text, tags, unique_key, unique_states,"
                       " progress::text, callback_id, state::text FROM awa.jobs ORDER BY id")
        jobs = [row[:15] + ("retryable" if row[15] == "running" else row[15],) for row in rows]
        # A retry has a time of its own, and progress belongs to the attempt.
        jobs = [row[:7] + row[8:13] + row[14:] if row[15] == "retryable" else row for row in jobs]
        tables = ("job_unique_claims", "job_throttles", "dlq_entries", "done_entries",
                  "runtime_controls", "queue_acl", "recovery_epochs")
        said = {table: db.rows(f"SELECT * FROM awa.{table} ORDER BY 1, 2") for table in tables}
        said["queues"] = db.rows("SELECT queue, settings, paused_at, paused_by FROM awa.queues ORDER BY 1")
        said["stats"] = [lost(*row) for row in db.rows(STATS)]
        said["letters"] = db.rows("SELECT queue, dlq, waiting_external FROM awa.queue_stats ORDER BY 1")
        return jobs, said


@pytest.mark.parametrize("way", WAYS)
def test_everything_survives_a_restore(full, target, way):
    copy = restore(full.db, target, way, f"{full.db.server.home}/{way}.dump")
    jobs, said = full.known

    def is_equal():
        return full.say(copy) == (jobs, said)

    def difference():
        copied, copied_said = full.say(copy)
        return [*set(map(str, copied)) ^ set(map(str, jobs)),
                *[(name, said[name], rows) for name, rows in copied_said.items()
                  if rows != said[name]]]

    wait_until(is_equal, 10, what=lambda: f"equal rows; different are {difference()}")
    copy.check()
    # Receipts of the source are refused, and new ones are past them.
    for job in (full.running, full.owned):
        assert copy.state(job.job_id) == "retryable"
        for call in ("complete(%s)", "fail(%s, 'x')", "set_progress(%s, 1)",
                     "register_callback(%s, '1 h')"):
            with raises("AW001"):
                copy.execute(f"SELECT awa.{call}", job.receipt)
    claimed = copy.claim("q", 2)
    assert [job.job_id for job in claimed] == full.waiting[:2]
    newest = max(job.receipt for job in [*full.parked, full.owned, full.running])
    assert min(job.receipt for job in claimed) > newest
    # Callbacks are those of the source, each with its own end.
    assert copy.value("SELECT awa.complete_external(%s)::text", full.callbacks[0]) == "completed"
    assert copy.value("SELECT awa.retry_external(%s)::text", full.callbacks[1]) == "available"
    receipt = copy.value("SELECT awa.resume_external(%s, '7')", full.callbacks[2])
    assert receipt == full.parked[2].receipt
    assert copy.value("SELECT awa.callback_result(%s)", receipt) == 7
    copy.execute("SELECT awa.complete(%s)", receipt)
    # Keys, throttles, dead letters, halts, grants.
    assert copy.value("SELECT awa.insert_job('k', unique_key => 'held')") == full.held
    assert copy.value("SELECT awa.insert_job('k', unique_key => 'often',"
                      " opts => '{\"throttle\": \"1 hour\"}')") == full.throttled
    assert copy.value("SELECT awa.dlq_retry(%s)::text", full.dead[0]) == "available"
    assert copy.value("SELECT awa.dlq_purge('{\"queue\": \"q\"}')") == 1
    assert copy.value("SELECT awa.retry_job(%s)::text", full.failed) == "available"
    assert copy.claim("paused") == []
    assert copy.value("SELECT awa.resume_runtime_scope('maintenance.prune', %s)", full.halt) is True
    if not way.endswith("data"):
        # To list queues is data; EXECUTE comes with the schema.
        worker = copy.connect(user="dumped")
        with raises("42501"):
            worker.execute("SELECT * FROM awa.claim('other')")
        assert len(worker.rows("SELECT * FROM awa.claim('q')")) == 1
    new = copy.insert(1, queue="q")[0]
    assert new > max(row[0] for row in jobs)
    copy.close_sessions()
    copy.check()
    copy.drop()


def test_a_dump_of_the_schema_alone_is_an_empty_queue(full, target):
    copy = restore(full.db, target, "plain-schema", f"{full.db.server.home}/schema.dump")
    assert copy.count("q") == 0
    assert copy.rows("SELECT * FROM awa.queue_stats") == []
    copy.insert(1)
    assert len(copy.claim()) == 1
    copy.close_sessions()
    copy.check()
    copy.drop()


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


def dump_behind_a_lock(new_server, request, interval, before_locks, dumped):
    """A dump that has its snapshot and waits for its first lock, and what it is restored to.

    * `dumped(db)` - what the snapshot sees is made; what it returns goes on to:
    * `before_locks(db, made)` - what happens while the dump waits
    """
    source = new_server({"awa.rotate_interval": interval, "awa.completed_retention": "0"})
    db = Database(source, extension=False)
    # Tables are locked in the order in which they were made.
    db.execute("CREATE TABLE first ()")
    db.execute("CREATE EXTENSION awa")
    db.wait_served()
    made = dumped(db)
    locker = db.connect()
    locker.begin()
    locker.execute("LOCK TABLE first")
    target = new_server({"awa.rotate_interval": "100ms"})
    restoring = Background(restore, db, target, "custom", str(source.home / "dump"))
    wait_until(
        lambda: db.value(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name = 'pg_dump' AND wait_event_type = 'Lock'"
        ),
        10, what="the dump to wait",
    )
    before_locks(db, made)
    locker.rollback_sql()
    copy = restoring.result(60)
    request.addfinalizer(copy.close_sessions)
    return copy


GENERATION = "SELECT generation FROM awa.segments WHERE segment = 0"
DISPOSED = "SELECT disposed FROM awa.segments WHERE segment = 0"


def test_a_segment_waits_for_a_dump_that_has_no_locks_yet(new_server, request):
    """Its jobs end after the snapshot of the dump, which would have them nowhere."""

    def make(db):
        db.insert(3)
        return db.claim(max_jobs=3, deadline="1 hour")

    def finish(db, jobs):
        db.rows("SELECT * FROM awa.complete_many(%s)", [jobs[0].receipt])
        for job in jobs[1:]:
            db.execute("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
        wait_until(lambda: db.value(DISPOSED), 20)
        for _ in range(3):
            db.rows("SELECT * FROM awa.maintain()")
        assert db.value(GENERATION) == 0

    copy = dump_behind_a_lock(new_server, request, "1s", finish, make)
    assert copy.count() == 3
    again = wait_until(lambda: copy.claim(max_jobs=3, deadline="1 hour"), 20)
    while len(again) < 3:
        again += copy.claim(max_jobs=3, deadline="1 hour")
    assert {job.attempt for job in again} == {2}
    copy.check()


def test_a_segment_that_went_while_its_dump_waited(new_server, request):
    """Its row is in the dump, as it was; nothing else of it. The copy uses it again."""

    def make(db):
        done = [job.receipt for job in (db.insert(3), db.claim(max_jobs=3))[1]]
        reader = db.connect()
        reader.begin()
        reader.execute("LOCK TABLE awa.ready_entries_0 IN ACCESS SHARE MODE")
        db.rows("SELECT * FROM awa.complete_many(%s)", done)
        wait_until(lambda: db.value(DISPOSED), 20)
        return reader

    def let_go(db, reader):
        reader.rollback_sql()
        wait_until(lambda: db.value(GENERATION) > 0, 20)

    copy = dump_behind_a_lock(new_server, request, "100ms", let_go, make)
    copy.check()
    assert copy.value(
        "SELECT completed_total FROM awa.queue_stats WHERE queue = 'default'"
    ) == 3
    wait_until(lambda: copy.value(GENERATION) > 0, 20)
    copy.check()
