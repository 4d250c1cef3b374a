"""Which code made a result."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from csc import __version__

__all__ = ["DECISIVE", "code_version", "installed_version", "sources_digest"]

# What decides the numbers of a run, in the library. Ingest is not among it: a data set has a fingerprint of its own.
DECISIVE = (
    "artifacts.py",
    "config/**/*",
    "data/*",
    "distributed/batch_norm.py",
    "distributed/group.py",
    "methods/**/*",
    "metrics.py",
    "model.py",
    "nets/*",
    "replay/*",
    "scenario.py",
    "steps/build_dataset.py",
    "steps/embed.py",
    "steps/evaluate.py",
    "steps/extend.py",
    "steps/split_labels.py",
    "steps/train.py",
    "training/*",
)
# In the same folders, but they only say, show, store or refuse something, or share out the work.
_NOT_DECISIVE = (
    "config/checks.py",
    "config/describe.py",
    "data/cache.py",
    "data/cores.py",
    "data/evidence.py",
    "data/progress.py",
    "data/published.py",
    "nets/activation.py",
    "training/finite.py",
    "training/inspection.py",
    "training/stopping.py",
)


@cache
def code_version() -> str:
    """The package version and a digest of the sources that decide results.

    Another page, command or bench leaves it as it is, and with it checkpoints, caches and finished runs.
    """
    return f"{__version__}+{sources_digest(*DECISIVE)[:8]}"


def sources_digest(*patterns: str) -> str:
    """The SHA-256 of those sources of the library that match a pattern and decide results, in hex."""
    root = Path(__file__).parent
    found = {file for pattern in patterns for file in root.glob(pattern) if file.suffix in (".py", ".yaml")}
    digest = hashlib.sha256()
    for file in sorted(found - {root / name for name in _NOT_DECISIVE}):
        lines = [line for line in file.read_bytes().splitlines() if not line.startswith(b"description: ")]
        digest.update(str(file.relative_to(root)).encode() + b"\n".join(lines))
    return digest.hexdigest()


def installed_version(package: str) -> str:
    """The version of a package in this environment; empty if it is not here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
