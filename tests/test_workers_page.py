"""docs/workers.md: its SQL as a user would type it, and its worker in Python."""

import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs/workers.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_sql(db):
    found = blocks("sql")
    assert len(found) >= 4
    done = subprocess.run(
        [db.server.bin / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-d", db.conninfo()],
        input="\n".join(found), capture_output=True, text=True, timeout=60,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert db.value("SELECT count(*) FROM awa.recovery_epochs") == 1
    assert db.row("SELECT hostname, version FROM awa.runtime_instances WHERE name = 'mailer-2'") == (
        "mx3", "1.4.2")


@pytest.fixture
def work():
    names = {}
    (source,) = blocks("python")
    exec(source, names)
    return names["work"]


def test_the_worker(db, work):
    db.execute("CREATE TABLE handled (n int)")
    ids = db.insert(30, queue="mail")
    lost, asked = ids[7], ids[11]

    def handle(conn, args):
        if args["n"] == 7:
            raise ValueError("no such address")
        if args["n"] == 9:
            # Somebody asks for the next batch's second job while it waits for its turn.
            db.execute("SELECT awa.cancel_job(%s)", asked)
        conn.execute("INSERT INTO handled VALUES (%s)", (args["n"],))

    work(db.conninfo(), "mail", handle, lambda: db.count("mail", "completed") >= 28)
    assert db.value("SELECT count(DISTINCT n) = count(*) FROM handled")
    assert db.state(lost) == "retryable" and db.job(lost).errors[0]["error"] == "no such address"
    assert db.state(asked) == "cancelled"
    assert db.count("mail", "completed") == 28
