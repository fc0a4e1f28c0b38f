"""Unique keys: held exactly while a job in a masked state exists, whatever moves it."""

import datetime
import time

import pytest
from conftest import use
from psycopg.types.json import Jsonb

from harness import Background, Database, claim, raises, wait_blocked, wait_until

STATES = [
    "scheduled", "available", "running", "completed",
    "retryable", "failed", "cancelled", "waiting_external",
]
DEFAULT = ["scheduled", "available", "running", "retryable", "waiting_external"]
LEVELS = ["read committed", "repeatable read", "serializable"]


def insert(conn, key="one", states=None, queue="default", **options):
    """The id of a job with this key, or of the one that holds it."""
    if states is not None:
        options["unique_states"] = states
    run_at = options.pop("run_at", None)
    return conn.value(
        "SELECT awa.insert_job('k', queue => %s, unique_key => %s, opts => %s,"
        " run_at => clock_timestamp() + %s::interval)",
        queue, key, Jsonb(options), run_at,
    )


def held(db):
    """The keys that are held, and by whom."""
    return {
        bytes(key).decode(): job
        for key, job in db.rows("SELECT unique_key, job_id FROM awa.job_unique_claims")
    }


def errors(db, job_id):
    return [error["error"] for error in db.job(job_id).errors]


# Where a key is held


@pytest.mark.parametrize("states", [None, [], STATES, *([state] for state in STATES[:7])], ids=str)
def test_a_key_is_held_in_the_states_of_its_mask(db, states):
    masked = DEFAULT if states is None else states

    def is_in(job_id, state):
        """One look at both: the worker may move the job at any time."""
        found, holder = db.row(
            "SELECT (SELECT state::text FROM awa.get_job(%s)),"
            " (SELECT job_id FROM awa.job_unique_claims WHERE unique_key = 'one')",
            job_id,
        )
        if found != state:
            return False
        assert holder == (job_id if state in masked else None), state
        return True

    job_id = insert(db, states=states, run_at="400 ms")
    assert is_in(job_id, "scheduled")
    wait_until(lambda: is_in(job_id, "available"))
    job, = db.claim()
    assert is_in(job_id, "running")
    db.value("SELECT awa.release(%s)", [job.receipt])
    wait_until(lambda: is_in(job_id, "available"))
    job, = wait_until(db.claim)
    for again in ("300 ms", "0"):
        assert db.value("SELECT awa.fail(%s, 'x', %s)::text", job.receipt, again) == "retryable"
        if again != "0":
            assert is_in(job_id, "retryable")
        wait_until(lambda: is_in(job_id, "available"))
        job, = wait_until(db.claim)
        assert is_in(job_id, "running")
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert is_in(job_id, "completed")


@pytest.mark.parametrize("states", [None, ["failed"], ["retryable"], STATES], ids=str)
def test_long_backoff_and_failure(db, states):
    masked = DEFAULT if states is None else states
    job_id = insert(db, states=states)
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'x', '1 hour')", job.receipt)
    assert db.state(job_id) == "retryable"
    assert ("one" in held(db)) == ("retryable" in masked)
    other = insert(db, "two", states)
    job, = db.claim()
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", job.receipt)
    assert db.state(other) == "failed"
    assert ("two" in held(db)) == ("failed" in masked)


def test_the_first_one_is_told_while_it_lives(db):
    first = insert(db)
    assert insert(db) == first
    job, = db.claim()
    assert insert(db, queue="other") == first
    db.execute("SELECT awa.fail(%s, 'x', '0')", job.receipt)
    assert insert(db) == first
    job, = wait_until(db.claim)
    db.execute("SELECT awa.complete(%s)", job.receipt)
    second = insert(db)
    assert second != first
    assert db.count() == 2


def test_completion_in_every_form_frees_the_key(db):
    db.insert(20)
    for key in "abcd":
        insert(db, key)
    jobs = db.claim(max_jobs=24)
    keyed = [job.receipt for job in jobs[20:]]
    assert held(db).keys() == set("abcd")
    db.execute("SELECT awa.complete(%s, '{}')", keyed[0])
    db.rows("SELECT * FROM awa.complete_many(%s)", keyed[1:3] + [jobs[0].receipt])
    assert held(db).keys() == {"d"}
    db.rows("SELECT * FROM awa.complete_and_claim(%s, 'default')", [keyed[3], jobs[1].receipt])
    assert held(db) == {}


