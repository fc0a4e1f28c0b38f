"""The view runtime_instances: who works, who did until a day ago, and what clients of awa read."""

import datetime

import psycopg
from harness import Database, claim, raises, wait_until
from psycopg.types.json import Jsonb
from test_restore import restore

# What clients of awa 0.6 read, with the types they decode.
PEER = {
    "instance_id": "uuid", "hostname": "text", "pid": "integer", "version": "text",
    "storage_capability": "text", "transition_role": "text",
    "started_at": "timestamp with time zone", "last_seen_at": "timestamp with time zone",
    "snapshot_interval_ms": "bigint", "healthy": "boolean", "postgres_connected": "boolean",
    "poll_loop_alive": "boolean", "heartbeat_alive": "boolean", "maintenance_alive": "boolean",
    "shutting_down": "boolean", "leader": "boolean", "global_max_workers": "integer",
    "queues": "jsonb", "queue_descriptor_hashes": "jsonb", "job_kind_descriptor_hashes": "jsonb",
}
REGISTER = "SELECT awa.register_runtime(%s, %s, %s, %s)"


def register(conn, name="w", liveness="session", timeout=None, **opts):
    return conn.value(REGISTER, name, liveness, timeout, Jsonb(opts))


def shown(conn, runtime):
    with conn.cursor(row_factory=psycopg.rows.namedtuple_row) as cur:
        cur.execute("SELECT * FROM awa.runtime_instances WHERE instance_id = %s", (runtime,))
        return cur.fetchone()


def test_the_columns_that_clients_read(db):
    found = dict(db.rows("""
        SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
        WHERE attrelid = 'awa.runtime_instances'::regclass AND attnum > 0
    """))
    assert {name: found.get(name) for name in PEER} == PEER
    register(db.conn, queues=["q"])
    assert db.rows(f"SELECT * FROM (SELECT {', '.join(PEER)} FROM awa.runtime_instances) r"
                   " WHERE r IS NULL OR queues IS NULL OR last_seen_at IS NULL") == []
    # As they ask: stale runtimes, and descriptors of those that are not.
    assert db.rows("""
        SELECT descriptor.key FROM awa.runtime_instances runtime
        CROSS JOIN LATERAL jsonb_each_text(runtime.queue_descriptor_hashes) AS descriptor(key, value)
        WHERE runtime.last_seen_at + make_interval(
            secs => GREATEST(((GREATEST(runtime.snapshot_interval_ms, 1000) / 1000) * 3)::int, 30)
        ) >= now()
    """) == []


def test_a_session(db):
    conn = db.connect()
    runtime = register(
        conn, "mailer", queues=["b", "a"], capabilities={"gpu": True}, version="1.2", host="h1")
    db.insert(3, queue="a")
    claim(conn, "a", 3, runtime=runtime)
    found = shown(db.conn, runtime)
    assert (found.name, found.hostname, found.pid, found.version, found.liveness) == (
        "mailer", "h1", conn.pid, "1.2", "session")
    assert (found.alive, found.healthy, found.open_attempts, found.ended_at) == (True, True, 3, None)
    assert found.capabilities == {"gpu": True}
    assert [(q["queue"], q["in_flight"]) for q in found.queues] == [("a", 3), ("b", 0)]
    assert found.registered_by == "postgres" and found.client_addr is None
    # A session is seen as long as it is there.
    assert found.last_seen_at > found.started_at
    assert shown(db.conn, runtime).last_seen_at > found.last_seen_at
    pid = conn.pid
    conn.close()
    wait_until(lambda: not db.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid))
    wait_until(lambda: shown(db.conn, runtime).ended_at, 10)
    found = shown(db.conn, runtime)
    assert (found.alive, found.open_attempts, found.last_seen_at) == (False, 0, found.ended_at)


def test_over_the_network(db):
    with db.server.connect(db.name, host="127.0.0.1") as conn:
        found = shown(conn, register(conn))
        assert (found.hostname, str(found.client_addr)) == ("127.0.0.1", "127.0.0.1")
    assert shown(db.conn, register(db.conn)).hostname == "[local]"


def test_heartbeats_write_nothing_and_are_seen(db):
    runtime = register(db.conn, "w", "heartbeat", "30 s")
    found = shown(db.conn, runtime)
    assert (found.liveness, found.alive) == ("heartbeat", True)
    assert found.heartbeat_timeout == datetime.timedelta(seconds=30)
    assert found.snapshot_interval_ms == 10_000
    before = db.value("SELECT xmin::text FROM awa.runtimes WHERE runtime = %s", runtime)
    beaten = db.value("SELECT clock_timestamp()")
    db.execute("SELECT awa.heartbeat(%s)", runtime)
    assert shown(db.conn, runtime).last_seen_at >= beaten
    assert db.value("SELECT xmin::text FROM awa.runtimes WHERE runtime = %s", runtime) == before


def test_who_falls_silent_or_leaves_has_ended(db):
    silent = register(db.conn, "s", "heartbeat", "1 s")
    leaves = register(db.conn, "l")
    db.execute("SELECT awa.deregister_runtime(%s)", leaves)
    found = shown(db.conn, leaves)
    assert found.ended_at and found.alive is False
    wait_until(lambda: shown(db.conn, silent).ended_at, 10)
    with raises("AW002"):
        db.execute("SELECT awa.heartbeat(%s)", silent)


