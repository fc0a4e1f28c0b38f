"""Batches and producers that take keys one by one, in whatever order: nobody gets a 40P01.

Each scenario is played AWA_DEADLOCK_ROUNDS times, with fresh keys and lanes; the longest
round of each is printed.
"""

import os
import random
import time

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness import Background, raises, wait_blocked, wait_until

ROUNDS = int(os.environ.get("AWA_DEADLOCK_ROUNDS", "2"))
MASK = "11111000"


def compat_batch(conn, keys, queues):
    count = len(keys)
    return [row[2] for row in conn.rows(
        "SELECT * FROM awa.insert_jobs_compat_batch(kinds => %s, queues => %s, args => %s::jsonb[],"
        " unique_keys => %s, unique_states => %s::bit(8)[], skip_unique_conflicts => true)",
        ["k"] * count, queues, ["{}"] * count,
        [key and key.encode() for key in keys], [MASK if key else None for key in keys],
    )]


def own_batch(conn, keys, queues):
    jobs = [
        {"kind": "k", "queue": queue, "unique_key": key} if key else {"kind": "k", "queue": queue}
        for key, queue in zip(keys, queues, strict=True)
    ]
    return conn.column("SELECT duplicate FROM awa.insert_jobs(%s) ORDER BY ord", Jsonb(jobs))


@pytest.fixture(params=[compat_batch, own_batch])
def batch(request):
    return request.param


def insert(conn, key, queue="q"):
    return conn.execute("SELECT awa.insert_job('k', queue => %s, unique_key => %s)", (queue, key))


class Round:
    """Two or three sessions and keys that nobody had before."""

    def __init__(self, db, batch, number):
        self.db, self.number = db, number
        self.batch = batch
        self.sessions = []

    def session(self):
        conn = self.db.connect()
        conn.begin()
        self.sessions.append(conn)
        return conn

    def key(self, name):
        return f"{name}{self.number}"

    def start_batch(self, conn, names, queues=None):
        """Returns once it waits for somebody's key."""
        keys = [name and self.key(name) for name in names]
        call = Background(self.batch, conn, keys, queues or ["q"] * len(keys))
        wait_blocked(self.db.conn, conn.pid)
        return call

    def close(self):
        for conn in self.sessions:
            conn.close()


def play(db, batch, capsys, scenario, rounds=ROUNDS):
    longest = 0
    for number in range(rounds):
        game = Round(db, batch, number)
        began = time.monotonic()
        try:
            scenario(game)
        finally:
            game.close()
        longest = max(longest, time.monotonic() - began)
    with capsys.disabled():
        name = scenario.__name__.replace("_", " ")
        print(f"\n{batch.__name__}, {name}: {rounds} rounds, none deadlocked,"
              f" the longest took {longest:.2f} s", flush=True)


def one_key_each_and_then_the_other(game):
    slow, many = game.session(), game.session()
    insert(slow, game.key("b"))
    call = game.start_batch(many, "abc")
    insert(slow, game.key("a"))
    slow.commit_sql()
    assert call.result() == [True, True, False]
    many.commit_sql()


def the_slow_one_rolls_back(game):
    slow, many = game.session(), game.session()
    insert(slow, game.key("b"))
    call = game.start_batch(many, "abc")
    insert(slow, game.key("a"))
    slow.rollback_sql()
    assert call.result() == [False, False, False]
    many.commit_sql()


def a_lane_first_and_a_key_later(game):
    """The slow one has used the lane; the batch has the key that it wants."""
    slow, many = game.session(), game.session()
    lane = f"lane{game.number}"
    insert(slow, None, lane)
    insert(slow, game.key("b"), lane)
    call = game.start_batch(many, ["a", None, "b"], [lane] * 3)
    insert(slow, game.key("a"), lane)
    slow.commit_sql()
    assert call.result() == [True, False, True]
    many.commit_sql()


def lanes_in_the_opposite_order(game):
    slow, many = game.session(), game.session()
    one, two = f"one{game.number}", f"two{game.number}"
    insert(slow, game.key("b"), two)
    call = game.start_batch(many, "ab", [one, two])
    insert(slow, None, one)
    insert(slow, game.key("a"), one)
    slow.commit_sql()
    assert call.result() == [True, True]
    many.commit_sql()


def not_the_first_lock_of_its_transaction(game):
    """What it took before stays; only the batch lets go."""
    slow, many = game.session(), game.session()
    insert(many, game.key("earlier"))
    insert(many, game.key("z"))
    insert(slow, game.key("b"))
    call = game.start_batch(many, "abz")
    insert(slow, game.key("a"))
    slow.commit_sql()
    assert call.result() == [True, True, True]
    many.commit_sql()


def three_in_a_circle(game):
    one, two, many = game.session(), game.session(), game.session()
    insert(one, game.key("b"))
    insert(two, game.key("c"))
    call = game.start_batch(many, "ab")
    middle = Background(insert, one, game.key("c"))
    wait_blocked(game.db.conn, one.pid)
    insert(two, game.key("a"))
    two.commit_sql()
    middle.result()
    one.commit_sql()
    assert call.result() == [True, True]
    many.commit_sql()


