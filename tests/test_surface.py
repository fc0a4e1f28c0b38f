"""The signatures of the contract, and the list of everything the extension owns in `awa`."""

import time

import pytest

from harness import Database, raises

CLAIM_COLUMNS = (
    "receipt bigint, job_id bigint, kind text, queue text, priority smallint, attempt smallint,"
    " max_attempts smallint, args jsonb, metadata jsonb, tags text[], progress jsonb,"
    " run_at timestamp with time zone, created_at timestamp with time zone,"
    " deadline_at timestamp with time zone"
)

# name: (arguments without defaults, result)
FUNCTIONS = {
    "insert_job": (
        "kind text, args jsonb, queue text, priority integer, run_at timestamp with time zone,"
        " max_attempts integer, tags text[], metadata jsonb, unique_key text, opts jsonb",
        "bigint",
    ),
    "insert_jobs": ("jobs jsonb, opts jsonb", "TABLE(ord bigint, job_id bigint, duplicate boolean)"),
    "insert_jobs_compat_batch": (
        "kinds text[], queues text[], args jsonb[], states awa.job_state[], priorities smallint[],"
        " max_attempts smallint[], run_ats timestamp with time zone[], metadata jsonb[],"
        " tags jsonb[], unique_keys bytea[], unique_states bit[], ordering_keys bytea[],"
        " skip_unique_conflicts boolean",
        "TABLE(ord bigint, job_id bigint, duplicate boolean)",
    ),
    "register_runtime": (
        "name text, liveness text, heartbeat_timeout interval, opts jsonb", "uuid",
    ),
    "deregister_runtime": ("runtime uuid, release boolean", "bigint"),
    "claim": (
        "queue text, max_jobs integer, runtime uuid, deadline interval, wait interval, opts jsonb",
        f"TABLE({CLAIM_COLUMNS})",
    ),
    "claim_from": (
        "queues text[], max_jobs integer, runtime uuid, deadline interval, wait interval,"
        " opts jsonb",
        f"TABLE({CLAIM_COLUMNS})",
    ),
    "wait_for_jobs": ("queues text[], timeout interval, available boolean", None),
    "claim_outcome": ("", "text"),
    "complete": ("receipt bigint, result jsonb", "void"),
    "complete_many": ("receipts bigint[]", "TABLE(receipt bigint, completed boolean)"),
    "complete_and_claim": (
        "receipts bigint[], queue text, max_jobs integer, runtime uuid, deadline interval",
        f"TABLE({CLAIM_COLUMNS})",
    ),
    "fail": (
        "receipt bigint, error text, retry_after interval, terminal boolean", "awa.job_state",
    ),
    "snooze": ("receipt bigint, delay interval", "void"),
    "cancel_attempt": ("receipt bigint, reason text", "void"),
    "release": ("receipts bigint[]", "bigint"),
    "set_progress": (
        "receipt bigint, percent integer, message text, metadata jsonb", "void",
    ),
    "extend": (
        "receipts bigint[], by interval",
        "TABLE(receipt bigint, deadline_at timestamp with time zone)",
    ),
    "cancel_requested": ("receipts bigint[]", "SETOF bigint"),
    "cancel_job": ("job_id bigint, reason text, force boolean", "awa.job_state"),
    "cancel_by_unique_key": ("unique_key text", "bigint"),
    "list_jobs": (
        "queue text, state awa.job_state, kind text, tag text, before_id bigint, max_rows integer",
        "SETOF awa.jobs",
    ),
    "job_attempts": (
        "job_id bigint",
        "TABLE(attempt integer, receipt bigint, runtime uuid,"
        " claimed_at timestamp with time zone, closed_at timestamp with time zone,"
        " outcome text, error text)",
    ),
    "dump_job": ("job_id bigint", "jsonb"),
    "register_callback": ("receipt bigint, timeout interval, opts jsonb", "uuid"),
    "wait_for_callback": ("receipt bigint", "void"),
    "complete_external": ("callback uuid, payload jsonb", "awa.job_state"),
    "fail_external": ("callback uuid, error text", "awa.job_state"),
    "retry_external": ("callback uuid", "awa.job_state"),
    "resume_external": ("callback uuid, payload jsonb", "bigint"),
    "heartbeat_callback": ("callback uuid, timeout interval", "timestamp with time zone"),
    "cancel_callback": ("callback uuid", "boolean"),
    "callback_result": ("receipt bigint", "jsonb"),
    "retry_job": ("job_id bigint", "awa.job_state"),
    "delete_job": ("job_id bigint", "boolean"),
    "retry_failed": ("queue text, kind text", "bigint"),
    "discard_failed": ("queue text, kind text", "bigint"),
    "dlq_retry": ("job_id bigint, opts jsonb", "awa.job_state"),
    "dlq_retry_many": ("filter jsonb", "bigint"),
    "dlq_purge": ("filter jsonb", "bigint"),
    "dlq_move": ("job_id bigint, reason text", "boolean"),
    "configure_queue": ("queue text, settings jsonb", "jsonb"),
    "get_result": ("job_id bigint, wait interval", "jsonb"),
    "get_job": ("job_id bigint", "SETOF awa.jobs"),
    "prepare_queue": ("queue text", "void"),
    "drain_queue": ("queue text", "bigint"),
    "pause_queue": ("queue text, by text", "boolean"),
    "resume_queue": ("queue text", "boolean"),
    "grant_access": ("role_name name, profile text, queues text[]", "void"),
    "revoke_access": ("role_name name", "void"),
    "halt_runtime_scope": ("scope text, mode text, reason text", "uuid"),
    "resume_runtime_scope": ("scope text, halt_id uuid", "boolean"),
    "runtime_control_status": (
        "scope text",
        "TABLE(scope text, desired text, halt_id uuid, reason text, halted_by text,"
        " since timestamp with time zone, fleet_halted boolean, runtime uuid, runtime_name text,"
        " supported boolean, observed text, observed_at timestamp with time zone)",
    ),
    "rescue": (
        "kind text, max_rows integer", "TABLE(kind text, rescued bigint, pass_end text)"
    ),
    "recover": (
        "epoch text, opts jsonb", "TABLE(ran boolean, orphaned bigint, rescued bigint)"
    ),
    "upsert_queue_descriptor": ("queue text, descriptor jsonb, runtime uuid", "boolean"),
    "upsert_job_kind_descriptor": ("kind text, descriptor jsonb, runtime uuid", "boolean"),
    "ensure_claim_batch_job_index": ("claim_slot integer", "boolean"),
    "maintain": ("", "TABLE(step text, did bigint, took interval)"),
    "check": ("", "TABLE(invariant text, ok boolean, detail text)"),
    "rebuild": ("", "void"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(db, name):
    found = db.rows(
        "SELECT pg_get_function_result(oid), proargnames, proargmodes::text[],"
        " coalesce(proallargtypes, proargtypes::oid[])::regtype[]::text[], provolatile, proparallel"
        " FROM pg_proc WHERE pronamespace = 'awa'::regnamespace AND proname = %s",
        name,
    )
    assert len(found) == 1, f"{len(found)} functions awa.{name}: one signature a function"
    result, names, modes, types, volatility, parallel = found[0]
    arguments, expected = FUNCTIONS[name]
    modes = modes or ["i"] * len(types)
    given = [
        f"{argument} {type_}"
        for argument, mode, type_ in zip(names or [], modes, types, strict=True)
        if mode in ("i", "b")
    ]
    assert ", ".join(given) == arguments
    if expected is not None:
        assert result == expected
    assert parallel == "u"
    assert volatility == "v" or name == "get_job"


def test_no_overloads(db):
    assert db.rows(
        "SELECT proname, count(*) FROM pg_proc WHERE pronamespace = 'awa'::regnamespace"
        " GROUP BY 1 HAVING count(*) > 1"
    ) == []


def test_everything_in_the_schema_belongs_to_the_extension(db):
    strays = db.column("""
        SELECT pg_describe_object(classid, objid, 0) FROM (
            SELECT 'pg_class'::regclass AS classid, oid AS objid FROM pg_class
            WHERE relnamespace = 'awa'::regnamespace AND relkind IN ('r', 'v', 'S', 'm')
            UNION ALL SELECT 'pg_proc'::regclass, oid FROM pg_proc
            WHERE pronamespace = 'awa'::regnamespace
        ) objects
        WHERE NOT EXISTS (
            SELECT FROM pg_depend d WHERE d.classid = objects.classid AND d.objid = objects.objid
            AND d.deptype = 'e'
        )
    """)
    assert strays == []


def test_every_table_and_sequence_is_dumped(db):
    """But for what tells a copy from a restore, and what only lives with this server."""
    left_out = db.column("""
        SELECT relname FROM pg_class
        WHERE relnamespace = 'awa'::regnamespace AND relkind IN ('r', 'S') AND oid <> ALL (
            SELECT unnest(extconfig) FROM pg_extension WHERE extname = 'awa'
        ) ORDER BY 1
    """)
    assert left_out == ["identity", "runtime_control_observations", "schema_version"]


def test_updated_tables_have_a_primary_key(db):
    """Append-only leaves and lanes have none; all others are replica identities."""
    without = db.column("""
        SELECT relname FROM pg_class c WHERE relnamespace = 'awa'::regnamespace AND relkind = 'r'
        AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary)
        AND relname !~ '^(ready_entries|lease_claim_batches|lease_claim_closures)_[0-9]+$'
    """)
    assert without == ["queue_lanes"]


def test_without_the_library_preloaded(new_server):
    server = new_server({"shared_preload_libraries": ""})
    with server.connect() as conn, raises("55000") as caught:
        conn.execute("CREATE EXTENSION awa")
    assert "shared_preload_libraries" in (caught.error.diag.message_hint or "")
    with server.connect() as conn:
        assert conn.value("SELECT 1") == 1


def test_library_gone_from_preload_later(own_db):
    """The functions are there, their memory is not: 55000 with the hint, and no crash."""
    own_db.insert()
    own_db.close_sessions()
    own_db.server.restart(settings={"shared_preload_libraries": ""})
    with own_db.server.connect(own_db.name) as conn:
        for call in ("awa.insert_job('k')", "awa.claim('default')", "awa.check()"):
            with raises("55000") as caught:
                conn.execute(f"SELECT * FROM {call}")
            assert "shared_preload_libraries" in (caught.error.diag.message_hint or "")
    own_db.server.restart(settings={"shared_preload_libraries": "awa"})
    own_db.wait_served()
    assert len(own_db.claim(max_jobs=10)) == 1


def test_drop_and_create_again(db):
    db.insert(5)
    db.claim(max_jobs=2)
    db.execute("DROP EXTENSION awa CASCADE")
    db.execute("CREATE EXTENSION awa")
    db.wait_served()
    assert db.claim(max_jobs=10) == []
    assert len(db.insert(3)) == 3


def test_served_within_a_second_of_the_commit(server):
    database = Database(server, "prompt", extension=False)
    try:
        conn = database.connect()
        conn.execute("CREATE EXTENSION awa")
        start = time.monotonic()
        database.wait_served()
        assert time.monotonic() - start < 1.5
        conn.execute("SELECT awa.insert_job('k')")
        assert len(database.claim()) == 1
    finally:
        database.close_sessions()
        database.drop()
