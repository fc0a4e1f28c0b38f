"""Settings that people really have: nothing here may change what the queue does."""

import json
import shutil
import signal
import subprocess
import time

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from harness import Background, Database, claim, place, raises, wait_blocked, wait_until
from harness.place import free_port
from harness.session import connect

HOSTILE = {
    "serializable": ["default_transaction_isolation = 'serializable'"],
    "repeatable_read": ["default_transaction_isolation = 'repeatable read'"],
    "short_timeouts": ["statement_timeout = '1s'", "lock_timeout = '50ms'",
                       "idle_in_transaction_session_timeout = '1s'", "idle_session_timeout = '10s'"],
    "jit": ["jit = on", "jit_above_cost = 0", "jit_inline_above_cost = 0",
            "jit_optimize_above_cost = 0"],
    "no_plans": ["enable_indexscan = off", "enable_indexonlyscan = off", "enable_bitmapscan = off",
                 "enable_seqscan = off", "enable_sort = off", "enable_nestloop = off",
                 "enable_hashjoin = off", "enable_tidscan = off"],
    "costs": ["random_page_cost = 1e9", "cpu_index_tuple_cost = 1e9", "work_mem = '64kB'",
              "plan_cache_mode = 'force_generic_plan'", "from_collapse_limit = 1"],
    "parallel": ["force_parallel_mode = on", "parallel_setup_cost = 0", "parallel_tuple_cost = 0",
                 "min_parallel_table_scan_size = 0"],
    "german": ["DateStyle = 'German, DMY'", "IntervalStyle = 'sql_standard'",
               "TimeZone = 'Pacific/Chatham'", "lc_messages = 'C'", "bytea_output = 'escape'",
               "extra_float_digits = -15", "xmlbinary = 'hex'"],
    "postgres_verbose": ["DateStyle = 'SQL, MDY'", "IntervalStyle = 'postgres_verbose'",
                         "TimeZone = '<+23>-23'", "timezone_abbreviations = 'India'",
                         "intervalstyle = 'iso_8601'"],
    "old_strings": ["standard_conforming_strings = off", "backslash_quote = off",
                    "array_nulls = off", "transform_null_equals = on", "quote_all_identifiers = on"],
    "session": ["session_replication_role = replica", "row_security = off",
                "check_function_bodies = off", "default_table_access_method = heap",
                "default_transaction_deferrable = on", "synchronous_commit = off",
                "exit_on_error = off", "search_path = ''", "event_source = ''"],
    "logging": ["log_statement = 'all'", "log_min_duration_statement = 0", "debug_print_plan = on",
                "log_executor_stats = on", "client_min_messages = 'debug5'", "track_functions = 'all'",
                "track_io_timing = on", "compute_query_id = on", "log_lock_waits = on"],
}
# Set at the start of the server only.
NOT_OF_ROLES = ("event_source",)


@pytest.fixture(params=HOSTILE)
def hostile(db, request):
    """A role with settings of its own; hostile(profile) connects as it."""
    name = f"hostile_{db.name}"
    db.execute(f"CREATE ROLE {name} SUPERUSER LOGIN")
    for setting in HOSTILE[request.param]:
        if not setting.startswith(NOT_OF_ROLES):
            db.execute(f"ALTER ROLE {name} SET {setting}")
    yield lambda: db.connect(user=name)
    db.close_sessions()
    with db.server.connect() as conn:
        conn.execute(f"DROP ROLE {name}")


