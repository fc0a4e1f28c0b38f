"""Roles with profiles: what they may do, on which queues, and nothing else."""

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from harness import raises

ODD = 'Rôle-"x";DROP'


def refused(conn, call, *params):
    with raises("42501"):
        conn.rows(f"SELECT * FROM {call}", *params)


def test_a_producer_produces(db, role):
    conn = role("producer", ["mail"])
    job_id = conn.value("SELECT awa.insert_job('k', queue => 'mail')")
    conn.rows("SELECT * FROM awa.insert_jobs(%s)", Jsonb([{"kind": "k", "queue": "mail"}]))
    assert db.state(job_id) == "available"
    refused(conn, "awa.insert_job('k')")
    refused(conn, "awa.insert_jobs(%s)", Jsonb([{"kind": "k", "queue": "mail"}, {"kind": "k"}]))
    refused(conn, "awa.claim('mail')")
    refused(conn, "awa.jobs")
    refused(conn, "awa.get_job(%s)", job_id)
    refused(conn, "awa.pause_queue('mail')")
    assert db.count("default") == 0


def test_a_worker_works(db, role):
    conn = role("worker", ["mail*"])
    db.insert(2, queue="mail-1")
    db.insert(1, queue="other")
    runtime = conn.value("SELECT awa.register_runtime('w')")
    one, two = conn.column("SELECT receipt FROM awa.claim('mail-1', 2, %s)", runtime)
    conn.execute("SELECT awa.complete(%s)", (one,))
    assert conn.value("SELECT awa.fail(%s, 'x', terminal => true)", two) == "failed"
    conn.execute("CALL awa.wait_for_jobs('{mail-1}', '0')")
    refused(conn, "awa.claim('other')")
    refused(conn, "awa.claim_from('{mail-1,other}')")
    refused(conn, "awa.insert_job('k', queue => 'mail-1')")
    refused(conn, "awa.maintain()")
    (job,) = db.claim("other")
    refused(conn, "awa.complete(%s)", job.receipt)


def test_a_reader_reads_its_queues(db, role):
    conn = role("reader", ["a", "b*"])
    db.insert(1, queue="a")
    db.insert(1, queue="bb")
    (hidden,) = db.insert(1, queue="c")
    assert set(conn.column("SELECT queue FROM awa.jobs")) == {"a", "bb"}
    assert set(conn.column("SELECT queue FROM awa.queue_stats")) == {"a", "bb"}
    assert conn.rows("SELECT * FROM awa.get_job(%s)", hidden) == []
    refused(conn, "awa.claim('a')")
    refused(conn, "awa.insert_job('k', queue => 'a')")
    refused(conn, "awa.ready_entries_0")


def test_an_operator_does_all_but_grant(db, role):
    conn = role("operator")
    conn.execute("SELECT awa.insert_job('k')")
    conn.value("SELECT awa.pause_queue('default')")
    conn.value("SELECT awa.resume_queue('default')")
    (receipt,) = conn.column("SELECT receipt FROM awa.claim('default')")
    conn.execute("SELECT awa.complete(%s)", (receipt,))
    assert all(ok for _, ok, _ in conn.rows("SELECT * FROM awa.check()"))
    conn.rows("SELECT * FROM awa.maintain()")
    conn.rows("SELECT * FROM awa.jobs")
    refused(conn, "awa.rebuild()")
    refused(conn, "awa.grant_access('postgres', 'reader')")
    refused(conn, "awa.revoke_access('postgres')")


def test_an_operator_of_one_queue(role):
    conn = role("operator", ["mine"])
    conn.execute("SELECT awa.prepare_queue('mine')")
    refused(conn, "awa.prepare_queue('yours')")
    refused(conn, "awa.maintain()")


