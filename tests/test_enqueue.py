"""insert_job and insert_jobs: what goes in, what is refused, and when it can be claimed."""

import json
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness import Background, raises, wait_blocked, wait_until


def test_defaults(db):
    job_id = db.value("SELECT awa.insert_job('mail')")
    job = db.job(job_id)
    assert (job.id, job.kind, job.queue, job.args) == (job_id, "mail", "default", {})
    assert (job.state, job.priority, job.attempt, job.max_attempts) == ("available", 2, 0, 25)
    assert job.attempted_at is None and job.finalized_at is None


def test_every_argument_arrives(db):
    job_id = db.value(
        "SELECT awa.insert_job(kind => 'mail', args => '{\"to\": [1, 2]}', queue => 'q',"
        " priority => 1, run_at => NULL, max_attempts => 3, tags => '{a,b}',"
        " metadata => '{\"m\": true}', unique_key => 'once', opts => '{}')"
    )
    job = db.job(job_id)
    assert (job.kind, job.queue, job.args) == ("mail", "q", {"to": [1, 2]})
    assert (job.priority, job.max_attempts, job.tags) == (1, 3, ["a", "b"])
    assert job.metadata["m"] is True
    claimed, = db.claim("q")
    assert (claimed.kind, claimed.queue, claimed.args) == ("mail", "q", {"to": [1, 2]})
    assert (claimed.priority, claimed.attempt, claimed.max_attempts) == (1, 1, 3)
    assert claimed.tags == ["a", "b"] and claimed.metadata["m"] is True
    db.execute("SELECT awa.complete(%s)", claimed.receipt)


def test_ids_are_distinct_and_ascend_in_a_session(db):
    ids = [db.value("SELECT awa.insert_job('k')") for _ in range(50)] + db.insert(50)
    assert len(set(ids)) == 100 and min(ids) > 0
    assert ids == sorted(ids)


@pytest.mark.parametrize(
    "args",
    [
        "null", "true", "0", "-0.0", "1.10", "1.0e0", '""', "[]", "{}", '"text"',
        "12345678901234567890123456789.000000000000000000001",
        '{"a": {"b": [1, 2.50, null, {"c": "\\u00e9\\ud83d\\ude00"}]}}',
        '{"z": 1, "a": 2, "aa": 3}',
    ],
)
def test_args_come_back_digit_for_digit(db, args):
    expected = db.value("SELECT %s::jsonb::text", args)
    job_id = db.value("SELECT awa.insert_job('k', %s::jsonb)", args)
    assert db.value("SELECT args::text FROM awa.get_job(%s)", job_id) == expected
    receipt, found = db.row("SELECT receipt, args::text FROM awa.claim('default')")
    assert found == expected
    db.execute("SELECT awa.complete(%s)", receipt)


def test_large_args(db):
    """Bigger than a page, and both kinds of TOAST: compressible and not."""
    for text in ("x" * 3_000_000, "".join(chr(33 + i * 7919 % 90) for i in range(200_000))):
        db.execute("SELECT awa.insert_job('big', %s)", Jsonb({"t": text}))
        job, = db.claim()
        assert job.args == {"t": text}
        db.execute("SELECT awa.complete(%s)", job.receipt)


def test_null_arguments(db):
    with raises("22023"):
        db.execute("SELECT awa.insert_job(NULL)")
    with raises("22023"):
        db.execute("SELECT * FROM awa.insert_jobs('[{\"queue\": \"q\"}]')")
    assert db.count() == 0


@pytest.mark.parametrize(
    "call, code",
    [
        ("insert_job('k', priority => 0)", "23514"),
        ("insert_job('k', priority => 5)", "23514"),
        ("insert_job('k', priority => -2147483648)", "23514"),
        ("insert_job('k', priority => 65538)", "23514"),  # 2 if cut to 16 bits
        ("insert_job('k', max_attempts => 0)", "23514"),
        ("insert_job('k', max_attempts => 1001)", "23514"),
        ("insert_job('k', max_attempts => 65561)", "23514"),
        ("insert_job('k', tags => array_fill('t'::text, '{21}'))", "23514"),
        ("insert_job('k', opts => '{\"no_such_option\": 1}')", "22023"),
        ("insert_job('k', opts => '[]')", "22023"),
        ("insert_job('k', opts => '{\"deadline\": \"not an interval\"}')", "22023"),
    ],
)
def test_refused(db, call, code):
    with raises(code):
        db.execute(f"SELECT awa.{call}")
    assert db.count() == 0


