"""insert_job_compat, writing to the view awa.jobs, and the relations clients of awa 0.6 look for."""

import pytest
from psycopg import sql

from harness import Background, raises

MASK = "11111000"


def compat(conn, text, *params):
    """The row of insert_job_compat, by column."""
    cur = conn.execute(f"SELECT * FROM awa.insert_job_compat({text})", params or None)
    return dict(zip([column.name for column in cur.description], cur.fetchone(), strict=True))


# insert_job_compat


def test_defaults_and_the_row(db):
    row = compat(db.conn, "'k'")
    assert (row["kind"], row["queue"], row["args"], row["state"]) == ("k", "default", {}, "available")
    assert (row["priority"], row["attempt"], row["max_attempts"], row["run_lease"]) == (2, 0, 25, 0)
    assert (row["errors"], row["metadata"], row["tags"]) == ([], {}, [])
    assert row["run_at"] == row["created_at"]
    for column in (
        "heartbeat_at", "deadline_at", "attempted_at", "finalized_at", "unique_key",
        "unique_states", "callback_id", "callback_timeout_at", "progress",
    ):
        assert row[column] is None, column
    read = db.job(row["id"])._asdict()
    # A client decodes an array here; awa.jobs has NULL where there are no errors.
    assert read.pop("errors") is None and row.pop("errors") == []
    assert read == row


def test_every_argument(db):
    row = compat(
        db.conn,
        "'k', 'q', '{\"n\": 1.500}', 'scheduled', 1::smallint, 3::smallint, '2100-01-01 00:00+00',"
        " '{\"m\": 1}', '{x,y}', 'key', B'11111000', 'order'",
    )
    assert (row["queue"], row["state"], row["priority"], row["max_attempts"]) == (
        "q", "scheduled", 1, 3,
    )
    assert (row["metadata"], row["tags"], row["unique_key"]) == ({"m": 1}, ["x", "y"], b"key")
    assert row["unique_states"] == MASK and row["run_at"].year == 2100
    assert db.value("SELECT args::text FROM awa.get_job(%s)", row["id"]) == '{"n": 1.500}'
    read = db.job(row["id"])._asdict()
    assert {**read, "errors": []} == row


def test_null_is_the_default(db):
    row = compat(
        db.conn, "'k', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL::bit(8), NULL"
    )
    assert (row["queue"], row["state"], row["priority"], row["max_attempts"]) == (
        "default", "available", 2, 25,
    )
    assert (row["args"], row["metadata"], row["tags"]) == ({}, {}, [])


def test_by_name_and_as_a_value(db):
    row = compat(db.conn, "p_kind => 'k', p_queue => 'q', p_tags => '{t}'")
    assert row["tags"] == ["t"]
    assert db.value("SELECT (awa.insert_job_compat('k', 'q')).kind") == "k"
    assert db.value(
        "SELECT count(*) FROM generate_series(1, 50) n,"
        " LATERAL awa.insert_job_compat('k', 'q', jsonb_build_object('n', n)) j"
    ) == 50
    # .kind is one call: 1 by name, 1 as a value, 50
    assert db.count("q") == 52


def test_the_state_decides(db):
    """Not run_at."""
    early = compat(db.conn, "'k', p_queue => 'a', p_run_at => now() + interval '1 day'")
    assert early["state"] == "available"
    assert [job.job_id for job in db.claim("a")] == [early["id"]]
    late = compat(
        db.conn, "'k', p_queue => 'b', p_state => 'scheduled', p_run_at => now() - interval '1 day'"
    )
    assert late["state"] == "scheduled"
    db.wait_state(late["id"], "available")
    again = compat(db.conn, "'k', p_queue => 'c', p_state => 'retryable'")
    assert again["state"] == "retryable"
    db.wait_state(again["id"], "available")


LONG = "x" * 201
# Each breaks all the limits that come after it, too.
BROKEN = ["p_kind => %(long)s", "p_queue => %(long)s", "p_priority => 5::smallint",
          "p_max_attempts => 0::smallint", "p_tags => array_fill('t'::text, '{21}')",
          "p_state => 'running'"]
SAYS = ["kind", "queue", "priority", "max_attempts", "tags", "state"]


@pytest.mark.parametrize("first", range(len(BROKEN)))
def test_the_order_of_checks(db, first):
    arguments = BROKEN[first:] if first == 0 else ["p_kind => 'k'", *BROKEN[first:]]
    with raises("23514" if first < 5 else "22023", SAYS[first]):
        db.conn.execute(
            f"SELECT awa.insert_job_compat({', '.join(arguments)})", {"long": LONG}
        )
    assert db.value("SELECT count(*) FROM awa.jobs") == 0


