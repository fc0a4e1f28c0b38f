"""The Python package awa-pg 0.6.9 as it is: it produces and reads here."""

import asyncio
import dataclasses
import json
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import asyncpg
import awa
import psycopg
import pytest
import sqlalchemy
from awa.bridge import insert_job, insert_job_sync
from sqlalchemy.ext.asyncio import create_async_engine

from harness import Background, raises

ODD = {"text": 'ü "quoted" \\ back, comma\nline\ttab __AWA_NULL__ \\N {} 日本', "n": 1.5, "none": None}


@dataclasses.dataclass
class SendEmail:
    to: str
    subject: str = "hello"


def url(db, user="postgres", scheme="postgresql"):
    return f"{scheme}://{user}@127.0.0.1:{db.server.port}/{db.name}"


@pytest.fixture(params=["Client", "AsyncClient"])
def client(db, request):
    """Both clients, driven alike: what a method of the asynchronous one gives is awaited."""
    with driven(request.param, url(db)) as client:
        yield client


@contextmanager
def driven(kind, where):
    loop = asyncio.new_event_loop()
    client = Driven(loop, Raw(loop, kind, where).client)
    try:
        yield client
    finally:
        client.close()
        loop.close()


class Raw:
    """The asynchronous client wants a running loop when it is made."""

    def __init__(self, loop, kind, where):
        async def make():
            return getattr(awa, kind)(where)

        self.client = loop.run_until_complete(make())


class Driven:
    def __init__(self, loop, target):
        self._loop, self._target = loop, target

    def __getattr__(self, name):
        method = getattr(self._target, name)

        def call(*args, **kwargs):
            async def run():
                result = method(*args, **kwargs)
                return await result if hasattr(result, "__await__") else result

            return self._loop.run_until_complete(run())

        return call if callable(method) else method

    @contextmanager
    def transaction(self):
        transaction = Driven(self._loop, self.__getattr__("transaction")())
        try:
            yield transaction
            transaction.commit()
        except BaseException:
            transaction.rollback()
            raise


@pytest.fixture
def producer(db):
    """A role that may produce to the queue mail, and nothing else."""
    name = f"producer_{db.name}"
    db.execute(f"CREATE ROLE {name} LOGIN")
    db.execute("SELECT awa.grant_access(%s, 'producer', '{mail}')", name)
    yield name
    # The client may keep sessions for a while, whose temporary tables are the role's.
    end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = %s"
    assert all(db.column(end, name))
    db.execute("SELECT awa.revoke_access(%s)", name)
    db.execute(f"DROP ROLE {name}")


def test_the_versions():
    assert (version("awa-pg"), version("awa-cli")) == ("0.6.9", "0.6.9")


# migrate()

CATALOG = """
    SELECT md5(string_agg(line, e'\\n' ORDER BY line)) FROM (
        SELECT pg_describe_object('pg_class'::regclass, oid, 0) || coalesce(relacl::text, '')
        FROM pg_class WHERE relnamespace = 'awa'::regnamespace
        UNION ALL SELECT oid::regprocedure || prosrc || coalesce(proacl::text, '')
        FROM pg_proc WHERE pronamespace = 'awa'::regnamespace
        UNION ALL SELECT version::text FROM awa.schema_version
    ) lines (line)
"""


def test_migrate_changes_nothing(db, client):
    db.insert()
    before = db.value(CATALOG)
    for _ in range(2):
        client.migrate()
    assert db.value(CATALOG) == before
    assert len(db.claim()) == 1


def test_many_migrate_at_once(db):
    def migrate():
        with driven("Client", url(db)) as client:
            client.migrate()

    before = db.value(CATALOG)
    for call in [Background(migrate) for _ in range(6)]:
        call.result()
    assert db.value(CATALOG) == before


# Producing


