"""Everything at once: enqueue, claim, complete, fail and retry."""

import json

from harness import wait_until

from .. import acts
from .cell import Cell

CLIENTS = 16
# A tenth of the attempts fails and comes back a second later; a second claim every
# so often works those off, so that the backlog stays where it is.
ATTEMPT = """
SELECT max(receipt) AS receipt, count(*) AS jobs FROM awa.claim('mixed') \\gset
\\set dice random(1, 10)
\\if :jobs
\\if :dice = 1
SELECT awa.fail(:receipt, 'one in ten', '1 s');
\\else
SELECT awa.complete(:receipt);
\\endif
\\endif
"""
SCRIPT = (
    f"SELECT awa.insert_job('k', '{json.dumps(acts.ARGS)}', 'mixed');\n{ATTEMPT}"
    f"\\set again random(1, 8)\n\\if :again = 1\n{ATTEMPT}\\endif\n"
)


def run(r):
    bare = f"INSERT into a bare table, {CLIENTS} clients"
    client = f"pgbench -c {CLIENTS}"
    r.alternate(
        lambda: r.measure(
            bare, lambda: load(r, acts.BARE_INSERT, r.seconds(0.1)), client=client),
        lambda: r.measure(
            "enqueue, claim, complete or fail (1 in 10)", lambda: mixed(r), client=client,
            beside=bare),
    )


def mixed(r):
    known = r.rig.counts("mixed")
    parts = 5 if r.seconds() >= 60 else 1
    enqueued, left = 0, []
    for part in range(parts):
        enqueued += load(r, SCRIPT, r.seconds() / parts)
        now = r.rig.counts("mixed")
        left.append(now["available"] + now["retryable"])
        r.say(f"part {part + 1} of {parts}: {enqueued:,} enqueued, {left[-1]:,} wait")
    finish(r)
    r.rig.expect("mixed", completed_total=enqueued)
    done = r.rig.counts("mixed")["completed_total"] - known["completed_total"]
    r.note("jobs that wait at the end of a part", {"last": left[-1], "most": max(left)})
    return done


def load(r, script, seconds):
    return r.rig.pgbench(script, clients=CLIENTS, seconds=seconds)["transactions"]


def finish(r):
    """Completes what failed last, once it is due again."""

    def empty():
        acts.drain(r.rig.conn, "mixed", 500)
        counts = r.rig.counts("mixed")
        return counts["available"] + counts["retryable"] + counts["running"] == 0

    wait_until(empty, 30, what=lambda: f"an empty queue: {r.rig.counts('mixed')}")


CELLS = [
    Cell("mixed", "16 connections enqueue, claim and close; one attempt in ten fails and is"
         " retried a second later.", run, minutes=5, rounds=1),
]
