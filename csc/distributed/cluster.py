"""The Kubernetes API as the train step uses it: its own pod, and the TrainJob that it makes."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csc.errors import BadConfig, CscError, Unavailable

__all__ = ["API", "MOST_TRIES", "POLL_SECONDS", "ClusterError", "TrainJobs"]

API = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "plural": "trainjobs"}
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POLL_SECONDS = 10.0
MOST_TRIES = 30
HINTS = {
    403: "; let the service account of the step get, create and delete trainjobs.trainer.kubeflow.org, and get pods",
    404: "; install Kubeflow Trainer 2.2 or later",
}


class ClusterError(CscError):
    """The cluster cannot run the job, or the job failed."""


class ClusterUnavailable(ClusterError, Unavailable):
    """The cluster did not answer, which may pass."""


@dataclass(frozen=True)
class TrainJobs:
    """The Kubernetes API in the step's namespace, as far as its service account may use it.

    Every call may be repeated: it reads, or names the one job that it makes or deletes.
    """

    objects: Any  # kubernetes.client.CustomObjectsApi
    pods: Any  # kubernetes.client.CoreV1Api
    namespace: str
    pause: Callable[[float], None] = time.sleep

    @classmethod
    def here(cls, nodes: int) -> "TrainJobs":
        """The cluster that this pod is part of."""
        try:
            from kubernetes import client, config

            config.load_incluster_config()
        except Exception as error:  # the package is not there, or this is no pod
            raise BadConfig(
                f"train.nodes={nodes}: several nodes need a Kubeflow cluster ({error}); "
                "on one machine set train.nodes=1 and train.processes"
            ) from None
        return cls(client.CustomObjectsApi(), client.CoreV1Api(), (ACCOUNT / "namespace").read_text().strip())

    def own_pod(self) -> dict[str, Any]:
        """The spec of the pod that this process runs in."""
        name = os.environ.get("KFP_POD_NAME") or socket.gethostname()
        answer = self._ask(f"read pod {name}", self.pods.read_namespaced_pod, name=name, _preload_content=False)
        spec: dict[str, Any] = json.loads(answer.data)["spec"]
        return spec

    def get(self, name: str) -> dict[str, Any] | None:
        """A job, if it exists."""
        call = self.objects.get_namespaced_custom_object
        job: dict[str, Any] | None = self._ask(f"read TrainJob {name}", call, name=name, none_if=404, **API)
        return job

    def create(self, manifest: Mapping[str, Any]) -> None:
        """Create a job, unless it exists."""
        call, what = self.objects.create_namespaced_custom_object, f"create TrainJob {manifest['metadata']['name']}"
        self._ask(what, call, body=manifest, none_if=409, **API)

    def delete(self, name: str) -> None:
        """Delete a job and its pods, if it exists."""
        call = self.objects.delete_namespaced_custom_object
        self._ask(f"delete TrainJob {name}", call, name=name, propagation_policy="Foreground", none_if=404, **API)

    def _ask(self, what: str, call: Callable[..., Any], none_if: int = 0, **options: Any) -> Any:
        """The API's answer, asked for again while there is none; None if it has the status `none_if`."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        for tries_left in reversed(range(MOST_TRIES + 1)):
            try:
                return call(namespace=self.namespace, **options)
            except ApiException as error:
                if error.status == none_if:
                    return None
                may_pass = error.status == 429 or not 0 < error.status < 500
                reason = _reason(error) + HINTS.get(error.status, "")
            except HTTPError as error:
                may_pass, reason = True, f"no answer ({error})"
            if not (may_pass and tries_left):
                break
            self.pause(POLL_SECONDS)
        kind = ClusterUnavailable if may_pass else ClusterError
        raise kind(f"cannot {what} in namespace {self.namespace}: {reason}")


def _reason(error: Any) -> str:
    """What the API says itself, else the name of the status."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return " ".join(str(json.loads(error.body)["message"]).split())
    return f"{error.status} {error.reason}"
