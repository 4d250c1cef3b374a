"""A cluster with a Kubeflow Trainer, for the pod of a step.

A TrainJob that is created is carried out at once, by one process, the pod's own; what was asked for is kept next to
the checkpoints.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from csc.distributed.cluster import TrainJobs

__all__ = ["INSTALL", "KEPT", "install"]

INSTALL = "from tests.kubeflow import trainer\ntrainer.install()\n"  # for a pod to run before the component
KEPT = "trainjob.json"
OWN_POD = {"containers": [{"name": "main", "image": "csc-train:latest"}], "serviceAccountName": "pipeline-runner"}


class Trainer:
    """Both APIs that a step asks: custom objects and pods."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}

    def read_namespaced_pod(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(data=json.dumps({"spec": OWN_POD}))

    def get_namespaced_custom_object(self, *, name: str, **options: Any) -> dict[str, Any]:
        from kubernetes.client import ApiException

        if name not in self.jobs:
            raise ApiException(status=404)
        return self.jobs[name]

    def create_namespaced_custom_object(self, *, body: dict[str, Any], **options: Any) -> None:
        from csc.steps.train import learn

        function, arguments = body["spec"]["trainer"]["args"]
        assert function == "csc.steps.train:learn"
        staged = json.loads(Path(arguments).read_text(encoding="utf-8"))
        (Path(staged["checkpoints"]) / KEPT).write_text(json.dumps(body), encoding="utf-8")
        learn(**staged)
        complete = {"type": "Complete", "status": "True"}
        self.jobs[body["metadata"]["name"]] = {**body, "status": {"conditions": [complete]}}

    def delete_namespaced_custom_object(self, *, name: str, **options: Any) -> None:
        self.jobs.pop(name, None)


def install() -> None:
    """Make this the cluster that the process is part of."""
    trainer = Trainer()
    TrainJobs.here = classmethod(lambda cls, nodes: cls(trainer, trainer, "team"))  # type: ignore[assignment]
