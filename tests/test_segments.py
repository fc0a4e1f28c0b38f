"""The ring: it turns over, gives space back, and never takes an undisposed job with it."""

import time

import pytest
from conftest import use
from psycopg.types.json import Jsonb

from harness import Background, Database, claim, wait_until

BATCH = 1000
FAST_RING = {"awa.rotate_interval": "100ms", "awa.completed_retention": "0"}

LEAVES = """
    SELECT oid FROM pg_class WHERE relnamespace = 'awa'::regnamespace AND relkind = 'r'
    AND relname ~ '^(ready_entries|lease_claim_batches|lease_claim_closures)_[0-9]+$'
"""


@pytest.fixture
def ring(new_server, request):
    """A database whose segments live for 100 ms."""
    server = new_server(FAST_RING)
    yield from use(Database(server), request)


def turns(db):
    return db.value("SELECT coalesce(sum(generation), 0)::bigint FROM awa.segments")


def leaf_bytes(db):
    return db.value(f"SELECT sum(pg_total_relation_size(oid))::bigint FROM ({LEAVES}) leaf")


def test_the_first_segment_of_a_database_is_as_old_as_the_database(own_db):
    job_id, = own_db.insert()
    own_db.execute("SELECT awa.complete(%s)", own_db.claim()[0].receipt)
    # The worker looks each second; segments live for an hour here.
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert (turns(own_db), own_db.state(job_id)) == (0, "completed")
        time.sleep(0.1)


def pass_jobs(conn, number, queue="busy"):
    """Enqueues, claims and completes, a batch at a time; the ids of all."""
    jobs = Jsonb([{"kind": "k", "queue": queue}] * BATCH)
    seen = []
    for _ in range(number // BATCH):
        conn.execute("SELECT count(*) FROM awa.insert_jobs(%s)", (jobs,))
        rows = conn.rows("SELECT receipt, job_id FROM awa.claim(%s, %s)", queue, BATCH)
        seen += [row[1] for row in rows]
        conn.execute(
            "SELECT count(*) FROM awa.complete_many(%s)", ([row[0] for row in rows],)
        )
    while rows := conn.rows("SELECT receipt, job_id FROM awa.claim(%s, %s)", queue, BATCH):
        seen += [row[1] for row in rows]
        conn.execute("SELECT count(*) FROM awa.complete_many(%s)", ([row[0] for row in rows],))
    assert len(seen) == len(set(seen)) == number
    return seen


def test_finished_segments_are_given_back(ring):
    db = ring
    empty = leaf_bytes(db)
    pass_jobs(db.conn, 20_000)
    wait_until(
        lambda: leaf_bytes(db) <= empty,
        30,
        what=lambda: f"{leaf_bytes(db)} bytes to shrink to {empty}",
    )
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'busy'") == 20_000
    assert db.value("SELECT count(*) FROM awa.jobs") == 0


def test_open_producer_while_200_000_jobs_pass(ring):
    """Its job is delivered once, after any number of turns."""
    db = ring
    open_one = db.connect()
    open_one.begin()
    job_id = open_one.value("SELECT awa.insert_job('late', '{\"digits\": 1.500}', 'late')")
    before = turns(db)
    pass_jobs(db.conn, 200_000)
    wait_until(lambda: turns(db) >= before + 5, 30, what="five segments to turn over")
    assert db.claim("late") == []
    open_one.commit_sql()
    assert db.value("SELECT args::text FROM awa.get_job(%s)", job_id) == '{"digits": 1.500}'
    job, = db.claim("late", 10)
    assert (job.job_id, job.kind) == (job_id, "late")
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.claim("late", 10) == []


def test_open_claim_and_open_close_survive_the_turns(ring):
    db = ring
    ids = db.insert(3, queue="slow")
    jobs = db.claim("slow", 2)
    closer, claimer = db.connect(), db.connect()
    closer.begin()
    closer.execute("SELECT awa.complete(%s)", (jobs[0].receipt,))
    claimer.begin()
    held, = claim(claimer, "slow")
    before = turns(db)
    wait_until(
        lambda: pass_jobs(db.conn, 5_000) and turns(db) >= before + 3,
        30,
        what="three segments to turn over",
    )
    closer.rollback_sql()
    claimer.rollback_sql()
    assert [db.state(job) for job in ids] == ["running", "running", "available"]
    for job in jobs:
        db.execute("SELECT awa.complete(%s)", job.receipt)
    again, = wait_until(lambda: db.claim("slow"))
    assert again.job_id == held.job_id == ids[2]


def test_a_backlog_is_never_truncated(ring):
    db = ring
    backlog = db.insert(3000, queue="backlog")
    before = turns(db)
    pass_jobs(db.conn, 20_000)
    wait_until(lambda: turns(db) > before, 30)
    got = []
    while jobs := db.claim("backlog", 1000):
        got += [job.job_id for job in jobs]
    assert got == backlog


def test_a_reader_in_its_transaction_does_not_hold_space_back(ring):
    db = ring
    empty = leaf_bytes(db)
    reader = db.connect()
    reader.begin()
    db.insert(10)
    reader.rows("SELECT * FROM awa.jobs")
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in db.claim(max_jobs=10)])
    pass_jobs(db.conn, 5000)
    wait_until(lambda: leaf_bytes(db) <= empty, 30)
    reader.commit_sql()