def test_a_null_kind_comes_after_the_limits(db):
    with raises("23502"):
        compat(db.conn, "NULL")
    with raises("23514"):
        compat(db.conn, "NULL, p_priority => 0::smallint")


@pytest.mark.parametrize("limit", ["'ÿ'", "'ü'"])
def test_characters_not_bytes(db, limit):
    assert compat(db.conn, f"repeat({limit}, 200), repeat({limit}, 200)")["id"]
    with raises("23514"):
        compat(db.conn, f"repeat({limit}, 201)")


def test_a_duplicate(db):
    first = compat(db.conn, f"'k', p_unique_key => 'key', p_unique_states => B'{MASK}'")
    with raises("23505") as caught:
        compat(db.conn, f"'k', 'other', p_unique_key => 'key', p_unique_states => B'{MASK}'")
    assert caught.error.diag.constraint_name == "idx_awa_jobs_unique"
    # One space with the keys of insert_job
    assert db.value("SELECT awa.insert_job('k', unique_key => 'key')") == first["id"]


def test_keys_that_are_not_unique(db):
    for _ in range(2):
        compat(db.conn, "'k', p_unique_key => 'key'")
        compat(db.conn, "'k', p_unique_key => 'other', p_unique_states => B'00100000'")
    for mask in ("1", "1111100011"):
        with raises("22023"):
            compat(db.conn, f"'k', p_unique_key => 'key', p_unique_states => B'{mask}'")


def test_a_duplicate_waits_for_the_first_ones_end(db):
    one, other = db.connect(), db.connect()
    call = f"'k', p_unique_key => 'key', p_unique_states => B'{MASK}'"
    one.begin()
    compat(one, call)
    waiting = Background(compat, other, call)
    assert not waiting.wait(0.2)
    one.rollback_sql()
    assert waiting.result()["id"]


def test_it_rolls_back(db):
    db.conn.begin()
    row = compat(db.conn, "'k'")
    db.conn.rollback_sql()
    assert db.state(row["id"]) is None and db.claim() == []


# The view


def test_insert_into_the_view(db):
    job_id = db.value("INSERT INTO awa.jobs (kind) VALUES ('k') RETURNING id")
    assert [job.job_id for job in db.claim()] == [job_id]
    row = db.row(
        "INSERT INTO awa.jobs (kind, queue, args, state, priority, max_attempts, run_at, metadata,"
        " tags, unique_key, unique_states) VALUES ('k', 'q', '[1.50]', 'scheduled', 4, 7,"
        f" '2100-01-01 00:00+00', '{{\"m\": 1}}', '{{t}}', 'key', B'{MASK}')"
        " RETURNING state::text, priority, max_attempts, attempt, tags, args::text, errors"
    )
    assert row == ("scheduled", 4, 7, 0, ["t"], "[1.50]", [])
    with raises("23505") as caught:
        db.execute(
            "INSERT INTO awa.jobs (kind, unique_key, unique_states)"
            f" VALUES ('k', 'key', B'{MASK}')"
        )
    assert caught.error.diag.constraint_name == "idx_awa_jobs_unique"


def test_insert_many_into_the_view(db):
    db.execute("CREATE TABLE source AS SELECT n, repeat('x', 100000) AS text"
               " FROM generate_series(1, 20) n")
    cur = db.execute(
        "INSERT INTO awa.jobs (kind, queue, args)"
        " SELECT 'k', 'q', jsonb_build_object('n', n, 'text', text) FROM source"
    )
    assert cur.rowcount == 20
    db.execute("DROP TABLE source")
    jobs = db.claim("q", 30)
    assert [job.args["n"] for job in jobs] == list(range(1, 21))
    assert {len(job.args["text"]) for job in jobs} == {100000}


@pytest.mark.parametrize("column, value", [
    ("id", "5"), ("attempt", "1"), ("heartbeat_at", "now()"), ("deadline_at", "now()"),
    ("attempted_at", "now()"), ("finalized_at", "now()"), ("created_at", "now()"),
    ("errors", "'{}'"), ("callback_id", "gen_random_uuid()"), ("callback_timeout_at", "now()"),
    ("callback_filter", "'x'"), ("callback_on_complete", "'x'"), ("callback_on_fail", "'x'"),
    ("callback_transform", "'x'"), ("run_lease", "1"), ("progress", "'{}'"),
    ("state", "'running'"), ("state", "'completed'"), ("state", "'waiting_external'"),
])
def test_what_a_new_job_cannot_be_given(db, column, value):
    with raises("0A000"):
        db.execute(f"INSERT INTO awa.jobs (kind, {column}) VALUES ('k', {value})")
    assert db.value("SELECT count(*) FROM awa.jobs") == 0
    db.execute("INSERT INTO awa.jobs (kind, attempt, run_lease) VALUES ('k', 0, 0)")


