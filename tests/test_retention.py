"""How long completed and failed jobs are kept: the server's setting, or the queue's own."""

import pytest
from conftest import use
from psycopg.types.json import Jsonb

from harness import Database, DebugPoints, raises, wait_until

RING = {"awa.rotate_interval": "100ms", "awa.completed_retention": "0"}


@pytest.fixture
def ring(new_server, request):
    """Segments live for 100 ms, and the server keeps no completed job."""
    yield from use(Database(new_server(RING)), request)


@pytest.fixture
def lasting(new_server, request):
    """The same, but the server keeps them."""
    settings = RING | {"awa.completed_retention": "1h"}
    yield from use(Database(new_server(settings)), request)


def configure(db, queue, **settings):
    return db.value("SELECT awa.configure_queue(%s, %s)", queue, Jsonb(settings))


def complete(db, queue, count=1, result="null", **columns):
    """Ids of jobs that were enqueued and completed."""
    ids = db.insert(count, queue=queue, **columns)
    receipts = [job.receipt for job in db.claim(queue, count)]
    for receipt in receipts:
        db.execute("SELECT awa.complete(%s, %s)", receipt, result)
    return ids


def turns(db):
    return db.column("SELECT generation FROM awa.segments WHERE segment < 12 ORDER BY segment")


def turn_over(db, rounds=1, queue="filler"):
    """Until each young segment was emptied."""
    until = [turn + rounds for turn in turns(db)]

    def turned():
        complete(db, queue)
        return all(have >= want for have, want in zip(turns(db), until))

    wait_until(turned, 60, what=lambda: f"{turns(db)} to reach {until}")


def test_none_kept(ring):
    db = ring
    job, = complete(db, "q")
    wait_until(lambda: db.state(job) is None, 15, what="the job to be forgotten")
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'q'") == 1


def test_a_longer_retention_outlives_the_ring(ring):
    """Any number of turns, and everything about the jobs stays as it was."""
    db = ring
    configure(db, "long", completed_retention="1 h")
    configure(db, "ever", completed_retention="-1")
    kept = []
    for queue in ("long", "ever"):
        first, = db.insert(queue=queue, tags=["t"], metadata={"m": 1}, priority=1)
        db.execute("SELECT awa.fail(%s, 'at first', '0')", db.claim(queue)[0].receipt)
        again, = wait_until(lambda: db.claim(queue))
        db.execute("SELECT awa.complete(%s, '{\"r\": 1.50}')", again.receipt)
        kept.append(first)
    view = "SELECT * FROM awa.jobs WHERE queue <> 'filler' ORDER BY id"
    attempts = (
        "SELECT attempt, outcome, error FROM awa.job_attempts(%s)"
    )
    before = db.rows(view), [db.rows(attempts, job) for job in kept]
    assert len(before[0]) == 2
    turn_over(db, 2)
    after = db.rows(view)
    assert after == before[0]
    assert db.value("SELECT count(*) FROM awa.completed_entries") == 2
    for job in kept:
        assert db.rows(
            "SELECT state::text, attempt, priority, tags FROM awa.get_job(%s)", job
        ) == [("completed", 2, 1, ["t"])]
        assert str(db.value("SELECT awa.get_result(%s)::text", job)) == '{"r": 1.50}'
        assert db.rows("SELECT id FROM awa.terminal_jobs WHERE id = %s", job) == [(job,)]
        assert db.value("SELECT (awa.dump_job(%s)->>'id')::bigint", job) == job
        (number, _, error), (last, outcome, _) = db.rows(attempts, job)
        assert (number, error, last, outcome) == (1, "at first", 2, "completed")
        for act in ("delete_job", "retry_job"):
            with raises("55000"):
                db.execute(f"SELECT awa.{act}(%s)", job)
        assert db.value("SELECT awa.cancel_job(%s)::text", job) == "completed"
    assert len(db.rows("SELECT * FROM awa.list_jobs(queue => 'long', state => 'completed')")) == 1
    # Across a restart and a rebuild, too.
    db.server.restart()
    db.wait_served()
    assert db.rows(view) == before[0]


def test_a_longer_retention_ends(ring):
    db = ring
    configure(db, "long", completed_retention="5 s")
    job, = complete(db, "long", unique_key="k", opts={"unique_states": ["completed", "available"]})
    wait_until(
        lambda: db.value("SELECT count(*) FROM awa.completed_entries") == 1, 15,
        what="the job to move out of its segment",
    )
    # Its key is held on, as its mask says.
    other = db.value(
        "SELECT awa.insert_job('k', queue => 'long', unique_key => 'k')"
    )
    assert other == job
    assert db.state(job) == "completed"
    wait_until(lambda: db.state(job) is None, 20, what="the job to be forgotten")
    assert db.value("SELECT count(*) FROM awa.completed_entries") == 0
    again = db.value("SELECT awa.insert_job('k', queue => 'long', unique_key => 'k')")
    assert again != job
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'long'") == 1