def life(conn, queue="life", durable_session=True):
    """The life of jobs, by the calls of a producer, a worker and an operator.

    Times as text, since the driver reads none but ISO; each call in a transaction of its
    own, as through a pooler.
    """
    q = {"queue": queue}
    conn.execute("SELECT awa.configure_queue(%(queue)s, %(settings)s)", q | {"settings": Jsonb(
        {"dlq_enabled": True, "attempt_deadline": "90 s", "backoff": {"base": "10 ms", "jitter": 0}})})
    first = conn.value("SELECT awa.insert_job('k', '{\"n\": 1.50}', %s, tags => '{a,b}',"
                       " unique_key => 'once')", queue)
    assert conn.value("SELECT awa.insert_job('k', queue => %s, unique_key => 'once')", queue) == first
    conn.rows("SELECT * FROM awa.insert_jobs(%s)", Jsonb(
        [{"kind": "k", "queue": queue, "args": {"n": n}} for n in range(2, 6)]))
    later = conn.value("SELECT awa.insert_job('k', queue => %s,"
                       " run_at => pg_catalog.clock_timestamp() + '100 ms'::interval)", queue)
    assert conn.value("CALL awa.wait_for_jobs(%s, '500 ms')", [queue]) is True
    liveness = "session" if durable_session else "heartbeat"
    runtime = conn.value("SELECT awa.register_runtime('r', %s)", liveness)
    taken = conn.rows("SELECT receipt, job_id, args::text FROM awa.claim(%s, 5, %s)", queue, runtime)
    assert [args for *_, args in taken] == ['{"n": 1.50}'] + [f'{{"n": {n}}}' for n in range(2, 6)]
    a, b, c, d, e = [receipt for receipt, *_ in taken]
    conn.rows("SELECT * FROM awa.heartbeat(%s)", runtime)
    conn.rows("SELECT receipt, deadline_at::text FROM awa.extend(%s, '1 min')", [a, b])
    conn.execute("SELECT awa.set_progress(%s, 50, 'half')", (a,))
    conn.execute("SELECT awa.complete(%s, '{\"r\": 1e5}')", (a,))
    assert conn.value("SELECT awa.get_result(%s)::text", first) == '{"r": 100000}'
    with raises("AW001"):
        conn.execute("SELECT awa.complete(%s)", (a,))
    assert conn.value("SELECT awa.fail(%s, 'once')::text", b) == "retryable"
    assert conn.value("SELECT awa.fail(%s, 'for good', terminal => true)::text", c) == "failed"
    conn.execute("SELECT awa.snooze(%s, '10 ms')", (d,))
    callback = conn.value("SELECT awa.register_callback(%s, '1 h')", e)
    conn.execute("SELECT awa.wait_for_callback(%s)", (e,))
    assert conn.value("SELECT awa.complete_external(%s, '1')::text", callback) == "completed"
    dead = conn.value("SELECT job_id FROM awa.dlq WHERE queue OPERATOR(pg_catalog.=) %s", queue)
    assert conn.value("SELECT awa.dlq_retry(%s)::text", dead) == "available"
    left = set()

    def all_done():
        for receipt, job in conn.rows("SELECT receipt, job_id FROM awa.claim(%s, 9, %s)", queue, runtime):
            conn.execute("SELECT awa.complete(%s)", (receipt,))
            left.add(job)
        return len(left) == 4

    wait_until(all_done, 10, what=lambda: f"the last of 4 jobs; {left}")
    assert later in left and dead in left
    job = conn.value("SELECT awa.insert_job('k', queue => %s, unique_key => 'gone')", queue)
    assert conn.value("SELECT awa.cancel_by_unique_key('gone')") == job
    assert conn.value("SELECT awa.retry_job(%s)::text", job) == "available"
    conn.execute("SELECT awa.delete_job(%s)", (job,))
    conn.execute("SELECT awa.pause_queue(%s)", (queue,))
    conn.execute("SELECT awa.resume_queue(%s)", (queue,))
    conn.rows("SELECT id, run_at::text FROM awa.jobs")
    conn.rows("SELECT name, labels, value FROM awa.metrics")
    assert conn.row("SELECT available, running, completed_total, dlq FROM awa.queue_stats"
                    " WHERE queue OPERATOR(pg_catalog.=) %s", queue) == (0, 0, 6, 0)
    conn.execute("SELECT awa.deregister_runtime(%s)", (runtime,))
    conn.rows("SELECT step, did FROM awa.maintain()")


def test_the_whole_life(hostile):
    conn = hostile()
    life(conn)
    # Once more: kept plans, warm caches.
    life(conn, "again")


def test_the_whole_life_in_sessions_of_many_settings(server):
    """All that do not exclude each other, for the database."""
    db = Database(server)
    try:
        for name in ("serializable", "jit", "costs", "german", "session"):
            for setting in HOSTILE[name]:
                if not setting.startswith(NOT_OF_ROLES):
                    db.execute(f"ALTER DATABASE {db.name} SET {setting}")
        db.close_sessions()
        life(db.connect())
        db.check()
    finally:
        db.close_sessions()
        db.drop()


# Timeouts


