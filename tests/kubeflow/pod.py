"""The pod of a step, as the launcher of Kubeflow Pipelines 2.17 runs it, in a process of this machine.

A pod has files of its own: the launcher fetches the input artifacts from the object store, runs the container's command
with the executor input, reads what it left in the output file, and puts the output artifacts into the store. Here the
store is a folder, and `/minio` of a pod another one; everything else is kfp's own executor with the source of the
component from the compiled pipeline. Unless told otherwise the process is a fork of one that has imported torch and
MLflow, which is all that differs from the container's command.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from csc.components.__main__ import source_of
from csc.pipelines.local.processes import import_libraries_once, run_process
from csc.pipelines.local.steps import Step as LocalStep
from tests.kubeflow.driver import LOGS, Output, Step, StepFailed

__all__ = ["Pods", "forked", "started"]

SHELL = [  # what kfp's own command does
    "sh",
    "-ec",
    'f=$(mktemp -d)/component.py; printf "%s" "$0" > $f; export _KFP_RUNTIME=true; '
    'exec python3 -m kfp.dsl.executor_main --component_module_path $f "$@"',
]
Start = Callable[[list[str], Mapping[str, str]], tuple[int, str]]  # command and environment to exit code and lines
MOUNT = "from kfp.dsl.types import artifact_types\nartifact_types._MINIO_LOCAL_MOUNT_PREFIX = {mount!r}\n"


def started(command: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a container's command as it is."""
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = subprocess.run(command, env={**os.environ, **environment}, text=True, check=False, **merged)
    return ended.returncode, ended.stdout


@contextlib.contextmanager
def forked() -> Iterator[Start]:
    """Run what a container's command runs in a fork of one process that has imported the libraries."""

    def start(command: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
        lines: list[str] = []
        code = run_process(LocalStep("", command, environment), lines.append)
        return code, "".join(f"{line}\n" for line in lines)

    import_libraries_once()
    yield start


@dataclass
class Pods:
    """Launches steps, one pod each.

    Attributes:
        store: folder that is the object store.
        start: runs a command.
        environment: of all pods, besides what the pipeline sets.
        preparation: Python source that a pod runs before the component's.
        outputs: what each finished step left, by its path.
    """

    store: Path
    start: Start
    environment: Mapping[str, str] = field(default_factory=dict)
    preparation: str = ""
    outputs: dict[str, Output] = field(default_factory=dict)

    def __call__(self, step: Step) -> Output:
        """Run a step to its end; it failed if its process did, or left what the launcher cannot read."""
        with tempfile.TemporaryDirectory(prefix="pod-") as folder:
            pod = Path(folder)
            for name, artifacts in step.given.items():
                for artifact in artifacts:
                    if not _copied(artifact.uri, self.store, pod):
                        raise StepFailed(f"{step.path}: failed to download input artifact {name} from {artifact.uri}")
            set_by_pipeline = {item["name"]: item["value"] for item in step.container.get("env", ())}
            code, lines = self.start(self.command(step, pod), {**set_by_pipeline, **self.environment})
            logs = _paths(step.handed["outputs"]["artifacts"][LOGS], pod)[0]
            logs.parent.mkdir(parents=True, exist_ok=True)
            logs.write_text(lines, encoding="utf-8")
            if code:
                raise StepFailed(f"{step.path}: exit code {code}\n{lines}")
            output = _read_output(step, pod)
            for listed in (*step.handed["outputs"]["artifacts"].values(), *output.get("artifacts", {}).values()):
                for artifact in listed["artifacts"]:
                    _copied(artifact["uri"], pod, self.store)
        self.outputs[step.path] = output
        return output

    def command(self, step: Step, pod: Path) -> list[str]:
        """The words of the container's command, with `/minio` of the pod in its folder."""
        *shell, source = step.container["command"]
        if shell == ["python3", "-m", "csc.components"]:
            shell, source = SHELL, source_of(step.name)
        outputs = step.handed["outputs"]
        file = str(pod / outputs["outputFile"].removeprefix("/minio/"))
        handed = json.dumps({**step.handed, "outputs": {**outputs, "outputFile": file}})
        code = MOUNT.format(mount=f"{pod}/") + self.preparation + source
        return [*shell, code, *(word.replace("{{$}}", handed) for word in step.container["args"])]

    def path(self, uri: str) -> Path:
        """The path of an artifact in the store."""
        return _path(uri, self.store)


def _path(uri: str, folder: Path) -> Path:
    return folder / uri.removeprefix("minio://")


def _paths(listed: Mapping[str, Any], folder: Path) -> list[Path]:
    return [_path(artifact["uri"], folder) for artifact in listed["artifacts"]]


def _copied(uri: str, source: Path, target: Path) -> bool:
    """Copy an artifact, which may be a file or a folder; whether there is one."""
    here, there = _path(uri, source), _path(uri, target)
    there.parent.mkdir(parents=True, exist_ok=True)
    if here.is_dir():
        shutil.copytree(here, there, dirs_exist_ok=True)
    elif here.is_file():
        shutil.copyfile(here, there)
    return here.exists()


def _read_output(step: Step, pod: Path) -> Output:
    """What a step left in its output file, as strictly as the launcher reads it."""
    file = pod / step.handed["outputs"]["outputFile"].removeprefix("/minio/")
    if not file.is_file():
        return {}
    try:
        output: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        json_format.ParseDict(output, pipeline_spec_pb2.ExecutorOutput())
    except (ValueError, json_format.ParseError) as error:
        raise StepFailed(f"{step.path}: failed to unmarshal ExecutorOutput: {error}") from None
    missing = step.handed["outputs"].get("parameters", {}).keys() - output.get("parameterValues", {}).keys()
    if missing:
        raise StepFailed(f"{step.path}: failed to read output parameter {', '.join(sorted(missing))}")
    return output


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
