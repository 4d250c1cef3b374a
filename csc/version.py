"""Which code made a result."""

import hashlib
from functools import cache
from pathlib import Path

from csc import __version__

__all__ = ["code_version"]


@cache
def code_version() -> str:
    """The package version and a digest of the library's sources, so that a changed line is another version."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"
