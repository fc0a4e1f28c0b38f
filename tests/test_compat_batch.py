"""insert_jobs_compat_batch: jobs as columns, all or none, and no deadlock with slow producers."""

import time

import pytest

from harness import Background, raises, wait_blocked, wait_until

MASK = "11101001"
CALL = "SELECT * FROM awa.insert_jobs_compat_batch({})"


def batch(conn, kinds, queues=None, args=None, skip=None, **columns):
    """Rows of the call; columns by their names."""
    types = {
        "states": "awa.job_state[]", "priorities": "smallint[]", "max_attempts": "smallint[]",
        "run_ats": "timestamptz[]", "metadata": "jsonb[]", "tags": "jsonb[]",
        "unique_keys": "bytea[]", "unique_states": "bit(8)[]", "ordering_keys": "bytea[]",
    }
    values = [kinds, queues, args]
    text = "%s::text[], %s::text[], %s::jsonb[]"
    for name, value in columns.items():
        text += f", {name} => %s::text[]::{types[name]}" if name.startswith("unique_s") else (
            f", {name} => %s::{types[name]}"
        )
        values.append(value)
    if skip is not None:
        text += ", skip_unique_conflicts => %s"
        values.append(skip)
    return conn.rows(CALL.format(text), *values)


def keyed(conn, keys, skip=True, queue="q"):
    return batch(
        conn, ["k"] * len(keys), [queue] * len(keys), ["{}"] * len(keys), skip=skip,
        unique_keys=[key.encode() for key in keys], unique_states=[MASK] * len(keys),
    )


def test_every_column(db):
    rows = batch(
        db.conn, ["a", "b", "c"], ["q1", None, "q1"], ['{"n": 1.500}', None, "[]"],
        states=["available", "scheduled", "retryable"], priorities=[1, None, 4],
        max_attempts=[3, None, 7], run_ats=["2100-01-01 00:00+00", "2100-01-01 00:00+00", None],
        metadata=['{"m": 1}', None, None], tags=['["x", "y"]', None, "[]"],
        ordering_keys=[b"o", None, None],
    )
    assert [row[0] for row in rows] == [1, 2, 3]
    assert not any(row[2] for row in rows)
    one, two, three = (db.job(row[1]) for row in rows)
    # The state says when a job may be claimed, its time does not.
    assert (one.kind, one.queue, one.state, one.priority) == ("a", "q1", "available", 1)
    assert (one.max_attempts, one.tags, one.metadata) == (3, ["x", "y"], {"m": 1})
    assert one.run_at.year == 2100
    assert db.value("SELECT args::text FROM awa.get_job(%s)", one.id) == '{"n": 1.500}'
    assert (two.queue, two.state, two.priority, two.max_attempts) == ("default", "scheduled", 2, 25)
    assert (two.tags, two.metadata, two.args) == ([], {}, {})
    assert three.state in ("retryable", "available")
    db.wait_state(three.id, "available")
    assert [job.job_id for job in db.claim("q1", 5)] == [one.id, three.id]


def test_a_large_batch(db):
    rows = batch(db.conn, ["k"] * 100_000, ["big"] * 100_000, ["{}"] * 100_000)
    assert len({row[1] for row in rows}) == 100_000
    assert db.value("SELECT available FROM awa.queue_stats WHERE queue = 'big'") == 100_000
    with raises("22023"):
        batch(db.conn, ["k"] * 100_001, None, None)


def test_nothing_is_a_batch_too(db):
    assert batch(db.conn, [], [], []) == []
    assert batch(db.conn, None, None, None) == []


def test_duplicates_are_skipped_and_named(db):
    first = db.value("SELECT awa.insert_job('k', unique_key => 'b')")
    rows = keyed(db.conn, ["a", "b", "c", "a"])
    assert [row[2] for row in rows] == [False, True, False, True]
    assert rows[1][1] == first and rows[3][1] == rows[0][1]
    assert db.count("q") == 2


def test_a_duplicate_fails_the_call(db):
    db.value("SELECT awa.insert_job('k', unique_key => 'b')")
    for keys in (["a", "b"], ["a", "a"]):
        with raises("23505") as error:
            keyed(db.conn, keys, skip=False)
        assert error.error.diag.constraint_name == "idx_awa_jobs_unique"
    assert db.count("q") == 0


def test_a_key_without_states_is_not_unique(db):
    rows = batch(db.conn, ["k", "k"], None, None, unique_keys=[b"a", b"a"])
    assert [row[2] for row in rows] == [False, False]


