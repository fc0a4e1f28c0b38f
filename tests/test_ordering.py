"""Jobs of an ordering key run one at a time in a serial queue, in their order."""

import random
import threading
import time
from collections import Counter, defaultdict

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness import Background, claim, raises, wait_in, wait_until


def configure(db, ordering="serial", queue="default", conn=None, **settings):
    (conn or db.conn).execute(
        "SELECT awa.configure_queue(%s, %s)", (queue, Jsonb({"ordering": ordering} | settings)))


@pytest.fixture
def serial(db):
    configure(db, backoff={"base": "1 h", "jitter": 0})
    return db


def insert(db, key, count=1, conn=None, **columns):
    opts = {"ordering_key": key} if key else {}
    jobs = [{"kind": "k", "opts": opts} | columns for _ in range(count)]
    return (conn or db.conn).column(
        "SELECT job_id FROM awa.insert_jobs(%s) ORDER BY ord", Jsonb(jobs))


def ids(jobs):
    return [job.job_id for job in jobs]


def take(db, max_jobs=10, conn=None, **arguments):
    return db.claim(max_jobs=max_jobs, conn=conn, **arguments)


def outcome(conn):
    return conn.value("SELECT awa.claim_outcome()")


def complete(db, *jobs):
    for job in jobs:
        db.execute("SELECT awa.complete(%s)", job.receipt)


# The setting


def test_the_setting(db):
    def stored(value):
        return db.value(
            "SELECT awa.configure_queue('default', %s) ->> 'ordering'", Jsonb(value))

    assert stored({}) == "lane"
    assert stored({"ordering": "serial"}) == "serial"
    assert stored({"priority": 3}) == "serial"
    assert stored({"ordering": None}) == "lane"
    for value in ("Serial", "", 1, True, []):
        with raises("22023", "ordering"):
            stored({"ordering": value})
    with raises("0A000", "strict"):
        stored({"ordering": "strict"})
    assert stored({}) == "lane"


def test_a_lane_is_in_order_and_not_serial(db):
    jobs = insert(db, "a", 3)
    assert ids(take(db)) == jobs


def test_one_at_a_time_in_order(serial):
    db = serial
    jobs = insert(db, "a", 4)
    for job_id in jobs:
        job, = take(db)
        assert job.job_id == job_id
        assert take(db) == []
        assert outcome(db.conn) == ("empty" if job_id == jobs[-1] else "limited")
        complete(db, job)
    assert take(db) == []
    assert outcome(db.conn) == "empty"


def test_other_keys_and_jobs_without_one_go_on(serial):
    db = serial
    a1, a2, a3 = insert(db, "a", 3)
    b1, b2 = insert(db, "b", 2)
    free = insert(db, None, 3)
    first = take(db)
    assert ids(first) == [a1, b1, *free]
    c1, = insert(db, "c")
    assert ids(take(db)) == [c1]
    complete(db, first[1])
    assert ids(take(db)) == [b2]
    complete(db, first[0])
    assert ids(take(db)) == [a2]


def test_keys_of_other_queues_are_other_keys(serial):
    db = serial
    configure(db, queue="other")
    mine, = insert(db, "a")
    other, = insert(db, "a", queue="other")
    assert ids(take(db)) == [mine]
    assert ids(db.claim("other")) == [other]


def test_serial_across_priorities_and_in_order_within_one(serial):
    db = serial
    bulk = insert(db, "a", 2, priority=4)
    urgent = insert(db, "a", 2, priority=1)
    for job_id in urgent + bulk:
        job, = take(db)
        assert job.job_id == job_id
        complete(db, job)


def test_serial_across_shards(db):
    configure(db, enqueue_shards=1)
    old = insert(db, "a", 2)
    configure(db, enqueue_shards=64)
    new = insert(db, "a", 2)
    seen = []
    for _ in old + new:
        job, = take(db)
        seen.append(job.job_id)
        complete(db, job)
    assert sorted(seen) == sorted(old + new)
    assert [j for j in seen if j in old] == old and [j for j in seen if j in new] == new


