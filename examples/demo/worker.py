"""A worker in Python: claims files, hashes them, and completes each with its result.

    worker.py CONNINFO QUEUE NAME

The result and the completion are one transaction: a file is hashed once, or its
job comes back. Stops on SIGTERM, between two batches.
"""

import hashlib
import json
import signal
import sys

import psycopg

BATCH = 25


def main():
    conninfo, queue, name = sys.argv[1:]
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))

    with psycopg.connect(conninfo, autocommit=True) as conn:
        # Should this session end, for any reason, its jobs are given to others.
        runtime = conn.execute("SELECT awa.register_runtime(%s)", (name,)).fetchone()[0]
        while not stopping:
            jobs = conn.execute(
                "SELECT receipt, job_id, args->>'path', attempt FROM awa.claim(%s, %s, %s)",
                (queue, BATCH, runtime),
            ).fetchall()
            if not jobs:
                # Wakes at the commit that makes a job ready; no polling.
                conn.execute("CALL awa.wait_for_jobs(%s, '500 ms')", ([queue],))
                continue
            print(json.dumps([[receipt, job_id] for receipt, job_id, _, _ in jobs]), flush=True)
            for receipt, _, path, attempt in jobs:
                with open(path, "rb") as file:
                    content = file.read()
                with conn.transaction():
                    conn.execute(
                        "INSERT INTO results VALUES (%s, %s, %s, %s, %s, %s)",
                        (path, hashlib.sha256(content).hexdigest(), len(content), name, receipt,
                         attempt),
                    )
                    conn.execute("SELECT awa.complete(%s)", (receipt,))


main()