def test_grants_add_up_and_are_taken_back_together(db, role):
    conn = role("producer", ["a"])
    db.execute("SELECT awa.grant_access(%s, 'worker', '{a}')", conn.name)
    db.execute("SELECT awa.grant_access(%s, 'worker', '{a}')", conn.name)
    conn.execute("SELECT awa.insert_job('k', queue => 'a')")
    assert len(conn.rows("SELECT * FROM awa.claim('a')")) == 1
    db.execute("SELECT awa.revoke_access(%s)", conn.name)
    refused(conn, "awa.insert_job('k', queue => 'a')")
    refused(conn, "awa.claim('a')")
    assert db.rows("SELECT * FROM awa.queue_acl") == []


def test_members_have_what_their_group_has(db, role):
    group, member = role("producer"), role()
    quoted = sql.Identifier(group.name), sql.Identifier(member.name)
    db.conn.execute(sql.SQL("GRANT {} TO {}").format(*quoted))
    member.execute("SELECT awa.insert_job('k')")
    db.conn.execute(sql.SQL("ALTER ROLE {} NOINHERIT").format(quoted[1]))
    refused(member, "awa.insert_job('k')")


def test_a_role_of_any_name(db, role):
    conn = role("producer", ["a"], name=ODD)
    conn.execute("SELECT awa.insert_job('k', queue => 'a')")
    db.execute("SELECT awa.revoke_access(%s)", ODD)
    refused(conn, "awa.insert_job('k', queue => 'a')")


def test_a_grant_rolls_back(db, role):
    conn = role()
    db.conn.begin()
    db.execute("SELECT awa.grant_access(%s, 'producer')", conn.name)
    db.conn.rollback_sql()
    refused(conn, "awa.insert_job('k')")


@pytest.mark.parametrize(
    "call, sqlstate",
    [
        ("awa.grant_access('nobody-knows', 'reader')", "42704"),
        ("awa.grant_access('public', 'reader')", "42704"),
        ("awa.grant_access(NULL, 'reader')", "22023"),
        ("awa.grant_access('postgres', NULL)", "22023"),
        ("awa.grant_access('postgres', 'god')", "22023"),
        ("awa.grant_access('postgres', 'reader', '{a,NULL}')", "22023"),
        ("awa.grant_access('postgres', 'reader', ARRAY[''])", "23514"),
        ("awa.revoke_access('nobody-knows')", "42704"),
        ("awa.revoke_access(NULL)", "22023"),
    ],
)
def test_bad_grants(db, call, sqlstate):
    with raises(sqlstate):
        db.execute(f"SELECT {call}")
    assert db.rows("SELECT * FROM awa.queue_acl") == []


def test_a_hostile_path_is_of_no_use(db, role):
    """The grant runs as the owner: no operator or function of the caller's path takes part."""
    conn = role()
    db.execute("CREATE SCHEMA evil")
    db.execute("CREATE FUNCTION evil.format(text, text) RETURNS text LANGUAGE sql AS $$ SELECT 1/0 $$")
    db.execute("CREATE FUNCTION evil.f(oid, oid) RETURNS boolean LANGUAGE sql AS 'SELECT (1/0)::boolean'")
    db.execute("CREATE OPERATOR evil.= (LEFTARG = oid, RIGHTARG = oid, FUNCTION = evil.f)")
    db.execute("SET search_path = evil, pg_catalog")
    db.execute("SELECT awa.grant_access(%s, 'producer')", conn.name)
    conn.execute("SELECT awa.insert_job('k')")


def test_runtimes_are_of_who_registered_them(db, role):
    one, other = role("worker"), role("worker")
    runtime = one.value("SELECT awa.register_runtime('w', 'heartbeat')")
    db.insert()
    (receipt,) = one.column("SELECT receipt FROM awa.claim('default', runtime => %s)", runtime)
    refused(other, "awa.heartbeat(%s)", runtime)
    refused(other, "awa.heartbeat(%s, '{}')", runtime)
    refused(other, "awa.deregister_runtime(%s)", runtime)
    assert one.rows("SELECT * FROM awa.heartbeat(%s, %s)", runtime, [receipt]) == []
    one.execute("SELECT awa.complete(%s)", (receipt,))
    assert one.value("SELECT awa.deregister_runtime(%s)", runtime) == 0
