"""Watches a step of the pipeline from inside its process and notes where its time goes, for the pipeline benchmark.

`install` is called by the interpreter before anything else (a `sitecustomize` on the path). It times imports by the
package they belong to, calls to MLflow, and computing; the rest of a process is called other.
"""

import atexit
import builtins
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["install"]

PACKAGES = ("torch", "timm", "torchvision", "mlflow", "kfp", "numpy", "pyarrow", "yaml", "PIL", "safetensors")
WATCHED = {  # what a step spends its time on, by where it is implemented
    "csc.tracking.registry": ("tracking", ["fetch_model", "keep_registered_task", "log_model", "register_version"]),
    "csc.tracking.runs": ("tracking", ["finish_scenario", "Tracker"]),
    "csc.serving.packaging": ("tracking", ["package_model"]),
    "csc.training.inference": ("computing", ["confidences"]),
    "csc.training.loop": ("computing", ["Trainer.run"]),
}


class _Times:
    """Seconds by purpose; a purpose inside another one counts once, to the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.open: list[str] = []  # purposes that are under way, the innermost last
        self.inner: list[float] = []  # of each of them, the seconds that inner ones took

    def timed(self, purpose: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        self.open.append(purpose)
        self.inner.append(0.0)
        try:
            return work(*arguments, **options)
        finally:
            whole = time.perf_counter() - started
            self.seconds[self.open.pop()] = self.seconds.get(purpose, 0.0) + whole - self.inner.pop()
            if self.inner:
                self.inner[-1] += whole


def install(folder: str) -> None:
    """Watch this process if it runs a step; its record goes into `folder` when it ends."""
    if not any("executor_main" in word for word in sys.orig_argv):
        return
    times, started = _Times(), _process_start()
    times.seconds["interpreter"] = time.time() - started
    original = builtins.__import__
    watched: set[str] = set()

    def timed_import(name: str, *arguments: Any, **options: Any) -> ModuleType:
        root = name.partition(".")[0]
        purpose = f"import {root}" if root in PACKAGES else "other imports"
        if times.open and times.open[-1].startswith("import "):  # what a package imports is part of it
            return original(name, *arguments, **options)
        module: ModuleType = times.timed(purpose, original, name, *arguments, **options)
        for target in WATCHED.keys() - watched:
            if getattr(getattr(sys.modules.get(target), "__spec__", None), "_initializing", True) is False:
                watched.add(target)
                _watch(times, target)
        return module

    builtins.__import__ = timed_import
    atexit.register(_record, times, started, Path(folder))


def _process_start() -> float:
    """When this process was started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def _watch(times: _Times, target: str) -> None:
    purpose, names = WATCHED[target]
    for name in names:
        owner: Any = sys.modules[target]
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        found = getattr(owner, last)
        if isinstance(found, type):
            for attribute, value in list(vars(found).items()):
                if callable(value) and not attribute.startswith("_"):
                    setattr(found, attribute, _timed(times, purpose, value))
        else:
            setattr(owner, last, _timed(times, purpose, found))


def _timed(times: _Times, purpose: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **options: Any) -> Any:
        result = times.timed(purpose, function, *arguments, **options)
        return _drawn(times, purpose, result) if hasattr(result, "send") else result

    return wrapper


def _drawn(times: _Times, purpose: str, generator: Any) -> Any:
    """Time a generator while it works, not while it waits."""
    end = object()
    while (item := times.timed(purpose, next, generator, end)) is not end:
        yield item


def _record(times: _Times, started: float, folder: Path) -> None:
    step = sys.argv[sys.argv.index("--function_to_execute") + 1]
    seconds = times.seconds | {"other": time.time() - started - sum(times.seconds.values())}
    folder.joinpath(f"{started:.3f}-{step}.json").write_text(json.dumps({"step": step, "seconds": seconds}))
