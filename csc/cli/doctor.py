"""`csc doctor`: is everything here that a step needs? One line per answer, with what to do about a bad one.

It is the health command of the images. What a machine may do without is `missing`: the cpu image has no torch, a laptop
no GPU. What is there and does not work is `failed`. The last lines say what the machine can be used for. With
`--cluster` it looks at a Kubernetes cluster instead.
"""

import os
import platform
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from csc.cli.command import Command
from csc.cli.preflight import missing_packages
from csc.data.cores import cores
from csc.errors import BadConfig, CscError
from csc.report.text import single_line
from csc.storage import local_path
from csc.tracking.server import database_of
from csc.version import code_version, installed_version

__all__ = ["DOCTOR", "Check", "checks"]

# Who needs a package that an image may do without.
PACKAGES = {
    "torch": "embed, train and evaluate need it",
    "timm": "embed, train and evaluate need it",
    "mlflow": "train, register and report need it",
    "kfp": "steps of a pipeline are started by it",
}
# What a machine is used for, and the packages that it takes.
USES = {
    "run": ("csc run", ("torch", "timm", "mlflow", "kfp")),
    "gpu": ("training on a GPU", ("torch", "timm")),
    "submit": ("csc submit", ("kfp",)),
}
LEAST_SHARED_MEMORY = 512 << 20  # loader processes hand batches through it; a container has 64 MB unless told otherwise
# MLflow itself tries a server that does not answer for many minutes.
FEW_TRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}


@dataclass(frozen=True)
class Check:
    """One answer; `warning` is what works otherwise than expected, `unknown` what could not be looked at."""

    name: str
    status: Literal["ok", "missing", "warning", "unknown", "failed"]
    text: str

    def __str__(self) -> str:
        return f"{self.name:<10}{self.status:<9}{self.text}"


def checks(data: str | None = None) -> Iterator[Check]:
    """Ask everything, one after the other; `data` is the uri of a data set that must be there."""
    status = {}
    for check in _looks(data):
        status[check.name] = check.status
        yield check
    yield from _verdicts(status)


def _looks(data: str | None) -> Iterator[Check]:
    yield Check("csc", "ok", code_version())
    yield Check("python", "ok", f"{platform.python_version()} · user {os.getuid()}, group {os.getgid()}")
    yield from (_package(name, need) for name, need in PACKAGES.items())
    yield from _devices()
    yield from (_writable(name, folder) for name, folder in _folders())
    yield _tracking()
    if data is not None:
        yield _data(data)


def _verdicts(status: Mapping[str, str]) -> Iterator[Check]:
    """What the machine can be used for; of what it cannot, the reason."""
    broken = [check for check in ("device", "temp", "home", "cache") if status.get(check) == "failed"]
    for use, (name, packages) in USES.items():
        missing = [package for package in packages if status[package] != "ok"]
        if missing:
            yield Check(use, "missing", f"{name} needs what is {missing_packages(*missing)}")
        elif broken and use != "submit":
            yield Check(use, "missing", f"{name} needs what failed above: {', '.join(broken)}")
        elif use == "gpu" and status["device"] != "ok":
            yield Check(use, "missing", f"{name} needs one; csc run trains on the CPU")
        else:
            yield Check(use, "ok", f"{name} is possible here")


def _package(name: str, need: str) -> Check:
    # MLflow's client comes under a name of its own.
    if found := installed_version(name) or installed_version(f"{name}-skinny"):
        return Check(name, "ok", found)
    return Check(name, "missing", f"not in this image; {need}")


def _devices() -> Iterator[Check]:
    """GPUs as torch sees them, and the shared memory of loader processes; without torch neither matters."""
    available = f"{cores()} CPU cores"
    try:
        import torch
    except ModuleNotFoundError:
        yield Check("device", "ok", available)
        return
    except (ImportError, OSError) as error:
        yield Check(
            "device",
            "failed",
            f"torch cannot be loaded ({single_line(str(error))}); build the image again from its lock",
        )
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        yield Check("device", "ok", f"{', '.join(names)} · CUDA {torch.version.cuda} · {available}")
    elif Path("/dev/nvidiactl").exists():
        remedy = f"the driver of this node must support CUDA {torch.version.cuda}"
        yield Check("device", "failed", f"there is a GPU that torch cannot use; {remedy}")
    else:
        yield Check("device", "missing", f"no GPU; training runs on {available}")
    yield _shared_memory()