@pytest.mark.parametrize("arguments, sqlstate", [
    ("'{a,b}', '{q}', NULL", "22023"),
    ("'{a}', NULL, NULL, states => '{running}'", "22023"),
    ("'{a,NULL}', NULL, NULL", "23502"),
    ("'{a}', NULL, NULL, priorities => '{5}'", "23514"),
    ("'{a}', NULL, NULL, max_attempts => '{0}'", "23514"),
    ("ARRAY[repeat('k', 201)], NULL, NULL", "23514"),
    ("'{a}', ARRAY[repeat('q', 201)], NULL", "23514"),
    ("'{a}', NULL, NULL, tags => ARRAY[to_jsonb(array_fill('t'::text, '{21}'))]", "23514"),
    ("'{a}', NULL, NULL, tags => '{1}'", "22023"),
    ("'{{a},{b}}', NULL, NULL", "22023"),
])
def test_bad_batches_leave_nothing(db, arguments, sqlstate):
    with raises(sqlstate):
        db.rows(CALL.format(arguments))
    assert db.value("SELECT count(*) FROM awa.jobs") == 0


def test_jobs_of_an_ordering_key_share_a_shard(db):
    db.execute("SELECT awa.configure_queue('s', '{\"enqueue_shards\": 8}')")
    keys = [f"key {n % 16}".encode() for n in range(160)]
    rows = batch(db.conn, ["k"] * 160, ["s"] * 160, None, ordering_keys=keys)
    shards = dict(db.rows("""
        SELECT position, shard FROM awa.ready_entries_0 JOIN awa.queue_lanes USING (lane_id)
    """))
    of_key = {}
    for (_, job_id, _), key in zip(rows, keys, strict=True):
        of_key.setdefault(key, set()).add(shards[job_id])
    assert all(len(seen) == 1 for seen in of_key.values())
    assert len({shard for seen in of_key.values() for shard in seen}) > 2


def crossed(db, first="b", then="a"):
    """A transaction that takes keys one by one has `first`, and is about to want `then`."""
    slow = db.connect()
    slow.begin()
    slow.execute("SELECT awa.insert_job('k', queue => 'slow', unique_key => %s)", (first,))
    return slow, lambda: slow.execute(
        "SELECT awa.insert_job('k', queue => 'slow', unique_key => %s)", (then,)
    )


def test_a_slow_producer_goes_first(db):
    """The batch holds a and waits for b; the other holds b and waits for a."""
    slow, go_on = crossed(db)
    conn = db.connect()
    running = Background(keyed, conn, ["a", "b", "c"])
    wait_blocked(db.conn, conn.pid)
    going = Background(go_on)
    going.result()
    slow.commit()
    rows = running.result()
    assert [row[2] for row in rows] == [True, True, False]
    assert db.count("slow") == 2 and db.count("q") == 1


def test_a_slow_producer_rolls_back(db):
    slow, go_on = crossed(db)
    conn = db.connect()
    running = Background(keyed, conn, ["a", "b"])
    wait_blocked(db.conn, conn.pid)
    Background(go_on).result()
    slow.rollback_sql()
    assert [row[2] for row in running.result()] == [False, False]


def test_a_batch_waits_in_the_end(db):
    """Longer than the two courteous seconds: then it waits as anybody."""
    slow, _ = crossed(db)
    conn = db.connect()
    running = Background(keyed, conn, ["a", "b"])
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 3 and not running.done, 10)
    slow.commit()
    assert [row[2] for row in running.result()] == [False, True]


@pytest.mark.parametrize("timeout, at_most", [("200ms", 0.45), ("700ms", 1.4), ("3s", 6)])
def test_the_callers_lock_timeout_holds(db, timeout, at_most):
    slow, _ = crossed(db)
    conn = db.connect()
    conn.execute(f"SET lock_timeout = '{timeout}'")
    began = time.monotonic()
    with raises("55P03"):
        keyed(conn, ["a", "b"])
    assert time.monotonic() - began < at_most + 2
    assert conn.value("SHOW lock_timeout") == timeout
    slow.rollback_sql()
    assert db.count("q") == 0


def test_batches_in_any_order_do_not_deadlock(db):
    """Eight sessions, the same keys each in another order."""
    keys = [f"k{n}" for n in range(200)]
    orders = [keys[n * 25:] + keys[:n * 25] for n in range(8)]
    calls = [Background(keyed, db.connect(), order) for order in orders]
    fresh = sum(not row[2] for call in calls for row in call.result(60))
    assert fresh == 200
    assert db.count("q") == 200


def test_a_producer_may_call_it(db):
    db.execute(f"CREATE ROLE p_{db.name} LOGIN")
    db.execute(f"SELECT awa.grant_access('p_{db.name}', 'producer', '{{mine}}')")
    conn = db.connect(user=f"p_{db.name}")
    assert len(batch(conn, ["k"], ["mine"], None)) == 1
    with raises("42501"):
        batch(conn, ["k", "k"], ["mine", "other"], None)
    db.execute(f"DROP OWNED BY p_{db.name}")
    conn.close()
    db.execute(f"DROP ROLE p_{db.name}")
