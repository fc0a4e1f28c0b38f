"""Private servers and sessions for tests, the demo and the benchmarks."""

from .database import Database, claim
from .debug import DebugPoints
from .server import Server
from .session import (
    Background,
    connect,
    kill_backend,
    raises,
    wait_blocked,
    wait_in,
    waits_for_lock,
)
from .waiting import wait_until

__all__ = [
    "Background",
    "Database",
    "DebugPoints",
    "Server",
    "claim",
    "connect",
    "kill_backend",
    "raises",
    "wait_blocked",
    "wait_in",
    "wait_until",
    "waits_for_lock",
]
