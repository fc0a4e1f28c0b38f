"""Owners: however one ends, its attempts are others' at once; who only seems dead is fenced."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

import pytest
from harness import Background, claim, kill_backend, raises, wait_in, wait_until

PEER = """
import json, sys, time
import psycopg
conn = psycopg.connect(sys.argv[1], autocommit=True)
def say(value):
    print(json.dumps(value), flush=True)
def code(query, *arguments):
    try:
        conn.execute(query, arguments)
        return None
    except psycopg.Error as error:
        return error.sqlstate
"""
# Claims, begins to close, and is heard of no more.
VICTIM = PEER + """
runtime = conn.execute("SELECT awa.register_runtime('victim')").fetchone()[0]
rows = conn.execute("SELECT receipt FROM awa.claim('default', 3, %s)", (runtime,)).fetchall()
if sys.argv[2] == 'open':
    conn.execute("BEGIN")
    conn.execute("SELECT awa.complete(%s)", rows[0])
    conn.execute("SELECT awa.fail(%s, 'x')", rows[1])
    conn.execute("SELECT * FROM awa.claim('default', 1, %s)", (runtime,))
if sys.argv[3]:
    conn.execute(sys.argv[3])
say([conn.info.backend_pid, [row[0] for row in rows]])
time.sleep(600)
"""
# Beats as long as it runs, then says what its receipt is worth.
BEATING = PEER + """
runtime = conn.execute("SELECT awa.register_runtime('w', 'heartbeat', '1 s')").fetchone()[0]
receipt = conn.execute(
    "SELECT receipt FROM awa.claim('default', 1, %s, '1 h')", (runtime,)).fetchone()[0]
say(receipt)
while (state := code("SELECT awa.heartbeat(%s)", runtime)) is None:
    time.sleep(0.1)
say([state, code("SELECT awa.complete(%s)", receipt),
     code("SELECT * FROM awa.claim('default', 1, %s)", runtime)])
"""
IDLE = {"open": "SET idle_in_transaction_session_timeout = '300ms'",
        "closed": "SET idle_session_timeout = '300ms'"}


class Peer:
    def __init__(self, script, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def read(self):
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait()}"
        return json.loads(line)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def peer():
    made = []

    def make(*arguments):
        made.append(Peer(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.end()


def soon_again(db, ids):
    """Within a second the attempts of the session are nobody's."""
    start = time.monotonic()
    wait_until(lambda: all(db.state(job) == "retryable" for job in ids), 10,
               what=lambda: f"all retryable: {[db.state(job) for job in ids]}")
    assert time.monotonic() - start < 3
    assert [db.job(job).attempt for job in ids] == [1] * len(ids)


