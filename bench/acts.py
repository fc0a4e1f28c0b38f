"""Work done by loops in the server, each turn a transaction: no client is measured."""

import json
import threading

BATCH = 1000
ARGS = {"text": "x" * 188}
# Text that compression gains little on, as long as wanted.
RANDOM_TEXT = "(SELECT left(string_agg(md5(n::text), ''), {}) FROM generate_series(1, {}) n)"
BARE_INSERT = f"INSERT INTO bare (queue, args) VALUES ('q', '{json.dumps(ARGS)}');\n"


def args_sql(size):
    """An expression for args of about so many bytes as text."""
    if size == 200:
        return "jsonb_build_object('text', repeat('x', 188))"
    return f"jsonb_build_object('text', {RANDOM_TEXT.format(size - 12, size // 32 + 1)})"


def enqueue(conn, queue, jobs, size=200, batch=BATCH):
    """insert_jobs of `batch` jobs a call."""
    calls, rest = divmod(jobs, batch)
    assert rest == 0, f"{jobs} jobs are not whole batches of {batch}"
    conn.execute(
        f"""
        DO $do$
        DECLARE
            jobs jsonb := (
                SELECT jsonb_agg(jsonb_build_object(
                    'kind', 'k', 'queue', '{queue}', 'args', {args_sql(size)}))
                FROM generate_series(1, {batch})
            );
        BEGIN
            FOR n IN 1..{calls} LOOP
                PERFORM count(*) FROM awa.insert_jobs(jobs);
                COMMIT;
            END LOOP;
        END $do$
        """
    )


def enqueue_made(conn, queue, jobs, batch, keyed, series):
    """The same of jobs that are made for each call, so that each can have a key of its own."""
    key = f", 'unique_key', '{queue} {series} ' || (n * {batch} + i)" if keyed else ""
    conn.execute(
        f"""
        DO $do$ BEGIN
            FOR n IN 1..{jobs // batch} LOOP
                PERFORM count(*) FROM awa.insert_jobs((
                    SELECT jsonb_agg(jsonb_build_object(
                        'kind', 'k', 'queue', '{queue}', 'args', {args_sql(200)}{key}))
                    FROM generate_series(1, {batch}) AS i
                ));
                COMMIT;
            END LOOP;
        END $do$
        """
    )


def enqueue_together(rig, queue, jobs, producers):
    shares = split(jobs, producers)
    conns = [rig.connect() for _ in shares]
    together([lambda c=c, n=n: enqueue(c, queue, n) for c, n in zip(conns, shares, strict=True)])


def copy_together(rig, rows, producers):
    shares = split(rows, producers)
    conns = [rig.connect() for _ in shares]
    together([
        lambda c=c, n=n: copy(rig, n, conn=c) for c, n in zip(conns, shares, strict=True)])


def split(jobs, producers):
    """Whole batches for each."""
    share = jobs // producers // BATCH * BATCH
    return [share] * (producers - 1) + [jobs - share * (producers - 1)]


def copy(rig, rows, size=200, batch=BATCH, conn=None):
    """COPY of `batch` rows a transaction into the bare table, from a file of the server."""
    conn = conn or rig.conn
    path = rig.server.data / f"rows-{size}-{batch}"
    if not path.exists():
        line = conn.value(f"SELECT {args_sql(size)}::text")
        path.write_text(f"q\t{line}\n" * batch)
        path.chmod(0o644)
    conn.execute(
        f"""
        DO $do$ BEGIN
            FOR n IN 1..{rows // batch} LOOP
                COPY bare (queue, args) FROM '{path}';
                COMMIT;
            END LOOP;
        END $do$
        """
    )


def drain(conn, queue, claim):
    """claim, then complete_many, until nothing is left."""
    conn.execute(
        f"""
        DO $do$
        DECLARE
            receipts bigint[];
        BEGIN
            LOOP
                receipts := ARRAY(SELECT receipt FROM awa.claim('{queue}', {claim}));
                COMMIT;
                EXIT WHEN receipts = '{{}}';
                PERFORM count(*) FROM awa.complete_many(receipts);
                COMMIT;
            END LOOP;
        END $do$
        """
    )


def drain_in_one_call(conn, queue, claim):
    """complete_and_claim until nothing is left."""
    conn.execute(
        f"""
        DO $do$
        DECLARE
            receipts bigint[] := '{{}}';
        BEGIN
            LOOP
                receipts := ARRAY(
                    SELECT receipt FROM awa.complete_and_claim(receipts, '{queue}', {claim}));
                COMMIT;
                EXIT WHEN receipts = '{{}}';
            END LOOP;
        END $do$
        """
    )


def read_bare(conn, rows, batch):
    """The least that a drain of a table does: read `batch` rows by key, note one, commit."""
    conn.execute(
        f"""
        DO $do$
        DECLARE
            first bigint := (SELECT min(id) FROM bare);
        BEGIN
            FOR n IN 0..{rows // batch - 1} LOOP
                PERFORM count(args) FROM bare
                    WHERE id >= first + n * {batch} AND id < first + (n + 1) * {batch};
                INSERT INTO bare_acks VALUES (first + (n + 1) * {batch});
                COMMIT;
            END LOOP;
        END $do$
        """
    )


def together(works):
    """Runs them in threads, for sessions that are busy in the server; errors are raised."""
    errors = []

    def run(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
