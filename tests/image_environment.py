"""An environment with exactly the packages of an image: what a step imports there, it must find in the image's lock.

Every package of the lock is installed in `.venv` too, in the same version, because the locks are resolved together. So
the environment is made of links to its files, in seconds and without a network, and a wheel's own list of digests tells
that they are the wheel's. `make test-docker` installs the same locks with pip.
"""

import base64
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path

__all__ = ["image_python"]

ROOT = Path(__file__).parents[1]
HERE = Path(sysconfig.get_path("purelib"))
PACKAGE = "csc-mlcil"  # our distribution, by its name in pyproject.toml
LARGE = 1 << 20  # libraries of this size and more belong to one package only; digesting gigabytes says nothing new


def image_python(kind: str) -> Path:
    """The interpreter of an environment made from the lock of an image, `cpu` or `train`; made once for a lock.

    As in the image, kfp comes without its requirements; our own code is that of the checkout.
    """
    lock = (ROOT / "requirements" / f"{kind}-image.txt").read_text()
    ours = _installed(PACKAGE).read_text("RECORD") or ""
    facts = [lock, ours, sys.version, Path(__file__).read_text()]
    mark = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    folder = ROOT / f".venv-{kind}-image"
    if not (folder / mark).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        aside = folder.with_name(f"{folder.name}.{os.getpid()}")
        _make(aside, [*re.findall(r"^\S+==\S+", lock, re.MULTILINE), PACKAGE])
        (aside / mark).touch()
        aside.rename(folder)
    return folder / "bin" / "python"


def _installed(name: str) -> Distribution:
    """A package of `.venv`, not what a build has left in the checkout."""
    return next(iter(Distribution.discover(name=name, path=[str(HERE)])))


def _make(folder: Path, wanted: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = folder / HERE.relative_to(sys.prefix)
    for item in wanted:
        name, _, version = item.partition("==")
        package = _installed(name)
        assert package.version == version or not version, f"{name} {package.version} is here, the lock says {version}"
        _link(package.read_text("RECORD") or "", site)


def _link(record: str, site: Path) -> None:
    """Link the files that a wheel put into site-packages."""
    for path, digest, _ in csv.reader(record.splitlines()):
        source = HERE / path
        if path.startswith(("..", "/")) or "__pycache__" in path or not source.is_file():
            continue  # commands, and what Python writes itself
        if digest and source.stat().st_size < LARGE:
            assert digest == f"sha256={_digest(source)}", f"{source}: not as its wheel has it; make .venv again"
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(source, target)


def _digest(path: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
