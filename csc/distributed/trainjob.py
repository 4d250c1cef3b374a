"""Training on several nodes: a TrainJob of the Kubeflow Trainer does what otherwise the step's own process does.

With `train.nodes` above 1 the step copies its inputs to a folder that the nodes can read, starts the job, waits, and
takes the model from there:

    <checkpoints>/<job>/  arguments.json · split · train_view · prior · model/ · error.json (if it was refused)

So `checkpoints` must be on a volume of the step that many pods may write (ReadWriteMany); the nodes mount the same
volumes at the same paths. The images must be on such a volume too, or in an object store. Image, service account, pull
secrets and user (with all of the security context) are those of the step's own pod; resources, environment, volumes and
node selection are those of its task, which the pipeline passes on. Secrets go by reference, never by value.

The job's name says which run and task it is, and from which model. A retried step finds the job of the try before: it
waits for one that runs, and replaces one that failed, which then resumes from its checkpoint. A finished job is
deleted; a failed one is left for its logs to be read, until the next try. Needs Kubeflow Trainer 2.2 or later.
"""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csc.config.groups import TrainSettings
from csc.distributed.cluster import API, MOST_TRIES, POLL_SECONDS, ClusterError, TrainJobs
from csc.distributed.launch import raise_error
from csc.distributed.process import signal_handlers
from csc.errors import BadConfig
from csc.scenario import Task
from csc.storage import atomic_folder, local_path, write_json

__all__ = ["copy_inputs", "job_manifest", "job_name", "train_on_nodes"]

RUNTIME = "torch-distributed"
NODE = "node"  # how the runtime calls its job and its container
UNBUFFERED = {"name": "PYTHONUNBUFFERED", "value": "1"}
INPUTS = ("split", "train_view", "prior")
PLUGIN_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID", "MLFLOW_WORKSPACE")
# For loader processes; of the volumes of a step Kubeflow passes on only those that outlive a pod.
SHARED_MEMORY = {"name": "shm", "emptyDir": {"medium": "Memory"}}
TEMPORARY = {"name": "csc-tmp", "emptyDir": {}}  # all that is written outside volumes is below /tmp
# What Kubeflow Pipelines sets for the containers of steps, and a root file system that nobody can write.
HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
Pod = Mapping[str, Any]  # fields of kfp's TaskConfig: resources, env, volumes, volume_mounts, node_selector, …


def train_on_nodes(
    arguments: Mapping[str, str],
    settings: TrainSettings,
    task: Task,
    key: str,
    pod: Pod,
    jobs: TrainJobs | None = None,
) -> None:
    """Run the train step with these arguments as a TrainJob and wait for its model.

    `key` identifies the run and the model that it continues, alike in all tries of a task. The job runs in the cluster
    that this pod is part of, if none is given.
    """
    jobs = jobs or TrainJobs.here(settings.nodes)
    name = job_name(key, task)
    folder = _shared_folder(arguments["checkpoints"], pod, settings.nodes) / name
    job = _Job(jobs, name, folder, f"task {task.index}/{task.total} · job {name}")
    with job.delete_job_on_stop():
        if not job.found():
            copy_inputs(arguments, folder)
            job.start(job_manifest(name, folder, settings, pod, jobs.own_pod()))
        job.wait()
    with atomic_folder(Path(arguments["out"])) as temporary:
        shutil.copytree(job.model(), temporary, dirs_exist_ok=True)
    jobs.delete(name)
    shutil.rmtree(folder, ignore_errors=True)


def job_name(key: str, task: Task) -> str:
    """The name of a task's job: short, as the names of its pods are longer, and the same for every try."""
    return f"csc-{key}-task-{task.index:02d}"


def copy_inputs(arguments: Mapping[str, str], folder: Path) -> None:
    """Copy the step's inputs into a folder that the nodes can read, with arguments that name the copies."""
    with atomic_folder(folder) as temporary:
        staged = {**arguments, "out": str(folder / "model")}
        for name in INPUTS:
            if arguments[name]:
                shutil.copyfile(arguments[name], temporary / name)
                staged[name] = str(folder / name)
        write_json(temporary / "arguments.json", staged)


