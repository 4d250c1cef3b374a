"""The outputs of finished steps, which later runs of the same pipeline use again."""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kfp.local import cache
from kfp.local.cache import LocalCache

__all__ = ["cache_folder", "cached_by"]


def cache_folder(workdir: Path, name: str, tracking: str) -> Path:
    """The folder that remembers the finished steps of a run.

    It belongs to one tracking server, and is worth nothing without its database. Runs do not share it: the few steps
    that they have in common take a second, and a run that found the output of another run instead of its own would
    repeat all later steps.
    """
    folder = workdir / "cache" / hashlib.sha256(tracking.encode()).hexdigest()[:12] / name
    if tracking.startswith("sqlite:///") and not Path(tracking.removeprefix("sqlite:///")).is_file():
        shutil.rmtree(folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def cached_by(folder: Path, reused: Callable[[str], None]) -> Iterator[None]:
    """Have kfp.local keep the outputs of steps in a folder, and say which steps it does not run again."""

    class Cache(LocalCache):
        def compute_key(self, component_name: str, *arguments: Any, **options: Any) -> str:
            self.component = component_name
            return str(super().compute_key(component_name, *arguments, **options))

        def get(self, key: str) -> dict[str, Any] | None:
            outputs: dict[str, Any] | None = super().get(key)
            if outputs is not None:
                reused(self.component.removeprefix("comp-"))
            return outputs

    ours, original = Cache(str(folder)), cache.get_local_cache
    cache.get_local_cache = lambda: ours
    try:
        yield
    finally:
        cache.get_local_cache = original