def test_keys_within_one_transaction_and_statement(db):
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT s")
    insert(conn)
    conn.execute("ROLLBACK TO s")
    first = insert(conn)
    assert insert(conn) == first
    conn.commit_sql()
    # The key is taken by the claim and freed by the completion of one statement.
    other = insert(db, "two", ["running"], queue="two")
    db.execute("SELECT awa.complete(receipt) FROM awa.claim('two')")
    assert held(db) == {"one": first}
    assert db.state(other) == "completed"
    conn.begin()
    job, = claim(conn)
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    second = insert(conn)
    assert second != first
    conn.rollback_sql()
    assert held(db) == {"one": first}
    assert len(wait_until(db.claim)) == 1


# Who comes second


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_the_second_waits_for_the_first(db, level, end):
    first, second = db.connect(), db.connect()
    first.begin()
    holder = insert(first)
    second.execute(f"BEGIN ISOLATION LEVEL {level}")
    second.execute("SELECT 1")
    call = Background(insert, second)
    wait_blocked(db.conn, second.pid)
    first.execute(end)
    assert (call.result() == holder) == (end == "COMMIT")
    second.commit_sql()
    assert db.count() == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_the_second_waits_for_a_completion(db, level, end):
    holder = insert(db)
    job, = db.claim()
    first, second = db.connect(), db.connect()
    first.execute(f"BEGIN ISOLATION LEVEL {level}")
    first.execute("SELECT awa.complete(%s)", (job.receipt,))
    second.execute(f"BEGIN ISOLATION LEVEL {level}")
    second.execute("SELECT 1")
    call = Background(insert, second)
    wait_blocked(db.conn, second.pid)
    first.execute(end)
    assert (call.result() == holder) == (end == "ROLLBACK")
    second.commit_sql()
    if end == "COMMIT":
        # A key that came after the snapshot of its closer is freed all the same.
        first.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
        first.execute("SELECT 1")
        late = insert(db, "late", queue="late")
        job, = claim(first, "late")
        first.execute("SELECT awa.complete(%s)", (job.receipt,))
        first.commit_sql()
        assert late not in held(db).values()


def test_a_prepared_transaction_holds(db):
    first, second = db.connect(), db.connect()
    first.begin()
    holder = insert(first)
    first.execute("PREPARE TRANSACTION 'keyed'")
    call = Background(insert, second)
    wait_blocked(db.conn, second.pid)
    db.execute("COMMIT PREPARED 'keyed'")
    assert call.result() == holder


def test_waiting_obeys_the_session(db):
    first, second = db.connect(), db.connect()
    first.begin()
    insert(first)
    second.execute("SET lock_timeout = '100ms'")
    with raises("55P03"):
        insert(second)
    second.execute("SET lock_timeout = 0")
    second.execute("SET statement_timeout = '100ms'")
    with raises("57014"):
        insert(second)
    second.execute("SET statement_timeout = 0")
    call = Background(insert, second)
    wait_blocked(db.conn, second.pid)
    db.execute("SELECT pg_cancel_backend(%s)", second.pid)
    with raises("57014"):
        call.result()
    first.rollback_sql()


def test_opposite_orders_are_a_deadlock(db):
    """Not within a call, but across calls: the server sees it."""
    one, two = db.connect(), db.connect()
    for conn, key in ((one, "a"), (two, "b")):
        conn.begin()
        conn.execute("SET deadlock_timeout = '50ms'")
        insert(conn, key)
    call = Background(insert, one, "b")
    wait_blocked(db.conn, one.pid)
    try:
        insert(two, "a")
        victim = one
    except Exception as error:
        assert error.sqlstate == "40P01"
        victim = two
        two.rollback_sql()
        call.result()
        one.commit_sql()
    if victim is one:
        with raises("40P01"):
            call.result()
        one.rollback_sql()
        two.commit_sql()
    assert held(db).keys() == {"a", "b"}


def test_error_on_conflict(db):
    holder = insert(db)
    for _ in range(2):
        with raises("23505", str(holder)) as caught:
            insert(db, on_conflict="error")
        assert caught.error.diag.constraint_name == "idx_awa_jobs_unique"
    conn, other = db.connect(), db.connect()
    conn.begin()
    insert(conn, "two", on_conflict="error")
    call = Background(insert, other, "two", on_conflict="error")
    wait_blocked(db.conn, other.pid)
    conn.commit_sql()
    with raises("23505"):
        call.result()
    assert db.count() == 2


def test_twenty_inserters_make_one_job(db):
    sessions = [db.connect() for _ in range(20)]
    for round_ in range(5):
        calls = [Background(insert, conn, f"key {round_}") for conn in sessions]
        assert len({call.result() for call in calls}) == 1
    assert db.count() == 5


