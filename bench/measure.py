"""Taking a figure: how long some work took and what it cost the server."""

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

# Exact where rows are updated: by a scan, TOAST included. In the leaves of segments only
# aborts leave dead rows, so there statistics do; a scan of them would set the hint bits
# that the next reader has to set, and pay that reader's WAL.
LEAVES = "relname ~ '^(ready_entries|lease_claim_batches|lease_claim_closures)_[0-9]+$'"
DEAD_TUPLES = f"""
SELECT (
    SELECT coalesce(sum((pgstattuple(rel)).dead_tuple_count), 0)
    FROM pg_class, unnest(ARRAY[oid, nullif(reltoastrelid, 0)]) rel
    WHERE relnamespace = 'awa'::regnamespace AND relkind = 'r' AND rel IS NOT NULL
        AND NOT {LEAVES}
)::bigint + (
    SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_all_tables
    WHERE schemaname = 'awa' AND {LEAVES}
)::bigint
"""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Figure:
    """One line of the table in one round."""

    name: str
    client: str
    values: dict
    jobs: int | None = None
    beside: str | None = None
    series: list = field(default_factory=list)


class Round:
    """What a cell runs with: sizes, and a place for its figures."""

    def __init__(self, rig, number, scale, minutes, warming=False):
        self.rig = rig
        self.number = number
        self.scale = scale
        self.minutes = minutes
        self.warming = warming
        self.figures = []

    def size(self, jobs, unit=1000):
        """`jobs` at the scale of this run, in whole units."""
        return max(unit, round(jobs * self.scale) // unit * unit)

    def seconds(self, share=1.0):
        """Part of the minutes of a cell that is bound by time."""
        return max(2.0, self.minutes * 60 * share)

    def alternate(self, *steps):
        """Runs independent steps, in every other round backwards: so none is always first."""
        for step in steps if self.number % 2 else reversed(steps):
            step()

    def say(self, text):
        if not self.warming:
            print(f"    {text}", flush=True)

    def note(self, name, values, client="", jobs=None, beside=None, series=()):
        """Keeps a figure that the cell has taken itself."""
        self.figures.append(Figure(name, client, values, jobs, beside, list(series)))
        self.say(f"{name}: {', '.join(f'{key} {show(value)}' for key, value in values.items())}")

    def measure(self, name, work, jobs=None, client="", beside=None, dead=True,
                checkpoint=True):
        """Runs `work`, which did `jobs` jobs or returns how many it did."""
        if checkpoint:
            self.rig.conn.execute("CHECKPOINT")
        before = Cost.read(self.rig, dead)
        start = time.monotonic()
        done = work()
        took = time.monotonic() - start
        cost = Cost.read(self.rig, dead) - before
        jobs = done if jobs is None else jobs
        values = {"per_second": jobs / took, "seconds": took} | cost.per(jobs)
        self.figures.append(Figure(name, client, values, jobs, beside))
        self.say(f"{name}: {jobs / took:,.0f}/s ({jobs:,} in {took:.1f} s)")
        return values


@dataclass
class Cost:
    """Counters of the server, or what they grew by."""

    wal: int
    commits: int
    cpu: float
    dead: int | None

    @classmethod
    def read(cls, rig, dead=True):
        conn = rig.conn
        wal = conn.value("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
        # Of xids, not of pg_stat_database: what wrote, at once and exactly.
        xids = conn.value("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        cpu = sum(cpu_seconds(pid) for pid in rig.server.processes())
        cpu += ended_cpu_seconds(rig.server.process.pid)
        return cls(wal, xids, cpu, conn.value(DEAD_TUPLES) if dead else None)

    def __sub__(self, other):
        dead = None if self.dead is None else self.dead - other.dead
        return Cost(self.wal - other.wal, self.commits - other.commits, self.cpu - other.cpu, dead)

    def per(self, jobs):
        values = {
            "wal_bytes_per_job": self.wal / jobs,
            "commits_per_job": self.commits / jobs,
            "cpu_us_per_job": self.cpu / jobs * 1e6,
        }
        return values if self.dead is None else values | {"dead_tuples": self.dead}


def cpu_seconds(pid):
    """What a process has used so far; 0 of one that has ended."""
    return _ticks(pid, 11)


def ended_cpu_seconds(pid):
    """What those of its children have used that it has waited for."""
    return _ticks(pid, 13)


def _ticks(pid, at):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[at : at + 2])) / TICK


def wake_ups(pid):
    """How often a process has given the processor back to wait for something."""
    return _status(pid, "voluntary_ctxt_switches")


def private_kilobytes(pid):
    return _status(pid, "RssAnon")


def _status(pid, key):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise KeyError(key)


def percentiles(milliseconds):
    cuts = statistics.quantiles(milliseconds, n=100, method="inclusive")
    return {"p50_ms": cuts[49], "p95_ms": cuts[94], "p99_ms": cuts[98]}


def show(value):
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
