"""A TrainJob instead of the step's own process: its form, and its life on a cluster that is played here."""

import copy
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from csc.config.groups import TrainSettings
from csc.distributed.cluster import MOST_TRIES, ClusterError, TrainJobs
from csc.distributed.trainjob import HARDENED, SHARED_MEMORY, copy_inputs, job_manifest, job_name, train_on_nodes
from csc.errors import BadConfig, BadData
from csc.scenario import Task
from tests.tracked import fresh_database

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef"
TASK = Task(index=2, total=5, new=("c",), seen=("a", "b", "c"))
NAME = "csc-0123456789abcdef-task-02"
HELD = {
    "runAsUser": 20002,
    "runAsGroup": 20003,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
SHARING = {"fsGroup": 20003, "seccompProfile": {"type": "RuntimeDefault"}}
OWN_POD = {
    "containers": [
        {
            "name": "wait",
            "image": "argo",
            "env": [{"name": "TOKEN", "value": "hunter2"}],
            "securityContext": {"runAsUser": 8737},
        },
        {
            "name": "main",
            "image": "registry/csc-train:1",
            "env": [{"name": "MINIO_SECRET_KEY", "value": "hunter2"}],
            "securityContext": HELD,
        },
    ],
    "securityContext": SHARING,
    "serviceAccountName": "pipeline-runner",
    "imagePullSecrets": [{"name": "regcred"}],
}


def pod(folder: Path, **changes: Any) -> dict[str, Any]:
    """What kfp's TaskConfig says of a step that has two GPUs and a shared volume."""
    whole = {
        "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "64Gi"}, "requests": {"cpu": "8"}},
        "env": [
            {"name": "MLFLOW_TRACKING_URI", "value": "http://mlflow"},
            {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "secret"}}},
        ],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        "volume_mounts": [{"name": "shared", "mountPath": str(folder)}],
        "node_selector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": None,
    }
    return whole | changes


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, str]:
    """Of a step whose inputs lie in its own pod, and whose checkpoints on the shared volume."""
    step = tmp_path / "step"
    step.mkdir()
    inputs = {"split": step / "split.json", "train_view": step / "view.parquet", "prior": step / "registered.json"}
    for name, file in inputs.items():
        file.write_text(name)
    folders = {"out": str(step / "model"), "checkpoints": str(tmp_path / "shared" / "checkpoints"), "features": ""}
    return {"config_json": "{}", **{name: str(file) for name, file in inputs.items()}, **folders}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def as_the_api_reads_it(job: dict[str, Any]) -> Any:
    """A job through the models of the API: wrong types are refused, and fields that it does not know are dropped."""
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="the models of the Kubeflow Trainer API")
    return api.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(job)).to_dict()


@pytest.mark.parametrize("given", [{}, {"env": None, "volumes": None, "volume_mounts": None, "resources": None}])
def test_the_job_has_the_form_of_the_trainer_api(shared: Path, given: dict[str, Any]):
    job = job_manifest(NAME, shared / NAME, TrainSettings(nodes=2), pod(shared, **given), OWN_POD)
    assert as_the_api_reads_it(job) == job


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job["spec"].update(podSpecOverrides=[{}]),
        lambda job: job["spec"]["trainer"].update(nodes=2),
        lambda job: _node(job)["spec"]["containers"][0].update(image="other"),
        lambda job: _node(job)["spec"]["tolerations"][0].update(wrong="x"),
        lambda job: _node(job)["spec"]["securityContext"].update(user=20002),
        lambda job: _node(job)["spec"]["containers"][0]["securityContext"].update(fsGroup=20003),
    ],
)
def test_the_form_of_the_trainer_api_has_no_other_fields(shared: Path, change: Callable[[Any], None]):
    job = job_manifest(NAME, shared / NAME, TrainSettings(nodes=2), pod(shared), copy.deepcopy(OWN_POD))
    change(job)
    assert as_the_api_reads_it(job) != job


def _node(job: dict[str, Any]) -> dict[str, Any]:
    """The template of the job's pods."""
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    template: dict[str, Any] = node["template"]["spec"]["template"]
    return template


