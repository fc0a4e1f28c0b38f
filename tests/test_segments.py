"""The ring: it turns over, gives space back, and never takes an undisposed job with it."""

import time

import pytest
from conftest import use
from psycopg.types.json import Jsonb

from harness import Background, Database, DebugPoints, claim, wait_until

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


def segment_rows(db):
    return db.rows("SELECT segment, state, since, generation FROM awa.segments ORDER BY 1")


def current(db):
    return db.value("SELECT segment FROM awa.segments WHERE state = 'current'")


def test_rotation_by_age(new_server, request):
    server = new_server({"awa.rotate_interval": "300ms", "awa.rotate_size": "1GB"})
    for db in use(Database(server), request):
        first = current(db)
        start = time.monotonic()
        db.insert(1)
        wait_until(lambda: current(db) != first, 5)
        assert time.monotonic() - start < 3


def test_rotation_by_size(new_server, request):
    server = new_server({"awa.rotate_interval": "1h", "awa.rotate_size": "1MB"})
    for db in use(Database(server), request):
        first = current(db)
        db.insert(10)
        # It looks each second: a small segment stays.
        db.rows("SELECT pg_sleep(2.5)")
        assert current(db) == first
        db.insert(2000, metadata={"pad": "x" * 1000})
        wait_until(lambda: current(db) != first, 10)


def test_no_rotation_when_idle(ring):
    """Not the first time, and not after there was something to do."""
    db = ring
    before = segment_rows(db)
    db.rows("SELECT pg_sleep(1.5)")
    assert segment_rows(db) == before
    pass_jobs(db.conn, 1000)
    wait_until(lambda: leaf_bytes(db) and turns(db) > 0, 20)

    def quiet():
        now = segment_rows(db)
        db.rows("SELECT pg_sleep(1)")
        return segment_rows(db) == now

    wait_until(quiet, 20)


def test_rotation_waits_for_a_free_segment(new_server, request):
    """Where none is free the current one grows, and nothing is lost."""
    server = new_server({"awa.rotate_interval": "100ms", "awa.completed_retention": "0"})
    for db in use(Database(server), request):
        stayed = []

        def full():
            stayed.extend(db.insert(1, queue="stays"))
            return db.value(
                "SELECT count(*) FROM awa.segments WHERE segment < 12 AND state = 'free'"
            ) == 0

        wait_until(full, 30)
        last = current(db)
        more = db.insert(50, queue="stays")
        db.rows("SELECT * FROM awa.maintain()")
        assert current(db) == last
        assert [job.job_id for job in db.claim("stays", 1000)] == stayed + more


@pytest.mark.parametrize("how", ["plain", "savepoint", "prepared", "bulk"])
def test_a_sealed_segment_waits_for_its_writers(ring, how):
    """A transaction that wrote to it may be of any age; its jobs come through."""
    db = ring
    writer = db.connect()
    writer.begin()
    held = current(db)
    if how == "savepoint":
        writer.execute("SAVEPOINT a")
        writer.value("SELECT awa.insert_job('gone', queue => 'held')")
        writer.execute("ROLLBACK TO a")
        writer.execute("SAVEPOINT b")
    count = 1500 if how == "bulk" else 1
    ids = [
        row[0] for row in writer.rows(
            "SELECT job_id FROM awa.insert_jobs(%s) ORDER BY ord",
            Jsonb([{"kind": "k", "queue": "held"}] * count),
        )
    ]
    if how == "savepoint":
        writer.execute("RELEASE b")
    if how == "prepared":
        writer.execute("PREPARE TRANSACTION 'held'")
    wait_until(
        lambda: pass_jobs(db.conn, 1000) and turns(db) >= 14, 60, what="more than a whole turn"
    )
    generation = "SELECT generation FROM awa.segments WHERE segment = %s"
    assert db.value(generation, held) == 0
    if how == "prepared":
        db.server.crash()
        db.wait_served()
        wait_until(lambda: pass_jobs(db.conn, 1000) and turns(db) >= 20, 60)
        assert db.value(generation, held) == 0
        db.execute("COMMIT PREPARED 'held'")
    else:
        writer.commit_sql()
    jobs = wait_until(lambda: db.claim("held", count))
    assert [job.job_id for job in jobs] == ids
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs])
    wait_until(lambda: db.value(generation, held) > 0, 30, what="the segment to be emptied")