def test_an_owner_that_was_fenced_stays_so_over_a_restart(own_db):
    db = own_db
    silent = register(db.conn, "s", "heartbeat", "1 s")
    alive = register(db.conn, "a", "heartbeat", "1 h")
    gone = register(db.connect())
    wait_until(lambda: shown(db.conn, silent).ended_at, 10)
    db.server.restart("immediate")
    db.wait_served()
    with raises("AW002"):
        db.execute("SELECT awa.heartbeat(%s)", silent)
    db.execute("SELECT awa.heartbeat(%s)", alive)
    wait_until(lambda: shown(db.conn, gone).ended_at, 10)
    assert shown(db.conn, alive).alive


def test_gone_after_a_day_unless_halted(db):
    runtime, other = register(db.conn), register(db.conn)
    living = register(db.conn)
    db.execute("SELECT awa.deregister_runtime(%s)", runtime)
    db.execute("SELECT awa.deregister_runtime(%s)", other)
    db.execute("UPDATE awa.runtimes SET ended_at = ended_at - interval '23 h' WHERE runtime = %s", other)
    db.execute("UPDATE awa.runtimes SET ended_at = ended_at - interval '1 day',"
               " registered_at = registered_at - interval '9 days' WHERE runtime <> %s", other)
    db.execute("UPDATE awa.runtimes SET ended_at = NULL WHERE runtime = %s", living)
    halt = db.value("SELECT awa.halt_runtime_scope()")
    db.rows("SELECT * FROM awa.maintain()")
    assert shown(db.conn, runtime)
    db.execute("SELECT awa.resume_runtime_scope('maintenance.prune', %s)", halt)
    db.rows("SELECT * FROM awa.maintain()")
    assert shown(db.conn, runtime) is None
    assert shown(db.conn, other) and shown(db.conn, living).alive


def test_nobody_is_waited_for(db):
    """An open transaction has the row of a runtime that ended: maintenance goes on."""
    conn = db.connect()
    runtime, other = register(conn), register(conn)
    holder = db.connect()
    holder.begin()
    holder.execute("SELECT FROM awa.runtimes WHERE runtime = %s FOR UPDATE", (runtime,))
    conn.close()
    wait_until(lambda: shown(db.conn, other).ended_at, 10)
    db.insert()
    (job,) = db.claim(deadline="10 ms")
    db.wait_state(job.job_id, "retryable")
    assert shown(db.conn, runtime).ended_at is None
    holder.rollback_sql()
    wait_until(lambda: shown(db.conn, runtime).ended_at, 10)


def test_who_may_look(db):
    register(db.conn)
    for profile, may in (("reader", True), ("operator", True), ("worker", False), ("producer", False)):
        role = f"ri_{db.name}_{profile}"
        db.execute(f"CREATE ROLE {role} LOGIN")
        try:
            db.execute("SELECT awa.grant_access(%s, %s)", role, profile)
            with db.server.connect(db.name, user=role) as conn:
                if may:
                    assert conn.value("SELECT count(*) FROM awa.runtime_instances") == 1
                else:
                    with raises("42501"):
                        conn.execute("SELECT * FROM awa.runtime_instances")
                with raises("42501"):
                    conn.execute("SELECT * FROM awa.runtimes")
        finally:
            db.execute("SELECT awa.revoke_access(%s)", role)
            db.execute(f"DROP ROLE {role}")


def test_what_a_runtime_says_of_itself(db):
    for opts in ({"queues": "q"}, {"queues": [1]}, {"version": 1}, {"host": {}}, {"color": "red"}):
        with raises("22023"):
            register(db.conn, **opts)


def test_a_standby_shows_what_the_rows_say(own_db):
    db = own_db
    alive, ended = register(db.conn, queues=["q"]), register(db.conn)
    db.execute("SELECT awa.deregister_runtime(%s)", ended)
    standby = db.server.make_standby().start()
    try:
        with standby.connect(db.name) as conn:
            found = shown(conn, alive)
            assert (found.alive, found.open_attempts, found.healthy) == (None, None, False)
            assert found.last_seen_at == found.started_at
            assert [queue["queue"] for queue in found.queues] == ["q"]
            assert shown(conn, ended).last_seen_at == shown(conn, ended).ended_at
    finally:
        standby.destroy()


def test_a_restored_database_has_no_living_ones(own_db, tmp_path_factory):
    db = own_db
    runtime = register(db.conn, queues=["q"], capabilities=[1])
    beats = register(db.conn, "b", "heartbeat", "1 h")
    path = db.server.home / "dump"
    copy = restore(db, db.server, "plain", path)
    try:
        with copy.server.connect(copy.name) as conn:
            wait_until(lambda: shown(conn, runtime).ended_at, 10)
            assert shown(conn, runtime).capabilities == [1]
            assert shown(conn, beats)
        copy.check()
    finally:
        copy.drop()
    assert isinstance(copy, Database) and shown(db.conn, runtime).alive
