"""The tour of the README, as a user would type it."""

import re
import subprocess
from pathlib import Path

from harness import Database

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_tour(server):
    blocks = re.findall(r"^```sql\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    database = Database(server, "readme", extension=False)
    try:
        done = subprocess.run(
            [server.bin / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-d", database.conninfo()],
            input="\n".join(blocks), capture_output=True, text=True, timeout=60,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert database.column("SELECT recipient FROM sent_mails") == ["boss@example.org"]
        stats = database.row(
            "SELECT scheduled, available, running, retryable, completed_total, failed_total"
            " FROM awa.queue_stats WHERE queue = 'mail'"
        )
        # Tomorrow's, none, none, the one that failed, boss and the last batch, no such address.
        assert tuple(stats) == (1, 0, 0, 1, 3, 1)
        database.check()
    finally:
        database.close_sessions()
        database.drop()
