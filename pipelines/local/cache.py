"""The outputs of finished steps, which later runs of the same pipeline use again.

kfp.local's own cache, which is left off, trusts the paths of outputs. Ours remembers the digest of every file, its own
entry among them, and gives out nothing that has changed: the step then runs again. What it makes has another path, but
if it is the same to the byte, the steps that read it are reused, because inputs are compared by their digests, too.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from csc.config.schema import EXECUTION_ONLY
from csc.config.tree import flatten, nested
from csc.errors import CscError
from csc.pipelines.local.steps import Step
from csc.storage import json_digest, read_bytes, read_json, sha256_file, write_bytes, write_json
from csc.tracking.server import database_of
from csc.version import code_version

__all__ = ["StepCache", "cache_folder", "cached_steps"]

ENTRY = "the cache entry"  # by which its own digest goes, next to those of the outputs


def cache_folder(workdir: Path, name: str, tracking: str) -> Path:
    """The folder that remembers the finished steps of a run.

    It belongs to one tracking server, and is worth nothing without its database. Runs do not share it: the few steps
    that they have in common take a second, and a run that found the output of another run instead of its own would
    repeat all later steps.
    """
    folder = workdir / "cache" / hashlib.sha256(tracking.encode()).hexdigest()[:12] / name
    if (database := database_of(tracking)) is not None and not database.is_file():
        shutil.rmtree(folder, ignore_errors=True)
    return folder


class StepCache:
    """Finished steps of a run, by what they were given.

    An entry is a copy of the file in which a step lists its outputs for kfp; the outputs stay where they are. A reused
    step gets that file, and is done. `reused` is told the name of such a step, `damaged` the names of one that runs
    again and of its output that has changed.
    """

    def __init__(self, folder: Path, reused: Callable[[str], None], damaged: Callable[[str, str], None]) -> None:
        self.folder, self.reused, self.damaged = folder, reused, damaged
        self._digests: dict[Path, str] = {}  # of outputs that this run has made or compared

    def restore(self, step: Step) -> bool:
        """Give a step the outputs that it has made before, and return True; False if one is missing or has changed."""
        entry = self._entry(step)
        if not entry.is_file():
            return False
        known = _read_digests(entry)
        if known.get(ENTRY) != sha256_file(entry):
            self.damaged(step.name, ENTRY)
            return False
        outputs = _output_paths(entry)
        if not all(path.exists() for path in outputs.values()):
            return False
        for name, path in outputs.items():
            if (digest := digest_of(path)) != known.get(name):
                self.damaged(step.name, name)
                return False
            self._digests[path] = digest
        write_bytes(step.output_file, read_bytes(entry))
        self.reused(step.name)
        return True

    def keep(self, step: Step) -> None:
        """Remember the outputs of a step that has just run, and all digests; if that fails, it runs again next time."""
        try:
            outputs = _output_paths(step.output_file)
            digests = {name: digest_of(path) for name, path in outputs.items()}
            entry = self._entry(step)
            write_json(entry.with_suffix(".sha256"), {ENTRY: sha256_file(step.output_file), **digests})
            write_bytes(entry, read_bytes(step.output_file))  # last: without it there is nothing to reuse
        except (CscError, OSError) as error:
            logging.warning(f"{step.name} is not in the cache: {error}")
        else:
            self._digests |= {path: digests[name] for name, path in outputs.items()}

    def _entry(self, step: Step) -> Path:
        """The file of a step; its name has the code version, and the digests of inputs instead of their paths.

        Other code would make something else of inputs that are the same. With how many processes a task was trained
        makes no difference.
        """
        inputs = step.executor_input.get("inputs", {})
        values = dict(inputs.get("parameterValues", {}))
        if isinstance(config := values.get("config"), str):
            values["config"] = _decisive_settings(config)
        read = {name: [self._content(one) for one in found] for name, found in _artifacts(inputs).items()}
        key_parts = [step.name, step.image, step.command_without_input, dict(step.variables), values, read]
        return self.folder / f"{json_digest([*key_parts, code_version()])}.json"

    def _content(self, artifact: Mapping[str, Any]) -> Mapping[str, Any]:
        """An input of a step without what may differ between two tries: its path."""
        digest = self._digests.get(Path(artifact["uri"]))
        return artifact if digest is None else {"sha256": digest, "metadata": artifact.get("metadata", {})}


def cached_steps(spec: Any) -> set[str]:
    """The steps of a `PipelineSpec` whose outputs may be used again, by the names that kfp.local gives them."""
    graphs = [spec.root.dag, *(component.dag for component in spec.components.values())]
    tasks = [task for graph in graphs for task in graph.tasks.values()]
    return {task.component_ref.name.removeprefix("comp-") for task in tasks if task.caching_options.enable_cache}


def _artifacts(listed: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Artifacts by name, from the form in which kfp lists inputs or outputs; there may be several of one name."""
    return {name: found["artifacts"] for name, found in listed.get("artifacts", {}).items()}


def _output_paths(listed: Path) -> dict[str, Path]:
    """The outputs of a step that are files or folders; the values of the others are in the list itself."""
    return {name: Path(found[0]["uri"]) for name, found in _artifacts(read_json(listed)).items()}


def _read_digests(entry: Path) -> dict[str, str]:
    try:
        content = read_json(entry.with_suffix(".sha256"))
    except CscError:
        return {}
    return content if isinstance(content, dict) else {}


def _decisive_settings(config: str) -> str:
    """Settings, as JSON, without those that may change while a run is resumed.

    >>> _decisive_settings('{"seed": 1, "train": {"workers": 2}}')
    '{"seed": 1}'
    """
    left_out = {key for key in EXECUTION_ONLY if key.startswith("train.")}  # register's own decide what it does
    return json.dumps(nested({key: value for key, value in flatten(json.loads(config)) if key not in left_out}))


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, or of the names and files of a folder."""
    if not path.is_dir():
        return sha256_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return json_digest({file.relative_to(path).as_posix(): sha256_file(file) for file in files})
