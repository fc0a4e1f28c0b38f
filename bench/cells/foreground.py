"""What a drain does to others: the latency of pgbench's own load."""

import threading

from harness import place

from .. import acts
from ..measure import percentiles
from .cell import Cell

ROWS = 20_000
RATE, CLIENTS = 200, 4


def run(r):
    rig = r.rig
    place.run([rig.server.bin / "pgbench", "-i", "-q", "-s", "10", rig.conninfo()])
    r.alternate(
        lambda: foreground(r, "alone", None),
        lambda: foreground(r, "while a bare table is filled and read", bare_turn),
        lambda: foreground(r, "while awa is filled and drained", awa_turn),
    )


def foreground(r, name, turn):
    """TPC-B-like transactions at a rate, beside turns of a load until they end."""
    over, turns, failed = threading.Event(), [], []
    conn = r.rig.connect()

    def load():
        try:
            while not over.is_set():
                turn(r, conn)
                turns.append(ROWS)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=load)
    if turn:
        thread.start()
    try:
        done = r.rig.pgbench(
            clients=CLIENTS, seconds=r.seconds(), rate=RATE, log=True, builtin=True)
    finally:
        over.set()
        if turn:
            thread.join()
    if failed:
        raise failed[0]
    conn.close()
    r.note(f"pgbench at {RATE}/s {name}", percentiles(done["latencies_ms"]) | {
        "jobs_per_second_beside": sum(turns) / r.seconds()}, f"pgbench -c {CLIENTS}")


def bare_turn(r, conn):
    acts.copy(r.rig, ROWS, conn=conn)
    acts.read_bare(conn, ROWS, 500)
    conn.execute("TRUNCATE bare")


def awa_turn(r, conn):
    acts.enqueue(conn, "drain", ROWS)
    acts.drain_in_one_call(conn, "drain", 500)
    r.rig.expect("drain", completed_total=ROWS)


CELLS = [
    Cell("foreground", "Latency of another load of 200 transactions a second, with and without a"
         " queue that is filled and drained.", run, minutes=1),
]
