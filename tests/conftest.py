"""Fixtures: a shared server for cheap tests, servers of their own for rough ones."""

import signal
import sys

import pytest
from psycopg import sql

from harness import Database, DebugPoints, Server
from harness.server import sweep


def pytest_configure(config):
    # A plain kill must run the exit handlers that stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def pytest_sessionstart(session):
    sweep()


@pytest.fixture(scope="session")
def server():
    """The shared server. Restart or break another one."""
    server = Server(name="shared").init().start()
    yield server
    server.destroy()


@pytest.fixture
def new_server():
    """Makes servers that live as long as the test: new_server(settings, durable=True)."""
    made = []

    def make(settings=None, durable=False, start=True, **kwargs):
        server = Server(settings, durable=durable, **kwargs).init()
        made.append(server)
        return server.start() if start else server

    yield make
    for server in reversed(made):
        server.destroy()


@pytest.fixture
def own_server(new_server):
    """A server of the test's own, for restarts and crashes."""
    return new_server()


def use(database, request):
    """Yields the database; at the end every invariant must hold."""
    yield database
    failed = getattr(request.node, "failed", False)
    if database.server.destroyed or not database.server.running:
        return
    try:
        # Sessions first: an open transaction of the test would be a finding.
        database.close_sessions()
        if not failed:
            database.check()
    finally:
        database.close_sessions()
        database.drop()


@pytest.fixture
def db(server, request):
    """A fresh database with the extension; awa.check() must hold when the test ends."""
    yield from use(Database(server), request)


@pytest.fixture
def own_db(own_server, request):
    """The same on a server of the test's own."""
    yield from use(Database(own_server), request)


@pytest.fixture
def role(db):
    """role(profile, queues) is a session of a new role with that profile."""
    names = []

    def make(profile=None, queues=None, name=None, attributes=""):
        name = name or f"role{len(names)}_{db.name}"
        names.append(name)
        db.conn.execute(sql.SQL("CREATE ROLE {} LOGIN {}").format(
            sql.Identifier(name), sql.SQL(attributes)))
        if profile:
            db.execute("SELECT awa.grant_access(%s, %s, %s)", name, profile, queues)
        conn = db.connect(user=name)
        conn.name = name
        return conn

    yield make
    db.close_sessions()
    with db.server.connect(db.name) as conn:
        for name in names:
            quoted = sql.Identifier(name)
            conn.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(quoted))
            conn.execute(sql.SQL("DROP ROLE {}").format(quoted))


@pytest.fixture
def rescue_by_hand(new_server, request):
    """Makes databases whose worker looks for lost attempts once in ten minutes, unless it is
    told of one: rescue_by_hand(setting=value)."""
    made = []

    def make(**settings):
        given = {f"awa.{name}": value for name, value in settings.items()}
        db = Database(new_server({"awa.rescue_interval": "10 min"} | given))
        made.append(db)
        return db

    yield make
    for db in made:
        for _ in use(db, request):
            pass


@pytest.fixture
def debug(request):
    """debug(database) gives its debug points."""
    return DebugPoints


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and report.failed:
        item.failed = True
        for name in ("server", "own_server"):
            server = getattr(item, "funcargs", {}).get(name)
            if server is not None:
                report.sections.append((f"log of {name}", server.log()[-6000:]))
    return report