def test_a_pinned_horizon_leaves_no_dead_tuples(ring):
    db = ring
    pin = db.connect()
    pin.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    pin.execute("SELECT count(*) FROM pg_class")
    before = turns(db)
    wait_until(lambda: pass_jobs(db.conn, 5_000) and turns(db) > before + 2, 30)
    db.execute("SELECT pg_stat_force_next_flush()")
    assert db.value(
        "SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_all_tables"
        f" WHERE relid IN ({LEAVES})"
    ) == 0
    pin.commit_sql()


def test_a_lock_on_a_leaf_delays_and_harms_nothing(ring):
    """As pg_dump holds it: truncation gives up and comes again, nobody queues behind it."""
    db = ring
    locker = db.connect()
    locker.begin()
    for slot in range(16):
        locker.execute(f"LOCK TABLE awa.ready_entries_{slot} IN ACCESS SHARE MODE")
    before = turns(db)
    pass_jobs(db.conn, 10_000)
    db.rows("SELECT * FROM awa.maintain()")
    assert turns(db) == before
    locker.commit_sql()
    wait_until(lambda: turns(db) > before, 30)


def test_idle_writes_nothing(ring):
    db = ring
    pass_jobs(db.conn, 2000)
    lsn = "SELECT pg_current_wal_insert_lsn()"
    last = []

    def quiet():
        last.append(db.value(lsn))
        db.rows("SELECT pg_sleep(0.5)")
        return db.value(lsn) == last[-1]

    wait_until(quiet, 30, what="half a second without any WAL")
    start = db.value(lsn)
    db.rows("SELECT pg_sleep(3)")
    assert db.value("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", start) == 0


def test_turning_under_load_from_many_sides(ring):
    db = ring

    def work(number):
        conn = db.server.connect(db.name)
        pass_jobs(conn, 5000, f"q{number}")
        conn.close()

    for call in [Background(work, number) for number in range(4)]:
        call.result(120)
    assert db.value("SELECT sum(completed_total) FROM awa.queue_stats") == 20_000


def test_crash_between_the_turns(ring):
    db = ring
    kept = db.insert(50, queue="kept")
    for _ in range(3):
        pass_jobs(db.conn, 3000)
        db.server.crash()
        db.wait_served()
    assert [job.job_id for job in db.claim("kept", 100)] == kept
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'busy'") == 9000


def test_a_segment_that_somebody_reads_holds_up_no_other(ring):
    """A dump reads the leaves of the first one: the next ones are emptied all the same."""
    db = ring
    reader = db.connect()
    reader.begin()
    reader.execute("SELECT count(*) FROM awa.ready_entries_0")
    pass_jobs(db.conn, 20_000)
    others = "SELECT max(generation) FROM awa.segments WHERE segment > 0"
    wait_until(lambda: db.value(others) > 0, 20)
    first = "SELECT generation FROM awa.segments WHERE segment = 0"
    assert db.value(first) == 0
    reader.rollback_sql()
    wait_until(lambda: db.value(first) > 0, 20)
