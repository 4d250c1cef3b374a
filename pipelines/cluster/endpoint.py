"""A Kubeflow Pipelines server: its v2beta1 calls, each of which may be repeated, and its errors in one line.

It uses kfp's generated client. kfp's own wrapper around that prints, takes half a minute to say that a token is wrong,
and writes files into the home folder. No token and no cookie ever gets into a message.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kfp_server_api as api
import urllib3
from urllib3.exceptions import HTTPError, NameResolutionError, NewConnectionError, SSLError, TimeoutError

from csc.errors import CscError
from csc.pipelines.cluster.terminal import printable

__all__ = ["Endpoint", "EndpointError"]

IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
UI_VARIABLE = "KF_PIPELINES_UI_ENDPOINT"  # this and the next two are kfp's own
TOKEN_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"
TOKEN_FILE = Path("/var/run/secrets/kubeflow/pipelines/token")
_TIMEOUT = (10, 60)  # seconds to connect and to wait for an answer
_ADDRESS = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")


class EndpointError(CscError):
    """The endpoint refused, failed or did not answer.

    Attributes:
        status: of HTTP; 0 if there was no answer, or none that can be understood.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """A Kubeflow Pipelines server that we may talk to."""

    def __init__(self, host: str, token_env: str | None = None, cookie_env: str | None = None) -> None:
        """Prepare to talk; nothing is sent yet.

        Args:
            host: address; inside a cluster it may be empty.
            token_env: environment variable with a bearer token. Without one, the token file that Kubeflow gives to pods
                is used, if there is one; kfp's variable KF_PIPELINES_SA_TOKEN_PATH may name another file.
            cookie_env: environment variable with a cookie, such as `oauth2_proxy_kubeflow=…`.
        """
        token, cookie = _from_environment(token_env, "token"), _from_environment(cookie_env, "cookie")
        file = None if token or cookie else _token_file()
        self.host = _checked_host(host or (IN_CLUSTER if file else ""))
        config = api.Configuration(host=self.host)
        config.retries = urllib3.Retry(connect=1, read=0, redirect=4)
        config.ssl_ca_cert = os.environ.get("SSL_CERT_FILE")  # of an authority of your own
        config.client_side_validation = False  # a newer server may know more states
        if token or file:
            config.api_key_prefix["authorization"] = "Bearer"
            config.api_key["authorization"] = token
        if file:
            config.refresh_api_key_hook = lambda config: config.api_key.update(authorization=_token_in(file))
        self._client = client = _Client(config, cookie=cookie or None)
        self._experiments = api.ExperimentServiceApi(client)
        self._pipelines = api.PipelineServiceApi(client)
        self._uploads = api.PipelineUploadServiceApi(client)
        self._runs = api.RunServiceApi(client)

    def experiment(self, name: str, namespace: str = "") -> tuple[str, bool]:
        """Find or create an experiment; return its id, and whether it is new."""
        where, service = _non_empty(namespace=namespace), self._experiments
        found = service.experiment_service_list_experiments(filter=_name_filter(name), **where).experiments
        wanted = api.V2beta1Experiment(display_name=name, **where)
        one = found[0] if found else service.experiment_service_create_experiment(experiment=wanted)
        return self._require_id(one.experiment_id), not found

    def pipeline(self, name: str, namespace: str = "") -> str:
        """Find or create a pipeline, which is a name for versions; return its id."""
        where, service = _non_empty(namespace=namespace), self._pipelines
        found = service.pipeline_service_list_pipelines(filter=_name_filter(name), **where).pipelines
        wanted = api.V2beta1Pipeline(display_name=name, **where)
        one = found[0] if found else service.pipeline_service_create_pipeline(pipeline=wanted)
        return self._require_id(one.pipeline_id)

    def version(self, pipeline_id: str, name: str, package: Path) -> tuple[str, bool]:
        """Find a version of a pipeline, or upload it; return its id, and whether it is new."""
        listed = self._pipelines.pipeline_service_list_pipeline_versions(pipeline_id, filter=_name_filter(name))
        if found := listed.pipeline_versions:
            return self._require_id(found[0].pipeline_version_id), False
        uploaded = self._uploads.upload_pipeline_version(str(package), name=name, pipelineid=pipeline_id)
        return self._require_id(uploaded.pipeline_version_id), True

    def start(
        self,
        name: str,
        experiment_id: str,
        pipeline_id: str,
        version_id: str,
        arguments: Mapping[str, Any],
        service_account: str = "",
    ) -> str:
        """Start a run and return its id."""
        version = api.V2beta1PipelineVersionReference(pipeline_id=pipeline_id, pipeline_version_id=version_id)
        wanted = api.V2beta1Run(
            display_name=name,
            experiment_id=experiment_id,
            pipeline_version_reference=version,
            runtime_config=api.V2beta1RuntimeConfig(parameters=dict(arguments)),
            **_non_empty(service_account=service_account),
        )
        return self._require_id(self._runs.run_service_create_run(run=wanted).run_id)

    def run(self, run_id: str) -> api.V2beta1Run:
        """How a run stands."""
        run = self._runs.run_service_get_run(run_id=run_id)
        self._require_id(run.run_id)
        return run

    def spec(self, run: api.V2beta1Run) -> dict[str, Any]:
        """The pipeline of a run, as compiled: the keys of both documents; empty if it was deleted since."""
        content: Any = run.pipeline_spec
        if reference := run.pipeline_version_reference:
            ids = reference.pipeline_id, reference.pipeline_version_id
            try:
                content = self._pipelines.pipeline_service_get_pipeline_version(*ids).pipeline_spec
            except EndpointError as error:
                if error.status != 404:
                    raise
        found = content if isinstance(content, dict) else {}
        if "pipeline_spec" in found:  # with a platform document
            found = {**(found["pipeline_spec"] or {}), **(found.get("platform_spec") or {})}
        return found if isinstance(found.get("root"), dict) else {}

    def namespace(self, run: api.V2beta1Run) -> str:
        """The namespace of a run's experiment; empty where Kubeflow has one user, or does not say."""
        try:
            found = self._experiments.experiment_service_get_experiment(experiment_id=run.experiment_id or "-")
        except EndpointError:
            return ""
        return str(found.namespace or "")

    def terminate(self, run_id: str) -> None:
        """Have a run stopped; its pods end within their grace period."""
        self._runs.run_service_terminate_run(run_id=run_id)

    def retry(self, run_id: str) -> None:
        """Have the failed steps of a run tried again."""
        self._runs.run_service_retry_run(run_id=run_id)

    def log(self, run: api.V2beta1Run, pod: str, namespace: str) -> str:
        """What the main container of a pod has printed, as long as the cluster keeps it.

        The API hands it out below v1alpha1, which it does not answer to behind the address of Kubeflow's pages; there
        the server of the pages does.
        """
        path = {"run": str(run.run_id), "pod": pod}
        day = run.created_at.date().isoformat() if run.created_at else ""
        query = {"runid": str(run.run_id), "podname": pod, "podnamespace": namespace, "createdat": day}
        try:
            return self._client.text("/apis/v1alpha1/runs/{run}/nodes/{pod}/log", path, {})
        except EndpointError as error:
            if error.status in (0, 401):
                raise
            try:
                return self._client.text("/k8s/pod/logs", {}, query)
            except EndpointError as other:
                raise (error if other.status == 404 else other) from None

    def page(self, run_id: str) -> str:
        """The address of a run's page; kfp's variable KF_PIPELINES_UI_ENDPOINT may name another host for pages."""
        return f"{os.environ.get(UI_VARIABLE) or self.host}/#/runs/details/{run_id}"

    def _require_id(self, identifier: str | None) -> str:
        if not identifier:
            raise self._client.not_understood()
        return identifier


