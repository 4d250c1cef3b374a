"""Which code made a result."""

import hashlib
from functools import cache
from pathlib import Path

from csc import __version__

__all__ = ["code_version"]


@cache
def code_version() -> str:
    """The package version and a digest of the library's sources, so that a changed line is another version.

    Components and pipelines decide no result. They are left out, so that the version is the same where they are
    installed below the library, as in an image, and where they lie beside it, as in a checkout. Neither do studies:
    they only say what to run.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
        name = file.relative_to(root)
        if name.parts[0] not in ("components", "pipelines", "studies"):
            digest.update(str(name).encode() + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"
