"""Profiles: what is particular to the machine or cluster where a pipeline runs, in one small YAML file.

`profiles/*.yaml` are shipped; a person copies one and edits it. A profile names secrets, it never holds one. Every key
has a default, and no profile at all is the same as `local`. `csc.pipelines.pods` gives a step what a profile says.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field, to_builtins
from msgspec.structs import replace

from csc.components.image import CPU_IMAGE, TRAIN_IMAGE
from csc.config.reading import Settings, convert, load_yaml, note_old_name
from csc.config.tree import flatten
from csc.errors import BadConfig
from csc.retry import Retries
from csc.scenario import Scenario
from csc.storage import local_path

__all__ = ["SHIPPED", "Pod", "Profile", "on_this_machine", "read_profile", "run_defaults", "seconds"]

_FOLDER = Path(__file__).parent / "profiles"
SHIPPED = {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_RENAMED = {"heavy": "train", "light": "cpu"}  # keys of before; the next version refuses them

_TIME = r"[1-9]\d{0,6}[smhd]", "a time such as 90s, 30m, 12h or 7d"
_PATH = r"/[^{}\s]+", "a folder inside the containers, such as /mnt/csc"
_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "the name of a Kubernetes object: small letters, digits, '-' and '.'"
_IMAGE = r"[a-z0-9][\w./:-]*(@sha256:[0-9a-f]{64})?", "an image such as registry/name:tag or name@sha256:<64 digits>"
_LABEL = r"([\w.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", "the name of a label or resource such as nvidia.com/gpu"
_DATA = r"(s3://|/)([^{}\s]|\{dataset\})+", "a uri such as s3://bucket/data/{dataset} or /mnt/csc/data/{dataset}"
_ADDRESS = (
    r"https?://([^\s/@?#\[\]]+|\[[\da-fA-F:.]+\](:\d+)?)(/[^\s@?#]*)?",
    "an address such as http://host:port, without user or password",
)


def _form(pattern: str, description: str, *, empty: bool = False, hidden: bool = False) -> Meta:
    """The form of a text, whether it may be empty, and whether it may hold a secret, so that no message repeats it."""
    end = "?" if empty else ""
    return Meta(pattern=rf"\A({pattern}){end}\Z", description=description, extra={"hidden": hidden})


Time = Annotated[str, _form(*_TIME)]
OptionalTime = Annotated[str, _form(*_TIME, empty=True)]
Folder = Annotated[str, _form(*_PATH)]
OptionalFolder = Annotated[str, _form(*_PATH, empty=True)]
Name = Annotated[str, _form(*_NAME)]
OptionalName = Annotated[str, _form(*_NAME, empty=True)]
Image = Annotated[str, _form(*_IMAGE)]
Label = Annotated[str, _form(*_LABEL)]
Data = Annotated[str, _form(*_DATA, empty=True)]
Address = Annotated[str, _form(*_ADDRESS, empty=True, hidden=True)]
Variable = Annotated[str, _form(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable", hidden=True)]
Cpu = Annotated[str, _form(r"\d+|\d*\.\d+|\d+m", "an amount of CPUs such as 4, 0.5 or 500m", empty=True)]
MemoryAmount = Annotated[str, _form(r"\d+([EPTGMK]i?)?", "an amount of memory such as 16Gi or 500M", empty=True)]
Hidden = Annotated[str, Meta(extra={"hidden": True})]
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=1000)]


class Images(Settings, frozen=True):
    """The two images: `train` for the steps that compute with networks, `cpu` for all others."""

    cpu: Image = CPU_IMAGE
    train: Image = TRAIN_IMAGE
    pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    pull_secrets: tuple[Name, ...] = ()


class User(Settings, frozen=True):
    """Who runs in the containers; 0 leaves it to the image."""

    uid: Id = 0
    gid: Id = 0


class Gpu(Settings, frozen=True):
    """The accelerators of a train step: the name that nodes give them, and how many; 0 for none."""

    resource: Label = "nvidia.com/gpu"
    count: Count = 1


class Resources(Settings, frozen=True):
    """Amounts as Kubernetes writes them; empty for none."""

    cpu: Cpu = ""
    memory: MemoryAmount = ""


class Toleration(Settings, frozen=True):
    """A taint that a step may be put on in spite of."""

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class Pod(Settings, frozen=True):
    """What a step asks for, where it may run, and how long one try may take."""

    requests: Resources = Resources()
    limits: Resources = Resources()
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    timeout: OptionalTime = ""


class Volume(Settings, frozen=True):
    """A claim that all steps mount; empty for none."""

    claim: OptionalName = ""
    path: Folder = "/mnt/csc"


class Storage(Settings, frozen=True):
    """Where data sets and checkpoints are; `{dataset}` stands for the scenario's data set."""

    volume: Volume = Volume()
    data: Data = ""
    checkpoints: OptionalFolder = ""


class Secret(Settings, frozen=True):
    """A Kubernetes secret by its name, and which of its keys become which environment variables."""

    name: OptionalName = ""
    keys: dict[str, Variable] = field(default_factory=dict)


class Secrets(Settings, frozen=True):
    """Of the object store and of the tracking server."""

    s3: Secret = Secret()
    mlflow: Secret = Secret()


class Tracking(Settings, frozen=True):
    """The MLflow server; empty for what the environment of a step says."""

    uri: Address = ""


class Retry(Settings, frozen=True):
    """What is tried again, and when: after `wait`, times `factor` each time, and only `within` the first try's start.

    `times` is the step's own: it calls itself again while a store or server is away, and never after refused input
    (`csc.retry`). `pods` is the cluster's: what it does depends on the retry policy of its workflow controller, see
    docs/profiles.md. `within` counts from the beginning of the first try, so it must be longer than a step may take.
    """

    times: Count = 0
    wait: Time = "60s"
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    within: Time = "7d"
    pods: Count = 0

    def environment(self) -> dict[str, str]:
        """The variables that tell a step of its retries."""
        asked = Retries(self.times, seconds(self.wait), self.factor, seconds(self.within))
        return asked.environment() if self.times else {}


