"""A PostgreSQL server of our own: data directory, socket and port, never the system's."""

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

from . import place
from .session import alive, connect
from .waiting import wait_until

# Small, quick to start, and with room for prepared transactions and workers.
SETTINGS = {
    "shared_preload_libraries": "awa",
    "listen_addresses": "127.0.0.1",
    "max_connections": 200,
    "max_prepared_transactions": 10,
    "max_worker_processes": 16,
    "max_wal_senders": 4,
    "wal_level": "replica",
    "shared_buffers": "128MB",
    "checkpoint_timeout": "15min",
    "max_wal_size": "4GB",
    "autovacuum_naptime": "1h",
    "jit": "off",
    "log_line_prefix": "%m [%p] %q%a@%d ",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "deadlock_timeout": "200ms",
    # Finished jobs stay readable for the length of a test, deadlines pass quickly.
    "awa.rotate_interval": "1h",
    "awa.completed_retention": "0",
    "awa.rescue_interval": "100ms",
}

_running = []


class Server:
    """`durable` keeps fsync on, for what depends on a crash of the machine.

    Servers belong to the thread that started them: the kernel stops them when
    it ends. Start them from the main thread.
    """

    def __init__(self, settings=None, durable=False, flavour=None, name="server"):
        flavour = flavour or os.environ.get("AWA_FLAVOUR", "test")
        self.bin = place.bin_dir(flavour)
        self.settings = SETTINGS | {"fsync": "on" if durable else "off"} | (settings or {})
        self.port = place.free_port()
        self.home = new_home(name)
        self.data = self.home / "data"
        self.process = None
        self.boots = 0  # a session of an earlier boot is of no use
        self.destroyed = False

    # Making one

    def init(self):
        place.run([
            self.bin / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust",
            "-E", "UTF8", "--locale", "C.UTF-8", "--no-sync", "--no-instructions",
        ])
        return self

    def make_standby(self, settings=None, name="standby"):
        """A streaming copy of this server, not started yet."""
        copy = Server(self.settings | (settings or {}), name=name)
        copy.bin = self.bin
        place.run([
            self.bin / "pg_basebackup", "-D", copy.data, "-R", "-c", "fast", "--no-sync",
            "-d", f"host={self.home} port={self.port} user=postgres application_name={name}",
        ])
        return copy

    # Running it

    def start(self, wait=True):
        assert self.process is None or self.process.poll() is not None, "is running"
        options = [f"--{name}={value}" for name, value in self.settings.items()]
        options += [f"--unix_socket_directories={self.home}", f"--port={self.port}"]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                place.as_server_user(
                    [self.bin / "postgres", "-D", self.data, *options], die_with_parent=True
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=place.environment(),
                start_new_session=True,
            )
        self.boots += 1
        if self not in _running:
            _running.append(self)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout=60):
        def answers():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{self.log()[-4000:]}")
            try:
                self.connect(connect_timeout=5).close()
                return True
            except psycopg.OperationalError:
                return False

        wait_until(answers, timeout, what=lambda: f"a server that answers:\n{self.log()[-4000:]}")

    def stop(self, mode="fast", timeout=60):
        """`smart`, `fast` or `immediate`."""
        if self.process is None or self.process.poll() is not None:
            return
        how = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        family = self.processes()
        self.signal(how[mode])
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            stuck = self.log()[-4000:]
            self.kill_postmaster()
            raise AssertionError(f"no {mode} stop within {timeout} s:\n{stuck}") from None
        self._wait_gone(family)

    def restart(self, mode="fast", settings=None):
        self.stop(mode)
        if settings:
            self.settings |= settings
        return self.start()

    def crash(self):
        """An immediate stop and a start: memory is lost, recovery runs."""
        return self.restart("immediate")

    def kill_postmaster(self):
        """kill -9 of the postmaster; its children notice and leave."""
        family = self.processes()
        self.signal(signal.SIGKILL)
        self.process.wait(30)
        self._wait_gone(family)

    def promote(self):
        with self.connect() as conn:
            assert conn.value("SELECT pg_promote(true, 60)")

    def reload(self, **settings):
        """Changes settings of a running server, by ALTER SYSTEM and reload.

        Names take `__` for a dot. Only settings that start() does not give on
        the command line can be changed so.
        """
        with self.connect() as conn:
            for name, value in settings.items():
                name = name.replace("__", ".")
                assert name not in self.settings, f"{name} is set on the command line"
                if value is None:
                    conn.execute(f"ALTER SYSTEM RESET {name}")
                else:
                    conn.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            conn.execute("SELECT pg_reload_conf()")

    def signal(self, sig):
        try:
            os.kill(self.process.pid, sig)
        except ProcessLookupError:
            pass

    def destroy(self):
        """Stops it for good and removes its files."""
        self.destroyed = True
        try:
            self.stop("immediate")
        finally:
            if self in _running:
                _running.remove(self)
            shutil.rmtree(self.home, ignore_errors=True)

    # Looking at it

    @property
    def running(self):
        return self.process is not None and self.process.poll() is None

    @property
    def log_path(self):
        return self.home / "log"

    def log(self):
        try:
            return self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait_log(self, text, timeout=20, since=0):
        """Waits until the log contains `text` after offset `since`."""
        wait_until(lambda: text in self.log()[since:], timeout, what=f"{text!r} in the log")

    def processes(self):
        """The postmaster and its children."""
        postmaster = self.process.pid
        found = [postmaster]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[1]) == postmaster:
                    found.append(int(entry.name))
        return found

    def _wait_gone(self, pids):
        wait_until(lambda: not any(map(alive, pids)), 30, what="end of the server's processes")

    # Talking to it

    def conninfo(self, dbname="postgres", user="postgres"):
        return f"host={self.home} port={self.port} dbname={dbname} user={user}"

    def connect(self, dbname="postgres", user="postgres", **kwargs):
        return connect(self.conninfo(dbname, user), **kwargs)


def new_home(name):
    """A folder for one server, marked with our process so that a sweep can tell."""
    base = place.run_dir() / "servers"
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    (home / "owner").write_text(f"{os.getpid()} {started_at(os.getpid())}\n")
    if os.getuid() == 0:
        shutil.chown(home, place.server_user(), place.server_user())
    return home


def started_at(pid):
    """Tells two processes with the same number apart (proc(5): starttime)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def sweep():
    """Stops and removes servers whose owner is gone."""
    base = place.run_dir() / "servers"
    for home in base.iterdir() if base.exists() else ():
        try:
            pid, since = (home / "owner").read_text().split()
            if started_at(int(pid)) == since:
                continue
        except (ValueError, OSError):
            # No such process, or no mark yet: its maker may be about to write it.
            if not (home / "owner").exists() and time.time() - home.stat().st_mtime < 60:
                continue
        try:
            postmaster = int((home / "data/postmaster.pid").read_text().split()[0])
            if str(home / "data") in Path(f"/proc/{postmaster}/cmdline").read_text():
                os.kill(postmaster, signal.SIGQUIT)
                wait_until(lambda pid=postmaster: not alive(pid), 30, what="end of a stray server")
        except (OSError, ValueError, IndexError):
            pass
        shutil.rmtree(home, ignore_errors=True)


@atexit.register
def _stop_all():
    for server in list(_running):
        try:
            server.destroy()
        except Exception:
            if server.running:
                server.kill_postmaster()
