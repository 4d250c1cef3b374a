"""A Kubeflow Pipelines server: its v2beta1 calls, each of which may be repeated, and its errors in one line.

No token and no cookie ever gets into a message, and nothing that the server says is trusted to have the form that it
should have: `csc.pipelines.cluster.answers` checks it.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import certifi
import msgspec
import urllib3
from urllib3.exceptions import HTTPError, NameResolutionError, NewConnectionError, SSLError, TimeoutError

from csc.errors import CscError
from csc.pipelines.cluster.answers import Component, Id, Run, Spec, Version
from csc.report.text import single_line

__all__ = ["Endpoint", "EndpointError"]

IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
UI_VARIABLE = "KF_PIPELINES_UI_ENDPOINT"  # this and the next two are kfp's own
TOKEN_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"
TOKEN_FILE = Path("/var/run/secrets/kubeflow/pipelines/token")
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
API = "/apis/v2beta1"
_ADDRESS = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")

_Answer = TypeVar("_Answer")


class EndpointError(CscError):
    """The endpoint refused, failed or did not answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; 0 if there was no answer, or none that can be understood


class Endpoint:
    """A Kubeflow Pipelines server that we may talk to."""

    def __init__(self, host: str, token_env: str | None = None, cookie_env: str | None = None) -> None:
        """Prepare to talk, with the bearer token or cookie that an environment variable holds; nothing is sent yet.

        Without one, the token file that Kubeflow gives to pods is used, if there is one; kfp's variable
        KF_PIPELINES_SA_TOKEN_PATH may name another file. Inside a cluster the host may be empty.
        """
        self._token = _from_environment(token_env, "token")
        self._cookie = _from_environment(cookie_env, "cookie")
        self._token_file = None if self._token or self._cookie else _token_file()
        self.host = _checked_host(host or (IN_CLUSTER if self._token_file else ""))
        self._pool = urllib3.PoolManager(
            retries=urllib3.Retry(connect=1, read=0, redirect=4),
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=ANSWER_SECONDS),
            ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),  # the first is of an authority of your own
        )

    def find_or_create(self, kind: str, name: str, namespace: str = "") -> tuple[str, bool]:
        """The id of an `experiment`, or of a `pipeline`, which is a name for versions; and whether it is new."""
        where = {"namespace": namespace} if namespace else {}
        if found := self._find(f"{kind}s", f"/{kind}s", name, where):
            return self._id(found, kind), False
        return self._id(self._post(dict, f"/{kind}s", {"display_name": name, **where}), kind), True

    def version(self, pipeline_id: str, name: str, package: Path) -> tuple[str, bool]:
        """Find a version of a pipeline, or upload it; return its id, and whether it is new."""
        kind = "pipeline_version"
        if found := self._find(f"{kind}s", f"/pipelines/{_quoted(pipeline_id)}/versions", name):
            return self._id(found, kind), False
        query = urlencode({"name": name, "pipelineid": pipeline_id})
        file = {"uploadfile": (package.name, package.read_bytes())}
        sent = self._send("POST", f"{API}/pipelines/upload_version?{query}", fields=file)
        return self._id(self._decoded(dict, sent), kind), True

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
        wanted = {
            "display_name": name,
            "experiment_id": experiment_id,
            "pipeline_version_reference": {"pipeline_id": pipeline_id, "pipeline_version_id": version_id},
            "runtime_config": {"parameters": dict(arguments)},
        }
        if service_account:
            wanted["service_account"] = service_account
        return self._post(Run, "/runs", wanted).run_id

    def run(self, run_id: str) -> Run:
        """How a run stands."""
        return self._get(Run, f"/runs/{_quoted(run_id)}")

    def spec(self, run: Run) -> Spec:
        """The pipeline of a run, as compiled; without any task if it was deleted since."""
        content = run.pipeline_spec
        if (reference := run.pipeline_version_reference) is not None:
            version = _quoted(reference.pipeline_version_id)
            path = f"/pipelines/{_quoted(reference.pipeline_id)}/versions/{version}"
            try:
                content = self._get(Version, path).pipeline_spec
            except EndpointError as error:
                if error.status != 404:
                    raise
        found = _object(content)
        if "pipeline_spec" in found:  # with a platform document
            found = _object(found["pipeline_spec"]) | _object(found.get("platform_spec"))
        try:
            return msgspec.convert(found, Spec)
        except msgspec.ValidationError:
            return Spec(Component())

    def namespace(self, run: Run) -> str:
        """The namespace of a run's experiment; empty where Kubeflow has one user, or does not say."""
        try:
            found = self._get(dict, f"/experiments/{_quoted(run.experiment_id or '-')}")
        except EndpointError:
            return ""
        return str(found.get("namespace") or "")

    def terminate(self, run_id: str) -> None:
        """Have a run stopped; its pods end within their grace period."""
        self._post(dict, f"/runs/{_quoted(run_id)}:terminate")

    def retry(self, run_id: str) -> None:
        """Have the failed steps of a run tried again."""
        self._post(dict, f"/runs/{_quoted(run_id)}:retry")

    def log(self, run: Run, pod: str, namespace: str) -> str:
        """What the main container of a pod has printed, as long as the cluster keeps it.

        The API hands it out below v1alpha1, which it does not answer to behind the address of Kubeflow's pages; there
        the server of the pages does.
        """
        day = run.created_at.date().isoformat() if run.created_at else ""
        query = {"runid": run.run_id, "podname": pod, "podnamespace": namespace, "createdat": day}
        path = f"/apis/v1alpha1/runs/{_quoted(run.run_id)}/nodes/{_quoted(pod)}/log"
        try:
            content = self._send("GET", path, kind="text/plain")
        except EndpointError as error:
            if error.status in (0, 401):
                raise
            try:
                content = self._send("GET", "/k8s/pod/logs", kind="text/plain", fields=query)
            except EndpointError as other:
                raise (error if other.status == 404 else other) from None
        return content.decode(errors="replace")

    def page(self, run_id: str) -> str:
        """The address of a run's page; kfp's variable KF_PIPELINES_UI_ENDPOINT may name another host for pages."""
        return f"{os.environ.get(UI_VARIABLE) or self.host}/#/runs/details/{run_id}"

    def _find(self, key: str, path: str, name: str, where: Mapping[str, str] = {}) -> dict[str, Any] | None:
        """The first of a list that has this name."""
        predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
        query = {"filter": json.dumps({"predicates": [predicate]}), **where}
        listed = self._get(dict[str, Any], path, query).get(key) or []
        if not isinstance(listed, list):
            raise self._not_understood()
        return listed[0] if listed else None

    def _id(self, found: Any, kind: str) -> str:
        try:
            return msgspec.convert(_object(found).get(f"{kind}_id"), Id)
        except msgspec.ValidationError:
            raise self._not_understood() from None

    def _get(self, kind: type[_Answer], path: str, query: Mapping[str, str] | None = None) -> _Answer:
        return self._decoded(kind, self._send("GET", API + path, fields=query))

    def _post(self, kind: type[_Answer], path: str, content: Mapping[str, Any] | None = None) -> _Answer:
        return self._decoded(kind, self._send("POST", API + path, json=content))

    def _decoded(self, kind: type[_Answer], content: bytes) -> _Answer:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise self._not_understood() from None

    def _not_understood(self) -> EndpointError:
        return EndpointError(f"{self.host}: its answer is not one of Kubeflow Pipelines v2beta1; check --host")

    def _send(self, method: str, path: str, kind: str = "application/json", **content: Any) -> bytes:
        """Send a request and return the answer, of the kind that is asked for; `content` is as urllib3 takes it."""
        headers = {"Accept": kind, **self._access()}
        try:
            answer = self._pool.request(method, self.host + path, headers=headers, **content)
        except HTTPError as error:
            raise EndpointError(f"{self.host}: {_no_answer(error)}") from None
        if not 200 <= answer.status < 300:
            said = _message(answer.data, answer.reason, headers)
            raise EndpointError(f"{self.host}: {_refusal(answer.status, said)}", answer.status)
        if kind.rpartition("/")[2] not in answer.headers.get("Content-Type", ""):
            raise EndpointError(
                f"{self.host}: answers with a web page, not with the API; log in with --token-env or "
                "--cookie-env, and check --host",
                answer.status,
            )
        return answer.data

    def _access(self) -> dict[str, str]:
        """The headers that let us in; a token in a file is read every time, because the cluster replaces it."""
        if self._cookie:
            return {"Cookie": self._cookie}
        token = _token_in(self._token_file) if self._token_file else self._token
        return {"Authorization": f"Bearer {token}"} if token else {}


