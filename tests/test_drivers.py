"""Real drivers of other languages, and the ways that this one can talk."""

import json
import os
import subprocess

import psycopg
import pytest

from harness import place, wait_until


def test_node_postgres(db):
    db.insert(3, queue="node")
    done = subprocess.run(
        ["node", str(place.ROOT / "tests/drivers/worker.js"), str(db.server.home),
         str(db.server.port), db.name, "node"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"NODE_PATH": str(place.ROOT / "node_modules")},
    )
    assert done.returncode == 0, done.stderr
    said = dict(json.loads(line) for line in done.stdout.splitlines())
    assert said == {
        "id type": "string",
        "ready": True,
        "claimed": 4,
        "receipt": ["string", False],
        "args": {"n": 0},
        "stale": "AW001",
        "completed": 3,
    }
    assert db.count("node", "completed") == 4
    last = db.value("SELECT args::text FROM awa.jobs WHERE kind = 'node'")
    assert json.loads(last) == {"text": "é😀", "list": [1, 2.5, None]}


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("prepare", [None, 0])
def test_psycopg_protocols(db, binary, prepare):
    """Text and binary results, simple and named statements."""
    conn = db.connect(prepare_threshold=prepare)
    for round_ in range(3):
        conn.execute("SELECT awa.insert_job(%s, %s::jsonb)", ("k", json.dumps({"n": round_})))
        with conn.cursor(binary=binary) as cur:
            cur.execute("SELECT receipt, args, deadline_at FROM awa.claim(%s, %s)", ("default", 5))
            (receipt, args, deadline), = cur.fetchall()
            assert args == {"n": round_} and deadline is not None
            cur.execute("SELECT * FROM awa.complete_many(%s)", ([receipt],))
            assert cur.fetchall() == [(receipt, True)]


def test_pipeline_mode(db):
    """Many calls on the way at once, in one implicit transaction each sync."""
    conn = db.connect()
    with conn.pipeline():
        cursors = [conn.execute("SELECT awa.insert_job('k')") for _ in range(50)]
    assert len({cur.fetchone()[0] for cur in cursors}) == 50
    jobs = db.claim(max_jobs=50)
    with conn.pipeline():
        for job in jobs:
            conn.execute("SELECT awa.complete(%s)", (job.receipt,))
    assert db.count(state="completed") == 50


def test_named_cursor_reads_one_claim_piece_by_piece(db):
    db.insert(100)
    conn = db.connect(autocommit=False)
    with conn.cursor("jobs") as cur:
        cur.itersize = 7
        cur.execute("SELECT receipt FROM awa.claim('default', 100)")
        receipts = [row[0] for row in cur]
    conn.commit()
    assert len(receipts) == 100
    db.rows("SELECT * FROM awa.complete_many(%s)", receipts)


def test_copy_of_a_claim(db):
    db.insert(10)
    lines = []
    with db.conn.cursor() as cur, cur.copy(
        "COPY (SELECT receipt FROM awa.claim('default', 10)) TO STDOUT"
    ) as copy:
        lines = [int(row[0]) for row in copy.rows()]
    assert all(done for _, done in db.rows("SELECT * FROM awa.complete_many(%s)", lines))


def test_single_row_mode_given_up_early(db):
    """A client that stops reading has claimed the whole batch, or none of it if the driver's
    cancel came before the commit."""
    db.insert(2000)
    conn = db.connect()
    with conn.cursor() as cur:
        for _ in cur.stream("SELECT receipt FROM awa.claim('default', 2000)"):
            break
    running = db.count(state="running")
    assert running in (0, 2000)
    assert db.count(state="available") == 2000 - running


def test_client_that_is_cut_off_in_mid_transaction(db):
    db.insert(5)
    conn = db.connect(autocommit=False)
    conn.execute("SELECT * FROM awa.claim('default', 5)")
    conn.pgconn.finish()
    with pytest.raises(psycopg.Error):
        conn.execute("SELECT 1")
    got = []
    while len(got) < 5:
        got += wait_until(lambda: db.claim(max_jobs=5))
