"""Where the private copy of the server is, and who runs it."""

import hashlib
import os
import pwd
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_dir():
    """The same as in scripts/lib.sh."""
    if "AWA_RUN_DIR" in os.environ:
        return Path(os.environ["AWA_RUN_DIR"])
    checkout = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
    return Path(f"/var/tmp/awa-{os.getuid()}-{checkout}")


def bin_dir(flavour):
    major = os.environ.get("PG_MAJOR", "15")
    found = run_dir() / flavour / f"usr/lib/postgresql/{major}/bin"
    if not (found / "postgres").exists():
        raise RuntimeError(f"no server at {found}: run scripts/install-prefix {flavour}")
    return found


def server_user():
    """PostgreSQL refuses to run as root, so then it is user postgres."""
    return "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name


def as_server_user(command, die_with_parent=False):
    """The command line that runs `command` as the server's user."""
    wrapper = ["setpriv"]
    if os.getuid() == 0:
        user = pwd.getpwnam("postgres")
        wrapper += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]
    if die_with_parent:
        # Should this process be killed, its servers stop with it.
        wrapper += ["--pdeathsig=QUIT"]
    return (wrapper if len(wrapper) > 1 else []) + [str(part) for part in command]


def run(command, **kwargs):
    """Runs a tool as the server's user; its output goes into the error."""
    done = subprocess.run(
        as_server_user(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd="/",
        env=environment(),
        **kwargs,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


def environment():
    """A server's environment: nothing of the caller's PG* or Rust settings."""
    keep = {name: os.environ[name] for name in ("PATH", "TZDIR") if name in os.environ}
    return keep | {"LC_ALL": "C.UTF-8", "HOME": "/"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
