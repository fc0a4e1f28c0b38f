"""awa.check() says so when an invariant does not hold: each is broken by hand, behind its back."""

import pytest

from harness import Database, Server, wait_until

COPY = "INSERT INTO awa.{0}_{2} SELECT * FROM awa.{0}_{1}"


@pytest.fixture(scope="module")
def keeper():
    """A server that keeps its segments, and seals none by itself."""
    server = Server({"awa.completed_retention": "1h", "awa.rotate_interval": "1h"}).init().start()
    yield server
    server.destroy()


@pytest.fixture
def broken(keeper):
    """A database that nobody asks at the end whether it is well."""
    db = Database(keeper)
    yield db
    db.close_sessions()
    db.drop()


def faults(db):
    return {name for name, ok, _ in db.rows("SELECT * FROM awa.check()") if not ok}


def running(db):
    db.insert(3)
    db.claim(max_jobs=2, deadline="1 hour")


def released(db):
    db.insert(1)
    receipt = db.claim(deadline="1 hour")[0].receipt
    db.execute("SELECT awa.fail(%s, 'x', retry_after => interval '30 seconds')", receipt)


def deferred(db):
    db.execute("SELECT awa.insert_job('k', run_at => now() + interval '1 hour')")


def keyed(db):
    db.execute("SELECT awa.insert_job('k', unique_key => 'a')")


def sealed(db):
    """Its only segment is sealed, disposed and counted."""
    db.insert(5)
    db.rows("SELECT * FROM awa.complete_many(%s)", [j.receipt for j in db.claim(max_jobs=5)])
    db.execute("SELECT awa.maintain()")
    wait_until(lambda: db.value("SELECT bool_or(disposed) FROM awa.segments"), 10)


ONE = "every live job is in exactly one place"
ATTEMPTS = "every open attempt is open in memory"
RELEASES = "released jobs have the attempts and times of their closures"
ROWS = "rows of a segment do not contradict each other"
KNOWN = "directories and summaries of segments equal their rows"
COUNTS = "counts of queues equal counts by scan"
TOTALS = "totals of queues have what the segments say they count"
KEYS = "a unique key is held if and only if a job in a masked state exists for it"
TABLES = "no job is in two tables"
RECEIPTS = "a receipt is issued once"

DONE = """
INSERT INTO awa.done_entries
SELECT position, 'failed', now(), NULL, NULL, 'default', 2, 0, now(), now(), 1, 1, kind, args
FROM awa.ready_entries_0 LIMIT 1
"""
BODY_GONE = "DELETE FROM awa.ready_entries_0 WHERE ctid = (SELECT min(ctid) FROM awa.ready_entries_0)"
OTHER_KEY = "INSERT INTO awa.job_unique_claims SELECT 'x', job_id FROM awa.job_unique_claims"

CASES = [
    ("a body is gone", running, BODY_GONE, {ONE}),
    ("a claim is gone", running, "DELETE FROM awa.lease_claim_batches_0", {ATTEMPTS}),
    ("a claim is there twice", running, COPY.format("lease_claim_batches", 0, 0), {ROWS, RECEIPTS}),
    ("receipts are there twice", running, COPY.format("lease_claim_batches", 0, 1), {RECEIPTS}),
    ("receipts of the future", running,
     "UPDATE awa.lease_claim_batches_0 SET claim_id = claim_id + (1::bigint << 40)", {RECEIPTS}),
    ("a receipt is closed twice", released, COPY.format("lease_claim_closures", 0, 0), {ROWS}),
    ("an attempt too many", released, "UPDATE awa.lease_claim_batches_0 SET attempt = 7", {RELEASES}),
    ("a deferred job is gone", deferred, "DELETE FROM awa.deferred_jobs", {COUNTS}),
    ("a key is not held", keyed, "DELETE FROM awa.job_unique_claims", {KEYS}),
    ("a key too many", keyed, OTHER_KEY, {KEYS}),
    ("a live job is done", running, DONE, {TABLES}),
    ("another summary", sealed,
     "UPDATE awa.segments SET summary = jsonb_set(summary, '{bodies}', '7') WHERE disposed", {KNOWN}),
    ("a directory of more jobs", sealed, BODY_GONE, {KNOWN}),
    ("totals are lost", sealed, "UPDATE awa.queues SET completed_total = 0", {TOTALS}),
]


# Nothing tells memory.
NO_TRIGGERS = """
DO $$ DECLARE leaf regclass; BEGIN
    FOR leaf IN SELECT DISTINCT tgrelid FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid
                WHERE relkind = 'r' AND relnamespace = 'awa'::regnamespace AND NOT tgisinternal
    LOOP EXECUTE format('ALTER TABLE %s DISABLE TRIGGER USER', leaf); END LOOP;
END $$
"""


@pytest.mark.parametrize("prepare, harm, expected", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_check_finds(broken, prepare, harm, expected):
    db = broken
    prepare(db)
    assert faults(db) == set()
    db.execute(NO_TRIGGERS)
    db.execute(harm)
    assert expected <= faults(db), db.rows("SELECT * FROM awa.check()")
