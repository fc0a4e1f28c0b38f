"""Priorities, and what waiting makes of them."""

import threading

import pytest

from harness import connect, wait_until

OLD = "clock_timestamp() - interval '1 hour'"


def insert(db, priority, run_at="NULL", queue="default"):
    return db.value(
        f"SELECT awa.insert_job('k', queue => %s, priority => %s, run_at => {run_at})", queue, priority
    )


def ageing(db, step, queue="default"):
    db.execute(
        "SELECT awa.configure_queue(%s, jsonb_build_object('priority_aging', %s::text))", queue, step
    )


def aged_claims(db):
    return db.value("SELECT value FROM awa.metrics WHERE name = 'awa_dispatch_aged_claims_total'")


def order(db, count):
    return [job.job_id for _ in range(count) for job in db.claim()]


def test_urgent_jobs_come_first_and_equals_in_their_order(db):
    ids = {priority: [insert(db, priority) for _ in range(2)] for priority in (4, 2, 1, 3)}
    assert order(db, 8) == ids[1] + ids[2] + ids[3] + ids[4]
    assert aged_claims(db) == 0


def test_a_job_that_waited_goes_before_fresh_ones(db):
    old = insert(db, 4, OLD)
    fresh = insert(db, 1)
    job, = db.claim()
    # The priority of the job stays what it was.
    assert (job.job_id, job.priority) == (old, 4)
    assert db.job(old).priority == 4
    assert order(db, 1) == [fresh]
    assert aged_claims(db) == 1


def test_a_level_a_minute(db):
    just = insert(db, 3, "clock_timestamp() - interval '61 s'")  # 2 by now
    insert(db, 2)
    long = insert(db, 4, "clock_timestamp() - interval '200 s'")  # 1
    assert order(db, 2) == [long, just]


def test_both_priorities_are_visible(db):
    old, fresh = insert(db, 4, "clock_timestamp() - interval '125 s'"), insert(db, 4, queue="other")
    for queue, job_id, claimed in [("default", old, 2), ("other", fresh, 4)]:
        job, = db.claim(queue)
        open_attempt, = db.value("SELECT awa.dump_job(%s) -> 'attempts'", job_id)
        assert (open_attempt["priority"], open_attempt["closed_at"]) == (claimed, None)
        db.execute("SELECT awa.complete(%s)", job.receipt)
        dump = db.value("SELECT awa.dump_job(%s)", job_id)
        assert dump["priority"] == 4
        assert [a["priority"] for a in dump["attempts"]] == [claimed]


def test_one_claim_takes_jobs_of_several_ages(db):
    old = insert(db, 4, OLD)
    db.execute("SELECT count(*) FROM awa.insert_jobs((SELECT jsonb_agg("
               "jsonb_build_object('kind', 'k', 'priority', 4)) FROM generate_series(1, 2000)))")
    urgent = insert(db, 1)
    jobs = db.claim(max_jobs=2002)
    assert len(jobs) == 2002
    ids = [job.job_id for job in jobs]
    # The whole lane is not as old as its head.
    assert ids[0] == old
    assert ids.index(urgent) < 1100
    told = {
        job_id: db.value("SELECT awa.dump_job(%s) -> 'attempts' -> 0 ->> 'priority'", job_id)
        for job_id in (old, urgent, ids[-1])
    }
    assert told == {old: "1", urgent: "1", ids[-1]: "4"}


def test_without_ageing_the_urgent_stay_first(db):
    ageing(db, "0")
    old, fresh = insert(db, 4, OLD), insert(db, 1)
    assert order(db, 2) == [fresh, old]
    assert aged_claims(db) == 0


@pytest.mark.parametrize("run_at", [
    "'-infinity'", "'4713-01-01 BC'", "'1970-01-01'", "clock_timestamp() - interval '200 years'",
    "clock_timestamp()",
])
@pytest.mark.parametrize("step", ["1 us", "1 s", "60 s", "100 years"])
def test_any_age_can_be_claimed(db, run_at, step):
    ageing(db, step)
    ids = {insert(db, priority, run_at) for priority in (1, 2, 3, 4)}
    # The driver knows no years BC.
    claimed = "SELECT job_id FROM awa.claim('default', 4)"
    assert set(db.column(claimed)) == ids


def test_infinity_never_comes(db):
    job_id = insert(db, 1, "'infinity'")
    assert db.claim() == []
    assert db.state(job_id) == "scheduled"
    assert db.value("SELECT awa.cancel_job(%s)", job_id) == "cancelled"


def test_the_age_outlives_a_restart(own_db, own_server):
    old = insert(own_db, 4, OLD)
    insert(own_db, 1)
    own_server.restart()
    own_db.close_sessions()
    jobs = wait_until(own_db.claim, 10)
    assert jobs[0].job_id == old


def test_bulk_jobs_finish_under_a_flow_of_urgent_ones(db):
    ageing(db, "50 ms")
    bulk = {insert(db, 4) for _ in range(300)}
    stop = threading.Event()
    # More urgent jobs than the workers below can take are always there.
    insert_urgent = (
        "SELECT count(*) FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object("
        "'kind', 'k', 'priority', 1)) FROM generate_series(1, 200)))"
    )
    depth = "SELECT available FROM awa.queue_stats WHERE queue = 'default'"
    db.execute(insert_urgent)

    def produce():
        with connect(db.conninfo()) as conn:
            while not stop.is_set():
                if conn.value(depth) < 1000:
                    conn.execute(insert_urgent)

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        def finished():
            for job in db.claim(max_jobs=10):
                db.execute("SELECT awa.complete(%s)", job.receipt)
                bulk.discard(job.job_id)
            return not bulk

        wait_until(finished, 60, what="the bulk jobs to finish")
        assert db.value(depth) > 0
    finally:
        stop.set()
        producer.join()
    assert aged_claims(db) > 0