def test_the_proof_is_repeated_under_the_lock(ring):
    """A row that comes between the proof and the locks saves its segment."""
    db = ring
    points = DebugPoints(db)
    job_id, = db.insert(queue="first")
    held = current(db)
    points.arm("truncate_proved")
    db.execute("SELECT awa.complete(%s)", db.claim("first")[0].receipt)
    wait_until(lambda: current(db) != held, 10)
    points.wait("truncate_proved", timeout=20)
    # By hand, as a restore does: it changes no counter, and fits into a page that is there.
    before = db.value(f"SELECT count(*) FROM awa.ready_entries_{held}")
    db.execute(
        f"INSERT INTO awa.ready_entries_{held} (position, lane_id, created_at, attempts,"
        " max_attempts, kind, args)"
        " SELECT position + 1, lane_id, created_at, attempts, max_attempts, 'by hand', args"
        f" FROM awa.ready_entries_{held} WHERE position = %s",
        job_id,
    )
    points.release("truncate_proved")
    job, = wait_until(lambda: db.claim("first"), 20)
    assert (job.kind, before) == ("by hand", 1)
    assert db.value("SELECT generation FROM awa.segments WHERE segment = %s", held) == 0
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_work_goes_on_while_a_segment_is_emptied(ring):
    """Claims, completions and enqueues want no lock that the worker has."""
    db = ring
    points = DebugPoints(db)
    points.arm("truncate_locked")
    pass_jobs(db.conn, 1000)
    points.wait("truncate_locked", timeout=20)
    worker = db.connect()
    worker.execute("SET statement_timeout = '2s'; SET lock_timeout = '100ms'")
    for _ in range(5):
        pass_jobs(worker, 2000)
    claimed = claim(worker, "busy", 1)
    assert claimed == []
    job_id = worker.value("SELECT awa.insert_job('k', queue => 'busy')")
    job, = claim(worker, "busy", 1)
    worker.execute("SELECT awa.fail(%s, 'x', '0')", (job.receipt,))
    assert job.job_id == job_id
    points.release("truncate_locked")
    last, = wait_until(lambda: db.claim("busy"))
    db.execute("SELECT awa.complete(%s)", last.receipt)


@pytest.mark.parametrize("table", [
    "ready_entries", "lease_claim_batches", "lease_claim_closures", "toast",
])
def test_no_lock_is_waited_for(ring, table):
    """Neither of a leaf nor of its TOAST table; the one that is held up is emptied later."""
    db = ring
    db.insert(1)
    held = current(db)
    name = f"awa.ready_entries_{held}" if table == "toast" else f"awa.{table}_{held}"
    locker = db.connect()
    locker.begin()
    if table == "toast":
        name = db.value("SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = %s::regclass",
                        name)
        # A read of one takes the lock that a vacuum or a detoasting reader has.
        locker.execute(f"SELECT count(*) FROM {name}")
    else:
        locker.execute(f"LOCK TABLE {name} IN ACCESS SHARE MODE")
    db.execute("SELECT awa.complete(%s)", db.claim()[0].receipt)
    waiting = []

    def others_turn():
        pass_jobs(db.conn, 1000)
        waiting.extend(db.rows(
            "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE NOT l.granted AND a.backend_type LIKE 'awa%%'"
        ))
        return turns(db) >= 5

    wait_until(others_turn, 30)
    generation = "SELECT generation FROM awa.segments WHERE segment = %s"
    assert (waiting, db.value(generation, held)) == ([], 0)
    locker.rollback_sql()
    wait_until(lambda: db.value(generation, held) > 0, 20)


def test_a_dump_of_hours(ring):
    """It has every table open, under one snapshot, for as long as it likes."""
    db = ring
    kept = db.insert(20, queue="kept")
    dump = db.connect()
    dump.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    tables = dump.column(
        "SELECT oid::regclass::text FROM pg_class"
        " WHERE relnamespace = 'awa'::regnamespace AND relkind = 'r'"
    )
    dump.execute(f"LOCK TABLE {', '.join(tables)} IN ACCESS SHARE MODE")
    before = turns(db)
    worker = db.connect()
    worker.execute("SET lock_timeout = '200ms'; SET statement_timeout = '5s'")
    for _ in range(30):
        pass_jobs(worker, 1000)
    assert turns(db) == before
    # What its snapshot saw is there, and nothing else.
    seen = sum(dump.value(f"SELECT count(*) FROM awa.ready_entries_{n}") for n in range(16))
    assert seen == 20
    dump.commit_sql()
    wait_until(
        lambda: pass_jobs(db.conn, 1000) and turns(db) >= before + 5, 30, what="the ring to turn"
    )
    assert [job.job_id for job in db.claim("kept", 100)] == kept


READS = [
    "SELECT * FROM awa.get_job({job})",
    "SELECT * FROM awa.list_jobs()",
    "SELECT awa.dump_job({job})",
    "SELECT * FROM awa.job_attempts({job})",
    "SELECT awa.get_result({job})",
    "SELECT * FROM awa.runtime_control_status()",
    "SELECT awa.cancel_requested('{{1}}')",
    "SELECT awa.claim_outcome()",
    "SELECT * FROM awa.check()",
]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_no_reader_in_its_transaction_holds_space_back(ring, isolation):
    """Every view and every function that reads, and a cursor that is not at its end."""
    db = ring
    empty = leaf_bytes(db)
    job, = db.insert(1)
    receipt = db.claim()[0].receipt
    db.insert(5, queue="busy")
    reader = db.connect()
    reader.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    views = db.column(
        "SELECT oid::regclass::text FROM pg_class"
        " WHERE relnamespace = 'awa'::regnamespace AND relkind = 'v'"
    )
    assert len(views) > 3
    for view in views:
        reader.rows(f"SELECT * FROM {view}")
    for query in READS:
        reader.rows(query.format(job=job))
    reader.execute("DECLARE c CURSOR FOR SELECT * FROM awa.jobs")
    assert len(reader.rows("FETCH 1 FROM c")) == 1
    db.execute("SELECT awa.complete(%s)", receipt)
    db.rows(
        "SELECT * FROM awa.complete_many(%s)", [job.receipt for job in db.claim("busy", 10)]
    )
    pass_jobs(db.conn, 5000)
    wait_until(
        lambda: leaf_bytes(db) <= empty, 30, what=lambda: f"{leaf_bytes(db)} to be {empty}"
    )
    reader.rollback_sql()
