"""Library and SQL of two versions: said at once, by every call and in the log."""

from harness import Database, raises

LIBRARY = "SELECT default_version FROM pg_available_extensions WHERE name = 'awa'"


def test_versions_that_do_not_match_say_so(own_server):
    db = Database(own_server)
    library = db.value(LIBRARY)
    db.insert(3)
    db.execute("UPDATE pg_extension SET extversion = '0.0.9' WHERE extname = 'awa'")
    db.close_sessions()
    own_server.restart()
    own_server.wait_log("awa does not serve this database", 20)
    for call in ("awa.insert_job('k')", "awa.claim('default')", "awa.jobs", "awa.check()",
                 "awa.complete(1)", "awa.queue_stats", "awa.grant_access('postgres', 'reader')"):
        with raises("55000", "ALTER EXTENSION awa UPDATE") as caught:
            db.execute(f"SELECT * FROM {call}")
        assert library in str(caught.error) and "0.0.9" in str(caught.error)
    # The same session goes on once they match.
    db.execute("UPDATE pg_extension SET extversion = %s WHERE extname = 'awa'", library)
    assert db.count() == 3
    db.insert(1)
    db.close_sessions()
    own_server.restart()
    db.wait_served()
    assert len(db.claim(max_jobs=9)) == 4
    db.check()


def test_another_version_can_be_dropped(own_server):
    db = Database(own_server)
    db.insert(3)
    db.execute("UPDATE pg_extension SET extversion = '0.0.9' WHERE extname = 'awa'")
    db.close_sessions()
    own_server.restart()
    db.execute("DROP EXTENSION awa")
    db.execute("CREATE EXTENSION awa")
    db.wait_served()
    db.insert(1)
    assert len(db.claim(max_jobs=9)) == 1
    db.check()
