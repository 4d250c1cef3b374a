"""`csc bench`: measure, print the ratios beside their goals, and keep them for the report."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from csc.bench import BENCHES, Result, run
from csc.command import Command
from csc.errors import BadData
from csc.storage import local_path, read_json, write_json

__all__ = ["BENCH", "RECORD"]

RECORD = "bench.json"  # in the work folder


def _arguments(parser: ArgumentParser) -> None:
    known = "; ".join(f"{name}: {what}" for name, what in BENCHES.items())
    parser.add_argument("names", nargs="*", metavar="BENCH", help=f"which ones (default: all). {known}")
    parser.add_argument("--json", metavar="FILE", help="write the results as a list of objects")
    parser.add_argument("--workdir", default="work", metavar="DIR", help="folder of runs and results (default: work)")


def _bench(arguments: Namespace) -> int:
    if unknown := [name for name in arguments.names if name not in BENCHES]:
        raise BadData(f"csc bench {unknown[0]}: no such bench; choose from {', '.join(BENCHES)}")
    results: list[Result] = []
    kept = local_path(arguments.workdir) / RECORD
    for name in arguments.names or BENCHES:
        started = time.monotonic()
        found = run(name)
        print(f"{name} · {BENCHES[name]} · {time.monotonic() - started:.0f} s\n{_table(found)}\n", flush=True)
        results += found
        if arguments.json:  # now, as the next bench may fail
            write_json(local_path(arguments.json), [result.to_json() for result in results])
        _keep(name, found, kept)
    missed = [f"{result.bench} ({result.case})" for result in results if not result.met]
    print(f"missed: {', '.join(missed)}" if missed else "all goals reached")
    print(f"kept in {kept}; the next report of a run shows them")
    return 1 if missed else 0


def _keep(name: str, found: Sequence[Result], kept: Path) -> None:
    """Put the results of a bench in place of its earlier ones; those of other benches stay."""
    earlier = read_json(kept) if kept.is_file() else []
    others = [record for record in earlier if record["bench"] != name]
    write_json(kept, others + [result.to_json() for result in found])


def _table(results: Sequence[Result]) -> str:
    """One line per result: what was measured, the ratio, its goal and what it compares to."""
    rows = [("case", "ratio", "goal", "", "relative to")]
    for result in results:
        sign = ">=" if result.better == "higher" else "<="
        goal = f"{sign} {result.goal:g}" if result.goal is not None else ""
        verdict = "" if result.goal is None else "ok" if result.met else "MISSED"
        rows.append((result.case, f"{result.ratio:.3g}", goal, verdict, result.limit))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


BENCH = Command("measure speed as ratios to named limits", _arguments, _bench)
