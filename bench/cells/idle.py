"""A server on which nothing happens."""

import select
import time

from harness import wait_until

from .. import acts
from ..measure import Cost, cpu_seconds, wake_ups
from .cell import Cell

PROCESSES = "SELECT backend_type, pid FROM pg_stat_activity WHERE backend_type ~* 'awa' ORDER BY 1"


def run(r):
    conn, server = r.rig.conn, r.rig.server
    # There has been work: finished jobs, a queue with ready ones, a worker that waits.
    acts.enqueue(conn, "idle", 1000)
    acts.drain(conn, "idle", 500)
    acts.enqueue(conn, "ready", 1000)
    r.rig.expect("idle", completed_total=1000)
    r.rig.expect("ready", available=1000)
    worker = r.rig.connect()
    runtime = worker.value("SELECT awa.register_runtime('idle')")
    watched = conn.rows(PROCESSES)
    seconds = r.seconds()
    settle(r, min(30, seconds / 2))
    r.say(f"{len(watched)} awa processes; {seconds:.0f} s of nothing")
    before = look(r, watched)
    pause(r, seconds)
    after = look(r, watched)
    for name, pid in watched:
        wakes, cpu = (after[pid][at] - before[pid][at] for at in (0, 1))
        r.note(f"idle: {name}", {
            "wake_ups_per_second": wakes / seconds, "cpu_ms_per_minute": cpu * 60_000 / seconds})
    r.note("idle: the server", {
        "wal_bytes": after["wal"] - before["wal"], "seconds": seconds,
        "transactions": after["xids"] - before["xids"]})
    worker.execute("SELECT awa.deregister_runtime(%s)", (runtime,))
    assert server.running


def settle(r, seconds):
    """Until the work before is over: segments turned over, checkpoint and snapshot logged."""
    r.rig.conn.execute("CHECKPOINT")
    last, since = None, 0

    def quiet():
        nonlocal last, since
        lsn = r.rig.conn.value("SELECT pg_current_wal_insert_lsn()")
        if lsn != last:
            last, since = lsn, time.monotonic()
        return time.monotonic() - since >= seconds

    wait_until(quiet, seconds * 10, what=lambda: f"no WAL for {seconds:.0f} s; it is at {last}")


def look(r, watched):
    cost = Cost.read(r.rig, dead=False)
    return {pid: (wake_ups(pid), cpu_seconds(pid)) for _, pid in watched} | {
        "wal": cost.wal, "xids": cost.commits}


def pause(r, seconds):
    """Passes time: here the time is what is measured."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        select.select([], [], [], min(left, 60))
        r.say(f"{max(0, end - time.monotonic()):.0f} s left")


CELLS = [
    Cell("idle", "An idle server: WAL, wake-ups and CPU of awa's processes.", run, minutes=10,
         rounds=1, settings={"awa.rotate_interval": "5s", "autovacuum": "off"}),
]
