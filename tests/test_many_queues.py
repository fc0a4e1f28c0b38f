"""More queues over time than memory has room for: what is finished leaves memory."""

import threading

import psycopg
import pytest
from conftest import use
from psycopg.types.json import Jsonb

from harness import Database, DebugPoints, raises, wait_until

LANES = 64
SETTINGS = {
    "awa.max_lanes": str(LANES),
    "awa.rotate_interval": "200ms",
    "awa.completed_retention": "1h",
}
STATS = (
    "SELECT queue, available, running, completed_total, failed_total, cancelled_total"
    " FROM awa.queue_stats ORDER BY 1"
)


@pytest.fixture
def small(new_server, request):
    yield from use(Database(new_server(SETTINGS, durable=True)), request)


def pass_one(conn, queue):
    conn.execute("SELECT awa.insert_job('k', '{}', %s)", (queue,))
    receipt = conn.value("SELECT receipt FROM awa.claim(%s)", queue)
    conn.execute("SELECT awa.complete(%s)", (receipt,))


def test_more_queues_pass_than_fit(small):
    """Each gets a job that is completed; the segments are kept for an hour."""
    db = small
    names = [f"tenant-{n:04}" for n in range(6 * LANES)]
    for name in names:
        pass_one(db.conn, name)
    expected = [(name, 0, 0, 1, 0, 0) for name in names]
    assert db.rows(STATS) == expected
    assert db.check() is None
    db.server.restart()
    db.wait_served()
    assert db.rows(STATS) == expected
    pass_one(db.conn, "one-more")
    db.server.crash()
    db.wait_served()
    assert len(db.rows(STATS)) == len(names) + 1
    assert db.check() is None


def test_room_is_made_after_a_crash(new_server, request):
    """Memory is full of queues that have ended, and nobody has counted their ends."""
    db = Database(new_server(SETTINGS | {"awa.rotate_interval": "1h"}, durable=True))
    request.addfinalizer(db.close_sessions)
    DebugPoints(db).arm("ends_counted")
    passed = 0
    with raises("AW004"):
        while passed < 6 * LANES:
            pass_one(db.conn, f"q{passed:03}")
            passed += 1
    db.server.crash()
    db.wait_served()
    pass_one(db.conn, "one-more")
    names = ["one-more", *(f"q{n:03}" for n in range(passed))]
    assert db.rows(STATS) == [(name, 0, 0, 1, 0, 0) for name in names]
    db.check()


def test_a_call_may_name_many_queues(db):
    """In any order, with several priorities each: every job gets its own lane's place."""
    jobs = [
        {"kind": "k", "queue": f"q{n % 7}", "priority": 1 + n % 3, "args": {"n": n}}
        for n in range(420)
    ]
    db.execute("SELECT awa.insert_jobs(%s)", Jsonb(jobs))
    for queue in range(7):
        mine = [n for n in range(420) if n % 7 == queue]
        expected = sorted(mine, key=lambda n: (n % 3, n))
        assert [job.args["n"] for job in db.claim(f"q{queue}", 60)] == expected
    db.execute("SELECT awa.insert_jobs(%s)", Jsonb(jobs))
    claimed = db.column(
        "SELECT queue FROM awa.claim_from(%s, 100)", [f"q{n % 3}" for n in range(300)]
    )
    assert len(claimed) == 100 and set(claimed) <= {"q0", "q1", "q2"}


def test_queue_stats_do_not_load_what_was_forgotten(small):
    db = small
    for n in range(3 * LANES):
        pass_one(db.conn, f"q{n}")
    db.execute("SELECT awa.pause_queue('q0')")
    assert len(db.rows(STATS)) == 3 * LANES
    assert db.value("SELECT paused FROM awa.queue_stats WHERE queue = 'q0'")
    pass_one(db.conn, "another")


def test_queues_with_jobs_stay(small):
    """What memory needs it keeps: then a new queue is refused, by name of the limit."""
    db = small
    for n in range(LANES):
        db.execute("SELECT awa.insert_job('k', '{}', %s)", f"q{n}")
    with pytest.raises(psycopg.Error) as refused:
        db.execute("SELECT awa.insert_job('k', '{}', 'one-more')")
    assert refused.value.sqlstate == "AW004"
    assert "awa.max_lanes" in refused.value.diag.message_detail
    db.server.restart()
    db.wait_served()
    for n in range(LANES):
        assert len(db.claim(f"q{n}", 5)) == 1


