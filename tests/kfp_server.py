"""A small Kubeflow Pipelines server: the v2beta1 calls that `csc` and `kfp` use, over HTTP, as strict as the real one.

It refuses what the cluster would refuse: a wrong token, a pipeline that does not parse against the protobuf schema,
arguments that the pipeline does not declare, ids that do not exist. Runs move on one step each time somebody looks, and
are described as a real one describes them (`tests.kfp_nodes`). `record` adds an answer of a real server.
"""

import contextlib
import email
import email.policy
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.kfp_nodes import EPOCH, Scene, Workflow, pipeline_tree, stamp

API = "/apis/v2beta1"
MAX_UPLOAD = 32 << 20
EQUALS = ("EQUALS", 1)  # kfp sends the number of the operation
TOKEN = "a-token-nobody-may-see"
COOKIE = "oauth2_proxy_kubeflow=a-cookie-nobody-may-see"
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
        fails_at: name of a step and how manieth of its name it is; that one fails.
        tries: how many tries steps take, by name and number.
        reused: steps that are taken from the cache, by name and number.
        pending: whether the pod of the step that runs waits for a node.
        named_steps: after how many steps the workflow is over 1 MiB and steps are no longer named.
        logs: what pods have printed, by their names; texts of all others are gone.
        pages: whether it stands behind the address of Kubeflow's pages, which hand out logs at another path.
        retries: whether it takes workflows back to try them again.
    """

    token: str = ""
    cookie: str = ""
    multi_user: bool = False
    trouble: Callable[[str, str], tuple[int, str, str] | None] = lambda method, path: None
    fails_at: tuple[str, int] | None = None
    tries: dict[tuple[str, int], int] = field(default_factory=dict)
    reused: set[tuple[str, int]] = field(default_factory=set)
    pending: bool = False
    named_steps: int | None = None
    logs: dict[str, str] = field(default_factory=dict)
    pages: bool = False
    retries: bool = True
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    progress: dict[str, "Progress"] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    host: str = ""

    def record(self, answer: dict[str, Any], documents: list[dict[str, Any]]) -> str:
        """Add a run as a real server described it, of a compiled pipeline; return its id."""
        reference = answer["pipeline_version_reference"]
        self._keep_version(reference["pipeline_id"], reference["pipeline_version_id"], "recorded", documents)
        self.experiments[answer["experiment_id"]] = {"experiment_id": answer["experiment_id"], "display_name": "csc"}
        self.runs[answer["run_id"]] = answer
        return str(answer["run_id"])

    def answer(self, request: "_Request") -> dict[str, Any] | str:
        """What one call comes to."""
        self._check_access(request)
        if not request.path.startswith(API):
            return self._log(request)
        part = request.path.removeprefix(API).strip("/").split("/")
        found = self._looked_up(part, request) if request.command == "GET" else self._put(part, request)
        if found is None:
            raise Refused(404, f"no such call: {request.command} {request.path}")
        return found

    def _looked_up(self, part: list[str], request: "_Request") -> dict[str, Any] | None:
        match part:
            case ["healthz"]:
                return {"multi_user": self.multi_user}
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
            case ["experiments", experiment]:
                return self._get(self.experiments, experiment)
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
            case ["runs", call] if call.endswith(":terminate"):
                return self._terminated(self._get(self.runs, call.removesuffix(":terminate")))
            case ["runs", call] if call.endswith(":retry"):
                return self._retried(self._get(self.runs, call.removesuffix(":retry")))
        return None

    def _log(self, request: "_Request") -> str:
        if self.pages and request.path == "/k8s/pod/logs":
            run_id, pod = request.query["runid"], request.query["podname"]
            if self.multi_user and not request.query.get("podnamespace"):
                raise Refused(422, "podnamespace argument is required")
        else:
            match request.path.split("/"):
                case ["", "apis", "v1alpha1", "runs", run_id, "nodes", pod, "log"] if not self.pages:
                    pass
                case _:
                    raise Refused(404, "Not Found")
        self._get(self.runs, run_id)
        if pod not in self.logs:
            raise Refused(500, f"Failed to read logs from pod {pod} due to error fetching the pod")
        return self.logs[pod]

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
        if set(predicate) != {"operation", "key", "stringValue"} or predicate["operation"] not in EQUALS:
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
        documents = list(yaml.load_all(content, yaml.CSafeLoader))
        check_pipeline(documents)
        name = request.query["name"]
        if any((one["pipeline_id"], one["name"]) == (pipeline["pipeline_id"], name) for one in self.versions.values()):
            raise Refused(409, "Already exist error: the version")
        return self._keep_version(pipeline["pipeline_id"], str(uuid.uuid4()), name, documents)

    def _keep_version(
        self, pipeline_id: str, version_id: str, name: str, documents: list[dict[str, Any]]
    ) -> dict[str, Any]:
        both = {"pipeline_spec": documents[0], "platform_spec": documents[-1]}
        self.versions[version_id] = {
            "pipeline_id": pipeline_id,
            "pipeline_version_id": version_id,
            "display_name": name,
            "name": name,
            "pipeline_spec": both if len(documents) > 1 else documents[0],
        }
        return self.versions[version_id]

    def _version(self, pipeline: str, version: str) -> dict[str, Any]:
        found = self._get(self.versions, version)
        if found["pipeline_id"] != pipeline:
            raise Refused(404, f"ResourceNotFoundError: {version} not found")
        return found

    def _version_of(self, run: dict[str, Any]) -> dict[str, Any]:
        """The version that a run names, or the run itself, which then carries its pipeline under the same key."""
        if (reference := run.get("pipeline_version_reference")) is None:
            return run
        return self._version(reference["pipeline_id"], reference["pipeline_version_id"])

    def _started(self, wanted: dict[str, Any]) -> dict[str, Any]:
        unknown = set(wanted) - {
            "display_name",
            "experiment_id",
            "pipeline_spec",
            "pipeline_version_reference",
            "runtime_config",
            "service_account",
        }
        if unknown or ("pipeline_spec" in wanted) == ("pipeline_version_reference" in wanted):
            raise Refused(400, f"Invalid input error: {sorted(unknown) or 'one pipeline is needed'}")
        self._get(self.experiments, wanted["experiment_id"])
        version = self._version_of(wanted)
        if version is wanted:
            content = wanted["pipeline_spec"]
            check_pipeline(
                [content["pipeline_spec"], content["platform_spec"]] if "platform_spec" in content else [content]
            )
        check_arguments(spec_of(version), wanted["runtime_config"].get("parameters", {}))
        run_id = str(uuid.uuid4())
        times = {"created_at": stamp(0), "scheduled_at": stamp(0), "finished_at": EPOCH}
        run = {**wanted, "run_id": run_id, "storage_state": "AVAILABLE", **times, "state": "PENDING"}
        self.runs[run_id] = run
        self.progress[run_id] = Progress(f"{spec_of(version)['pipelineInfo']['name']}-{run_id[:5]}")
        return run

    def _looked_at(self, run: dict[str, Any]) -> dict[str, Any]:
        """A run that has moved on by one step since the last look; a recorded one stays as it is."""
        progress = self.progress.get(run["run_id"])
        if progress is None:
            return run
        if progress.stopped:
            return run | {"state": "CANCELED", "finished_at": stamp(progress.begun)}
        root = pipeline_tree(spec_of(self._version_of(run)))
        counted = list(_counted(step.key[-1] for step in root.steps()))
        failing = counted.index(self.fails_at) if self.fails_at in counted else None
        last = len(counted) + 1 if failing is None else failing + 2
        progress.begun = min(progress.begun + 1, last)
        scene = Scene(
            progress.begun,
            failing,
            {counted.index(step): tries for step, tries in self.tries.items()},
            frozenset(counted.index(step) for step in self.reused),
            self.pending,
        )
        workflow = progress.workflow = Workflow(root, progress.name, scene)
        details = workflow.details()
        if self.named_steps is not None and progress.begun > self.named_steps:
            scene.begun, scene.driving = self.named_steps, True
            then = Workflow(root, progress.name, scene)
            scene.begun = progress.begun
            details = [*then.details(), *workflow.entries(self.named_steps - 1)]
        run["state"] = workflow.state
        if workflow.state != "RUNNING":
            run["finished_at"] = stamp(progress.begun)
        return run | {"run_details": {"task_details": details}}

    def _terminated(self, run: dict[str, Any]) -> dict[str, Any]:
        if run["state"] in ("SUCCEEDED", "FAILED", "CANCELED"):
            raise Refused(400, f"Failed to terminate run {run['run_id']}: it has ended")
        self.progress[run["run_id"]].stopped = True
        return {}

    def _retried(self, run: dict[str, Any]) -> dict[str, Any]:
        if run["state"] != "FAILED":
            raise Refused(400, "Workflow must be Failed/Error to retry")
        if not self.retries:
            raise Refused(
                500, "Failed to retry run: rpc error: trying to send message larger than max: offload node\nstatus"
            )
        self.fails_at = None
        run |= {"state": "RUNNING", "finished_at": EPOCH}
        if run["run_id"] in self.progress:
            self.progress[run["run_id"]].begun -= 2
        return {}


@dataclass
class Progress:
    """How far a run has come."""

    name: str
    begun: int = 0
    stopped: bool = False
    workflow: Workflow | None = None


def check_pipeline(documents: list[dict[str, Any]]) -> None:
    """Refuse a pipeline that the cluster could not parse."""
    try:
        parse_strictly(documents)
    except (json_format.ParseError, ValueError) as error:
        raise Refused(400, f"Failed to parse the pipeline: {error}") from None


def spec_of(version: dict[str, Any]) -> dict[str, Any]:
    """The pipeline of a version, or of a run that carries its own, without the document of the platform."""
    content: dict[str, Any] = version["pipeline_spec"]
    return dict(content.get("pipeline_spec", content))


def _counted(names: Iterator[str]) -> Iterator[tuple[str, int]]:
    """Names, each with how manieth of its kind it is."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name, seen[name]


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
            status, kind, text = kfp.trouble(self.command, self.path) or self._answer(kfp)
        except Refused as error:
            said: dict[str, Any] = {"error": str(error), "code": 3, "message": str(error), "details": []}
            if not self.path.startswith(API):
                said = {"error_message": str(error), "error_details": f"{error}\ngoroutine 1"}
            status, kind, text = error.status, "application/json", json.dumps(said)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _answer(self, kfp: KfpServer) -> tuple[int, str, str]:
        found = kfp.answer(self)
        if isinstance(found, str):
            return 200, "text/plain", found
        return 200, "application/json", json.dumps(found)

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