def test_insert(db, client):
    job = client.insert(SendEmail("ada@example.org"), queue="mail", priority=1, max_attempts=3,
                        tags=["a", "b"], metadata={"m": ODD["text"]})
    assert (job.kind, job.queue, str(job.state)) == ("send_email", "mail", "available")
    assert (job.priority, job.attempt, job.max_attempts, job.tags) == (1, 0, 3, ["a", "b"])
    assert job.args == {"to": "ada@example.org", "subject": "hello"}
    assert job.metadata == {"m": ODD["text"]} and job.errors == [] and job.progress is None
    (claimed,) = db.claim("mail")
    assert (claimed.job_id, claimed.kind, claimed.args) == (job.id, "send_email", job.args)
    assert (claimed.metadata, claimed.tags, claimed.priority) == (job.metadata, ["a", "b"], 1)


def test_insert_with_defaults(db, client):
    job = client.insert(ODD, kind="k")
    assert (job.queue, job.priority, job.max_attempts) == ("default", 2, 25)
    assert db.job(job.id).args == ODD


def test_scheduled(db, client):
    soon = client.insert({}, kind="k", run_at=datetime.now(UTC) + timedelta(days=1))
    assert str(soon.state) == "scheduled" and db.state(soon.id) == "scheduled"
    past = client.insert({}, kind="k", run_at=datetime.now(UTC) - timedelta(days=1))
    assert str(past.state) == "scheduled"
    db.wait_state(past.id, "available")
    assert [job.job_id for job in db.claim(max_jobs=5)] == [past.id]


def test_a_transaction_commits(db, client):
    db.execute("CREATE TABLE orders (id int)")
    with client.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES (1)")
        job = tx.insert({"order": 1}, kind="k")
        many = tx.insert_many([{"n": n} for n in range(10)], kind="k")
        assert tx.fetch_one("SELECT count(*) AS orders FROM orders")["orders"] == 1
        assert db.claim(max_jobs=20) == []
    assert db.value("SELECT count(*) FROM orders") == 1
    claimed = db.claim(max_jobs=20)
    assert [job.job_id for job in claimed] == [job.id, *[job.id for job in many]]
    assert [job.args["n"] for job in claimed[1:]] == list(range(10))


def test_a_transaction_rolls_back(db, client):
    db.execute("CREATE TABLE orders (id int)")
    with pytest.raises(ZeroDivisionError), client.transaction() as tx:
        tx.execute("INSERT INTO orders VALUES (1)")
        tx.insert({"order": 1}, kind="k")
        tx.insert_many([{"n": n} for n in range(10)], kind="k")
        raise ZeroDivisionError
    assert db.value("SELECT count(*) FROM orders") == 0
    assert db.value("SELECT count(*) FROM awa.jobs") == 0


def test_insert_many_copy(db, client):
    assert client.insert_many_copy([], kind="k") == []
    jobs = client.insert_many_copy([{"n": n, **ODD} for n in range(1000)], kind="k", queue="bulk",
                                   priority=3, tags=["a, b", 'c"d'], metadata={"m": "x,\ny"})
    assert len({job.id for job in jobs}) == 1000
    claimed = db.claim("bulk", 1000)
    assert [job.job_id for job in claimed] == [job.id for job in jobs]
    assert [job.args for job in claimed] == [{"n": n, **ODD} for n in range(1000)]
    assert {(tuple(job.tags), job.priority) for job in claimed} == {(("a, b", 'c"d'), 3)}


def test_insert_many_copy_later(db, client):
    jobs = client.insert_many_copy([{}] * 5, kind="k", run_at=datetime.now(UTC) + timedelta(days=1))
    assert {str(job.state) for job in jobs} == {"scheduled"}
    assert db.value("SELECT scheduled FROM awa.queue_stats") == 5


def test_insert_many_copy_skips_duplicates(db, client):
    """Of a key that is taken, and within the call."""
    options = {"kind": "k", "queue": "bulk", "unique_opts": {"by_args": True}}
    first = client.insert({"n": 1}, **options)
    jobs = client.insert_many_copy([{"n": n % 5} for n in range(10)], **options)
    assert [job.args["n"] for job in jobs] == [0, 2, 3, 4]
    assert first.id not in [job.id for job in jobs]
    assert db.count("bulk") == 5
    assert client.insert_many_copy([{"n": n} for n in range(5)], **options) == []