def test_a_statement_timeout_in_a_wait_loses_nothing(db):
    conn = db.connect(options="-c statement_timeout=300ms -c awa.claim_wait_max=10s")
    for call in ("SELECT FROM awa.claim('q', wait => '10 s')",
                 "CALL awa.wait_for_jobs('{q}', '10 s')",
                 "SELECT awa.get_result(%d, wait => '10 s')" % db.insert(1, queue="other")[0]):
        with raises("57014"):
            conn.execute(call)
    (job,) = db.insert(1, queue="q")
    start = time.monotonic()
    assert [j.job_id for j in claim(conn, "q")] == [job]
    assert time.monotonic() - start < 0.3


def test_a_lock_timeout_where_another_transaction_holds_the_key(db):
    one = db.connect()
    two = db.connect(options="-c lock_timeout=50ms")
    one.begin()
    one.execute("SELECT awa.insert_job('k', unique_key => 'u')")
    with raises("55P03"):
        two.execute("SELECT awa.insert_job('k', unique_key => 'u')")
    two.execute("SELECT awa.insert_job('k', unique_key => 'v')")
    one.rollback_sql()
    two.execute("SELECT awa.insert_job('k', unique_key => 'u')")
    assert db.count() == 2


def test_a_lock_timeout_where_another_transaction_closes(db):
    db.insert(1)
    (job,) = db.claim()
    one = db.connect()
    two = db.connect(options="-c lock_timeout=50ms")
    one.begin()
    one.execute("SELECT awa.complete(%s)", (job.receipt,))
    for call in ("complete(%s)", "fail(%s, 'x')", "release(ARRAY[%s])", "set_progress(%s, 1)"):
        with raises("55P03"):
            two.execute(f"SELECT awa.{call}", (job.receipt,))
    one.rollback_sql()
    two.execute("SELECT awa.complete(%s)", (job.receipt,))


def test_a_lock_timeout_is_not_hit_on_the_hot_path(db):
    """A held table lock of a dashboard or a dump, and an open producer, are in nobody's way."""
    reader, producer = db.connect(), db.connect()
    conn = db.connect(options="-c lock_timeout=50ms")
    db.insert(3)
    reader.begin()
    reader.execute("SELECT FROM awa.jobs")
    reader.execute("LOCK TABLE awa.ready_entries_0, awa.queues, awa.segments IN ACCESS SHARE MODE")
    producer.begin()
    producer.execute("SELECT awa.insert_job('k')")
    conn.execute("SELECT awa.insert_job('k')")
    for job in claim(conn, max_jobs=9):
        conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.rows("SELECT step FROM awa.maintain()")


def test_an_idle_transaction_that_is_ended_gives_its_jobs_back(db):
    ids = db.insert(2)
    conn = db.connect(options="-c idle_in_transaction_session_timeout=200ms")
    runtime = conn.value("SELECT awa.register_runtime('r')")
    (kept,) = claim(conn, runtime=runtime)
    conn.begin()
    assert [j.job_id for j in claim(conn, runtime=runtime)] == ids[1:]
    conn.execute("SELECT awa.complete(%s)", (kept.receipt,))
    # Its claim rolled back, and the runtime died with the session.
    wait_until(lambda: db.state(ids[1]) == "available", 5)
    wait_until(lambda: db.state(ids[0]) in ("retryable", "available"), 5)
    assert conn.pid not in db.column("SELECT pid FROM pg_stat_activity")


# Plans


def buffers(conn, query, *params):
    """Blocks that the statement touched."""
    (plan,) = conn.value(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}", *params)
    top = plan["Plan"]
    return top["Shared Hit Blocks"] + top["Shared Read Blocks"]


@pytest.mark.parametrize("statistics", ["absent", "stale", "fresh"])
@pytest.mark.parametrize("settings", ["plain", "no_plans", "costs"])
def test_a_claim_touches_few_buffers(db, statistics, settings):
    """Ten of 20,000 jobs, whatever the planner believes: it is not asked."""
    tables = db.column("SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r'"
                       " AND relnamespace = 'awa'::regnamespace")
    if statistics == "stale":
        db.execute(f"ANALYZE {', '.join(tables)}")  # of empty tables
    for _ in range(4):
        db.insert(5000)
    db.insert(100, queue="other", unique_key=None)
    if statistics == "fresh":
        db.execute(f"ANALYZE {', '.join(tables)}")
    if statistics == "absent":
        db.execute("DELETE FROM pg_statistic WHERE starelid IN (SELECT oid FROM pg_class"
                   " WHERE relnamespace = 'awa'::regnamespace)")
        db.execute("UPDATE pg_class SET reltuples = -1, relpages = 0"
                   " WHERE relnamespace = 'awa'::regnamespace")
    conn = db.connect()
    for setting in HOSTILE.get(settings, []):
        conn.execute(f"SET {setting}")
    claimed = "SELECT receipt FROM awa.claim('default', 10)"
    conn.execute(claimed)  # fills the caches of the catalog
    assert buffers(conn, claimed) < 200
    receipts = conn.column(claimed)
    conn.execute("SELECT awa.complete(%s)", (receipts[0],))
    assert buffers(conn, "SELECT awa.complete(%s)", receipts[1]) < 200
    assert buffers(conn, "SELECT * FROM awa.complete_many(%s)", receipts[2:9]) < 200
    conn.execute("SELECT awa.insert_job('k')")
    assert buffers(conn, "SELECT awa.insert_job('k')") < 200


