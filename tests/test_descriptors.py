"""What applications declare about their queues and kinds of jobs."""

import pytest
from psycopg.types.json import Jsonb

from harness import raises, wait_until

SUBJECTS = [
    ("upsert_queue_descriptor", "queue_descriptor_status", "queue", "queue_descriptors"),
    ("upsert_job_kind_descriptor", "job_kind_descriptor_status", "kind", "job_kind_descriptors"),
]


@pytest.fixture(params=SUBJECTS, ids=["queue", "kind"])
def subject(request):
    return request.param


def upsert(conn, subject, name, descriptor, runtime=None):
    return conn.value(
        f"SELECT awa.{subject[0]}(%s, %s, %s)", name, Jsonb(descriptor), runtime
    )


def status(db, subject, name, columns="stale, drifted"):
    return db.row(f"SELECT {columns} FROM awa.{subject[1]} WHERE {subject[2]} = %s", name)


FULL = {
    "display_name": "Mail", "description": "Outgoing mail", "owner": "team-mail",
    "docs_url": "https://example.org", "tags": ["a", "b"], "extra": {"page": 1.50},
}


def test_declared_and_declared_again(db, subject):
    assert upsert(db, subject, "mail", FULL) is True
    columns = "display_name, description, owner, docs_url, tags, extra->>'page', sync_interval_ms"
    assert status(db, subject, "mail", columns)[:5] == (
        "Mail", "Outgoing mail", "team-mail", "https://example.org", ["a", "b"]
    )
    assert status(db, subject, "mail", "sync_interval_ms, stale, drifted") == (10000, False, False)
    times = "created_at, updated_at, last_seen_at"
    created, updated, seen = status(db, subject, "mail", times)
    # The same, its members in another order: seen again, not changed.
    again = dict(reversed(FULL.items()))
    assert upsert(db, subject, "mail", again) is False
    assert status(db, subject, "mail", times)[:2] == (created, updated)
    assert status(db, subject, "mail", times)[2] > seen
    assert upsert(db, subject, "mail", FULL | {"owner": None}) is True
    changed = status(db, subject, "mail", times)
    assert changed[0] == created and changed[1] > updated
    assert status(db, subject, "mail", "owner") == (None,)


def test_a_hash_of_the_client_counts(db, subject):
    assert upsert(db, subject, "mail", {"descriptor_hash": "v1"}) is True
    assert upsert(db, subject, "mail", {"descriptor_hash": "v1", "owner": "x"}) is False
    assert status(db, subject, "mail", "descriptor_hash, owner") == ("v1", "x")
    assert upsert(db, subject, "mail", {"descriptor_hash": "v2", "owner": "x"}) is True


@pytest.mark.parametrize("descriptor, code", [
    ({"colour": "red"}, "22023"), ({"tags": "a"}, "22023"), ({"tags": [1]}, "22023"),
    ({"owner": 1}, "22023"), ({"extra": []}, "22023"), ({"sync_interval_ms": "x"}, "22023"),
    ([], "22023"), (None, "22023"),
    ({"sync_interval_ms": 0}, "23514"), ({"display_name": "x" * 201}, "23514"),
    ({"description": "x" * 2001}, "23514"), ({"owner": "x" * 201}, "23514"),
    ({"docs_url": "x" * 2049}, "23514"), ({"tags": ["t"] * 21}, "23514"),
    ({"descriptor_hash": ""}, "23514"), ({"descriptor_hash": "x" * 129}, "23514"),
])
def test_refused(db, subject, descriptor, code):
    with raises(code):
        db.value(
            f"SELECT awa.{subject[0]}('q', %s)",
            Jsonb(descriptor) if descriptor is not None else None,
        )
    assert db.rows(f"SELECT * FROM awa.{subject[1]}") == []


