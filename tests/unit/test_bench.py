"""How ratios are judged, shown and kept; the benches themselves are run by hand."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import benchmarks
from benchmarks import BENCHES, Result, interleaved
from benchmarks.__main__ import main
from benchmarks.pipeline import TRANSITIVE_IMPORTS, _ours
from benchmarks.step_times import _Times
from csc.errors import CscError

FAST = Result("step", "fast", 2.0, 1.5, "a limit")
SLOW = Result("load", "slow", 1.0, 1.5, "a limit")
SMALL = Result("ingest", "small", 0.5, 2.0, "a limit", better="lower")
PLAIN = Result("load", "plain", 0.1, None, "a limit")


@pytest.mark.parametrize(
    ("ratio", "goal", "better", "met"),
    [
        (2.0, 1.5, "higher", True),
        (1.5, 1.5, "higher", True),
        (1.4, 1.5, "higher", False),
        (1.4, 1.5, "lower", True),
        (1.6, 1.5, "lower", False),
        (0.0, None, "higher", True),
    ],
)
def test_a_goal_is_met_from_its_own_side(ratio: float, goal: float | None, better: str, met: bool):
    assert Result("x", "y", ratio, goal, "z", better).met is met


def test_every_bench_has_a_module_with_a_function_of_its_name():
    import importlib

    for name in BENCHES:
        assert callable(getattr(importlib.import_module(f"benchmarks.{name}"), name))


def test_variants_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    best = interleaved({"one": lambda: calls.append("one"), "other": lambda: calls.append("other")}, rounds=2)
    assert calls == ["one", "other"] * 3
    assert all(0 <= seconds < 1 for seconds in best.values())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Result]]:
    found = {"step": [FAST], "load": [SLOW, PLAIN], "ingest": [SMALL]}
    monkeypatch.setattr("benchmarks.__main__.run", lambda name: found[name])
    return found


def test_all_goals_reached_ends_well_and_is_written(measured, tmp_path: Path, capsys):
    out = tmp_path / "bench.json"
    assert main(["step", "ingest", "--json", str(out)]) == 0
    assert json.loads(out.read_text()) == [
        {"bench": "step", "case": "fast", "ratio": 2.0, "goal": 1.5, "met": True, "limit": "a limit"},
        {"bench": "ingest", "case": "small", "ratio": 0.5, "goal": 2.0, "met": True, "limit": "a limit"},
    ]
    assert "all goals reached" in capsys.readouterr().out


def test_a_missed_goal_ends_with_exit_code_1_and_is_named(measured, capsys):
    assert main(["load"]) == 1
    output = capsys.readouterr().out
    assert "MISSED" in output
    assert "missed: load (slow)" in output


def test_what_was_measured_before_a_benchmark_failed_is_kept(measured, tmp_path: Path, monkeypatch):
    def run(name: str) -> list[Result]:
        if name == "load":
            raise CscError("bench load: no such pixels")
        return measured[name]

    monkeypatch.setattr("benchmarks.__main__.run", run)
    out = tmp_path / "out.json"
    assert main(["step", "ingest", "load", "--json", str(out)]) == 2
    assert json.loads(out.read_text()) == [FAST.to_json(), SMALL.to_json()]


def test_wrong_pixels_are_an_error_and_no_missed_goal(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("benchmarks.load.IMAGES", 1)
    monkeypatch.setattr("benchmarks.load.MEAN_DIFFERENCE", -1)
    assert main(["load"]) == 2
    assert re.fullmatch(r"benchmarks: .*fast decoding is off by .* at most\n", capsys.readouterr().err)


def unmeasured(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """The results of a bench whose variants all take a second, without their networks."""

    def a_second_each(variants: Iterable[str], rounds: int) -> dict[str, float]:
        return dict.fromkeys(variants, 1.0)

    monkeypatch.setattr(f"benchmarks.{name}._Case", MagicMock())
    monkeypatch.setattr("benchmarks.step._apart", MagicMock())
    monkeypatch.setattr(f"benchmarks.{name}.interleaved", a_second_each)
    return benchmarks.run(name)


@pytest.mark.parametrize("name", ["step", "methods"])
def test_a_record_says_which_ratio_it_is(name: str, monkeypatch: pytest.MonkeyPatch):
    results = unmeasured(name, monkeypatch)
    cases = [result.case for result in results]
    assert len(set(cases)) == len(cases)
    assert all(result.to_json()["limit"] for result in results)


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as end:
        main(["speed"])
    assert end.value.code == 2
    assert (
        "load, step, shortcuts, methods, metrics, ingest, steps, registry, sharing, pipeline, scale"
        in capsys.readouterr().err
    )


def test_a_purpose_inside_another_counts_once():
    times = _Times()
    times.timed("outer", lambda: [times.timed("inner", sum, range(100_000)) for _ in range(3)])
    assert set(times.seconds) == {"outer", "inner"}
    assert 0 <= times.seconds["outer"] < times.seconds["inner"]


def test_a_package_is_ours_only_where_nothing_else_brings_it():
    assert _ours({"import numpy": 1.0, "other": 0.5}) == 1.5
    assert _ours({"import numpy": 1.0, "import torch": 9.0, "computing": 7.0, "other": 0.5}) == 0.5
    assert _ours({"import pyarrow": 1.0, "import yaml": 2.0, "import torch": 9.0}) == 3.0
    assert _ours({"import pyarrow": 1.0, "import yaml": 2.0, "import mlflow": 9.0}) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("bringers", [("import torch", "import timm"), ("import mlflow",)], ids=str)
def test_what_is_said_to_be_brought_is_brought(bringers: tuple[str, ...]):
    """timm imports torch itself: after torch, it leaves what it leaves alone."""
    code = "import sys\n" + "\n".join(f"{bringer}; print(*sys.modules)" for bringer in bringers)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for bringer, found in zip(bringers, printed.splitlines(), strict=True):
        assert {name.removeprefix("import ") for name in TRANSITIVE_IMPORTS[bringer]} <= set(found.split())


def test_every_package_that_brings_others_is_tried():
    assert TRANSITIVE_IMPORTS.keys() == {"import torch", "import timm", "import mlflow"}


def test_running_a_bench_by_name_calls_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.metrics.metrics", lambda: [FAST])
    assert benchmarks.run("metrics") == [FAST]