def _shared_memory() -> Check:
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    if size >= LEAST_SHARED_MEMORY:
        return Check("shm", "ok", f"/dev/shm, {size / 1e9:.1f} GB")
    remedy = "mount a memory volume at /dev/shm (docker run --shm-size 2g)"
    return Check("shm", "missing", f"/dev/shm has {size / 1e6:.0f} MB, too little for loader processes; {remedy}")


def _folders() -> Iterator[tuple[str, Path]]:
    """Where a step writes besides its outputs: temporary files, and what libraries keep for the next time."""
    home = Path(os.environ.get("HOME") or "/")
    yield "temp", Path(os.environ.get("TMPDIR") or "/tmp")
    yield "home", home
    yield "cache", local_path(os.environ.get("CSC_CACHE") or os.environ.get("XDG_CACHE_HOME") or home / ".cache")


def _writable(name: str, folder: Path) -> Check:
    there = next(path for path in (folder, *folder.parents) if path.exists())  # the rest is made when needed
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            file.write(b"?")
            file.flush()
    except OSError as error:
        remedy = {"temp": "TMPDIR", "home": "HOME", "cache": "CSC_CACHE"}.get(name, "MLFLOW_TRACKING_URI")
        return Check(
            name, "failed", f"{folder}: cannot write ({error.strerror}); set {remedy} to a folder that can be written"
        )
    return Check(name, "ok", f"{folder} · {shutil.disk_usage(there).free / 1e9:.1f} GB free")


def _tracking() -> Check:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return Check("tracking", "missing", "set MLFLOW_TRACKING_URI to the address of an MLflow server")
    if (database := database_of(uri)) is not None and not database.is_file():
        folder = _writable("tracking", database.parent)
        return folder if folder.status == "failed" else Check("tracking", "ok", f"{database} · will be made")
    for name, value in FEW_TRIES.items():
        os.environ.setdefault(name, value)
    try:
        from csc.tracking.queries import ping_server

        return Check("tracking", "ok", ping_server())
    except ModuleNotFoundError as error:
        return Check("tracking", "failed", f"MLFLOW_TRACKING_URI is set, but there is no {error.name} to use it with")
    except CscError as error:
        return Check("tracking", "failed", single_line(str(error)))


def _data(uri: str) -> Check:
    from csc.data.dataset import Dataset

    try:
        if not Dataset.exists(uri):
            return Check("data", "failed", f"{uri}: can be reached, but has no data set; make one with 'csc ingest'")
        dataset = Dataset.open(uri)
    except CscError as error:
        return Check("data", "failed", single_line(str(error)))
    images = sum(int(split["images"]) for split in dataset.splits.values())
    return Check("data", "ok", f"{uri} · {dataset.name}, {len(dataset.classes)} classes, {images:,} images")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--data", metavar="URI", help="folder or s3:// prefix where a data set must be")
    parser.add_argument(
        "--cluster", action="store_true", help="look at the cluster of your kubeconfig instead of this machine"
    )
    parser.add_argument("--profile", metavar="FILE", help="with --cluster: what must be there, by its names")
    parser.add_argument("--namespace", help="with --cluster: of the runs (default: the profile's, or kubeflow)")


def _asked(arguments: Namespace) -> Iterator[Check]:
    of_cluster = arguments.profile is not None or arguments.namespace is not None
    if of_cluster and not arguments.cluster:
        raise BadConfig("csc doctor: --profile and --namespace say what to look for in a cluster; add --cluster")
    if arguments.data is not None and arguments.cluster:
        raise BadConfig("csc doctor: --data is looked at from this machine; leave out --cluster")
    if arguments.cluster:
        from csc.cli.cluster_doctor import cluster_checks

        return cluster_checks(arguments.profile, arguments.namespace)
    return checks(arguments.data)


def _doctor(arguments: Namespace) -> int:
    found, impossible = Counter[str](), []
    for check in _asked(arguments):
        print(check, flush=True)
        found[check.status] += 1
        if check.name in USES and check.status == "missing":
            impossible.append(USES[check.name][0])
    unseen = f"{found['unknown']} could not be looked at" if found["unknown"] else ""
    if found["failed"]:
        print(f"{found['failed']} failed" + (f", {unseen}" if unseen else ""))
        return 1
    if unseen or impossible:
        print("nothing failed, " + (unseen or f"but not possible here: {', '.join(impossible)}"))
    else:
        print("everything needed is fine")
    return 0


DOCTOR = Command("check what is here: versions, devices, write access, tracking, storage", _doctor, _arguments)
