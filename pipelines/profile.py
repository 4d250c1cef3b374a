"""Profiles: what is particular to the place where a pipeline runs, in one small YAML file.

`profiles/*.yaml` are shipped; a person copies one and edits it. A profile names secrets, it never holds one. Every key
has a default, and no profile at all is the same as `local`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from csc.components.image import CPU_IMAGE, TRAIN_IMAGE
from csc.errors import BadConfig
from csc.pipelines.strict import read_strict
from csc.retry import Retries
from csc.scenario import Scenario
from csc.storage import local_path

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

__all__ = ["SHIPPED", "Profile", "apply", "on_this_machine", "read_profile", "run_defaults"]

_FOLDER = Path(__file__).parent / "profiles"
SHIPPED = {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Images:
    """The two images: `cpu` for the light steps, `train` for the heavy ones; by digest where it can be."""

    cpu: str = CPU_IMAGE
    train: str = TRAIN_IMAGE
    pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class User:
    """Who runs in the containers; 0 leaves it to the image."""

    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Gpu:
    """The accelerators of a heavy step: the name that nodes give them, and how many; 0 for none."""

    resource: str = "nvidia.com/gpu"
    count: int = 1


@dataclass(frozen=True)
class Resources:
    """Amounts as Kubernetes writes them; empty for none."""

    cpu: str = ""
    memory: str = ""


@dataclass(frozen=True)
class Toleration:
    """A taint that a step may be put on in spite of."""

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


@dataclass(frozen=True)
class Pod:
    """What a step asks for, where it may run, and how long one try may take."""

    requests: Resources = field(default_factory=Resources)
    limits: Resources = field(default_factory=Resources)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    timeout: str = ""


@dataclass(frozen=True)
class Volume:
    """A claim that all steps mount; empty for none."""

    claim: str = ""
    path: str = "/mnt/csc"


@dataclass(frozen=True)
class Storage:
    """Where data sets and checkpoints are; `{dataset}` stands for the scenario's data set."""

    volume: Volume = field(default_factory=Volume)
    data: str = ""
    checkpoints: str = ""


@dataclass(frozen=True)
class Secret:
    """A Kubernetes secret by its name, and which of its keys become which environment variables."""

    name: str = ""
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Secrets:
    """Of the object store and of the tracking server."""

    s3: Secret = field(default_factory=Secret)
    mlflow: Secret = field(default_factory=Secret)


@dataclass(frozen=True)
class Tracking:
    """The MLflow server; empty for what the environment of a step says."""

    uri: str = ""


@dataclass(frozen=True)
class Retry:
    """What is tried again, and when: after `wait`, times `factor` each time, and only `within` the first try's start.

    `times` is the step's own: it calls itself again while a store or server is away, and never after refused input
    (`csc.retry`). `pods` is the cluster's: what it does depends on the retry policy of its workflow controller, see
    docs/profiles.md. `within` counts from the beginning of the first try, so it must be longer than a step may take.
    """

    times: int = 0
    wait: str = "60s"
    factor: float = 2.0
    within: str = "7d"
    pods: int = 0

    def environment(self) -> dict[str, str]:
        """The variables that tell a step of its retries."""
        asked = Retries(self.times, _seconds(self.wait), self.factor, _seconds(self.within))
        return asked.environment() if self.times else {}


@dataclass(frozen=True)
class Cluster:
    """The Kubeflow Pipelines endpoint, and under which names a run goes there."""

    host: str = ""
    namespace: str = ""
    service_account: str = ""
    experiment: str = "csc"


@dataclass(frozen=True)
class Study:
    """How many runs of a study may go on at the same time."""

    parallelism: int = 1


@dataclass(frozen=True)
class Profile:
    """Everything that a place decides about a pipeline and nothing that decides its results."""

    images: Images = field(default_factory=Images)
    user: User = field(default_factory=User)
    gpu: Gpu = field(default_factory=Gpu)
    heavy: Pod = field(default_factory=Pod)
    light: Pod = field(default_factory=Pod)
    shm_size: str = ""
    storage: Storage = field(default_factory=Storage)
    secrets: Secrets = field(default_factory=Secrets)
    tracking: Tracking = field(default_factory=Tracking)
    env: dict[str, str] = field(default_factory=dict)
    retry: Retry = field(default_factory=Retry)
    caching: bool = True
    cluster: Cluster = field(default_factory=Cluster)
    study: Study = field(default_factory=Study)


def read_profile(name: str) -> Profile:
    """Read a profile strictly.

    Args:
        name: of a shipped profile, or a YAML file.
    """
    path = SHIPPED.get(name) or local_path(name)
    if not path.is_file():
        raise BadConfig(f"--profile {name}: no such file; give a YAML file or one of {', '.join(SHIPPED)}")
    profile = read_strict(Profile, path)
    for key, problem in _problems(profile):
        raise BadConfig(f"{path}: {key}: {problem}")
    return profile


