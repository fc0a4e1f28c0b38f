"""Lost attempts: passes, their limits, bad rows, recovery once an epoch."""

import pytest

from harness import Background, raises, wait_until


def hold(db, count, queue="default", max_attempts=None):
    """A runtime of a session of its own that has claimed `count` new jobs."""
    columns = {"max_attempts": max_attempts} if max_attempts else {}
    ids = db.insert(count, queue=queue, **columns)
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime('w')")
    receipts = []
    while len(receipts) < count:
        receipts += conn.column(
            "SELECT receipt FROM awa.claim(%s, 1000, runtime => %s, deadline => '0')", queue, runtime
        )
    return conn, ids, receipts


def sizes(db, kind):
    """(pass_end, passes, attempts) of the passes there were."""
    return db.rows("""
        SELECT labels->>'pass_end', sum(value) FILTER (WHERE name LIKE '%%_count')::int,
               sum(value) FILTER (WHERE name LIKE '%%_sum')::int
        FROM awa.metrics WHERE name LIKE 'awa_maintenance_rescue_pass_size%%'
        AND labels->>'kind' = %s GROUP BY 1
        HAVING sum(value) FILTER (WHERE name LIKE '%%_count') > 0 ORDER BY 1
    """, kind)


def wait_sizes(db, kind, expected):
    """A pass is counted a moment after its last commit."""
    wait_until(lambda: sizes(db, kind) == expected, what=lambda: f"passes {sizes(db, kind)}")


def test_a_backlog_is_drained_in_one_pass(db):
    conn, ids, _ = hold(db, 3000)
    conn.close()
    wait_until(lambda: db.value("SELECT running FROM awa.queue_stats") == 0)
    wait_sizes(db, "owner", [("drained", 1, 3000)])


@pytest.mark.parametrize("knob", ["rescue_pass_max_rows", "rescue_pass_budget"])
def test_zero_is_one_batch_an_interval(rescue_by_hand, knob):
    db = rescue_by_hand(rescue_batch_size="100", **{knob: "0"})
    conn, ids, _ = hold(db, 300)
    conn.close()
    wait_until(lambda: db.value("SELECT running FROM awa.queue_stats") == 200)
    # What else becomes due in between starts no other pass.
    conn, _, _ = hold(db, 10, queue="other")
    conn.close()
    db.execute("SELECT awa.insert_job('k', run_at => now() + interval '50 ms')")
    wait_until(lambda: db.value("SELECT scheduled FROM awa.queue_stats WHERE queue = 'default'") == 0)
    assert db.value("SELECT sum(running) FROM awa.queue_stats") == 210
    # By hand there is no interval.
    assert db.rows("SELECT * FROM awa.rescue('owner')")[0][1] == 100
    rescued = db.rows("SELECT * FROM awa.rescue('owner', 1000)")[0]
    assert rescued[:2] == ("owner", 110 if knob == "rescue_pass_max_rows" else 100)


def test_rescue_by_hand(rescue_by_hand):
    db = rescue_by_hand(rescue_pass_max_rows="0", rescue_batch_size="1")
    conn, _, _ = hold(db, 50)
    conn.close()
    wait_until(lambda: db.value("SELECT running FROM awa.queue_stats") == 49)
    db.execute("BEGIN")
    assert db.rows("SELECT * FROM awa.rescue('owner', 20)") == [("owner", 20, "max_rows")]
    db.execute("ROLLBACK")
    assert db.value("SELECT running FROM awa.queue_stats") == 49
    assert db.rows("SELECT * FROM awa.rescue(max_rows => 100)") == [
        ("owner", 49, "drained"), ("deadline", 0, "drained"), ("callback", 0, "drained"),
    ]
    assert db.value("SELECT running FROM awa.queue_stats") == 0


@pytest.mark.parametrize("call, sqlstate", [
    ("awa.rescue('god')", "22023"), ("awa.rescue('owner', -1)", "22023"),
    ("awa.recover('')", "22023"), ("awa.recover(NULL)", "22023"),
    ("awa.recover('e', '{\"x\": 1}')", "22023"), ("awa.recover('e', '{\"namespace\": 1}')", "22023"),
])
def test_bad_arguments(db, call, sqlstate):
    with raises(sqlstate):
        db.rows(f"SELECT * FROM {call}")


