"""Measures awa beside bare tables; see README.md."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The harness of the tests makes the servers.
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("AWA_FLAVOUR", "release")