@pytest.mark.parametrize("options, same", [
    ({}, True),
    ({"by_args": True}, True),
    ({"by_queue": True}, False),
    ({"by_queue": True, "by_args": False}, False),
    ({"by_args": False}, True),
    ({"by_period": 3600}, True),
])
def test_unique(db, client, options, same):
    """In another queue it is the same key, unless the queue is part of it."""
    first = client.insert(ODD, kind="k", queue="a", unique_opts=options)
    with pytest.raises(awa.UniqueConflict, match="idx_awa_jobs_unique"):
        client.insert(ODD, kind="k", queue="a", unique_opts=options)
    if same:
        with pytest.raises(awa.UniqueConflict):
            client.insert(ODD, kind="k", queue="b", unique_opts=options)
    else:
        assert client.insert(ODD, kind="k", queue="b", unique_opts=options).id != first.id
    (job,) = db.claim("a")
    # Completed is among the states in which this client's jobs keep their keys.
    with pytest.raises(awa.UniqueConflict):
        client.insert(ODD, kind="k", queue="a", unique_opts=options)
    db.value("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
    assert client.insert(ODD, kind="k", queue="a", unique_opts=options).id != first.id


def test_a_duplicate_in_a_transaction(db, client):
    options = {"kind": "k", "unique_opts": {"by_args": True}}
    client.insert({}, **options)
    with pytest.raises(awa.UniqueConflict), client.transaction() as tx:
        tx.insert({"other": 1}, **options)
        tx.insert({}, **options)
    assert db.count() == 1


def test_keys_are_those_of_insert_job(db, client):
    """Whoever computes it."""
    args = {"b": [1, {"z": 1, "a": "ü"}], "a": None}
    job = client.insert(args, kind="k", queue="q", unique_opts={"by_queue": True})
    found = db.value(
        "SELECT awa.insert_job('k', %s, 'q', opts => '{\"unique_by\": [\"queue\", \"args\"]}')",
        psycopg.types.json.Jsonb(args),
    )
    assert found == job.id


def test_an_ordering_key(db, client):
    db.execute("SELECT awa.configure_queue('s', '{\"enqueue_shards\": 8}')")
    keys = [f"key {n % 8}" for n in range(32)]
    jobs = [client.insert({}, kind="k", queue="s", ordering_key=key) for key in keys]
    jobs += client.insert_many_copy([{}] * 4, kind="k", queue="s", ordering_key=keys[0])
    with client.transaction() as tx:
        jobs += tx.insert_many([{}] * 4, kind="k", queue="s", ordering_key=keys[0])
    shards = dict(db.rows(
        "SELECT position, shard FROM awa.ready_entries_0 JOIN awa.queue_lanes USING (lane_id)"
    ))
    of_key = {}
    for job, key in zip(jobs, keys + [keys[0]] * 8, strict=True):
        of_key.setdefault(key, set()).add(shards[job.id])
    assert all(len(seen) == 1 for seen in of_key.values())


@pytest.mark.parametrize("call, error", [
    ({"priority": 5}, awa.ValidationError),
    ({"max_attempts": 0}, awa.ValidationError),
    ({"max_attempts": 1001}, awa.ValidationError),
    ({"kind": "x" * 201}, awa.ValidationError),
    ({"queue": "x" * 201}, awa.ValidationError),
    ({"tags": ["t"] * 21}, awa.ValidationError),
])
def test_values_beyond_their_limits(db, client, call, error):
    with pytest.raises((error, awa.DatabaseError, ValueError)):
        client.insert({}, **{"kind": "k", **call})
    assert db.value("SELECT count(*) FROM awa.jobs") == 0


def test_long_queue_names(db, client):
    """Over 59 bytes, where a notification would fail."""
    job = client.insert({}, kind="k", queue="é" * 200)
    assert [found.job_id for found in db.claim("é" * 200)] == [job.id]


# Reading


def test_reading_jobs(db, client):
    with_error = client.insert({"n": 1}, kind="k", queue="q", max_attempts=1)
    (claimed,) = db.claim("q")
    assert str(client.get_job(with_error.id).state) == "running"
    db.value("SELECT awa.fail(%s, 'broken')", claimed.receipt)
    job = client.get_job(with_error.id)
    assert (str(job.state), job.attempt, job.args) == ("failed", 1, {"n": 1})
    assert job.errors[0]["error"] == "broken" and job.errors[0]["attempt"] == 1
    later = client.insert({"n": 2}, kind="l", queue="q", tags=["t"])
    assert [found.id for found in client.list_jobs()] == [later.id, with_error.id]
    assert [found.id for found in client.list_jobs(state="failed")] == [with_error.id]
    assert [found.id for found in client.list_jobs(kind="l", queue="q")] == [later.id]
    assert client.list_jobs(queue="r") == []
    dump = json.loads(client.dump_job(with_error.id))
    assert "broken" in json.dumps(dump) and str(with_error.id) in json.dumps(dump)
    with pytest.raises(awa.AwaError):
        client.get_job(5)


def test_queue_stats(db, client):
    client.insert_many_copy([{}] * 6, kind="k", queue="q")
    client.insert({}, kind="k", queue="q", run_at=datetime.now(UTC) + timedelta(days=1))
    one, two, three = db.claim("q", 3)
    db.execute("SELECT awa.complete(%s)", one.receipt)
    db.value("SELECT awa.fail(%s, 'x', terminal => true)", two.receipt)
    client.insert({}, kind="k", queue="r")
    client.pause_queue("r", "ada")
    q, r = client.queue_stats()
    assert (q.queue, q.total_queued, q.scheduled, q.available) == ("q", 5, 1, 3)
    assert (q.running, q.failed, q.completed_last_hour, q.paused) == (1, 1, 1, False)
    assert 0 <= q.lag_seconds < 60
    assert (r.queue, r.available, r.paused) == ("r", 1, True)


def test_pause_and_resume(db, client):
    client.insert({}, kind="k", queue="q")
    client.pause_queue("q", "ada")
    assert db.claim("q") == []
    assert db.row("SELECT paused, paused_by FROM awa.queue_meta") == (True, "ada")
    client.pause_queue("q")
    client.resume_queue("q")
    assert len(db.claim("q")) == 1
    client.resume_queue("nobody used it")


def test_what_else_is_asked(client):
    client.flush_admin_metadata()
    assert client.health_check().postgres_connected is True
    assert json.loads(client.storage_status())["state"] == "active"


def test_what_is_refused(db, client):
    """Changes that this client makes to the other system's tables: an error, and no change."""
    job = client.insert({}, kind="k", queue="q")
    for call in (client.cancel, client.retry):
        with pytest.raises(awa.AwaError):
            call(job.id)
    with pytest.raises(awa.AwaError):
        client.drain_queue("q")
    with pytest.raises(awa.AwaError):
        client.enqueue_many_copy([{}], kind="k", queue="q")
    assert db.state(job.id) == "available" and db.count("q") == 1


# The least a producer needs


def test_a_producer_without_other_privileges(db, producer):
    with driven("Client", url(db, producer)) as client:
        client.migrate()
        jobs = [client.insert({}, kind="k", queue="mail")]
        jobs.append(client.insert({}, kind="k", queue="mail", unique_opts={"by_args": True}))
        jobs += client.insert_many_copy([{}] * 3, kind="l", queue="mail")
        jobs += client.insert_many_copy([{"n": 1}] * 3, kind="l", queue="mail",
                                        unique_opts={"by_args": True})
        with client.transaction() as tx:
            jobs.append(tx.insert({}, kind="k", queue="mail"))
            jobs += tx.insert_many([{}] * 3, kind="k", queue="mail")
        for call in (
            lambda: client.insert({}, kind="k", queue="other"),
            lambda: client.insert_many_copy([{}], kind="k", queue="other"),
            lambda: client.list_jobs(),
            lambda: client.pause_queue("mail"),
        ):
            with pytest.raises(awa.AwaError, match="permission denied"):
                call()
    assert sorted(job.job_id for job in db.claim("mail", 100)) == sorted(job.id for job in jobs)
    assert db.count("other") == 0
    with psycopg.connect(url(db, producer)) as conn:
        assert insert_job_sync(conn, {}, kind="k", queue="mail")["state"] == "available"


# The bridge: jobs in the transactions of other drivers

SAYS = {"kind": "send_email", "queue": "mail", "state": "scheduled", "priority": 1}


def given(args=SendEmail("ada@example.org")):
    return (args,), {
        "queue": "mail", "priority": 1, "max_attempts": 3, "tags": ["a", "b"],
        "metadata": {"m": ODD["text"]}, "run_at": datetime.now(UTC) - timedelta(hours=1),
        "ordering_key": "order",
    }


def look(db, job):
    """That it is what was given, whichever driver brought it."""
    assert {key: job[key] for key in SAYS} == SAYS
    assert (job["attempt"], job["max_attempts"], list(job["tags"])) == (0, 3, ["a", "b"])
    db.wait_state(job["id"], "available")
    (claimed,) = db.claim("mail")
    assert (claimed.job_id, claimed.args["to"]) == (job["id"], "ada@example.org")
    assert claimed.metadata == {"m": ODD["text"]}


def test_bridge_psycopg(db):
    args, kwargs = given()
    with psycopg.connect(url(db)) as conn:
        with conn.transaction():
            job = insert_job_sync(conn, *args, **kwargs)
        with pytest.raises(ZeroDivisionError), conn.transaction():
            insert_job_sync(conn, {"n": 1}, kind="k")
            raise ZeroDivisionError
        plain = insert_job_sync(conn, {"n": 1}, kind="k")
        assert (plain["state"], plain["queue"], plain["tags"]) == ("available", "default", [])
    look(db, job)
    assert db.count() == 1


def test_bridge_psycopg_async(db):
    args, kwargs = given()

    async def run():
        async with await psycopg.AsyncConnection.connect(url(db)) as conn:
            async with conn.transaction():
                job = await insert_job(conn, *args, **kwargs)
            with pytest.raises(ZeroDivisionError):
                async with conn.transaction():
                    await insert_job(conn, {"n": 1}, kind="k")
                    raise ZeroDivisionError
            return job

    look(db, asyncio.run(run()))
    assert db.count() == 0


def test_bridge_asyncpg(db):
    args, kwargs = given()

    async def run():
        conn = await asyncpg.connect(url(db))
        try:
            async with conn.transaction():
                job = await insert_job(conn, *args, **kwargs)
            with pytest.raises(ZeroDivisionError):
                async with conn.transaction():
                    await insert_job(conn, {"n": 1}, kind="k")
                    raise ZeroDivisionError
            with pytest.raises(asyncpg.CheckViolationError):
                await insert_job(conn, {}, kind="k", priority=9)
            return job
        finally:
            await conn.close()

    look(db, asyncio.run(run()))
    assert db.count() == 0


def test_bridge_sqlalchemy(db):
    args, kwargs = given()
    engine = sqlalchemy.create_engine(url(db, scheme="postgresql+psycopg"))
    try:
        with engine.begin() as conn:
            job = insert_job_sync(conn, *args, **kwargs)
        with sqlalchemy.orm.Session(engine) as session, session.begin():
            insert_job_sync(session, {"n": 1}, kind="k")
        with pytest.raises(ZeroDivisionError), engine.begin() as conn:
            insert_job_sync(conn, {"n": 2}, kind="k")
            raise ZeroDivisionError
    finally:
        engine.dispose()
    look(db, job)
    assert db.count() == 1


def test_bridge_sqlalchemy_async(db):
    args, kwargs = given()

    async def run():
        engine = create_async_engine(url(db, scheme="postgresql+asyncpg"))
        try:
            async with engine.begin() as conn:
                job = await insert_job(conn, *args, **kwargs)
            with pytest.raises(ZeroDivisionError):
                async with engine.begin() as conn:
                    await insert_job(conn, {"n": 1}, kind="k")
                    raise ZeroDivisionError
            return job
        finally:
            await engine.dispose()

    look(db, asyncio.run(run()))
    assert db.count() == 0


def test_bridge_and_a_statement_that_fails(db):
    """The job goes with the rest of its transaction."""
    with psycopg.connect(url(db)) as conn:
        with raises("22012"), conn.transaction():
            insert_job_sync(conn, {}, kind="k")
            conn.execute("SELECT 1 / 0")
        with conn.transaction():
            insert_job_sync(conn, {}, kind="k", queue="q")
    assert db.count() == 0 and db.count("q") == 1
