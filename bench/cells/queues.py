"""Very many queues."""

from .. import acts
from .cell import Cell

QUEUES = 1000
JOBS_EACH = 1000

# Each call has one job for each queue: the worst order of arrival.
ENQUEUE = """
DO $do$
DECLARE
    jobs jsonb := (
        SELECT jsonb_agg(jsonb_build_object('kind', 'k', 'queue', 'many-' || n, 'args', {args}))
        FROM generate_series(1, {queues}) n
    );
BEGIN
    FOR n IN 1..{each} LOOP
        PERFORM count(*) FROM awa.insert_jobs(jobs);
        COMMIT;
    END LOOP;
END $do$
"""
# All queues in one claim.
DRAIN_FROM_ALL = """
DO $do$
DECLARE
    names text[] := ARRAY(SELECT 'many-' || n FROM generate_series(1, {queues}) n);
    receipts bigint[];
BEGIN
    FOR n IN 1..{claims} LOOP
        receipts := ARRAY(SELECT receipt FROM awa.claim_from(names, 500));
        COMMIT;
        PERFORM count(*) FROM awa.complete_many(receipts);
        COMMIT;
    END LOOP;
END $do$
"""
DRAIN_ONE_BY_ONE = """
DO $do$
DECLARE
    receipts bigint[];
BEGIN
    FOR n IN 1..{queues} LOOP
        LOOP
            receipts := ARRAY(SELECT receipt FROM awa.claim('many-' || n, 500));
            COMMIT;
            EXIT WHEN receipts = '{{}}';
            PERFORM count(*) FROM awa.complete_many(receipts);
            COMMIT;
        END LOOP;
    END LOOP;
END $do$
"""


def run(r):
    execute = r.rig.conn.execute
    queues, each = r.size(QUEUES, 10), r.size(JOBS_EACH, 100)
    jobs = queues * each
    half = jobs // 2 // 500 * 500
    sql = {"queues": queues, "each": each, "claims": half // 500, "args": acts.args_sql(200)}

    bare = "COPY of 1,000 rows in the server"
    r.alternate(
        lambda: r.measure(bare, lambda: acts.copy(r.rig, jobs), jobs, "DO loop"),
        lambda: r.measure(f"insert_jobs, a job for each of {queues:,} queues a call",
                          lambda: execute(ENQUEUE.format(**sql)), jobs, "DO loop", bare),
    )
    r.measure(f"claim_from {queues:,} queues (500) + complete_many",
              lambda: execute(DRAIN_FROM_ALL.format(**sql)), half, "DO loop")
    r.measure("claim(500) + complete_many, queue by queue",
              lambda: execute(DRAIN_ONE_BY_ONE.format(**sql)), jobs - half, "DO loop")
    for n in range(1, queues + 1):
        r.rig.expect(f"many-{n}", completed_total=each)


CELLS = [Cell("queues", "1,000 queues of 1,000 jobs.", run)]