def test_the_job_is_the_step_on_more_nodes(shared: Path):
    task = pod(shared)
    job = job_manifest(NAME, shared / NAME, TrainSettings(nodes=3), task, OWN_POD)
    trainer, template = job["spec"]["trainer"], _node(job)
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("registry/csc-train:1", 3, 2)
    assert trainer["command"][-3:] == ["torch.distributed.run", "-m", "csc.distributed.launch"]
    assert trainer["args"] == ["csc.steps.train:learn", str(shared / NAME / "arguments.json")]
    assert trainer["resourcesPerNode"] == task["resources"]
    assert trainer["env"] == [{"name": "PYTHONUNBUFFERED", "value": "1"}, *task["env"]]
    spec = template["spec"]
    assert spec["volumes"] == [*task["volumes"], SHARED_MEMORY, {"name": "csc-tmp", "emptyDir": {}}]
    own_mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "csc-tmp", "mountPath": "/tmp"}]
    mounts = [*task["volume_mounts"], *own_mounts]
    assert spec["containers"] == [{"name": "node", "securityContext": {**HARDENED, **HELD}, "volumeMounts": mounts}]
    assert (spec["nodeSelector"], spec["tolerations"]) == (task["node_selector"], task["tolerations"])
    assert (spec["serviceAccountName"], spec["imagePullSecrets"]) == ("pipeline-runner", [{"name": "regcred"}])
    assert template["metadata"]["labels"] == {"sidecar.istio.io/inject": "false"}
    assert "affinity" not in spec


def test_the_nodes_run_as_the_user_of_the_step(shared: Path):
    spec = _node(job_manifest(NAME, shared / NAME, TrainSettings(nodes=2), pod(shared), OWN_POD))["spec"]
    assert spec["securityContext"] == SHARING
    assert [container["securityContext"] for container in spec["containers"]] == [{**HARDENED, **HELD}]


def test_nobody_on_a_node_can_write_outside_volumes_or_gain_rights(shared: Path):
    (container,) = _node(job_manifest(NAME, shared / NAME, TrainSettings(nodes=2), pod(shared), OWN_POD))["spec"][
        "containers"
    ]
    allowed = container["securityContext"]
    assert allowed["readOnlyRootFilesystem"] is True
    assert allowed["allowPrivilegeEscalation"] is False
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_a_step_without_a_user_leaves_that_of_the_image_to_the_nodes(shared: Path):
    own = {"containers": [{"name": "main", "image": "registry/csc-train:1"}], "securityContext": {}}
    spec = _node(job_manifest(NAME, shared / NAME, TrainSettings(nodes=2), pod(shared), own))["spec"]
    assert "securityContext" not in spec
    assert spec["containers"][0]["securityContext"] == HARDENED