def test_delete_from_the_view(db):
    ready, other = db.insert(2)
    later = db.value("SELECT awa.insert_job('k', run_at => now() + interval '1 day')")
    (running,) = db.insert(1, queue="r")
    db.claim("r")
    cur = db.execute("DELETE FROM awa.jobs WHERE id = ANY(%s)", [ready, later, 12345])
    assert cur.rowcount == 2
    assert db.column("SELECT id FROM awa.jobs ORDER BY id") == sorted([other, running])
    with raises("55000"):
        db.execute("DELETE FROM awa.jobs WHERE id = %s", running)
    assert [job.job_id for job in db.claim(max_jobs=5)] == [other]


def test_update_of_the_view(db):
    (job,) = db.insert()
    for where in (f"id = {job}", "id = 5", "false"):
        with raises("0A000"):
            db.execute(f"UPDATE awa.jobs SET priority = 1 WHERE {where}")
    for view in ("jobs_hot", "scheduled_jobs"):
        with raises("0A000"):
            db.execute(f"UPDATE awa.{view} SET priority = 1")


def test_the_two_halves(db):
    (job,) = db.insert()
    later = db.value("SELECT awa.insert_job('k', run_at => now() + interval '1 day')")
    assert db.column("SELECT id FROM awa.jobs_hot") == [job]
    assert db.column("SELECT id FROM awa.scheduled_jobs") == [later]


def test_who_may_write_the_view(db, role):
    producer = role("producer", ["mine"])
    job = producer.value("INSERT INTO awa.jobs (kind, queue) VALUES ('k', 'mine') RETURNING id")
    assert db.state(job) == "available"
    for statement in (
        "INSERT INTO awa.jobs (kind, queue) VALUES ('k', 'other')",
        "DELETE FROM awa.jobs",
        "UPDATE awa.jobs SET priority = 1",
        "SELECT * FROM awa.jobs",
        "SELECT * FROM awa.queue_state_counts",
    ):
        with raises("42501"):
            producer.execute(statement)
    operator = role("operator", ["mine"])
    db.insert(1, queue="other")
    assert operator.execute("DELETE FROM awa.jobs").rowcount == 1
    assert db.count("other") == 1
    with raises("0A000"):
        operator.execute("UPDATE awa.jobs SET priority = 1")
    reader = role("reader", ["other"])
    with raises("42501"):
        reader.execute("DELETE FROM awa.jobs")
    with raises("42501"):
        reader.execute("INSERT INTO awa.jobs (kind, queue) VALUES ('k', 'other')")


def test_no_profile_holds_a_privilege_on_a_table(db, role):
    for profile in ("producer", "worker", "operator", "reader"):
        conn = role(profile)
        assert conn.column(
            "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'awa'::regnamespace"
            " AND relkind = 'r'"
            " AND has_table_privilege(oid, 'select, insert, update, delete, truncate, trigger')"
        ) == []
    assert db.value("SELECT has_type_privilege('public', 'awa.job_state', 'usage')") is False


# Pauses

UPSERT = sql.SQL("""
    INSERT INTO awa.queue_meta (queue, paused, paused_at, paused_by)
    VALUES ({}, TRUE, now(), {})
    ON CONFLICT (queue) DO UPDATE SET paused = TRUE, paused_at = now(), paused_by = {}
""")
RESUME = "UPDATE awa.queue_meta SET paused = FALSE WHERE queue = %s"


def pause(conn, queue, by="ada"):
    conn.execute(UPSERT.format(queue, by, by))


def paused(db, queue):
    return db.value("SELECT paused FROM awa.queue_stats WHERE queue = %s", queue)


def test_a_pause_by_upsert(db):
    db.insert(1, queue="q")
    for _ in range(2):
        pause(db.conn, "q")
        assert db.row("SELECT queue, paused, paused_by, enqueue_shards FROM awa.queue_meta") == (
            "q", True, "ada", 1,
        )
        assert paused(db, "q") and db.claim("q") == []
        assert db.value("SELECT awa.claim_outcome()") == "paused"
    db.execute(RESUME, "q")
    assert not paused(db, "q")
    assert db.row("SELECT paused, paused_at, paused_by FROM awa.queue_meta") == (False, None, None)
    assert len(db.claim("q")) == 1
    pause(db.conn, "q", "eve")
    assert paused(db, "q")
    db.execute("INSERT INTO awa.queue_meta (queue, paused) VALUES ('q', false)")
    assert not paused(db, "q")


