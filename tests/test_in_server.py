"""The tests of pgrx-tests/, which run inside the server: each is a function of the test
build, called in a transaction that is rolled back."""

from pathlib import Path

import pytest

TESTS = sorted(
    line.split("fn ")[1].split("(")[0]
    for file in (Path(__file__).parent.parent / "pgrx-tests").glob("*.rs")
    for before, line in zip(["", *file.read_text().splitlines()], file.read_text().splitlines())
    if "#[pg_test" in before
)


def test_every_one_is_installed(db):
    installed = db.column(
        "SELECT proname::text FROM pg_proc WHERE pronamespace = 'tests'::regnamespace"
    )
    assert sorted(installed) == TESTS


@pytest.mark.parametrize("name", TESTS)
def test_in_server(db, name):
    conn = db.connect()
    conn.begin()
    conn.execute(f"SELECT tests.{name}()")
    conn.rollback_sql()
