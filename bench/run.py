#!/usr/bin/env python3
"""Runs the cells of the benchmark, round by round.

    make bench                                    all of them, some hours
    make bench-quick                              all of them small: are the counts right?
    .venv/bin/python bench/run.py --cells drain,mixed --scale 0.1 --rounds 3
    .venv/bin/python bench/run.py --cells idle --minutes 1
    .venv/bin/python bench/run.py --list
"""

import argparse
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import cells, report  # noqa: E402
from bench.measure import Round  # noqa: E402
from bench.rig import Rig, clear_away  # noqa: E402

QUICK_SCALE, QUICK_MINUTES, WARM_UP = 0.01, 0.05, 0.1


def run_cell(cell, options):
    """Its results; an exception where a run did not do what it was to do."""
    minutes = cell.minutes if options.minutes is None else options.minutes
    minutes = minutes if cell.minutes else None
    rounds = min(options.rounds, cell.rounds)
    rig = Rig(cell.settings)
    try:
        if not options.quick:
            print("  warm-up", flush=True)
            run_round(cell, rig, 0, options.scale * WARM_UP, minutes and minutes * WARM_UP)
        done = []
        for number in range(1, rounds + 1):
            print(f"  round {number} of {rounds}", flush=True)
            done.append(run_round(cell, rig, number, options.scale, minutes))
        rig.check()
        facts = report.run_facts(
            rig.conn.value("SHOW server_version").split()[0], options.scale, rounds, minutes)
        return report.summary(done), facts
    finally:
        rig.destroy()


def run_round(cell, rig, number, scale, minutes):
    round_ = Round(rig, number, scale, minutes, warming=number == 0)
    cell.run(round_)
    rig.settle()
    return round_.figures


def main():
    options = parse()
    # A plain kill must run the exit handlers that stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    clear_away()
    print(f"{report.machine()}, {time.strftime('%F %T %Z')}", flush=True)
    start, failed = time.monotonic(), []
    for name in options.cells:
        cell = cells.CELLS[name]
        print(f"{name}: {cell.what}", flush=True)
        began = time.monotonic()
        try:
            results, facts = run_cell(cell, options)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        if options.out:
            report.write(options.out, cell, results, facts)
    if options.write_docs:
        report.write_docs(options.out, cells.CELLS)
    print(f"bench: {len(options.cells) - len(failed)} cells passed, {len(failed)} failed"
          f"{': ' + ', '.join(failed) if failed else ''} in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


def parse():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", help="names with commas between them; all by default")
    options.add_argument("--scale", type=float, help="of the number of jobs, 1 by default")
    options.add_argument("--rounds", type=int, help="3 by default")
    options.add_argument("--minutes", type=float, help="of the cells that are bound by time")
    options.add_argument("--quick", action="store_true", help="one small round, keeps no results")
    options.add_argument("--out", help="folder for the results, bench/results by default")
    options.add_argument("--write-docs", action="store_true", help="into docs/performance.md")
    options.add_argument("--list", action="store_true", help="what the cells do")
    chosen = options.parse_args()
    if chosen.list:
        for cell in cells.CELLS.values():
            print(f"{cell.name:<12} {cell.what}")
        sys.exit(0)
    quick = chosen.quick
    chosen.cells = chosen.cells.split(",") if chosen.cells else list(cells.CELLS)
    for name in chosen.cells:
        if name not in cells.CELLS:
            options.error(f"no cell {name}: there are {', '.join(cells.CELLS)}")
    chosen.scale = chosen.scale or (QUICK_SCALE if quick else 1.0)
    chosen.rounds = chosen.rounds or (1 if quick else 3)
    chosen.minutes = chosen.minutes or (QUICK_MINUTES if quick else None)
    chosen.out = chosen.out or (None if quick else report.RESULTS)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