def test_a_shorter_retention_is_not_held_up(lasting):
    """Both queues share segments; the space of both is given back at once."""
    db = lasting
    configure(db, "short", completed_retention="0")
    kept = complete(db, "default", 20)
    gone = complete(db, "short", 20)
    wait_until(lambda: not any(db.state(job) for job in gone), 15, what="the short ones to go")
    assert [db.state(job) for job in kept] == ["completed"] * 20
    turn_over(db, 1, "short")
    assert [db.state(job) for job in kept] == ["completed"] * 20


def test_what_is_kept_equally_long_stays_where_it_is(lasting):
    """Nothing is copied where nothing is to be gained."""
    db = lasting
    complete(db, "default", 20)
    for _ in range(3):
        db.rows("SELECT * FROM awa.maintain()")
    assert db.value("SELECT count(*) FROM awa.completed_entries") == 0


def test_a_setting_takes_effect_on_what_is_there(lasting):
    db = lasting
    job, = complete(db, "q")
    complete(db, "other")
    configure(db, "q", completed_retention="0")
    wait_until(lambda: db.state(job) is None, 20, what="the job to be forgotten")


def test_many_move_out_in_several_runs(ring):
    db = ring
    configure(db, "long", completed_retention="1 h")
    count = 40_000
    db.execute(
        "SELECT count(*) FROM awa.insert_jobs_compat_batch("
        "array_fill('k'::text, ARRAY[%s]), array_fill('long'::text, ARRAY[%s]),"
        " array_fill('{}'::jsonb, ARRAY[%s]))",
        count, count, count,
    )
    receipts = []
    while jobs := db.claim("long", 5000):
        receipts += [job.receipt for job in jobs]
        db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs])
    assert len(receipts) == count

    def seen():
        return db.value("SELECT count(*) FROM awa.jobs WHERE state = 'completed'")

    # At every moment each is there, once.
    def moved():
        assert seen() == count
        return db.value("SELECT count(*) FROM awa.completed_entries") == count

    wait_until(moved, 60, what="all to move out")
    wait_until(
        lambda: db.value(
            "SELECT sum(pg_relation_size(format('awa.ready_entries_%s', n)::regclass))"
            " FROM generate_series(0, 15) n"
        ) == 0,
        30,
        what="their segment to be emptied",
    )
    assert seen() == count


def test_a_crash_while_they_move_out(ring):
    db = ring
    configure(db, "long", completed_retention="1 h")
    points = DebugPoints(db)
    points.arm("truncate")
    jobs = complete(db, "long", 10)
    points.wait("truncate", timeout=20)
    # Others do not see half of it.
    assert [db.state(job) for job in jobs] == ["completed"] * 10
    assert db.value("SELECT count(*) FROM awa.completed_entries") == 0
    db.server.crash()
    db.wait_served()
    assert [db.state(job) for job in jobs] == ["completed"] * 10
    wait_until(lambda: db.value("SELECT count(*) FROM awa.completed_entries") == 10, 20)
    assert [db.state(job) for job in jobs] == ["completed"] * 10


def test_reads_miss_nothing_while_they_move(ring):
    """Point reads and the view, all the time, in each isolation level."""
    db = ring
    configure(db, "long", completed_retention="1 h")
    snap = db.connect()
    jobs = []
    for _ in range(15):
        jobs += complete(db, "long", 3)
        complete(db, "filler", 3)
        snap.begin()
        snap.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for job in jobs:
            assert db.state(job) == "completed"
        assert db.count("long", "completed") == len(jobs)
        for job in jobs[-6:]:
            found = snap.column("SELECT state::text FROM awa.get_job(%s)", job)
            assert found == ["completed"]
        snap.rollback_sql()


@pytest.mark.parametrize("kept, after", [("0", None), ("-1", "failed")])
def test_failed_retention(db, kept, after):
    configure(db, "q", failed_retention=kept)
    ids = db.insert(2, queue="q")
    first, second = db.claim("q", 2)
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", first.receipt)
    db.execute("SELECT awa.cancel_attempt(%s, 'x')", second.receipt)

    def settled():
        db.rows("SELECT * FROM awa.maintain()")
        found = [db.state(job) for job in ids]
        return found == ([None, None] if after is None else ["failed", "cancelled"])

    wait_until(settled, 10)


def test_a_dump_has_the_kept_ones(ring, new_server):
    from test_restore import restore

    db = ring
    configure(db, "long", completed_retention="1 h")
    jobs = complete(db, "long", 3, "7")
    wait_until(lambda: db.value("SELECT count(*) FROM awa.completed_entries") == 3, 20)
    view = "SELECT * FROM awa.jobs WHERE queue = 'long' ORDER BY id"
    before = db.rows(view)
    copy = restore(db, new_server(), "custom", str(db.server.home / "dump"))
    try:
        assert copy.rows(view) == before
        assert copy.value("SELECT awa.get_result(%s)", jobs[0]) == 7
        copy.check()
    finally:
        copy.close_sessions()
