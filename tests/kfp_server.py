"""A small Kubeflow Pipelines server: the v2beta1 calls that `csc` uses, over HTTP, as strict as the real one.

It refuses what the cluster would refuse: a wrong token, a pipeline that does not parse against the protobuf schema,
arguments that the pipeline does not declare, ids that do not exist. Runs move on one step each time somebody looks.
"""

import contextlib
import email
import email.policy
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

API = "/apis/v2beta1"
MAX_UPLOAD = 32 << 20
TYPES = {"STRING": str, "NUMBER_INTEGER": int, "NUMBER_DOUBLE": (int, float), "BOOLEAN": bool}


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def parse_strictly(documents: list[dict[str, Any]]) -> pipeline_spec_pb2.PipelineSpec:
    """Parse both documents of a compiled pipeline as the cluster does; an unknown field is an error."""
    spec = json_format.ParseDict(documents[0], pipeline_spec_pb2.PipelineSpec())
    deployment = pipeline_spec_pb2.PipelineDeploymentConfig()
    json_format.ParseDict(json_format.MessageToDict(spec.deployment_spec), deployment)
    if not deployment.executors:
        raise ValueError("no executors")
    for document in documents[1:]:
        platform = json_format.ParseDict(document, pipeline_spec_pb2.PlatformSpec())
        settings = json_format.MessageToDict(platform.platforms["kubernetes"].deployment_spec)
        for name, executor in settings["executors"].items():
            if name not in deployment.executors:
                raise ValueError(f"settings of '{name}', which does not exist")
            json_format.ParseDict(executor, kubernetes_executor_config_pb2.KubernetesExecutorConfig())
    return spec


