"""The demo: every file under /usr/share/doc is hashed exactly once, although a worker is killed.

A private server, one job a file, two workers in Python and two in Node. In the
middle one of them gets SIGKILL while it holds jobs. Ends with a table, and with
an error where anything in it is not as promised. AWA_DEMO_DIR is another folder.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("AWA_FLAVOUR", "release")

from psycopg.types.json import Jsonb  # noqa: E402

from harness import Database, Server, wait_until  # noqa: E402
from harness.server import sweep  # noqa: E402

FOLDER = os.environ.get("AWA_DEMO_DIR", "/usr/share/doc")
QUEUE = "files"
TTY = sys.stdout.isatty()


def say(text):
    print(f"\033[1m==>\033[0m {text}" if TTY else f"==> {text}", flush=True)


class Worker:
    """A process that hashes files; `claimed` is its last batch: job ids by receipt."""

    def __init__(self, database, language, name):
        self.name = name
        server = database.server
        if language == "python":
            command = [sys.executable, HERE / "worker.py", database.conninfo(), QUEUE, name]
        else:
            command = ["node", HERE / "worker.js", server.home, str(server.port), database.name,
                       QUEUE, name]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"NODE_PATH": str(ROOT / "node_modules"), "PGAPPNAME": name},
        )
        self.claimed = {}
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.claimed = {int(receipt): int(job) for receipt, job in json.loads(line)}

    def backend(self, conn):
        """The server process of its session, by the name that it gave itself."""
        return conn.value(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s", self.name
        )

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(20)
        assert code == 0, f"{self.name} ended with {code}"


def files():
    """Regular files only, links not followed. A name must be text to be an argument."""
    found, odd = [], 0
    for folder, _, names in os.walk(FOLDER):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                try:
                    path.encode()
                except UnicodeEncodeError:
                    odd += 1
                    continue
                found.append(path)
    if odd:
        say(f"leaving out {odd} files whose names are not UTF-8")
    return sorted(found)


def enqueue(conn, paths):
    start = time.monotonic()
    with conn.transaction():
        for at in range(0, len(paths), 1000):
            jobs = [{"kind": "hash", "queue": QUEUE, "args": {"path": path}}
                    for path in paths[at:at + 1000]]
            conn.execute("SELECT count(*) FROM awa.insert_jobs(%s)", (Jsonb(jobs),))
    return time.monotonic() - start


def kill_while_it_works(conn, worker):
    """SIGKILL at a moment when the worker holds jobs; the jobs that it held."""

    def holds():
        worker.process.send_signal(signal.SIGSTOP)
        # Its backend still finishes what it was asked for last: a stopped client sends
        # nothing more, so once idle (in a transaction or not) nothing changes.
        wait_until(lambda: conn.value(
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s AND state = 'active'",
            worker.backend(conn),
        ))
        batch = worker.claimed
        held = conn.column(
            "SELECT unnest(%s::bigint[]) EXCEPT SELECT receipt FROM results", list(batch)
        )
        if len(held) > 1:
            return [batch[receipt] for receipt in held]
        worker.process.send_signal(signal.SIGCONT)
        return None

    jobs = wait_until(holds, 20, what=f"{worker.name} in the middle of a batch", every=0.002)
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait()
    return jobs


def show(rows):
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    print()


def main():
    sweep()
    broken = []

    def expect(what, holds):
        if not holds:
            broken.append(what)

    say("starting a private server")
    server = Server({"awa.rotate_interval": "60s", "autovacuum_naptime": "1min"}, durable=True,
                    name="demo").init().start()
    workers = []
    try:
        database = Database(server, "demo")
        conn = database.connect()
        conn.execute(
            "CREATE TABLE results (path text, sha256 text, bytes bigint, worker text,"
            " receipt bigint, attempt int)"
        )
        paths = files()
        assert paths, f"no files under {FOLDER}"
        took = enqueue(conn, paths)
        say(f"enqueued {len(paths):,} files of {FOLDER} in {took:.2f} s")

        start = time.monotonic()
        workers = [
            Worker(database, language, f"{language}-{number}")
            for number in (1, 2) for language in ("python", "node")
        ]
        say(f"working: {', '.join(worker.name for worker in workers)}")

        def done():
            return conn.value("SELECT count(*) FROM results")

        wait_until(lambda: progress(done(), len(paths)) >= len(paths) * 0.3, 120,
                   what="a third of the work", every=0.002)
        victim = workers.pop(0)
        orphans = kill_while_it_works(conn, victim)
        killed = time.monotonic()
        progress_end()
        say(f"killed {victim.name} (SIGKILL) while it held {len(orphans)} jobs")

        def state(condition):
            return conn.value(
                "SELECT count(*) FROM unnest(%s::bigint[]) AS o (id), awa.get_job(o.id) AS j"
                f" WHERE {condition}",
                orphans,
            )

        wait_until(lambda: state("state <> 'running' OR attempt > 1") == len(orphans), 30,
                   what="the orphans to be noticed", every=0.002)
        noticed = time.monotonic() - killed
        # The last commit that it sent may have arrived after all.
        orphans = [job for job in orphans if conn.value(
            "SELECT state <> 'completed' OR attempt > 1 FROM awa.get_job(%s)", job)]
        say(f"all of them noticed after {noticed * 1000:.0f} ms, waiting out their backoff")

        worked = None
        first = again = None
        end = time.monotonic() + 120
        finished = 0
        while again is None or finished < len(paths):
            assert time.monotonic() < end, "the work does not end"
            now, finished = time.monotonic(), progress(done(), len(paths))
            if worked is None and finished >= len(paths) - len(orphans):
                worked = now - start
            restarted = state("attempt > 1")
            if restarted and first is None:
                first = now - killed
            if restarted == len(orphans) and again is None:
                again = now - killed
            time.sleep(0.002)
        progress_end()
        for worker in workers:
            worker.stop()
        workers.clear()

        wait_until(lambda: conn.value(
            "SELECT completed_total FROM awa.queue_stats WHERE queue = %s", QUEUE) == len(paths))
        files_hashed = conn.value("SELECT count(DISTINCT path) FROM results")
        rows_written = done()
        by_worker = conn.rows("SELECT worker, count(*) FROM results GROUP BY 1 ORDER BY 1")
        sample = conn.rows("SELECT path, sha256 FROM results ORDER BY random() LIMIT 200")
        wrong = sum(hashlib.sha256(Path(path).read_bytes()).hexdigest() != digest
                    for path, digest in sample)
        conn.execute("SELECT pg_stat_force_next_flush()")
        dead = conn.value(
            "SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_all_tables"
            " WHERE schemaname = 'awa' AND relname"
            " ~ '^(ready_entries|lease_claim_batches|lease_claim_closures)_[0-9]+$'"
        )
        checks = conn.rows("SELECT invariant, ok, detail FROM awa.check()")

        expect("every file is hashed", set(conn.column("SELECT path FROM results")) == set(paths))
        expect("no file is hashed twice", rows_written == files_hashed == len(paths))
        expect("the hashes are right", wrong == 0)
        expect("the killed worker's jobs ran again", len(orphans) > 0 and again is not None)
        expect("orphans are noticed within a second", noticed < 1)
        # They come back to the end of the queue: what was before them is worked off first.
        before_them = max(0, start + worked - killed)
        expect("orphans run again within 4 s, or after all others", again < 4 + before_them)
        expect("no dead tuples", dead == 0)
        expect("awa.check() is clean", checks and all(ok for _, ok, _ in checks))

        show([
            ("files", f"{len(paths):,}"),
            ("hashed exactly once", f"{files_hashed:,} ({rows_written - files_hashed} twice)"),
            ("by worker", ", ".join(f"{name} {count:,}" for name, count in by_worker)),
            ("hashes checked", f"{len(sample)}, {wrong} wrong"),
            ("enqueued", f"{len(paths) / took:,.0f} jobs/s, one client, 1,000 a call"),
            ("worked off", f"{(len(paths) - len(orphans)) / worked:,.0f} jobs/s, start of the"
                           " workers included, each in a commit of its own"),
            ("killed", f"{victim.name}, holding {len(orphans)} jobs"),
            ("  noticed", f"{noticed * 1000:.0f} ms after the kill"),
            ("  running again", f"{first:.2f} s (first), {again:.2f} s (all): a lost attempt"
                                " counts, so 2 to 2.5 s of backoff"),
            ("dead tuples", f"{dead} in the queue's tables"),
            ("awa.check()", f"{sum(ok for _, ok, _ in checks)} of {len(checks)} invariants hold"),
        ])
    finally:
        for worker in workers:
            worker.process.kill()
        server.destroy()
    for what in broken:
        print(f"  NOT SO: {what}")
    if broken:
        return 1
    say("everything as promised; the server is stopped and its files are gone")
    return 0


def progress(done, total):
    if TTY:
        filled = 40 * done // total
        print(f"\r    [{'#' * filled}{'.' * (40 - filled)}] {done:,}/{total:,}", end="", flush=True)
    return done


def progress_end():
    if TTY:
        print()


if __name__ == "__main__":
    sys.exit(main())