def test_many_rounds_of_one_key(db):
    """Insert, claim and complete by several sessions at once: one job at a time."""

    def work(conn):
        done = 0
        for _ in range(60):
            insert(conn, "hot")
            for job in claim(conn):
                conn.execute("SELECT awa.complete(%s)", (job.receipt,))
                done += 1
        return done

    calls = [Background(work, db.connect()) for _ in range(6)]
    done = sum(call.result(60) for call in calls)
    assert done > 10
    assert db.count(state="completed") == done


# Batches


def batch(conn, jobs, **options):
    return conn.rows(
        "SELECT ord, job_id, duplicate FROM awa.insert_jobs(%s, %s)",
        Jsonb([{"kind": "k"} | job for job in jobs]), Jsonb(options),
    )


def test_duplicates_in_a_batch(db):
    old = insert(db, "old")
    keys = ["b", None, "a", "old", "b", "a", None]
    rows = batch(db, [{"unique_key": key} for key in keys])
    assert [row[0] for row in rows] == list(range(1, 8))
    assert [row[2] for row in rows] == [False, False, False, True, True, True, False]
    ids = [row[1] for row in rows]
    assert ids[3] == old and ids[4] == ids[0] and ids[5] == ids[2]
    assert len(set(ids)) == 5
    assert [job.job_id for job in db.claim(max_jobs=10)] == [old, ids[0], ids[1], ids[2], ids[6]]
    # A strict one among them fails the call, and nothing is inserted.
    with raises("23505"):
        batch(db, [{}, {"unique_key": "new"}, {"unique_key": "a", "opts": {"on_conflict": "error"}}])
    with raises("23505"):
        batch(db, [{"unique_key": "c"}, {"unique_key": "c"}], on_conflict="error")
    assert db.count() == 5


def test_a_batch_of_scheduled_and_unmasked_jobs(db):
    at = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)).isoformat()
    only_scheduled = {"unique_states": ["scheduled"]}
    rows = batch(db, [
        {"unique_key": "a", "run_at": at},
        {"unique_key": "a"},
        {"unique_key": "b", "opts": only_scheduled},
        {"unique_key": "b", "opts": only_scheduled},
        {"unique_key": "b", "opts": only_scheduled, "run_at": at},
    ])
    assert [row[2] for row in rows] == [False, True, False, False, False]
    assert held(db) == {"a": rows[0][1], "b": rows[4][1]}


def test_batches_cannot_deadlock_among_themselves(db):
    keys = [f"key {n}" for n in range(300)]

    def work(conn, order):
        return [batch(conn, [{"unique_key": key} for key in order]) for _ in range(5)]

    calls = [Background(work, db.connect(), keys[:: 1 - 2 * (n % 2)]) for n in range(6)]
    fresh = sum(
        not row[2] for call in calls for rows in call.result(60) for row in rows
    )
    assert fresh == 300 == db.count()


# Jobs that lost their key


def lost_its_key(db, states, queue="default"):
    """A running job whose key does not cover running, and the job that has the key now."""
    loser = insert(db, states=states, queue=queue)
    job, = db.claim(queue)
    winner = insert(db, queue="winners")
    assert winner != loser
    return loser, job.receipt, winner


@pytest.mark.parametrize("act", ["fail", "fail later", "release"])
def test_the_owner_learns_that_the_key_is_lost(db, act):
    loser, receipt, winner = lost_its_key(db, ["available", "retryable"])
    if act == "release":
        assert db.value("SELECT awa.release(%s)", [receipt]) == 0
    else:
        again = "0" if act == "fail" else "1 hour"
        assert db.value("SELECT awa.fail(%s, 'x', %s)::text", receipt, again) == "cancelled"
    assert db.state(loser) == "cancelled"
    assert f"job {winner}" in errors(db, loser)[-1]
    assert held(db) == {"one": winner}
    with raises("AW001"):
        db.execute("SELECT awa.complete(%s)", receipt)


def test_completion_and_failure_never_conflict(db):
    for key, act in (("a", "complete(%s)"), ("b", "fail(%s, 'x', terminal => true)")):
        states = ["available", "completed", "failed"]
        insert(db, key, states)
        job, = db.claim()
        winner = insert(db, key, queue="winners")
        db.execute(f"SELECT awa.{act}", job.receipt)
        assert db.state(job.job_id) in ("completed", "failed")
        assert held(db)[key] == winner


