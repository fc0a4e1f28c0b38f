"""The launcher and its workers: present where they should be, and never in the way."""

import os
import random
import signal
import subprocess
import time
from contextlib import contextmanager

import psycopg
import pytest

from harness import Background, Database, Server, kill_backend, place, raises, wait_until
from harness.session import alive

WORKER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'awa worker' AND datname = %s"
LAUNCHER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'awa launcher'"


@pytest.fixture(scope="module")
def cluster():
    """One server for the tests of this file that do not break it."""
    server = Server(name="supervisor").init().start()
    yield server
    server.destroy()


@pytest.fixture
def admin(cluster):
    with cluster.connect() as conn:
        yield conn


@pytest.fixture
def base(cluster):
    """A database that is served."""
    yield from _served(cluster)


@pytest.fixture
def own_base(own_server):
    yield from _served(own_server)


def served_database(server):
    database = plain_database(server)
    with session(server, database.name) as conn:
        conn.execute("CREATE EXTENSION awa")
    wait_worker(server, database.name)
    return database


def _served(server):
    database = served_database(server)
    yield database
    database.close_sessions()
    if server.running:
        database.drop()


def plain_database(server, name=None):
    return Database(server, name, extension=False)


def worker(server, dbname):
    with server.connect() as conn:
        pids = conn.column(WORKER, dbname)
    assert len(pids) <= 1, f"{len(pids)} workers in {dbname}"
    return pids[0] if pids else None


def wait_worker(server, dbname, timeout=5, other_than=None):
    """The pid of the database's worker, a new one where `other_than` is given."""
    return wait_until(
        lambda: (pid := worker(server, dbname)) and pid != other_than and pid,
        timeout,
        what=lambda: f"a worker in {dbname}:\n{server.log()[-3000:]}",
    )


def wait_no_worker(server, dbname, timeout=5):
    wait_until(
        lambda: worker(server, dbname) is None, timeout, what=f"no worker in {dbname}"
    )


def stays_without(server, dbname, seconds=0.5):
    """Looks a while: a worker that should not come needs time not to come."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert worker(server, dbname) is None
        time.sleep(0.05)


def works(database):
    """The pid of the worker that has just done something: it is alive, and past all before."""
    with database.server.connect(database.name) as conn:
        job = conn.value("SELECT awa.insert_job('k', queue => 'works',"
                         " run_at => clock_timestamp() + interval '50 ms')")
        wait_until(lambda: job in conn.column("SELECT job_id FROM awa.claim('works')"), 5,
                   what="a job that the worker moves to its lane")
    return worker(database.server, database.name)


@contextmanager
def session(server, dbname):
    """A session whose backend is gone when it ends: DROP DATABASE must not find it."""
    conn = server.connect(dbname)
    pid = conn.pid
    try:
        yield conn
    finally:
        conn.close()
        wait_until(lambda: not alive(pid), what="end of the session")


def timed(call, *args):
    start = time.monotonic()
    call(*args)
    return time.monotonic() - start


# CREATE EXTENSION


def test_a_database_is_served_within_a_second(cluster):
    database = plain_database(cluster)
    conn = database.connect()
    stays_without(cluster, database.name, 0.2)
    conn.execute("CREATE EXTENSION awa")
    start = time.monotonic()
    pid = wait_worker(cluster, database.name)
    assert time.monotonic() - start < 1
    with open(f"/proc/{pid}/cmdline") as title:
        assert f"awa worker {database.name}" in title.read()
    database.close_sessions()
    database.drop()


def test_an_aborted_create_extension_brings_no_worker(cluster):
    database = plain_database(cluster)
    conn = database.connect()
    conn.begin()
    conn.execute("CREATE EXTENSION awa")
    stays_without(cluster, database.name, 0.3)
    conn.rollback_sql()
    stays_without(cluster, database.name)
    # Nor does one whose savepoint was rolled back.
    conn.begin()
    conn.execute("SAVEPOINT s")
    conn.execute("CREATE EXTENSION awa")
    conn.execute("ROLLBACK TO s")
    conn.commit_sql()
    stays_without(cluster, database.name)
    database.close_sessions()
    database.drop()


def test_a_prepared_create_extension_is_served_once_committed(cluster):
    database = plain_database(cluster)
    conn = database.connect()
    conn.begin()
    conn.execute("CREATE EXTENSION awa")
    conn.execute("PREPARE TRANSACTION 'p'")
    stays_without(cluster, database.name, 0.3)
    conn.execute("COMMIT PREPARED 'p'")
    wait_worker(cluster, database.name, 1)
    database.close_sessions()
    database.drop()


def test_a_planted_schema_is_refused(cluster):
    """Something planted under our schema's name makes the script fail."""
    database = plain_database(cluster)
    conn = database.connect()
    conn.execute("CREATE SCHEMA awa")
    with raises("42P06"):
        conn.execute("CREATE EXTENSION awa")
    database.close_sessions()
    database.drop()