def job_manifest(name: str, folder: Path, settings: TrainSettings, pod: Pod, own: Mapping[str, Any]) -> dict[str, Any]:
    """The TrainJob that runs the train step with the arguments in a folder, on a volume that all nodes mount.

    Image, pull secrets, service account and security contexts are those of `own`, the spec of the step's pod.
    """
    container = next((item for item in own["containers"] if item["name"] == "main"), own["containers"][0])
    trainer = {
        "image": container["image"],
        # torchrun: the runtime tells it by its environment how many nodes and processes there are, and where they meet
        "command": ["python", "-m", "torch.distributed.run", "-m", "csc.distributed.launch"],
        "args": ["csc.steps.train:learn", str(folder / "arguments.json")],
        "numNodes": settings.nodes,
        "numProcPerNode": _processes_per_node(settings, pod),
        "env": list({item["name"]: item for item in [UNBUFFERED, *_injected(), *(pod.get("env") or [])]}.values()),
        "resourcesPerNode": pod.get("resources"),
    }
    paths = {SHARED_MEMORY["name"]: "/dev/shm", TEMPORARY["name"]: "/tmp"}
    mounts = [{"name": volume, "mountPath": path} for volume, path in paths.items()]
    process = {
        "name": NODE,
        "securityContext": {**HARDENED, **(container.get("securityContext") or {})},
        "volumeMounts": [*(pod.get("volume_mounts") or []), *mounts],
    }
    spec = {
        "serviceAccountName": own.get("serviceAccountName"),
        "imagePullSecrets": own.get("imagePullSecrets"),
        "securityContext": own.get("securityContext"),
        "volumes": [*(pod.get("volumes") or []), SHARED_MEMORY, TEMPORARY],
        "containers": [_present(process)],
        "nodeSelector": pod.get("node_selector"),
        "affinity": pod.get("affinity"),
        "tolerations": pod.get("tolerations"),
    }
    template = {
        "metadata": {"labels": {"sidecar.istio.io/inject": "false"}},  # a sidecar would outlive the training
        "spec": _present(spec),
    }
    node = {"name": NODE, "template": {"spec": {"template": template}}}
    patch = {"manager": "csc/train", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    return {
        "apiVersion": f"{API['group']}/{API['version']}",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "csc"}},
        "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": _present(trainer), "runtimePatches": [patch]},
    }


def _injected() -> list[dict[str, str]]:
    """What KFP's MLflow plugin has put into this container, of which the pipeline knows nothing; no login among it."""
    found = {name: os.environ.get(name, "") for name in PLUGIN_VARIABLES}
    return [{"name": name, "value": value} for name, value in found.items() if value and "@" not in value]


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _processes_per_node(settings: TrainSettings, pod: Pod) -> int:
    """As many as the settings say; otherwise one for each GPU that a node is given, and one on the CPU."""
    if settings.processes != "auto":
        return settings.processes
    resources = pod.get("resources") or {}
    given = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return max(sum(int(amount) for name, amount in given.items() if "gpu" in name), 1)


def _shared_folder(checkpoints: str, pod: Pod, nodes: int) -> Path:
    """The folder of checkpoints, if the nodes can see it, as far as can be told from here."""
    wanted = f"train.nodes={nodes}: needs 'checkpoints' on a volume of the step that many pods may write"
    if not checkpoints:
        raise BadConfig(f"{wanted}; it is not set")
    folder = local_path(checkpoints)
    mounts = [mount for mount in pod.get("volume_mounts") or [] if folder.is_relative_to(mount["mountPath"])]
    if not mounts:
        raise BadConfig(f"{wanted}; {checkpoints} is on none")
    name = max(mounts, key=lambda mount: len(mount["mountPath"]))["name"]
    volume: Mapping[str, Any] = next((volume for volume in pod.get("volumes") or [] if volume["name"] == name), {})
    if volume.keys() & {"emptyDir", "ephemeral"}:
        raise BadConfig(f"{wanted}; {checkpoints} is on '{name}', which each pod has for itself")
    return folder