# Read-only


WRITES = [
    "awa.insert_job('k')", "awa.insert_jobs('[{\"kind\": \"k\"}]')", "awa.claim('default')",
    "awa.claim('default', 0)", "awa.complete(1)", "awa.complete_many('{1}')", "awa.fail(1, 'x')",
    "awa.release('{1}')", "awa.snooze(1, '1 s')", "awa.extend('{1}', '1 s')", "awa.cancel_job(1)",
    "awa.pause_queue('q')", "awa.resume_queue('q')", "awa.prepare_queue('q')", "awa.maintain()",
    "awa.configure_queue('q', '{}')", "awa.register_runtime()", "awa.rescue()", "awa.rebuild()",
    "awa.grant_access('postgres', 'reader')", "awa.halt_runtime_scope()",
    "awa.dlq_purge('{\"allow_all\": true}')", "awa.retry_failed()", "awa.drain_queue('q')",
]
READS = ["awa.jobs", "awa.terminal_jobs", "awa.dlq", "awa.queue_stats", "awa.metrics",
         "awa.get_job(1)", "awa.list_jobs()", "awa.job_attempts(1)", "awa.dump_job(1)",
         "awa.runtime_control_status()"]


def test_a_read_only_session_reads(db):
    db.insert(1)
    conn = db.connect(options="-c default_transaction_read_only=on")
    for call in WRITES:
        with raises("25006"):
            conn.execute(f"SELECT * FROM {call}")
    for read in READS:
        conn.execute(f"SELECT * FROM {read}")
    # It may change its mind in the same session.
    conn.begin()
    conn.execute("SET TRANSACTION READ WRITE")
    conn.execute("SELECT awa.insert_job('k')")
    conn.commit_sql()
    assert db.count() == 2


# Values look the same whatever the session says


def test_what_is_stored_does_not_depend_on_the_session(db):
    """Computed keys, errors and settings made under odd settings equal those of others."""
    keys, settings, errors = set(), set(), []
    for number, group in enumerate(("plain", "german", "postgres_verbose", "old_strings")):
        conn = db.connect()
        for setting in HOSTILE.get(group, []):
            if not setting.startswith(NOT_OF_ROLES):
                conn.execute(f"SET {setting}")
        job = conn.value("SELECT awa.insert_job('k', %s, opts => %s)",
                         Jsonb({"b": 1.10, "a": [True, None, "x"]}),
                         Jsonb({"unique_by": ["queue", "args"], "unique_period": "100 years"}))
        keys.add(job)
        settings.add(json.dumps(conn.value("SELECT awa.configure_queue(%s, %s)", f"q{number}", Jsonb(
            {"attempt_deadline": "1 day 01:02:03", "failed_retention": "1 month",
             "backoff": {"base": "1.5 s"}})), sort_keys=True))
        conn.execute("SELECT awa.insert_job('k', queue => %s, max_attempts => 1)", (group,))
        receipt = conn.value("SELECT receipt FROM awa.claim(%s)", group)
        conn.execute("SELECT awa.fail(%s, 'x')", (receipt,))
        errors += db.column("SELECT errors[1] FROM awa.list_jobs(%s)", group)
    assert len(keys) == 1 and len(settings) == 1
    assert {frozenset(error) for error in errors} == {frozenset(errors[0])}
    when = [value for error in errors for key, value in error.items() if key.endswith("at")]
    for text in when:
        db.execute("SELECT %s::timestamptz", text)
        assert text[:4].isdigit(), text


# A transaction-pooling proxy


