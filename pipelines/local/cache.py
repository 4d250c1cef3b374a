"""The outputs of finished steps, which later runs of the same pipeline use again.

kfp.local trusts the paths of outputs. Ours remembers the digest of every file, its own entry among them, and gives out
nothing that has changed: the step then runs again. What it makes has another path, but if it is the same to the byte,
the steps that read it are reused, because inputs are compared by their digests, too.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.local import cache
from kfp.local.cache import LocalCache

from csc.config.schema import EXECUTION_ONLY
from csc.config.tree import flatten, nested
from csc.errors import CscError
from csc.storage import read_json, sha256_file, write_json
from csc.version import code_version

__all__ = ["StepCache", "cache_folder", "cached_by"]

ENTRY = "the cache entry"  # by which its own digest goes, next to those of the outputs


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


class StepCache(LocalCache):  # type: ignore[misc]
    """kfp's cache with digests.

    Args:
        folder: where it is.
        reused: is told the name of a step whose outputs are given out.
        damaged: is told the name of a step whose output has changed, and of the output.
    """

    def __init__(self, folder: Path, reused: Callable[[str], None], damaged: Callable[[str, str], None]) -> None:
        super().__init__(str(folder))
        self.reused, self.damaged = reused, damaged
        self._step = ""
        self._digests: dict[str, str] = {}  # of outputs that this run has made or compared, by path

    def compute_key(self, component_name: str, *arguments: Any, **options: Any) -> str:
        """Note which step is asked for; the key has the code version, and the digests of inputs instead of paths.

        Other code would make something else of inputs that are the same. With how many processes a task was trained
        makes no difference.
        """
        self._step = component_name.removeprefix("comp-")
        contents = {name: self._content(value) for name, value in options["arguments"].items()}
        if isinstance(config := contents.get("config"), str):
            contents["config"] = _deciding(config)
        options["arguments"] = {**contents, "code version": code_version()}
        return str(super().compute_key(component_name, *arguments, **options))

    def get(self, key: str) -> dict[str, Any] | None:
        """The outputs of a step that has run before, unless one of them is missing or has changed."""
        entry, known = Path(self._entry_path(key)), self._read(key)
        if not entry.is_file():
            return None
        if known.get(ENTRY, digest := sha256_file(entry)) != digest:  # entries of older versions have none
            self.damaged(self._step, ENTRY)
            return None
        outputs: dict[str, Any] | None = super().get(key)
        if outputs is None:
            return None
        for name, artifact in _artifacts(outputs):
            digest = digest_of(Path(artifact.path))
            if digest != known.get(name):
                self.damaged(self._step, name)
                return None
            self._digests[artifact.uri] = digest
        self.reused(self._step)
        return outputs

    def put(self, key: str, outputs: dict[str, Any]) -> None:
        """Remember the outputs of a step that has just run, and all digests."""
        super().put(key, outputs)
        digests = {name: digest_of(Path(artifact.path)) for name, artifact in _artifacts(outputs)}
        self._digests |= {artifact.uri: digests[name] for name, artifact in _artifacts(outputs)}
        write_json(self._digest_file(key), {ENTRY: sha256_file(Path(self._entry_path(key))), **digests})

    def _digest_file(self, key: str) -> Path:
        return Path(self.cache_root) / f"{key}.sha256"

    def _read(self, key: str) -> dict[str, str]:
        try:
            content = read_json(self._digest_file(key))
        except CscError:
            return {}
        return content if isinstance(content, dict) else {}

    def _content(self, value: Any) -> Any:
        """An argument of a step without what may differ between two tries: the path of an artifact."""
        if isinstance(value, dsl.Artifact) and value.uri in self._digests:
            return {"sha256": self._digests[value.uri], "metadata": value.metadata}
        return value


def _deciding(config: str) -> str:
    """Settings, as JSON, without those that may change while a run is resumed.

    >>> _deciding('{"seed": 1, "train": {"workers": 2}}')
    '{"seed": 1}'
    """
    left_out = {key for key in EXECUTION_ONLY if key.startswith("train.")}  # register's own decide what it does
    return json.dumps(nested({key: value for key, value in flatten(json.loads(config)) if key not in left_out}))


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, or of the names and files of a folder."""
    if not path.is_dir():
        return sha256_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    digests = {file.relative_to(path).as_posix(): sha256_file(file) for file in files}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _artifacts(outputs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The outputs that are files; the others are in the cache itself."""
    for name, value in outputs.items():
        if isinstance(value, dsl.Artifact) and Path(value.path).exists():
            yield name, value


@contextlib.contextmanager
def cached_by(steps: StepCache) -> Iterator[None]:
    """Have kfp.local use a cache, for as long as the block lasts."""
    original = cache.get_local_cache
    cache.get_local_cache = lambda: steps
    try:
        yield
    finally:
        cache.get_local_cache = original