def _state(job: Mapping[str, Any]) -> str:
    """What a TrainJob is doing: `complete`, or `failed` with the reason, or anything else while it is not over."""
    status = job.get("status") or {}
    true = {item["type"]: item for item in status.get("conditions") or [] if item["status"] == "True"}
    if "Complete" in true:
        return "complete"
    if "Failed" in true:
        reason = true["Failed"].get("message") or true["Failed"].get("reason") or "no reason given"
        return f"failed ({' '.join(reason.split())})"
    if "Suspended" in true:
        return "queued"
    ready = any(item["name"] == NODE and item.get("ready") for item in status.get("jobsStatus") or [])
    return "running" if ready else "waiting for its nodes"


@dataclass
class _Job:
    """One TrainJob from its start to its end."""

    jobs: TrainJobs
    name: str
    folder: Path
    title: str
    shown: str = ""

    def say(self, text: str) -> None:
        """Print a state, unless it was the last one printed."""
        if text != self.shown:
            self.shown = text
            print(f"{self.title} · {text}", flush=True)

    def found(self) -> bool:
        """Whether an earlier try has left a job to wait for; one that failed is deleted."""
        job = self.jobs.get(self.name)
        if job is None:
            return False
        state = _state(job)
        if job["metadata"].get("deletionTimestamp"):  # it stays until its pods are gone, with the state that it had
            self.say("being deleted since an earlier try; starting again")
        elif state.startswith("failed") or (state == "complete" and not (self.folder / "model").is_dir()):
            self.say(f"{state}; starting again")
            self.jobs.delete(self.name)
        else:
            self.say("found from an earlier try")
            return True
        self._wait_until(
            lambda: self.jobs.get(self.name) is None,
            "is being deleted and does not go; see what keeps its pods, then try again",
        )
        return False

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Create the job."""
        self.jobs.create(manifest)
        trainer = manifest["spec"]["trainer"]
        self.say(f"started on {trainer['numNodes']} nodes with {trainer['numProcPerNode']} processes each")

    def wait(self) -> None:
        """Follow the job to its end; raise if it failed, or what a process on a node refused to do."""
        while True:
            refusal = self.folder / "error.json"
            if refusal.is_file():
                self.jobs.delete(self.name)  # another try would be refused, too
                raise_error(refusal)
            job = self.jobs.get(self.name)
            if job is None:
                raise ClusterError(f"job {self.name}: somebody deleted it; try the step again")
            state = _state(job)
            self.say(state)
            if state == "complete":
                return
            if state.startswith("failed"):
                logs = f"kubectl logs -n {self.jobs.namespace} -l jobset.sigs.k8s.io/jobset-name={self.name}"
                raise ClusterError(f"job {self.name}: {state}; its logs: {logs}")
            self.jobs.pause(POLL_SECONDS)

    def model(self) -> Path:
        """The folder that a finished job has written; a shared volume may take a moment to show it."""
        folder = self.folder / "model"
        self._wait_until(folder.is_dir, f"its model is not in {folder}; the nodes must share that volume")
        return folder

    def _wait_until(self, condition: Callable[[], bool], problem: str) -> None:
        for _ in range(MOST_TRIES):
            if condition():
                return
            self.jobs.pause(POLL_SECONDS)
        raise ClusterError(f"job {self.name}: {problem}")

    @contextlib.contextmanager
    def delete_job_on_stop(self) -> Iterator[None]:
        """Delete the job if the step is told to stop, as when a person ends the run; its checkpoint stays."""
        with signal_handlers({signal.SIGTERM: lambda number, _: sys.exit(128 + number)}):
            try:
                yield
            except (KeyboardInterrupt, SystemExit):
                with contextlib.suppress(ClusterError):
                    self.jobs.delete(self.name)
                raise
