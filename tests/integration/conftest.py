"""Runs of the whole pipeline, small enough for a test.

The run that most tests look at is started as a person starts it; others are forks of a process with all libraries.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from csc.cli import main
from csc.data.ingest.digits import ingest_digits
from tests.faults.starter import finished

SMALL = (
    "train.epochs=2",
    "train.batch_size=32",
    "input.size=32",
    "backbone.name=test_byobnet",
    "cigcn.width=16",
)


def command(*words, settings=SMALL):
    """The command line of `csc`, with the settings of a small run."""
    sets = [word for setting in settings for word in ("--set", setting)] if words[0] == "run" else []
    return [sys.executable, "-m", "csc", *map(str, words), *sets]


def environment():
    """Our environment without a tracking server, so that the work folder's own database is used."""
    hidden = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID")
    return {key: value for key, value in os.environ.items() if key not in hidden}


def csc(*words, settings=SMALL, folder=""):
    """Run `csc` to its end, in a process that has its libraries."""
    return finished(command(*words, settings=settings), environment(), str(folder))


def inside(*words):
    """Run `csc` to its end in this process, where what it needs is loaded; not for what ends or leaves processes."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setenv("MLFLOW_TRACKING_URI", "")  # the command names its work folder's there
        code = main([*map(str, words)])
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def last_results(workdir):
    """The metrics of all tasks, from the newest record of the last task."""
    records = sorted(Path(workdir, "pipeline").rglob("registered"), key=lambda path: path.stat().st_mtime)
    return [task["metrics"] for task in json.loads(records[-1].read_text())["run"]["tasks"]]


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """A small digits data set: 10 classes, enough images for three tasks."""
    return ingest_digits(tmp_path_factory.mktemp("data") / "digits", train=160, test=60, size=32).path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, scenes):
    """A finished run of a scenario with three tasks, the last one smaller: its work folder and what it printed."""
    workdir = Path(tmp_path_factory.mktemp("undisturbed"))
    words = command("run", "digits-b0c4", "--data", scenes, "--workdir", workdir)
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return workdir, done.stdout
