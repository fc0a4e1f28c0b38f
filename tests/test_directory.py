"""What the row of a sealed segment saves a start from reading."""

import pytest
from psycopg.types.json import Jsonb

from conftest import use
from harness import Database, claim, wait_until

SETTINGS = {"awa.rotate_interval": "100ms", "awa.completed_retention": "1h"}


@pytest.fixture
def ring(new_server, request):
    """A database whose segments are sealed quickly and kept."""
    yield from use(Database(new_server(SETTINGS, durable=True)), request)


def rows_of(db):
    return db.rows(
        "SELECT segment, state, directory IS NOT NULL, disposed, summary FROM awa.segments"
        " WHERE state = 'sealed' ORDER BY 1"
    )


def fill(db, number, queue):
    db.rows("SELECT * FROM awa.insert_jobs(%s)", Jsonb([{"kind": "k", "queue": queue}] * number))


def seal(db, expected, disposed=None):
    """Until the first segments are sealed and known."""

    def known():
        rows = [row for row in rows_of(db) if row[0] in expected]
        return len(rows) == len(expected) and all(
            row[2] and (disposed is None or row[3] == disposed) for row in rows
        )

    wait_until(known, 20, what=lambda: f"{rows_of(db)}")


def test_a_sealed_segment_is_listed(ring):
    db = ring
    fill(db, 3000, "backlog")
    seal(db, [0], disposed=False)
    db.check()


def test_a_disposed_segment_is_summed_up(ring):
    db = ring
    fill(db, 100, "done")
    db.rows("SELECT * FROM awa.complete_many(%s)", [j.receipt for j in db.claim("done", 100)])
    seal(db, [0], disposed=True)
    assert db.value("SELECT summary->>'bodies' FROM awa.segments WHERE segment = 0") == "100"
    db.check()


@pytest.mark.parametrize("how", ["restart", "crash"])
def test_a_start_needs_no_bodies_of_listed_segments(ring, how):
    """Jobs ready, running, released and completed, over listed and unlisted segments."""
    db = ring
    fill(db, 2500, "backlog")
    taken = db.claim("backlog", 1500)
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in taken[:700]])
    db.execute("SELECT awa.release(%s)", [job.receipt for job in taken[1400:]])
    seal(db, [0], disposed=False)
    fill(db, 50, "more")
    before = db.rows("SELECT queue, available, running, completed_total FROM awa.queue_stats ORDER BY 1")
    if how == "restart":
        db.server.restart()
    else:
        db.execute("SELECT pg_catalog.pg_current_xact_id()")  # its commit flushes the claims
        db.server.crash()
    db.wait_served()
    stats = "SELECT queue, available, running, completed_total FROM awa.queue_stats ORDER BY 1"
    assert db.rows(stats) == before
    assert db.check() is None
    done = db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in taken[700:1400]])
    assert all(completed for _, completed in done)
    got = []
    while jobs := db.claim("backlog", 1000):
        got += [job.job_id for job in jobs]
    assert len(got) == len(set(got)) == 2500 - 1400


def test_totals_outlive_a_start_that_reads_no_rows(ring):
    db = ring
    fill(db, 40, "done")
    db.rows("SELECT * FROM awa.complete_many(%s)", [j.receipt for j in db.claim("done", 100)])
    seal(db, [0], disposed=True)
    db.server.restart()
    db.wait_served()
    total = db.value("SELECT completed_total FROM awa.queue_stats WHERE queue = 'done'")
    assert total == 40


def test_an_open_producer_keeps_its_segment_unlisted(ring):
    db = ring
    producer = db.connect()
    producer.begin()
    job_id = producer.value("SELECT awa.insert_job('late', queue => 'late')")
    fill(db, 10, "other")
    wait_until(lambda: [row for row in rows_of(db) if row[0] == 0], 20)
    fill(db, 10, "other")
    wait_until(lambda: any(row[2] for row in rows_of(db)), 20, what="a later segment to be listed")
    assert rows_of(db)[0][:3] == (0, "sealed", False)
    producer.commit_sql()
    seal(db, [0])
    db.server.crash()
    db.wait_served()
    assert [job.job_id for job in db.claim("late", 10)] == [job_id]


def test_rows_written_by_hand_are_not_hidden_by_a_directory(ring):
    """A copy of a body under another position, put into a listed segment."""
    db = ring
    fill(db, 5, "q")
    seal(db, [0])
    conn = db.connect()
    conn.execute(
        "INSERT INTO awa.ready_entries_0 SELECT * FROM jsonb_populate_record("
        "NULL::awa.ready_entries_0, (SELECT to_jsonb(r) || jsonb_build_object('position', position + 500)"
        " FROM awa.ready_entries_0 r ORDER BY position LIMIT 1))"
    )
    wait_until(
        lambda: db.value("SELECT available FROM awa.queue_stats WHERE queue = 'q'") == 6,
        20,
        what="the sixth job",
    )
    assert len(claim(conn, "q", 10)) == 6