# DROP EXTENSION


def test_drop_extension_takes_the_worker_away(cluster, base):
    conn = base.connect()
    assert timed(conn.execute, "DROP EXTENSION awa") < 1
    wait_no_worker(cluster, base.name, 1)
    stays_without(cluster, base.name)
    conn.execute("CREATE EXTENSION awa")
    wait_worker(cluster, base.name, 1)


def test_an_aborted_drop_extension_keeps_the_worker(cluster, base):
    before = worker(cluster, base.name)
    conn = base.connect()
    conn.begin()
    assert timed(conn.execute, "DROP EXTENSION awa") < 1
    conn.rollback_sql()
    assert works(base) == before


def test_drop_and_create_in_one_transaction_is_served_anew(cluster, base):
    before = worker(cluster, base.name)
    conn = base.connect()
    conn.begin()
    conn.execute("DROP EXTENSION awa")
    conn.execute("CREATE EXTENSION awa")
    conn.commit_sql()
    wait_worker(cluster, base.name, 1, other_than=before)


def test_the_second_extension_of_a_transaction_knows_nothing_of_the_first(base):
    base.wait_served()
    base.insert(5)
    conn = base.connect()
    conn.begin()
    conn.execute("DROP EXTENSION awa")
    conn.execute("CREATE EXTENSION awa")
    job = conn.value("SELECT awa.insert_job('k')")
    conn.commit_sql()
    base.wait_served()
    assert [j.job_id for j in base.claim(max_jobs=9)] == [job]
    base.check()


def test_drop_owned_takes_the_worker_away(cluster, base, admin):
    conn = base.connect()
    conn.execute("CREATE ROLE su SUPERUSER LOGIN")
    conn.execute("DROP EXTENSION awa")
    with cluster.connect(base.name, user="su") as su:
        su.execute("CREATE EXTENSION awa")
    wait_worker(cluster, base.name, 1)
    conn.execute("DROP OWNED BY su CASCADE")
    wait_no_worker(cluster, base.name, 1)
    admin.execute("DROP ROLE su")


# DROP DATABASE


@pytest.mark.parametrize("how", ["", " WITH (FORCE)"])
def test_drop_database_works_while_the_worker_is_connected(cluster, base, admin, how):
    assert timed(admin.execute, f"DROP DATABASE {base.name}{how}") < 2
    assert worker(cluster, base.name) is None


@pytest.mark.parametrize("how", ["", " WITH (FORCE)"])
def test_a_plain_owner_can_drop_the_database(cluster, base, admin, how):
    admin.execute("CREATE ROLE plain LOGIN")
    try:
        admin.execute(f"ALTER DATABASE {base.name} OWNER TO plain")
        with cluster.connect(user="plain") as plain:
            assert timed(plain.execute, f"DROP DATABASE {base.name}{how}") < 2
    finally:
        admin.execute(f"DROP DATABASE IF EXISTS {base.name}")
        admin.execute("DROP ROLE plain")


