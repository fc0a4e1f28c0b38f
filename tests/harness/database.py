"""One database with the extension, and the sessions a test opens in it."""

import itertools

import psycopg
from psycopg import sql

from .waiting import wait_until

_numbers = itertools.count(1)


class Database:
    def __init__(self, server, name=None, extension=True):
        self.server = server
        self.name = name or f"t{next(_numbers)}"
        self.sessions = []
        self._conn = self._boot = None
        with server.connect() as conn:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.name)))
        if extension:
            with server.connect(self.name) as conn:
                conn.execute("CREATE EXTENSION awa")
            self.wait_served()

    def wait_served(self, timeout=20):
        """Until the dispatcher has replayed: before, claims wait and may get AW003."""

        def served():
            try:
                with self.server.connect(self.name) as conn:
                    conn.execute("SELECT * FROM awa.claim('served', 0)")
                return True
            except psycopg.OperationalError:
                return False
            except psycopg.Error as error:
                if error.sqlstate in ("AW003", "3D000"):
                    return False
                raise

        wait_until(served, timeout, what=f"a dispatcher that serves {self.name}")

    def connect(self, user="postgres", **kwargs):
        """A session that is closed with the test."""
        conn = self.server.connect(self.name, user=user, **kwargs)
        self.sessions.append(conn)
        return conn

    def conninfo(self, user="postgres"):
        return self.server.conninfo(self.name, user)

    # Short forms on a session that is made when it is first needed, and made
    # again after a restart of the server.

    @property
    def conn(self):
        if self._conn is None or self._conn.closed or self._boot != self.server.boots:
            self._conn, self._boot = self.connect(), self.server.boots
        return self._conn

    def execute(self, query, *params):
        return self.conn.execute(query, params or None)

    def rows(self, query, *params):
        return self.conn.rows(query, *params)

    def row(self, query, *params):
        return self.conn.row(query, *params)

    def value(self, query, *params):
        return self.conn.value(query, *params)

    def column(self, query, *params):
        return self.conn.column(query, *params)

    # What tests of a queue say most often

    def insert(self, count=1, queue="default", kind="k", **columns):
        """Ids of `count` new jobs, in order."""
        from psycopg.types.json import Jsonb

        jobs = [{"kind": kind, "queue": queue, "args": {"n": n}} | columns for n in range(count)]
        return self.column(
            "SELECT job_id FROM awa.insert_jobs(%s) ORDER BY ord", Jsonb(jobs)
        )

    def claim(self, queue="default", max_jobs=1, conn=None, **arguments):
        """Claimed jobs as records; arguments as in awa.claim."""
        return claim(conn or self.conn, queue, max_jobs, **arguments)

    def state(self, job_id):
        """The job's state, None where no row is left."""
        states = self.column("SELECT state::text FROM awa.get_job(%s)", job_id)
        return states[0] if states else None

    def job(self, job_id):
        """The job's row of awa.jobs as a record."""
        with self.conn.cursor(row_factory=psycopg.rows.namedtuple_row) as cur:
            cur.execute("SELECT * FROM awa.get_job(%s)", (job_id,))
            found = cur.fetchall()
        assert len(found) == 1, f"{len(found)} rows for job {job_id}"
        return found[0]

    def count(self, queue="default", state=None):
        return self.value(
            "SELECT count(*) FROM awa.jobs WHERE queue = %s"
            " AND (%s::text IS NULL OR state::text = %s)",
            queue, state, state,
        )

    def wait_state(self, job_id, state, timeout=10):
        wait_until(
            lambda: self.state(job_id) == state,
            timeout,
            what=lambda: f"job {job_id} {state}; it is {self.state(job_id)}",
        )

    # The end of every test

    def check(self):
        """awa.check() must say ok to every invariant."""
        with self.server.connect(self.name) as conn:
            conn.execute("SET statement_timeout = '60s'")
            found = conn.rows("SELECT invariant, ok, detail FROM awa.check()")
        assert found, "awa.check() looked at nothing"
        broken = [f"{name}: {detail}" for name, ok, detail in found if ok is not True]
        assert not broken, "awa.check() says:\n  " + "\n  ".join(broken)

    def close_sessions(self):
        for conn in self.sessions:
            conn.close()
        self.sessions.clear()

    def drop(self):
        with self.server.connect() as conn:
            gids = conn.column("SELECT gid FROM pg_prepared_xacts WHERE database = %s", self.name)
            if gids:  # else it may be gone already
                with self.server.connect(self.name) as there:
                    for gid in gids:
                        there.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
            conn.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(
                    sql.Identifier(self.name)
                )
            )


def claim(conn, queue="default", max_jobs=1, **arguments):
    names = "".join(f", {name} => %({name})s" for name in arguments)
    with conn.cursor(row_factory=psycopg.rows.namedtuple_row) as cur:
        cur.execute(
            f"SELECT * FROM awa.claim(%(queue)s, %(max_jobs)s{names})",
            {"queue": queue, "max_jobs": max_jobs} | arguments,
        )
        return cur.fetchall()
