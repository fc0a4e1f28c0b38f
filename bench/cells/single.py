"""One job a transaction, by few and by many connections."""

import json

from .. import acts
from .cell import Cell

JOBS = 20_000
INSERT = f"SELECT awa.insert_job('k', '{json.dumps(acts.ARGS)}', 'single');\n"
CLAIM_AND_COMPLETE = (
    "SELECT receipt FROM awa.claim('single') \\gset\nSELECT awa.complete(:receipt);\n"
)


def run(r):
    # One client with a flush a commit is slow where the disk is.
    life(r, r.size(JOBS // 4, 64), 1)
    life(r, r.size(JOBS, 64), 8)
    r.alternate(lambda: many_claimers(r, 16), lambda: many_claimers(r, 64))


def life(r, jobs, clients):
    bare = f"INSERT into a bare table, {clients} client(s)"
    r.alternate(
        lambda: by_pgbench(r, bare, acts.BARE_INSERT, jobs, clients),
        lambda: by_pgbench(r, f"insert_job, {clients} client(s)", INSERT, jobs, clients, bare),
    )
    r.rig.expect("single", available=jobs)
    claim(r, jobs, clients, bare)


def many_claimers(r, clients):
    jobs = r.size(JOBS, 64)
    bare = f"INSERT into a bare table, {clients} client(s)"
    acts.enqueue(r.rig.conn, "single", jobs, batch=64)
    r.rig.expect("single", available=jobs)
    r.alternate(
        lambda: by_pgbench(r, bare, acts.BARE_INSERT, jobs, clients),
        lambda: claim(r, jobs, clients, bare),
    )


def claim(r, jobs, clients, bare):
    name = f"claim(1), then complete, {clients} client(s)"
    by_pgbench(r, name, CLAIM_AND_COMPLETE, jobs, clients, bare)
    r.rig.expect("single", available=-jobs, completed_total=jobs)


def by_pgbench(r, name, script, jobs, clients, beside=None):
    each = jobs // clients
    r.measure(name, lambda: r.rig.pgbench(script, clients=clients, each=each), each * clients,
              f"pgbench -c {clients}", beside)


CELLS = [Cell("single", "One job a transaction; 1, 8, 16 and 64 connections.", run)]