def test_a_forced_drop_by_a_plain_owner_wins_every_race(cluster, admin):
    """A worker that is just starting, connecting or leaving must not be in the way."""
    admin.execute("CREATE ROLE hasty LOGIN")
    try:
        with cluster.connect(user="hasty") as hasty:
            for round in range(20):
                admin.execute("CREATE DATABASE hasty OWNER hasty")
                with session(cluster, "hasty") as conn:
                    conn.execute("CREATE EXTENSION awa")
                time.sleep(round * 0.002)
                hasty.execute("DROP DATABASE hasty WITH (FORCE)")
    finally:
        admin.execute("DROP DATABASE IF EXISTS hasty")
        admin.execute("DROP ROLE hasty")


def test_others_disturb_nothing(cluster, base, admin):
    before = worker(cluster, base.name)
    admin.execute("CREATE ROLE stranger LOGIN CREATEDB")
    try:
        with cluster.connect(user="stranger") as stranger:
            for statement in (
                f"DROP DATABASE {base.name}",
                f"DROP DATABASE {base.name} WITH (FORCE)",
                f"CREATE DATABASE copy TEMPLATE {base.name}",
                f"ALTER DATABASE {base.name} RENAME TO stolen",
                f"ALTER DATABASE {base.name} SET TABLESPACE pg_default",
            ):
                with raises("42501"):
                    stranger.execute(statement)
        with cluster.connect(base.name, user="stranger") as stranger, raises("42501"):
            stranger.execute("DROP EXTENSION awa")
        assert worker(cluster, base.name) == before
    finally:
        admin.execute("DROP ROLE stranger")


def test_a_drop_that_fails_brings_the_worker_back(cluster, base, admin):
    base.connect()
    with raises("55006"):
        admin.execute(f"DROP DATABASE {base.name}")
    wait_worker(cluster, base.name, 1)


def test_a_cancelled_drop_brings_the_worker_back(cluster, base):
    base.connect()
    admin = cluster.connect()
    drop = Background(admin.execute, f"DROP DATABASE {base.name}")
    wait_no_worker(cluster, base.name)
    admin.cancel()
    with raises("57014"):
        drop.result()
    wait_worker(cluster, base.name, 1)
    # The session may also end altogether.
    drop = Background(admin.execute, f"DROP DATABASE {base.name}")
    wait_no_worker(cluster, base.name)
    kill_backend(admin.pid, signal.SIGTERM)
    with pytest.raises(psycopg.OperationalError):
        drop.result()
    wait_worker(cluster, base.name, 1)


def test_dropping_the_current_database_disturbs_nothing(cluster, base):
    before = worker(cluster, base.name)
    with raises("55006"):
        base.connect().execute(f"DROP DATABASE {base.name}")
    assert worker(cluster, base.name) == before


# CREATE DATABASE ... TEMPLATE, ALTER DATABASE


def test_a_database_can_be_copied(cluster, base, admin):
    assert timed(admin.execute, f"CREATE DATABASE copy TEMPLATE {base.name}") < 4
    wait_worker(cluster, base.name, 1)
    wait_worker(cluster, "copy", 1)
    admin.execute("DROP DATABASE copy")
    admin.execute("CREATE DATABASE copy TEMPLATE DEFAULT")
    admin.execute("DROP DATABASE copy")
    # Also by one who is connected to it.
    base.connect().execute(f"CREATE DATABASE copy TEMPLATE {base.name}")
    wait_worker(cluster, base.name, 1)
    admin.execute("DROP DATABASE copy")


def test_a_copy_that_fails_brings_the_worker_back(cluster, base, admin):
    with raises("42P04"):
        admin.execute(f"CREATE DATABASE postgres TEMPLATE {base.name}")
    wait_worker(cluster, base.name, 1)


def test_a_database_can_be_renamed(cluster, base, admin):
    assert timed(admin.execute, f"ALTER DATABASE {base.name} RENAME TO renamed") < 2
    wait_worker(cluster, "renamed", 1)
    admin.begin()
    admin.execute("ALTER DATABASE renamed RENAME TO other")
    admin.rollback_sql()
    wait_worker(cluster, "renamed", 1)
    admin.execute(f"ALTER DATABASE renamed RENAME TO {base.name}")
    wait_worker(cluster, base.name, 1)


