"""A client in a process of its own: says its backend's pid, waits for a line, works.

    peer.py CONNINFO insert_jobs QUEUE CALLS     says how many jobs it enqueued
    peer.py CONNINFO compat_batch QUEUE CALLS    the same by the function for awa-pg
    peer.py CONNINFO awa_pg extension|own URL METHOD QUEUE CALLS    the same by awa-pg
    peer.py CONNINFO copy CALLS                  the same of rows of the bare table
    peer.py CONNINFO drain QUEUE CLAIM           says how many jobs it completed
    peer.py CONNINFO wait|claim|listen QUEUE N   says when it had each of N jobs, in ns
"""

import json
import sys
import time

import psycopg

ARGS = {"text": "x" * 188}
BATCH = 1000


def say(value):
    print(value, flush=True)


def insert_jobs(conn, queue, calls):
    jobs = json.dumps([{"kind": "k", "queue": queue, "args": ARGS}] * BATCH)
    done = 0
    for _ in range(int(calls)):
        query = "SELECT count(*) FROM awa.insert_jobs(%s::jsonb)"
        done += conn.execute(query, (jobs,), prepare=True).fetchone()[0]
    say(done)


def compat_batch(conn, queue, calls):
    query = (
        "SELECT count(*) FROM awa.insert_jobs_compat_batch("
        "kinds => %s, queues => %s, args => %s::jsonb[])"
    )
    arrays = [["k"] * BATCH, [queue] * BATCH, [json.dumps(ARGS)] * BATCH]
    done = 0
    for _ in range(int(calls)):
        done += conn.execute(query, arrays, prepare=True).fetchone()[0]
    say(done)


def awa_pg(client, method, queue, calls):
    insert = getattr(client, method)
    done = 0
    for _ in range(int(calls)):
        insert([ARGS] * BATCH, kind="k", queue=queue)
        done += BATCH
    say(done)


def awa_client(where, url):
    """Connected, and its tables are there: the extension's, or its `own`, set up for speed."""
    import awa

    client = awa.Client(url)
    client.migrate()
    if where == "own":
        client.install_queue_storage()
    return client


def copy(conn, calls):
    block = f"q\t{json.dumps(ARGS)}\n".encode() * BATCH
    done = 0
    with conn.cursor() as cur:
        for _ in range(int(calls)):
            with cur.copy("COPY bare (queue, args) FROM STDIN") as stream:
                stream.write(block)
            done += cur.rowcount
    say(done)


def drain(conn, queue, size):
    query = "SELECT receipt, job_id, args::text FROM awa.claim(%s, %s)"
    done = 0
    while rows := conn.execute(query, (queue, int(size)), prepare=True).fetchall():
        receipts = [row[0] for row in rows]
        done += conn.execute(
            "SELECT count(*) FILTER (WHERE completed) FROM awa.complete_many(%s)",
            (receipts,), prepare=True,
        ).fetchone()[0]
    say(done)


def wait(conn, queue, count):
    """wait_for_jobs, then claim: what a worker does that holds no snapshot."""
    for _ in range(int(count)):
        conn.execute("CALL awa.wait_for_jobs(ARRAY[%s], '60 s')", (queue,))
        row = conn.execute("SELECT receipt FROM awa.claim(%s)", (queue,), prepare=True).fetchone()
        say(time.monotonic_ns())
        conn.execute("SELECT awa.complete(%s)", row)


def claim(conn, queue, count):
    conn.execute("SET awa.claim_wait_max = '60 s'")
    query = "SELECT receipt FROM awa.claim(%s, wait => '60 s')"
    for _ in range(int(count)):
        row = conn.execute(query, (queue,), prepare=True).fetchone()
        say(time.monotonic_ns())
        conn.execute("SELECT awa.complete(%s)", row)


def listen(conn, queue, count):
    """What a queue in bare tables can do at best: NOTIFY, then a read by key."""
    conn.execute(f"LISTEN {queue}")
    for _ in range(int(count)):
        for _ in conn.notifies(stop_after=1):
            pass
        conn.execute("SELECT args FROM bare ORDER BY id DESC LIMIT 1").fetchone()
        say(time.monotonic_ns())


ROLES = {role.__name__: role for role in (insert_jobs, compat_batch, awa_pg, copy, drain, wait, claim, listen)}


def main():
    conninfo, role, *arguments = sys.argv[1:]
    with psycopg.connect(conninfo, autocommit=True) as conn:
        conn.execute("SELECT 1")
        if role == "awa_pg":
            where, url, *arguments = arguments
            client = awa_client(where, url)
        else:
            client = conn
        say(conn.info.backend_pid)
        sys.stdin.readline()
        ROLES[role](client, *arguments)


if __name__ == "__main__":
    main()
