"""Nothing in awa is for PUBLIC."""

import pytest
from psycopg import sql

from harness import Database, raises


@pytest.fixture
def nobody(db):
    """A role without any privilege, gone again with the test."""
    name = f"nobody_{db.name}"
    db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)).as_string(db.conn))
    yield name
    db.execute(f"DROP OWNED BY {name}")
    db.execute(f"DROP ROLE {name}")


def test_no_privilege_is_granted(db, nobody):
    assert not db.value("SELECT has_schema_privilege(%s, 'awa', 'usage, create')", nobody)
    executable = db.column(
        "SELECT oid::regprocedure::text FROM pg_proc"
        " WHERE pronamespace = 'awa'::regnamespace AND has_function_privilege(%s, oid, 'execute')",
        nobody,
    )
    assert executable == []
    readable = db.column(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'awa'::regnamespace"
        " AND relkind IN ('r', 'v', 'm', 'p')"
        " AND has_table_privilege(%s, oid, 'select, insert, update, delete, truncate, trigger')",
        nobody,
    )
    assert readable == []
    usable = db.column(
        # OFFSET 0: the privilege is asked of sequences only.
        "SELECT oid::regclass::text FROM (SELECT oid FROM pg_class"
        " WHERE relnamespace = 'awa'::regnamespace AND relkind = 'S' OFFSET 0) s"
        " WHERE has_sequence_privilege(%s, oid, 'usage, select, update')",
        nobody,
    )
    assert usable == []


@pytest.mark.parametrize(
    "call",
    [
        "SELECT awa.insert_job('k')",
        "SELECT * FROM awa.claim('default')",
        "SELECT awa.complete(1)",
        "SELECT * FROM awa.jobs",
        "SELECT * FROM awa.queue_stats",
        "SELECT * FROM awa.check()",
        "SELECT awa.register_runtime('r')",
        "CALL awa.wait_for_jobs('{q}', '0')",
        "SELECT awa.rebuild()",
    ],
)
def test_calls_are_refused(db, nobody, call):
    conn = db.connect(user=nobody)
    with raises("42501"):
        conn.execute(call)


def test_execute_alone_opens_no_queue(db, nobody):
    """The access list is checked in the function: a plain GRANT EXECUTE is not enough."""
    db.insert()
    job, = db.claim()
    db.insert()
    db.execute(f"GRANT USAGE ON SCHEMA awa TO {nobody}")
    db.execute(f"GRANT EXECUTE ON ALL ROUTINES IN SCHEMA awa TO {nobody}")
    db.execute(f"GRANT SELECT ON awa.jobs, awa.queue_stats TO {nobody}")
    conn = db.connect(user=nobody)
    for call in (
        "awa.insert_job('k')",
        "awa.insert_jobs('[{\"kind\": \"k\"}]')",
        "awa.claim('default')",
        f"awa.complete({job.receipt})",
        f"awa.fail({job.receipt}, 'x')",
        "awa.pause_queue('default')",
    ):
        with raises("42501"):
            conn.execute(f"SELECT * FROM {call}")
    for read in ("awa.jobs", "awa.queue_stats", f"awa.get_job({job.job_id})"):
        try:
            assert conn.rows(f"SELECT * FROM {read}") == []
        except Exception as error:
            assert error.diag.sqlstate == "42501"
    assert db.state(job.job_id) == "running"


def test_functions_run_as_their_caller(db):
    definers = db.column(
        "SELECT oid::regprocedure::text FROM pg_proc"
        " WHERE pronamespace = 'awa'::regnamespace AND prosecdef"
    )
    assert definers == []


def test_planted_objects_make_the_installation_fail(server):
    """The script never adopts what somebody left for it (CVE-2022-2625)."""
    database = Database(server, "planted", extension=False)
    try:
        conn = database.connect()
        conn.execute("CREATE SCHEMA awa")
        with raises("42P06"):
            conn.execute("CREATE EXTENSION awa")
    finally:
        database.close_sessions()
        database.drop()