def test_pauses_of_ours_show(db):
    db.execute("SELECT awa.pause_queue('q', 'ada')")
    assert db.row("SELECT queue, paused, paused_by FROM awa.queue_meta") == ("q", True, "ada")
    db.execute(RESUME, "q")
    assert db.value("SELECT awa.resume_queue('q')") is False
    db.execute("SELECT awa.configure_queue('q', '{\"enqueue_shards\": 4}')")
    assert db.value("SELECT max(enqueue_shards) FROM awa.queue_meta WHERE queue = 'q'") == 4


def test_a_pause_rolls_back(db):
    db.insert(1, queue="q")
    db.conn.begin()
    pause(db.conn, "q")
    db.conn.rollback_sql()
    assert not paused(db, "q") and db.rows("SELECT * FROM awa.queue_meta") == []
    assert len(db.claim("q")) == 1


def test_what_else_is_written_there(db):
    db.execute("SELECT awa.pause_queue('q')")
    for statement in (
        "UPDATE awa.queue_meta SET queue = 'r'",
        "DELETE FROM awa.queue_meta",
    ):
        with raises("0A000"):
            db.execute(statement)
    with raises("23514"):
        pause(db.conn, "")
    with raises("P0002"):
        db.execute("INSERT INTO awa.queue_meta (queue) VALUES ('nobody used it')")
    assert db.execute(RESUME, "nobody used it").rowcount == 0


def test_who_may_pause(db, role):
    db.execute("SELECT awa.pause_queue('hidden')")
    operator = role("operator", ["mine"])
    pause(operator, "mine")
    assert operator.column("SELECT queue FROM awa.queue_meta") == ["mine"]
    operator.execute(RESUME, ("mine",))
    assert not paused(db, "mine")
    with raises("42501"):
        pause(operator, "hidden")
    assert operator.execute(RESUME, ("hidden",)).rowcount == 0
    assert paused(db, "hidden")
    reader = role("reader", ["mine"])
    with raises("42501"):
        pause(reader, "mine")
    with raises("42501"):
        pause(role("producer"), "mine")


# What else clients look for


def test_counts_of_queues(db):
    db.insert(3, queue="q")
    db.value("SELECT awa.insert_job('k', queue => 'q', run_at => now() + interval '1 day')")
    one, two = db.claim("q", 2)
    db.execute("SELECT awa.complete(%s)", one.receipt)
    db.value("SELECT awa.fail(%s, 'x', terminal => true)", two.receipt)
    assert db.rows("SELECT * FROM awa.queue_state_counts") == [("q", 1, 1, 0, 1, 0, 1, 0, 0)]
    db.execute("SELECT awa.drain_queue('q')")
    assert db.value("SELECT cancelled FROM awa.queue_state_counts") == 2


def test_schema_and_storage(db):
    assert db.value("SELECT max(version) FROM awa.schema_version") == 40
    row = db.row(
        "SELECT current_engine, active_engine, prepared_engine, state, finalized_at IS NOT NULL"
        " FROM awa.storage_status()"
    )
    assert row == ("queue_storage", "queue_storage", None, "active", True)
    for view in (
        "runtime_storage_backends", "admin_dirty_queue_marks", "admin_dirty_kind_marks",
        "queue_descriptors", "job_kind_descriptors",
    ):
        assert db.rows(f"SELECT * FROM awa.{view}") == []
    with raises("55000"):
        db.execute("INSERT INTO awa.runtime_storage_backends VALUES ('queue_storage', 'awa', now())")
    assert db.row("SELECT awa.refresh_admin_metadata(), awa.recompute_dirty_admin_metadata(100)") == (
        "", 0,
    )


def test_descriptors(db, role):
    db.value("SELECT awa.upsert_queue_descriptor('q', '{\"display_name\": \"Q\"}')")
    reader = role("reader", ["q"])
    for conn in (db.conn, reader):
        assert conn.rows(
            "SELECT queue, display_name, last_seen_at IS NOT NULL, sync_interval_ms > 0"
            " FROM awa.queue_descriptors"
        ) == [("q", "Q", True, True)]
    assert role("reader", ["r"]).rows("SELECT * FROM awa.queue_descriptors") == []


def test_one_function_of_the_name(db):
    """Clients call it with untyped NULLs."""
    assert db.value(
        "SELECT count(*) FROM pg_proc WHERE pronamespace = 'awa'::regnamespace"
        " AND proname = 'insert_job_compat'"
    ) == 1
    assert compat(
        db.conn,
        "'k', 'q', '{}'::jsonb, 'available'::awa.job_state, 2::smallint, 25::smallint,"
        " NULL::timestamptz, '{}'::jsonb, '{}'::text[], NULL, NULL::bit(8), NULL::bytea",
    )["id"]
