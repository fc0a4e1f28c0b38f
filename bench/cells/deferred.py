"""Jobs that wait for their time: how many are promoted a second, how late, and what holds them up."""

import time

from harness import Background, wait_until

from .. import acts
from ..measure import DEAD_TUPLES, percentiles
from .cell import Cell

FLOOD = 1_000_000
WAITING = 10_000_000
RATE = 1000
FEW = 200
STEP = 100_000
# `due` is an expression over n, the number of the job.
SCHEDULE = """
DO $do$ BEGIN
    FOR batch IN 0..{last} LOOP
        PERFORM count(*) FROM awa.insert_jobs((
            SELECT jsonb_agg(jsonb_build_object(
                'kind', 'k', 'queue', '{queue}', 'args', {args}, 'run_at', {due}))
            FROM generate_series(batch * {size} + 1, (batch + 1) * {size}) n));
        COMMIT;
    END LOOP;
END $do$
"""
LATE = """
SELECT extract(epoch FROM clock_timestamp() - run_at)::float8 * 1000, receipt
FROM awa.claim('{queue}', {most}, wait => '1 s')
"""


def run(r):
    few(r)
    flood(r)
    behind_a_horizon(r)


def schedule(r, queue, jobs, due):
    size = min(jobs, acts.BATCH)
    r.rig.conn.execute(SCHEDULE.format(
        queue=queue, args=acts.args_sql(200), due=due, size=size, last=jobs // size - 1))


def few(r):
    """One job every 20 ms, a waiting worker."""
    jobs = r.size(FEW, 50)
    begin = r.rig.conn.value("SELECT (clock_timestamp() + interval '1 s')::text")
    schedule(r, "few", jobs, f"'{begin}'::timestamptz + n * interval '20 ms'")
    late, conn = [], r.rig.connect()
    while len(late) < jobs:
        late += take(conn, "few", 10)
    r.note("from run_at to the claim, 50 jobs a second", percentiles(late), "psycopg", jobs)
    r.rig.expect("few", completed_total=jobs)


def take(conn, queue, most):
    """Claims and completes; how late each job was, ms."""
    rows = conn.rows(LATE.format(queue=queue, most=most))
    conn.execute("SELECT count(*) FROM awa.complete_many(%s::bigint[])", ([r for _, r in rows],))
    return [late for late, _ in rows]


def flood(r):
    """All of them are due at one moment."""
    jobs, rig = r.size(FLOOD), r.rig
    # Late enough for all to be scheduled before.
    due = rig.conn.value(
        "SELECT (clock_timestamp() + %s * interval '1 s')::text", 3 + jobs / 20_000)
    r.measure("insert_jobs of 1,000 for later", lambda: schedule(r, "flood", jobs, f"'{due}'"),
              jobs, "DO loop", dead=False)
    rig.expect("flood", scheduled=jobs)
    rig.conn.execute("CHECKPOINT")
    rig.conn.execute("SELECT pg_sleep_until(%s::timestamptz)", (due,))
    r.measure("promotion of jobs that are due at once",
              lambda: rig.wait_count("flood", "scheduled", 0, 600), jobs, "the worker", dead=False)
    rig.expect("flood", scheduled=-jobs, available=jobs)
    acts.drain_in_one_call(rig.conn, "flood", 5000)
    rig.expect("flood", available=-jobs, completed_total=jobs)


def behind_a_horizon(r):
    """A steady stream comes due among millions that wait, while a snapshot is held."""
    rig, waiting, seconds = r.rig, r.size(WAITING), int(r.seconds())
    for done in range(0, waiting, STEP):
        schedule(r, "later", min(STEP, waiting - done), "clock_timestamp() + interval '1 day'")
        if done % 1_000_000 == 0:
            r.say(f"{done:,} of {waiting:,} scheduled")
    rig.expect("later", scheduled=waiting)
    jobs = RATE * seconds
    begin = rig.conn.value(
        "SELECT (clock_timestamp() + %s * interval '1 s')::text", 3 + jobs / 20_000)
    schedule(r, "due", jobs, f"'{begin}'::timestamptz + n * interval '1 ms'")
    holder = rig.connect()
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    holder.execute("SELECT count(*) FROM awa.deferred_jobs WHERE queue = 'due'")
    dead = rig.conn.value(DEAD_TUPLES)
    length = 60 if seconds >= 300 else max(1, seconds // 5)
    parts = [[] for _ in range(-(-seconds // length))]

    def work():
        conn, done = rig.connect(), 0
        while done < jobs:
            for late in take(conn, "due", 500):
                parts[min(done // (RATE * length), len(parts) - 1)].append(late)
                done += 1

    def load():
        start, worker = time.monotonic(), Background(work)
        while not worker.wait(30):
            r.say(f"{time.monotonic() - start:.0f} s of {seconds}")
        worker.result()

    name = f"1,000 due a second among {waiting:,}, a snapshot held"
    values = r.measure(name, load, jobs, "psycopg")
    values["dead_tuples"] = rig.conn.value(DEAD_TUPLES) - dead
    rig.expect("due", completed_total=jobs)
    series = [{"part": at + 1} | percentiles(part) for at, part in enumerate(parts)]
    r.note(f"from run_at to the claim, {name}", {
        "p99_ms_first": series[0]["p99_ms"], "p99_ms_last": series[-1]["p99_ms"],
        "dead_tuples": values["dead_tuples"],
    }, series=[{key: round(value, 2) for key, value in part.items()} for part in series])
    holder.close()
    # What waits is left there: the server is the cell's own.
    wait_until(lambda: rig.counts("due")["running"] == 0, 10)


CELLS = [
    Cell("deferred", "Scheduled jobs: lateness, promotion, 10 million that wait.", run,
         minutes=10, rounds=1),
]
