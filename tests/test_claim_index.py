"""The index that finds the claims of one job in a segment that stays."""

import time

import pytest

from harness import raises, wait_until

ENSURE = "SELECT awa.ensure_claim_batch_job_index(%s)"
FUNCTION = "awa.ensure_claim_batch_job_index(int)"


def current(db):
    return db.value("SELECT segment FROM awa.segments WHERE state = 'current'")


def seal(db):
    """Makes another segment current; the one that was."""
    was = current(db)
    if db.value(f"SELECT count(*) FROM awa.ready_entries_{was}") == 0:
        db.insert(1, queue="filler")
    wait_until(lambda: db.rows("SELECT * FROM awa.maintain()") and current(db) != was)
    return was


def indexes(db, segment):
    return db.column(
        "SELECT indexrelid::regclass::text FROM pg_index"
        " WHERE indrelid = %s::regclass ORDER BY 1",
        f"awa.lease_claim_batches_{segment}",
    )


def free(db):
    """A segment that nobody uses."""
    return (current(db) + 5) % 12


def name(segment):
    return f"awa.lease_claim_batches_{segment}_job_ids"


def warnings(conn):
    heard = []
    conn.add_notice_handler(
        lambda diag: heard.append((diag.severity_nonlocalized, diag.message_primary))
    )
    return heard


def scans(db, index):
    db.execute("SELECT pg_stat_force_next_flush()")
    return db.value("SELECT pg_stat_get_numscans(%s::regclass)", index)


def test_arguments(db):
    assert db.value(ENSURE, current(db)) is False
    assert indexes(db, current(db)) == []
    for slot in (-1, 16, None):
        with raises("22023"):
            db.value(ENSURE, slot)


def test_a_sealed_segment_gets_one_once(db):
    segment = free(db)
    assert db.value(ENSURE, segment) is True
    assert indexes(db, segment) == [name(segment)]
    assert db.value(ENSURE, segment) is True
    assert indexes(db, segment) == [name(segment)]


@pytest.mark.parametrize("quoting", ["off", "on"])
def test_recognised_whatever_its_name(db, quoting):
    segment = free(db)
    db.execute(f"SET quote_all_identifiers = {quoting}")
    db.execute(f'CREATE INDEX "Jobs ""?" ON awa.lease_claim_batches_{segment} USING gin (job_ids)')
    assert db.value(ENSURE, segment) is True
    assert len(indexes(db, segment)) == 1


@pytest.mark.parametrize(
    "definition",
    [
        "USING gin (job_ids) WHERE attempt > 0",
        "USING gin (job_ids, positions)",
        "USING gin (positions)",
        "USING gin ((job_ids || positions))",
        "(job_ids)",
    ],
)
def test_others_are_not_taken_for_it(db, definition):
    segment = free(db)
    db.execute(f"CREATE INDEX other ON awa.lease_claim_batches_{segment} {definition}")
    assert db.value(ENSURE, segment) is True
    assert len(indexes(db, segment)) == 2
    # And the other one is maintained.
    assert name(segment) in indexes(db, segment)


def test_an_invalid_one_is_not_taken_for_it(db):
    segment = free(db)
    db.execute(f"CREATE INDEX broken ON awa.lease_claim_batches_{segment} USING gin (job_ids)")
    db.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'awa.broken'::regclass"
    )
    assert db.value(ENSURE, segment) is True
    assert name(segment) in indexes(db, segment)


