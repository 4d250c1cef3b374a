"""What a task of the pipeline costs beyond computing: a small digits scenario, with every step watched from inside."""

import json
import os
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

from benchmarks import Result
from csc.errors import CscError

__all__ = ["pipeline"]

STEPS = ("split_labels", "build_dataset", "train", "evaluate", "register")
ALLOWED = ("interpreter", "import torch", "import timm", "import torchvision", "import mlflow", "computing")
TRANSITIVE_IMPORTS = {  # what those packages import themselves, whoever in a step comes first
    "import torch": ("import numpy",),
    "import timm": ("import PIL", "import safetensors", "import yaml"),
    "import mlflow": ("import numpy", "import pyarrow", "import yaml"),
}
SECONDS = 1.5  # that a task may cost beyond what is allowed
TASKS = 5


def pipeline() -> list[Result]:
    """Run digits-b0c2 with one epoch; print where the time of each step goes, and compare ours with the goal."""
    with tempfile.TemporaryDirectory(prefix="csc-bench-") as folder:
        records = _watched_run(Path(folder))
    purposes = sorted({name for seconds in records.values() for name in seconds}, key=lambda name: name not in ALLOWED)
    print("  seconds per task")
    print(f"  {'':<18}" + "".join(f"{step:>15}" for step in STEPS))
    for purpose in purposes:
        cells = "".join(f"{records[step].get(purpose, 0.0):>15.2f}" for step in STEPS)
        print(f"  {purpose:<18}{cells}")
    ours = {step: _ours(records[step]) for step in STEPS}
    limit = f"{SECONDS} s, all but interpreter, torch, timm, mlflow and computing"
    cases = [Result("pipeline", f"{step}, seconds of ours", ours[step], None, "per task", "lower") for step in STEPS]
    return [*cases, Result("pipeline", "a task, seconds of ours", sum(ours.values()), SECONDS, limit, "lower")]


def _ours(seconds: dict[str, float]) -> float:
    """What a step costs beyond what is allowed."""
    transitive = (names for package, names in TRANSITIVE_IMPORTS.items() if package in seconds)
    allowed = {*ALLOWED, *chain.from_iterable(transitive)}
    return sum(value for purpose, value in seconds.items() if purpose not in allowed)


def _watched_run(folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of each step by purpose, of the task where it was quickest; the first one has no model before it."""
    on_path, notes = folder / "on_path", folder / "notes"
    for path in (on_path, notes):
        path.mkdir()
    (on_path / "sitecustomize.py").write_text(f"from benchmarks.step_times import install\n\ninstall({str(notes)!r})\n")
    environment = {**os.environ, "PYTHONPATH": f"{on_path}{os.pathsep}{Path(__file__).parents[1]}"}
    for name in ("MLFLOW_TRACKING_URI", "PYTHONDONTWRITEBYTECODE"):  # steps find our code compiled, as installed
        environment.pop(name, None)
    command = [sys.executable, "-m", "csc", "run", "digits-b0c2", "--workdir", str(folder / "work")]
    done = subprocess.run(
        [*command, "--set", "train.epochs=1", "--runner", "subprocess"],  # as on a cluster, each in its own process
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CscError(f"bench pipeline: the run failed: {done.stderr.strip() or done.stdout[-300:]}")
    found: dict[str, list[dict[str, float]]] = {step: [] for step in STEPS}
    for path in sorted(notes.iterdir()):
        record = json.loads(path.read_text())
        found.setdefault(record["step"], []).append(record["seconds"])
    return {step: min(found[step][1:], key=_ours) for step in STEPS}
