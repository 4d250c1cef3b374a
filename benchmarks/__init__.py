"""Speed as ratios: each bench compares what this project does with a named limit, in one run on one machine.

A time says something about a machine, a ratio about the code. The variants of a comparison take turns and the best
round of each counts, so that whatever else the machine does hits all of them alike.
"""

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BENCHES", "Result", "interleaved", "run"]

BENCHES = {
    "load": "decode, resize and augment against a plain Pillow pipeline; how long training waits for data",
    "step": "a training step of CSC against the backbone's own passes and against the released form",
    "shortcuts": "folded batch-norms and an optimiser without torch's compiler, against the plain ones",
    "methods": "a training step of every method against its own passes, and against fine-tuning",
    "metrics": "all metrics of 40,137 x 80 scores against scikit-learn",
    "ingest": "a COCO-2014-sized annotation file against json.load; task views; peak memory",
    "steps": "all steps but training of 80 classes in 16 tasks, 122,920 labelled images: time, peak of memory",
    "registry": "200 runs that log to one MLflow server; a registry with 5,000 versions",
    "sharing": "two studies side by side against one after the other; threads that spin against those that do not",
    "pipeline": "what a task costs beyond computing, by step",
    "scale": "CI-GCN from 20 to 10,000 classes",
}


@dataclass(frozen=True)
class Result:
    """One measured ratio.

    Attributes:
        bench: name of the bench.
        case: what was measured, in a few words; no two results of a bench have the same.
        ratio: the number.
        goal: what it must reach; none where the number only informs.
        better: whether a `higher` or a `lower` ratio is better.
        limit: what the ratio compares to, in a few words.
    """

    bench: str
    case: str
    ratio: float
    goal: float | None
    limit: str
    better: Literal["higher", "lower"] = "higher"

    @property
    def met(self) -> bool:
        """Whether the goal is reached; a number without a goal always is."""
        if self.goal is None:
            return True
        return self.ratio >= self.goal if self.better == "higher" else self.ratio <= self.goal

    def to_json(self) -> dict[str, Any]:
        """The record that `--json` writes."""
        judged = {"ratio": self.ratio, "goal": self.goal, "met": self.met}
        return {"bench": self.bench, "case": self.case, **judged, "limit": self.limit}


def run(name: str) -> list[Result]:
    """Run one bench by name."""
    results: list[Result] = getattr(importlib.import_module(f"benchmarks.{name}"), name)()
    return results


def interleaved(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the best seconds of each variant: in every round all take their turn, after one round to warm up.

    >>> sorted(interleaved({"one": lambda: None, "other": lambda: None}, rounds=1))
    ['one', 'other']
    """
    best = dict.fromkeys(variants, float("inf"))
    for turn in range(rounds + 1):
        for name, work in variants.items():
            started = time.perf_counter()
            work()
            if turn:
                best[name] = min(best[name], time.perf_counter() - started)
    return best