def test_totals_are_exact_while_they_are_counted(small):
    """Ends go from memory to the table all the time; nobody sees one twice, or none."""
    db = small
    wrong = []
    done = 0
    stop = threading.Event()
    reader = db.connect()

    def read():
        last = 0
        while not stop.is_set():
            before = done
            seen = reader.value("SELECT coalesce(sum(completed_total), 0)::bigint FROM awa.queue_stats")
            # One may be committed and not yet reported to us.
            if not max(before, last) <= seen <= done + 1:
                wrong.append((before, last, seen, done))
            last = seen

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for n in range(1500):
            pass_one(db.conn, f"q{n % 7}")
            done = n + 1
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    counted = "SELECT count(*) FROM awa.segments WHERE counted IS NOT NULL"
    assert db.value(counted) > 1
    assert db.check() is None


TOTAL = "SELECT completed_total FROM awa.queue_stats WHERE queue = 'q'"


@pytest.mark.parametrize("committed", [False, True])
def test_stats_between_the_totals_and_memory(small, committed):
    """The worker has written the totals; memory gives up what it counted after the commit."""
    db = small
    debug = DebugPoints(db)
    other = db.connect()
    pass_one(db.conn, "q")
    with debug.at("ends_counted") as counted:
        counted.wait()
        with debug.at("commit_before_callback") as visible:
            if committed:
                counted.release()
                visible.wait()
            # Not in autocommit: its commit would stop at the point too.
            other.begin()
            rows = other.value("SELECT coalesce(sum(completed_total), 0)::int FROM awa.queues")
            assert rows == (1 if committed else 0)
            assert other.value(TOTAL) == 1
    other.commit()
    wait_until(lambda: db.value("SELECT count(*) FROM awa.segments WHERE disposed") > 0, 10)
    assert db.value(TOTAL) == 1
    assert db.check() is None


def test_who_holds_the_row_of_a_queue_holds_up_no_rescue(small):
    """An open transaction has paused the queue: its ends are counted later, all else goes on."""
    db = small
    pass_one(db.conn, "q")
    holder = db.connect()
    holder.begin()
    holder.execute("SELECT awa.pause_queue('q')")
    sealed = "SELECT count(*) FROM awa.segments WHERE segment = 0 AND directory IS NOT NULL"
    wait_until(lambda: db.value(sealed) == 1, 10)
    worker = db.connect()
    runtime = worker.value("SELECT awa.register_runtime('w')")
    db.execute("SELECT awa.insert_job('k', '{}', 'other')")
    worker.rows("SELECT * FROM awa.claim('other', runtime => %s)", runtime)
    worker.close()
    wait_until(lambda: db.value("SELECT count(*) FROM awa.jobs WHERE state IN ('retryable', 'available')") == 1, 5)
    assert not db.value("SELECT disposed FROM awa.segments WHERE segment = 0")
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'q'") == 1
    holder.commit()
    wait_until(lambda: db.value("SELECT disposed FROM awa.segments WHERE segment = 0"), 10)
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'q'") == 1


def test_a_held_queue_holds_up_no_other_segment(small):
    """The first segment cannot be counted; the next ones are, and are given back."""
    db = small
    pass_one(db.conn, "held")
    holder = db.connect()
    holder.begin()
    holder.execute("SELECT awa.pause_queue('held')")
    sealed = "SELECT bool_and(state = 'sealed') FROM awa.segments WHERE segment <= %s"
    wait_until(lambda: db.value(sealed, 0), 10)
    pass_one(db.conn, "free")
    wait_until(lambda: db.value("SELECT disposed FROM awa.segments WHERE segment = 1"), 15)
    assert not db.value("SELECT disposed FROM awa.segments WHERE segment = 0")
    holder.rollback_sql()
    wait_until(lambda: db.value("SELECT disposed FROM awa.segments WHERE segment = 0"), 15)