def test_unknown_option_is_named(db):
    with raises("22023", "no_such_option"):
        db.execute("SELECT awa.insert_job('k', opts => '{\"no_such_option\": 1}')")


def test_limits_are_inclusive(db):
    for low, high in (("priority", (1, 4)), ("max_attempts", (1, 1000))):
        for value in high:
            db.execute(f"SELECT awa.insert_job('k', {low} => {value})")
    db.execute("SELECT awa.insert_job('k', tags => array_fill('t'::text, '{20}'))")
    assert db.count() == 5


def test_run_at_in_the_past_is_available_at_once(db):
    job_id = db.value("SELECT awa.insert_job('k', run_at => now() - interval '1 day')")
    assert db.state(job_id) == "available"
    job, = db.claim()
    assert job.job_id == job_id


def test_run_at_in_the_future_is_scheduled(db):
    run_at = db.value("SELECT now() + interval '1 day'")
    job_id = db.value("SELECT awa.insert_job('k', run_at => %s)", run_at)
    job = db.job(job_id)
    assert (job.state, job.run_at) == ("scheduled", run_at)
    assert db.claim(max_jobs=10) == []


@pytest.mark.parametrize("run_at", ["infinity", "-infinity"])
def test_run_at_infinite(db, run_at):
    """Either a refusal or a sensible job: never a wedge."""
    try:
        job_id = db.value("SELECT awa.insert_job('k', run_at => %s::timestamptz)", run_at)
    except psycopg.Error as error:
        assert error.diag.sqlstate == "22023"
    else:
        assert db.state(job_id) == ("scheduled" if run_at == "infinity" else "available")
    db.insert()
    wait_until(lambda: db.claim(max_jobs=2), what="the other job")


def test_insert_jobs_keeps_the_order(db):
    jobs = [{"kind": f"k{n}", "args": n, "priority": 1 + n % 4} for n in range(100)]
    rows = db.rows("SELECT ord, job_id, duplicate FROM awa.insert_jobs(%s)", Jsonb(jobs))
    assert [row[0] for row in rows] == list(range(1, 101))
    assert not any(row[2] for row in rows)
    for n, (_, job_id, _) in list(enumerate(rows))[::17]:
        job = db.job(job_id)
        assert (job.kind, job.args, job.priority) == (f"k{n}", n, 1 + n % 4)


def test_insert_jobs_takes_every_name_of_insert_job(db):
    run_at = db.value("SELECT date_trunc('second', now()) + interval '1 hour'")
    job = {
        "kind": "k", "args": [1.50], "queue": "q", "priority": 3, "run_at": run_at.isoformat(),
        "max_attempts": 7, "tags": ["x"], "metadata": {"a": 1}, "unique_key": "u", "opts": {},
    }
    job_id = db.value("SELECT job_id FROM awa.insert_jobs(%s)", Jsonb([job]))
    found = db.job(job_id)
    assert (found.queue, found.priority, found.run_at, found.max_attempts) == ("q", 3, run_at, 7)
    assert (found.tags, found.state) == (["x"], "scheduled")
    assert db.value("SELECT args::text FROM awa.get_job(%s)", job_id) == "[1.5]"


def test_insert_jobs_of_nothing(db):
    assert db.rows("SELECT * FROM awa.insert_jobs('[]')") == []


@pytest.mark.parametrize(
    "bad, code",
    [
        ('{"kind": "k"}', "22023"),
        ('"k"', "22023"),
        ("null", "22023"),
        ('[{"kind": "k"}, 7]', "22023"),
        ('[{"kind": "k"}, {"kind": null}]', "22023"),
        ('[{"kind": "k"}, {"kind": "k", "prioritee": 1}]', "22023"),
        ('[{"kind": "k"}, {"kind": "k", "priority": "high"}]', "22023"),
        ('[{"kind": "k"}, {"kind": "k", "run_at": "someday"}]', "22023"),
        ('[{"kind": "k"}, {"kind": "k", "tags": "x"}]', "22023"),
        ('[{"kind": "k"}, {"kind": "k", "opts": {"nope": 1}}]', "22023"),
        ('[{"kind": "k"}, {"kind": "k", "priority": 9}]', "23514"),
        ('[{"kind": "k"}, {"kind": "k", "max_attempts": 0}]', "23514"),
    ],
)
def test_insert_jobs_is_all_or_nothing(db, bad, code):
    with raises(code):
        db.rows("SELECT * FROM awa.insert_jobs(%s::jsonb)", bad)
    assert db.value("SELECT count(*) FROM awa.jobs") == 0
    assert db.claim(max_jobs=10) == []