def test_a_database_can_move_to_another_tablespace(cluster, base, admin):
    # Allowed by allow_in_place_tablespaces, which is for tests.
    admin.execute("SET allow_in_place_tablespaces = on")
    admin.execute("CREATE TABLESPACE elsewhere LOCATION ''")
    assert timed(admin.execute, f"ALTER DATABASE {base.name} SET TABLESPACE elsewhere") < 4
    wait_worker(cluster, base.name, 1)
    admin.execute(f"ALTER DATABASE {base.name} SET TABLESPACE pg_default")
    wait_worker(cluster, base.name, 1)
    admin.execute("DROP TABLESPACE elsewhere")


def test_closed_databases_and_templates_are_left(cluster, base, admin):
    for setting in ("ALLOW_CONNECTIONS", "IS_TEMPLATE"):
        leave, come = ("false", "true") if setting == "ALLOW_CONNECTIONS" else ("true", "false")
        admin.execute(f"ALTER DATABASE {base.name} WITH {setting} {leave}")
        wait_no_worker(cluster, base.name, 1)
        stays_without(cluster, base.name, 0.3)
        admin.execute(f"ALTER DATABASE {base.name} WITH {setting} {come}")
        wait_worker(cluster, base.name, 1)


def test_settings_of_the_database_do_not_reach_the_worker(cluster, base, admin):
    admin.execute("CREATE ROLE nobody")
    for setting in (
        "default_transaction_read_only = on",
        "statement_timeout = 1",
        "search_path = nowhere",
        "role = nobody",
        "session_replication_role = replica",
        "idle_session_timeout = 100",
    ):
        admin.execute(f"ALTER DATABASE {base.name} SET {setting}")
    before = worker(cluster, base.name)
    kill_backend(before, signal.SIGTERM)
    after = wait_worker(cluster, base.name, other_than=before)
    admin.execute(f"ALTER DATABASE {base.name} RESET ALL")
    assert works(base) == after
    admin.execute("DROP ROLE nobody")


# Ends that nobody ordered


def test_a_terminated_worker_comes_back(cluster, base, admin):
    before = worker(cluster, base.name)
    assert admin.value("SELECT pg_terminate_backend(%s, 1000)", before)
    wait_worker(cluster, base.name, 1, other_than=before)


def test_a_cancelled_worker_stays(cluster, base, admin):
    before = worker(cluster, base.name)
    for _ in range(5):
        admin.execute("SELECT pg_cancel_backend(%s)", (before,))
    assert works(base) == before


def test_a_terminated_launcher_comes_back_and_keeps_the_workers(cluster, base, admin):
    serving, before = worker(cluster, base.name), admin.value(LAUNCHER)
    kill_backend(before, signal.SIGTERM)
    wait_until(lambda: admin.column(LAUNCHER) not in ([], [before]), 5)
    assert worker(cluster, base.name) == serving
    # It watches over the worker it did not start.
    kill_backend(serving, signal.SIGTERM)
    wait_worker(cluster, base.name, 2, other_than=serving)
    # A worker that ends while there is no launcher is missed all the same.
    serving, before = worker(cluster, base.name), admin.value(LAUNCHER)
    kill_backend(before, signal.SIGTERM)
    kill_backend(serving, signal.SIGTERM)
    wait_worker(cluster, base.name, 5, other_than=serving)


@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_a_killed_process_comes_back_after_the_crash_restart(own_server, own_base, victim):
    before = worker(own_server, own_base.name)
    with own_server.connect() as conn:
        launcher = conn.value(LAUNCHER)
    kill_backend(before if victim == "worker" else launcher, signal.SIGKILL)
    own_server.wait_ready()
    wait_worker(own_server, own_base.name, 5, other_than=before)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_dies_while_it_starts_a_worker(own_server, sig):
    """At whatever point of a start it is met: the database is served soon."""
    for round in range(6):
        with own_server.connect() as admin:
            launcher = admin.value(LAUNCHER)
        database = plain_database(own_server)
        with session(own_server, database.name) as conn:
            conn.execute("CREATE EXTENSION awa")
            # Half a millisecond decides where it is met.
            time.sleep(round * 0.001)
            kill_backend(launcher, sig)
        if sig == signal.SIGKILL:
            own_server.wait_ready()
        wait_worker(own_server, database.name, 10)
        wait_until(lambda: _has_launcher(own_server), 10)
        database.drop()