def test_hostile_search_path(db):
    """Operators and functions of the caller's are never run by ours."""
    conn = db.connect()
    conn.execute("CREATE SCHEMA evil")
    for left, right in (("text", "text"), ("bigint", "bigint"), ("int", "int"), ("smallint", "smallint")):
        conn.execute(f"""
            CREATE FUNCTION evil.eq({left}, {right}) RETURNS boolean LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'evil was called'; END $$
        """)
        conn.execute(
            f"CREATE OPERATOR evil.= (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = evil.eq)"
        )
    for name in ("now", "clock_timestamp"):
        conn.execute(f"""
            CREATE FUNCTION evil.{name}() RETURNS timestamptz LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'evil was called'; END $$
        """)
    conn.execute("CREATE TEMP TABLE queues (queue text)")
    conn.execute("SET search_path = evil, pg_catalog")
    everything(conn)


@pytest.mark.parametrize(
    "setting",
    [
        "search_path = ''",
        "quote_all_identifiers = on",
        "DateStyle = 'German, DMY'",
        "IntervalStyle = 'sql_standard'",
        "TimeZone = 'Pacific/Chatham'",
        "bytea_output = 'escape'",
        "extra_float_digits = -15",
        "standard_conforming_strings = off",
        "array_nulls = off",
        "lc_messages = 'C'",
        "plan_cache_mode = 'force_generic_plan'",
        "enable_indexscan = off",
        "enable_seqscan = off",
        "default_transaction_deferrable = on",
        "work_mem = '64kB'",
        "force_parallel_mode = on",
        "row_security = off",
        "synchronous_commit = off",
        "transform_null_equals = on",
    ],
)
def test_any_setting_of_the_session(db, setting):
    conn = db.connect()
    conn.execute(f"SET {setting}")
    everything(conn)


def everything(conn):
    """The whole core once."""
    runtime = conn.value("SELECT awa.register_runtime('r')")
    job_id = conn.value("SELECT awa.insert_job('k', tags => '{a}', unique_key => 'u')")
    conn.value("SELECT awa.insert_job('k', run_at => pg_catalog.now() + '1 day'::interval)")
    conn.rows("SELECT * FROM awa.insert_jobs('[{\"kind\": \"k\", \"tags\": [\"x\"]}]')")
    conn.value("SELECT awa.pause_queue('p', 'me')")
    conn.value("SELECT awa.resume_queue('p')")
    assert conn.value("CALL awa.wait_for_jobs('{default}', '0')") is True
    receipts = conn.column("SELECT receipt FROM awa.claim('default', 10, %s)", runtime)
    assert len(receipts) == 2
    # Times as text: the driver reads none but ISO.
    assert len(conn.rows("SELECT receipt, deadline_at::text FROM awa.extend(%s, '1 s')", receipts)) == 2
    conn.value("SELECT awa.fail(%s, 'x', '1 hour')", receipts[1])
    conn.value("SELECT awa.complete(%s)", receipts[0])
    assert conn.value("SELECT state::text FROM awa.get_job(%s)", job_id) == "completed"
    assert conn.value("SELECT pg_catalog.count(*) FROM awa.jobs") == 3
    assert conn.value("SELECT completed_total FROM awa.queue_stats WHERE queue OPERATOR(pg_catalog.=) 'default'") == 1
    conn.rows("SELECT (awa.insert_job_compat('k', 'c')).id")
    conn.execute("INSERT INTO awa.jobs (kind, queue) VALUES ('k', 'c')")
    conn.execute("DELETE FROM awa.jobs WHERE id OPERATOR(pg_catalog.=) 0")
    conn.execute(
        "INSERT INTO awa.queue_meta (queue, paused) VALUES ('c', true)"
        " ON CONFLICT (queue) DO UPDATE SET paused = true"
    )
    assert conn.value("SELECT paused FROM awa.queue_meta WHERE paused_by IS NULL AND paused") is True
    assert len(conn.rows("SELECT queue, available FROM awa.queue_state_counts")) >= 2
    conn.rows("SELECT step, did, took::text FROM awa.maintain()")
    broken = [row for row in conn.rows("SELECT invariant, ok, detail FROM awa.check()") if not row[1]]
    assert broken == []
