"""Operators stop and resume pruning; nothing else stops with it."""

import re
import uuid

import pytest
from conftest import use
from psycopg.types.json import Jsonb

from harness import Database, DebugPoints, raises, wait_until

FAST_RING = {"awa.rotate_interval": "100ms", "awa.completed_retention": "0"}
STATUS = "SELECT * FROM awa.runtime_control_status()"


@pytest.fixture
def ring(new_server, request):
    """A database whose segments live for 100 ms."""
    yield from use(Database(new_server(FAST_RING, durable=True)), request)


def status(conn):
    cur = conn.execute(STATUS)
    (row,) = cur.fetchall()
    return dict(zip([column.name for column in cur.description], row, strict=True))


def pass_jobs(db, count=50):
    jobs = Jsonb([{"kind": "k", "queue": "q"}] * count)
    db.rows("SELECT * FROM awa.insert_jobs(%s)", jobs)
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in db.claim("q", count)])


def turns(db):
    return db.value("SELECT coalesce(sum(generation), 0)::int FROM awa.segments")


def halt(db, *arguments):
    halt_id = db.value("SELECT awa.halt_runtime_scope(%s)" % ", ".join(arguments))
    wait_until(lambda: status(db.conn)["fleet_halted"], 10)
    return halt_id


def test_a_halt_stops_the_broom_and_nothing_else(ring):
    db = ring
    pass_jobs(db)
    wait_until(lambda: turns(db) > 0, 10)
    before = status(db.conn)
    assert (before["desired"], before["fleet_halted"], before["halt_id"]) == ("running", False, None)
    halt_id = halt(db, "reason => 'a look at the rows'")
    now = status(db.conn)
    assert now["desired"] == now["observed"] == "halted"
    assert (now["halt_id"], now["reason"]) == (halt_id, "a look at the rows")
    assert now["supported"] and now["halted_by"] == "postgres" and now["since"] and now["observed_at"]
    states = db.rows("SELECT * FROM awa.segments ORDER BY 1")
    # Enqueue, claim, complete, promotion and rescue go on.
    pass_jobs(db)
    soon = db.value("SELECT awa.insert_job('k', run_at => now() + interval '100 ms')")
    db.wait_state(soon, "available")
    (job,) = db.claim(deadline="50 ms")
    db.wait_state(job.job_id, "retryable")
    # Not by hand either.
    did = dict(db.rows("SELECT step, did FROM awa.maintain()"))
    assert did["rotate"] == did["list"] == did["truncate"] == did["retention"] == 0
    assert db.rows("SELECT * FROM awa.segments ORDER BY 1") == states
    assert db.value("SELECT awa.resume_runtime_scope('maintenance.prune', %s)", halt_id)
    assert status(db.conn)["desired"] == "running"
    wait_until(lambda: db.rows("SELECT * FROM awa.segments ORDER BY 1") != states, 10)
    wait_until(lambda: status(db.conn)["observed"] == "running", 10)


def test_the_status_says_what_a_halt_costs(ring):
    db = ring
    notices = []
    db.conn.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    halt_id = halt(db)

    def told():
        notices.clear()
        assert status(db.conn)["observed"] == "halted"
        taken, grown = map(int, re.fullmatch(
            r"segments take (\d+) kB and grow by (\d+) kB a minute", notices[-1]).groups())
        return taken, grown

    before, _ = told()
    jobs = Jsonb([{"kind": "k", "queue": "q", "args": "x" * 1000}] * 1000)
    db.rows("SELECT * FROM awa.insert_jobs(%s)", jobs)
    after, grown = told()
    assert after - before > 1000 and grown > 0
    db.value("SELECT awa.resume_runtime_scope('maintenance.prune', %s)", halt_id)
    wait_until(lambda: status(db.conn)["observed"] == "running", 10)
    notices.clear()
    status(db.conn)
    assert notices == []
    assert db.value("SELECT value FROM awa.metrics WHERE name = 'awa_ring_bytes'") > 0


def test_a_halt_outlives_a_crash(ring):
    db = ring
    halt_id = halt(db)
    db.server.crash()
    db.wait_served()
    wait_until(lambda: status(db.conn)["fleet_halted"], 10)
    assert status(db.conn)["halt_id"] == halt_id
    pass_jobs(db)
    assert dict(db.rows("SELECT step, did FROM awa.maintain()"))["rotate"] == 0


def test_only_the_halt_in_force_can_be_resumed(ring):
    db = ring
    resume = "SELECT awa.resume_runtime_scope('maintenance.prune', %s)"
    assert db.value(resume, uuid.uuid4()) is False
    first = halt(db)
    second = halt(db)
    assert first != second
    assert db.value(resume, first) is False
    assert status(db.conn)["halt_id"] == second
    assert db.value(resume, second) is True
    assert db.value(resume, second) is False


def test_a_halt_is_transactional(ring):
    db = ring
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.halt_runtime_scope()")
    pass_jobs(db)
    before = turns(db)
    wait_until(lambda: turns(db) > before, 10)
    conn.rollback_sql()
    assert status(db.conn)["desired"] == "running"


def test_the_fleet_is_halted_once_nobody_is_in_a_step(ring):
    """The worker stands in the middle of a truncation."""
    db = ring
    with DebugPoints(db).at("truncate_locked") as point:
        pass_jobs(db)
        point.wait()
        db.execute("SELECT awa.halt_runtime_scope()")
        seen = status(db.conn)
        assert seen["desired"] == "halted" and not seen["fleet_halted"]
    wait_until(lambda: status(db.conn)["fleet_halted"], 10)
    before = turns(db)
    pass_jobs(db)
    db.rows("SELECT * FROM awa.maintain()")
    assert turns(db) == before


def test_a_step_by_hand_that_is_under_way(ring):
    db = ring
    conn = db.connect()
    conn.begin()
    conn.rows("SELECT * FROM awa.maintain()")
    db.execute("SELECT awa.halt_runtime_scope()")
    wait_until(lambda: status(db.conn)["observed_at"], 10)
    assert not status(db.conn)["fleet_halted"]
    conn.commit()
    wait_until(lambda: status(db.conn)["fleet_halted"], 10)


@pytest.mark.parametrize("call, sqlstate", [
    ("awa.halt_runtime_scope('dispatch')", "22023"),
    ("awa.halt_runtime_scope(mode => 'now')", "22023"),
    ("awa.resume_runtime_scope('maintenance.prune', NULL)", "22023"),
    ("awa.resume_runtime_scope('x', gen_random_uuid())", "22023"),
    ("awa.runtime_control_status('x')", "22023"),
])
def test_bad_arguments(db, call, sqlstate):
    with raises(sqlstate):
        db.rows(f"SELECT * FROM {call}")
