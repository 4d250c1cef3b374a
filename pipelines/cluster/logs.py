"""The logs of steps on a cluster: from the server, from its bucket, or the command that prints them there."""

import os
import re
from typing import TYPE_CHECKING

from csc.errors import BadData
from csc.pipelines.cluster.endpoint import EndpointError
from csc.pipelines.cluster.steps import REUSED, RunSteps, Step
from csc.pipelines.cluster.terminal import printable_line
from csc.storage import list_below, read_bytes

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from csc.pipelines.cluster.endpoint import Endpoint
    from csc.pipelines.cluster.titles import Spec

__all__ = ["NoLog", "choose_step", "kubectl", "log_lines"]

DEFAULT_ROOT = "minio://mlpipeline/v2/artifacts"  # where Kubeflow Pipelines keeps artifacts unless told otherwise
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL")


class NoLog(EndpointError):
    """A log that cannot be had from here."""


def choose_step(found: RunSteps, wanted: str | None) -> Step:
    """The step that a person means.

    Args:
        found: the steps of the run.
        wanted: its title, or some words of it, such as `ingest` or `2/train`; if not given, the step that failed, else
            the last one that began.
    """
    if wanted is None:
        if found.failed:
            return found.failed
        begun = [step for step in found.steps if step.state != REUSED]
        if not begun:
            raise NoLog("no step of this run has begun yet, or all were reused")
        return begun[-1]
    words = set(_words(wanted))
    matching = [step for step in found.steps if words and words <= set(_words(step.title))]
    if len(matching) == 1:
        return matching[0]
    titles = ", ".join(step.title for step in matching or found.steps)
    if matching:
        raise NoLog(f"'{wanted}' is the name of several steps: {titles}; give a number too, for instance 2/{wanted}")
    raise NoLog(f"no step '{wanted}' has begun; there are: {titles or 'none'}")


def log_lines(endpoint: "Endpoint", run: "V2beta1Run", step: Step, spec: "Spec", namespace: str) -> list[str]:
    """What the last try of a step has printed, without control characters.

    Args:
        endpoint: where the run is.
        run: as the server describes it.
        step: one of its steps.
        spec: its pipeline.
        namespace: of its pods.
    """
    if step.state == REUSED:
        raise NoLog(f"{step.title} was reused: its log is that of the run that made it")
    try:
        if not step.pod:
            raise NoLog("the server does not tell the pod")
        text = endpoint.log(run, step.pod, namespace)
    except EndpointError as error:
        stored = _from_bucket(run, step, spec)
        if stored is None:
            raise NoLog(f"{step.title}: no log from here ({error})", error.status) from None
        text = stored
    return [printable_line(line) for line in text.rstrip("\n").split("\n")]


def kubectl(run: "V2beta1Run", step: Step, namespace: str) -> str:
    """The command that prints the log of a step on the cluster, or its pods if the right one is not known."""
    if not step.pod:
        return f"kubectl -n {namespace} get pods -l pipeline/runid={run.run_id}"
    return f"kubectl -n {namespace} logs {step.pod} -c main"


def _from_bucket(run: "V2beta1Run", step: Step, spec: "Spec") -> str | None:
    """The log that the last try of a step left in Kubeflow's bucket; none if it is not to be found there.

    It lies below the run and the name of the step in a folder of random name, one for each task, beside the outputs of
    the step. A step that failed has no outputs; of others the log tells the task.
    """
    root = (run.runtime_config.pipeline_root if run.runtime_config else None) or DEFAULT_ROOT
    scheme, _, place = root.partition("://")
    if scheme not in ("s3", "minio") or not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    pipeline = spec.get("pipelineInfo", {}).get("name", "")
    prefix = f"s3://{place.partition('?')[0].rstrip('/')}/{pipeline}/{run.run_id}/{step.key[-1]}"
    try:
        folders: dict[str, list[str]] = {}
        for name, _ in list_below(prefix):
            folder, _, file = name.partition("/")
            folders.setdefault(folder, []).append(file)
        texts = []
        for folder, files in folders.items():
            logs = sorted((file for file in files if re.fullmatch(r"executor-logs(-\d+)?", file)), key=_number)
            if logs and (step.state != "FAILED" or all(file in logs for file in files)):
                texts.append(read_bytes(f"{prefix}/{folder}/{logs[-1]}").decode(errors="replace"))
    except BadData:
        return None
    if len(texts) > 1 and (task := re.search(r"task (\d+)", step.title)):
        texts = [text for text in texts if f"task {task[1]}/" in text]
    return texts[0] if len(texts) == 1 else None


def _number(name: str) -> int:
    return int(name.rpartition("-")[2]) if name[-1].isdigit() else -1


def _words(text: str) -> list[str]:
    """The words of a title; `2/train` has the same as `2 · train`, and the word task says nothing."""
    return [word for word in re.split(r"[\s/·]+", text.lower()) if word not in ("", "task")]
