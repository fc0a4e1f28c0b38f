"""Clients that cost little beside the server: pgbench, and processes of our own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PEER = Path(__file__).with_name("peer.py")


class Pgbench:
    """Scripts (SQL, or SQL and a weight) run by so many connections in pgbench.

    `each` transactions a connection, or `seconds`; `rate` transactions a second in
    all. With `log`, finish() can tell the latency of each transaction.
    """

    def __init__(self, rig, *scripts, clients=1, each=None, seconds=None, rate=None, log=False,
                 builtin=False):
        self.folder = tempfile.TemporaryDirectory(prefix="awa-bench-")
        command = [rig.server.bin / "pgbench", "-n", "-M", "prepared", "-c", clients,
                   "-j", min(clients, os.cpu_count() or 1)]
        command += ["-t", each] if each else ["-T", max(1, round(seconds))]
        command += ["-R", f"{rate:.1f}"] if rate else []
        command += ["-l"] if log else []
        command += ["-b", "tpcb-like"] if builtin else []
        for number, script in enumerate(scripts):
            sql, weight = script if isinstance(script, tuple) else (script, 1)
            path = Path(self.folder.name) / f"{number}.sql"
            path.write_text(sql)
            command += ["-f", f"{path}@{weight}"]
        self.process = subprocess.Popen(
            [str(part) for part in [*command, rig.conninfo()]], cwd=self.folder.name,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )

    def finish(self):
        """Its figures; an error of any transaction is one of the run."""
        out, err = self.process.communicate()
        if self.process.returncode != 0 or "ERROR" in err:
            raise RuntimeError(f"pgbench ended with {self.process.returncode}:\n{err[-2000:]}")
        transactions = int(re.search(r"actually processed: (\d+)", out)[1])
        by_script = [int(n) for n in re.findall(r"^ - (\d+) transactions", out, re.M)]
        latencies = [
            int(line.split()[2]) / 1000
            for path in Path(self.folder.name).glob("pgbench_log.*")
            for line in path.read_text().splitlines()
        ]
        self.folder.cleanup()
        return {"transactions": transactions, "by_script": by_script or [transactions],
                "latencies_ms": latencies}

    def stop(self):
        """Ends it in the middle of whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate()
        self.folder.cleanup()


class Peers:
    """Processes that run peer.py, each with a connection: threads would share an interpreter.

    They are connected and prepared when this returns, and start with go().
    """

    def __init__(self, rig, role, *arguments, count=1):
        command = [sys.executable, PEER, rig.conninfo(), role, *arguments]
        self.processes = [
            subprocess.Popen([str(part) for part in command], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(count)
        ]
        self.pids = [int(self.line(process)) for process in self.processes]

    @staticmethod
    def line(process):
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a client ended with {process.wait()}")
        return line

    def go(self):
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()

    def read(self):
        """The next line of the first of them."""
        return self.line(self.processes[0]).strip()

    def finish(self):
        """Waits for all; the sum of what each says it did."""
        done = sum(int(self.line(process)) for process in self.processes)
        self.stop()
        return done

    def run(self):
        self.go()
        return self.finish()

    def stop(self):
        for process in self.processes:
            process.stdin.close()
            process.stdout.close()
            process.wait(30)