def test_secrets_reach_the_job_by_reference_only(shared: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://anna:hunter2@mlflow")
    text = json.dumps(
        job_manifest(NAME, shared / NAME, TrainSettings(nodes=2), pod(shared, env=pod(shared)["env"][1:]), OWN_POD)
    )
    assert '"secretKeyRef": {"name": "s3", "key": "secret"}' in text
    assert "hunter2" not in text


def test_the_job_tracks_to_the_run_that_kfp_made_for_the_step(shared: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0a1b")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    env = job_manifest(NAME, shared / NAME, TrainSettings(nodes=2), pod(shared), OWN_POD)["spec"]["trainer"]["env"]
    values = {item["name"]: item.get("value") for item in env}
    assert (values["MLFLOW_RUN_ID"], values["MLFLOW_TRACKING_URI"]) == ("0a1b", "http://mlflow")  # the profile's wins


@pytest.mark.parametrize(
    ("processes", "resources", "each"),
    [
        ("auto", None, 1),
        ("auto", {"requests": {"cpu": "4"}}, 1),
        ("auto", {"limits": {"nvidia.com/gpu": "4"}}, 4),
        ("auto", {"requests": {"amd.com/gpu": 2}, "limits": {"amd.com/gpu": "2"}}, 2),
        (3, {"limits": {"nvidia.com/gpu": "4"}}, 3),
    ],
)
def test_a_node_runs_one_process_for_each_gpu_unless_told(shared: Path, processes: Any, resources: Any, each: int):
    settings = TrainSettings(nodes=2, processes=processes)
    job = job_manifest(NAME, shared, settings, pod(shared, resources=resources), OWN_POD)
    assert job["spec"]["trainer"]["numProcPerNode"] == each
    assert job["spec"]["trainer"].get("resourcesPerNode") == resources


@pytest.mark.parametrize("index", [1, 12, 123])
def test_names_fit_with_what_is_added_to_them_for_pods(index: int):
    name = job_name(KEY, Task(index=index, total=200, new=(), seen=()))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-999-abcde") <= 63


def test_inputs_are_staged_where_the_nodes_find_them(arguments: dict[str, str], shared: Path):
    folder = shared / NAME
    copy_inputs(arguments, folder)
    staged = json.loads((folder / "arguments.json").read_text())
    assert staged.keys() == arguments.keys()
    assert [Path(staged[name]).read_text() for name in ("split", "train_view", "prior")] == [
        "split",
        "train_view",
        "prior",
    ]
    assert all(Path(staged[name]).parent == folder for name in ("split", "train_view", "prior", "out"))
    assert (staged["checkpoints"], staged["config_json"]) == (arguments["checkpoints"], "{}")
    copy_inputs(arguments | {"prior": ""}, folder)
    assert json.loads((folder / "arguments.json").read_text())["prior"] == ""
    assert not (folder / "prior").exists()


def api_error(status: int, message: str = "") -> Exception:
    from kubernetes.client import ApiException

    error = ApiException(status=status, reason="Some Reason")
    error.body = json.dumps({"message": message}) if message else "<html>"
    return error


@dataclass
class FakeApi:
    """Both APIs of a cluster; a started job goes through the given states, one with every look at it.

    A call raises what `refuses` has for it, or the next of its `hiccups`. A deleted job is seen until it was waited for
    as often as `lingers` says.
    """

    shared: Path
    name: str = NAME
    states: list[Any] = field(default_factory=list)
    jobs: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    refuses: dict[str, Exception] = field(default_factory=dict)
    hiccups: dict[str, list[Exception]] = field(default_factory=dict)
    lingers: int = 0
    pauses: int = 0

    @property
    def train_jobs(self) -> TrainJobs:
        return TrainJobs(self, self, "team", self.pause)

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.lingers -= 1
        if self.lingers <= 0:
            self.jobs = {name: job for name, job in self.jobs.items() if "deletionTimestamp" not in job["metadata"]}

    def _called(self, name: str, options: dict[str, Any]) -> None:
        expected = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "plural": "trainjobs", "namespace": "team"}
        assert expected.items() <= options.items()
        self._answer(name)

    def _answer(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refuses:
            raise self.refuses[name]
        if self.hiccups.get(name):
            raise self.hiccups[name].pop(0)

    def get_namespaced_custom_object(self, *, name: str, **options: Any) -> Any:
        self._called("get", options)
        if name not in self.jobs:
            raise api_error(404, "not found")
        if self.states and "deletionTimestamp" not in self.jobs[name]["metadata"]:
            state = self.states.pop(0)
            if isinstance(state, Exception):
                raise state
            self.jobs[name]["status"] = state() if callable(state) else state
        return self.jobs[name]

    def create_namespaced_custom_object(self, *, body: Any, **options: Any) -> Any:
        assert (self.shared / "checkpoints" / self.name / "arguments.json").is_file()
        name = body["metadata"]["name"]
        exists = name in self.jobs
        self.jobs.setdefault(name, copy.deepcopy(body))  # by whomever
        self._called("create", options)
        if exists:
            raise api_error(409, "exists")

    def delete_namespaced_custom_object(self, *, name: str, **options: Any) -> Any:
        self._called("delete", options)
        if name not in self.jobs:
            raise api_error(404, "not found")
        if self.lingers > 0:
            self.jobs[name]["metadata"]["deletionTimestamp"] = "2026-11-20T10:00:00Z"
        else:
            del self.jobs[name]

    def read_namespaced_pod(self, name: str, *, namespace: str, _preload_content: bool) -> Any:
        self._answer("pod")
        return SimpleNamespace(data=json.dumps({"spec": OWN_POD}))


def condition(kind: str, message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "reason": kind, "message": message}]}