def _has_launcher(server):
    with server.connect() as conn:
        return conn.column(LAUNCHER) != []


def test_the_workers_come_with_the_server(own_server, own_base):
    own_server.restart()
    wait_worker(own_server, own_base.name, 3)
    own_server.crash()
    wait_worker(own_server, own_base.name, 3)
    before = worker(own_server, own_base.name)
    assert timed(own_server.stop) < 5
    assert not alive(before)
    own_server.start()


# Steps that misbehave (awa.debug_step is in builds for tests only)


@pytest.fixture
def misbehave(cluster, base):
    def set_step(how):
        size = len(cluster.log())
        cluster.reload(awa__debug_step=how)
        return size

    yield set_step
    cluster.reload(awa__debug_step=None)


def in_step(server, dbname):
    """The worker's pid, once it is inside the debug step."""

    def pid():
        with server.connect() as conn:
            found = conn.column(WORKER + " AND query = 'awa: debug step' AND state = 'active'",
                                dbname)
        return found and found[0]

    return wait_until(pid, 5, what="the worker in its step")


@pytest.mark.parametrize(
    "how, says",
    [
        ("error", "the step failed as told"),
        ("raise", 'role "the server failed as told" does not exist'),
        ("panic", "the step panicked as told"),
    ],
)
def test_a_failing_step_is_reported_and_survived(cluster, base, misbehave, how, says):
    before = worker(cluster, base.name)
    size = misbehave(how)
    cluster.wait_log(f'awa maintenance step "debug" failed: {says}', 5, size)
    # Once more after a pause, and not in between.
    start = time.monotonic()
    wait_until(lambda: cluster.log()[size:].count(says) > 1, 5, what="another try")
    assert time.monotonic() - start > 0.8
    assert cluster.log()[size:].count(says) == 2
    assert worker(cluster, base.name) == before
    with cluster.connect() as conn:
        assert conn.value("SELECT state FROM pg_stat_activity WHERE pid = %s", before) == "idle"


def test_drop_extension_does_not_wait_for_a_long_step(cluster, base, misbehave):
    misbehave("nap")
    in_step(cluster, base.name)
    conn = base.connect()
    assert timed(conn.execute, "DROP EXTENSION awa") < 1
    wait_no_worker(cluster, base.name, 2)


@pytest.mark.parametrize("how", ["", " WITH (FORCE)"])
def test_drop_database_does_not_wait_for_a_long_step(cluster, base, admin, misbehave, how):
    misbehave("nap")
    in_step(cluster, base.name)
    assert timed(admin.execute, f"DROP DATABASE {base.name}{how}") < 2


def test_a_fast_shutdown_does_not_wait_for_a_long_step(own_server, own_base):
    own_server.reload(awa__debug_step="nap")
    in_step(own_server, own_base.name)
    assert timed(own_server.stop) < 5


# Settings


def test_enabled_off_stops_the_workers(cluster, base):
    cluster.reload(awa__enabled="off")
    try:
        wait_no_worker(cluster, base.name, 2)
        stays_without(cluster, base.name)
        conn = base.connect()
        conn.execute("DROP EXTENSION awa")
        conn.execute("CREATE EXTENSION awa")
        stays_without(cluster, base.name)
    finally:
        cluster.reload(awa__enabled=None)
    wait_worker(cluster, base.name, 2)


