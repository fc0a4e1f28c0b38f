"""docs/security.md holds: who may call what, and what they reach by it."""

import re
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from harness import Database, claim, place, raises

PAGE = (place.ROOT / "docs/security.md").read_text()
PROFILES = ("producer", "worker", "operator", "reader")
ZERO = "00000000-0000-0000-0000-000000000000"


def listed(heading):
    """Name to profiles, of the table under a heading."""
    part = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name := re.fullmatch(r"`(\w+)`", cells[0]):
            found[name[1]] = {p for p, cell in zip(PROFILES, cells[1:5]) if cell == "x"}
    return found


FUNCTIONS, VIEWS = listed("Every function"), listed("Every view")


def refused(conn, call, *params, code="42501"):
    call = call if call.startswith("CALL") else f"SELECT * FROM {call}"
    with raises(code):
        conn.rows(call, *params)


# The page and the catalog


def test_every_function_is_listed(db):
    there = set(db.column("SELECT proname FROM pg_proc WHERE pronamespace = 'awa'::regnamespace"))
    assert there - FUNCTIONS.keys() == set(), "not in docs/security.md"
    assert FUNCTIONS.keys() - there == set(), "only in docs/security.md"


def test_every_relation_and_type_is_listed(db):
    there = set(db.column(
        "SELECT relname FROM pg_class WHERE relnamespace = 'awa'::regnamespace AND relkind = 'v'"))
    assert there == VIEWS.keys()
    prose = PAGE.split("\n## Tables, sequences, types\n")[1]
    named = set(re.findall(r"`(\w+)`", prose)) - {"15"}
    there = set(db.column("""
        SELECT regexp_replace(relname, '_\\d+$', '_0') FROM pg_class
        WHERE relnamespace = 'awa'::regnamespace AND relkind NOT IN ('v', 'i')
        UNION SELECT typname FROM pg_type
        WHERE typnamespace = 'awa'::regnamespace AND typrelid = 0 AND typelem = 0"""))
    assert there == named


def test_no_other_kind_of_object_is_there(db):
    """Operators, casts, event triggers, publications and the like would need a word."""
    kinds = set(db.column("""
        SELECT DISTINCT classid::regclass::text FROM pg_depend
        WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
        AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'awa')"""))
    assert kinds <= {"pg_class", "pg_proc", "pg_type", "pg_namespace", "pg_trigger"}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_may_call_what_the_page_says(db, role, profile):
    conn = role(profile)
    may = set(db.column(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'awa'::regnamespace"
        " AND has_function_privilege(%s, oid, 'execute')", conn.name))
    assert may == {name for name, who in FUNCTIONS.items() if profile in who}
    sees = set(db.column(
        "SELECT relname FROM pg_class WHERE relnamespace = 'awa'::regnamespace"
        " AND relkind IN ('r', 'v', 'm', 'p', 'f') AND has_table_privilege(%s, oid,"
        " 'select, insert, update, delete, truncate, references, trigger')", conn.name))
    assert sees == {name for name, who in VIEWS.items() if profile in who}
    assert not db.value("SELECT has_sequence_privilege(%s, 'awa.chunk_blocks',"
                        " 'usage, select, update')", conn.name)
    assert not db.value("SELECT has_schema_privilege(%s, 'awa', 'create')", conn.name)


def test_views_are_barriers(db):
    assert db.column(
        "SELECT relname FROM pg_class WHERE relnamespace = 'awa'::regnamespace AND relkind = 'v'"
        " AND NOT coalesce('security_barrier=true' = ANY (reloptions), false)") == []


def test_the_control_file_trusts_nobody():
    control = (place.ROOT / "awa.control").read_text()
    assert re.search(r"^superuser *= *true", control, re.M)
    assert re.search(r"^trusted *= *false", control, re.M)
    assert re.search(r"^relocatable *= *false", control, re.M)


# The queue list binds every act and every read


