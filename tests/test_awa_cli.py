"""The command awa of awa-cli 0.6.9 as it is: what it reads here, and pauses."""

import json
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

AWA = Path(sysconfig.get_path("scripts")) / "awa"


def awa(db, *arguments, user="postgres", fails=False):
    """What the command prints; every run is a process of its own."""
    done = subprocess.run(
        [AWA, "--database-url", f"postgresql://{user}@127.0.0.1:{db.server.port}/{db.name}",
         *map(str, arguments)],
        capture_output=True, text=True, timeout=60,
    )
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert (done.returncode != 0) is fails, said
    return said


@pytest.fixture
def operator(db):
    """A role that operates the queue q."""
    name = f"operator_{db.name}"
    db.execute(f"CREATE ROLE {name} LOGIN")
    db.execute("SELECT awa.grant_access(%s, 'operator', '{q}')", name)
    yield name
    db.close_sessions()
    db.execute("SELECT awa.revoke_access(%s)", name)
    db.execute(f"DROP ROLE {name}")


def listed(text):
    """Ids of the jobs in a list."""
    return [int(line.split()[0]) for line in text.splitlines() if re.match(r"\d+  +\S", line)]


def test_migrate(db):
    db.insert()
    objects = "SELECT count(*) FROM pg_depend WHERE refclassid = 'pg_extension'::regclass"
    before = db.value(objects)
    assert "up to date" in awa(db, "migrate")
    assert db.value(objects) == before and len(db.claim()) == 1


def test_job_list(db):
    one, two = db.insert(2, queue="q")
    (other,) = db.insert(1, queue="r", kind="other")
    assert listed(awa(db, "job", "list")) == [other, two, one]
    assert listed(awa(db, "job", "list", "--queue", "q")) == [two, one]
    assert listed(awa(db, "job", "list", "--kind", "other")) == [other]
    assert listed(awa(db, "job", "list", "--limit", 1)) == [other]
    db.claim("q")
    assert listed(awa(db, "job", "list", "--state", "running")) == [one]
    assert listed(awa(db, "job", "list", "--state", "available")) == [other, two]
    assert listed(awa(db, "job", "list", "--queue", "s")) == []


def test_job_dump(db):
    (job,) = db.insert(1, queue="q", tags=["t"], metadata={"m": 1})
    (claimed,) = db.claim("q")
    db.value("SELECT awa.fail(%s, 'broken', terminal => true)", claimed.receipt)
    said = awa(db, "job", "dump", job)
    dump = json.loads(said[said.index("{"):])
    text = json.dumps(dump)
    for part in (str(job), '"failed"', '"q"', "broken", '"t"'):
        assert part in text
    assert "JobNotFound" in awa(db, "job", "dump", 5, fails=True)


def rows(text):
    """Lines of a table as lists of words, without its head."""
    return [line.split() for line in text.splitlines()[1:] if line.strip()]


def test_queue_stats(db):
    db.insert(3, queue="q")
    one, two = db.claim("q", 2)
    db.execute("SELECT awa.complete(%s)", one.receipt)
    db.value("SELECT awa.fail(%s, 'x', terminal => true)", two.receipt)
    db.insert(1, queue="r")
    db.execute("SELECT awa.pause_queue('r', 'ada')")
    # queue, available, running, failed, completed in an hour, lag, paused
    q, r = rows(awa(db, "queue", "stats"))
    assert (q[:5], q[-1]) == (["q", "1", "0", "1", "1"], "no")
    assert (r[:5], r[-1]) == (["r", "1", "0", "0", "0"], "yes")


def test_pause_and_resume(db):
    db.insert(1, queue="q")
    awa(db, "queue", "pause", "q")
    assert db.claim("q") == []
    assert db.value("SELECT awa.claim_outcome()") == "paused"
    awa(db, "queue", "resume", "q")
    assert len(db.claim("q")) == 1


def test_storage_status(db):
    db.execute("SELECT awa.register_runtime('w', 'heartbeat')")
    status = json.loads(re.search(r"\{.*\}", awa(db, "storage", "status"), re.S)[0])
    assert status["state"] == "active" and status["active_engine"] == "queue_storage"


def test_as_a_reader_of_one_queue(db):
    db.insert(1, queue="q")
    db.insert(1, queue="r")
    db.execute("SELECT awa.pause_queue('r')")
    name = f"reader_{db.name}"
    db.execute(f"CREATE ROLE {name} LOGIN")
    db.execute("SELECT awa.grant_access(%s, 'reader', '{q}')", name)
    assert [row[0] for row in rows(awa(db, "queue", "stats", user=name))] == ["q"]
    assert len(listed(awa(db, "job", "list", user=name))) == 1
    awa(db, "queue", "pause", "q", user=name, fails=True)
    db.execute("SELECT awa.revoke_access(%s)", name)
    db.execute(f"DROP ROLE {name}")


def test_as_an_operator_of_one_queue(db, operator):
    (job,) = db.insert(1, queue="q")
    (hidden,) = db.insert(1, queue="r")
    assert listed(awa(db, "job", "list", user=operator)) == [job]
    assert str(job) in awa(db, "job", "dump", job, user=operator)
    awa(db, "job", "dump", hidden, user=operator, fails=True)
    awa(db, "queue", "pause", "q", user=operator)
    assert db.claim("q") == []
    awa(db, "queue", "resume", "q", user=operator)
    assert len(db.claim("q")) == 1
    assert "permission denied" in awa(db, "queue", "pause", "r", user=operator, fails=True)
    awa(db, "migrate", user=operator)
    assert [row[0] for row in rows(awa(db, "queue", "stats", user=operator))] == ["q"]


def test_what_it_cannot_do_here(db):
    """Changes to the other system's tables: an error, and no change."""
    (job,) = db.insert(1, queue="q")
    for command in (("job", "cancel", job), ("job", "retry", job), ("queue", "drain", "q")):
        awa(db, *command, fails=True)
    assert db.state(job) == "available"