def node(ready: int) -> dict[str, Any]:
    counts = {"active": 1, "ready": ready, "failed": 0, "succeeded": 0, "suspended": 0}
    return {"conditions": [{"type": "Suspended", "status": "False"}], "jobsStatus": [{"name": "node", **counts}]}


@pytest.fixture
def api(shared: Path) -> FakeApi:
    return FakeApi(shared)


@pytest.fixture
def launch(api: FakeApi, arguments: dict[str, str], shared: Path) -> Callable[[], None]:
    """Run the step on the fake cluster."""
    return lambda: train_on_nodes(arguments, TrainSettings(nodes=2), TASK, KEY, pod(shared), api.train_jobs)


@pytest.fixture
def trained(shared: Path) -> Callable[[], dict[str, Any]]:
    """The state of a job that has just written its model."""

    def complete() -> dict[str, Any]:
        folder = shared / "checkpoints" / NAME / "model"
        folder.mkdir()
        (folder / "model.json").write_text("the model")
        return condition("Complete")

    return complete


def test_the_step_waits_for_its_job_takes_the_model_and_clears_up(
    api: FakeApi, launch: Any, trained: Any, arguments: dict[str, str], shared: Path, capsys: pytest.CaptureFixture[str]
):
    handler = signal.getsignal(signal.SIGTERM)
    api.states = [{}, condition("Suspended"), node(ready=0), node(ready=1), node(ready=1), trained]
    launch()
    assert (Path(arguments["out"]) / "model.json").read_text() == "the model"
    assert [line.split(" · ", 2) for line in capsys.readouterr().out.splitlines()] == [
        ["task 2/5", f"job {NAME}", text]
        for text in (
            "started on 2 nodes with 2 processes each",
            "waiting for its nodes",
            "queued",
            "waiting for its nodes",
            "running",
            "complete",
        )
    ]
    assert api.jobs == {}
    assert list((shared / "checkpoints").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_try_waits_for_the_job_of_the_first(
    api: FakeApi, launch: Any, trained: Any, arguments: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    api.states = [node(ready=1), MemoryError("the step dies without a word")]
    with pytest.raises(MemoryError):
        launch()
    assert list(api.jobs) == [NAME]
    api.states = [node(ready=1), trained]
    launch()
    assert api.calls.count("create") == 1
    assert "found from an earlier try" in capsys.readouterr().out
    assert (Path(arguments["out"]) / "model.json").is_file()


def test_a_finished_job_of_an_earlier_try_is_not_run_again(api: FakeApi, launch: Any, trained: Any):
    api.states = [MemoryError()]
    with pytest.raises(MemoryError):
        launch()
    api.states = [trained]
    launch()
    assert api.calls.count("create") == 1


@pytest.mark.parametrize("end", [condition("Failed", "out of memory"), condition("Complete")], ids=["failed", "lost"])
def test_a_job_that_came_to_nothing_is_replaced(
    api: FakeApi, launch: Any, trained: Any, end: Any, capsys: pytest.CaptureFixture[str]
):
    api.states = [MemoryError()]
    with pytest.raises(MemoryError):
        launch()
    api.states = [end, trained]
    launch()
    assert api.calls.count("create") == 2
    assert "; starting again" in capsys.readouterr().out


def refused_by_a_node(shared: Path) -> dict[str, Any]:
    error = {"kind": "BadData", "message": "train.parquet: broken"}
    (shared / "checkpoints" / NAME / "error.json").write_text(json.dumps(error))
    return node(ready=1)


def told_to_stop(shared: Path) -> dict[str, Any]:
    signal.raise_signal(signal.SIGTERM)
    return {}


@pytest.mark.parametrize(("end", "error"), [(refused_by_a_node, BadData), (told_to_stop, SystemExit)])
def test_a_job_that_is_being_deleted_is_let_go_and_replaced(
    api: FakeApi, launch: Any, trained: Any, shared: Path, end: Any, error: Any, capsys: pytest.CaptureFixture[str]
):
    api.states = [node(ready=1), lambda: end(shared), node(ready=1)]
    api.lingers = 5
    with pytest.raises(error):
        launch()
    assert "deletionTimestamp" in api.jobs[NAME]["metadata"]
    api.states = [node(ready=1), trained]
    launch()
    assert api.calls.count("create") == 2
    assert "being deleted since an earlier try; starting again" in capsys.readouterr().out
    assert api.jobs == {}


def test_a_job_that_never_goes_is_an_error(api: FakeApi, launch: Any):
    api.states, api.lingers = [lambda: told_to_stop(api.shared)], 10 * MOST_TRIES
    with pytest.raises(SystemExit):
        launch()
    with pytest.raises(ClusterError, match=f"^job {NAME}: is being deleted and does not go; see what keeps its pods"):
        launch()
    assert MOST_TRIES <= api.pauses < 2 * MOST_TRIES


def test_a_job_that_somebody_created_meanwhile_is_waited_for(api: FakeApi, launch: Any, trained: Any):
    api.states, api.refuses = [trained], {"create": api_error(409, "exists")}
    launch()
    assert api.calls == ["get", "pod", "create", "get", "delete"]


def test_a_failed_job_ends_the_step_in_one_line_and_stays_for_its_logs(
    api: FakeApi, launch: Any, arguments: dict[str, str]
):
    api.states = [node(ready=1), condition("Failed", "job node\nhas failed")]
    with pytest.raises(ClusterError) as caught:
        launch()
    assert str(caught.value) == (
        f"job {NAME}: failed (job node has failed); "
        f"its logs: kubectl logs -n team -l jobset.sigs.k8s.io/jobset-name={NAME}"
    )
    assert list(api.jobs) == [NAME]
    assert not Path(arguments["out"]).exists()


def test_what_a_node_refuses_the_step_refuses_and_the_job_is_not_tried_again(api: FakeApi, launch: Any, shared: Path):
    api.states = [lambda: refused_by_a_node(shared)]
    with pytest.raises(BadData, match=r"^train\.parquet: broken$"):
        launch()
    assert api.jobs == {}


def test_an_old_refusal_does_not_count_for_a_new_try(api: FakeApi, launch: Any, trained: Any, shared: Path):
    folder = shared / "checkpoints" / NAME
    folder.mkdir(parents=True)
    (folder / "error.json").write_text('{"kind": "BadData", "message": "old"}')
    api.states = [trained]
    launch()


def test_a_step_that_is_told_to_stop_takes_its_job_along(api: FakeApi, launch: Any):
    api.states = [node(ready=1), lambda: told_to_stop(api.shared)]
    with pytest.raises(SystemExit) as end:
        launch()
    assert end.value.code == 128 + signal.SIGTERM
    assert api.jobs == {}


def test_a_cluster_that_does_not_answer_for_a_while_is_waited_for(api: FakeApi, launch: Any, trained: Any):
    api.states = [node(ready=1), api_error(500), api_error(429), api_error(0), node(ready=1), trained]
    launch()
    assert api.jobs == {}


@pytest.mark.parametrize("call", ["get", "pod", "create", "delete"])
def test_no_call_is_lost_by_an_answer_that_does_not_come(api: FakeApi, launch: Any, trained: Any, call: str):
    from urllib3.exceptions import HTTPError

    api.states, api.hiccups = [node(ready=1), trained], {call: [api_error(503), HTTPError("reset by peer")]}
    launch()
    assert api.jobs == {}
    assert (api.calls.count(call), api.pauses) == (5 if call == "get" else 3, 3)


def test_a_cluster_that_never_answers_again_is_an_error(api: FakeApi, launch: Any):
    api.states = [node(ready=1), *[api_error(503)] * (MOST_TRIES + 1)]
    with pytest.raises(ClusterError, match=f"^cannot read TrainJob {NAME} in namespace team: 503 Some Reason$"):
        launch()


def test_a_deleted_job_is_noticed(api: FakeApi, launch: Any):
    api.states = [node(ready=1), api_error(404)]
    with pytest.raises(ClusterError, match=f"^job {NAME}: somebody deleted it; try the step again$"):
        launch()


def test_a_model_that_is_not_seen_from_here_is_an_error(api: FakeApi, launch: Any, arguments: dict[str, str]):
    api.states = [condition("Complete")]
    with pytest.raises(ClusterError, match=r"its model is not in .*/model; the nodes must share that volume"):
        launch()
    assert api.pauses >= MOST_TRIES
    assert not Path(arguments["out"]).exists()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ("create", api_error(403, "trainjobs is forbidden"), "forbidden; let the service account of the step get, cre"),
        ("create", api_error(404, "no such resource"), "install Kubeflow Trainer 2.2 or later"),
        ("create", api_error(422, "spec:\n  bad"), f"cannot create TrainJob {NAME} in namespace team: spec: bad"),
        ("pod", api_error(403, "pods is forbidden"), "pods is forbidden; let the service account"),
    ],
)
def test_a_refusal_of_the_api_is_one_line_that_says_what_to_do(
    api: FakeApi, launch: Any, call: str, error: Exception, text: str
):
    api.refuses[call] = error
    with pytest.raises(ClusterError) as caught:
        launch()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "checkpoints", "text"),
    [
        ({}, "", "it is not set"),
        ({}, "/elsewhere", "/elsewhere is on none"),
        ({"volume_mounts": None}, "{shared}/checkpoints", "is on none"),
        ({"volumes": [{"name": "shared", "emptyDir": {}}]}, "{shared}", "'shared', which each pod has for itself"),
    ],
)
def test_checkpoints_that_the_nodes_cannot_see_are_refused(
    api: FakeApi, arguments: dict[str, str], shared: Path, changes: dict[str, Any], checkpoints: str, text: str
):
    wrong = arguments | {"checkpoints": checkpoints.format(shared=shared)}
    with pytest.raises(BadConfig, match=r"^train\.nodes=2: needs 'checkpoints' on a volume") as caught:
        train_on_nodes(wrong, TrainSettings(nodes=2), TASK, KEY, pod(shared, **changes), api.train_jobs)
    assert text in str(caught.value)
    assert api.calls == []


