"""Two studies that share a machine: side by side they take no longer than one after the other.

Threads that wait for work must not spin for it: they take the cores from the other study. `csc` sets OMP_WAIT_POLICY to
PASSIVE unless the user did; what ACTIVE would cost is printed next to it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import Result
from csc.data.ingest.digits import ingest_digits
from csc.errors import CscError

__all__ = ["sharing"]

GOAL = 1.1
LONGEST = 2  # times as long as one after the other: then two that spin are stopped
SETTINGS = ("train.epochs=6",)


def sharing() -> list[Result]:
    """Run two small studies of digits one after the other, side by side, and side by side with threads that spin."""
    with tempfile.TemporaryDirectory(prefix="csc-bench-") as name:
        root = Path(name)
        data = ingest_digits(root / "data", train=800, test=200).path
        _studies(root, data, ["warm"])  # compiles, and fills the caches of the disk
        after = sum(_studies(root, data, [study]) for study in ("first", "second"))
        together = _studies(root, data, ["third", "fourth"])
        spinning = _studies(root, data, ["fifth", "sixth"], "ACTIVE", LONGEST * after)
    stopped = ", stopped" if spinning >= LONGEST * after else ""
    limit = f"one after the other ({after:.0f} s)"
    return [
        Result("sharing", "two studies side by side", together / after, GOAL, limit, "lower"),
        Result("sharing", f"the same with OMP_WAIT_POLICY=ACTIVE{stopped}", spinning / after, None, limit, "lower"),
    ]


def _studies(root: Path, data: Path, names: list[str], policy: str = "", longest: float | None = None) -> float:
    """Run studies at the same time; return the seconds until the last has ended, or was stopped."""
    hidden = ("MLFLOW_TRACKING_URI", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    started, studies = time.perf_counter(), []
    for name in names:
        words = [sys.executable, "-m", "csc", "study", "digits", "--scenarios", "digits-b0c5", "--methods", "csc"]
        words += ["--seeds", "0", "--data", str(data), "--workdir", str(root / name), *sets]
        with (root / f"{name}.log").open("wb") as log:
            studies.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    try:
        for name, study in zip(names, studies, strict=True):
            left = longest and max(0.0, longest - (time.perf_counter() - started))
            if study.wait(left):
                raise CscError(f"bench sharing: a study failed: {(root / f'{name}.log').read_text()[-300:]}")
    except subprocess.TimeoutExpired:
        pass
    finally:
        for study in studies:
            study.terminate()
            study.wait()
    return time.perf_counter() - started
