"""What a caller does in a transaction commits or rolls back with it."""

import pytest
from psycopg.types.json import Jsonb

from harness import Background, claim, raises, wait_blocked, wait_until


@pytest.fixture
def conn(db):
    return db.connect()


def visible(db):
    return db.column("SELECT args->>'n' FROM awa.jobs ORDER BY id")


def insert(conn, n):
    return conn.value("SELECT awa.insert_job('k', %s)", Jsonb({"n": n}))


def test_enqueue_rolls_back(db, conn):
    conn.begin()
    insert(conn, 1)
    conn.execute("SELECT * FROM awa.insert_jobs('[{\"kind\": \"k\"}, {\"kind\": \"k\"}]')")
    conn.rollback_sql()
    assert visible(db) == [] and db.claim(max_jobs=10) == []


def test_enqueue_in_a_failed_transaction(db, conn):
    conn.begin()
    insert(conn, 1)
    with raises("22012"):
        conn.execute("SELECT 1/0")
    conn.commit_sql()  # which rolls back
    assert visible(db) == []


def test_enqueue_undone_by_its_own_statement(db, conn):
    """The job of a statement that fails afterwards is gone with it."""
    conn.begin()
    insert(conn, 1)
    conn.execute("SAVEPOINT s")
    with raises("22012"):
        conn.execute("SELECT awa.insert_job('k'), 1 / (random() * 0)::int")
    conn.execute("ROLLBACK TO s")
    insert(conn, 2)
    conn.commit_sql()
    assert visible(db) == ["1", "2"]


def test_savepoints_of_enqueues(db, conn):
    conn.begin()
    insert(conn, 1)
    conn.execute("SAVEPOINT a")
    insert(conn, 2)
    conn.execute("SAVEPOINT b")
    insert(conn, 3)
    conn.execute("RELEASE b")
    conn.execute("ROLLBACK TO a")
    insert(conn, 4)
    conn.execute("SAVEPOINT c")
    insert(conn, 5)
    conn.execute("RELEASE c")
    conn.commit_sql()
    assert visible(db) == ["1", "4", "5"]
    assert [job.args["n"] for job in db.claim(max_jobs=10)] == [1, 4, 5]


def test_savepoints_of_claims(db, conn):
    ids = db.insert(6)
    conn.begin()
    assert [job.job_id for job in claim(conn, max_jobs=2)] == ids[:2]
    conn.execute("SAVEPOINT a")
    assert [job.job_id for job in claim(conn, max_jobs=2)] == ids[2:4]
    conn.execute("ROLLBACK TO a")
    conn.commit_sql()
    assert [db.state(job) for job in ids] == 2 * ["running"] + 4 * ["available"]
    # Given back to the front.
    assert [job.job_id for job in db.claim(max_jobs=10)] == ids[2:]


def test_savepoints_of_closes(db, conn):
    ids = db.insert(3)
    jobs = db.claim(max_jobs=3)
    conn.begin()
    conn.execute("SELECT awa.complete(%s)", (jobs[0].receipt,))
    conn.execute("SAVEPOINT a")
    conn.execute("SELECT awa.complete(%s)", (jobs[1].receipt,))
    conn.execute("SELECT awa.fail(%s, 'x', '0')", (jobs[2].receipt,))
    conn.execute("ROLLBACK TO a")
    conn.execute("SELECT awa.complete(%s)", (jobs[2].receipt,))
    conn.commit_sql()
    assert [db.state(job) for job in ids] == ["completed", "running", "completed"]
    db.execute("SELECT awa.complete(%s)", jobs[1].receipt)


def test_exception_blocks_are_subtransactions(db, conn):
    conn.execute("""
        DO $$
        BEGIN
            FOR n IN 1..200 LOOP
                BEGIN
                    PERFORM awa.insert_job('k', jsonb_build_object('n', n));
                    IF n % 2 = 0 THEN RAISE EXCEPTION 'undo'; END IF;
                EXCEPTION WHEN raise_exception THEN NULL;
                END;
            END LOOP;
        END $$
    """)
    got = [job.args["n"] for job in db.claim(max_jobs=1000)]
    assert got == list(range(1, 200, 2))


def test_nested_exception_blocks_around_claims(db, conn):
    db.insert(40)
    conn.execute("""
        DO $$
        DECLARE r bigint;
        BEGIN
            FOR n IN 1..20 LOOP
                BEGIN
                    SELECT receipt INTO STRICT r FROM awa.claim('default');
                    BEGIN
                        PERFORM awa.complete(r);
                        IF n % 3 = 0 THEN RAISE EXCEPTION 'undo the close'; END IF;
                    EXCEPTION WHEN raise_exception THEN NULL;
                    END;
                    IF n % 5 = 0 THEN RAISE EXCEPTION 'undo all'; END IF;
                EXCEPTION WHEN raise_exception THEN NULL;
                END;
            END LOOP;
        END $$
    """)
    # 20 rounds: 4 undone in full (5, 10, 15, 20); of the others 5 undid the close.
    assert db.count(state="completed") == 11
    assert db.count(state="running") == 5
    assert db.count(state="available") == 24


def test_a_stale_receipt_does_not_spoil_a_savepoint(db, conn):
    db.insert()
    job, = db.claim()
    conn.begin()
    for _ in range(100):
        conn.execute("SAVEPOINT s")
        with raises("AW001"):
            conn.execute("SELECT awa.complete(5)")
        conn.execute("ROLLBACK TO s")
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.commit_sql()
    assert db.state(job.job_id) == "completed"