@pytest.mark.parametrize(
    "what",
    [
        "CREATE TABLE {name} ()",
        "CREATE VIEW {name} AS SELECT 1",
        "CREATE INDEX {bare} ON awa.lease_claim_batches_{segment} USING gin (job_ids)"
        " WHERE attempt > 1",
        "CREATE INDEX {bare} ON awa.lease_claim_batches_{other} USING gin (job_ids)",
    ],
)
def test_a_name_that_is_taken_is_left_alone(db, what):
    job, = db.insert()
    db.execute("SELECT awa.fail(%s, 'not yet', '1 h')", db.claim()[0].receipt)
    segment = seal(db)
    taken = name(segment)
    bare = taken.removeprefix("awa.")
    db.execute(what.format(name=taken, bare=bare, segment=segment, other=free(db)))
    heard = warnings(db.conn)
    before = db.value("SELECT %s::regclass::oid", taken)
    assert db.value(ENSURE, segment) is False
    (severity, said), = heard
    assert severity == "WARNING"
    assert bare in said
    assert db.value("SELECT %s::regclass::oid", taken) == before
    # It works by scan.
    assert db.job(job).errors[0]["error"] == "not yet"
    kind, = db.column("SELECT relkind::text FROM pg_class WHERE oid = %s", before)
    kind = {"r": "TABLE", "v": "VIEW", "i": "INDEX"}[kind]
    db.execute(f"DROP {kind} {taken}")
    assert db.value(ENSURE, segment) is True
    assert db.job(job).errors[0]["error"] == "not yet"


def may_execute(db):
    """Who is named in the function's list, and who may truncate a table of claims."""
    named = db.column(
        "SELECT DISTINCT CASE grantee WHEN 0 THEN 'public' ELSE grantee::regrole::text END"
        " FROM pg_proc, aclexplode(coalesce(proacl, acldefault('f', proowner)))"
        " WHERE oid = %s::regprocedure ORDER BY 1",
        FUNCTION,
    )
    entitled = db.column(
        "SELECT DISTINCT CASE grantee WHEN 0 THEN 'public' ELSE grantee::regrole::text END"
        " FROM pg_class, aclexplode(coalesce(relacl, acldefault('r', relowner)))"
        " WHERE oid::regclass::text ~ '^awa.lease_claim_batches_[0-9]+$'"
        " AND privilege_type = 'TRUNCATE' AND grantee <> 0 ORDER BY 1"
    )
    return named, entitled


def drop_role(db, *roles):
    for role in roles:
        db.execute(f"DROP OWNED BY {role}")
        db.execute(f"DROP ROLE {role}")


def test_execute_follows_truncate(db):
    db.execute("CREATE ROLE truncates LOGIN")
    db.execute("CREATE ROLE stranger LOGIN")
    try:
        segment = free(db)
        named, entitled = may_execute(db)
        assert named == entitled == ["postgres"]
        db.execute("GRANT USAGE ON SCHEMA awa TO truncates, stranger")
        db.execute(f"GRANT TRUNCATE ON awa.lease_claim_batches_{segment} TO truncates")
        db.execute(f"GRANT EXECUTE ON FUNCTION {FUNCTION} TO stranger WITH GRANT OPTION")
        db.execute(f"GRANT EXECUTE ON FUNCTION {FUNCTION} TO PUBLIC")
        # Granted on: it goes with the grant it hangs on.
        db.execute("CREATE ROLE third")
        db.execute("SET ROLE stranger")
        db.execute(f"GRANT EXECUTE ON FUNCTION {FUNCTION} TO third")
        db.execute("RESET ROLE")
        db.rows("SELECT * FROM awa.maintain()")
        named, entitled = may_execute(db)
        assert named == entitled == ["postgres", "truncates"]
        theirs = db.connect(user="truncates")
        assert theirs.value(ENSURE, segment) is True
        with raises("42501"):
            theirs.value(ENSURE, (segment + 1) % 12)
        with raises("42501"):
            db.connect(user="stranger").value(ENSURE, segment)
        db.execute(f"REVOKE TRUNCATE ON awa.lease_claim_batches_{segment} FROM truncates")
        db.rows("SELECT * FROM awa.maintain()")
        assert may_execute(db)[0] == ["postgres"]
    finally:
        db.close_sessions()
        drop_role(db, "truncates", "stranger", "third")


