"""A steady load while a snapshot is held, which nothing can be vacuumed behind."""

import json
import time

from harness import Background, wait_until

from .. import acts
from ..clients import Pgbench
from ..measure import DEAD_TUPLES
from .cell import Cell

RATE = 2000
SEEN = "CREATE UNLOGGED TABLE IF NOT EXISTS seen (at timestamptz, since timestamptz)"
PRODUCE = f"SELECT awa.insert_job('k', '{json.dumps(acts.ARGS)}', 'pinned');\n"
WORK = """
WITH claimed AS MATERIALIZED (
    SELECT receipt, created_at FROM awa.claim('pinned', 100, wait => '100 ms')
), noted AS (
    INSERT INTO seen SELECT clock_timestamp(), created_at FROM claimed
)
SELECT coalesce(array_agg(receipt), '{}') AS receipts FROM claimed \\gset
SELECT count(*) FROM awa.complete_many(:receipts);
"""
PARTS = """
SELECT floor(extract(epoch FROM at - first) / {length})::int AS part,
       count(*) / {length}::float8 AS per_second,
       percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (
           ORDER BY extract(epoch FROM at - since)::float8 * 1000) AS ms
FROM seen, (SELECT min(at) AS first FROM seen) start
GROUP BY 1 HAVING count(*) > 0 ORDER BY 1
"""


def run(r):
    r.rig.conn.execute(SEEN)
    phase(r, "without a held snapshot", r.seconds(0.2), held=False)
    phase(r, "with a snapshot held from the start", r.seconds(), held=True)


def phase(r, name, seconds, held):
    rig = r.rig
    rig.conn.execute("TRUNCATE seen")
    dead = rig.conn.value(DEAD_TUPLES)
    holder = rig.connect()
    if held:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM awa.segments")
    values = r.measure(
        f"2,000 jobs a second, {name}", lambda: load(r, seconds), client="pgbench, 8 + 4 clients")
    length = 60 if seconds >= 300 else seconds / 5
    series = [
        {"part": part + 1, "per_second": rate, "p50_ms": ms[0], "p99_ms": ms[1]}
        for part, rate, ms in rig.conn.rows(PARTS.format(length=length))
        # The last jobs are claimed a moment after the end of the load.
        if part < round(seconds / length)
    ]
    values["dead_tuples"] = rig.conn.value(DEAD_TUPLES) - dead
    r.note(f"enqueue to claim, {name}", {
        "p99_ms_first": series[0]["p99_ms"], "p99_ms_last": series[-1]["p99_ms"],
        "dead_tuples": values["dead_tuples"],
    }, series=[{key: round(value, 2) for key, value in part.items()} for part in series])
    holder.close()


def load(r, seconds):
    """Producers at the rate, workers until nothing is left; how many jobs there were."""
    with r.rig.beside(WORK, clients=4, seconds=24 * 3600):
        start = time.monotonic()
        producers = Pgbench(r.rig, PRODUCE, clients=8, seconds=seconds, rate=RATE)
        finished = Background(producers.finish)
        while not finished.wait(30):
            waiting = r.rig.counts("pinned")["available"]
            r.say(f"{time.monotonic() - start:.0f} s of {seconds:.0f}, {waiting:,} wait")
        enqueued = finished.result()["transactions"]
        r.rig.expect("pinned", completed_total=enqueued)
        wait_until(lambda: drained(r), 60, lambda: f"all done: {r.rig.counts('pinned')}")
    return enqueued


def drained(r):
    counts = r.rig.counts("pinned")
    return counts["available"] + counts["running"] == 0


CELLS = [
    Cell("pinned", "2,000 jobs a second while a REPEATABLE READ snapshot is held.", run,
         minutes=10, rounds=1),
]