class _Client(api.ApiClient):  # type: ignore[misc]
    """Sends requests with a time limit, and says in one line what went wrong."""

    def text(self, path: str, path_params: Mapping[str, str], query: Mapping[str, str]) -> str:
        """Get something that is text, not JSON."""
        content: bytes = self.call_api(
            path,
            "GET",
            path_params=dict(path_params),
            query_params=list(query.items()),
            header_params={"Accept": "text/plain"},
            response_type="bytes",
            auth_settings=["Bearer"],
            _return_http_data_only=True,
        )
        return content.decode(errors="replace")

    def deserialize(self, response: Any, response_type: str) -> Any:
        """Turn an answer into an object; bytes are left as they are."""
        return response.data if response_type == "bytes" else super().deserialize(response, response_type)

    def call_api(self, *arguments: Any, **options: Any) -> Any:
        """Send a request and understand the answer; one of another form than expected is an error of the endpoint."""
        try:
            answer = super().call_api(*arguments, **options)
        except (api.ApiException, ValueError, LookupError, TypeError, AttributeError):
            raise self.not_understood() from None
        if answer is None:
            raise self.not_understood()
        return answer

    def not_understood(self) -> EndpointError:
        """The error of an answer that has another form than expected."""
        host = self.configuration.host
        return EndpointError(f"{host}: its answer is not one of Kubeflow Pipelines v2beta1; check --host")

    def request(self, method: str, url: str, **options: Any) -> Any:
        host = self.configuration.host
        wanted = "text/plain" if (options.get("headers") or {}).get("Accept") == "text/plain" else "json"
        options["_request_timeout"] = _TIMEOUT
        try:
            answer = super().request(method, url, **options)
        except api.ApiException as error:
            said = _message(error.body, error.reason, options.get("headers") or {})
            raise EndpointError(f"{host}: {_refusal(error.status, said)}", error.status or 0) from None
        except HTTPError as error:
            raise EndpointError(f"{host}: {_no_answer(error)}") from None
        if wanted not in (answer.getheader("content-type") or ""):
            raise EndpointError(
                f"{host}: answers with a page for people, not with the API; log in with --token-env or --cookie-env, "
                "and check --host",
                answer.status,
            )
        return answer


