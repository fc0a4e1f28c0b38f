"""A statement is interrupted in every place where it can be, and nothing is lost.

Each act of a producer, a worker or an operator is stopped in each of its windows: at a
debug point, or where it waits for a lock. There its backend is cancelled, runs into its
timeout, is terminated, or loses its client. Then another session does the same, and all
that comes after works as if the first one had never been there.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import socket
import time
from collections.abc import Callable

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness import (
    Background,
    Database,
    DebugPoints,
    Server,
    kill_backend,
    wait_until,
    waits_for_lock,
)
from harness.session import alive

SEGMENTS = 16
# A point where the server holds interrupts back: the transaction has committed.
LATE = "commit_before_callback"
# A waiter looks up every second by itself; who is faster was woken.
WOKEN = 0.8
# Producers that a rebuild believes to be at work are waited for five seconds.
QUICK = 2.0
TIMEOUT = "60ms"

OPEN = "scheduled + available + running + retryable"

numbers = itertools.count(1)


@dataclasses.dataclass
class Act:
    """A statement, and where it stops."""

    sql: str
    arguments: Callable
    # The windows: names of debug points, `lock` and a table, `blocked`, `idle`, `woken`.
    stops: tuple
    # Jobs in the queue before, and whether they have been claimed.
    jobs: int = 0
    claimed: bool = False
    columns: dict = dataclasses.field(default_factory=dict)
    # What it comes to when it commits: new jobs, jobs that fail, jobs that wait long.
    adds: int = 0
    fails: int = 0
    parks: int = 0
    # Another session's transaction that it waits for.
    blocker: Callable | None = None
    # Whether it may run in a transaction that has written.
    in_block: bool = True


def queue(case):
    return (case.queue,)


def receipts(case):
    return (case.receipts,)


def first(case):
    return (case.receipts[0],)


def many(case):
    """A lane that is there, over several chunks, and then a new one."""
    jobs = [{"kind": "k", "queue": case.queue}] * 1100
    jobs += [{"kind": "k", "queue": case.queue, "priority": 1}] * 20
    return (Jsonb(jobs),)


INSERT = "SELECT awa.insert_job('k', queue => %s)"
MARK = "SELECT awa.insert_job('k', queue => %s, priority => 4)"
UNIQUE = "SELECT awa.insert_job('k', queue => %s, unique_key => %s)"
WRITTEN = ("enqueue_begun", "enqueue_granted", "enqueue_written", "enqueue_ended")
POPPED = ("claim_popped", "claim_read", "claim_written", "claim_keys_moved")
CLOSED = ("close_taken", "close_written", "close_decided")
AGAIN = ("close_taken", "close_planned", "close_written", "close_decided")
MOVES = {"opts": {"unique_states": ["available", "scheduled"]}}

ACTS = {
    # Producers
    "insert": Act(
        INSERT, queue, (*WRITTEN, "enqueue_lane_written", LATE, "lock ready_entries",
                        "lock queues", "lock queue_lanes"), adds=1,
    ),
    "insert many": Act(
        "SELECT count(*) FROM awa.insert_jobs(%s)", many,
        (*WRITTEN, "enqueue_lane_written", LATE, "lock queue_lanes"), jobs=1, adds=1120,
    ),
    "insert deferred": Act(
        "SELECT awa.insert_job('k', queue => %s, run_at => clock_timestamp() + '100 ms')", queue,
        ("enqueue_begun", "defer_noted", "enqueue_written", LATE, "lock deferred_jobs"), adds=1,
    ),
    "insert unique": Act(
        UNIQUE, lambda case: (case.queue, case.queue),
        ("enqueue_key_taken", "enqueue_granted", "enqueue_written", LATE, "blocked",
         "lock job_unique_claims"),
        adds=1, blocker=lambda case, conn: conn.execute(UNIQUE, (case.queue, case.queue)),
    ),
    # Claimers
    "claim": Act(
        "SELECT job_id FROM awa.claim(%s, 10)", queue,
        (*POPPED[:3], LATE, "lock ready_entries", "lock lease_claim_batches"), jobs=3,
    ),
    "claim keys": Act(
        "SELECT job_id FROM awa.claim(%s, 10)", queue,
        (*POPPED, "lock job_unique_claims"), jobs=2, columns=MOVES,
    ),
    "claim from": Act(
        "SELECT job_id FROM awa.claim_from(ARRAY[%s, 'none'], 10)", queue, POPPED[:3], jobs=3,
    ),
    "claim wait": Act(
        "SELECT job_id FROM awa.claim(%s, 10, wait => '600 ms')", queue,
        ("idle", "wait_started", "woken", "lock queues"),
    ),
    "wait for jobs": Act(
        "CALL awa.wait_for_jobs(ARRAY[%s], '20 s')", queue,
        ("idle", "wait_started", "woken", "lock queues"), in_block=False,
    ),
    # Closers
    "complete": Act(
        "SELECT awa.complete(%s)", first, (*CLOSED, LATE, "blocked", "lock lease_claim_closures"),
        jobs=2, claimed=True,
        blocker=lambda case, conn: conn.execute("SELECT awa.complete(%s)", first(case)),
    ),
    "complete with result": Act(
        "SELECT awa.complete(%s, '{\"r\": 1}')", first, ("close_taken", "lock lease_claim_closures"),
        jobs=2, claimed=True,
    ),
    "complete many": Act(
        "SELECT count(*) FROM awa.complete_many(%s)", receipts, (*CLOSED, LATE, "blocked"),
        jobs=3, claimed=True,
        blocker=lambda case, conn: conn.execute(
            "SELECT awa.complete(%s)", (case.receipts[-1],)
        ),
    ),
    "complete keys": Act(
        "SELECT count(*) FROM awa.complete_many(%s)", receipts,
        ("close_taken", "close_decided", "lock job_unique_claims"),
        jobs=2, claimed=True, columns={"opts": {}},
    ),
    "fail short": Act(
        "SELECT awa.fail(%s, 'x', '20 ms')", first, (*AGAIN, LATE), jobs=2, claimed=True,
    ),
    "fail long": Act(
        "SELECT awa.fail(%s, 'x', '1 h')", first,
        (*AGAIN, "defer_noted", LATE, "lock deferred_jobs"), jobs=2, claimed=True, parks=1,
    ),
    "fail terminal": Act(
        "SELECT awa.fail(%s, 'x', terminal => true)", first, (*AGAIN, LATE, "lock done_entries"),
        jobs=2, claimed=True, fails=1,
    ),
    "release": Act(
        "SELECT awa.release(%s)", receipts, (*AGAIN, LATE, "blocked"), jobs=3, claimed=True,
        blocker=lambda case, conn: conn.execute(
            "SELECT awa.complete(%s)", (case.receipts[-1],)
        ),
    ),
    "extend": Act(
        "SELECT count(*) FROM awa.extend(%s, '1 min')", receipts, ("blocked",),
        jobs=2, claimed=True,
        blocker=lambda case, conn: conn.execute(
            "SELECT awa.complete(%s)", (case.receipts[-1],)
        ),
    ),
    "complete and claim": Act(
        "SELECT job_id FROM awa.complete_and_claim(%s, %s)",
        lambda case: (case.receipts[:1], case.queue),
        (*CLOSED, *POPPED[:3], LATE), jobs=3, claimed=True,
    ),
    # Operators
    "pause": Act("SELECT awa.pause_queue(%s)", queue, ("lock queues", LATE), jobs=1),
    "prepare": Act("SELECT awa.prepare_queue(%s)", queue, ("lock queues", LATE)),
    "queue stats": Act(
        "SELECT count(*) FROM awa.queue_stats WHERE queue = %s", queue, ("lock queues",), jobs=1,
    ),
    "check": Act(
        "SELECT bool_and(ok) FROM awa.check() WHERE %s <> ''", queue,
        ("check_copied", "lock ready_entries"), jobs=1, in_block=False,
    ),
}

INTERRUPTS = ["cancel", "timeout", "savepoint", "terminate", "gone", "gone and noticed"]


def interrupts(act, stop):
    if stop == LATE:
        # Committed is committed: only that it is so has to be shown.
        return ["cancel", "terminate", "gone"]
    return [how for how in INTERRUPTS if how != "savepoint" or act.in_block]


@pytest.fixture(scope="module")
def server():
    server = Server(name="interrupts").init()
    del server.settings["awa.rotate_interval"]  # to be changed at run time
    server.start()
    server.reload(awa__rotate_interval="1h")
    yield server
    server.destroy()


class Room:
    """A database for many tests; another one after a failure, and before it is slow."""

    USES = 20

    def __init__(self, server):
        self.server = server
        self.database = self.points = None
        self.uses = 0

    def enter(self):
        self.uses += 1
        if self.uses > self.USES:
            self.leave()
        if self.database is None:
            self.uses = 1
            self.database = Database(self.server)
            self.points = DebugPoints(self.database)
        return self.database

    def leave(self):
        database, self.database = self.database, None
        if database is not None:
            database.close_sessions()
            database.drop()


@pytest.fixture(scope="module")
def room(server):
    room = Room(server)
    yield room
    room.leave()


@pytest.fixture
def db(room, request):
    database = room.enter()
    yield database
    if room.database is None:
        return
    if getattr(request.node, "failed", False):
        room.leave()
        return
    try:
        database.check()
    except BaseException:
        room.leave()
        raise


@pytest.fixture
def points(db, room):
    return room.points


class Case:
    """One act, its queue and its session."""

    def __init__(self, db, points, act):
        self.db, self.points, self.act = db, points, act
        self.queue = f"q{next(numbers)}"
        self.total = act.jobs
        self.ids, self.receipts = [], []
        if act.jobs:
            jobs = [
                {"kind": "k", "queue": self.queue, "args": {"n": n}}
                | (act.columns and {"unique_key": f"{self.queue} {n}"} | act.columns)
                for n in range(act.jobs)
            ]
            self.ids = db.column(
                "SELECT job_id FROM awa.insert_jobs(%s) ORDER BY ord", Jsonb(jobs)
            )
        if act.claimed:
            # One stays ready, for whoever claims.
            taken = db.claim(self.queue, max(1, act.jobs - 1))
            self.receipts = [job.receipt for job in taken]
        self.conn = db.server.connect(db.name)
        self.arguments = act.arguments(self)

    def run(self, conn):
        return conn.rows(self.act.sql, *self.arguments)

    @contextlib.contextmanager
    def stopped(self, stop):
        """The act in the background, in its window; on the way out it may go on."""
        db, pid = self.db, self.conn.pid
        with contextlib.ExitStack() as stack:
            if stop == "blocked" or stop.startswith("lock "):
                other = stack.enter_context(contextlib.closing(db.server.connect(db.name)))
                other.begin()
                if stop == "blocked":
                    self.act.blocker(self, other)
                else:
                    other.execute("SET lock_timeout = '5s'")
                    other.execute(f"LOCK TABLE {tables(stop.removeprefix('lock '))}")
                is_there = functools.partial(waits_for_lock, db.conn, pid)
            elif stop in ("idle", "woken"):
                is_there = functools.partial(is_idle, db, pid)
            else:
                stack.enter_context(self.points.at(stop))
                is_there = functools.partial(self.points.waiting, stop)
            call = Background(self.run, self.conn)
            if stop == "woken":
                wait_until(lambda: call.done or is_there())
                # Not before: a latch may be set for nothing.
                stack.enter_context(self.points.at("wait_ended"))
                is_there = functools.partial(self.points.waiting, "wait_ended")
                self.ids += db.insert(queue=self.queue)
                self.total += 1
            wait_until(
                lambda: call.done or is_there(), what=f"{self.act.sql} stopped at {stop}"
            )
            yield call

    def interrupt(self, stop, how):
        """What became of it: None when it did not commit, else whether it did."""
        conn, pid = self.conn, self.conn.pid
        if how == "timeout":
            conn.execute(f"SET statement_timeout = '{TIMEOUT}'")
        if how == "gone and noticed":
            conn.execute("SET client_connection_check_interval = '10ms'")
        if how == "savepoint" or (how == "terminate" and self.act.in_block and stop != LATE):
            conn.begin()
            if not stop.startswith("lock "):  # it would hold what is to be waited for
                # In a lane of its own, so that the act makes one where that is its window.
                conn.execute(MARK, (self.queue,))
                self.total += how == "savepoint"
            conn.execute("SAVEPOINT s")
        with self.stopped(stop) as call:
            if how in ("cancel", "savepoint"):
                self.db.execute("SELECT pg_cancel_backend(%s)", pid)
            elif how == "terminate":
                self.db.execute("SELECT pg_terminate_backend(%s)", pid)
            elif how.startswith("gone"):
                hang_up(conn)
            if stop == LATE:
                # Never in between.
                assert self.points.waiting(LATE) and alive(pid)
            elif how != "gone":
                # While the window is still closed to it.
                end(call, how)
                if how == "gone and noticed":
                    wait_until(lambda: not alive(pid), what=f"the end of backend {pid}")
        if how == "gone":
            with pytest.raises(psycopg.OperationalError):
                call.result()
        elif stop == LATE:
            try:
                call.result()
            except psycopg.errors.AdminShutdown:
                assert how == "terminate"
        if how in ("gone", "gone and noticed", "terminate"):
            wait_until(lambda: not alive(pid), what=f"the end of backend {pid}")

    def drain(self):
        """Completes every job of the queue, each of them once."""
        db, seen = self.db, set()
        if "pause" in self.act.sql:
            db.execute("SELECT awa.resume_queue(%s)", self.queue)

        def step():
            running = self.stats("running", 0) and db.rows(
                "SELECT id, run_lease FROM awa.jobs WHERE queue = %s AND state = 'running'",
                self.queue,
            ) or []
            got = [(job.job_id, job.receipt) for job in db.claim(self.queue, 10_000)]
            for job_id, _ in running + got:
                assert job_id not in seen, f"job {job_id} was delivered again"
                seen.add(job_id)
            closed = db.rows(
                "SELECT completed FROM awa.complete_many(%s)", [r for _, r in running + got]
            )
            assert all(completed for completed, in closed)
            return self.left() == 0

        wait_until(step, 10, what=lambda: f"{self.queue} to be empty: {self.left()} are left")

    def left(self):
        return self.stats(OPEN, 0) - self.act.parks

    def count(self):
        return self.stats(f"{OPEN} + completed_total + failed_total", 0)

    def stats(self, expression, default=None):
        found = self.db.column(
            f"SELECT {expression} FROM awa.queue_stats WHERE queue = %s", self.queue
        )
        return found[0] if found else default


def tables(name):
    if name in ("ready_entries", "lease_claim_batches", "lease_claim_closures"):
        return ", ".join(f"awa.{name}_{segment}" for segment in range(SEGMENTS))
    return f"awa.{name}"


def is_idle(db, pid):
    """Whether the backend waits in a statement for its latch."""
    return db.value(
        "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = %s AND state = 'active'"
        " AND wait_event_type = 'Extension'", pid,
    )


def hang_up(conn):
    """The client is gone without a word."""
    with socket.socket(fileno=os.dup(conn.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


def end(call, how):
    """The statement ends as it was told to."""
    try:
        call.result(10)
    except psycopg.Error as error:
        wanted = {
            "cancel": ("57014",), "savepoint": ("57014",), "timeout": ("57014",),
            "terminate": ("57P01",), "gone and noticed": (None,),
        }[how]
        assert error.diag.sqlstate in wanted, f"{error.diag.sqlstate}: {error}"
        return
    raise AssertionError(f"{how} did not end the statement")


def assert_wakes(db, name):
    """The next job wakes the next waiter: nobody dead stands before it."""
    with db.server.connect(db.name) as waiter:
        call = Background(waiter.value, "CALL awa.wait_for_jobs(ARRAY[%s], '20 s')", name)
        wait_until(lambda: is_idle(db, waiter.pid))
        db.insert(queue=name)
        began = time.monotonic()
        assert call.result() is True
        assert time.monotonic() - began < WOKEN
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in db.claim(name, 10)])


def assert_rebuilds(db):
    """No writer is believed to be at work."""
    began = time.monotonic()
    db.execute("SELECT awa.rebuild()")
    assert time.monotonic() - began < QUICK


@pytest.mark.parametrize(
    "name, stop",
    [
        pytest.param(name, stop, id=f"{name}-{stop}".replace(" ", "_"))
        for name, act in ACTS.items()
        for stop in act.stops
    ],
)
def test_interrupted(db, points, name, stop):
    act = ACTS[name]
    for how in interrupts(act, stop):
        try:
            case = Case(db, points, act)
            interrupt(case, stop, how)
            if "wait" in act.sql:
                assert_wakes(db, case.queue)
        except BaseException as error:
            error.add_note(f"the interrupt: {how}")
            raise
    assert_wakes(db, case.queue)
    assert_rebuilds(db)


def interrupt(case, stop, how):
    act, before = case.act, case.count()
    case.interrupt(stop, how)
    if how == "savepoint":
        case.conn.execute("ROLLBACK TO s")
        case.run(case.conn)
        case.conn.commit_sql()
        case.total += act.adds
        committed = True
    elif stop == LATE:
        case.total += act.adds
        committed = True
    else:
        # Half of it cannot be there.
        now = case.count()
        committed = how == "gone" and now != before + (stop == "woken")
        if committed:
            assert now == before + act.adds
            case.total += act.adds
    if not committed:
        redo(case, how)
    case.conn.close()
    case.drain()
    assert case.stats("completed_total + failed_total", 0) == case.total - act.parks
    assert case.stats("failed_total", 0) == act.fails


def redo(case, how):
    """Another session does the same, and sees nothing of the first one."""
    act, db = case.act, case.db
    if "wait" in act.sql and not case.stats("available", 0):
        case.total += 1
        case.ids = db.insert(queue=case.queue)
    try:
        found = case.run(db.conn)
    except psycopg.Error as error:
        # Without its client the statement went on, and has ended what it was about.
        if how == "gone" and error.diag.sqlstate == "AW001":
            return
        raise
    case.total += act.adds
    if act.sql.startswith("SELECT job_id") and how != "gone":
        assert [job_id for job_id, in found] == case.ids[len(case.receipts):]


# Those who wait


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@pytest.mark.parametrize(
    "sql", ["CALL awa.wait_for_jobs(ARRAY[%s], '20 s')", "SELECT job_id FROM awa.claim(%s, wait => '2 s')"],
    ids=["wait_for_jobs", "claim"],
)
def test_woken_but_ended_before_it_got_the_job(db, points, sql, how):
    """The one job wakes one waiter; when that one ends, the next one hears of it."""
    name = f"q{next(numbers)}"
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(contextlib.closing(db.server.connect(db.name))) for _ in range(2)
        )
        one = Background(first.rows, sql, name)
        wait_until(lambda: is_idle(db, first.pid))
        two = Background(second.value, "CALL awa.wait_for_jobs(ARRAY[%s], '20 s')", name)
        wait_until(lambda: is_idle(db, second.pid))
        # Not before: a latch may be set for nothing.
        armed = stack.enter_context(points.at("wait_ended"))
        began = time.monotonic()
        job, = db.insert(queue=name)
        armed.wait()
        db.execute(f"SELECT pg_{how}_backend(%s)", first.pid)
        end(one, how)
        armed.release()
        assert two.result() is True
        assert time.monotonic() - began < WOKEN
    assert [got.job_id for got in db.claim(name)] == [job]


# Maintenance, by hand and by the worker


@pytest.fixture
def quiet(db):
    """The worker naps, so that what is due is left to us."""
    @contextlib.contextmanager
    def quiet():
        db.server.reload(awa__debug_step="nap")
        wait_until(lambda: "debug" in doing(db), what="the worker to nap")
        # It sleeps on until it is cancelled; our own calls shall not.
        db.server.reload(awa__debug_step=None)
        wait_until(lambda: not db.value("SHOW awa.debug_step"))
        try:
            yield
        finally:
            db.execute("SELECT pg_cancel_backend(%s)", worker(db))
            wait_until(lambda: "debug" not in doing(db), what="the worker to be awake")
    return quiet


WORKER = "FROM pg_stat_activity WHERE backend_type = 'awa worker' AND datname = current_database()"


def worker(db):
    found = db.column(f"SELECT pid {WORKER}")
    return found[0] if found else None


def doing(db):
    return " ".join(db.column(f"SELECT coalesce(query, '') {WORKER} AND state = 'active'"))


def completed(db, name):
    return db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = %s", name)


MAINTAIN = "SELECT sum(did)::bigint FROM awa.maintain() WHERE step = %s"
STEPS = [
    ("promote_taken", "promote"), ("enqueue_granted", "promote"), ("promote", "promote"),
    ("close_decided", "rescue_deadline"), ("rescue_deadline", "rescue_deadline"),
    ("rotate", "rotate"), ("list", "list"), ("truncate_locked", "truncate"),
    ("truncate", "truncate"),
]


def make_due(db, step):
    """Work for a step, and what tells that it has been done. No segment is kept by it."""
    name = f"q{next(numbers)}"
    if step == "promote":
        jobs = [{"kind": "k", "queue": name, "run_at": soon(db, 50)}] * 2
        ids = sorted(db.column("SELECT job_id FROM awa.insert_jobs(%s)", Jsonb(jobs)))
        wait_until(lambda: db.value("SELECT clock_timestamp() > run_at FROM awa.get_job(%s)", ids[0]))
        found = []

        def promoted():
            got = db.claim(name, 10)
            db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in got])
            found.extend(job.job_id for job in got)
            return sorted(found) == ids

        return promoted
    if step == "rescue_deadline":
        db.insert(queue=name, max_attempts=1)
        job, = db.claim(name, deadline="20 ms")
        wait_until(lambda: db.value("SELECT clock_timestamp() > %s", job.deadline_at))
        return lambda: db.state(job.job_id) == "failed"
    db.insert(30, queue=name)
    receipts = [job.receipt for job in db.claim(name, 30)]
    db.rows("SELECT * FROM awa.complete_many(%s)", receipts)
    return lambda: completed(db, name) == 30


def soon(db, millis):
    return db.value("SELECT (clock_timestamp() + %s * interval '1 ms')::text", millis)


def reach(conn, points, point, step):
    """A pass that is at the point. Any snapshot of others puts a truncation off."""

    def reached():
        call = Background(conn.value, MAINTAIN, step)
        wait_until(lambda: call.done or points.waiting(point))
        return None if call.done and call.result() == 0 else call

    return wait_until(reached, what=f"{step} at {point}")


@pytest.mark.parametrize("how", ["cancel", "timeout", "terminate", "gone and noticed"])
@pytest.mark.parametrize("point, step", STEPS)
def test_maintain_interrupted(db, points, quiet, point, step, how):
    with quiet(), contextlib.closing(db.server.connect(db.name)) as conn:
        pid, done = conn.pid, make_due(db, step)
        if step in ("list", "truncate"):
            # Only what was sealed (and listed) by an earlier transaction is theirs.
            db.value(MAINTAIN, "rotate")
        if step == "truncate":
            db.value(MAINTAIN, "list")
        if how == "timeout":
            conn.execute("SET statement_timeout = '300ms'")
        if how == "gone and noticed":
            conn.execute("SET client_connection_check_interval = '10ms'")
        with points.at(point) as armed:
            call = reach(conn, points, point, step)
            if how == "cancel":
                db.execute("SELECT pg_cancel_backend(%s)", pid)
            elif how == "terminate":
                db.execute("SELECT pg_terminate_backend(%s)", pid)
            elif how == "gone and noticed":
                hang_up(conn)
            end(call, how)
            if how in ("terminate", "gone and noticed"):
                wait_until(lambda: not alive(pid))
            armed.release()
        # A lost attempt that was looked at is looked at again after a second.
        wait_until(lambda: db.value(MAINTAIN, step), 3, what=f"{step} to be done")
        assert done()
        # Nothing is left locked, or in the way.
        assert_usable(db)
    assert_rebuilds(db)


def assert_usable(db):
    name = f"q{next(numbers)}"
    ids = db.insert(3, queue=name)
    jobs = db.claim(name, 10)
    assert [job.job_id for job in jobs] == ids
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs])
    assert completed(db, name) == 3


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@pytest.mark.parametrize("point, step", STEPS + [("rebuild_begun", "replay"), ("replay", "replay")])
def test_worker_interrupted(room, db, points, point, step, how):
    """The worker, or the next one, does what this one did not get to."""
    turns = step in ("rotate", "list", "truncate")
    db.server.reload(awa__rotate_interval="100ms" if turns else "1h")
    try:
        with contextlib.ExitStack() as stack:
            armed = stack.enter_context(points.at(point))
            pid, other = worker(db), stack.enter_context(
                contextlib.closing(db.server.connect(db.name))
            )
            if step == "replay":
                db.insert(queue=(name := f"q{next(numbers)}"))
                call = Background(db.execute, "SELECT awa.rebuild()")
                done = lambda: call.done  # noqa: E731
            else:
                done = make_due(db, step)
            armed.wait()
            other.execute(f"SELECT pg_{how}_backend(%s)", (pid,))
            if how == "terminate":
                wait_until(lambda: not alive(pid))
            if turns:
                # Others go on meanwhile; at the other points they would stop.
                assert_usable(db)
        wait_until(done, 15, what=f"{step} by the next worker")
        if step == "replay":
            db.rows("SELECT * FROM awa.complete_many(%s)", [db.claim(name)[0].receipt])
        assert_usable(db)
    finally:
        db.server.reload(awa__rotate_interval="1h")
    wait_until(lambda: worker(db))
    assert_rebuilds(db)
    if how == "terminate":
        # The launcher has less and less patience with the worker of a database.
        db.check()
        room.leave()


# The whole server goes down with one of its backends


@pytest.fixture(scope="module")
def fragile():
    server = Server({"awa.heartbeat_staleness": "1s"}, name="fragile", durable=True).init().start()
    yield Room(server)
    server.destroy()


KILLS = [
    ("insert", "enqueue_written"), ("insert", LATE), ("insert many", "enqueue_lane_written"),
    ("insert deferred", "defer_noted"), ("insert unique", "enqueue_key_taken"),
    ("claim", "claim_written"), ("claim", LATE), ("wait for jobs", "idle"),
    ("complete many", "close_decided"), ("complete", LATE), ("fail long", "close_written"),
    ("complete and claim", "claim_popped"),
]


@pytest.mark.parametrize("name, stop", KILLS)
def test_killed(fragile, name, stop):
    act, db = ACTS[name], fragile.enter()
    points = DebugPoints(db)
    case = Case(db, points, act)
    # A commit that waits for its flush: the claims before it are on disk too.
    db.insert(queue="flush")
    log = len(db.server.log())
    with contextlib.suppress(psycopg.OperationalError), case.stopped(stop) as call:
        kill_backend(case.conn.pid)
    with pytest.raises(psycopg.OperationalError):
        call.result()
    db.server.wait_log("database system is ready to accept connections", since=log)
    db.close_sessions()
    db.server.boots += 1
    db.wait_served()
    # A claim that was not flushed is forgotten, and its jobs are ready again.
    if stop == LATE:
        case.total += act.adds
        if name == "complete":
            assert db.state(case.ids[0]) == "completed"
    else:
        redo(case, "kill")
    case.drain()
    assert case.stats("completed_total + failed_total", 0) == case.total - act.parks
    assert_wakes(db, case.queue)
    assert_rebuilds(db)
    db.check()
    assert_usable(db)


# Where a server has little room, a backlog is read back from its rows


def test_claim_of_a_cold_chunk(new_server):
    db = Database(new_server({"awa.max_chunks": 64}))
    points, name = DebugPoints(db), f"q{next(numbers)}"
    sql = "SELECT job_id, receipt FROM awa.claim(%s, 5000)"
    ids = [job_id for _ in range(9) for job_id in db.insert(10_000, queue=name)]
    got = []

    def finish(rows):
        # A chunk with running jobs does not get cold.
        got.extend(job_id for job_id, _ in rows)
        db.rows("SELECT * FROM awa.complete_many(%s)", [receipt for _, receipt in rows])

    for how in ["cancel", "terminate", "gone"]:
        conn = db.connect()
        pid = conn.pid
        with points.at("claim_cold_read"):
            while True:
                call = Background(conn.rows, sql, name)
                wait_until(lambda: call.done or points.waiting("claim_cold_read"))
                if not call.done:
                    break
                finish(call.result())
                assert len(got) < len(ids), "no chunk is cold"
            if how == "gone":
                hang_up(conn)
            else:
                db.execute(f"SELECT pg_{how}_backend(%s)", pid)
                end(call, how)
        with contextlib.suppress(psycopg.Error):
            call.result()
        if how != "cancel":
            wait_until(lambda: not alive(pid))
        # An answer larger than the buffer finds, before the commit, that nobody is there.
        assert db.value("SELECT running FROM awa.queue_stats WHERE queue = %s", name) == 0

    def drained():
        finish(db.rows(sql, name))
        return len(got) == len(ids)

    # Jobs whose claims were rolled back three times in a row come a second later.
    wait_until(drained, what="the delayed jobs")
    assert sorted(got) == sorted(ids)
    assert_wakes(db, name)
    assert_rebuilds(db)
    db.check()


@pytest.mark.parametrize("how", ["cancel", "timeout", "terminate", "gone and noticed"])
def test_rebuild_interrupted(db, points, how):
    """Who asked for a rebuild goes; the rebuild itself is the worker's."""
    with contextlib.closing(db.server.connect(db.name)) as conn:
        if how == "timeout":
            conn.execute("SET statement_timeout = '200ms'")
        if how == "gone and noticed":
            conn.execute("SET client_connection_check_interval = '10ms'")
        pid = conn.pid
        with points.at("rebuild_begun") as armed:
            call = Background(conn.execute, "SELECT awa.rebuild()")
            armed.wait()
            if how == "gone and noticed":
                hang_up(conn)
            elif how != "timeout":
                db.execute(f"SELECT pg_{how}_backend(%s)", pid)
            end(call, how)
            if how in ("terminate", "gone and noticed"):
                wait_until(lambda: not alive(pid))
            # Producers go on meanwhile.
            ids = db.insert(2, queue=(name := f"q{next(numbers)}"))
    jobs = db.claim(name, 10)
    assert [job.job_id for job in jobs] == ids
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs])
    assert_rebuilds(db)
