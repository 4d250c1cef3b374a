"""What can be known before the first step of a run: is everything installed, is there room, will the settings do?

A mistake that only the train step would notice, after ingest and minutes of work, is one line at once.
"""

import importlib.util
import shutil
from pathlib import Path

from csc.config import Config
from csc.config.checks import check_settings
from csc.errors import BadConfig, BadData

__all__ = ["DISTRIBUTION", "EXTRAS", "missing_packages", "preflight"]

DISTRIBUTION = "csc-mlcil"  # the name of this project on a package index

# The extra of the distribution that brings a package.
EXTRAS = {
    "alembic": "tracking",
    "certifi": "pipelines",
    "docker": "pipelines",
    "kfp": "pipelines",
    "kfp_server_api": "pipelines",
    "kubernetes": "pipelines",
    "mlflow": "tracking",
    "pandas": "train",
    "rich": "pipelines",
    "safetensors": "train",
    "simplejpeg": "train",
    "sklearn": "data",
    "sqlalchemy": "tracking",
    "starlette": "train",
    "timm": "train",
    "torch": "train",
    "torchvision": "train",
    "uvicorn": "train",
}
NEEDED = {"run": ("kfp", "mlflow", "torch", "timm"), "containers": ("kfp", "mlflow", "docker")}
LEAST_ROOM = 500 << 20  # bytes: a model of a small network for each of a few tasks


def missing_packages(*names: str) -> str:
    """One line for somebody who lacks packages: which extras bring them."""
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in names))
    return f"not installed: {', '.join(names)}; run: pip install '{DISTRIBUTION}[{extras}]', or [all] for everything"


def preflight(config: Config, workdir: Path, *, makes_digits: bool = False, in_containers: bool = False) -> None:
    """Refuse a run that cannot succeed on this machine.

    Args:
        config: its settings.
        workdir: folder of runs and results, which may not be there yet.
        makes_digits: whether its first step makes the data from the digits of scikit-learn.
        in_containers: whether its steps bring their packages and fetch their weights themselves.
    """
    needed = NEEDED["containers"] if in_containers else NEEDED["run"] + ("sklearn",) * makes_digits
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise BadConfig(missing_packages(*missing))
    folder = next(folder for folder in (workdir, *workdir.parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < LEAST_ROOM:
        raise BadData(f"{workdir}: {free / 1e6:.0f} MB of disk are free; make room or choose another --workdir")
    if not in_containers:
        check_settings(config)