def test_limits_are_characters(db, subject):
    upsert(db, subject, "ü" * 200, {"display_name": "ü" * 200, "tags": ["t"] * 20})
    for name, code in (("x" * 201, "23514"), ("", "23514"), (None, "22023")):
        with raises(code):
            upsert(db, subject, name, {})


def test_stale(db, subject):
    """Not declared for three of its intervals."""
    upsert(db, subject, "quick", {"sync_interval_ms": 100})
    upsert(db, subject, "slow", {})
    assert status(db, subject, "quick")[0] is False
    wait_until(lambda: status(db, subject, "quick")[0], 5)
    assert status(db, subject, "slow")[0] is False
    upsert(db, subject, "quick", {"sync_interval_ms": 100})
    assert status(db, subject, "quick")[0] is False


def test_drift(db, subject):
    """Live runtimes that declare different things; not those that are gone."""
    old, new = db.connect(), db.connect()
    first = old.value("SELECT awa.register_runtime('old')")
    second = new.value("SELECT awa.register_runtime('new')")
    upsert(old, subject, "mail", {"owner": "a"}, first)
    upsert(new, subject, "mail", {"owner": "a"}, second)
    assert status(db, subject, "mail") == (False, False)
    upsert(new, subject, "mail", {"owner": "b"}, second)
    upsert(new, subject, "other", {"owner": "b"}, second)
    assert status(db, subject, "mail") == (False, True)
    assert status(db, subject, "other") == (False, False)
    hashes = "queue_descriptor_hashes" if subject[2] == "queue" else "job_kind_descriptor_hashes"
    shown = dict(db.rows(f"SELECT name, {hashes} FROM awa.runtime_instances"))
    assert list(shown["old"]) == ["mail"] and sorted(shown["new"]) == ["mail", "other"]
    assert shown["old"]["mail"] != shown["new"]["mail"]
    old.close()
    wait_until(lambda: status(db, subject, "mail") == (False, False), 5)
    new.execute("SELECT awa.deregister_runtime(%s)", (second,))
    with raises("AW002"):
        upsert(new, subject, "mail", {}, second)


def test_what_nobody_declares_any_more_is_forgotten(db, subject):
    gone = db.value("SELECT awa.register_runtime('r', 'heartbeat')")
    upsert(db, subject, "old", {}, gone)
    upsert(db, subject, "new", {})
    db.execute(
        f"UPDATE awa.{subject[3]} SET last_seen_at = now() - interval '31 days'"
        f" WHERE {subject[2]} = 'old'"
    )
    db.execute("SELECT awa.deregister_runtime(%s)", gone)
    db.rows("SELECT * FROM awa.maintain()")
    assert db.column(f"SELECT {subject[2]} FROM awa.{subject[1]}") == ["new"]
    assert db.value("SELECT count(*) FROM awa.descriptor_declarations") == 0


def test_who_may(db):
    worker, reader = f"w_{db.name}", f"r_{db.name}"
    queue, kind = SUBJECTS
    for role, profile in ((worker, "worker"), (reader, "reader")):
        db.execute(f"CREATE ROLE {role} LOGIN")
        db.execute(f"SELECT awa.grant_access('{role}', '{profile}', '{{mine}}')")
    try:
        theirs, reads = db.connect(user=worker), db.connect(user=reader)
        assert upsert(theirs, queue, "mine", {}) is True
        assert upsert(theirs, kind, "k", {}) is True
        upsert(db, queue, "other", {})
        for conn, name in ((theirs, "other"), (reads, "mine")):
            with raises("42501"):
                upsert(conn, queue, name, {})
        assert reads.column("SELECT queue FROM awa.queue_descriptor_status") == ["mine"]
        assert reads.column("SELECT kind FROM awa.job_kind_descriptor_status") == ["k"]
        with raises("42501"):
            theirs.rows("SELECT * FROM awa.queue_descriptor_status")
    finally:
        db.close_sessions()
        for role in (worker, reader):
            db.execute(f"SELECT awa.revoke_access('{role}')")
            db.execute(f"DROP ROLE {role}")
