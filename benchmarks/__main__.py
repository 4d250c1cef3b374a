"""`python -m benchmarks [NAME …] [--json FILE]`: measure, and print the ratios next to their goals."""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence

from benchmarks import BENCHES, Result, run
from csc.errors import CscError
from csc.storage import local_path, write_json

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; exit code 1 if a goal is missed, 2 if something could not be measured."""
    parser = ArgumentParser(prog="benchmarks", description="Speed as ratios to named limits.")
    known = "; ".join(f"{name}: {what}" for name, what in BENCHES.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones (default: all). {known}")
    parser.add_argument("--json", metavar="FILE", help="write the results as a list of objects")
    wanted = parser.parse_args(arguments)
    if unknown := [name for name in wanted.names if name not in BENCHES]:
        parser.error(f"no benchmark '{unknown[0]}'; choose from {', '.join(BENCHES)}")
    results: list[Result] = []
    try:
        for name in wanted.names or BENCHES:
            started = time.monotonic()
            found = run(name)
            print(f"{name} · {BENCHES[name]} · {time.monotonic() - started:.0f} s\n{_table(found)}\n", flush=True)
            results += found
            if wanted.json:  # now, as the next one may fail
                write_json(local_path(wanted.json), [result.to_json() for result in results])
    except CscError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    missed = [f"{result.bench} ({result.case})" for result in results if not result.met]
    print(f"missed: {', '.join(missed)}" if missed else "all goals reached")
    return 1 if missed else 0


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


if __name__ == "__main__":
    sys.exit(main())
