"""awa.rebuild() under open transactions: nothing is lost, doubled or forgotten."""

import random
import signal
import threading
import time

import psycopg
import pytest
from harness import Background, claim, kill_backend, raises, wait_until


def rebuild(db):
    with db.server.connect(db.name) as conn:
        conn.execute("SELECT awa.rebuild()")


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
def test_an_uncommitted_claim_survives_a_rebuild(db, how):
    ids = db.insert(5)
    conn = db.connect()
    conn.begin()
    claimed = db.claim(max_jobs=3, conn=conn, deadline="1 hour")
    rebuild(db)
    assert [j.job_id for j in db.claim(max_jobs=10, deadline="1 hour")] == ids[3:]
    conn.execute(how)
    if how == "ROLLBACK":
        again = db.claim(max_jobs=10)
        assert [(j.job_id, j.attempt) for j in again] == [(i, 1) for i in ids[:3]]
        with raises("AW001"):
            db.execute("SELECT awa.complete(%s)", claimed[0].receipt)
    else:
        assert not db.claim(max_jobs=10)
        for job in claimed:
            db.execute("SELECT awa.complete(%s)", job.receipt)
        assert db.count(state="completed") == 3


def test_a_rescue_leaves_an_uncommitted_claim_alone_after_a_rebuild(db):
    db.insert()
    conn = db.connect()
    conn.begin()
    db.claim(conn=conn, deadline="1 ms")
    rebuild(db)
    db.execute("SELECT awa.maintain()")
    conn.rollback_sql()
    assert [j.attempt for j in db.claim()] == [1]


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("act", ["complete", "retry", "defer", "fail", "release"])
def test_savepoints_that_claim_and_close_survive_a_rebuild(db, act, end):
    acts = {
        "complete": "SELECT awa.complete(%s)",
        "retry": "SELECT awa.fail(%s, 'x', retry_after => '0')",
        "defer": "SELECT awa.fail(%s, 'x', retry_after => '1 hour')",
        "fail": "SELECT awa.fail(%s, 'x', terminal => true)",
        "release": "SELECT awa.release(ARRAY[%s])",
    }
    db.insert(4)
    before = db.claim()[0]
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT a")
    first = db.claim(conn=conn)[0]
    conn.execute("SAVEPOINT b")
    conn.execute(acts[act], (first.receipt,))
    conn.execute(acts[act], (before.receipt,))
    conn.execute("SAVEPOINT c")
    second = db.claim(conn=conn)[0]
    conn.execute(acts[act], (second.receipt,))
    rebuild(db)
    with raises("AW001"), conn.transaction():
        conn.execute(acts[act], (second.receipt,))
        if act == "release":
            raise_stale(conn, second.receipt)
    conn.execute("ROLLBACK TO c")
    conn.execute("RELEASE b")
    conn.execute(end)
    db.check()
    left = db.claim(max_jobs=10)
    expected = {"COMMIT": {"complete": 2, "retry": 4, "defer": 2, "fail": 2, "release": 4},
                "ROLLBACK": dict.fromkeys(acts, 3)}[end][act]
    if act == "retry" and end == "COMMIT":
        wait_until(lambda: left.extend(db.claim(max_jobs=10)) or len(left) == 4)
    assert len(left) == expected


def raise_stale(conn, receipt):
    conn.execute("SELECT awa.complete(%s)", (receipt,))


def test_a_savepoint_rolled_back_after_a_rebuild_gives_the_attempt_back_at_once(db):
    db.insert(2)
    first = db.claim(max_jobs=2)
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT a")
    conn.execute("SELECT * FROM awa.complete_many(%s)", ([j.receipt for j in first],))
    rebuild(db)
    conn.execute("ROLLBACK TO a")
    conn.execute("SELECT awa.complete(%s)", (first[0].receipt,))
    conn.commit_sql()
    db.execute("SELECT awa.complete(%s)", first[1].receipt)


