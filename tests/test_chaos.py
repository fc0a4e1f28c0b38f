"""Claimers and producers at random, with kills, rollbacks and crashes of the server.

The truth is in the database itself: a producer writes `produced` in the
transaction that enqueues, a worker writes `done` in the one that completes. In
the end the two must be equal, whatever was lost on the way.
"""

import contextlib
import os
import random
import signal
import threading
import time

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness import Database, claim, wait_until

SECONDS = float(os.environ.get("AWA_CHAOS_SECONDS", "60"))
CLAIMERS = int(os.environ.get("AWA_CHAOS_CLAIMERS", "64"))
PRODUCERS = int(os.environ.get("AWA_CHAOS_PRODUCERS", "16"))
SEED = int(os.environ.get("AWA_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
QUEUES = ["alpha", "beta", "gamma"]

# What the engine may say while it is being crashed and fought over. Anything
# else that a worker or a producer meets is a finding.
EXPECTED = {
    None,  # the connection is gone
    "57P01", "57P02", "57P03", "08006", "08001", "08000", "08003",
    "AW001", "AW002", "AW003", "40P01", "57014", "53300",
}


def terminate(conn):
    """Its backend may have gone with the server."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(conn.pid, signal.SIGTERM)


class Chaos:
    def __init__(self, database, seed):
        self.database = database
        self.seed = seed
        self.calm = threading.Event()  # no more harm: drain
        self.over = threading.Event()
        self.surprises = []
        self.counts = {}
        self.lock = threading.Lock()

    def count(self, what, by=1):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + by

    def run(self, role, number):
        """Lives through broken connections until it is over."""
        rng = random.Random(f"{self.seed}/{role.__name__}/{number}")
        while not self.over.is_set():
            conn = None
            try:
                conn = self.database.server.connect(self.database.name)
                role(conn, rng)
            except psycopg.Error as error:
                code = error.diag.sqlstate
                self.count(f"error {code}")
                if code not in EXPECTED:
                    self.surprises.append(f"{role.__name__}: {code} {error}")
                self.over.wait(0.05)
            finally:
                with contextlib.suppress(psycopg.Error):
                    if conn is not None:
                        conn.close()

    def producer(self, conn, rng):
        while not self.calm.is_set():
            size = rng.choice([1, 1, 1, 2, 10, 100, 300])
            tokens = [f"{rng.getrandbits(60):x}" for _ in range(size)]
            conn.begin()
            self.enqueue(conn, rng, tokens)
            dice = rng.random()
            if dice < 0.10:
                conn.rollback_sql()
            elif dice < 0.20:
                conn.execute("SAVEPOINT s")
                self.enqueue(conn, rng, [f"{rng.getrandbits(60):x}"])
                conn.execute("ROLLBACK TO s")
                conn.commit_sql()
            elif dice < 0.22:
                terminate(conn)
                conn.commit_sql()
            else:
                conn.commit_sql()
            self.count("produced", size)
            self.calm.wait(rng.random() * 0.2)
        self.over.wait()

    @staticmethod
    def enqueue(conn, rng, tokens):
        conn.execute("INSERT INTO produced SELECT unnest(%s::text[])", (tokens,))
        queue = rng.choice(QUEUES)
        if len(tokens) == 1:
            delay = rng.choice([None, None, None, "100 ms", "1 s"])
            conn.execute(
                "SELECT awa.insert_job('k', %s, %s, %s, clock_timestamp() + %s::interval, 1000)",
                (Jsonb(tokens[0]), queue, rng.randint(1, 4), delay),
            )
        else:
            conn.execute(
                "SELECT count(*) FROM awa.insert_jobs(%s)",
                (Jsonb([
                    {"kind": "k", "args": token, "queue": queue, "max_attempts": 1000,
                     "priority": rng.randint(1, 4)}
                    for token in tokens
                ]),),
            )

    def claimer(self, conn, rng):
        runtime = None
        if rng.random() < 0.7:
            runtime = conn.value("SELECT awa.register_runtime('chaos')")
        while not self.over.is_set():
            queue = rng.choice(QUEUES)
            size = rng.choice([1, 1, 2, 5, 20, 100])
            # A plain lease comes back by its deadline, a session's by its end.
            jobs = claim(conn, queue, size, runtime=runtime, deadline="5 s", wait="50 ms")
            if not jobs:
                continue
            dice = 1.0 if self.calm.is_set() else rng.random()
            receipts = [job.receipt for job in jobs]
            if dice < 0.03:
                return  # leaves with its jobs
            if dice < 0.04:
                terminate(conn)
            elif dice < 0.12:
                conn.execute("SELECT awa.release(%s)", (receipts,))
            elif dice < 0.20:
                for job in jobs:
                    if job.attempt <= 2:
                        conn.execute("SELECT awa.fail(%s, 'chaos', '0')", (job.receipt,))
                    else:
                        self.finish(conn, [job])
            elif dice < 0.28:
                conn.begin()
                self.finish(conn, jobs)
                conn.rollback_sql()
                self.finish(conn, jobs)
            elif dice < 0.36:
                conn.begin()
                conn.execute("SAVEPOINT s")
                self.finish(conn, jobs)
                conn.execute("ROLLBACK TO s")
                self.finish(conn, jobs[: len(jobs) // 2])
                conn.commit_sql()
                conn.execute("SELECT awa.release(%s)", (receipts[len(jobs) // 2 :],))
            elif dice < 0.42:
                conn.begin()
                claim(conn, queue, 5, runtime=runtime)
                conn.rollback_sql()
                self.finish(conn, jobs)
            elif dice < 0.5:
                # Each in a transaction of its own, the way that most workers do it.
                for job in jobs:
                    conn.begin()
                    self.finish(conn, [job])
                    conn.commit_sql()
            else:
                self.finish(conn, jobs)

    def finish(self, conn, jobs):
        """The result and the completion in one statement, so in one transaction."""
        if not jobs:
            return
        conn.execute(
            "WITH closed AS (SELECT * FROM awa.complete_many(%s))"
            " INSERT INTO done (token, receipt)"
            " SELECT t, c.receipt FROM closed c"
            " JOIN unnest(%s::text[], %s::bigint[]) AS j (t, r) ON j.r = c.receipt"
            " WHERE c.completed",
            ([job.receipt for job in jobs], [job.args for job in jobs],
             [job.receipt for job in jobs]),
        )

    def harm(self, rng):
        """Crashes of the whole server and of single processes."""
        server = self.database.server
        end = time.monotonic() + SECONDS
        while (left := end - time.monotonic()) > 0:
            self.over.wait(min(left, rng.uniform(4, 12)))
            if end - time.monotonic() < 1:
                break
            how = rng.choice(["immediate", "immediate", "backend", "postmaster", "fast"])
            self.count(f"harm: {how}")
            if how == "backend":
                children = server.processes()[1:]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(children), signal.SIGKILL)
                server.wait_ready()
            elif how == "postmaster":
                server.kill_postmaster()
                server.start()
            else:
                server.restart(how)


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS + 420)
def test_every_committed_job_is_completed_once(new_server):
    print(f"AWA_CHAOS_SEED={SEED}")
    settings = {
        "awa.rotate_interval": "1s",
        # After a crash every open attempt gets as long as this.
        "awa.heartbeat_staleness": "2s",
        "max_connections": "300",
    }
    server = new_server(settings, durable=True)
    database = Database(server)
    database.execute("CREATE TABLE produced (token text)")
    database.execute("CREATE TABLE done (token text, receipt bigint)")
    chaos = Chaos(database, SEED)
    threads = [
        threading.Thread(target=chaos.run, args=(role, number), daemon=True)
        for role, number in [(chaos.producer, n) for n in range(PRODUCERS)]
        + [(chaos.claimer, n) for n in range(CLAIMERS)]
    ]
    for thread in threads:
        thread.start()
    try:
        chaos.harm(random.Random(SEED))
        chaos.calm.set()
        database.wait_served(60)

        def left():
            with contextlib.suppress(psycopg.Error):
                with server.connect(database.name) as conn:
                    return conn.row(
                        "SELECT (SELECT count(*) FROM produced), (SELECT count(*) FROM done),"
                        " (SELECT count(*) FROM awa.jobs WHERE state::text IN"
                        " ('scheduled', 'available', 'running', 'retryable'))"
                    )
            return (None, None, None)

        def drained():
            produced, done, open_jobs = left()
            return open_jobs == 0 and produced is not None and done >= produced

        wait_until(drained, 300, what=lambda: f"(produced, done, open) = {left()}", every=0.5)
    finally:
        chaos.calm.set()
        chaos.over.set()
        for thread in threads:
            thread.join(30)
    print(dict(sorted(chaos.counts.items())))
    with server.connect(database.name) as conn:
        assert conn.value("SELECT count(*) FROM produced") > 0
        lost = conn.column("SELECT token FROM produced EXCEPT SELECT token FROM done")
        invented = conn.column("SELECT token FROM done EXCEPT SELECT token FROM produced")
        twice = conn.column("SELECT token FROM done GROUP BY token HAVING count(*) > 1")
        reused = conn.column("SELECT receipt FROM done GROUP BY receipt HAVING count(*) > 1")
    assert (lost, invented, twice, reused) == ([], [], [], [])
    assert chaos.surprises == []
    database.close_sessions()
    database.check()