def test_several_nodes_need_a_cluster(arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BadConfig, match=r"train\.nodes=2: several nodes need a Kubeflow cluster .* set train\.nodes=1"):
        train_on_nodes(arguments, TrainSettings(nodes=2), TASK, KEY, {})


class Nodes(FakeApi):
    """A cluster whose nodes are this machine: a created job runs its command, told by the environment what it is."""

    def create_namespaced_custom_object(self, *, body: Any, **options: Any) -> Any:
        super().create_namespaced_custom_object(body=body, **options)
        trainer = body["spec"]["trainer"]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        runtime = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        plain = {item["name"]: item["value"] for item in trainer["env"]}
        command = [sys.executable, *trainer["command"][1:], *trainer["args"]]
        assert trainer["command"][0] == "python"
        self.processes = [
            self.start(command, {**plain, **runtime, "PET_NODE_RANK": str(rank)}) for rank in range(trainer["numNodes"])
        ]

    def start(self, command: list[str], variables: dict[str, str]) -> Any:
        """Start a node."""
        return subprocess.Popen(command, env={**os.environ, **variables}, cwd=ROOT)

    def pause(self, seconds: float) -> None:
        for process in self.processes:
            process.wait(timeout=300)

    def get_namespaced_custom_object(self, *, name: str, **options: Any) -> Any:
        job = super().get_namespaced_custom_object(name=name, **options)
        ends = [process.poll() for process in self.processes]
        if None not in ends:
            job["status"] = condition("Failed" if any(ends) else "Complete")
        return job