def _object(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _quoted(part: str) -> str:
    """One part of a path."""
    return quote(part, safe="")


def _message(body: bytes, reason: str | None, headers: Mapping[str, str]) -> str:
    """What the server says about an error, else the reason of HTTP, in a short line without token and cookie."""
    try:
        content = json.loads(body)
        line = str(content.get("message") or content.get("error") or content.get("error_message") or "")
    except (ValueError, AttributeError, RecursionError):
        line = ""
    line = line or reason or ""
    for name in ("Authorization", "Cookie"):
        if secret := headers.get(name, ""):
            line = line.replace(secret, "…").replace(secret.removeprefix("Bearer "), "…")
    line = single_line(line)
    return line if len(line) <= 300 else f"{line[:300]}…"


def _refusal(status: int, said: str) -> str:
    if status >= 500:
        return f"the server failed ({status}): {said}; try again, or see its logs"
    known = {
        401: "not logged in (401); name the variable that holds a valid token with --token-env, or a cookie's with "
        "--cookie-env",
        403: f"not allowed (403): {said}; check the token's rights, and --namespace",
        404: f"not found (404): {said}; check --host and the run's id",
    }
    return known.get(status, f"refused the request ({status}): {said}")


def _no_answer(error: HTTPError) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, SSLError):
        return (
            "no safe connection: its certificate cannot be verified; SSL_CERT_FILE may name the certificate of your "
            "authority"
        )
    if isinstance(reason, NameResolutionError):
        return "no such host; check --host"
    late = isinstance(reason, TimeoutError) and not isinstance(reason, NewConnectionError)
    return f"{'no answer in time' if late else 'nothing answers there'}; check --host and the network"


def _checked_host(host: str) -> str:
    if not host:
        raise EndpointError(
            "no address of Kubeflow: give --host with the address of Kubeflow Pipelines, or cluster.host in the profile"
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
    try:
        return _header_value(file.read_text(encoding="utf-8").strip(), str(file))
    except (OSError, UnicodeDecodeError):
        raise EndpointError(f"{file}: the token cannot be read; {TOKEN_VARIABLE} may name another file") from None
