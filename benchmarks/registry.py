"""A tracking server that many runs share: 200 runs of tasks that log to it at once, and a registry of 5,000 versions.

What matters is that nothing grows with what others have stored, so each number is compared with the same in a store
that is nearly empty. `tests/unit/test_many_versions.py` counts what is asked of the server.
"""

import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from pathlib import Path

from benchmarks import Result
from benchmarks.steps import make_labels, make_model, run_steps
from csc.data.dataset import Dataset
from csc.data.ingest.coco import COCO_CLASSES
from csc.scenario import Scenario

__all__ = ["add_versions", "registry"]

VERSIONS, RUNS, PROCESSES, EPOCHS = 5_000, 200, 4, 10
SCENARIO, MODEL = "coco-b0c40", "coco-b0c40-csc"
START_SECONDS = 120


def registry() -> list[Result]:
    """Compare a full registry with an empty one, and the last of many runs with the first."""
    with tempfile.TemporaryDirectory(prefix="csc-bench-") as folder:
        return [*_versions(Path(folder)), *_runs(Path(folder))]


def _versions(root: Path) -> list[Result]:
    """Register two tasks, look the model before up, and show the run, before and after others have stored theirs."""
    database = root / "mlflow.db"
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{database}"
    dataset = make_labels(root / "set", train=400, test=200)
    run_steps(root / "warm", SCENARIO, dataset, seed=0)  # imports, and makes the tables
    empty = _timed(root / "empty", dataset, seed=1)
    add_versions(database, MODEL, VERSIONS)
    full = _timed(root / "full", dataset, seed=2)
    return [
        Result("registry", f"{what}, {VERSIONS:,} versions", full[what] / empty[what], None,
               f"with 4 versions ({1000 * empty[what]:.0f} ms)", "lower")
        for what in full
    ]  # fmt: skip


def _timed(root: Path, dataset: Dataset, seed: int) -> dict[str, float]:
    from csc.tracking.registry import find_registered_task, point_aliases
    from csc.tracking.tracked_run import find_run

    seconds = {"register a task": run_steps(root, SCENARIO, dataset, seed)["register"] / 2}
    key = ""

    def show() -> None:
        nonlocal key
        found = find_run(f"{SCENARIO}-csc")
        key = found.config.run_key(SCENARIO, dataset.fingerprint, "bench")

    calls: dict[str, Callable[[], object]] = {
        "csc show": show,
        "look up the model before": lambda: find_registered_task(MODEL, 1, key),
        "point the aliases of a finished run": lambda: point_aliases(MODEL, key),
    }
    for name, call in calls.items():
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - started)
        seconds[name] = best
    return seconds


def add_versions(database: Path, name: str, count: int) -> None:
    """Add versions of other runs to a registered model, as MLflow stores them; by its API it would take minutes."""
    with closing(sqlite3.connect(database)) as connection, connection:
        (first,) = connection.execute("SELECT max(version) FROM model_versions WHERE name = ?", (name,)).fetchone()
        columns = [column for _, column, *_ in connection.execute("PRAGMA table_info(model_versions)")]
        taken = ", ".join(columns)
        other = ", ".join({"version": "?", "run_id": "?"}.get(column, column) for column in columns)
        like = f"INSERT INTO model_versions ({taken}) SELECT {other} FROM model_versions WHERE name = ? AND version = ?"
        tags = (
            "INSERT INTO model_version_tags (workspace, name, version, key, value) SELECT workspace, name, ?, key, "
            "CASE WHEN key IN ('csc.run_key', 'csc.fingerprint') THEN ? ELSE value END "
            "FROM model_version_tags WHERE name = ? AND version = ?"
        )
        for number in range(first + 1, first + 1 + count):
            connection.execute(like, (number, f"{number:032x}", name, first))
            connection.execute(tags, (number, f"{number:064x}", name, first))


def _runs(root: Path) -> list[Result]:
    """Many tasks that train at the same time tell one server of their epochs."""
    with _server(root) as uri:
        os.environ["MLFLOW_TRACKING_URI"] = uri
        each = RUNS // PROCESSES
        context = get_context("spawn")
        with context.Pool(PROCESSES) as pool:
            given = [(str(root / f"process-{number}"), number * each, each) for number in range(PROCESSES)]
            seconds = pool.starmap(_log_runs, given)
        points = _points()
    tenth = each // 10
    parts = (slice(tenth), slice(-tenth, None))
    first, last = (1000 * sum(sum(one[part]) for one in seconds) / (PROCESSES * tenth) for part in parts)
    case = f"to log an epoch, as one of the last of {RUNS} runs, {PROCESSES} at a time ({last:.0f} ms)"
    lost = [EPOCHS] * (RUNS - len(points)) + [max(0, EPOCHS - count) for count in points]
    doubled = [max(0, count - EPOCHS) for count in points]
    return [
        Result("registry", case, last / first, None, f"as one of the first ({first:.0f} ms)", "lower"),
        Result("registry", f"epochs of {RUNS} runs that were lost", sum(lost), 0, f"of {RUNS * EPOCHS:,}", "lower"),
        Result("registry", f"epochs of {RUNS} runs that are there twice", sum(doubled), 0, "none", "lower"),
    ]


def _log_runs(folder: str, first: int, count: int) -> list[float]:
    """Log some runs of tasks as the train step does; return the mean seconds of an epoch of each."""
    from csc.tracking.runs import Tracker

    tasks = Scenario.parse("coco-b0c5").tasks(sorted(COCO_CLASSES))
    seconds = []
    for number in range(first, first + count):
        task = tasks[number % len(tasks)]
        card = make_model(Path(folder) / str(number), "coco-b0c5", task, "d" * 64, seed=number // len(tasks))
        tracker = Tracker(card)
        tracker.log_inputs({"train": ("train.parquet", 10)}, None)
        started = time.perf_counter()
        for epoch in range(EPOCHS):
            tracker.log_epoch(epoch, {"loss": 1.0, "ce": 0.5})
        seconds.append((time.perf_counter() - started) / EPOCHS)
    return seconds


def _points() -> list[int]:
    """How many losses the server has of each task."""
    from csc.tracking.server import connect

    client = connect()
    experiment = client.get_experiment_by_name("csc-coco")
    found = client.search_runs([experiment.experiment_id], "tags.`csc.role` = 'task'", max_results=1000)
    return [len(client.get_metric_history(run.info.run_id, "train/loss")) for run in found]


@contextmanager
def _server(root: Path) -> Iterator[str]:
    """An MLflow server with a database of its own."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "2"]
    store = ["--backend-store-uri", f"sqlite:///{root}/server.db", "--artifacts-destination", str(root / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (root / "server.log").open("wb") as log:
        server = subprocess.Popen([*command, *store], stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > end or server.poll() is not None:
                    raise RuntimeError((root / "server.log").read_text()[-2000:]) from None
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 15)
        server.wait()
