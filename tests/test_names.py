"""Queue names, kinds and tags: any text within the limits, and the limits."""

import pytest

from harness import raises

NAMES = [
    "q", " ", "a b", "Ünïcødé", "日本語", "😀" * 200, "x" * 200, "é" * 200, "'; DROP TABLE jobs; --",
    '"quoted"', "back\\slash", "per%cent_under", "awa", "default.queue:1/2", "NULL", "{a,b}", "a*",
]
CONTROL = ["\n", "a\tb", "\x01", "a\x1f", "\x7f"]


@pytest.mark.parametrize("name", NAMES)
def test_any_text_works_everywhere(db, name):
    job_id = db.value("SELECT awa.insert_job(%s, queue => %s, tags => %s)", name, name, [name])
    listed, = db.insert(queue=name, kind=name)
    db.execute("SELECT awa.prepare_queue(%s)", name)
    assert db.value("SELECT available FROM awa.queue_stats WHERE queue = %s", name) == 2
    assert db.value("CALL awa.wait_for_jobs(%s, '0')", [name]) is True
    jobs = db.claim(name, 2)
    assert [(job.job_id, job.queue, job.kind) for job in jobs] == [
        (job_id, name, name), (listed, name, name),
    ]
    assert jobs[0].tags == [name]
    found = db.job(job_id)
    assert (found.queue, found.kind, found.tags) == (name, name, [name])
    db.rows("SELECT * FROM awa.complete_many(%s)", [job.receipt for job in jobs])


@pytest.mark.parametrize("argument", ["kind", "queue"])
@pytest.mark.parametrize("name", ["", "x" * 201, "é" * 201, *CONTROL])
def test_refused_on_insert(db, argument, name):
    call = {"kind": "insert_job(%s)", "queue": "insert_job('k', queue => %s)"}[argument]
    with raises("23514"):
        db.execute(f"SELECT awa.{call}", name)
    assert db.value("SELECT count(*) FROM awa.jobs") == 0


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb"])
@pytest.mark.parametrize("call", ["prepare_queue", "pause_queue"])
def test_refused_where_a_queue_is_made(db, call, name):
    with raises("23514"):
        db.execute(f"SELECT awa.{call}(%s)", name)
    assert db.rows("SELECT * FROM awa.queue_stats") == []


def test_case_and_trailing_space_tell_queues_apart(db):
    names = ["q", "Q", "q ", " q"]
    for name in names:
        db.insert(queue=name)
    for name in names:
        assert [job.queue for job in db.claim(name, 10)] == [name]


@pytest.mark.parametrize("unit", ["x", "é", "日"])
def test_long_names_never_collide(db, unit):
    """Neither by a cut, nor by anything hashed."""
    names = [unit * 199 + last for last in "abc"] + [unit * 62 + "1", unit * 62 + "2", unit * 63]
    for number, name in enumerate(names):
        db.insert(number + 1, queue=name)
    for number, name in enumerate(names):
        assert len(db.claim(name, 100)) == number + 1
        assert db.value("SELECT running FROM awa.queue_stats WHERE queue = %s", name) == number + 1


def test_tags(db):
    many = [f"t{n}" for n in range(20)]
    job_id = db.value("SELECT awa.insert_job('k', tags => %s)", many)
    assert db.job(job_id).tags == many
    with raises("23514"):
        db.execute("SELECT awa.insert_job('k', tags => %s)", [*many, "one too many"])


def test_unpause_of_a_queue_that_is_not_there(db):
    with raises("P0002"):
        db.execute("SELECT awa.resume_queue('nobody used it')")


def test_many_queues(db):
    """More lanes than any cache of them would hold by accident."""
    db.execute(
        "SELECT awa.insert_job('k', queue => 'q' || n) FROM generate_series(1, 1500) n"
    )
    assert db.value("SELECT count(*) FROM awa.queue_stats") == 1500
    for number in (1, 750, 1500):
        assert len(db.claim(f"q{number}", 10)) == 1