def a_batch_in_each_of_three(game):
    """The circle is closed by batches only; each took a key in an earlier statement."""
    sessions = [game.session() for _ in range(3)]
    for conn, own in zip(sessions, "xyz", strict=True):
        insert(conn, game.key(own))
    # The first two wait for the one behind them, and the last for nobody.
    first = game.start_batch(sessions[0], "ay")
    second = game.start_batch(sessions[1], "az")
    assert game.batch(sessions[2], [game.key("a"), game.key("d")], ["q", "q"]) == [False, False]
    sessions[2].commit_sql()
    assert second.result() == [True, True]
    sessions[1].commit_sql()
    assert first.result() == [True, True]
    sessions[0].commit_sql()


def one_that_waits_for_two_after_each_other(game):
    one, two, many = game.session(), game.session(), game.session()
    insert(one, game.key("b"))
    insert(two, game.key("c"))
    call = game.start_batch(many, "abc")
    insert(one, game.key("a"))
    one.commit_sql()
    # It waits for the next one, and has nothing that this one could want.
    wait_until(lambda: game.db.value("SELECT count(*) FROM awa.jobs WHERE queue = 'q'") >= 1)
    insert(two, game.key("d"))
    two.commit_sql()
    assert call.result() == [True, True, True]
    many.commit_sql()


SCENARIOS = [
    one_key_each_and_then_the_other, the_slow_one_rolls_back, a_lane_first_and_a_key_later,
    lanes_in_the_opposite_order, not_the_first_lock_of_its_transaction, three_in_a_circle,
    a_batch_in_each_of_three, one_that_waits_for_two_after_each_other,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(db, batch, capsys, scenario):
    play(db, batch, capsys, scenario)


def test_slow_for_longer_than_any_patience(db, batch, capsys):
    """It holds its key for three seconds before it wants one of the batch's; many at once."""

    def slow_for_long(game):
        games = [Round(game.db, batch, f"{game.number}.{n}") for n in range(min(ROUNDS, 20))]
        plays = []
        for each in games:
            slow, many = each.session(), each.session()
            insert(slow, each.key("b"))
            plays.append((each, slow, many, each.start_batch(many, "abc")))
        until = time.monotonic() + 3
        wait_until(lambda: time.monotonic() > until, 10)
        for each, slow, many, call in plays:
            insert(slow, each.key("a"))
            slow.commit_sql()
            assert call.result() == [True, True, False]
            many.commit_sql()
            each.close()

    play(db, batch, capsys, slow_for_long, max(1, ROUNDS // 20))


def test_a_storm(db, batch, capsys):
    """Sessions that take keys in an order of their own, one of them at a time, among batches."""
    seconds = min(ROUNDS, 30)
    keys = [f"s{n}" for n in range(12)]
    until = time.monotonic() + seconds

    def batches(conn, seed):
        rng, longest, calls = random.Random(seed), 0, 0
        while time.monotonic() < until:
            picked = rng.sample(keys, 6)
            began = time.monotonic()
            conn.begin()
            batch(conn, picked, ["q"] * 6)
            (conn.rollback_sql if rng.random() < 0.5 else conn.commit_sql)()
            longest, calls = max(longest, time.monotonic() - began), calls + 1
        return longest, calls

    def one_by_one(conn, seed):
        rng, calls = random.Random(seed), 0
        while time.monotonic() < until:
            conn.begin()
            for key in rng.sample(keys, 4):
                insert(conn, key)
            conn.rollback_sql()
            calls += 1
        return calls

    producers = [Background(batches, db.connect(), seed) for seed in range(5)]
    slow = Background(one_by_one, db.connect(), 99)
    results = [call.result(seconds + 60) for call in producers]
    assert slow.result(60) > 0 and all(calls > 0 for _, calls in results)
    with capsys.disabled():
        print(f"\n{batch.__name__}, a storm of {sum(calls for _, calls in results)} batches:"
              f" none deadlocked, the longest took {max(took for took, _ in results):.2f} s")


def test_what_remains(db, batch):
    """A circle through what the transaction of the batch took in an earlier statement: letting go
    of the batch's keys does not open it, so the server ends one of them."""
    slow, many = db.connect(), db.connect()
    slow.begin()
    many.begin()
    insert(many, "earlier")
    insert(slow, "b")
    call = Background(batch, many, ["a", "b"], ["q", "q"])
    wait_blocked(db.conn, many.pid)
    victims = []
    try:
        insert(slow, "earlier")
    except psycopg.Error as error:
        victims.append(error.sqlstate)
        slow.rollback_sql()
    else:
        slow.commit_sql()
    try:
        call.result()
        many.commit_sql()
    except psycopg.Error as error:
        victims.append(error.sqlstate)
        many.rollback_sql()
    assert victims == ["40P01"]


def test_the_callers_lock_timeout_holds_for_each_wait(db, batch):
    slow, many = db.connect(), db.connect()
    slow.begin()
    insert(slow, "b")
    many.execute("SET lock_timeout = '1500ms'")
    began = time.monotonic()
    with raises("55P03"):
        batch(many, ["a", "b"], ["q", "q"])
    assert 1.4 < time.monotonic() - began < 4
    assert many.value("SHOW lock_timeout") == "1500ms"
    slow.rollback_sql()
    assert batch(many, ["a", "b"], ["q", "q"]) == [False, False]