def test_a_rescued_job_that_lost_its_key_stops_nobody(db):
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime('worker')")
    loser = insert(db, states=["available", "retryable"])
    others = db.insert(5)
    assert len(claim(conn, max_jobs=10, runtime=runtime)) == 6
    winner = insert(db, queue="winners")
    conn.close()
    wait_until(lambda: db.state(loser) == "cancelled")
    assert f"job {winner}" in errors(db, loser)[-1]
    assert {db.state(job) for job in others} <= {"retryable", "available"}
    assert db.value("SELECT cancelled_total FROM awa.queue_stats WHERE queue = 'default'") == 1


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_rescue_waits_for_nobody(db, end):
    conn, open_ = db.connect(), db.connect()
    runtime = conn.value("SELECT awa.register_runtime('worker')")
    undecided = insert(db, states=["available", "retryable"])
    others = db.insert(5)
    assert len(claim(conn, max_jobs=10, runtime=runtime)) == 6
    open_.begin()
    insert(open_, queue="winners")
    conn.close()
    wait_until(lambda: {db.state(job) for job in others} <= {"retryable", "available"})
    assert db.state(undecided) == "running"
    open_.execute(end)
    wanted = {"cancelled"} if end == "COMMIT" else {"retryable", "available"}
    wait_until(lambda: db.state(undecided) in wanted)


def test_an_expired_job_that_lost_its_key(db):
    loser = insert(db, states=["available", "retryable"])
    db.claim(deadline="200 ms")
    winner = insert(db, queue="winners")
    wait_until(lambda: db.state(loser) == "cancelled")
    assert held(db) == {"one": winner}


def test_a_promoted_job_that_lost_its_key_stops_nobody(db):
    loser = insert(db, states=["available"], run_at="300 ms")
    other = insert(db, "two", run_at="300 ms")
    winner = insert(db, states=["available"])
    wait_until(lambda: db.state(loser) == "cancelled")
    assert f"job {winner}" in errors(db, loser)[-1]
    db.wait_state(other, "available")
    stats = db.row(
        "SELECT cancelled_total, scheduled FROM awa.queue_stats WHERE queue = 'default'"
    )
    assert stats == (1, 0)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_promotion_waits_for_nobody(db, end):
    undecided = insert(db, states=["available"], run_at="300 ms")
    other = insert(db, "two", run_at="300 ms")
    conn = db.connect()
    conn.begin()
    insert(conn)
    db.wait_state(other, "available")
    time.sleep(0.2)
    assert db.state(undecided) == "scheduled"
    conn.execute(end)
    db.wait_state(undecided, "cancelled" if end == "COMMIT" else "available")


def test_a_claimed_job_that_lost_its_key_does_not_run(db):
    """The key covers running only: two jobs wait, one at a time may run."""
    first, second = (insert(db, states=["running"]) for _ in range(2))
    plain, = db.insert()
    assert held(db) == {}
    jobs = db.claim(max_jobs=10)
    assert [job.job_id for job in jobs] == [first, plain]
    assert db.state(second) == "cancelled"
    assert held(db) == {"one": first}
    third = insert(db, states=["running"])
    conn, other = db.connect(), db.connect()
    conn.begin()
    conn.execute("SELECT awa.complete(%s)", (jobs[0].receipt,))
    call = Background(claim, other)
    wait_blocked(db.conn, other.pid)
    conn.commit_sql()
    assert [job.job_id for job in call.result()] == [third]


def test_a_claim_that_rolls_back_leaves_the_key(db):
    job_id = insert(db, states=["available"])
    conn = db.connect()
    conn.begin()
    claim(conn)
    conn.rollback_sql()
    assert held(db) == {"one": job_id}
    job, = wait_until(db.claim)
    assert held(db) == {}
    db.execute("SELECT awa.complete(%s)", job.receipt)


# The end of segments, and of servers


def test_truncation_frees_the_keys_of_completed_jobs(new_server, request):
    server = new_server({"awa.rotate_interval": "100ms", "awa.completed_retention": "500ms"})
    for db in use(Database(server), request):
        states = [*DEFAULT, "completed", "failed"]
        first, failed = insert(db, states=states), insert(db, "failed", states)
        jobs = db.claim(max_jobs=2)
        db.execute("SELECT awa.complete(%s)", jobs[0].receipt)
        db.execute("SELECT awa.fail(%s, 'x', terminal => true)", jobs[1].receipt)
        assert insert(db, states=states) == first
        wait_until(lambda: db.state(first) is None, 20)
        assert held(db) == {"failed": failed}
        assert insert(db, states=states) != first


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_restart_keeps_keys(own_db, how):
    db = own_db
    waiting, running = insert(db, "waiting"), insert(db, "running", queue="q")
    job, = db.claim("q", deadline="1 hour")
    db.execute("CREATE TABLE public.flushed (x int)")
    db.server.restart(how)
    db.wait_served()
    assert held(db) == {"waiting": waiting, "running": running}
    assert insert(db, "running") == running
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert held(db) == {"waiting": waiting}