@dataclass
class KfpServer:
    """What the server knows, and how it behaves.

    Attributes:
        token: the bearer token that it wants; none if empty.
        cookie: the cookie that it wants; none if empty.
        multi_user: whether everything must be in a namespace.
        trouble: called with method and path before each answer; may raise `Refused`, or return a raw answer.
        fails_at: title (name and how manieth) of a step that fails.
    """

    token: str = ""
    cookie: str = ""
    multi_user: bool = False
    trouble: Callable[[str, str], tuple[int, str, str] | None] = lambda method, path: None
    fails_at: tuple[str, int] | None = None
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    host: str = ""

    def answer(self, request: "_Request") -> dict[str, Any]:
        """What one call comes to."""
        self._check_access(request)
        if not request.path.startswith(API):
            raise Refused(404, "Not Found")
        part = request.path.removeprefix(API).strip("/").split("/")
        found = self._looked_up(part, request) if request.command == "GET" else self._put(part, request)
        if found is None:
            raise Refused(404, f"no such call: {request.command} {request.path}")
        return found

    def _looked_up(self, part: list[str], request: "_Request") -> dict[str, Any] | None:
        match part:
            case ["experiments"]:
                return self._listed("experiments", self.experiments, request)
            case ["pipelines"]:
                return self._listed("pipelines", self.pipelines, request)
            case ["pipelines", pipeline, "versions"]:
                self._get(self.pipelines, pipeline)
                mine = {key: one for key, one in self.versions.items() if one["pipeline_id"] == pipeline}
                return self._listed("pipeline_versions", mine, request)
            case ["pipelines", pipeline, "versions", version]:
                return self._version(pipeline, version)
            case ["runs", run]:
                return self._looked_at(self._get(self.runs, run))
        return None

    def _put(self, part: list[str], request: "_Request") -> dict[str, Any] | None:
        match part:
            case ["experiments"]:
                return self._made(self.experiments, "experiment_id", request.json())
            case ["pipelines"]:
                return self._made(self.pipelines, "pipeline_id", request.json())
            case ["pipelines", "upload_version"]:
                return self._uploaded(request)
            case ["runs"]:
                return self._started(request.json())
        return None

    def _check_access(self, request: "_Request") -> None:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise Refused(401, "Request header error: there is no valid user identity")
        if self.cookie and request.headers.get("Cookie") != self.cookie:
            raise Refused(401, "Request header error: there is no valid user identity")

    def _get(self, shelf: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
        if key not in shelf:
            raise Refused(404, f"ResourceNotFoundError: {key} not found")
        return shelf[key]

    def _listed(self, name: str, shelf: dict[str, dict[str, Any]], request: "_Request") -> dict[str, Any]:
        namespace = request.query.get("namespace", "")
        if self.multi_user and name != "pipeline_versions" and not namespace:
            raise Refused(400, "Invalid input error: namespace is empty")
        (predicate,) = json.loads(request.query["filter"])["predicates"]
        if set(predicate) != {"operation", "key", "stringValue"} or predicate["operation"] != "EQUALS":
            raise Refused(400, f"Invalid filter: {predicate}")
        found = [
            one
            for one in shelf.values()
            if one[predicate["key"]] == predicate["stringValue"] and one.get("namespace", "") in (namespace, "")
        ]
        return {name: found, "total_size": len(found)} if found else {}

    def _made(self, shelf: dict[str, dict[str, Any]], key: str, wanted: dict[str, Any]) -> dict[str, Any]:
        unknown = set(wanted) - {"name", "display_name", "description", "namespace"}
        if unknown or not wanted.get("display_name"):
            raise Refused(400, f"Invalid input error: {sorted(unknown)}")
        if self.multi_user and not wanted.get("namespace"):
            raise Refused(400, "Invalid input error: namespace is empty")
        if any(one["display_name"] == wanted["display_name"] for one in shelf.values()):
            raise Refused(409, f"Already exist error: {wanted['display_name']}")
        made = {**wanted, key: str(uuid.uuid4())}
        shelf[made[key]] = made
        return made

    def _uploaded(self, request: "_Request") -> dict[str, Any]:
        pipeline = self._get(self.pipelines, request.query["pipelineid"])
        content = request.file("uploadfile")
        if len(content) > MAX_UPLOAD:
            raise Refused(400, "the pipeline is larger than 32 MiB")
        documents = list(yaml.safe_load_all(content))
        try:
            parse_strictly(documents)
        except (json_format.ParseError, ValueError) as error:
            raise Refused(400, f"Failed to parse the pipeline: {error}") from None
        spec = {"pipeline_spec": documents[0]} | ({"platform_spec": documents[1]} if len(documents) > 1 else {})
        version = {
            "pipeline_id": pipeline["pipeline_id"],
            "pipeline_version_id": str(uuid.uuid4()),
            "display_name": request.query["name"],
            "name": request.query["name"],
            "pipeline_spec": spec if len(documents) > 1 else documents[0],
        }
        if any(
            (one["pipeline_id"], one["name"]) == (version["pipeline_id"], version["name"])
            for one in self.versions.values()
        ):
            raise Refused(409, "Already exist error: the version")
        self.versions[version["pipeline_version_id"]] = version
        return version

    def _version(self, pipeline: str, version: str) -> dict[str, Any]:
        found = self._get(self.versions, version)
        if found["pipeline_id"] != pipeline:
            raise Refused(404, f"ResourceNotFoundError: {version} not found")
        return found

    def _started(self, wanted: dict[str, Any]) -> dict[str, Any]:
        unknown = set(wanted) - {
            "display_name",
            "experiment_id",
            "pipeline_version_reference",
            "runtime_config",
            "service_account",
        }
        if unknown:
            raise Refused(400, f"Invalid input error: {sorted(unknown)}")
        self._get(self.experiments, wanted["experiment_id"])
        reference = wanted["pipeline_version_reference"]
        version = self._version(reference["pipeline_id"], reference["pipeline_version_id"])
        spec = version["pipeline_spec"]
        check_arguments(spec.get("pipeline_spec", spec), wanted["runtime_config"]["parameters"])
        run = {**wanted, "run_id": str(uuid.uuid4()), "state": "PENDING", "created_at": _stamp(0)}
        self.runs[run["run_id"]] = run
        return run

    def _looked_at(self, run: dict[str, Any]) -> dict[str, Any]:
        """A run that has moved on by one step since the last look."""
        version = self.versions[run["pipeline_version_reference"]["pipeline_version_id"]]
        spec = version["pipeline_spec"].get("pipeline_spec", version["pipeline_spec"])
        order = list(_steps(spec))
        begun = run.get("begun", 0) + 1
        failing = order.index(self.fails_at) if self.fails_at in order else None
        if failing is not None:
            begun = min(begun, failing + 2)
        run["begun"] = begun
        run["run_details"] = {"task_details": list(_details(order, begun, failing))}
        run["state"] = "RUNNING"
        if failing is not None and begun > failing + 1:
            run |= {"state": "FAILED", "finished_at": _stamp(begun), "error": {"message": "exit code 1"}}
        elif begun > len(order):
            run |= {"state": "SUCCEEDED", "finished_at": _stamp(begun)}
        return {key: value for key, value in run.items() if key != "begun"}


def check_arguments(spec: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse arguments that a pipeline does not declare, of another type, or missing."""
    declared = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, value in given.items():
        if name not in declared:
            raise Refused(400, f"Invalid input error: unknown parameter '{name}'")
        kind = TYPES[declared[name]["parameterType"]]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Refused(400, f"Invalid input error: parameter '{name}' has another type")
    for name, about in declared.items():
        if name not in given and "defaultValue" not in about and not about.get("isOptional"):
            raise Refused(400, f"Invalid input error: parameter '{name}' is missing")


def _steps(spec: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Every container step in the order of execution, with how manieth of its name it is."""
    seen: dict[str, int] = {}
    for name in _ordered(spec["root"]["dag"]["tasks"]):
        component = spec["components"][spec["root"]["dag"]["tasks"][name]["componentRef"]["name"]]
        inner = component.get("dag", {}).get("tasks")
        for step in _ordered(inner) if inner else [name]:
            seen[step] = seen.get(step, 0) + 1
            yield step, seen[step]


def _ordered(tasks: dict[str, Any]) -> Iterator[str]:
    left = dict(tasks)
    while left:
        ready = [name for name, task in left.items() if not set(task.get("dependentTasks", ())) & left.keys()]
        assert ready, "the pipeline has a circle"
        for name in sorted(ready):
            yield name
            del left[name]


def _details(order: list[tuple[str, int]], begun: int, failing: int | None) -> Iterator[dict[str, Any]]:
    """The nodes of the workflow, in no useful order and with the drivers between them, as the cluster lists them."""
    for number, (name, _) in reversed(list(enumerate(order[:begun]))):
        state = "RUNNING" if number == begun - 1 else "SUCCEEDED"
        if number == failing and begun > failing + 1:
            state = "FAILED"
        if failing is not None and number > failing:
            continue
        times = {"start_time": _stamp(number)} | ({} if state == "RUNNING" else {"end_time": _stamp(number + 1)})
        common = {"task_id": str(uuid.uuid4()), **times}
        yield {**common, "display_name": name, "state": state}
        yield {**common, "display_name": f"{name}-driver", "state": "SUCCEEDED"}
        yield {**common, "display_name": "executor", "state": state}
    yield {"task_id": str(uuid.uuid4()), "display_name": "root", "state": "RUNNING", "start_time": _stamp(0)}


def _stamp(minutes: int) -> str:
    return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")


class _Request(BaseHTTPRequestHandler):
    server: "_Http"

    def json(self) -> dict[str, Any]:
        if "json" not in self.headers["Content-Type"]:
            raise Refused(415, "expected JSON")
        content: dict[str, Any] = json.loads(self.body)
        return content

    def file(self, name: str) -> bytes:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        message = email.message_from_bytes(head + self.body, policy=email.policy.HTTP)
        for part in message.iter_parts():
            if part.get_param("name", header="content-disposition") == name:
                return part.get_payload(decode=True)
        raise Refused(400, f"no file '{name}'")

    def _serve(self) -> None:
        kfp = self.server.kfp
        address = urlsplit(self.path)
        self.path, self.query = address.path, {key: values[0] for key, values in parse_qs(address.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kfp.calls.append(f"{self.command} {self.path.removeprefix(API)}")
        try:
            raw = kfp.trouble(self.command, self.path)
            status, kind, text = raw or (200, "application/json", json.dumps(kfp.answer(self)))
        except Refused as error:
            said = {"error": str(error), "code": 3, "message": str(error), "details": []}
            status, kind, text = error.status, "application/json", json.dumps(said)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, kfp: KfpServer) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.kfp = kfp


@contextlib.contextmanager
def running(kfp: KfpServer) -> Iterator[KfpServer]:
    """Serve on a free port of this machine; `kfp.host` is then its address."""
    with _Http(kfp) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        kfp.host = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield kfp
        finally:
            server.shutdown()
            thread.join()