class ForkedNodes(Nodes):
    """Nodes and their processes are forks of this process, which has imported torch, and do what the commands do."""

    def start(self, command: list[str], variables: dict[str, str]) -> Any:
        assert command[1:3] == ["-m", "torch.distributed.run"]
        process = multiprocessing.get_context("fork").Process(target=_be_node, args=(command[3:], variables))
        process.start()

        def poll() -> int | None:
            return process.exitcode

        return SimpleNamespace(wait=process.join, poll=poll)


def _be_node(words: list[str], variables: dict[str, str]) -> None:
    from torch.distributed import run

    from tests.unit.training.ranks import forked_ranks

    os.environ.update(variables)
    with forked_ranks():
        run.main(words)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of the train step of a base task, with a data set on the shared volume."""
    from csc.data.ingest.digits import ingest_digits
    from csc.steps.build_dataset import build_dataset
    from csc.steps.ingest import ingest
    from csc.steps.split_labels import split_labels

    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path))
    config = {
        "train": {"epochs": 1, "batch_size": 16, "nodes": 2, "workers": 0},
        "backbone": {"name": "test_byobnet"},
        "cigcn": {"width": 8},
        "input": {"size": 32},
    }
    data = ingest_digits(tmp_path / "shared" / "digits", train=40, test=10, size=32).path
    origin = ingest("digits-b0c5", str(data)).to_json()
    split, views = str(tmp_path / "split.json"), [str(tmp_path / f"{name}.parquet") for name in ("train", "test")]
    split_labels(origin, "digits-b0c5", 1, 2, split)
    build_dataset(origin, split, json.dumps(config), *views)
    files = {"config_json": json.dumps(config), "split": split, "train_view": views[0], "prior": "", "features": ""}
    return files | {"out": str(tmp_path / "step" / "model"), "checkpoints": str(tmp_path / "shared" / "checkpoints")}


def test_a_job_that_continues_another_model_has_another_name(
    inputs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from csc.steps.train import train
    from tests.trained import write_registered

    keys: list[str] = []
    monkeypatch.setattr(
        "csc.distributed.trainjob.train_on_nodes", lambda arguments, settings, task, key, pod: keys.append(key)
    )
    monkeypatch.setattr("csc.steps.train.read_card", MagicMock())  # of the model that no job has made
    for fingerprint in ("a" * 64, "b" * 64, "a" * 64):
        train(**inputs | {"prior": write_registered(tmp_path / "registered.json", fingerprint)})
    train(**inputs)
    one, another, again, none = keys
    assert one == again
    assert len({one, another, none}) == 3


@pytest.mark.slow
def test_the_nodes_of_a_job_train_the_model_that_one_process_would(inputs: dict[str, str], shared: Path):
    from csc.steps.train import learn

    own, task = inputs | {"out": str(shared.parent / "alone" / "model"), "checkpoints": ""}, Task(1, 2, (), ())
    learn(**own)
    shared_volume = pod(shared, env=[{"name": "OMP_NUM_THREADS", "value": "1"}], resources=None)
    nodes = Nodes(shared, name=job_name(KEY, task))
    train_on_nodes(inputs, TrainSettings(nodes=2), task, KEY, shared_volume, nodes.train_jobs)
    one, many = (json.loads((Path(made["out"]) / "training.json").read_text()) for made in (own, inputs))
    assert many["epochs"][0]["loss"] == pytest.approx(one["epochs"][0]["loss"], rel=1e-5)
    assert (Path(inputs["out"]) / "model.safetensors").is_file()
    assert nodes.jobs == {}


@pytest.mark.slow
def test_a_node_that_refuses_its_input_ends_the_step_with_the_same_line(inputs: dict[str, str], shared: Path):
    Path(inputs["train_view"]).write_text("nonsense")
    task = Task(1, 2, (), ())
    nodes = ForkedNodes(shared, name=job_name(KEY, task))
    with pytest.raises(BadData) as caught:
        train_on_nodes(inputs, TrainSettings(nodes=2), task, KEY, pod(shared, env=[], resources=None), nodes.train_jobs)
    assert "train_view" in str(caught.value)
    assert nodes.jobs == {}
    assert not Path(inputs["out"]).exists()