@pytest.mark.parametrize("act", ["release", "fail"])
def test_attempts_of_an_earlier_life(own_db, act):
    db = own_db
    insert(db, states=["available"])
    job, = db.claim(deadline="1 hour")
    db.execute("CREATE TABLE public.flushed (x int)")
    db.server.restart("immediate")
    db.wait_served()
    if act == "release":
        db.execute("SELECT awa.release(%s)", [job.receipt])
        assert held(db) == {"one": job.job_id}
    else:
        db.execute("SELECT awa.fail(%s, 'x', '1 hour')", job.receipt)
        assert held(db) == {}


# Computed keys


def key_of(db, by, queue="q", args=None, kind="mail", **options):
    job_id = db.value(
        "SELECT awa.insert_job(%s, %s, %s, opts => %s)",
        kind, Jsonb(args or {}), queue, Jsonb(options | {"unique_by": by}),
    )
    return bytes(db.job(job_id).unique_key).hex()


def test_keys_are_those_that_other_producers_compute(db):
    db.execute(
        "SELECT awa.insert_job('mail', '{\"b\": \"x y\", \"a\": {\"é\": 1.50, \"z\": []}}', 'q',"
        " opts => '{\"unique_by\": [\"args\"]}')"
    )
    key, mask = db.row("SELECT encode(unique_key, 'hex'), unique_states::text FROM awa.jobs")
    assert (key, mask) == ("01b8ea8414fc7aff4fc181119c077880", "11101001")
    assert key_of(db, []) == "a5d56811b40efd3460119439d14d5228"
    assert key_of(db, ["queue"]) == "480ee73967f63e63174abd5080ec38ad"
    long = {"x": "y" * 5000}
    assert key_of(db, ["queue", "args"], args=long, queue="other") == "aa92e97c662aac106f0ef855a6fb209f"
    assert key_of(db, ["args"], args=long) == "6e3008b25cda0824c9986352148e2a25"


def test_unique_by(db):
    def job(queue="q", by=("args",), args=None, **options):
        return db.value(
            "SELECT awa.insert_job('mail', %s, %s, opts => %s)",
            Jsonb(args or {}), queue, Jsonb(options | {"unique_by": list(by)}),
        )

    first = job(args={"a": 1, "b": [1, 2]})
    assert job("other", args={"b": [1, 2], "a": 1}) == first
    assert job(args={"a": 1, "b": [2, 1]}) != first
    assert job("other", by=("queue", "args"), args={"a": 1, "b": [1, 2]}) != first
    in_year = job(by=(), unique_period="1000 years")
    assert job(by=(), unique_period="1000 years") == in_year
    at_once = job(by=("queue",), unique_period="1 microsecond")
    assert job(by=("queue",), unique_period="1 microsecond") != at_once
    row, = db.rows(
        "SELECT job_id, duplicate FROM awa.insert_jobs(%s, '{\"unique_by\": [\"args\"]}')",
        Jsonb([{"kind": "mail", "args": {"a": 1, "b": [1, 2]}}]),
    )
    assert row == (first, True)


def test_text_keys_are_their_bytes(db):
    insert(db, "schlüssel")
    assert db.value("SELECT unique_key FROM awa.job_unique_claims") == "schlüssel".encode()
    insert(db, "")
    assert "" in held(db)


@pytest.mark.parametrize(
    "options",
    [
        {"unique_states": "running"},
        {"unique_states": ["sleeping"]},
        {"unique_states": [1]},
        {"unique_by": ["args"]},
        {"unique_period": "1 hour"},
        {"on_conflict": "ignore"},
        {"on_conflict": 1},
    ],
    ids=str,
)
def test_bad_options(db, options):
    with raises("22023"):
        insert(db, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"unique_by": "args"},
        {"unique_by": ["tags"]},
        {"unique_by": [], "unique_period": 5},
        {"unique_by": [], "unique_period": "0"},
        {"unique_by": [], "unique_period": "-1 hour"},
        {"unique_period": "1 hour"},
    ],
    ids=str,
)
def test_bad_options_without_a_key(db, options):
    with raises("22023"):
        db.execute("SELECT awa.insert_job('k', opts => %s)", Jsonb(options))


def test_limits(db):
    with raises("23514"):
        insert(db, "x" * 2001)
    insert(db, "x" * 2000)
