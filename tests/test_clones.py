"""Copies of a database: what was made by CREATE DATABASE ... TEMPLATE starts paused."""

import pytest
from psycopg import sql

from harness import Database, claim, place, raises, wait_until

PAUSED = "SELECT queue, paused FROM awa.queue_stats ORDER BY 1"


class Copy(Database):
    """A database of CREATE DATABASE ... TEMPLATE."""

    def __init__(self, source, name, admin):
        self.server, self.name, self.sessions = source.server, name, []
        self._conn = self._boot = None
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(source.name)))
        self.wait_served()


@pytest.fixture
def copy(db):
    """copy(source, name) copies a database; its worker is connected meanwhile."""
    made = []

    def make(source=db, name=None):
        source.close_sessions()
        with db.server.connect() as admin:
            made.append(Copy(source, name or f"{source.name}_copy", admin))
        return made[-1]

    yield make
    for database in made:
        database.close_sessions()
        database.check()
        database.drop()


def test_a_copy_starts_paused(db, copy):
    ids = db.insert(3)
    db.insert(1, queue="other")
    db.insert(1, queue="paused")
    db.execute("SELECT awa.pause_queue('paused', 'me')")
    (running,) = db.claim(max_jobs=1, deadline="1 hour")
    clone = copy()
    assert clone.rows(PAUSED) == [("default", True), ("other", True), ("paused", True)]
    assert clone.claim(max_jobs=5) == []
    assert clone.value("SELECT awa.claim_outcome()") == "paused"
    assert clone.column("SELECT id FROM awa.jobs WHERE queue = 'default' ORDER BY 1") == ids
    # Its source goes on.
    assert [j.job_id for j in db.claim(max_jobs=5)] == ids[1:]
    assert db.rows(PAUSED) == [("default", False), ("other", False), ("paused", True)]
    db.execute("SELECT awa.complete(%s)", running.receipt)


def test_new_queues_of_a_copy_are_paused(db, copy):
    db.insert(1)
    clone = copy()
    for make in ("insert_job('k', queue => 'n')", "prepare_queue('n')",
                 "configure_queue('n', '{\"priority\": 1}')"):
        queue = make.split("_")[0]
        clone.execute("SELECT awa." + make.replace("'n'", f"'{queue}'"))
        clone.insert(1, queue=queue)
        assert clone.claim(queue) == [], queue
    with clone.connect() as waiter:
        waiter.execute("SET awa.claim_wait_max = '100ms'")
        waiter.begin()
        assert waiter.value("CALL awa.wait_for_jobs('{insert,prepare}', '50 ms')") is False
        waiter.rollback_sql()
    assert all(paused for _, paused in clone.rows(PAUSED))


def test_resuming_starts_one_queue(db, copy):
    db.insert(2, queue="a")
    db.insert(2, queue="b")
    clone = copy()
    assert clone.value("SELECT awa.resume_queue('a')") is True
    assert clone.value("SELECT awa.resume_queue('a')") is False
    assert len(clone.claim("a", 5)) == 2
    assert clone.claim("b", 5) == []
    clone.insert(1, queue="new")
    assert clone.value("SELECT awa.resume_queue('new')") is True
    assert len(clone.claim("new")) == 1
    with raises("P0002"):
        clone.execute("SELECT awa.resume_queue('nobody used it')")
    # One that waits is woken by it.
    with clone.connect() as waiter:
        assert waiter.value("CALL awa.wait_for_jobs('{b}', '0')") is False
        clone.execute("SELECT awa.resume_queue('b')")
        assert waiter.value("CALL awa.wait_for_jobs('{b}', '5 s')") is True
    assert len(clone.claim("b", 5)) == 2


def test_a_resume_that_rolls_back_leaves_it_paused(db, copy):
    db.insert(1)
    clone = copy()
    clone.conn.begin()
    clone.execute("SELECT awa.resume_queue('default')")
    clone.conn.rollback_sql()
    assert clone.claim() == []
    assert clone.rows(PAUSED) == [("default", True)]


def test_a_copy_is_told_so(db, copy):
    """The one who makes it, and the log, say what is paused and how to go on."""
    said = []
    db.close_sessions()
    with db.server.connect() as admin:
        admin.add_notice_handler(lambda d: said.append((d.message_primary, d.message_hint)))
        admin.execute(f"CREATE DATABASE said TEMPLATE {db.name}")
        ((message, hint),) = said
        assert "paused" in message and "awa.resume_queue()" in hint
        db.server.wait_log(f'this database is a copy of database "{db.name}"', 10)
        assert "Call awa.resume_queue() for each queue" in db.server.log()
        # Nothing is said where there is nothing to say.
        admin.execute("CREATE DATABASE said_nothing")
        assert len(said) == 1
        for name in ("said", "said_nothing"):
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_copy_of_a_copy_starts_paused_again(db, copy):
    db.insert(2)
    first = copy(name=f"{db.name}_first")
    first.execute("SELECT awa.resume_queue('default')")
    second = copy(first, f"{db.name}_second")
    assert second.claim() == []
    assert len(first.claim(max_jobs=5)) == 2
    assert second.value("SELECT awa.resume_queue('default')") is True
    assert len(second.claim(max_jobs=5)) == 2