class Hidden:
    """One of everything, in a queue that nobody else may touch."""

    def __init__(self, db):
        self.db = db
        db.execute("SELECT awa.configure_queue('hidden', '{\"dlq_enabled\": true}')")
        db.execute("SELECT awa.upsert_queue_descriptor('hidden', '{\"owner\": \"secret\"}')")
        db.execute("SELECT awa.insert_job('k', queue => 'hidden', unique_key => 'held')")
        (self.running,) = db.claim("hidden", deadline="1 hour")
        db.insert(1, queue="hidden")
        (self.parked,) = db.claim("hidden", deadline="1 hour")
        self.callback = db.value(
            "SELECT awa.register_callback(%s, '1 hour')", self.parked.receipt)
        db.execute("SELECT awa.wait_for_callback(%s)", self.parked.receipt)
        (self.dead,) = db.insert(1, queue="hidden")
        (job,) = db.claim("hidden")
        db.execute("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
        (self.completed,) = db.insert(1, queue="hidden")
        (job,) = db.claim("hidden")
        db.execute("SELECT awa.complete(%s, '\"secret\"')", job.receipt)
        (self.waiting,) = db.insert(1, queue="hidden", unique_key="waits")

    def state(self):
        return self.db.rows("SELECT * FROM awa.jobs ORDER BY id"), self.db.rows(
            "SELECT * FROM awa.dlq ORDER BY job_id"), self.db.rows(
            "SELECT queue, settings, paused_at FROM awa.queues ORDER BY 1")


@pytest.fixture
def hidden(db):
    return Hidden(db)


def calls_on_hidden(h):
    """A call of every function that names the queue, or leads to it by an id."""
    r, c = h.running.receipt, f"'{h.callback}'"
    jobs = (h.running.job_id, h.parked.job_id, h.dead, h.completed, h.waiting)
    yield "awa.insert_job('k', queue => 'hidden')"
    yield "awa.insert_job('k', queue => 'open', unique_key => 'waits'," \
          " opts => '{\"on_conflict\": \"replace\"}')"
    yield "awa.insert_jobs('[{\"kind\": \"k\", \"queue\": \"hidden\"}]')"
    yield "awa.insert_jobs('[{\"kind\": \"k\", \"queue\": \"open\"}, {\"kind\": \"k\", \"queue\": \"hidden\"}]')"
    yield "awa.insert_jobs_compat_batch('{k}', '{hidden}', '{NULL}')"
    yield "awa.insert_job_compat('k', 'hidden')"
    yield "awa.claim('hidden')"
    yield "awa.claim('hidden', 0)"
    yield "awa.claim_from('{open,hidden}')"
    yield "awa.complete_and_claim('{}', 'hidden')"
    yield f"awa.complete_and_claim('{{{r}}}', 'open')"
    yield "CALL awa.wait_for_jobs('{open,hidden}', '0')"
    yield f"awa.complete({r})"
    yield f"awa.complete_many('{{{r}}}')"
    yield f"awa.fail({r}, 'x')"
    yield f"awa.snooze({r}, '1 s')"
    yield f"awa.release('{{{r}}}')"
    yield f"awa.cancel_attempt({r}, 'x')"
    yield f"awa.extend('{{{r}}}', '1 h')"
    yield f"awa.set_progress({r}, 1)"
    yield f"awa.register_callback({r}, '1 h')"
    yield f"awa.wait_for_callback({r})"
    yield f"awa.callback_result({r})"
    yield f"awa.complete_external({c})"
    yield f"awa.fail_external({c}, 'x')"
    yield f"awa.retry_external({c})"
    yield f"awa.resume_external({c})"
    yield f"awa.heartbeat_callback({c}, '1 h')"
    yield f"awa.cancel_callback({c})"
    for job in jobs:
        yield f"awa.cancel_job({job}, force => true)"
        yield f"awa.retry_job({job})"
        yield f"awa.delete_job({job})"
        yield f"awa.dlq_retry({job})"
        yield f"awa.dlq_move({job}, 'x')"
        yield f"awa.get_result({job})"
    yield "awa.cancel_by_unique_key('held')"
    yield "awa.retry_failed('hidden')"
    yield "awa.discard_failed('hidden')"
    yield "awa.dlq_retry_many('{\"queue\": \"hidden\"}')"
    yield "awa.dlq_purge('{\"queue\": \"hidden\"}')"
    yield "awa.configure_queue('hidden', '{}')"
    yield "awa.pause_queue('hidden')"
    yield "awa.resume_queue('hidden')"
    yield "awa.prepare_queue('hidden')"
    yield "awa.drain_queue('hidden')"
    yield "awa.upsert_queue_descriptor('hidden', '{}')"
    for everywhere in ("rescue()", "maintain()", "check()", "halt_runtime_scope()",
                       f"resume_runtime_scope('maintenance.prune', '{ZERO}')", "rebuild()", "ensure_claim_batch_job_index(0)",
                       "grant_access('postgres', 'reader')", "revoke_access('postgres')"):
        yield f"awa.{everywhere}"


def reads_of_hidden(h):
    for job in (h.running.job_id, h.parked.job_id, h.dead, h.completed, h.waiting):
        yield f"awa.get_job({job})"
        yield f"awa.job_attempts({job})"
        yield f"(SELECT awa.dump_job({job}) AS d) AS x WHERE d IS NOT NULL"
    yield "awa.list_jobs()"
    yield "awa.list_jobs('hidden')"
    yield "awa.jobs"
    yield "awa.jobs_rows()"
    yield "awa.terminal_jobs"
    yield "awa.dlq"
    yield "awa.dlq_rows()"
    yield "awa.jobs_hot"
    yield "awa.scheduled_jobs"
    yield "awa.queue_state_counts WHERE queue = 'hidden'"
    yield "awa.queue_meta WHERE queue = 'hidden'"
    yield "awa.queue_descriptors WHERE queue = 'hidden'"
    yield "awa.may_read('hidden') AS may WHERE may"
    yield "awa.queue_descriptor_status WHERE queue = 'hidden'"
    yield "awa.descriptor_rows('queue') WHERE name = 'hidden'"
    yield "awa.queue_stats"
    yield "awa.queue_stats_rows()"
    yield "awa.metrics WHERE labels ->> 'queue' = 'hidden' OR NOT labels ? 'queue'"
    yield "awa.metrics_rows() WHERE labels ->> 'queue' = 'hidden' OR NOT labels ? 'queue'"


# Functions without a queue, and what was tried of them elsewhere.
NO_QUEUE = {
    "claim_outcome", "register_runtime", "heartbeat", "deregister_runtime", "cancel_requested",
    "recover", "runtime_control_status", "runtime_state", "upsert_job_kind_descriptor",
    # Constants, for clients of awa 0.6.
    "storage_status", "refresh_admin_metadata", "recompute_dirty_admin_metadata",
    # Triggers.
    "foreign_rows", "replace_segment", "write_jobs_view", "write_queue_meta", "show_pause",
    "mark_dirty_keys_insert", "mark_dirty_keys_update", "mark_dirty_keys_delete",
}


def test_every_function_is_tried_below(db, hidden):
    tried = " ".join([*calls_on_hidden(hidden), *reads_of_hidden(hidden)])
    missed = {name for name in FUNCTIONS if not re.search(rf"awa\.{name}\b", tried)} - NO_QUEUE
    assert missed == set(), "functions that no test tries on a queue of somebody else"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_queue_list_binds_every_act_and_every_read(db, role, hidden, profile):
    conn = role(profile, ["open", "hid", "hidde*n", "Hidden*", "hidden-*"])
    # EXECUTE on everything: it is the list that must refuse.
    db.execute(f"GRANT EXECUTE ON ALL ROUTINES IN SCHEMA awa TO {conn.name}")
    db.execute(f"GRANT SELECT ON {', '.join('awa.' + view for view in VIEWS)} TO {conn.name}")
    before = hidden.state()
    for call in calls_on_hidden(hidden):
        try:
            refused(conn, call)
        except AssertionError as error:
            raise AssertionError(call) from error
    for read in reads_of_hidden(hidden):
        try:
            assert conn.rows(f"SELECT * FROM {read}") == [], read
        except psycopg.errors.InsufficientPrivilege:
            # Some tell a profile that may not read so.
            assert profile in ("producer", "worker"), read
    for whole in ("awa.retry_failed()", "awa.discard_failed()",
                  "awa.dlq_retry_many('{\"allow_all\": true}')",
                  "awa.dlq_purge('{\"allow_all\": true}')"):
        assert conn.value(f"SELECT {whole}") == 0, whole
    assert hidden.state() == before


@pytest.mark.parametrize("queues", [["hidden"], ["hid*"], ["*"], None])
def test_a_queue_list_opens_what_it_names(db, role, hidden, queues):
    conn = role("operator", queues)
    assert conn.value("SELECT count(*) FROM awa.jobs WHERE queue = 'hidden'") == 5
    conn.execute("SELECT awa.fail(%s, 'x')", (hidden.running.receipt,))
    assert conn.value("SELECT awa.complete_external(%s)::text", hidden.callback) == "completed"
    assert conn.value("SELECT awa.dlq_retry(%s)::text", hidden.dead) == "available"
    assert conn.value("SELECT awa.get_result(%s)", hidden.completed) == "secret"


def test_a_dead_letter_moves_only_between_ones_own_queues(db, role, hidden):
    conn = role("operator", ["hidden"])
    refused(conn, "awa.dlq_retry(%s, %s)", hidden.dead, Jsonb({"queue": "elsewhere"}))
    assert db.value("SELECT count(*) FROM awa.dlq") == 1


# Roles that try what another profile may


def test_profiles_keep_to_their_part(db, role, hidden):
    producer, worker, reader = role("producer"), role("worker"), role("reader")
    r = hidden.running.receipt
    for call in ("awa.claim('hidden')", f"awa.complete({r})", "awa.jobs", "awa.register_runtime()",
                 f"awa.complete_external('{hidden.callback}')", "CALL awa.wait_for_jobs('{q}', '0')"):
        refused(producer, call)
    for call in ("awa.dlq_purge('{\"allow_all\": true}')", "awa.discard_failed()",
                 "awa.drain_queue('hidden')", f"awa.delete_job({hidden.waiting})",
                 "awa.insert_job('k')", "awa.maintain()", "awa.jobs",
                 "awa.halt_runtime_scope()", f"awa.cancel_job({hidden.waiting})"):
        refused(worker, call)
    for call in ("awa.insert_job('k')", "awa.claim('hidden')", f"awa.complete({r})",
                 "awa.pause_queue('hidden')", "awa.rescue()",
                 f"awa.set_progress({r}, 1)", f"awa.retry_job({hidden.dead})"):
        refused(reader, call)
    for conn in (producer, worker, reader):
        for statement in ("INSERT INTO awa.queue_acl VALUES (current_user::regrole, 'operator', '*')",
                          "DELETE FROM awa.ready_entries_0", "SELECT FROM awa.ready_entries_0",
                          "TRUNCATE awa.ready_entries_0", "COPY awa.queues TO STDOUT",
                          "UPDATE awa.queues SET paused_at = NULL",
                          "SELECT nextval('awa.chunk_blocks')",
                          "CREATE TABLE awa.mine (i int)", "DROP EXTENSION awa",
                          "CREATE FUNCTION evil() RETURNS void LANGUAGE c AS '$libdir/awa', 'awa_rebuild'"):
            with raises("42501"):
                conn.execute(statement)


# Forged ids


def test_forged_ids_are_refused(db, role, hidden):
    conn = role("operator", ["open"])
    db.insert(1, queue="open")
    (mine,) = claim(conn, "open", deadline="1 hour")
    for forged in (mine.receipt + 1, 1, -1, 2**63 - 1, 0):
        refused(conn, "awa.complete(%s)", forged, code="AW001")
    for call in ("complete_external(%s)", "fail_external(%s, 'x')", "retry_external(%s)",
                 "resume_external(%s)", "heartbeat_callback(%s, '1 s')"):
        refused(conn, f"awa.{call}", ZERO, code="P0002")
    master = role("operator")
    halt = master.value("SELECT awa.halt_runtime_scope()")
    assert master.value("SELECT awa.resume_runtime_scope('maintenance.prune', %s)", ZERO) is False
    refused(conn, "awa.resume_runtime_scope('maintenance.prune', %s)", halt)
    assert master.value("SELECT awa.resume_runtime_scope('maintenance.prune', %s)", halt) is True
    # The receipt is still good.
    conn.execute("SELECT awa.complete(%s)", (mine.receipt,))


def test_a_runtime_is_not_given_away(db, role):
    """A claim may name the runtime of another role; its heartbeats and its end are the owner's."""
    one, other = role("worker", ["a"]), role("worker", ["b"])
    runtime = one.value("SELECT awa.register_runtime('r', 'heartbeat')")
    refused(other, "awa.deregister_runtime(%s)", runtime)
    refused(other, "awa.heartbeat(%s, '{}')", runtime)
    bare = role()
    db.execute(f"GRANT USAGE ON SCHEMA awa TO {bare.name}")
    db.execute(f"GRANT EXECUTE ON ALL ROUTINES IN SCHEMA awa TO {bare.name}")
    refused(bare, "awa.register_runtime()")
    refused(bare, "awa.recover('e')")
    refused(bare, "awa.runtime_control_status()")
    refused(bare, "awa.upsert_job_kind_descriptor('k', '{}')")
    refused(bare, "awa.descriptor_rows('kind')")
    refused(bare, "awa.runtime_state(%s)", runtime)


def test_who_shall_stop_is_told_to_the_queues_workers(db, role, hidden):
    db.execute("SELECT awa.cancel_job(%s)", hidden.running.job_id)
    conn, other = role("worker", ["open"]), role("worker", ["hidden"])
    refused(conn, "awa.cancel_requested(%s)", [hidden.running.receipt])
    assert other.column("SELECT awa.cancel_requested(%s)", [hidden.running.receipt]) == [
        hidden.running.receipt]


def test_the_attempts_of_a_runtime_are_shown_by_queue(db, role):
    runtime = db.value("SELECT awa.register_runtime('r')")
    for queue in ("open", "hidden"):
        db.insert(2, queue=queue)
        db.claim(queue, 2, runtime=runtime)
    some, all = role("reader", ["open"]), role("reader")
    look = "SELECT in_flight FROM awa.runtime_state(%s)"
    assert some.value(look, runtime) == {"open": 2}
    assert all.value(look, runtime) == {"open": 2, "hidden": 2}
    for conn, queues in ((some, ["open"]), (all, ["hidden", "open"])):
        shown = conn.value("SELECT queues FROM awa.runtime_instances WHERE instance_id = %s", runtime)
        assert [queue["queue"] for queue in shown] == queues


def test_recovery_of_a_few_queues_touches_nothing(db, role):
    """Who may not act on every queue only counts: the worker is at it already."""
    conn = role("worker", ["open"])
    ran, _, rescued = conn.row("SELECT * FROM awa.recover('epoch')")
    assert (ran, rescued) == (True, 0)


# Role switches


def test_set_role_counts(db, role):
    conn, group = role(attributes="NOINHERIT"), role("producer", ["g"])
    db.execute(f"GRANT {group.name} TO {conn.name}")
    refused(conn, "awa.insert_job('k', queue => 'g')")
    conn.execute(f"SET ROLE {group.name}")
    conn.execute("SELECT awa.insert_job('k', queue => 'g')")
    conn.execute("RESET ROLE")
    refused(conn, "awa.insert_job('k', queue => 'g')")
    # A superuser that has become somebody else is somebody else.
    admin = db.connect()
    admin.execute(f"SET ROLE {group.name}")
    refused(admin, "awa.insert_job('k', queue => 'h')")
    refused(admin, "awa.check()")
    admin.execute("RESET ROLE")
    admin.execute(f"SET SESSION AUTHORIZATION {conn.name}")
    refused(admin, "awa.insert_job('k', queue => 'g')")


def test_a_plan_does_not_outlive_the_role(db, role):
    """The same prepared statement, as one role and as another."""
    group = role("reader", ["mine"])
    db.insert(1, queue="mine")
    db.insert(1, queue="yours")
    admin = db.connect()
    admin.execute("PREPARE look AS SELECT queue FROM awa.jobs ORDER BY 1")
    admin.execute("PREPARE put AS SELECT awa.insert_job('k', queue => 'yours')")
    for _ in range(7):
        assert admin.column("EXECUTE look") == ["mine", "yours"]
    admin.execute(f"SET ROLE {group.name}")
    assert admin.column("EXECUTE look") == ["mine"]
    with raises("42501"):
        admin.execute("EXECUTE put")


def test_a_definer_acts_as_its_owner(db, role):
    """SECURITY DEFINER lends exactly the owner's queues, for exactly that call."""
    owner, caller = role("producer", ["lent"]), role()
    db.execute(f"GRANT CREATE ON SCHEMA public TO {owner.name}")
    owner.execute("""
        CREATE FUNCTION public.lend(q text) RETURNS bigint LANGUAGE sql SECURITY DEFINER
        SET search_path = pg_catalog AS $$ SELECT awa.insert_job('k', queue => q) $$""")
    caller.execute("SELECT public.lend('lent')")
    refused(caller, "public.lend('other')")
    refused(caller, "awa.insert_job('k', queue => 'lent')")
    # The other way round: what a caller may is nothing to a definer that may not.
    low = role()
    db.execute(f"GRANT CREATE ON SCHEMA public TO {low.name}")
    low.execute("""
        CREATE FUNCTION public.take(q text) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
        AS $$ BEGIN RETURN awa.insert_job('k', queue => q); END $$""")
    refused(owner, "public.take('lent')")


def test_views_of_others_show_each_reader_his_own(db, role):
    owner, caller = role("reader", ["a"]), role()
    db.execute(f"GRANT CREATE ON SCHEMA public TO {owner.name}")
    db.insert(1, queue="a")
    db.insert(1, queue="b")
    owner.execute("CREATE VIEW public.mine AS SELECT id, queue FROM awa.jobs")
    owner.execute(f"GRANT SELECT ON public.mine TO {caller.name}")
    assert owner.column("SELECT queue FROM public.mine") == ["a"]
    refused(caller, "public.mine")
    db.execute("SELECT awa.grant_access(%s, 'reader', '{b}')", caller.name)
    assert caller.column("SELECT queue FROM public.mine") == ["b"]


def test_nothing_leaks_past_the_barrier(db, role):
    """A cheap function in the WHERE clause sees no row that the view does not show."""
    conn = role("reader", ["a"])
    db.execute(f"GRANT CREATE ON SCHEMA public TO {conn.name}")
    db.insert(1, queue="a", kind="mine")
    db.insert(1, queue="b", kind="secret")
    conn.execute("""
        CREATE FUNCTION public.leak(t text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS
        $$ BEGIN RAISE NOTICE '%', t; RETURN true; END $$""")
    said = []
    conn.add_notice_handler(lambda d: said.append(d.message_primary))
    conn.rows("SELECT * FROM awa.jobs WHERE public.leak(kind)")
    conn.rows("SELECT * FROM awa.terminal_jobs WHERE public.leak(kind)")
    assert said == ["mine"]


def test_row_security_has_no_say(db, role):
    conn = role("operator", ["a"])
    db.execute("CREATE TABLE public.orders (job bigint)")
    db.execute("ALTER TABLE public.orders ENABLE ROW LEVEL SECURITY")
    db.execute("CREATE POLICY p ON public.orders USING"
               " (EXISTS (SELECT FROM awa.get_job(orders.job)))")
    db.execute(f"GRANT SELECT ON public.orders TO {conn.name}")
    (seen,), (unseen,) = db.insert(1, queue="a"), db.insert(1, queue="b")
    db.execute("INSERT INTO public.orders VALUES (%s), (%s)", seen, unseen)
    assert conn.column("SELECT job FROM public.orders") == [seen]
    for setting in ("on", "off"):
        conn.execute(f"SET row_security = {setting}")
        assert set(conn.column("SELECT queue FROM awa.jobs")) == {"a"}
        conn.execute("SELECT awa.insert_job('k', queue => 'a', run_at => now() + interval '1 h')")
        conn.execute("SELECT awa.configure_queue('a', '{\"priority\": 3}')")
        conn.execute("SELECT awa.drain_queue('a')")
        conn.execute("SELECT awa.discard_failed('a')")


# Names that are not ours


SHADOWED = ["pg_proc", "pg_class", "pg_roles", "pg_namespace", "queues", "queue_acl", "segments",
            "jobs", "boot_epochs", "deferred_jobs", "generate_series"]


def test_temporary_objects_shadow_nothing(db, role):
    """pg_temp is searched first for tables and types: ours are reached without names."""
    conn = role("operator")
    for name in SHADOWED:
        conn.execute(f"CREATE TEMP TABLE {name} (oid int, role int, queue int, lie text)")
    conn.execute("CREATE DOMAIN pg_temp.jsonb AS int")
    conn.execute("CREATE DOMAIN pg_temp.interval AS int")
    conn.execute("CREATE TYPE pg_temp.job_state AS ENUM ('lost')")
    for name, of in (("now", "timestamptz"), ("clock_timestamp", "timestamptz"),
                     ("gen_random_uuid", "uuid")):
        conn.execute(f"CREATE FUNCTION pg_temp.{name}() RETURNS pg_catalog.{of} LANGUAGE plpgsql"
                     " AS $$ BEGIN RAISE EXCEPTION 'evil was called'; END $$")
    for path in ("pg_temp, pg_catalog", "pg_temp", "awa, pg_temp", ""):
        conn.execute(f"SET search_path = {path or repr('')}")
        whole_life(conn)


def test_operators_of_the_caller_are_not_called(db, role):
    """Operators of the exact types that our statements compare, first on the path."""
    conn = role("operator")
    db.execute(f"CREATE SCHEMA evil AUTHORIZATION {conn.name}")
    conn.execute("CREATE FUNCTION evil.boom() RETURNS boolean LANGUAGE plpgsql AS"
                 " $$ BEGIN RAISE EXCEPTION 'evil was called'; END $$")
    for number, (op, left, right) in enumerate(
        (op, left, right)
        for op in ("=", "<", ">", "<=", ">=", "<>", "||", "+", "-")
        for left, right in (("text", "text"), ("bigint", "bigint"), ("smallint", "smallint"),
                            ("int", "int"), ("oid", "oid"), ("timestamptz", "timestamptz"),
                            ("jsonb", "jsonb"), ("uuid", "uuid"), ("bytea", "bytea"),
                            ("smallint", "int"), ("int", "bigint"), ("bigint", "int"),
                            ("name", "text"), ("boolean", "boolean"))
    ):
        conn.execute(f"CREATE FUNCTION evil.f{number}({left}, {right}) RETURNS boolean LANGUAGE sql"
                     " AS 'SELECT evil.boom()'")
        conn.execute(f"CREATE OPERATOR evil.{op} (LEFTARG = {left}, RIGHTARG = {right},"
                     f" FUNCTION = evil.f{number})")
    conn.execute("CREATE FUNCTION evil.coalesce(text, text) RETURNS text LANGUAGE sql"
                 " AS 'SELECT evil.boom()::text'")
    conn.execute("SET search_path = evil, pg_catalog")
    whole_life(conn)


def whole_life(conn):
    """Every way of storing: plans are made in some hostile place, and used again there."""
    conn.execute("SELECT awa.configure_queue('w', '{\"dlq_enabled\": true}')")
    # No operator of the test's own either: `=` may be hostile.
    conn.value("SELECT awa.insert_job('k', queue => 'w', unique_key => 'u', run_at =>"
               " pg_catalog.timestamptz '2100-01-01')")
    job = conn.value("SELECT awa.cancel_by_unique_key('u')")
    conn.execute("SELECT awa.retry_job(%s)", (job,))
    receipt = conn.column("SELECT receipt FROM awa.claim('w')")[0]
    conn.execute("SELECT awa.set_progress(%s, 5)", (receipt,))
    callback = conn.value("SELECT awa.register_callback(%s, '1 h')", receipt)
    conn.execute("SELECT awa.wait_for_callback(%s)", (receipt,))
    conn.execute("SELECT awa.resume_external(%s, '1')", (callback,))
    conn.value("SELECT awa.callback_result(%s)", receipt)
    conn.execute("SELECT awa.snooze(%s, '1 h')", (receipt,))
    conn.execute("SELECT awa.cancel_job(%s)", (job,))
    conn.execute("SELECT awa.delete_job(%s)", (job,))
    conn.execute("SELECT awa.insert_job('k', queue => 'w')")
    receipt = conn.column("SELECT receipt FROM awa.claim('w')")[0]
    conn.execute("SELECT awa.fail(%s, 'x', terminal => true)", (receipt,))
    assert conn.value("SELECT pg_catalog.count(*) FROM awa.dlq") == 1
    conn.execute("SELECT awa.dlq_retry_many('{\"queue\": \"w\"}')")
    conn.execute("SELECT awa.pause_queue('w')")
    conn.execute("SELECT awa.resume_queue('w')")
    conn.execute("SELECT awa.drain_queue('w')")
    halt = conn.value("SELECT awa.halt_runtime_scope()")
    conn.execute("SELECT awa.resume_runtime_scope('maintenance.prune', %s)", (halt,))
    runtime = conn.value("SELECT awa.register_runtime('r', 'heartbeat')")
    conn.execute("SELECT awa.heartbeat(%s)", (runtime,))
    conn.execute("SELECT awa.deregister_runtime(%s)", (runtime,))
    for read in ("jobs", "terminal_jobs", "dlq", "queue_stats", "metrics", "list_jobs('w')",
                 f"dump_job({job})", "runtime_control_status()", "rescue()"):
        conn.execute(f"SELECT * FROM awa.{read}")
    broken = [row for row in conn.rows("SELECT invariant, ok, detail FROM awa.check()") if not row[1]]
    assert broken == []


@pytest.mark.parametrize("name", ['a"b', "a'b", "a;DROP TABLE x--", "ünï", "A B", "%s%n", "$1", "*"])
def test_hostile_names(db, role, name):
    conn = role("operator", [name])
    conn.execute("SELECT awa.insert_job(%s, queue => %s, tags => %s, unique_key => %s)",
                 (name, name, [name], name))
    conn.execute("SELECT awa.pause_queue(%s, %s)", (name, name))
    conn.execute("SELECT awa.resume_queue(%s)", (name,))
    assert conn.column("SELECT kind FROM awa.list_jobs(%s)", name) == [name]
    (job,) = claim(conn, name)
    conn.execute("SELECT awa.fail(%s, %s, terminal => true)", (job.receipt, name))
    assert conn.column("SELECT queue FROM awa.queue_stats WHERE failed_total = 1") == [name]
    if name != "*":
        refused(conn, "awa.insert_job('k', queue => 'other')")


# CREATE EXTENSION


@pytest.mark.parametrize("planted", [
    "CREATE SCHEMA awa AUTHORIZATION mallory",
    "CREATE SCHEMA awa AUTHORIZATION mallory CREATE TABLE queues (i int)",
])
def test_what_was_planted_makes_the_installation_fail(server, planted):
    database = Database(server, extension=False)
    try:
        conn = database.connect()
        conn.execute("CREATE ROLE mallory")
        conn.execute(planted)
        with raises("42P06"):
            conn.execute("CREATE EXTENSION awa")
        # Nothing of ours is left, and once it is gone all is well.
        assert conn.column("SELECT proname FROM pg_proc WHERE pronamespace = 'awa'::regnamespace") == []
        conn.execute("DROP SCHEMA awa CASCADE")
        conn.execute("CREATE EXTENSION awa")
        database.wait_served()
        database.check()
    finally:
        database.close_sessions()
        database.drop()
        with server.connect() as conn:
            conn.execute("DROP ROLE mallory")


def test_what_lies_on_the_path_is_not_run_by_the_installation(server):
    """Functions, operators and types of others, first on the path of who installs."""
    database = Database(server, extension=False)
    try:
        conn = database.connect()
        conn.execute("CREATE SCHEMA evil")
        for name, of in (("pg_extension_config_dump", "regclass, text"), ("now", ""),
                         ("gen_random_uuid", ""), ("clock_timestamp", "")):
            conn.execute(f"CREATE FUNCTION evil.{name}({of}) RETURNS void LANGUAGE plpgsql AS"
                         " $$ BEGIN RAISE EXCEPTION 'evil was called'; END $$")
        for name in ("bigint", "text", "jsonb", "timestamptz", "uuid", "int8", "regrole"):
            conn.execute(f'CREATE DOMAIN evil."{name}" AS pg_catalog.int4')
        conn.execute(f"ALTER DATABASE {database.name} SET search_path = evil, pg_catalog")
        with server.connect(database.name) as hasty:
            hasty.execute("SET search_path = evil, pg_catalog")
            hasty.execute("CREATE EXTENSION awa")
        conn.execute(f"ALTER DATABASE {database.name} RESET search_path")
        database.wait_served()
        assert conn.column("""
            SELECT attname FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid
            JOIN pg_type t ON t.oid = atttypid
            WHERE relnamespace = 'awa'::regnamespace AND typnamespace = 'evil'::regnamespace""") == []
        database.insert(1)
        assert len(database.claim()) == 1
        database.check()
    finally:
        database.close_sessions()
        database.drop()


def test_only_superusers_install(server):
    database = Database(server, extension=False)
    conn = database.connect()
    try:
        conn.execute("CREATE ROLE low LOGIN")
        conn.execute(f"ALTER DATABASE {database.name} OWNER TO low")
        with server.connect(database.name, user="low") as low, raises("42501"):
            low.execute("CREATE EXTENSION awa")
        assert Path(place.ROOT / "awa.control").exists()
    finally:
        database.close_sessions()
        database.drop()
        with server.connect() as admin:
            admin.execute("DROP ROLE low")


def test_privileges_by_default_do_not_open_it_to_everybody(server):
    """ALTER DEFAULT PRIVILEGES of the one who installs: PUBLIC gets nothing all the same."""
    database = Database(server, extension=False)
    try:
        conn = database.connect()
        for what in ("TABLES", "FUNCTIONS", "SEQUENCES", "TYPES"):
            conn.execute(f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {what} TO PUBLIC")
        conn.execute("CREATE EXTENSION awa")
        database.wait_served()
        for catalog, acl, space in (("pg_class", "relacl", "relnamespace"),
                                    ("pg_proc", "proacl", "pronamespace"),
                                    ("pg_type", "typacl", "typnamespace")):
            # Row types follow their tables.
            rows = "AND typrelid = 0 AND typelem = 0" if catalog == "pg_type" else ""
            assert conn.rows(sql.SQL(
                "SELECT c.oid FROM {catalog} c, aclexplode({acl}) a WHERE {space} = 'awa'::regnamespace"
                " AND a.grantee = 0 " + rows).format(
                    catalog=sql.Identifier(catalog), acl=sql.Identifier(acl),
                    space=sql.Identifier(space))) == []
    finally:
        database.close_sessions()
        database.drop()


def test_two_grants_at_a_time_wait_for_each_other(db, role):
    """Both write the same access lists (tuple concurrently updated, else)."""
    from harness import Background, wait_blocked

    one, two = role(), role()
    first, second = db.connect(), db.connect()
    first.begin()
    first.execute("SELECT awa.grant_access(%s, 'producer', '{a}')", (one.name,))
    waiting = Background(second.execute, "SELECT awa.grant_access(%s, 'operator', '{b}')",
                         (two.name,))
    wait_blocked(db.conn, second.pid)
    first.commit_sql()
    waiting.result()
    one.execute("SELECT awa.insert_job('k', queue => 'a')")
    two.execute("SELECT awa.insert_job('k', queue => 'b')")


def test_the_owner_cannot_be_locked_out(db):
    db.execute("SELECT awa.revoke_access('postgres')")
    db.insert(1)
    assert len(db.claim()) == 1
    assert db.value("SELECT has_table_privilege('postgres', 'awa.queues', 'select')")
    assert db.value("SELECT relacl IS NULL OR relacl::text LIKE '%%postgres=%%'"
                    " FROM pg_class WHERE oid = 'awa.queues'::regclass")
