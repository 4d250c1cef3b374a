"""Who is at work on a run: one process at a time. What a killed one has left is cleared away by the next run."""

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from csc.errors import BadData, CscError
from csc.storage import locked
from csc.tracking.tracked_run import close_run

__all__ = ["LONGEST_TEMPORARY", "close_runs_on_failure", "exclusive_run", "is_running", "make_workdir"]

_CLEARING_SECONDS = 3.0  # for which another run may hold the lock of a killed one, to clear up after it
LONGEST_TEMPORARY = 58  # bytes of TMPDIR: the sockets of a step's processes are three names below, and have 107 at most


def make_workdir(workdir: Path) -> None:
    """Make the work folder, or say that it cannot be written."""
    try:
        (workdir / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadData(f"cannot write {workdir}: {error.strerror}; choose another --workdir") from None


@contextlib.contextmanager
def exclusive_run(workdir: Path, name: str, identity: Mapping[str, str]) -> Iterator[Path]:
    """Refuse a run that another process is at; give a folder for temporary files. Other runs share the work folder.

    The lock's file holds what the run is for as long as it goes on: its `scenario`, `data` and `config`, and `extended`
    if it extends a model. A file with content that nobody has locked is that of a killed run.
    """
    make_workdir(workdir)
    if len(os.fsencode(root := tempfile.gettempdir())) > LONGEST_TEMPORARY:
        raise BadData(
            f"TMPDIR={root}: too long for the sockets of a run; name one of at most {LONGEST_TEMPORARY} bytes"
        )
    with contextlib.ExitStack() as stack:
        path = _lock(workdir, name)
        try:
            lock = stack.enter_context(locked(path, seconds=_CLEARING_SECONDS))
        except BlockingIOError:
            raise BadData(
                f"{workdir}: the same run is going on there; wait for it or choose another --workdir"
            ) from None
        except OSError as error:
            raise BadData(f"{path}: cannot be locked ({error.strerror or error}); choose another --workdir") from None
        _clear(workdir, name, _content(lock))
        _clear_killed_runs(workdir, name)
        temporary = tempfile.mkdtemp(prefix="csc-run-")
        _write(lock, json.dumps({**identity, "temporary": temporary}))
        try:
            with _temporary_files_in(temporary):
                yield Path(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            _write(lock, "")


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Have all temporary files of this process made in a folder: kfp's workspaces, the socket of the fork server."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, known = tempfile.tempdir, dict(settings)
    tempfile.tempdir = settings["tempdir"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before
        settings.clear()
        settings.update(known)


def is_running(workdir: Path, name: str) -> bool:
    """Whether a process is at work on a run."""
    try:
        with locked(_lock(workdir, name), seconds=0):
            return False
    except OSError:
        return True


@contextlib.contextmanager
def close_runs_on_failure(identity: Mapping[str, str]) -> Iterator[None]:
    """Close the tracked runs of a run that ends early, as the exit handler of a pipeline does on a cluster."""
    try:
        yield
    except BaseException as error:
        _close(identity, "CANCELED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


def _clear_killed_runs(workdir: Path, name: str) -> None:
    """Clear away what other runs of the work folder have left that were killed and not started again."""
    for path in sorted({*(workdir / "runs").glob("*.lock")} - {_lock(workdir, name)}):
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(locked(path, seconds=0))
            except OSError:  # its run is going on
                continue
            if identity := _content(lock):
                _clear(workdir, path.stem, identity)
                if _close(identity, "CANCELED"):
                    _write(lock, "")


def _clear(workdir: Path, name: str, identity: Mapping[str, str]) -> None:
    """Remove the temporary files of a killed run: its folder, and hidden files next to its outputs."""
    if folder := identity.get("temporary"):
        shutil.rmtree(folder, ignore_errors=True)
    folders = [workdir / "pipeline" / name, workdir / "checkpoints" / name, *(workdir / "cache").glob(f"*/{name}")]
    hidden = [path for outputs in folders for path in outputs.rglob(".*")]
    for path in (*hidden, *(workdir / "runs").glob(f".{name}.yaml.*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _close(identity: Mapping[str, str], state: str) -> bool:
    """Mark what a run has open in MLflow as failed or killed; return whether the server answered."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            close_run(identity["scenario"], identity["data"], identity["config"], state, identity.get("extended", ""))
    except CscError:  # why the run ended matters more
        return False
    return True


def _lock(workdir: Path, name: str) -> Path:
    return workdir / "runs" / f"{name}.lock"


def _write(lock: int, text: str) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, text.encode(), 0)


def _content(lock: int) -> dict[str, str]:
    try:
        content = json.loads(os.pread(lock, os.fstat(lock).st_size, 0))
    except (ValueError, RecursionError):  # empty, or killed while it wrote this
        return {}
    return content if isinstance(content, dict) and content.keys() >= {"scenario", "data", "config"} else {}
