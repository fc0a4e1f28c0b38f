"""What the end of an owner costs, and how soon its jobs are others'."""

import threading
import time

from harness import wait_until

from .. import acts
from ..measure import Cost, percentiles
from .cell import Cell

OPEN = 10_000
SESSIONS = 200
ABANDONED, BATCH = 1_600_000, 500
RATE, CLIENTS = 200, 4
BARE = "INSERT INTO bare (queue, args) VALUES ('q', '{}')"


def close_to_claim(r):
    """From the close of a session to the claim of its job by another one."""
    rig, sessions = r.rig, r.size(SESSIONS, 20)
    rig.conn.execute("""SELECT awa.configure_queue('heir', '{"backoff": {"base": "0 s"}}')""")
    hold(rig, rig.connect(), "busy", OPEN, OPEN)
    heir, took = rig.connect(), []
    for _ in range(sessions):
        conn = rig.connect()
        hold(rig, conn, "heir", 1, 1)
        start = time.monotonic()
        conn.close()
        while not (rows := heir.column("SELECT receipt FROM awa.claim('heir', wait => '2 s')")):
            pass
        took.append((time.monotonic() - start) * 1000)
        heir.execute("SELECT awa.complete(%s)", (rows[0],))
    rig.expect("heir", completed_total=sessions)
    r.note(f"close of a session to the claim of its job, {OPEN:,} attempts open",
           percentiles(took), "psycopg", sessions)
    give_back(rig, "busy", OPEN)


def hold(rig, conn, queue, jobs, claim):
    """A runtime of the session that has claimed so many new jobs, `claim` at a time."""
    acts.enqueue(rig.conn, queue, jobs, batch=min(jobs, acts.BATCH))
    runtime = conn.value("SELECT awa.register_runtime('lost')")
    conn.execute(
        f"""
        DO $do$ BEGIN
            FOR n IN 1..{jobs // claim} LOOP
                PERFORM FROM awa.claim('{queue}', {claim}, '{runtime}', '0');
                COMMIT;
            END LOOP;
        END $do$
        """
    )
    assert rig.counts(queue)["available"] == 0


def give_back(rig, queue, jobs):
    """Completes what is left of a queue whose sessions are gone."""
    rig.database.close_sessions()

    def all_done():
        acts.drain_in_one_call(rig.conn, queue, 5000)
        counts = rig.counts(queue)
        return counts["available"] + counts["retryable"] + counts["running"] == 0

    wait_until(all_done, 600, what=lambda: f"all completed: {rig.counts(queue)}")
    rig.expect(queue, completed_total=jobs)


def abandoned(r):
    """Attempts of a session that has ended, claimed one by one and in batches of 500."""
    jobs = r.size(ABANDONED)
    alone = foreground(r, lambda: time.sleep(min(10, max(2, 100 * r.scale))))
    for claim, name in ((1, "one by one"), (BATCH, f"in batches of {BATCH}")):
        queue = f"lost{claim}"
        conn, course = r.rig.connect(), []
        hold(r.rig, conn, queue, jobs, claim)
        beside = foreground(
            r, lambda conn=conn, queue=queue, course=course: drain(r, conn, queue, jobs, course))
        took = course[-1][0]
        first, last = share(course, 0.0, 0.1), share(course, 0.9, 1.0)
        r.note(f"rescue of {jobs:,} attempts claimed {name}", {
            "seconds": took, "per_second": jobs / took,
            "first_tenth_ms_a_batch": first[0], "last_tenth_ms_a_batch": last[0],
            "first_tenth_wal_a_batch": first[1], "last_tenth_wal_a_batch": last[1],
            "foreground_share": beside / alone}, "one session", jobs)
        give_back(r.rig, queue, jobs)


def foreground(r, work):
    """Transactions a second of a load that wants 200, for as long as `work` runs."""
    conn = r.rig.connect()
    with r.rig.beside(BARE, clients=CLIENTS, seconds=3600, rate=RATE):
        wait_until(lambda: conn.value("SELECT count(*) FROM bare"), 20)
        conn.execute("TRUNCATE bare")
        start = time.monotonic()
        work()
        return conn.value("SELECT count(*) FROM bare") / (time.monotonic() - start)


def drain(r, conn, queue, jobs, course):
    """Ends the session; (seconds, rescued, WAL) until nothing of it runs any more."""
    start, wal = time.monotonic(), Cost.read(r.rig, dead=False).wal
    conn.close()

    def none_runs():
        running = r.rig.counts(queue)["running"]
        written = Cost.read(r.rig, dead=False).wal - wal
        course.append((time.monotonic() - start, jobs - running, written))
        return running == 0

    wait_until(none_runs, 1200, what=lambda: f"the last rescue: {course[-1]}", every=0.01)


def share(course, begin, end):
    """Milliseconds and WAL a batch between two parts of the drain."""
    jobs = course[-1][1]
    first = max((point for point in course if point[1] <= jobs * begin), default=course[0])
    last = next(point for point in course if point[1] >= jobs * end)
    batches = max(1, (last[1] - first[1]) / BATCH)
    return (last[0] - first[0]) * 1000 / batches, (last[2] - first[2]) / batches