# What frees a key, and what does not


ENDS = {
    "complete": "SELECT awa.complete(%s)",
    "complete_many": "SELECT count(*) FROM awa.complete_many(ARRAY[%s::bigint])",
    "fail": "SELECT awa.fail(%s, 'x')",
    "terminal": "SELECT awa.fail(%s, 'x', terminal => true)",
    "snooze": "SELECT awa.snooze(%s, '1 h')",
    "cancel": "SELECT awa.cancel_attempt(%s, 'x')",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_an_attempt_frees_its_key(serial, end):
    db = serial
    first, second = insert(db, "a", 2)
    job, = take(db)
    assert take(db) == []
    conn = db.connect()
    conn.begin()
    conn.execute(ENDS[end], (job.receipt,))
    # Not before it has committed.
    assert take(db) == []
    conn.rollback_sql()
    assert take(db) == []
    db.execute(ENDS[end], job.receipt)
    assert ids(take(db)) == [second]


@pytest.mark.parametrize("base", ["100 ms", "1 h"])
def test_a_job_in_backoff_does_not_block_later_ones_and_runs_alone_again(db, base):
    configure(db, backoff={"base": base, "jitter": 0})
    first, second, third = insert(db, "a", 3)
    job, = take(db)
    db.execute("SELECT awa.fail(%s, 'x')", job.receipt)
    job, = take(db)
    assert job.job_id == second
    if base == "100 ms":
        wait_until(lambda: db.state(first) == "available")
        assert take(db) == []
        seen = []
        for _ in range(2):
            complete(db, job)
            job, = take(db)
            assert take(db) == []
            seen.append(job.job_id)
        assert sorted(seen) == [first, third]


def test_released_jobs(serial):
    db = serial
    jobs = insert(db, "a", 3)
    job, = take(db)
    assert take(db) == []
    db.execute("SELECT awa.release(ARRAY[%s::bigint])", job.receipt)
    seen = []
    for _ in jobs:
        job, = take(db)
        assert take(db) == []
        seen.append(job.job_id)
        complete(db, job)
    assert sorted(seen) == jobs


def test_a_parked_attempt_is_the_running_one_of_its_key(serial):
    db = serial
    first, second = insert(db, "a", 2)
    job, = take(db)
    token = db.value("SELECT awa.register_callback(%s, '1 h')", job.receipt)
    db.execute("SELECT awa.wait_for_callback(%s)", job.receipt)
    assert db.state(first) == "waiting_external"
    assert take(db) == []
    db.execute("SELECT awa.complete_external(%s)", token)
    assert ids(take(db)) == [second]


def test_deadlines_and_owners(serial):
    db = serial
    first, second, third = insert(db, "a", 3)
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime()")
    assert ids(claim(conn, runtime=runtime)) == [first]
    assert take(db) == []
    conn.close()
    wait_until(lambda: db.state(first) == "retryable")
    assert ids(take(db, deadline="50 ms")) == [second]
    assert take(db) == []
    wait_until(lambda: db.state(second) == "retryable")
    assert ids(take(db)) == [third]


def test_jobs_that_expire_or_are_cancelled_in_the_queue(serial):
    db = serial
    first, late, gone, cancelled, last = (
        insert(db, "a")[0],
        db.value("SELECT awa.insert_job('k', opts => jsonb_build_object('ordering_key', 'a',"
                 " 'expires_at', clock_timestamp() + interval '100 ms'))"),
        *insert(db, "a", 3))
    job, = take(db)
    assert take(db) == []  # all others wait for their turn now
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.cancel_job(%s)", (cancelled,))
    db.execute("SELECT awa.delete_job(%s)", gone)
    conn.rollback_sql()
    assert db.value("SELECT awa.cancel_job(%s)::text", cancelled) == "cancelled"
    db.value("SELECT pg_sleep(0.11)")
    complete(db, job)
    # The one that expired had its turn in the transaction that cancelled it.
    found = take(db) or take(db)
    assert ids(found) == [last]
    assert db.state(late) == "cancelled"


def test_a_turn_passes_on_from_a_job_that_is_withdrawn(serial):
    db = serial
    jobs = insert(db, "a", 4)
    job, = take(db)
    assert take(db) == []
    complete(db, job)  # it is the turn of the second
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.cancel_job(%s)", (jobs[1],))
    job, = take(db)
    assert job.job_id == jobs[2]
    conn.rollback_sql()
    assert take(db) == []
    complete(db, job)
    job, = take(db)
    assert job.job_id == jobs[1]
    complete(db, job)
    assert ids(take(db)) == [jobs[3]]


def test_retried_and_dead_jobs(db):
    configure(db, dlq_enabled=True)
    configure(db, queue="plain")
    for queue, revive in [("default", "SELECT awa.dlq_retry(%s)"),
                          ("plain", "SELECT awa.retry_job(%s)")]:
        first, second = insert(db, "a", 2, queue=queue)
        job, = db.claim(queue, 10)
        db.execute("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
        job, = db.claim(queue, 10)
        assert job.job_id == second
        db.execute(revive, first)
        assert db.claim(queue, 10) == []
        complete(db, job)
        assert ids(db.claim(queue, 10)) == [first]


def test_scheduled_jobs_take_their_turn(serial):
    db = serial
    first, = insert(db, "a")
    later = db.value("SELECT awa.insert_job('k', run_at => clock_timestamp() + interval '50 ms',"
                     " opts => '{\"ordering_key\": \"a\"}')")
    job, = take(db)
    wait_until(lambda: db.state(later) == "available")
    assert take(db) == []
    assert outcome(db.conn) == "limited"
    complete(db, job)
    assert ids(take(db)) == [later]


# Transactions


def test_an_open_claim_holds_its_key_and_gives_it_back_in_order(serial):
    db = serial
    jobs = insert(db, "a", 3)
    conn = db.connect()
    conn.begin()
    assert ids(claim(conn, max_jobs=2)) == jobs[:1]
    assert take(db) == []
    conn.rollback_sql()
    for job_id in jobs:
        job, = take(db)
        assert job.job_id == job_id
        complete(db, job)


def test_savepoints(serial):
    db = serial
    jobs = insert(db, "a", 3)
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT s")
    assert ids(claim(conn, max_jobs=3)) == jobs[:1]
    conn.execute("ROLLBACK TO s")
    other = db.connect()
    other.begin()
    assert ids(claim(other, max_jobs=3)) == jobs[:1]
    assert claim(conn, max_jobs=3) == []
    other.rollback_sql()
    job, = claim(conn, max_jobs=3)
    assert job.job_id == jobs[0]
    conn.execute("SAVEPOINT t")
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.execute("ROLLBACK TO t")
    conn.commit_sql()
    assert take(db) == []
    complete(db, job)
    assert ids(take(db)) == jobs[1:2]


def test_claims_that_keep_rolling_back_let_others_pass(serial):
    db = serial
    jobs = insert(db, "a", 2)
    conn = db.connect()
    for _ in range(3):
        conn.begin()
        assert ids(claim(conn, max_jobs=2)) == jobs[:1]
        conn.rollback_sql()
    assert ids(take(db)) == jobs[1:]


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_prepared_close(own_db, end):
    db = own_db
    configure(db)
    first, second = insert(db, "a", 2)
    job, = take(db)
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.execute("PREPARE TRANSACTION 'g'")
    assert take(db) == []
    db.execute(f"{end} PREPARED 'g'")
    if end == "ROLLBACK":
        assert take(db) == []
        complete(db, job)
    assert ids(take(db)) == [second]


def test_a_claim_that_reads_while_others_take(serial, debug):
    db = serial
    insert(db, None)
    jobs = insert(db, "a", 3)
    conn = db.connect()
    with debug(db).at("claim_keys_read") as point:
        call = Background(claim, conn, max_jobs=1)
        point.wait()
        point.release()
        assert len(call.result()) == 1
    job, = take(db)
    assert job.job_id == jobs[0]


# Waiting


@pytest.mark.parametrize("end", ["commit", "rollback", "kill"])
def test_a_waiter_is_woken_when_a_key_becomes_free(serial, end):
    db = serial
    db.execute(f"ALTER DATABASE {db.name} SET awa.claim_wait_max = '60 s'")
    first, second = insert(db, "a", 2)
    holder, waiter = db.connect(), db.connect()
    holder.begin()
    job, = claim(holder)
    if end == "commit":
        holder.commit_sql()
    call = Background(claim, waiter, wait="60 s")
    wait_in(db.conn, waiter.pid, "awa.claim")
    wait_until(lambda: db.value(
        "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = %s", waiter.pid))
    assert not call.wait(1.2)
    start = time.monotonic()
    if end == "commit":
        complete(db, job)
    elif end == "rollback":
        holder.rollback_sql()
    else:
        db.value("SELECT pg_terminate_backend(%s)", holder.pid)
    assert ids(call.result(5)) == [second if end == "commit" else first]
    assert time.monotonic() - start < 0.8


def test_a_waiter_does_not_spin(serial):
    db = serial
    insert(db, "a", 500)
    take(db, 1)
    conn = db.connect()
    assert claim(conn) == []
    before = db.value("SELECT pg_current_xact_id()::text::bigint")
    assert claim(conn, wait="300 ms") == []
    assert outcome(conn) == "limited"
    # No claim was tried: a try takes a transaction id.
    assert db.value("SELECT pg_current_xact_id()::text::bigint") == before + 1


# Changes of the setting


def test_a_change_takes_effect_at_once(db):
    jobs = insert(db, "a", 6)
    one, two = take(db, 2)
    configure(db)
    # Two of the key run, and the third waits for both.
    assert take(db) == []
    complete(db, one)
    assert take(db) == []
    complete(db, two)
    job, = take(db)
    assert job.job_id == jobs[2]
    assert take(db) == []
    conn = db.connect()
    conn.begin()
    configure(db, "lane", conn=conn)
    assert take(db) == []
    conn.commit_sql()
    assert ids(take(db, 2)) == jobs[3:5]
    configure(db)
    assert take(db) == []


def test_a_waiter_learns_of_a_change(db):
    configure(db)
    db.execute(f"ALTER DATABASE {db.name} SET awa.claim_wait_max = '60 s'")
    jobs = insert(db, "a", 2)
    take(db)
    conn = db.connect()
    call = Background(claim, conn, wait="60 s")
    wait_in(db.conn, conn.pid, "awa.claim")
    assert not call.wait(0.2)
    configure(db, "lane")
    assert ids(call.result(5)) == jobs[1:]


# Memory that is rebuilt


@pytest.mark.parametrize("how", ["rebuild", "fast", "kill -9"])
def test_open_attempts_have_their_turns_after_a_rebuild(own_db, how):
    db = own_db
    configure(db)
    configure(db, queue="idle")
    jobs = insert(db, "a", 3)
    others = insert(db, "b", 2)
    one, two = take(db)
    parked, = insert(db, "c", queue="idle")
    job, = db.claim("idle")
    token = db.value("SELECT awa.register_callback(%s, '1 h')", job.receipt)
    db.execute("SELECT awa.wait_for_callback(%s)", job.receipt)
    insert(db, "c", queue="idle")
    db.execute("CREATE TABLE public.flushed (x int)")
    if how == "rebuild":
        db.execute("SELECT awa.rebuild()")
    elif how == "fast":
        db.server.restart("fast")
        db.wait_served()
    else:
        db.server.kill_postmaster()
        db.server.start()
        db.wait_served()
    assert take(db) == []
    assert outcome(db.conn) == "limited"
    assert db.claim("idle") == []
    complete(db, two)
    assert ids(take(db)) == others[1:]
    complete(db, one)
    assert ids(take(db)) == jobs[1:2]


@pytest.mark.parametrize("end", ["commit_sql", "rollback_sql"])
def test_an_open_claim_has_its_turn_after_a_rebuild(serial, end):
    db = serial
    jobs = insert(db, "a", 2)
    conn = db.connect()
    conn.begin()
    assert ids(claim(conn)) == jobs[:1]
    db.execute("SELECT awa.rebuild()")
    assert take(db) == []
    getattr(conn, end)()
    assert ids(take(db)) == ([] if end == "commit_sql" else jobs[:1])


def test_a_backlog_larger_than_memory(new_server, request):
    from harness import Database

    server = new_server({"awa.max_chunks": "112"})
    db = Database(server)
    try:
        configure(db, queue="big")
        for first in range(0, 100, 20):
            db.execute(
                "SELECT count(*) FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object("
                "'kind', 'k', 'queue', 'big', 'opts', jsonb_build_object('ordering_key', "
                "'k' || i / 1024))) FROM generate_series(%s::int, %s::int) i))",
                first * 1024, (first + 20) * 1024 - 1)
        jobs = db.claim("big", 1000)
        assert len(jobs) == 100
        assert outcome(db.conn) == "claimed"
        assert db.claim("big", 1000) == []
        assert outcome(db.conn) == "limited"
        db.execute("SELECT count(*) FROM awa.complete_many(%s)", [job.receipt for job in jobs])
        again = db.claim("big", 1000)
        assert [job.job_id for job in again] == [job.job_id + 1 for job in jobs]
        db.check()
    finally:
        db.close_sessions()


def test_no_room_for_jobs_that_wait(new_server):
    from harness import Database

    db = Database(new_server({"awa.max_timers": "1024"}))
    configure(db)
    for _ in range(2):  # each key twice: each wait needs a place of its own
        db.execute(
            "SELECT count(*) FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object('kind', 'k',"
            " 'opts', jsonb_build_object('ordering_key', 'k' || i)))"
            " FROM generate_series(1, 1500) i))")
    first = take(db, 1500)
    assert len(first) == 1500
    with raises("AW004") as caught:
        take(db, 10)
    assert "awa.max_timers" in caught.error.diag.message_detail
    db.execute("SELECT count(*) FROM awa.complete_many(%s)", [job.receipt for job in first])
    assert len(take(db, 1500)) == 1500
    db.check()
    db.close_sessions()


# All of it at once


def test_no_two_attempts_of_a_key_overlap(own_db):
    """Workers at random, with rollbacks, failures, kills and a rebuild. What they did is told by
    the tables: an attempt lasts from its claim to its end."""
    db = own_db
    configure(db, backoff={"base": "20 ms", "jitter": 0, "max": "50 ms"}, max_attempts=1000)
    db.execute("CREATE TABLE attempts (job_id bigint, key text, receipt bigint, n bigserial,"
               " began bigint, ended bigint)")
    db.execute("CREATE SEQUENCE clock")
    seed = time.time_ns() % 1_000_000
    print("seed", seed)
    keys = {}
    dice = random.Random(seed)
    for _ in range(60):
        key = dice.choice(["a", "b", "c", "d", "e", None])
        for job_id in insert(db, key, dice.randint(1, 5), priority=dice.choice([1, 2])):
            keys[job_id] = key
    priorities = dict(db.rows("SELECT id, priority FROM awa.jobs"))
    finished, calm = threading.Event(), threading.Event()
    surprises, pids = [], {}
    given_back = Counter()  # who is given back three times in a row is put off

    def work(number):
        dice = random.Random(f"{seed}/{number}")
        while not finished.is_set():
            claimed = []
            try:
                conn = db.server.connect(db.name)
                pids[number] = conn.pid
                runtime = conn.value("SELECT awa.register_runtime()")
                while not finished.is_set():
                    conn.begin()
                    claimed = jobs = claim(conn, max_jobs=dice.choice([1, 1, 2, 5]), runtime=runtime,
                                 wait="100 ms")
                    if dice.random() < 0.1 and not calm.is_set():
                        conn.rollback_sql()
                        given_back.update(ids(jobs))
                        continue
                    for job in jobs:
                        conn.execute(
                            "INSERT INTO attempts VALUES (%s, %s, %s, DEFAULT, nextval('clock'))",
                            (job.job_id, keys[job.job_id], job.receipt))
                    conn.commit_sql()
                    claimed = []
                    time.sleep(dice.random() * 0.01)
                    for job in jobs:
                        conn.begin()
                        conn.execute(
                            "UPDATE attempts SET ended = nextval('clock') WHERE receipt = %s",
                            (job.receipt,))
                        roll = dice.random()
                        if roll < 0.25 and not calm.is_set():
                            conn.execute("SELECT awa.fail(%s, 'x')", (job.receipt,))
                        elif roll < 0.3 and not calm.is_set():
                            conn.execute("SELECT awa.release(ARRAY[%s::bigint])", (job.receipt,))
                        else:
                            conn.execute("SELECT awa.complete(%s)", (job.receipt,))
                        if dice.random() < 0.1 and not calm.is_set():
                            conn.rollback_sql()
                            conn.begin()
                            conn.execute("UPDATE attempts SET ended = nextval('clock')"
                                         " WHERE receipt = %s", (job.receipt,))
                            conn.execute("SELECT awa.complete(%s)", (job.receipt,))
                        conn.commit_sql()
                conn.close()
            except psycopg.Error as error:
                if error.diag.sqlstate not in (None, "57P01", "AW001", "AW002", "AW003"):
                    surprises.append(str(error))
                pids.pop(number, None)
                given_back.update(ids(claimed))

    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(6)]
    for worker in workers:
        worker.start()
    left = "SELECT count(*) FROM awa.jobs WHERE state <> 'completed'"
    end = time.monotonic() + 4
    while time.monotonic() < end:
        time.sleep(0.15)
        act = dice.random()
        if act < 0.5 and pids:
            db.value("SELECT pg_terminate_backend(%s)", dice.choice(list(pids.values())))
        elif act < 0.6:
            db.execute("SELECT awa.rebuild()")
        key = dice.choice(["a", "b", "c"])
        db.conn.begin()
        for job_id in insert(db, key, 2):  # nobody claims them before we know them
            keys[job_id] = key
            priorities[job_id] = 2
        db.conn.commit_sql()
    calm.set()
    wait_until(lambda: db.value(left) == 0, 60)
    finished.set()
    for worker in workers:
        worker.join(20)
    assert surprises == []
    # One that was lost with its session has the end that its rescue gave it: before the next
    # claim of its key, which is what the order of `began` shows.
    last, firsts, seen = {}, defaultdict(list), set()
    for job_id, key, receipt, began, ended in db.rows(
            "SELECT job_id, key, receipt, began, ended FROM attempts ORDER BY began"):
        if key is None:
            continue
        if key in last and last[key] is not None:
            assert last[key] < began, (key, job_id, receipt)
        last[key] = ended
        if job_id not in seen:
            seen.add(job_id)
            if given_back[job_id] < 2:
                firsts[key, priorities[job_id]].append(job_id)
    assert len(seen) == sum(key is not None for key in keys.values())
    assert firsts and all(order == sorted(order) for order in firsts.values())
    closed = [
        (key, attempt["claimed_at"], attempt["closed_at"])
        for job_id, key in keys.items() if key is not None
        for attempt in db.value("SELECT awa.dump_job(%s) -> 'attempts'", job_id)
    ]
    spans = defaultdict(list)
    for key, began, ended in closed:
        assert ended is not None
        spans[key].append((began, ended))
    for key, of in spans.items():
        of.sort()
        for (_, ended), (began, _) in zip(of, of[1:]):
            assert ended <= began, (key, ended, began)