def test_attempts_of_the_source_are_lost_in_the_copy(db, copy):
    """Whoever works on them works for the source, where their receipts stay good."""
    db.insert(3)
    runtime = db.value("SELECT awa.register_runtime('r', 'heartbeat')")
    (lease,) = db.claim(max_jobs=1, deadline="1 hour")
    (owned,) = db.claim(max_jobs=1, runtime=runtime)
    clone = copy()
    for job in (lease, owned):
        clone.wait_state(job.job_id, "retryable")
        with raises("AW001"):
            clone.execute("SELECT awa.complete(%s)", job.receipt)
    clone.execute("SELECT awa.resume_queue('default')")
    (new,) = clone.claim(max_jobs=1)
    assert new.receipt > owned.receipt
    for job in (lease, owned):
        assert db.state(job.job_id) == "running"
        db.execute("SELECT awa.complete(%s)", job.receipt)


@pytest.fixture
def own(own_server):
    database = Database(own_server)
    yield database
    if own_server.running:
        database.close_sessions()
        database.check()


def test_a_copy_stays_one(own):
    """Paused and resumed queues are as they were after a restart and a crash; new ones paused."""
    own.insert(2, queue="a")
    own.insert(2, queue="b")
    own.close_sessions()
    with own.server.connect() as admin:
        clone = Copy(own, "clone", admin)
    clone.execute("SELECT awa.resume_queue('a')")
    for restart in (own.server.restart, own.server.crash):
        restart()
        clone.wait_served()
        assert len(clone.claim("a")) == 1
        assert clone.claim("b") == []
        clone.insert(1, queue=restart.__name__)
        assert clone.claim(restart.__name__) == []
    clone.execute("SELECT awa.rebuild()")
    assert clone.claim("b") == []
    clone.check()


def test_another_name_and_another_place_make_no_copy(own):
    own.insert(3)
    own.close_sessions()
    with own.server.connect() as admin:
        admin.execute(f"ALTER DATABASE {own.name} RENAME TO renamed")
        own.name = "renamed"
        own.wait_served()
        assert len(own.claim()) == 1
        own.close_sessions()
        admin.execute("SET allow_in_place_tablespaces = on")
        admin.execute("CREATE TABLESPACE elsewhere LOCATION ''")
        admin.execute("ALTER DATABASE renamed SET TABLESPACE elsewhere")
    own.wait_served()
    assert own.rows(PAUSED) == [("default", False)]
    assert len(own.claim()) == 1
    own.insert(1, queue="new")
    assert len(own.claim("new")) == 1


def test_a_promoted_standby_is_no_copy(own):
    own.insert(2)
    standby = own.server.make_standby().start()
    try:
        standby.promote()
        with standby.connect(own.name) as conn:
            wait_until(lambda: served(conn))
            assert len(claim(conn)) == 1
            assert conn.rows(PAUSED) == [("default", False)]
    finally:
        standby.destroy()


def test_a_restored_dump_is_no_copy(own):
    """Neither of another database of the same server, nor of a copy that was resumed."""
    own.insert(2)
    own.close_sessions()
    with own.server.connect() as admin:
        clone = Copy(own, "clone", admin)
    clone.execute("SELECT awa.resume_queue('default')")
    for source in (own, clone):
        restored = Database(own.server, extension=False)
        dump = f"{own.server.home}/{source.name}.dump"
        place.run([own.server.bin / "pg_dump", "-Fc", "-f", dump, "-d", source.conninfo()])
        place.run([own.server.bin / "pg_restore", "--exit-on-error", "-d", restored.conninfo(), dump])
        restored.wait_served()
        # What was restored reaches memory through a replay.
        wait_until(lambda: restored.value("SELECT sum(available) FROM awa.queue_stats") == 2)
        assert len(restored.claim(max_jobs=5)) == 2
        restored.insert(1, queue="new")
        assert len(restored.claim("new")) == 1
        restored.close_sessions()
        restored.check()


def test_a_template_with_the_extension_that_was_never_served_makes_no_copies(own):
    """template1 is not served: databases made from it have queues of their own."""
    with own.server.connect("template1") as conn:
        conn.execute("CREATE EXTENSION awa")
    with own.server.connect() as admin:
        admin.execute("CREATE DATABASE fresh")
    fresh = object.__new__(Copy)
    fresh.server, fresh.name, fresh.sessions = own.server, "fresh", []
    fresh._conn = fresh._boot = None
    fresh.wait_served()
    fresh.insert(1)
    assert len(fresh.claim()) == 1
    fresh.check()


def served(conn):
    try:
        conn.execute("SELECT * FROM awa.claim('served', 0)")
        return True
    except Exception as error:
        assert error.diag.sqlstate in ("AW003", "25006")
        return False
