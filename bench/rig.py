"""One private server, and the database in it that a cell measures."""

import time
from contextlib import contextmanager

from harness import Database, Server, place, wait_until
from harness.server import sweep

from .clients import Pgbench

SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum_naptime": "1min",
    # The defaults of awa again where the harness changes them for tests.
    "awa.rotate_interval": "60s",
    "awa.completed_retention": "1h",
    "awa.rescue_interval": "30s",
}
BARE = """
CREATE EXTENSION pgstattuple;
CREATE TABLE bare (id bigserial PRIMARY KEY, queue text, args jsonb);
CREATE TABLE bare_acks (last bigint);
"""
STATES = (
    "scheduled", "available", "running", "retryable", "waiting_external", "dlq",
    "completed_total", "failed_total", "cancelled_total",
)


class Rig:
    """fsync and synchronous_commit are on; `bare` is the table to compare with."""

    def __init__(self, settings=None, checksums=False, name="bench"):
        self.server = Server(SETTINGS | (settings or {}), durable=True, name=name).init()
        if checksums:
            place.run([self.server.bin / "pg_checksums", "--enable", "-D", self.server.data])
        self.server.start()
        self.database = Database(self.server, name)
        self.conn.execute(BARE)
        self.expected = {}

    @property
    def conn(self):
        return self.database.conn

    def connect(self):
        return self.database.connect()

    def conninfo(self):
        return self.database.conninfo()

    def destroy(self):
        self.server.destroy()

    def restart(self, mode):
        """Seconds until the server answers, and until it claims again."""
        self.server.stop(mode, timeout=600)
        start = time.monotonic()
        self.server.start()
        answers = time.monotonic() - start
        # A claim waits for the replay up to 5 s, then says that it is not over.
        self.database.wait_served(timeout=600)
        return answers, time.monotonic() - start

    # Load

    def pgbench(self, *scripts, **options):
        """Runs SQL by pgbench to its end; see clients.Pgbench."""
        return Pgbench(self, *scripts, **options).finish()

    @contextmanager
    def beside(self, *scripts, **options):
        """Runs SQL by pgbench while the block runs, then stops it."""
        running = Pgbench(self, *scripts, **options)
        try:
            yield running
        finally:
            running.stop()

    # Counts

    def expect(self, queue, **counts):
        """Adds to what awa.queue_stats has to say about the queue at the end of the round."""
        known = self.expected.setdefault(queue, dict.fromkeys(STATES, 0))
        for state, count in counts.items():
            known[state] += count

    def counts(self, queue=None):
        """What awa.queue_stats says: {queue: {state: jobs}}, or those of one queue."""
        rows = self.conn.rows(f"SELECT queue, {', '.join(STATES)} FROM awa.queue_stats")
        found = {row[0]: dict(zip(STATES, row[1:], strict=True)) for row in rows}
        return found if queue is None else found.get(queue, dict.fromkeys(STATES, 0))

    def balance(self):
        """Every job that was enqueued must be counted once, where it is expected."""
        found = self.counts()
        for queue, expected in self.expected.items():
            there = found.get(queue, dict.fromkeys(STATES, 0))
            wrong = {
                state: f"{there[state]:,}, not {count:,}"
                for state, count in expected.items()
                if there[state] != count
            }
            if wrong:
                raise WrongCount(f"queue {queue}: {wrong}")

    def check(self):
        """awa.check() must find every invariant kept."""
        found = self.conn.rows("SELECT invariant, detail FROM awa.check() WHERE NOT ok")
        if found:
            raise WrongCount(f"awa.check(): {found}")

    def settle(self):
        """Between rounds: counts right, finished segments given back, bare tables empty."""
        self.balance()
        self.conn.execute("TRUNCATE bare, bare_acks RESTART IDENTITY")
        self.conn.execute("SELECT count(*) FROM awa.maintain()")

    def wait_count(self, queue, state, wanted, timeout=60):
        wait_until(
            lambda: self.counts(queue)[state] == wanted, timeout,
            what=lambda: f"{wanted} {state} in {queue}; it has {self.counts(queue)}",
        )


class WrongCount(Exception):
    """A run did not do what it was to do: never a matter of speed."""


def clear_away():
    """Stops and removes what a killed run left behind."""
    sweep()
