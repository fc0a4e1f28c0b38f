"""Connections: autocommit unless asked otherwise, and they know their backend."""

import os
import signal
import subprocess

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


def error_code(caught):
    """The SQLSTATE of a pytest.raises() result or of an exception."""
    return getattr(caught, "value", caught).sqlstate


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