def test_settings_have_the_documented_defaults_and_limits(new_server):
    # Where the harness has its own.
    server = new_server({
        "awa.rotate_interval": "60s", "awa.rescue_interval": "30s", "awa.completed_retention": "1h",
    })
    documented = {
        "awa.enabled": ("on", "sighup", None),
        "awa.max_databases": ("16", "postmaster", "1"),
        "awa.max_lanes": ("4096", "postmaster", "16"),
        "awa.max_chunks": ("65536", "postmaster", "64"),
        "awa.max_open_claims": ("131072", "postmaster", "64"),
        "awa.max_runtimes": ("4096", "postmaster", "16"),
        "awa.max_timers": ("65536", "postmaster", "64"),
        "awa.claim_wait_max": ("2s", "user", "0"),
        "awa.heartbeat_staleness": ("90s", "sighup", "1000"),
        "awa.rescue_interval": ("30s", "sighup", "10"),
        "awa.rescue_batch_size": ("500", "sighup", "1"),
        "awa.rescue_pass_budget": ("1s", "sighup", "0"),
        "awa.rescue_pass_max_rows": ("1000000", "sighup", "0"),
        "awa.promote_batch_size": ("4096", "sighup", "1"),
        "awa.rotate_interval": ("1min", "sighup", "100"),
        "awa.rotate_size": ("1GB", "sighup", "64"),
        "awa.completed_retention": ("1h", "sighup", "-1"),
        "awa.failed_retention": ("3d", "sighup", "0"),
        "awa.dlq_retention": ("30d", "sighup", "0"),
    }
    with server.connect() as conn:
        found = conn.rows(
            "SELECT name, current_setting(name), context, min_val FROM pg_settings"
            " WHERE name LIKE 'awa.%' AND name <> 'awa.debug_step'"
        )
        assert {name: tuple(rest) for name, *rest in found} == documented
        conn.execute("SET awa.claim_wait_max = '5s'")
        with raises("42602"):
            conn.execute("SET awa.no_such_setting = 1")


def test_no_more_databases_than_allowed(new_server):
    server = new_server({"awa.max_databases": 1})
    first, second = plain_database(server), plain_database(server)
    for database in (first, second):
        with server.connect(database.name) as conn:
            conn.execute("CREATE EXTENSION awa")
        if database is first:
            wait_worker(server, first.name, 1)
    server.wait_log("You might need to increase awa.max_databases.", 5)
    stays_without(server, second.name)


def test_twenty_databases(new_server):
    """Each is served, none sees another one's jobs, and none is in the way of a stop."""
    server = new_server({"awa.max_databases": 24, "max_worker_processes": 32})
    databases = [plain_database(server) for _ in range(20)]
    for database in databases:
        with session(server, database.name) as conn:
            conn.execute("CREATE EXTENSION awa")
    for number, database in enumerate(databases):
        database.wait_served(90)  # twenty workers start at once
        database.insert(number + 1, queue="same")
        database.close_sessions()
    assert timed(server.stop) < 5
    server.start()
    for number, database in enumerate(databases):
        database.wait_served(90)  # twenty workers start at once
        assert len(database.claim("same", 100)) == number + 1
        works(database)
        database.close_sessions()
        database.check()
    with server.connect() as admin:
        pids = admin.column(WORKER.replace("= %s", "IS NOT NULL"))
        assert len(set(pids)) == 20
        # One that leaves is missed by nobody.
        admin.execute(f"DROP DATABASE {databases[0].name}")
    wait_no_worker(server, databases[0].name)
    assert works(databases[1]) in pids


def test_more_databases_than_slots_are_looked_at(new_server):
    server = new_server({"awa.max_databases": 1})
    databases = [plain_database(server) for _ in range(12)]
    with server.connect(databases[-1].name) as conn:
        conn.execute("CREATE EXTENSION awa")
    wait_worker(server, databases[-1].name, 5)
    server.restart()
    wait_worker(server, databases[-1].name, 5)