def test_own_uncommitted_jobs_are_seen_but_not_claimable(db, conn):
    conn.begin()
    job_id = insert(conn, 1)
    assert conn.value("SELECT state::text FROM awa.get_job(%s)", job_id) == "available"
    assert db.state(job_id) is None
    assert claim(conn) == []
    conn.commit_sql()


def test_session_ends_inside_a_transaction(db, conn):
    ids = db.insert(4)
    other = db.connect()
    other.begin()
    assert len(claim(other, max_jobs=2)) == 2
    insert(other, 99)
    other.close()
    jobs = wait_until(lambda: found if len(found := db.claim(max_jobs=10)) else None)
    got = [job.job_id for job in jobs]
    while len(got) < 4:
        got += [job.job_id for job in wait_until(lambda: db.claim(max_jobs=10))]
    assert sorted(got) == ids


# Two-phase commit


def test_prepared_enqueue_committed_elsewhere(db, conn):
    conn.begin()
    insert(conn, 1)
    conn.execute("SELECT * FROM awa.insert_jobs(%s)", (Jsonb([{"kind": "k", "args": {"n": 2}}]),))
    conn.execute(f"PREPARE TRANSACTION 'p-{db.name}'")
    conn.close()
    assert visible(db) == [] and db.claim() == []
    db.execute(f"COMMIT PREPARED 'p-{db.name}'")
    got = []
    while len(got) < 2:
        got += [job.args["n"] for job in wait_until(lambda: db.claim(max_jobs=10))]
    assert got == [1, 2]


def test_prepared_enqueue_rolled_back(db, conn):
    conn.begin()
    insert(conn, 1)
    conn.execute(f"PREPARE TRANSACTION 'p-{db.name}'")
    db.execute(f"ROLLBACK PREPARED 'p-{db.name}'")
    db.insert(1, kind="after")
    assert [job.kind for job in db.claim(max_jobs=10)] == ["after"]


def test_prepare_of_a_claim_is_refused(db, conn):
    job_id, = db.insert()
    conn.begin()
    assert len(claim(conn)) == 1
    with raises("0A000"):
        conn.execute(f"PREPARE TRANSACTION 'p-{db.name}'")
    conn.execute("ROLLBACK")
    assert db.state(job_id) == "available"
    assert db.value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_prepared_close(db, conn, end):
    db.insert()
    job, = db.claim()
    conn.begin()
    conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    conn.execute(f"PREPARE TRANSACTION 'p-{db.name}'")
    other = db.connect()
    call = Background(other.value, "SELECT completed FROM awa.complete_many(%s)", [job.receipt])
    wait_blocked(db.conn, other.pid)
    db.execute(f"{end} PREPARED 'p-{db.name}'")
    assert call.result() is (end == "ROLLBACK")
    assert db.state(job.job_id) == "completed"


def test_prepared_transactions_survive_a_crash(own_db):
    conn = own_db.connect()
    ids = {}
    for end in ("commit", "rollback"):
        conn.begin()
        ids[end] = conn.column(
            "SELECT job_id FROM awa.insert_jobs(%s)", Jsonb([{"kind": end}] * 5)
        )
        conn.execute(f"PREPARE TRANSACTION 'p-{end}'")
    own_db.server.crash()
    own_db.wait_served()
    assert own_db.claim(max_jobs=10) == []
    before = own_db.insert(2)
    own_db.execute("COMMIT PREPARED 'p-commit'")
    own_db.execute("ROLLBACK PREPARED 'p-rollback'")
    got = []
    while len(got) < 7:
        got += [job.job_id for job in wait_until(lambda: own_db.claim(max_jobs=10))]
    assert sorted(got) == sorted(before + ids["commit"])
    assert own_db.claim(max_jobs=10) == []


def test_commit_and_chain(db, conn):
    conn.begin()
    insert(conn, 1)
    conn.execute("COMMIT AND CHAIN")
    insert(conn, 2)
    conn.execute("ROLLBACK AND CHAIN")
    insert(conn, 3)
    conn.commit_sql()
    assert visible(db) == ["1", "3"]


def test_procedure_that_commits_midway(db, conn):
    conn.execute("""
        CREATE PROCEDURE many() LANGUAGE plpgsql AS $$
        BEGIN
            FOR n IN 1..10 LOOP
                PERFORM awa.insert_job('k', jsonb_build_object('n', n));
                IF n % 2 = 0 THEN COMMIT; ELSIF n % 5 = 0 THEN ROLLBACK; END IF;
            END LOOP;
        END $$
    """)
    conn.execute("CALL many()")
    assert visible(db) == ["1", "2", "3", "4", "6", "7", "8", "9", "10"]


def test_deferred_constraint_fails_the_commit(db, conn):
    """An error in the commit itself: after our functions, before the callbacks."""
    db.execute("CREATE TABLE t (x int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    ids = db.insert(2)
    held, = db.claim()
    conn.begin()
    insert(conn, 1)
    claim(conn)
    conn.execute("SELECT awa.complete(%s)", (held.receipt,))
    conn.execute("INSERT INTO t VALUES (1), (1)")
    with raises("23505"):
        conn.commit_sql()
    assert [db.state(job) for job in ids] == ["running", "available"]
    assert visible(db) == ["0", "1"]
    db.execute("SELECT awa.complete(%s)", held.receipt)


def test_maintenance_cannot_be_prepared(own_db):
    """It holds what a replay needs, and its acts would be forgotten by a crash."""
    db = own_db
    db.insert(3)
    db.rows("SELECT * FROM awa.complete_many(%s)", [j.receipt for j in db.claim(max_jobs=3)])
    conn = db.connect()
    conn.begin()
    conn.rows("SELECT * FROM awa.maintain()")
    with raises("0A000"):
        conn.execute("PREPARE TRANSACTION 'm'")