def test_a_closer_waits_for_an_attempt_that_a_savepoint_closed_before_a_rebuild(db):
    db.insert()
    job = db.claim()[0]
    conn = db.connect()
    conn.begin()
    conn.execute("SAVEPOINT a")
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    rebuild(db)
    with raises("AW001"), conn.transaction():
        conn.execute("SET LOCAL statement_timeout = '5s'")
        conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    other = db.connect()
    waiting = Background(other.execute, "SELECT awa.complete(%s)", (job.receipt,))
    time.sleep(0.1)
    assert not waiting.done
    conn.rollback_sql()
    waiting.result()


def test_a_dead_owner_is_noticed_at_a_commit_after_a_rebuild(db):
    db.insert()
    owner = db.connect()
    runtime = owner.value("SELECT awa.register_runtime()")
    conn = db.connect()
    conn.begin()
    db.claim(conn=conn, runtime=runtime)
    rebuild(db)
    kill_backend(owner.pid, signal.SIGTERM)
    with raises("AW002"):
        conn.commit_sql()
    assert [j.attempt for j in db.claim()] == [1]


def test_a_producer_with_a_huge_transaction_does_not_keep_a_rebuild_from_ending(db):
    conn = db.connect()
    conn.begin()
    conn.execute(
        "SELECT count(awa.insert_job('k', run_at => CASE WHEN n > 20000"
        " THEN now() + interval '1 hour' END)) FROM generate_series(1, 40000) n"
    )
    rebuild(db)
    conn.commit_sql()
    db.check()
    assert len(db.claim(max_jobs=10_000)) + len(db.claim(max_jobs=10_000)) == 20_000
    assert db.row("SELECT scheduled, running FROM awa.queue_stats WHERE queue = 'default'") == (
        20_000, 20_000)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("forget", ["rebuild", "restart", "crash"])
def test_a_prepared_transaction_with_many_acts(own_db, forget, end):
    db, count = own_db, 9000
    db.execute("SELECT count(*) FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object("
               "'kind', 'k')) FROM generate_series(1, %s)))", 2 * count)
    released = [j.receipt for j in db.claim(max_jobs=count)]
    failed = [j.receipt for j in db.claim(max_jobs=9)]
    conn = db.connect()
    conn.begin()
    conn.execute("SELECT awa.release(%s)", (released,))
    for receipt in failed[:3]:
        conn.execute("SELECT awa.fail(%s, 'x', retry_after => '1 hour')", (receipt,))
    for receipt in failed[3:6]:
        conn.execute("SELECT awa.fail(%s, 'x', terminal => true)", (receipt,))
    for receipt in failed[6:]:
        conn.execute("SELECT awa.complete(%s)", (receipt,))
    conn.execute("SELECT count(*) FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object("
                 "'kind', 'k', 'queue', 'new')) FROM generate_series(1, 30000)))")
    conn.execute("SELECT awa.pause_queue('new2')")
    conn.execute("SELECT awa.insert_job('k', queue => 'new2')")
    conn.execute("PREPARE TRANSACTION 'many'")
    if forget == "rebuild":
        rebuild(db)
        rebuild(db)
    else:
        db.server.restart("fast" if forget == "restart" else "immediate")
        db.wait_served()
    db.check()
    db.claim("new2")
    db.execute(f"{end} PREPARED 'many'")
    wait_until(lambda: db.value("SELECT bool_and(ok) FROM awa.check()"), what=lambda: db.rows("SELECT * FROM awa.check()"))
    db.check()
    done = end == "COMMIT"
    stats = db.row("SELECT available, running, retryable, completed_total, failed_total"
                   " FROM awa.queue_stats WHERE queue = 'default'")
    rest = count - 9
    assert stats == ((rest + count, 0, 3, 3, 3) if done else (rest, count + 9, 0, 0, 0))
    assert not db.claim("new2"), "it is paused"
    assert (db.count("new2") == 1) == done
    assert len(db.claim("new", max_jobs=10_000)) == (10_000 if done else 0)


