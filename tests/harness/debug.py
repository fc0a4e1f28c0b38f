"""Debug points: named places where a test stops a backend (builds with debug_points only)."""

from contextlib import contextmanager

from .waiting import wait_until

FUNCTIONS = """
CREATE SCHEMA IF NOT EXISTS awa_debug;
CREATE OR REPLACE FUNCTION awa_debug.arm(point text) RETURNS void
    STRICT LANGUAGE c AS '$libdir/awa', 'awa_debug_arm';
CREATE OR REPLACE FUNCTION awa_debug.release(point text) RETURNS void
    STRICT LANGUAGE c AS '$libdir/awa', 'awa_debug_release';
CREATE OR REPLACE FUNCTION awa_debug.waiting(point text) RETURNS int
    STRICT LANGUAGE c AS '$libdir/awa', 'awa_debug_waiting';
"""


class DebugPoints:
    """Arms points from a session of its own, so that any test session may stop at one."""

    def __init__(self, database):
        self.conn = database.connect()
        self.conn.execute(FUNCTIONS)

    def arm(self, point):
        self.conn.execute("SELECT awa_debug.arm(%s)", (point,))

    def release(self, point):
        self.conn.execute("SELECT awa_debug.release(%s)", (point,))

    def waiting(self, point):
        return self.conn.value("SELECT awa_debug.waiting(%s)", point)

    def wait(self, point, backends=1, timeout=10):
        wait_until(
            lambda: self.waiting(point) >= backends,
            timeout,
            what=f"{backends} backend(s) at debug point {point!r}",
        )

    @contextmanager
    def at(self, point):
        """Armed inside, released on the way out whatever happened."""
        self.arm(point)
        try:
            yield _Point(self, point)
        finally:
            self.release(point)


class _Point:
    def __init__(self, points, name):
        self.points = points
        self.name = name

    def wait(self, backends=1, timeout=10):
        self.points.wait(self.name, backends, timeout)

    def release(self):
        self.points.release(self.name)