def test_one_of_many_recovers_an_epoch(rescue_by_hand):
    db = rescue_by_hand(rescue_pass_max_rows="0", rescue_batch_size="1")
    conn, _, _ = hold(db, 40)
    living, _, receipts = hold(db, 5, queue="alive")
    conn.close()
    wait_until(lambda: db.value("SELECT running FROM awa.queue_stats WHERE queue = 'default'") == 39)
    first = db.connect()
    first.begin()
    assert first.row("SELECT * FROM awa.recover('deploy 1')") == (True, 39, 39)
    # Others neither wait nor scan.
    others = [Background(db.connect().row, "SELECT * FROM awa.recover('deploy 1')") for _ in range(8)]
    assert [other.result() for other in others] == [(False, 0, 0)] * 8
    # Another application's epoch finds them taken by an open transaction.
    other = db.row("SELECT * FROM awa.recover('deploy 1', '{\"namespace\": \"b\"}')")
    assert other == (True, 39, 0)
    first.commit()
    assert db.row("SELECT * FROM awa.recover('deploy 1')") == (False, 0, 0)
    assert db.row("SELECT * FROM awa.recover('deploy 2')") == (True, 0, 0)
    # Who lives keeps its attempts.
    living.rows("SELECT * FROM awa.complete_many(%s)", receipts)
    assert db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'alive'") == 5


def test_an_epoch_that_rolls_back_did_not_run(db):
    conn = db.connect()
    conn.begin()
    assert conn.row("SELECT * FROM awa.recover('e')")[0]
    conn.rollback_sql()
    assert db.row("SELECT * FROM awa.recover('e')")[0]


def test_the_age_of_the_oldest_lost_attempt(rescue_by_hand):
    db = rescue_by_hand(rescue_pass_max_rows="0", rescue_batch_size="1")
    age = ("SELECT value FROM awa.metrics WHERE labels->>'kind' = 'owner'"
           " AND name = 'awa_maintenance_rescue_oldest_attempt_age_seconds'")
    assert db.value(age) == 0
    conn, _, _ = hold(db, 3)
    conn.close()
    wait_until(lambda: db.value(age) > 0)
    db.rows("SELECT * FROM awa.rescue('owner', 10)")
    assert db.value(age) == 0


def test_errors_of_earlier_attempts_go_along(db):
    """Short backoffs leave errors beside the body; a job that leaves its segment takes them."""
    db.execute("SELECT awa.configure_queue('default', jsonb_build_object('backoff',"
               " jsonb_build_object('base', '1 h', 'max', '1 h')))")
    ids = db.insert(3)
    for attempt in (1, 2):
        for job in wait_until(lambda: claimed(db, 3), what="all jobs claimable"):
            db.execute("SELECT awa.fail(%s, %s, '0')", job.receipt, f"broken {attempt}")
    conn = db.connect()
    runtime = conn.value("SELECT awa.register_runtime()")
    wait_until(lambda: db.count(state="available") == 3)
    assert len(db.claim(conn=conn, max_jobs=3, runtime=runtime)) == 3
    conn.close()
    for job_id in ids:
        db.wait_state(job_id, "retryable")
        errors = [(e["attempt"], e["error"].split(":")[0]) for e in db.job(job_id).errors]
        assert errors == [(1, "broken 1"), (2, "broken 2"), (3, "owner is gone")]


def claimed(db, count):
    if db.count(state="available") < count:
        return None
    return db.claim(max_jobs=count)


def test_instances_that_boot_at_once(own_db):
    """One pass runs for an epoch, also where the server has restarted since."""
    db = own_db
    calls = [Background(db.connect().row, "SELECT * FROM awa.recover('deploy')") for _ in range(20)]
    ran = [call.result()[0] for call in calls]
    assert sorted(ran) == [False] * 19 + [True]
    db.server.restart("immediate")
    db.wait_served()
    assert db.row("SELECT * FROM awa.recover('deploy')") == (False, 0, 0)
    for namespace in ("a", "b"):
        opts = '{"namespace": "%s"}' % namespace
        assert db.row("SELECT * FROM awa.recover('deploy', %s)", opts)[0]
        assert not db.row("SELECT * FROM awa.recover('deploy', %s)", opts)[0]
