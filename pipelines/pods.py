"""Pods: what a profile does to a step of a pipeline."""

from typing import TYPE_CHECKING, Any

from kfp import kubernetes
from msgspec.structs import asdict

from csc.pipelines.profile import Pod, Profile, seconds

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

__all__ = ["apply"]


def apply(profile: Profile, task: "PipelineTask", gpus: Any = None) -> "PipelineTask":
    """Give a step of a pipeline what the profile says, and return it.

    All steps of one kind get the same, so that the cluster can store their description once. Those that compute with
    networks (train, evaluate, embed) have `gpus`, a number or an argument of the pipeline, and get the `train` pod.
    """
    trains = gpus is not None
    task.set_container_image(profile.images.train if trains else profile.images.cpu)
    if not profile.caching:
        task.set_caching_options(False)
    if profile.retry.pods:
        retry = profile.retry
        task.set_retry(retry.pods, f"{seconds(retry.wait)}s", retry.factor, f"{seconds(retry.within)}s")
    _set_pod(profile.train if trains else profile.cpu, task)
    _set_images_and_user(profile, task)
    _set_access(profile, task)
    if trains:
        _set_gpus(profile, task, gpus)
    return task


def _set_pod(pod: Pod, task: "PipelineTask") -> None:
    setters = {
        task.set_cpu_request: pod.requests.cpu,
        task.set_memory_request: pod.requests.memory,
        task.set_cpu_limit: pod.limits.cpu,
        task.set_memory_limit: pod.limits.memory,
    }
    for setter, amount in setters.items():
        if amount:
            setter(amount)
    for name, value in pod.node_selector.items():
        kubernetes.add_node_selector(task, name, value)
    for toleration in pod.tolerations:
        given = {name: value for name, value in asdict(toleration).items() if value}
        kubernetes.add_toleration(task, **given)
    if pod.timeout:
        kubernetes.set_timeout(task, seconds(pod.timeout))


def _set_images_and_user(profile: Profile, task: "PipelineTask") -> None:
    if profile.images.pull_policy:
        kubernetes.set_image_pull_policy(task, profile.images.pull_policy)
    if profile.images.pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(profile.images.pull_secrets))
    if profile.user.uid:
        group = profile.user.gid or None
        kubernetes.set_security_context(task, run_as_user=profile.user.uid, run_as_group=group, run_as_non_root=True)


def _set_access(profile: Profile, task: "PipelineTask") -> None:
    """The environment, the secrets and the volume; secrets go by name, and as constants: loops lose parameters here."""
    for name, value in (profile.env | profile.retry.environment()).items():
        task.set_env_variable(name, value)
    if profile.tracking.uri:
        task.set_env_variable("MLFLOW_TRACKING_URI", profile.tracking.uri)
    for secret in (profile.secrets.s3, profile.secrets.mlflow):
        if secret.name:
            kubernetes.use_secret_as_env(task, secret.name, dict(secret.keys))
    if profile.storage.volume.claim:
        volume = profile.storage.volume
        kubernetes.mount_pvc(task, volume.claim, volume.path)


def _set_gpus(profile: Profile, task: "PipelineTask", gpus: Any) -> None:
    """GPUs, and the shared memory that loader processes hand batches through (a pod has 64 MB of it)."""
    if profile.gpu.count:
        task.set_accelerator_type(profile.gpu.resource).set_accelerator_limit(gpus)
    size = {"size_limit": profile.shm_size} if profile.shm_size else {}
    kubernetes.empty_dir_mount(task, volume_name="shm", mount_path="/dev/shm", medium="Memory", **size)
