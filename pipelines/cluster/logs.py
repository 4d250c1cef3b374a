"""The log of a step on a cluster: from the server, else from its bucket, else the command that prints it there."""

import os
import re
from collections import defaultdict

from csc.errors import BadData
from csc.pipelines.cluster.endpoint import Endpoint, EndpointError
from csc.pipelines.cluster.steps import REUSED, RunStatus, StepStatus
from csc.report.text import printable_line
from csc.storage import list_below, read_bytes

__all__ = ["choose_step", "log_lines"]

DEFAULT_ROOT = "minio://mlpipeline/v2/artifacts"  # where Kubeflow Pipelines keeps artifacts unless told otherwise
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL")


def choose_step(status: RunStatus, name: str | None) -> StepStatus:
    """The step that a person means by its title or some words of it, such as `ingest` or `2/train`.

    Without a name it is the step that failed, else the last one that began.
    """
    if name is None:
        begun = [step for step in status.steps if step.state != REUSED]
        if not begun:
            raise EndpointError("no step of this run has begun yet, or all were reused")
        return status.failed or begun[-1]
    words = _words(name)
    matching = [step for step in status.steps if words and words <= _words(step.title)]
    if len(matching) == 1:
        return matching[0]
    titles = ", ".join(step.title for step in matching or status.steps)
    if matching:
        raise EndpointError(
            f"'{name}' is the name of several steps: {titles}; give a number too, for instance 2/{name}"
        )
    raise EndpointError(f"no step '{name}' has begun; there are: {titles or 'none'}")


def log_lines(endpoint: Endpoint, status: RunStatus, step: StepStatus, namespace: str) -> list[str]:
    """The lines that the last try of a step has printed, without control characters; `namespace` is of its pods."""
    if step.state == REUSED:
        raise EndpointError(f"{step.title} was reused: its log is that of the run that made it")
    try:
        text = endpoint.log(status.run, step.pod, namespace)
    except EndpointError as error:
        stored = _from_bucket(status, step)
        if stored is None:
            command = f"kubectl -n {namespace} logs {step.pod} -c main"
            raise EndpointError(f"{step.title}: no log from here ({error}); try: {command}", error.status) from None
        text = stored
    return [printable_line(line) for line in text.rstrip("\n").split("\n")]


def _from_bucket(status: RunStatus, step: StepStatus) -> str | None:
    """The log that the last try of a step left in Kubeflow's bucket; none if it is not to be found there.

    It lies below the run and the name of the step in a folder of random name, one for each task, with the outputs of
    the step. A step that failed has no outputs; of others the log tells the task.
    """
    run = status.run
    root = run.runtime_config.pipeline_root or DEFAULT_ROOT
    scheme, _, bucket = root.partition("://")
    if scheme not in ("s3", "minio") or not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    prefix = f"s3://{bucket.partition('?')[0].rstrip('/')}/{status.spec.pipeline_info.name}/{run.run_id}/{step.key[-1]}"
    texts = []
    try:
        folders: dict[str, list[str]] = defaultdict(list)
        for name, _ in list_below(prefix):
            folder, _, file = name.partition("/")
            folders[folder].append(file)
        for folder, files in folders.items():
            logs = [file for file in files if re.fullmatch(r"executor-logs(-\d+)?", file)]
            if logs and (step.state != "FAILED" or len(logs) == len(files)):
                last = max(logs, key=lambda name: int(name.rpartition("-")[2]) if name[-1].isdigit() else -1)
                texts.append(read_bytes(f"{prefix}/{folder}/{last}").decode(errors="replace"))
    except BadData:
        return None
    if len(texts) > 1 and (task := re.search(r"task (\d+)", step.title)):
        texts = [text for text in texts if f"task {task[1]}/" in text]
    return texts[0] if len(texts) == 1 else None


def _words(text: str) -> set[str]:
    """The words of a title; `2/train` has the same as `2 · train`, and the word task says nothing."""
    return set(re.split(r"[\s/·]+", text.lower())) - {"", "task"}