def test_execute_refreshed_by_a_role_that_may_only_become_the_owner(db):
    """It has none of the owner's privileges by itself, and becomes it by SET ROLE."""
    db.execute("CREATE ROLE keeper SUPERUSER")
    db.execute("CREATE ROLE migrator LOGIN NOINHERIT IN ROLE keeper")
    db.execute("CREATE ROLE old_hand")
    try:
        db.execute("ALTER TABLE awa.lease_claim_batches_3 OWNER TO keeper")
        db.execute(f"ALTER FUNCTION {FUNCTION} OWNER TO keeper")
        db.execute("GRANT TRUNCATE ON awa.lease_claim_batches_4 TO old_hand")
        db.execute(f"GRANT EXECUTE ON FUNCTION {FUNCTION} TO PUBLIC")
        migrator = db.connect(user="migrator")
        with raises("42501"):
            migrator.value(ENSURE, 5)
        migrator.execute("SET ROLE keeper")
        migrator.execute("SELECT awa.grant_access('old_hand', 'producer')")
        migrator.execute("RESET ROLE")
        named, entitled = may_execute(db)
        assert named == entitled
        assert "old_hand" in named and "public" not in named and "migrator" not in named
        # Made anew by the owner, as an upgrade does.
        migrator.execute("SET ROLE keeper")
        migrator.execute(db.value("SELECT pg_get_functiondef(%s::regprocedure)", FUNCTION))
        assert migrator.value(ENSURE, free(db)) is True
        migrator.execute("RESET ROLE")
        named, entitled = may_execute(db)
        assert named == entitled and "public" not in named
    finally:
        db.close_sessions()
        db.execute("REASSIGN OWNED BY keeper TO postgres")
        db.execute("SELECT awa.revoke_access('old_hand')")
        drop_role(db, "migrator", "old_hand", "keeper")


def test_no_profile_has_it(db):
    db.execute("CREATE ROLE op LOGIN")
    try:
        db.execute("SELECT awa.grant_access('op', 'operator')")
        assert not db.value("SELECT has_function_privilege('op', %s, 'EXECUTE')", FUNCTION)
    finally:
        db.execute("SELECT awa.revoke_access('op')")
        drop_role(db, "op")


def test_maintenance_makes_it_on_segments_that_stay(db):
    db.insert(2)
    db.execute("SELECT awa.fail(%s, 'later', '1 h')", db.claim()[0].receipt)
    segment = seal(db)
    wait_until(
        lambda: db.rows("SELECT * FROM awa.maintain()") and indexes(db, segment),
        what="an index on the sealed segment",
    )
    assert indexes(db, segment) == [name(segment)]
    assert indexes(db, current(db)) == []


def test_point_reads_use_it_and_miss_nothing(db):
    """Claims that come after it was made are in it; those of others are told apart."""
    ids = db.insert(40)
    for job in db.claim(max_jobs=40):
        db.execute("SELECT awa.fail(%s, %s, '0')", job.receipt, f"first of {job.job_id}")
    segment = seal(db)
    db.execute(
        f"CREATE INDEX mine ON awa.lease_claim_batches_{segment} USING gin (job_ids)"
    )
    assert db.value(ENSURE, segment) is True
    before = scans(db, "awa.mine")
    db.job(ids[7])
    assert scans(db, "awa.mine") > before
    # One at a time, then many at once; the leaf is sealed, and still written to.
    again = [wait_until(db.claim)[0] for _ in range(20)]
    again += wait_until(lambda: db.claim(max_jobs=20))
    assert sorted(job.job_id for job in again) == sorted(ids)
    for job in again[:30]:
        db.execute("SELECT awa.complete(%s, %s)", job.receipt, str(job.job_id))
    for job in again[30:]:
        assert db.state(job.job_id) == "running"
        db.execute("SELECT awa.fail(%s, 'second', '1 h')", job.receipt)
    leaf = f"awa.lease_claim_batches_{segment}"
    for job_id in ids:
        through = db.column(
            f"SELECT claim_id FROM {leaf} WHERE job_ids @> ARRAY[%s::bigint] ORDER BY 1", job_id
        )
        assert len(through) == 2
        db.execute("SET enable_indexscan = off; SET enable_bitmapscan = off")
        assert through == db.column(
            f"SELECT claim_id FROM {leaf} WHERE %s = ANY (job_ids) ORDER BY 1", job_id
        )
        db.execute("RESET ALL; SET enable_seqscan = off")
        assert through == db.column(
            f"SELECT claim_id FROM {leaf} WHERE job_ids @> ARRAY[%s::bigint] ORDER BY 1", job_id
        )
        db.execute("RESET ALL")
        attempts = db.rows("SELECT attempt, error FROM awa.job_attempts(%s)", job_id)
        assert [attempt for attempt, _ in attempts] == [1, 2]
        assert attempts[0][1] == f"first of {job_id}"
    for job in again[:30]:
        assert db.state(job.job_id) == "completed"
        assert db.value("SELECT awa.get_result(%s)", job.job_id) == job.job_id