REPLICAS, IN_FLIGHT = 200, 100_000
NAIVE = """
CREATE TABLE IF NOT EXISTS runs (id bigserial PRIMARY KEY, state text, owner int, args jsonb);
CREATE INDEX IF NOT EXISTS runs_state ON runs (state, id);
CREATE TABLE IF NOT EXISTS deliveries (id bigserial PRIMARY KEY, run bigint);
"""
# A page at a time, as a booting instance does that knows of no owner: every run that is
# not over is put into the queue again.
REDRIVE = """
DO $do$
DECLARE
    last bigint := 0;
    page bigint[];
BEGIN
    LOOP
        page := ARRAY(SELECT id FROM runs WHERE state = 'running' AND id > last ORDER BY id LIMIT 1000);
        EXIT WHEN page = '{}';
        INSERT INTO deliveries (run) SELECT unnest(page);
        last := page[array_length(page, 1)];
        COMMIT;
    END LOOP;
END $do$
"""


def boot(r):
    """Instances that boot at once, while attempts are in flight of which a half is lost."""
    jobs, replicas = r.size(IN_FLIGHT), r.size(REPLICAS, 10)
    r.alternate(lambda: naive(r, jobs, replicas), lambda: recover(r, jobs, replicas))


def at_once(rig, replicas, work):
    """Seconds in which all have done it, and what each got; some connections take turns."""
    conns = [rig.connect() for _ in range(replicas)]
    turns, got, lock = iter(range(replicas)), [], threading.Lock()

    def boots(conn):
        while True:
            with lock:
                if next(turns, None) is None:
                    return
            found = work(conn)
            with lock:
                got.append(found)

    start = time.monotonic()
    acts.together([lambda conn=conn: boots(conn) for conn in conns])
    took = time.monotonic() - start
    for conn in conns:
        conn.close()
    return took, got


def naive(r, jobs, replicas):
    """In plain tables: every replica puts every running run into the queue again."""
    rig = r.rig
    rig.conn.execute(NAIVE)
    rig.conn.execute("INSERT INTO runs (state, owner, args) SELECT 'running', n %% 2, '{}'"
                     " FROM generate_series(1, %s) n", (jobs,))
    before = Cost.read(rig, dead=False)
    took, _ = at_once(rig, replicas, lambda conn: conn.execute(REDRIVE))
    cost = Cost.read(rig, dead=False) - before
    scanned = rig.conn.value("SELECT count(*) FROM deliveries")
    # One delivery of each run whose owner is gone would be right.
    r.note(f"boot of {replicas} replicas, plain tables, each re-drives what runs", {
        "passes": replicas, "rows_scanned": scanned, "rows_written": scanned,
        "duplicates": scanned - jobs // 2, "wal_mb": cost.wal / 1e6, "seconds": took},
        f"psycopg, {replicas} at once", jobs)
    rig.conn.execute("DROP TABLE runs, deliveries")


def closures(rig):
    """Rows that say how attempts ended."""
    leaves = " UNION ALL ".join(
        f"SELECT FROM awa.lease_claim_closures_{slot}" for slot in range(16))
    return rig.conn.value(f"SELECT count(*) FROM ({leaves}) c")


def recover(r, jobs, replicas):
    """awa.recover(epoch): one runs, and re-drives what has lost its owner. Who owns what is in
    memory, so nothing is scanned; a batch of closes is a row."""
    rig, half = r.rig, jobs // 2
    lost, living = rig.connect(), rig.connect()
    for conn in (lost, living):
        hold(rig, conn, "boot", half, min(half, BATCH))
    before, closed = Cost.read(rig, dead=False), closures(rig)
    lost.close()
    epoch = f"deploy {r.number}"
    query = "SELECT * FROM awa.recover(%s)"
    took, got = at_once(rig, replicas, lambda conn: conn.row(query, epoch))
    wait_until(lambda: rig.counts("boot")["running"] == half, 120,
               what=lambda: f"the rescue of one half: {rig.counts('boot')}")
    cost, closed = Cost.read(rig, dead=False) - before, closures(rig) - closed
    ran = [row for row in got if row[0]]
    assert len(ran) == 1, f"{len(ran)} passes ran for one epoch"
    # Each lost attempt is delivered once more, none that lives.
    delivered = 0
    heir = rig.connect()

    def none_left():
        nonlocal delivered
        delivered += heir.value(
            "SELECT count(*) FILTER (WHERE completed) FROM awa.complete_many(ARRAY("
            "SELECT receipt FROM awa.claim('boot', 5000)))")
        return rig.counts("boot")["retryable"] + rig.counts("boot")["available"] == 0

    wait_until(none_left, 300, every=0.01)
    assert delivered == half, f"{delivered:,} deliveries of {half:,} lost attempts"
    r.note(f"boot of {replicas} replicas, recover(epoch)", {
        "passes": len(ran), "rows_scanned": 0, "rows_written": closed + len(ran),
        "duplicates": delivered - half, "wal_mb": cost.wal / 1e6, "seconds": took},
        f"psycopg, {replicas} at once", jobs)
    living.execute("SELECT count(*) FROM awa.complete_many(ARRAY("
                   "SELECT run_lease FROM awa.jobs WHERE queue = 'boot' AND state = 'running'))")
    living.close()
    rig.expect("boot", completed_total=jobs)


CELLS = [
    Cell("close", "From the close of a session to the claim of its job.", close_to_claim),
    Cell("boot", "200 replicas that boot at once, 100,000 attempts in flight.", boot, rounds=1,
         settings={"max_connections": 300}),
    Cell("abandoned", "1,600,000 attempts of a session that ended, claimed one by one and in"
         " batches of 500, beside a load of 200 transactions a second.", abandoned,
         rounds=1, settings={"awa.max_open_claims": 1 << 21}),
]