@pytest.mark.parametrize("transaction", ["closed", "open"])
@pytest.mark.parametrize("how", ["pg_terminate_backend", "client killed", "network", "FATAL"])
def test_whatever_ends_the_backend(db, peer, how, transaction):
    """Also from inside a transaction with half of it closed: that never was."""
    ids = db.insert(4)
    if how == "network":
        conn = db.connect(host="127.0.0.1")
        runtime = conn.value("SELECT awa.register_runtime('victim')")
        receipts = [job.receipt for job in claim(conn, max_jobs=3, runtime=runtime)]
        if transaction == "open":
            conn.begin()
            conn.execute("SELECT awa.complete(%s)", (receipts[0],))
            conn.execute("SELECT awa.fail(%s, 'x')", (receipts[1],))
            claim(conn, runtime=runtime)
        # The thread of libpq keeps its socket, whose number would be another one's.
        with socket.socket(fileno=os.dup(conn.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)
    else:
        last = IDLE[transaction] if how == "FATAL" else ""
        victim = peer(VICTIM, db.conninfo(), transaction, last)
        pid, receipts = victim.read()
        if how == "pg_terminate_backend":
            db.value("SELECT pg_terminate_backend(%s)", pid)
        elif how == "client killed":
            victim.process.kill()
    soon_again(db, ids[:3])
    # The claim that did not commit used no attempt.
    assert (db.state(ids[3]), db.job(ids[3]).attempt) == ("available", 0)
    for receipt in receipts:
        with raises("AW001"):
            db.execute("SELECT awa.complete(%s)", receipt)


@pytest.mark.parametrize("kind", ["claim", "wait_for_jobs"])
def test_a_client_that_vanishes_in_a_wait_of_ours(db, kind):
    """Noticed within a second or so, where the server would not look at the socket."""
    conn = db.connect(host="127.0.0.1")
    conn.execute("SET awa.claim_wait_max = '1 h'")
    runtime = conn.value("SELECT awa.register_runtime()")
    job_id, = db.insert()
    claim(conn, runtime=runtime, deadline="0")
    call = (Background(conn.value, "CALL awa.wait_for_jobs('{default}', '1 h')")
            if kind == "wait_for_jobs" else
            Background(claim, conn, runtime=runtime, wait="1 h"))
    wait_in(db.conn, conn.pid, kind)
    with socket.socket(fileno=os.dup(conn.pgconn.socket)) as wire:
        wire.shutdown(socket.SHUT_RDWR)
    soon_again(db, [job_id])
    assert call.wait(10)


def test_from_the_close_of_a_session_to_the_claim_of_its_job(db):
    """With 10,000 attempts open elsewhere. The bench has the figures; here it is a bound."""
    db.execute("""SELECT awa.configure_queue('default', '{"backoff": {"base": "0 s"}}')""")
    db.insert(10_000, queue="busy")
    busy = db.connect()
    runtime = busy.value("SELECT awa.register_runtime('busy')")
    assert len(claim(busy, "busy", 10_000, runtime=runtime, deadline="0")) == 10_000
    heir, took = db.connect(), []
    for _ in range(20):
        conn = db.connect()
        runtime = conn.value("SELECT awa.register_runtime()")
        db.insert()
        held, = claim(conn, runtime=runtime)
        start = time.monotonic()
        conn.close()
        job, = wait_until(lambda: claim(heir, wait="2 s"), 10)
        took.append(time.monotonic() - start)
        assert job.job_id == held.job_id
        heir.execute("SELECT awa.complete(%s)", (job.receipt,))
    assert statistics.median(took) < 1, took
    assert db.value("SELECT running FROM awa.queue_stats WHERE queue = 'busy'") == 10_000


BEAT_SECONDS = float(os.environ.get("AWA_BEAT_SECONDS", "3"))


@pytest.mark.timeout(BEAT_SECONDS + 180)
def test_who_beats_is_never_rescued(db):
    """Beside a staleness of a second, for AWA_BEAT_SECONDS."""
    until = time.monotonic() + BEAT_SECONDS
    runtime = db.value("SELECT awa.register_runtime('w', 'heartbeat', '1 s')")
    db.insert(2)
    jobs = db.claim(max_jobs=2, runtime=runtime, deadline="0")
    while time.monotonic() < until:
        assert db.rows("SELECT * FROM awa.heartbeat(%s)", runtime) == []
        db.rows("SELECT * FROM awa.rescue()")
        time.sleep(0.2)  # the pace of a worker
    assert [db.job(job.job_id).state for job in jobs] == ["running", "running"]
    for job in jobs:
        db.execute("SELECT awa.complete(%s)", job.receipt)


def test_a_frozen_worker_is_rescued_and_fenced_when_it_wakes(db, peer):
    job_id, = db.insert()
    frozen = peer(BEATING, db.conninfo())
    receipt = frozen.read()
    frozen.process.send_signal(signal.SIGSTOP)
    db.wait_state(job_id, "retryable")
    heir, = wait_until(db.claim, 10)
    assert heir.job_id == job_id and heir.receipt != receipt
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.read() == ["AW002", "AW001", "AW002"]
    # What its heir does is not disturbed.
    db.execute("SELECT awa.complete(%s)", heir.receipt)
    assert db.state(job_id) == "completed"


def drain(conn, count=50):
    """Takes batches and notes each job beside its completion, until the server goes away."""
    receipts = []
    while True:
        conn.begin()
        jobs = conn.rows(
            "SELECT receipt, job_id FROM awa.complete_and_claim(%s::bigint[], 'drain', %s)",
            receipts, count)
        receipts = [receipt for receipt, _ in jobs]
        conn.execute("INSERT INTO done SELECT unnest(%s::bigint[])", ([job for _, job in jobs],))
        conn.commit_sql()
        if not jobs:
            return


def test_an_immediate_restart_in_the_middle_of_a_drain(own_db):
    """Each job is done in the end; the work of an attempt that was lost is done again."""
    db = own_db
    db.execute("CREATE TABLE done (job bigint)")
    ids = db.insert(5000, queue="drain")
    for _ in range(2):
        calls = [Background(drain, db.connect()) for _ in range(3)]
        before = db.value("SELECT count(*) FROM done")
        wait_until(lambda before=before: db.value("SELECT count(*) FROM done") > before + 500)
        db.server.restart("immediate")
        assert all(call.wait(20) for call in calls)
        db.wait_served()
        db.check()
        left = db.row("SELECT available + running + retryable, completed_total"
                      " FROM awa.queue_stats WHERE queue = 'drain'")
        assert sum(left) == 5000
        # Leases of those that were running are given back by hand: nobody has them.
        running = db.column("SELECT run_lease FROM awa.jobs WHERE state = 'running'")
        db.execute("SELECT awa.release(%s)", running)
    drain(db.connect(), 500)
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'drain'") == 5000
    assert set(db.column("SELECT DISTINCT job FROM done")) == set(ids)


def beating(db):
    """An attempt of a heartbeat runtime whose period is short, and its last beat."""
    runtime = db.value("SELECT awa.register_runtime('w', 'heartbeat', '3 s')")
    job_id, = db.insert()
    db.claim(runtime=runtime, deadline="0")
    db.execute("CREATE TABLE flushed ()")
    return runtime, job_id


def full_period(db, runtime, job_id, served):
    """It was heard last when memory was there again, and is dead a period later."""
    seen = db.value("SELECT last_seen_at FROM awa.runtime_instances WHERE instance_id = %s", runtime)
    assert seen >= served
    db.wait_state(job_id, "retryable", 15)
    assert db.value("SELECT clock_timestamp() - %s >= interval '3 s'", seen)


def test_a_crash_gives_heartbeat_owners_a_full_period(own_db):
    db = own_db
    runtime, job_id = beating(db)
    db.server.stop("immediate")
    # Longer than the period: nobody can have heard it meanwhile.
    down = time.monotonic() + 3.5
    wait_until(lambda: time.monotonic() > down)
    db.server.start()
    up = db.value("SELECT pg_postmaster_start_time()")
    db.wait_served()
    assert db.state(job_id) == "running"
    full_period(db, runtime, job_id, up)


def test_a_promotion_gives_heartbeat_owners_a_full_period(own_db):
    db = own_db
    runtime, job_id = beating(db)
    standby = db.server.make_standby().start()
    try:
        with standby.connect(db.name) as conn:
            wait_until(lambda: conn.value("SELECT count(*) FROM awa.jobs") == 1)
            promoted = conn.value("SELECT clock_timestamp()")
        db.close_sessions()
        db.server.stop("immediate")
        standby.promote()
        old, db.server = db.server, standby
        db.wait_served()
        assert db.state(job_id) == "running"
        full_period(db, runtime, job_id, promoted)
        db.check()
        db.close_sessions()
        db.server = old
    finally:
        standby.destroy()


def test_a_claim_without_a_runtime_survives_its_connection(db):
    conn = db.connect()
    job_id, = db.insert()
    job, = claim(conn)
    kill_backend(conn.pid, signal.SIGTERM)
    db.rows("SELECT * FROM awa.rescue()")
    assert db.state(job_id) == "running"
    db.execute("SELECT awa.complete(%s)", job.receipt)