def test_without_a_free_worker_slot_the_log_names_the_setting(new_server):
    # One is the launcher's, one the logical replication launcher's: one is left.
    server = new_server({"max_worker_processes": 3})
    names = [plain_database(server).name for _ in range(2)]
    for name in names:
        with session(server, name) as conn:
            conn.execute("CREATE EXTENSION awa")
    server.wait_log("out of background worker slots", 15)
    assert "You might need to increase max_worker_processes." in server.log()
    served = [name for name in names if worker(server, name)]
    assert len(served) == 1
    # It goes on, and the other one gets its turn when there is room.
    with server.connect() as conn:
        conn.execute(f"DROP DATABASE {served[0]}")
    (waiting,) = set(names) - set(served)
    wait_worker(server, waiting, 10)
    assert server.log().count("out of background worker slots") == 1


# Standby, preload


def test_a_standby_has_no_worker_until_it_is_promoted(own_server, own_base):
    standby = own_server.make_standby().start()
    try:
        stays_without(standby, own_base.name)
        with standby.connect() as conn:
            assert conn.column(LAUNCHER) == []
        standby.promote()
        wait_worker(standby, own_base.name, 3)
    finally:
        standby.destroy()


def test_without_preload_nothing_works_and_nothing_breaks(new_server, own_server, own_base):
    own_server.restart(settings={"shared_preload_libraries": ""})
    with own_server.connect(own_base.name) as conn:
        conn.execute("LOAD 'awa'")
        with raises("55000", "shared_preload_libraries"):
            conn.execute("DROP EXTENSION awa; CREATE EXTENSION awa")
        assert conn.value("SELECT count(*) FROM pg_extension WHERE extname = 'awa'") == 1
        conn.execute("DROP EXTENSION awa")
        with raises("55000", "shared_preload_libraries"):
            conn.execute("CREATE EXTENSION awa")
        assert conn.value("SELECT 1") == 1
    own_server.restart(settings={"shared_preload_libraries": "awa"})