_CPU = (r"(\d+|\d*\.\d+|\d+m)", "an amount of CPUs such as 4, 0.5 or 500m")
_BYTES = (r"\d+([EPTGMK]i?)?", "an amount of memory such as 16Gi or 500M")
_TIME = (r"[1-9]\d{0,6}[smhd]", "a time such as 90s, 30m, 12h or 7d")
_NAME = (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "the name of a Kubernetes object: small letters, digits, '-' and '.'")
_IMAGE = (r"[a-z0-9][\w./:-]*(@sha256:[0-9a-f]{64})?", "an image such as registry/name:tag or name@sha256:<64 digits>")
_FOLDERS = (r"/[^{}\s]+", "a folder inside the containers, such as /mnt/csc")
_PLACE = (r"(s3://|/)([^{}\s]|\{dataset\})+", "a place such as s3://bucket/data/{dataset} or /mnt/csc/data/{dataset}")
_LABEL = (r"([\w.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", "the name of a label or resource such as nvidia.com/gpu")
_ADDRESS = (r"https?://[^\s/@?#]+(/[^\s@?#]*)?", "an address such as http://host:port, without user or password")
_VARIABLE = (r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
_FORMS = {
    **{f"images.{name}": _IMAGE for name in ("cpu", "train")},
    **{f"{pod}.{kind}.cpu": _CPU for pod in ("heavy", "light") for kind in ("requests", "limits")},
    **{f"{pod}.{kind}.memory": _BYTES for pod in ("heavy", "light") for kind in ("requests", "limits")},
    **{key: _TIME for key in ("heavy.timeout", "light.timeout", "retry.wait", "retry.within")},
    **{key: _NAME for key in ("storage.volume.claim", "secrets.s3.name", "secrets.mlflow.name")},
    **{key: _NAME for key in ("cluster.namespace", "cluster.service_account")},
    **{key: _FOLDERS for key in ("storage.volume.path", "storage.checkpoints")},
    **{key: _ADDRESS for key in ("tracking.uri", "cluster.host")},
    "gpu.resource": _LABEL,
    "storage.data": _PLACE,
    "shm_size": _BYTES,
}
_REQUIRED = ("images.cpu", "images.train", "gpu.resource", "storage.volume.path", "retry.wait", "retry.within")
_AT_LEAST = {
    **dict.fromkeys(("user.uid", "user.gid", "gpu.count", "retry.times", "retry.pods"), 0),
    **dict.fromkeys(("retry.factor", "study.parallelism"), 1),
}
_SECRET = re.compile(
    r".*(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|(API|ACCESS|ACCOUNT|PRIVATE|SECRET)_?KEY|CONNECTION_STRING)"
    r"(_.*)?(?<!_FILE)(?<!_PATH)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/\s]*@")  # user and password before the host of an address


def _problems(profile: Profile) -> Iterator[tuple[str, str]]:
    """Every value that no cluster can use, by its key."""
    for key, (form, what) in _FORMS.items():
        value = _at(profile, key)
        if (value or key in _REQUIRED) and not re.fullmatch(form, value):
            # An address may hold a password, so that it is not repeated.
            yield key, f"expected {what}" + ("" if form is _ADDRESS[0] else f", found '{value}'")
    for key, least in _AT_LEAST.items():
        if not _at(profile, key) >= least:
            yield key, f"expected {least} or more, found {_at(profile, key)}"
    for index, name in enumerate(profile.images.pull_secrets):
        if not re.fullmatch(_NAME[0], name):
            yield f"images.pull_secrets[{index}]", f"expected {_NAME[1]}, found '{name}'"
    yield from _secret_problems(profile)
    yield from _contradictions(profile)


def _secret_problems(profile: Profile) -> Iterator[tuple[str, str]]:
    for name in ("s3", "mlflow"):
        secret: Secret = getattr(profile.secrets, name)
        if bool(secret.name) != bool(secret.keys):
            yield f"secrets.{name}", "needs both a name and keys: {key of the secret: environment variable}"
        for key, variable in secret.keys.items():
            if not re.fullmatch(_VARIABLE[0], variable):
                yield f"secrets.{name}.keys.{key}", f"expected {_VARIABLE[1]}, found '{variable}'"
    elsewhere = "a profile holds no secrets; put it into a Kubernetes secret named under secrets"
    for variable, value in profile.env.items():
        if not re.fullmatch(_VARIABLE[0], variable):
            yield f"env.{variable}", f"expected {_VARIABLE[1]}"
        if _SECRET.fullmatch(variable):
            yield f"env.{variable}", elsewhere
        if _LOGIN.search(value):
            yield f"env.{variable}", f"an address with a login in it; {elsewhere}"


def _contradictions(profile: Profile) -> Iterator[tuple[str, str]]:
    for pod in ("heavy", "light"):
        timeout = getattr(profile, pod).timeout
        tried_again = profile.retry.times or profile.retry.pods
        if tried_again and timeout and _seconds(timeout) > _seconds(profile.retry.within):
            yield (
                "retry.within",
                f"{profile.retry.within} is less than {pod}.timeout, {timeout}: a step that fails late would not be "
                "tried again",
            )
        for index, toleration in enumerate(getattr(profile, pod).tolerations):
            if (toleration.operator == "Equal") != bool(toleration.value):
                yield f"{pod}.tolerations[{index}]", "a value needs the operator Equal, and Equal a value"
    named = [*profile.env, *profile.secrets.s3.keys.values(), *profile.secrets.mlflow.keys.values()]
    named += [*(["MLFLOW_TRACKING_URI"] if profile.tracking.uri else []), *profile.retry.environment()]
    for variable in sorted({name for name in named if named.count(name) > 1}):
        yield "env, secrets, tracking, retry", f"the variable {variable} is set twice"
    if profile.storage.checkpoints and not profile.storage.volume.claim:
        yield "storage.checkpoints", "checkpoints outlive a pod only on a volume; name its claim in storage.volume"


def _at(profile: Profile, key: str) -> Any:
    value: Any = profile
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _seconds(time: str) -> int:
    return int(time[:-1]) * _UNITS[time[-1]]


def on_this_machine(profile: Profile) -> Profile:
    """The profile for a run on this machine: no pod can vanish here, and kfp would try every failed step again."""
    return replace(profile, retry=replace(profile.retry, pods=0))


def run_defaults(profile: Profile, scenario: Scenario) -> dict[str, Any]:
    """The run-time arguments of a scenario's pipeline that the profile knows."""
    known = {
        "data": profile.storage.data.replace("{dataset}", scenario.dataset),
        "checkpoints": profile.storage.checkpoints,
        "gpus": str(profile.gpu.count),  # text: the cluster reads an amount from nothing else
    }
    return {name: value for name, value in known.items() if value != ""}


def apply(profile: Profile, task: "PipelineTask", heavy: bool = False, gpus: Any = None) -> "PipelineTask":
    """Give a step of a pipeline what the profile says.

    All steps of one kind get the same, so that the cluster can store their description once.

    Args:
        profile: of the place.
        task: a step, not a sub-pipeline.
        heavy: whether it computes with networks: train, evaluate, embed.
        gpus: how many GPUs a heavy step gets, as a number or as an argument of the pipeline; the profile's if None.
    """
    pod = profile.heavy if heavy else profile.light
    task.set_container_image(profile.images.train if heavy else profile.images.cpu)
    if not profile.caching:
        task.set_caching_options(False)
    if profile.retry.pods:
        retry = profile.retry
        task.set_retry(retry.pods, f"{_seconds(retry.wait)}s", retry.factor, f"{_seconds(retry.within)}s")
    _set_pod(pod, task)
    _set_images_and_user(profile, task)
    _set_access(profile, task)
    if heavy:
        _set_gpus(profile, task, gpus)
    return task


def _set_pod(pod: Pod, task: "PipelineTask") -> None:
    from kfp import kubernetes

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
        given = {name: value for name, value in vars(toleration).items() if value}
        kubernetes.add_toleration(task, **given)
    if pod.timeout:
        kubernetes.set_timeout(task, _seconds(pod.timeout))


def _set_images_and_user(profile: Profile, task: "PipelineTask") -> None:
    from kfp import kubernetes

    if profile.images.pull_policy:
        kubernetes.set_image_pull_policy(task, profile.images.pull_policy)
    if profile.images.pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(profile.images.pull_secrets))
    if profile.user.uid:
        group = profile.user.gid or None
        kubernetes.set_security_context(task, run_as_user=profile.user.uid, run_as_group=group, run_as_non_root=True)


def _set_access(profile: Profile, task: "PipelineTask") -> None:
    """The environment, the secrets and the volume; secrets go by name, and as constants: loops lose parameters here."""
    from kfp import kubernetes

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
    from kfp import kubernetes

    if profile.gpu.count:
        count = profile.gpu.count if gpus is None else gpus
        task.set_accelerator_type(profile.gpu.resource).set_accelerator_limit(count)
    size = {"size_limit": profile.shm_size} if profile.shm_size else {}
    kubernetes.empty_dir_mount(task, volume_name="shm", mount_path="/dev/shm", medium="Memory", **size)
