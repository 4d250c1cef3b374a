"""Run a function in several processes of this machine, as torchrun or the Kubeflow Trainer do on several.

Each process executes `python -m csc.distributed.launch MODULE:FUNCTION FILE`.
"""

import contextlib
import importlib
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from csc import errors
from csc.distributed.group import one_of_several
from csc.distributed.process import environment, signal_handlers
from csc.errors import BadConfig, CscError
from csc.storage import read_json, write_json

__all__ = ["processes_for", "raise_error", "run_in_processes"]

GRACE_SECONDS = 20
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
STOPS = (signal.SIGTERM, signal.SIGHUP)  # what ends the launcher and its ranks; SIGINT does so as KeyboardInterrupt
T = TypeVar("T")


def processes_for(wanted: int | Literal["auto"], *, exactly: bool = True) -> int:
    """How many processes are to share the work that this one was asked to do.

    `auto` is one for each visible GPU, and one on the CPU. A process that is itself one of several starts no more. More
    than there are GPUs are refused, or, if it need not be `exactly` as many as wanted, become one per GPU.
    """
    gpus = torch.cuda.device_count()
    if one_of_several():
        return 1
    if wanted == "auto":
        return max(gpus, 1)
    if gpus and wanted > gpus:
        if not exactly:
            return gpus
        raise BadConfig(f"train.processes={wanted}: each process needs a GPU of its own, this machine shows {gpus}")
    return wanted


def run_in_processes(function: Callable[..., T], arguments: Mapping[str, Any], processes: int) -> T:
    """Run a function of a module in several processes of this machine and return what it returns on rank 0.

    Output of the processes goes where ours goes. If one ends with a CscError, so does this; the others are stopped. All
    of them end with this process, however it ends: the next try must not meet them. They find the function by its name,
    so it must be at the top of a module; arguments and result are what JSON can hold.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="csc-processes-") as folder, _quiet_torchrun():
        file, target = Path(folder) / "arguments.json", f"{function.__module__}:{function.__qualname__}"
        write_json(file, dict(arguments))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            signals_to_handle=",".join(number.name for number in _handled_signals()),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", __name__, target, str(file), str(os.getpid()))
        except ChildFailedError as failed:
            raise_error(file)
            rank, failure = failed.get_first_failure()
            end = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
            raise RuntimeError(
                f"{function.__name__}: process {rank + 1} of {processes} ended {end}, see above"
            ) from None
        except SignalException as received:
            raise SystemExit(128 + received.sigval) from None
        return cast(T, read_json(file.with_name("result.json")))


@contextlib.contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """Silence torch's warnings and what its launcher says of a failure; afterwards restore the signal handlers."""
    logger = logging.getLogger("torch.distributed.elastic")
    silent, before = logging.NullHandler(), logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    level, handlers = os.environ.get(LOG_LEVEL, "ERROR"), {number: signal.getsignal(number) for number in STOPS}
    try:
        with environment({LOG_LEVEL: level}), signal_handlers(handlers):  # which torch's launcher replaces
            yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = before


def _handled_signals() -> list[signal.Signals]:
    """The signals that stop us: not those that we were started to ignore, as nohup does."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


def raise_error(file: Path) -> None:
    """Raise the CscError, if there was one, that a process with these arguments ended in."""
    path = file.with_name("error.json")
    if path.is_file():
        content = read_json(path)
        kind = getattr(errors, content["kind"], CscError)
        raise kind(content["message"])


def _end_with_launcher(launcher: int | None) -> None:
    """Have the kernel end this process when its parent dies, even if that is killed; only Linux can.

    Ranks are sessions of their own: no signal of the terminal reaches them.
    """
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    if launcher is not None and os.getppid() != launcher:  # it died while torch was imported here
        sys.exit(1)


def main(target: str, file: Path, launcher: int | None = None) -> int:
    """Be one of the processes: call the function with the arguments in the file; its result or error is written there.

    `launcher` is the number of the process that called `run_in_processes`; torchrun does not give its own.
    """
    _end_with_launcher(launcher)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        result = function(**read_json(file))
    except CscError as error:
        write_json(file.with_name("error.json"), {"kind": type(error).__name__, "message": str(error)})
        return 2
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # another process is gone, which reports why
            time.sleep(GRACE_SECONDS)  # until the launcher ends this one
        raise
    if os.environ.get("RANK", "0") == "0":
        write_json(file.with_name("result.json"), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])))