def test_pg_upgrade_is_not_disturbed(new_server, own_server, own_base):
    """It runs both servers with the library preloaded and would trip over a worker."""
    new = new_server(start=False)
    own_server.stop()
    command = [new.bin / "pg_upgrade", "-b", own_server.bin, "-B", new.bin]
    command += ["-d", own_server.data, "-D", new.data, "-U", "postgres", "-s", new.home]
    command += ["-p", place.free_port(), "-P", place.free_port()]
    command += ["-o", "-c shared_preload_libraries=awa", "-O", "-c shared_preload_libraries=awa"]
    done = subprocess.run(
        place.as_server_user(command),
        cwd=new.home,
        env=place.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = "".join(log.read_text() for log in new.data.glob("pg_upgrade_output.d/*/log/*.log"))
    assert "awa worker" not in logs
    new.start()
    wait_worker(new, own_base.name, 3)
    # Another system, but no copy: nothing is paused.
    own_base.server = new
    own_base.wait_served()
    own_base.insert(1)
    assert len(own_base.claim()) == 1


# Quiet


def test_an_idle_server_writes_and_does_nothing(new_server):
    own_server = new_server({"awa.rescue_interval": "30s"})
    own_base = served_database(own_server)
    with own_server.connect() as conn:
        conn.execute("CHECKPOINT")
        settled(conn)
        position = conn.value("SELECT pg_current_wal_insert_lsn()")
        pid = worker(own_server, own_base.name)
        switches = voluntary_switches(pid)
        time.sleep(5)
        assert conn.value("SELECT pg_current_wal_insert_lsn()") == position
        assert voluntary_switches(pid) - switches <= 5
        assert conn.row(
            "SELECT state, application_name, backend_xmin IS NULL FROM pg_stat_activity"
            " WHERE pid = %s", pid,
        ) == ("idle", "awa", True)


def settled(conn):
    """Until nothing was written for a while: the server has come to rest."""
    seen = []

    def at_rest():
        seen.append(conn.value("SELECT pg_current_wal_insert_lsn()"))
        return seen[-8:].count(seen[-1]) == 8

    wait_until(at_rest, 20, what="a server that writes nothing", every=0.1)


def voluntary_switches(pid):
    with open(f"/proc/{pid}/status") as status:
        (line,) = [line for line in status if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def test_errors_of_utility_statements_keep_their_fields(cluster, base):
    """The hook must not come between a statement's error and the client."""
    conn = base.connect()
    conn.execute("CREATE TABLE t (a int CONSTRAINT positive CHECK (a > 0))")
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        with conn.cursor() as cur, cur.copy("COPY t FROM STDIN") as copy:
            copy.write("1\n-1\n")
    assert caught.value.diag.constraint_name == "positive"
    assert "COPY t, line 2" in caught.value.diag.context
    conn.execute("INSERT INTO t VALUES (1), (1)")
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        conn.execute("ALTER TABLE t ADD CONSTRAINT only_one UNIQUE (a)")
    assert caught.value.diag.constraint_name == "only_one"


@pytest.mark.chaos
def test_chaos(own_server):
    """Databases come, go and change while workers and launcher are terminated."""
    end = time.monotonic() + float(os.environ.get("AWA_CHAOS_SECONDS", "60"))
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with own_server.connect() as admin:
        admin.execute("CREATE ROLE plain LOGIN CREATEDB")

    def live(number):
        """One owner with databases of its own: nobody but a worker is ever in them."""
        dice = random.Random(seed + number)
        name, is_there = f"c{number}", False
        with own_server.connect() as admin, own_server.connect(user="plain") as plain:
            while time.monotonic() < end:
                if not is_there:
                    plain.execute(f"CREATE DATABASE {name}")
                    with session(own_server, name) as conn:
                        conn.execute("CREATE EXTENSION awa")
                    is_there = True
                time.sleep(dice.choice([0, 0.005, 0.02, 0.1]))
                match dice.randrange(6):
                    case 0:
                        plain.execute(f"DROP DATABASE {name} WITH (FORCE)")
                        is_there = False
                    case 1:
                        plain.execute(f"DROP DATABASE {name}")
                        is_there = False
                    case 2:
                        plain.execute(f"ALTER DATABASE {name} RENAME TO {name}_2")
                        plain.execute(f"ALTER DATABASE {name}_2 RENAME TO {name}")
                    case 3:
                        plain.execute(f"CREATE DATABASE {name}_copy TEMPLATE {name}")
                        plain.execute(f"DROP DATABASE {name}_copy WITH (FORCE)")
                    case 4:
                        with session(own_server, name) as conn:
                            conn.begin()
                            conn.execute("DROP EXTENSION awa")
                            conn.execute("CREATE EXTENSION awa")
                            conn.execute(dice.choice(["COMMIT", "ROLLBACK"]))
                    case 5:
                        admin.execute(
                            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                            " WHERE backend_type = 'awa worker' AND datname = %s", (name,)
                        )
        return name if is_there else None

    def end_launchers():
        with own_server.connect() as admin:
            while time.monotonic() < end:
                time.sleep(0.7)
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE backend_type = 'awa launcher'"
                )

    owners = [Background(live, number) for number in range(4)]
    others = Background(end_launchers)
    names = [owner.result(180) for owner in owners]
    others.result()
    for name in filter(None, names):
        wait_worker(own_server, name, 15)
    with own_server.connect() as admin:
        running = admin.column(WORKER.replace("pid", "datname", 1).replace("= %s", "IS NOT NULL"))
    assert sorted(running) == sorted(filter(None, names))
    assert "was terminated by signal" not in own_server.log()
    assert "PANIC" not in own_server.log()


def test_an_extension_that_was_used_and_rolled_back_leaves_nothing(new_server):
    """Each CREATE EXTENSION has an oid of its own, and memory of its own."""
    server = new_server({"awa.max_databases": "2"})
    with server.connect("postgres") as conn:
        conn.execute("CREATE DATABASE again")

    def try_it():
        with server.connect("again") as conn:
            conn.execute("BEGIN")
            conn.execute("CREATE EXTENSION awa")
            conn.execute("SELECT awa.insert_job('lost')")
            conn.execute("ROLLBACK")
        return True

    def worked():
        try:
            return try_it()
        except psycopg.Error as error:
            assert error.sqlstate == "AW004"
            return False

    # The worker that frees it may come a moment later.
    for _ in range(6):
        wait_until(worked, 20, what="memory for one more database")
