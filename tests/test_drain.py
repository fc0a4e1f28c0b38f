"""drain_queue: what waits is cancelled, what runs goes on."""

from harness import Background, raises, wait_blocked, wait_until


def drain(db, queue="default", conn=None):
    return (conn or db.conn).value("SELECT awa.drain_queue(%s)", queue)


def states(db, ids):
    return [db.state(job_id) for job_id in ids]


def test_all_that_waits(db):
    ready = db.insert(5)
    later = db.insert(2, run_at="2100-01-01")
    short, long, nap, sleep, running = db.insert(5, priority=1)
    jobs = {job.job_id: job.receipt for job in db.claim(max_jobs=5)}
    assert set(jobs) == {short, long, nap, sleep, running}
    db.execute("SELECT awa.fail(%s, 'broken', retry_after => '30 s')", jobs[short])
    db.execute("SELECT awa.fail(%s, 'broken', retry_after => '1 h')", jobs[long])
    db.execute("SELECT awa.snooze(%s, '30 s')", jobs[nap])
    db.execute("SELECT awa.snooze(%s, '1 h')", jobs[sleep])
    other, = db.insert(queue="other")
    assert drain(db) == 11
    waited = [*ready, *later, short, long, nap, sleep]
    assert set(states(db, waited)) == {"cancelled"}
    assert "drained" in str(db.job(ready[0]).errors)
    assert "broken" in str(db.job(short).errors) and "broken" in str(db.job(long).errors)
    assert db.state(running) == "running" and db.state(other) == "available"
    assert db.row(
        "SELECT scheduled, available, running, retryable, cancelled_total FROM awa.queue_stats"
        " WHERE queue = 'default'"
    ) == (0, 0, 1, 0, 11)
    assert drain(db) == 0
    db.execute("SELECT awa.complete(%s)", jobs[running])
    # A drained queue takes jobs as before.
    again, = db.insert()
    assert [job.job_id for job in db.claim(max_jobs=9)] == [again]


def test_a_job_that_snoozes_for_ever(db):
    job_id, = db.insert()
    for _ in range(5):
        wait_until(lambda: db.state(job_id) == "available", what="the job available")
        db.execute("SELECT awa.snooze(%s, '0')", db.claim()[0].receipt)
    assert drain(db) == 1 and db.state(job_id) == "cancelled"


def test_keys_and_dead_letters(db):
    db.execute("SELECT awa.configure_queue('default', '{\"dlq_enabled\": true}')")
    dead, = db.insert()
    db.execute("SELECT awa.fail(%s, 'x', terminal => true)", db.claim()[0].receipt)
    keyed, = db.insert(unique_key="a")
    assert drain(db) == 1
    assert db.column("SELECT job_id FROM awa.dlq") == [dead]
    assert db.insert(unique_key="a") != [keyed]


def test_parked_jobs(db):
    parked, resumed = db.insert(2)
    jobs = {job.job_id: job.receipt for job in db.claim(max_jobs=2, deadline="1 h")}
    tokens = {}
    for job_id, receipt in jobs.items():
        tokens[job_id] = db.value("SELECT awa.register_callback(%s, '1 h')", receipt)
        db.execute("SELECT awa.wait_for_callback(%s)", receipt)
    db.execute("SELECT awa.resume_external(%s)", tokens[resumed])
    assert drain(db) == 1
    assert states(db, [parked, resumed]) == ["cancelled", "running"]
    assert "drained" in str(db.job(parked).errors)
    with raises("P0002"):
        db.execute("SELECT awa.complete_external(%s)", tokens[parked])
    assert db.row(
        "SELECT running, waiting_external, cancelled_total FROM awa.queue_stats"
        " WHERE queue = 'default'"
    ) == (1, 0, 1)
    db.execute("SELECT awa.complete(%s)", jobs[resumed])


def test_a_job_that_is_resumed_meanwhile(db):
    job_id, = db.insert()
    job, = db.claim(deadline="1 h")
    token = db.value("SELECT awa.register_callback(%s, '1 h')", job.receipt)
    db.execute("SELECT awa.wait_for_callback(%s)", job.receipt)
    conn, other = db.connect(), db.connect()
    conn.begin()
    conn.execute("SELECT awa.resume_external(%s)", (token,))
    draining = Background(drain, db, conn=other)
    wait_blocked(db.conn, other.info.backend_pid)
    conn.commit_sql()
    assert draining.result() == 0 and db.state(job_id) == "running"
    db.execute("SELECT awa.complete(%s)", job.receipt)


def test_a_drain_that_rolls_back(db):
    ids = db.insert(3) + db.insert(1, run_at="2100-01-01")
    conn = db.connect()
    conn.begin()
    assert drain(db, conn=conn) == 4
    conn.rollback_sql()
    assert states(db, ids) == ["available"] * 3 + ["scheduled"]
    assert len(db.claim(max_jobs=9)) == 3


def test_claims_and_a_drain_share_the_jobs(db):
    ids = db.insert(200)
    worker = db.connect()
    other = Background(
        lambda: [job.job_id for _ in range(40) for job in db.claim(max_jobs=5, conn=worker)]
    )
    drained = drain(db)
    claimed = other.result()
    assert drained + len(set(claimed)) == 200 and len(claimed) == len(set(claimed))
    assert db.count(state="cancelled") == drained


def test_refuses(db):
    with raises("P0002"):
        drain(db, "nobody")
    with raises("22023"):
        drain(db, None)
    db.execute("SELECT awa.prepare_queue('empty')")
    assert drain(db, "empty") == 0


def test_survives_a_crash(own_db):
    ids = own_db.insert(3)
    assert drain(own_db) == 3
    own_db.close_sessions()
    own_db.server.crash()
    own_db.wait_served()
    assert set(states(own_db, ids)) == {"cancelled"} and own_db.claim(max_jobs=9) == []