def test_rebuilds_under_load(db):
    """Producers never see AW003, claimers at most that, and every job is done once."""
    stop = threading.Event()
    made, done, errors = set(), [], []

    def run(body):
        def loop():
            dice = random.Random(body.__name__ + str(threading.get_ident()))
            try:
                with db.server.connect(db.name) as conn:
                    while not stop.is_set():
                        body(conn, dice)
            except Exception as error:
                errors.append(error)
        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def produce(conn, dice):
        keep = dice.random() < 0.7
        ids = []
        conn.begin()
        for _ in range(dice.randint(1, 3)):
            conn.execute("SAVEPOINT s")
            new = conn.column(
                "SELECT job_id FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object("
                "'kind', 'k', 'queue', 'q' || n %% 3, 'run_at', CASE WHEN n %% 10 = 0 THEN"
                " clock_timestamp() + interval '50 ms' END)) FROM generate_series(1, %s) n))",
                dice.choice((1, 5, 40, 1500)))
            if dice.random() < 0.3:
                conn.execute("ROLLBACK TO s")
            else:
                ids += new
            time.sleep(dice.choice((0, 0, 0.01)))
        conn.execute("COMMIT" if keep else "ROLLBACK")
        if keep:
            made.update(ids)
        if len(made) > 60_000:
            time.sleep(0.05)

    def work(conn, dice):
        try:
            conn.begin()
            jobs = [j for q in ("q0", "q1", "q2") for j in claim(conn, q, dice.choice((1, 10, 500)), deadline="1 hour")]
            how = dice.random()
            if how < 0.2:
                conn.rollback_sql()
                return
            if how < 0.6:
                conn.commit_sql()
                conn.begin()
            receipts = [j.receipt for j in jobs]
            if dice.random() < 0.4:
                conn.execute("SAVEPOINT s")
                conn.execute("SELECT awa.release(%s)", (receipts,))
                conn.execute("ROLLBACK TO s")
            back = receipts[: len(receipts) // 4]
            conn.execute("SELECT awa.release(%s)", (back,))
            for receipt in receipts[len(receipts) // 4:][:3]:
                conn.execute("SELECT awa.fail(%s, 'x', retry_after => '10 ms')", (receipt,))
            rest = receipts[len(receipts) // 4:][3:]
            ok = [r for r, fine in conn.rows("SELECT * FROM awa.complete_many(%s)", rest) if fine]
            time.sleep(dice.choice((0, 0, 0.01)))
            if dice.random() < 0.2:
                conn.rollback_sql()
                retry_release(conn, receipts if how < 0.6 and how >= 0.2 else [])
                return
            conn.commit_sql()
            done.extend(j.job_id for j in jobs if j.receipt in set(ok))
        except psycopg.Error as error:
            conn.rollback_sql()
            if error.sqlstate != "AW003":
                raise
            if "receipts" in locals() or "jobs" in locals():
                retry_release(conn, [j.receipt for j in jobs])

    def retry_release(conn, receipts):
        while receipts:
            try:
                conn.execute("SELECT awa.release(%s)", (receipts,))
                return
            except psycopg.Error as error:
                if error.sqlstate != "AW003":
                    raise

    threads = [run(produce) for _ in range(4)] + [run(work) for _ in range(4)]
    end = time.monotonic() + 12
    rebuilds = 0
    try:
        while time.monotonic() < end and not errors:
            rebuild(db)
            rebuilds += 1
            time.sleep(0.2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    if errors:
        raise errors[0]
    assert rebuilds > 5
    db.check()

    def drain():
        jobs = [j for q in ("q0", "q1", "q2") for j in db.claim(q, 10_000)]
        db.rows("SELECT * FROM awa.complete_many(%s)", [j.receipt for j in jobs])
        done.extend(j.job_id for j in jobs)
        return len(set(done)) >= len(made) and not jobs

    wait_until(drain, 30, what=lambda: f"{len(set(done))} of {len(made)} jobs done")
    assert len(done) == len(set(done)), "a job was done twice"
    assert set(done) == made
