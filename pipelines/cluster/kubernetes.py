"""A Kubernetes cluster, as a person with a kubeconfig or a pod with a service account may look at it."""

import os
from dataclasses import dataclass
from typing import Any

__all__ = ["Kubernetes", "NotVisible"]

TIMEOUT = 10.0  # seconds that one question may take


class NotVisible(Exception):
    """Why something could not be looked at."""


@dataclass(frozen=True)
class Kubernetes:
    """A Kubernetes API, with the rights of the caller; without a client, one that was not reached."""

    client: Any = None  # kubernetes.client.ApiClient
    name: str = ""
    timeout: float = TIMEOUT

    @classmethod
    def connect(cls, timeout: float = TIMEOUT) -> "Kubernetes":
        """The cluster of the kubeconfig's current context, or else the one that this pod is part of."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise NotVisible("the package 'kubernetes' is not installed") from None
        settings = client.Configuration()
        settings.retries = 0
        file = os.environ.get("KUBECONFIG") or config.KUBE_CONFIG_DEFAULT_LOCATION
        try:
            config.load_kube_config(file, client_configuration=settings, persist_config=False)
            name = f"context {config.list_kube_config_contexts(file)[1]['name']}"
        except config.ConfigException:
            try:
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException:
                raise NotVisible("there is no usable kubeconfig, and this is no pod with a service account") from None
            name = "the cluster of this pod"
        except Exception as error:  # whatever a broken file leads to; its words may hold a token
            raise NotVisible(f"the kubeconfig cannot be used ({type(error).__name__})") from None
        return cls(client.ApiClient(settings), name, timeout)

    def _ask(self, api: str, call: str, *arguments: Any) -> Any:
        """The answer to a call of an API of the client; None if what is asked for is not there."""
        if self.client is None:
            raise NotVisible("the cluster was not reached")
        from kubernetes import client
        from urllib3.exceptions import HTTPError

        try:
            return getattr(getattr(client, api)(self.client), call)(*arguments, _request_timeout=self.timeout)
        except client.ApiException as error:
            if error.status == 404:
                return None
            known = {401: "not logged in", 403: "forbidden to you"}
            raise NotVisible(known.get(error.status, f"the cluster answers with error {error.status}")) from None
        except HTTPError:
            raise NotVisible("the cluster does not answer") from None

    def version(self) -> str:
        """The version of the Kubernetes server."""
        found = self._ask("VersionApi", "get_code")
        return str(found.git_version) if found is not None else "of a version that it does not tell"

    def get(self, kind: str, name: str, namespace: str) -> Any:
        """An object, if it is there; its kind as the client's methods have it, such as `config_map`."""
        return self._ask("CoreV1Api", f"read_namespaced_{kind}", name, namespace)

    def may(self, account: str, namespace: str, group: str, resource: str, verb: str) -> bool:
        """Whether a service account may do something in its namespace."""
        attributes = {"namespace": namespace, "group": group, "resource": resource, "verb": verb}
        spec = {"user": f"system:serviceaccount:{namespace}:{account}", "resourceAttributes": attributes}
        call = "create_namespaced_local_subject_access_review"
        answer = self._ask("AuthorizationV1Api", call, namespace, {"metadata": {"namespace": namespace}, "spec": spec})
        return bool(answer is not None and answer.status.allowed)