def _message(body: bytes | str | None, reason: str | None, headers: Mapping[str, str]) -> str:
    """What the server says about an error, else the reason of HTTP, in a short line without token and cookie."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        content = json.loads(text)
        text = str(content.get("message") or content.get("error") or content.get("error_message") or "")
    except (ValueError, AttributeError):
        text = ""
    line = text or reason or ""
    for name, value in headers.items():
        if name.lower() in ("authorization", "cookie"):
            line = line.replace(value, "…").replace(value.removeprefix("Bearer "), "…")
    line = printable(line)
    return line if len(line) <= 300 else f"{line[:300]}…"


def _refusal(status: int | None, said: str) -> str:
    known = {
        401: "not logged in (401); name the variable that holds a valid token with --token-env, or a cookie's with "
        "--cookie-env",
        403: f"not allowed (403): {said}; check the token's rights, and --namespace",
        404: f"not found (404): {said}; check --host and the run's id",
        0: f"no safe connection: {said}; SSL_CERT_FILE may name the certificate of your authority",
    }
    if status is not None and status >= 500:
        return f"the server failed ({status}): {said}; try again, or see its logs"
    return known.get(status or 0, f"refused the request ({status}): {said}")


def _no_answer(error: HTTPError) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, SSLError):
        return _refusal(0, "its certificate cannot be verified")
    if isinstance(reason, NameResolutionError):
        return "no such host; check --host"
    late = isinstance(reason, TimeoutError) and not isinstance(reason, NewConnectionError)
    return f"{'no answer in time' if late else 'nothing answers there'}; check --host and the network"


def _name_filter(name: str) -> str:
    """The filter of a list for one name."""
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})


def _non_empty(**options: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if value}


def _checked_host(host: str) -> str:
    if not host:
        raise EndpointError(
            "where to? give --host with the address of Kubeflow Pipelines, or cluster.host in the profile"
        )
    if not _ADDRESS.fullmatch(host):  # it may hold a password, so that it is not repeated
        raise EndpointError(
            "--host: expected an address such as https://host/pipeline, without user, password or query"
        )
    return host.rstrip("/")


def _from_environment(name: str | None, what: str) -> str:
    if name is None:
        return ""
    value = os.environ.get(name, "").strip()
    if not value:
        raise EndpointError(f"--{what}-env {name}: there is no such environment variable, or it is empty")
    return _header_value(value, f"--{what}-env {name}")


def _header_value(secret: str, where: str) -> str:
    if not (secret and secret.isascii() and secret.isprintable()):
        raise EndpointError(f"{where}: empty, or more than one line of plain letters; it cannot be sent")
    return secret


def _token_file() -> Path | None:
    """The file with the token that Kubeflow gives to pods."""
    if named := os.environ.get(TOKEN_VARIABLE):
        return Path(named)
    return TOKEN_FILE if TOKEN_FILE.is_file() else None


def _token_in(file: Path) -> str:
    """Read the token again for every request: the cluster replaces it from time to time."""
    try:
        return _header_value(file.read_text(encoding="utf-8").strip(), str(file))
    except (OSError, UnicodeDecodeError):
        raise EndpointError(f"{file}: the token cannot be read; {TOKEN_VARIABLE} may name another file") from None