def test_insert_jobs_over_many_lanes_and_chunks(db):
    jobs = [
        {"kind": "k", "queue": f"q{n % 7}", "priority": 1 + n % 4, "args": n} for n in range(5000)
    ]
    ids = db.column("SELECT job_id FROM awa.insert_jobs(%s) ORDER BY ord", Jsonb(jobs))
    assert len(set(ids)) == 5000
    seen = {}
    for queue in range(7):
        while rows := db.claim(f"q{queue}", 1000):
            for row in rows:
                assert row.queue == f"q{queue}" and row.args % 7 == queue
                assert row.priority == 1 + row.args % 4
                seen[row.args] = row.job_id
            db.rows("SELECT * FROM awa.complete_many(%s)", [row.receipt for row in rows])
    assert [seen[n] for n in range(5000)] == ids


def test_unique_key_gives_the_holder(db):
    first = db.value("SELECT awa.insert_job('k', unique_key => 'one')")
    assert db.value("SELECT awa.insert_job('k', unique_key => 'one', queue => 'other')") == first
    with raises("23505") as caught:
        db.execute(
            "SELECT awa.insert_job('k', unique_key => 'one', opts => '{\"on_conflict\": \"error\"}')"
        )
    assert caught.error.diag.constraint_name == "idx_awa_jobs_unique"
    rows = db.rows(
        "SELECT ord, job_id, duplicate FROM awa.insert_jobs(%s)",
        Jsonb([{"kind": "k", "unique_key": key} for key in ("one", "two", "two")]),
    )
    assert rows[0] == (1, first, True)
    assert rows[1][2] is False and rows[2] == (3, rows[1][1], True)
    assert db.value("SELECT count(*) FROM awa.jobs") == 2


def test_unique_key_is_free_again_after_completion(db):
    first = db.value("SELECT awa.insert_job('k', unique_key => 'one')")
    job, = db.claim()
    assert db.value("SELECT awa.insert_job('k', unique_key => 'one')") == first
    db.execute("SELECT awa.complete(%s)", job.receipt)
    assert db.value("SELECT awa.insert_job('k', unique_key => 'one')") != first


def test_unique_key_waits_for_the_open_holder(db):
    """The one place where a producer waits: for the outcome of an equal key."""
    first, second = db.connect(), db.connect()
    first.begin()
    held = first.value("SELECT awa.insert_job('k', unique_key => 'one')")
    call = Background(second.value, "SELECT awa.insert_job('k', unique_key => 'one')")
    wait_blocked(db.conn, second.pid)
    first.rollback_sql()
    assert call.result() != held
    assert db.count() == 1


def test_producers_do_not_wait_for_each_other(db):
    """Opposite lane orders in open transactions: no wait, no deadlock."""
    one, two = db.connect(), db.connect()
    for conn in (one, two):
        conn.begin()
        conn.execute("SET LOCAL lock_timeout = '1s'")
    for conn, queues in ((one, "ab"), (two, "ba")):
        conn.execute("SELECT awa.insert_job('k', queue => %s)", (queues[0],))
    for conn, queues in ((one, "ab"), (two, "ba")):
        conn.execute("SELECT awa.insert_job('k', queue => %s)", (queues[1],))
    two.commit_sql()
    one.commit_sql()
    assert db.count("a") == 2 and db.count("b") == 2


def test_nobody_claims_before_the_commit(db):
    other = db.connect()
    other.begin()
    other.execute("SELECT awa.insert_job('k')")
    assert other.rows("SELECT * FROM awa.claim('default', 10)") == []
    assert db.claim(max_jobs=10) == []
    other.commit_sql()
    assert len(db.claim(max_jobs=10)) == 1


def test_created_at_and_run_at_are_the_database_clock(db):
    before = db.value("SELECT clock_timestamp()")
    job_id = db.value("SELECT awa.insert_job('k')")
    after = db.value("SELECT clock_timestamp()")
    job = db.job(job_id)
    assert before - timedelta(seconds=1) <= job.created_at <= after
    assert before - timedelta(seconds=1) <= job.run_at <= after


def test_args_of_a_table_scan(db):
    """One statement enqueues from a table, row by row, in its order."""
    db.execute("CREATE TABLE files AS SELECT n, 'f' || n AS name FROM generate_series(1, 2500) n")
    db.execute("SELECT awa.insert_job('hash', jsonb_build_object('n', n)) FROM files ORDER BY n")
    numbers = [row.args["n"] for _ in range(3) for row in db.claim(max_jobs=1000)]
    assert numbers == list(range(1, 2501))
    assert json.dumps(numbers[:3]) == "[1, 2, 3]"
