"""Rounds into results: median and range, a JSON file a cell, and the table in the docs."""

import datetime
import json
import os
import statistics
from pathlib import Path

from . import ROOT
from .measure import show

RESULTS = ROOT / "bench/results"
DOCS = ROOT / "docs/performance.md"
BEGIN, END = "<!-- written by bench/run.py -->", "<!-- end -->"
COSTS = ("wal_bytes_per_job", "commits_per_job", "cpu_us_per_job", "dead_tuples")


def summary(rounds):
    """[[Figure]], a list a round, into one dict a figure."""
    names = list(dict.fromkeys(figure.name for figures in rounds for figure in figures))
    return [_over_rounds(name, rounds) for name in names]


def _over_rounds(name, rounds):
    found, shares = [], []
    for figures in rounds:
        by_name = {figure.name: figure for figure in figures}
        figure = by_name[name]
        found.append(figure)
        beside = by_name.get(figure.beside)
        if beside:
            shares.append(figure.values["per_second"] / beside.values["per_second"])
    last = found[-1]
    result = {
        "name": name, "client": last.client, "jobs": last.jobs, "beside": last.beside,
        "values": {key: _spread([f.values[key] for f in found]) for key in last.values},
    }
    if shares:
        result["of_bare"] = _spread(shares)
    if last.series:
        result["series"] = last.series
    return result


def _spread(values):
    return {
        "median": _round(statistics.median(values)), "min": _round(min(values)),
        "max": _round(max(values)),
    }


def _round(value):
    return round(value, 4 if abs(value) < 10 else 1)


def write(folder, cell, results, run):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"cell": cell.name, "what": cell.what} | run | {"results": results}, indent=1)
    (folder / f"{cell.name}.json").write_text(text + "\n")


def run_facts(server_version, scale, rounds, minutes):
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(), "postgres": server_version, "scale": scale, "rounds": rounds,
        "minutes": minutes, "build": os.environ["AWA_FLAVOUR"],
    }


def machine():
    lines = Path("/etc/os-release").read_text().splitlines()
    system = dict(line.split("=", 1) for line in lines if "=" in line)
    name, version = (system.get(key, "").strip('"') for key in ("ID", "VERSION_ID"))
    return f"{os.cpu_count()} cores, {name.capitalize()} {version}"


# The table

def write_docs(folder, cells):
    """Puts the results of all cells that have some between the markers of the docs."""
    text = DOCS.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise RuntimeError(f"{DOCS} lacks the markers {BEGIN} and {END}")
    parts = [_section(path) for cell in cells if (path := Path(folder) / f"{cell}.json").exists()]
    DOCS.write_text(f"{before}{BEGIN}\n\n{''.join(parts)}{END}{after}")


def _section(path):
    cell = json.loads(path.read_text())
    facts = f"{cell['machine']}, PostgreSQL {cell['postgres']}, {cell['date'][:10]}"
    facts += f", rounds: {cell['rounds']}"
    facts += f", scale {cell['scale']:g}" if cell["scale"] != 1 else ""
    facts += f", minutes: {cell['minutes']:g}" if cell["minutes"] else ""
    rates = [r for r in cell["results"] if "per_second" in r["values"]]
    others = [r for r in cell["results"] if "per_second" not in r["values"]]
    lines = [f"### {cell['cell']}", "", f"{cell['what']} ({facts}.)", ""]
    if rates:
        lines += [
            "| | client | jobs | a second: median (range) | of bare | WAL, B a job |"
            " commits a job | CPU, us a job | dead tuples |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
            *map(_rate_line, rates), "",
        ]
    if others:
        lines += ["| | client | |", "|---|---|---|", *map(_other_line, others), ""]
    for result in cell["results"]:
        if "series" in result:
            lines += [*_series_lines(result), ""]
    return "\n".join(lines) + "\n"


def _rate_line(result):
    values = result["values"]
    costs = [show(values[key]["median"]) if key in values else "" for key in COSTS]
    share = _with_range(result["of_bare"]) if "of_bare" in result else ""
    cells = [result["name"], result["client"], f"{result['jobs']:,}",
             _with_range(values["per_second"]), share, *costs]
    return f"| {' | '.join(cells)} |"


def _other_line(result):
    said = "; ".join(f"{key.replace('_', ' ')} {_with_range(value)}"
                     for key, value in result["values"].items())
    return f"| {result['name']} | {result['client']} | {said} |"


def _series_lines(result):
    keys = list(result["series"][0])
    return [
        f"{result['name']}, part by part:", "",
        f"| {' | '.join(key.replace('_', ' ') for key in keys)} |", "|---:" * len(keys) + "|",
        *(f"| {' | '.join(show(part[key]) for key in keys)} |" for part in result["series"]),
    ]


def _with_range(spread):
    middle = show(spread["median"])
    if spread["min"] == spread["max"]:
        return middle
    return f"{middle} ({show(spread['min'])}..{show(spread['max'])})"
