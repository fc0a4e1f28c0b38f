"""The harness itself: what every other test stands on."""

import signal

import psycopg
import pytest

from harness import Server, kill_backend, wait_until
from harness.session import alive


@pytest.fixture
def plain_server(new_server):
    return new_server({"shared_preload_libraries": ""})


def test_a_server_is_private_and_leaves_nothing_behind():
    server = Server({"shared_preload_libraries": ""}).init().start()
    with server.connect() as conn:
        data = conn.value("SHOW data_directory")
        assert data == str(server.data)
        assert conn.value("SELECT count(*) FROM pg_available_extensions WHERE name = 'awa'") == 1
    family = server.processes()
    server.destroy()
    assert not any(map(alive, family))
    assert not server.home.exists()


def test_crash_and_kill_recover(plain_server):
    with plain_server.connect() as conn:
        conn.execute("CREATE TABLE t AS SELECT 1 AS x")
    plain_server.crash()
    with plain_server.connect() as conn:
        assert conn.value("SELECT x FROM t") == 1
    plain_server.kill_postmaster()
    plain_server.start()
    with plain_server.connect() as conn:
        assert conn.value("SELECT x FROM t") == 1


def test_killing_a_backend_restarts_the_server_processes(plain_server):
    victim, other = plain_server.connect(), plain_server.connect()
    kill_backend(victim.pid, signal.SIGKILL)
    with pytest.raises(psycopg.OperationalError):
        wait_until(lambda: other.value("SELECT 1") != 1, 5)
    plain_server.wait_ready()


def test_a_standby_can_be_promoted(plain_server):
    standby = plain_server.make_standby().start()
    try:
        with standby.connect() as conn:
            assert conn.value("SELECT pg_is_in_recovery()")
            standby.promote()
            assert not conn.value("SELECT pg_is_in_recovery()")
    finally:
        standby.destroy()
