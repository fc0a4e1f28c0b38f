"""Connections: autocommit unless asked otherwise, and they know their backend."""

import os
import signal
import subprocess
import threading
from contextlib import contextmanager

import psycopg

from .waiting import wait_until


class Connection(psycopg.Connection):
    """A psycopg connection with the short forms that tests read best with."""

    @property
    def pid(self):
        return self.info.backend_pid

    def rows(self, query, *params):
        """All rows as tuples; [] for a statement without any."""
        cur = self.execute(query, params or None)
        return cur.fetchall() if cur.description else []

    def row(self, query, *params):
        """The only row."""
        rows = self.rows(query, *params)
        assert len(rows) == 1, f"{len(rows)} rows from {query}"
        return rows[0]

    def value(self, query, *params):
        """The only column of the only row."""
        row = self.row(query, *params)
        assert len(row) == 1, f"{len(row)} columns from {query}"
        return row[0]

    def column(self, query, *params):
        """The first column of all rows."""
        return [row[0] for row in self.rows(query, *params)]

    def begin(self):
        self.execute("BEGIN")

    def commit_sql(self):
        """COMMIT by SQL: `commit()` does nothing in autocommit mode."""
        self.execute("COMMIT")

    def rollback_sql(self):
        self.execute("ROLLBACK")


def connect(conninfo="", autocommit=True, **kwargs):
    kwargs.setdefault("connect_timeout", 20)
    return Connection.connect(conninfo, autocommit=autocommit, **kwargs)


class Raised:
    """What raises() caught: `error` once the block has ended."""

    error = None


@contextmanager
def raises(code, text=None):
    """The block must end in an error with this SQLSTATE (and this text in it)."""
    caught = Raised()
    try:
        yield caught
    except psycopg.Error as error:
        found = error.diag.sqlstate
        assert found == code, f"SQLSTATE {found} instead of {code}: {error}"
        said = " ".join(
            part
            for part in (
                error.diag.message_primary,
                error.diag.message_detail,
                error.diag.message_hint,
            )
            if part
        )
        assert text is None or text in said, f"no {text!r} in: {said}"
        caught.error = error
        return
    raise AssertionError(f"no error, {code} was expected")


class Background:
    """A call in a thread of its own: for statements that have to wait."""

    def __init__(self, call, *args, **kwargs):
        self._done = threading.Event()
        self._value = self._error = None

        def work():
            try:
                self._value = call(*args, **kwargs)
            except BaseException as error:
                self._error = error
            finally:
                self._done.set()

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    @property
    def done(self):
        return self._done.is_set()

    def wait(self, timeout):
        """Whether it is done by then."""
        return self._done.wait(timeout)

    def result(self, timeout=20):
        assert self.wait(timeout), f"still running after {timeout} s"
        if self._error is not None:
            raise self._error
        return self._value


def waits_for_lock(observer, pid):
    """Whether the lock manager has this backend waiting, so deadlocks are seen."""
    return observer.value(
        "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = %s AND NOT granted)", pid
    )


def wait_blocked(observer, pid, timeout=10):
    wait_until(
        lambda: waits_for_lock(observer, pid), timeout, what=f"backend {pid} waiting for a lock"
    )


def wait_in(observer, pid, query_part, timeout=10):
    """Until the backend is inside a statement with this text in it."""
    wait_until(
        lambda: observer.value(
            "SELECT EXISTS (SELECT FROM pg_stat_activity"
            " WHERE pid = %s AND state = 'active' AND strpos(query, %s) > 0)",
            pid, query_part,
        ),
        timeout,
        what=f"backend {pid} in {query_part!r}",
    )


def kill_backend(pid, sig=signal.SIGKILL, wait=True):
    """Sends a signal to a backend; the server may belong to another user."""
    try:
        os.kill(pid, sig)
    except PermissionError:
        subprocess.run(["sudo", "-n", "kill", f"-{int(sig)}", str(pid)], check=True)
    if wait and sig in (signal.SIGKILL, signal.SIGTERM):
        wait_until(lambda: not alive(pid), what=f"end of process {pid}")


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
