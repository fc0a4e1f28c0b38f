"""Private servers and sessions for tests, the demo and the benchmarks."""

from .database import Database
from .debug import DebugPoints
from .server import Server
from .session import connect, error_code, kill_backend
from .waiting import wait_until

__all__ = [
    "Database",
    "DebugPoints",
    "Server",
    "connect",
    "error_code",
    "kill_backend",
    "wait_until",
]
