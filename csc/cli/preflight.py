"""What can be known before the first step of a run: is everything installed, is there room, will the settings do?

A mistake that only the train step would notice, after ingest and minutes of work, is one line at once.
"""

import importlib.util
import shutil
from pathlib import Path

from csc.config import Config
from csc.config.checks import check_settings
from csc.errors import BadConfig, BadData

__all__ = ["EXTRAS", "missing_packages", "preflight"]

DISTRIBUTION = "csc-mlcil"  # the name of this project on a package index

_PACKAGES = {  # that an extra of the distribution brings
    "data": ("sklearn",),
    "pipelines": ("certifi", "docker", "kfp", "kfp_server_api", "kubernetes", "rich"),
    "tracking": ("alembic", "mlflow", "sqlalchemy"),
    "train": ("pandas", "safetensors", "simplejpeg", "starlette", "timm", "torch", "torchvision", "uvicorn"),
}
EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages}
LEAST_ROOM = 500 << 20  # bytes: a model of a small network for each of a few tasks


def missing_packages(*names: str) -> str:
    """One line for somebody who lacks packages: which extras bring them."""
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in names))
    return f"not installed: {', '.join(names)}; run: pip install '{DISTRIBUTION}[{extras}]', or [all] for everything"


def preflight(config: Config, workdir: Path, *, makes_digits: bool = False, in_containers: bool = False) -> None:
    """Refuse a run that cannot succeed on this machine.

    A run that `makes_digits` needs scikit-learn, which has them; steps `in_containers` bring their packages and fetch
    their weights themselves. The work folder may not be there yet.
    """
    needed = ["kfp", "mlflow", "docker"] if in_containers else ["kfp", "mlflow", "torch", "timm"]
    if makes_digits and not in_containers:
        needed.append("sklearn")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise BadConfig(missing_packages(*missing))
    folder = next(folder for folder in (workdir, *workdir.parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < LEAST_ROOM:
        raise BadData(f"{workdir}: {free / 1e6:.0f} MB of disk are free; make room or choose another --workdir")
    if not in_containers:
        check_settings(config)