class Cluster(Settings, frozen=True):
    """The Kubeflow Pipelines endpoint, and under which names a run goes there."""

    host: Address = ""
    namespace: OptionalName = ""
    service_account: OptionalName = ""
    experiment: str = "csc"


class StudyOptions(Settings, frozen=True):
    """How many runs of a study may go on at the same time."""

    parallelism: Annotated[int, Meta(ge=1, le=1000)] = 1


class Profile(Settings, frozen=True):
    """Everything that a machine or cluster decides about a pipeline, and nothing that decides its results."""

    images: Images = Images()
    user: User = User()
    gpu: Gpu = Gpu()
    train: Pod = Pod()
    cpu: Pod = Pod()
    shm_size: MemoryAmount = ""
    storage: Storage = Storage()
    secrets: Secrets = Secrets()
    tracking: Tracking = Tracking()
    env: dict[Variable, Hidden] = field(default_factory=dict)
    retry: Retry = Retry()
    caching: bool = True
    cluster: Cluster = Cluster()
    study: StudyOptions = StudyOptions()


def read_profile(name: str) -> Profile:
    """Read a shipped profile by its name, or a YAML file; what is wrong is one line with the file and the key."""
    path = SHIPPED.get(name) or local_path(name)
    if not path.is_file():
        raise BadConfig(f"--profile {name}: no such file; give a YAML file or one of {', '.join(SHIPPED)}")
    content = load_yaml(path)
    try:
        profile = convert(Profile, {} if content is None else _renamed(content, path))
    except BadConfig as error:
        raise BadConfig(f"{path}: {_without_secrets(str(error))}") from None
    for key, problem in (*_secret_problems(profile), *_contradictions(profile)):
        raise BadConfig(f"{path}: {key}: {problem}")
    return profile


def _renamed(content: Any, path: Path) -> Any:
    """Give keys that were renamed their names of today, with a hint."""
    for old, new in _RENAMED.items():
        if isinstance(content, dict) and old in content:
            if new in content:
                raise BadConfig(f"{old}: is now called {new}, which is there too; leave out {old}")
            note_old_name(f"{path}: {old}", new)
            content[new] = content.pop(old)
    return content


_SECRET_NAME = re.compile(
    r".*(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|(API|ACCESS|ACCOUNT|PRIVATE|SECRET)_?KEY|CONNECTION_STRING)"
    r"(_.*)?(?<!_FILE)(?<!_PATH)|(.*_)?(PASS|PWD|PAT)",
    re.IGNORECASE,
)
# What a value looks like that opens something, whatever the name of its variable.
_SECRET_VALUES = {
    "an address with a login in it": r"://[^/\s]*@",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "the id of an AWS key": r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
    "an AWS secret key": r"\A(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z0-9+/]{40}\Z",
    "a token of GitHub or GitLab": r"\b(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,})",
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a token of Slack": r"\bxox[abeprs]-[\w-]{10,}",
    "a JSON web token": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.",
}


def _without_secrets(text: str) -> str:
    """A message that repeats a wrong value, without what looks like a secret in it."""
    for form in _SECRET_VALUES.values():
        text = re.sub(form, "***", text)
    return text


def _secret_problems(profile: Profile) -> Iterator[tuple[str, str]]:
    """Secrets that are half named, and those that the environment holds itself."""
    for name, secret in (("s3", profile.secrets.s3), ("mlflow", profile.secrets.mlflow)):
        if bool(secret.name) != bool(secret.keys):
            yield f"secrets.{name}", "needs both a name and keys: {key of the secret: environment variable}"
    elsewhere = "a profile holds no secrets; put it into a Kubernetes secret named under secrets"
    for variable in profile.env:
        if _SECRET_NAME.fullmatch(variable):
            yield f"env.{variable}", elsewhere
    for key, value in flatten(to_builtins(profile)):
        for text in value if isinstance(value, list) else [value]:
            for what, form in _SECRET_VALUES.items():
                if isinstance(text, str) and re.search(form, text):
                    yield key, f"{what}; {elsewhere}"


def _contradictions(profile: Profile) -> Iterator[tuple[str, str]]:
    """Values that are right one by one and cannot be together, each with its key."""
    retry = profile.retry
    for name, pod in (("train", profile.train), ("cpu", profile.cpu)):
        if (retry.times or retry.pods) and pod.timeout and seconds(pod.timeout) > seconds(retry.within):
            less = f"{retry.within} is less than {name}.timeout, {pod.timeout}"
            yield "retry.within", f"{less}: a step that fails late would not be tried again"
        for index, toleration in enumerate(pod.tolerations):
            if (toleration.operator == "Equal") != bool(toleration.value):
                yield f"{name}.tolerations[{index}]", "a value needs the operator Equal, and Equal a value"
    named = [*profile.env, *profile.secrets.s3.keys.values(), *profile.secrets.mlflow.keys.values()]
    named += [*(["MLFLOW_TRACKING_URI"] if profile.tracking.uri else []), *retry.environment()]
    for variable in sorted({name for name in named if named.count(name) > 1}):
        yield "env, secrets, tracking, retry", f"the variable {variable} is set twice"
    if profile.storage.checkpoints and not profile.storage.volume.claim:
        yield "storage.checkpoints", "checkpoints outlive a pod only on a volume; name its claim in storage.volume"


def seconds(time: str) -> int:
    """A time such as 90s, 30m, 12h or 7d in seconds."""
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
