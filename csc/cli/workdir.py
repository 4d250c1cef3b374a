"""The work folder: where runs of this machine, their results and their database are."""

import os
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from csc.errors import BadData
from csc.storage import local_path
from csc.tracking.server import check_store, nothing_tracked

if TYPE_CHECKING:
    from csc.pipelines.profile import Profile

__all__ = ["run_argument", "tracked_workdir", "use_profile", "use_workdir", "workdir_argument"]


def workdir_argument(parser: ArgumentParser) -> None:
    """Declare `--workdir`."""
    parser.add_argument("--workdir", default="work", metavar="DIR", help="folder of runs and results (default: work)")


def run_argument(parser: ArgumentParser) -> None:
    """Declare a run of the work folder, the newest unless it is named."""
    known = "id or name of a run, a scenario, or models:/NAME@ALIAS (default: the newest run)"
    parser.add_argument("run", nargs="?", default="", help=known)


def use_profile(profile: "Profile") -> None:
    """Give this process, and the steps that it starts, the variables and the tracking server of a profile."""
    os.environ.update(profile.env | ({"MLFLOW_TRACKING_URI": profile.tracking.uri} if profile.tracking.uri else {}))


def use_workdir(workdir: str) -> Path:
    """Point tracking at the database of a work folder, unless the environment names a server."""
    folder = local_path(workdir).absolute()
    if found := sorted(letter for letter in str(folder) if letter in "?%#" or ord(letter) < ord(" ")):
        raise BadData(f"--workdir {workdir}: {found[0]!r} cannot be part of the address of a database; name another")
    if not os.environ.get("MLFLOW_TRACKING_URI"):  # set to nothing is as good as not set
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    check_store()
    return folder


def tracked_workdir(workdir: str) -> str:
    """The tracking address of a work folder that has runs."""
    folder = use_workdir(workdir)
    if nothing_tracked():
        raise BadData(f"{folder}: no runs there yet; make some with 'csc run digits-b0c2'")
    return os.environ["MLFLOW_TRACKING_URI"]