@pytest.fixture
def pooled(db):
    """Connections through pgbouncer, two server sessions for all of them."""
    binary = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    port = free_port()
    home = db.server.home / f"pooler-{db.name}"
    home.mkdir()
    (home / "users.txt").write_text('"postgres" ""\n')
    (home / "pgbouncer.ini").write_text(f"""
[databases]
{db.name} = host={db.server.home} port={db.server.port} dbname={db.name} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {home}/users.txt
pool_mode = transaction
default_pool_size = 2
max_client_conn = 100
ignore_startup_parameters = extra_float_digits,options
server_reset_query = DISCARD ALL
server_reset_query_always = 1
""")
    subprocess.run(["chown", "-R", place.server_user(), home], check=False)
    with open(home / "log", "w") as log:
        pooler = subprocess.Popen(
            place.as_server_user([binary, home / "pgbouncer.ini"], die_with_parent=True),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=place.environment())
    info = f"host=127.0.0.1 port={port} dbname={db.name} user=postgres"
    made = []

    def through():
        conn = connect(info, prepare_threshold=None)
        made.append(conn)
        return conn

    def answers():
        assert pooler.poll() is None, (home / "log").read_text()
        try:
            through().close()
            return True
        except psycopg.OperationalError:
            return False

    wait_until(answers, 10, what=lambda: (home / "log").read_text())
    yield through
    for conn in made:
        conn.close()
    pooler.send_signal(signal.SIGINT)
    try:
        pooler.wait(10)
    except subprocess.TimeoutExpired:
        pooler.kill()
        pooler.wait(10)


def test_the_whole_life_through_a_pooler(pooled):
    life(pooled(), durable_session=False)


def test_many_clients_through_few_sessions(db, pooled):
    """Leases without an owner survive the change of sessions, and no job is done twice."""
    db.insert(200, queue="p")
    done = []

    def work():
        conn = pooled()
        while True:
            jobs = claim(conn, "p", 5)
            if not jobs:
                return
            for job in jobs:
                with conn.transaction():
                    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
                done.append(job.job_id)

    workers = [Background(work) for _ in range(6)]
    for worker in workers:
        worker.result(60)
    assert len(done) == len(set(done)) == 200
    assert db.count("p", "completed") == 200


def test_a_wait_through_a_pooler_is_woken(db, pooled):
    waiting = Background(pooled().value, "CALL awa.wait_for_jobs('{w}', '10 s')")
    wait_until(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE state = 'active'"
                                " AND query LIKE 'CALL awa.wait%%'"))
    assert not waiting.done
    pooled().execute("SELECT awa.insert_job('k', queue => 'w')")
    assert waiting.result(5) is True


def test_a_transaction_through_a_pooler_is_one(db, pooled):
    conn = pooled()
    conn.begin()
    conn.execute("SELECT awa.insert_job('k', queue => 't', unique_key => 'u')")
    other = pooled()
    blocked = Background(other.value, "SELECT awa.insert_job('k', queue => 't', unique_key => 'u')")
    pid = wait_until(lambda: db.column(
        "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%%''u'')'"
        " AND pid <> pg_backend_pid() AND wait_event_type = 'Lock'"))[0]
    wait_blocked(db.conn, pid)
    conn.rollback_sql()
    job = blocked.result()
    assert db.column("SELECT id FROM awa.jobs WHERE queue = 't'") == [job]


def test_names_of_settings_are_real(db):
    """A list of settings is of no use with a misspelt one in it."""
    known = set(db.column("SELECT lower(name) FROM pg_settings"))
    for group in HOSTILE.values():
        for setting in group:
            assert setting.split(" ")[0].lower() in known, setting


def test_roles_settings_reach_the_functions(db):
    """ALTER ROLE ... SET awa.claim_wait_max: each role waits as long as it may."""
    name = f"patient_{db.name}"
    with db.server.connect(db.name) as admin:
        admin.execute(sql.SQL("CREATE ROLE {} SUPERUSER LOGIN").format(sql.Identifier(name)))
        admin.execute(sql.SQL("ALTER ROLE {} SET awa.claim_wait_max = '50ms'").format(sql.Identifier(name)))
    conn = db.connect(user=name)
    start = time.monotonic()
    assert claim(conn, "nothing", wait="10 s") == []
    assert time.monotonic() - start < 1
    conn.close()
    with db.server.connect() as admin:
        admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))