def test_a_segment_that_is_used_again(new_server, request):
    """It was emptied with its indexes; ours is gone before it is written to, a user's one stays
    and has every row."""
    from conftest import use

    from harness import Database

    server = new_server({"awa.rotate_interval": "100ms", "awa.completed_retention": "0"})
    for db in use(Database(server), request):
        segment = (current(db) + 1) % 12
        assert db.value(ENSURE, segment) is True
        user = f"awa.lease_claim_batches_{(segment + 1) % 12}"
        db.execute(f"CREATE INDEX mine ON {user} USING gin (job_ids)")

        def pass_one():
            job_id, = db.insert()
            job, = db.claim()
            assert job.job_id == job_id
            found = db.row(
                "SELECT state::text, run_lease FROM awa.get_job(%s)", job_id
            )
            assert found == ("running", job.receipt)
            db.execute("SELECT awa.complete(%s)", job.receipt)

        def turned(rounds):
            pass_one()
            return db.value("SELECT min(generation) FROM awa.segments WHERE segment < 12") >= rounds

        wait_until(lambda: turned(1), 40, what="each segment to turn over")
        assert indexes(db, segment) == []
        assert len(indexes(db, (segment + 1) % 12)) == 1
        wait_until(lambda: turned(2), 40, what="each segment to turn over again")


def test_claims_wait_for_nobody_who_asks(db):
    """While an attempt of the segment is being claimed the index is not waited for."""
    db.insert(2)
    segment = seal(db)
    claimer = db.connect()
    claimer.begin()
    claimer.rows("SELECT * FROM awa.claim('default')")
    assert db.value(ENSURE, segment) is False
    assert len(db.claim()) == 1
    claimer.commit_sql()
    assert db.value(ENSURE, segment) is True


def test_figures(db, capsys):
    """20,000 claims of single jobs in one segment: the slowest leaf there is to look through."""
    count = 20_000
    ids = db.insert(count)
    db.execute(f"""DO $$ DECLARE r bigint; BEGIN
        FOR i IN 1..{count} LOOP
            SELECT receipt INTO r FROM awa.claim('default');
            CASE i % 10
                WHEN 0 THEN PERFORM awa.fail(r, 'e', terminal => true);
                WHEN 5 THEN PERFORM awa.fail(r, 'e', '50 s');
                ELSE PERFORM awa.complete(r);
            END CASE;
        END LOOP; END $$""")
    segment = seal(db)
    failed, waiting = ids[9::10], ids[4::10]

    def timed(query, jobs):
        start = time.monotonic()
        for job in jobs:
            db.rows(query, job)
        return (time.monotonic() - start) * 1000 / len(jobs)

    def measure(some):
        return {
            "get_job": timed("SELECT * FROM awa.get_job(%s)", ids[::500]),
            "retry_job": timed("SELECT awa.retry_job(%s)", failed[some]),
            "cancel_job": timed("SELECT awa.cancel_job(%s)", waiting[some]),
        }

    db.execute(f"DROP INDEX IF EXISTS {name(segment)}")
    without = measure(slice(0, 20))
    assert db.value(ENSURE, segment) is True
    with_it = measure(slice(20, 40))
    with capsys.disabled():
        print()
        for what in without:
            print(f"  {what}: {without[what]:.2f} ms without, {with_it[what]:.2f} ms with the index")
    assert max(without.values()) < 200 and max(with_it.values()) < 200
