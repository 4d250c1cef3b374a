"""What a Kubeflow Pipelines server says of a run, as far as it is read here; an answer of another form is refused."""

from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Meta, Struct

__all__ = [
    "Component",
    "Id",
    "Node",
    "Platform",
    "PlatformExecutor",
    "Run",
    "Spec",
    "Task",
    "Version",
    "seconds_between",
]

Id = Annotated[str, Meta(pattern=r"\A[\w.:-]+\Z")]  # it is printed


class Failure(Struct, frozen=True):
    """Why something failed."""

    message: str = ""


class ChildTask(Struct, frozen=True):
    """A node that comes after another one, by its id."""

    pod_name: str = ""


class Node(Struct, frozen=True, rename={"name": "display_name", "cached": "execution_id"}):
    """A node of the workflow, or an entry of its cache, which has no name."""

    name: str = ""
    state: str = ""
    start_time: datetime | None = None
    end_time: datetime | None = None
    error: Failure = Failure()
    child_tasks: tuple[ChildTask, ...] = ()
    cached: str = ""  # the id of its entry of the cache, if it has one

    @property
    def start(self) -> datetime | None:
        """When it began."""
        return _time(self.start_time)

    @property
    def end(self) -> datetime | None:
        """When it ended."""
        return _time(self.end_time)

    @property
    def children(self) -> list[str]:
        """The ids of the nodes that come after it."""
        return [child.pod_name for child in self.child_tasks if child.pod_name]


class RunDetails(Struct, frozen=True):
    """The nodes of a run."""

    task_details: tuple[Node, ...] | None = None


class RuntimeConfig(Struct, frozen=True):
    """The arguments of a run, and where its artifacts are."""

    parameters: dict[str, Any] | None = None
    pipeline_root: str = ""


class Version(Struct, frozen=True):
    """A compiled pipeline; `pipeline_spec` is one document, or has two under their own keys."""

    pipeline_id: Id
    pipeline_version_id: Id
    pipeline_spec: Any = None


class Run(Struct, frozen=True):
    """A run of a pipeline, which it names or carries itself."""

    run_id: Id
    display_name: str = ""
    experiment_id: str = ""
    state: str = ""
    created_at: datetime | None = None
    finished_at: datetime | None = None
    error: Failure = Failure()
    runtime_config: RuntimeConfig = RuntimeConfig()
    pipeline_spec: Any = None
    pipeline_version_reference: Version | None = None
    run_details: RunDetails = RunDetails()


def seconds_between(start: datetime | None, end: datetime | None) -> float:
    """Seconds between two times of the server; 0 if one of them is not set."""
    begin, finish = _time(start), _time(end)
    return max(0.0, (finish - begin).total_seconds()) if begin and finish else 0.0


def _time(time: datetime | None) -> datetime | None:
    """A time, in UTC if it has no zone; none if it is not set, which the server writes as 1970 or as the year 1."""
    if time is None or time.year <= 1970:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class Named(Struct, frozen=True):
    """Something with a name."""

    name: str = ""


class Task(Struct, frozen=True, rename="camel"):
    """A task of a pipeline; of a loop it has what that runs over."""

    task_info: Named = Named()
    component_ref: Named = Named()
    parameter_iterator: dict[str, Any] = {}
    retry_policy: Any = None


class Dag(Struct, frozen=True):
    """The tasks of a pipeline, by name."""

    tasks: dict[str, Task] = {}


class Component(Struct, frozen=True, rename="camel"):
    """A step, or a pipeline of its own."""

    dag: Dag = Dag()
    executor_label: str = ""


class PodMetadata(Struct, frozen=True):
    """What is added to the pods of a step."""

    annotations: dict[str, Any] = {}
    labels: dict[str, Any] = {}


class PlatformExecutor(Struct, frozen=True, rename="camel"):
    """What a platform knows of a step."""

    pod_metadata: PodMetadata | None = None


class PlatformDeployment(Struct, frozen=True):
    """What a platform knows of all steps, by the labels of their executors."""

    executors: dict[str, PlatformExecutor] = {}


class Platform(Struct, frozen=True, rename="camel"):
    """The second document of a compiled pipeline: what only one platform understands."""

    deployment_spec: PlatformDeployment = PlatformDeployment()


class Spec(Struct, frozen=True, rename="camel"):
    """A compiled pipeline: the keys of both its documents."""

    root: Component
    components: dict[str, Component] = {}
    pipeline_info: Named = Named()
    platforms: dict[str, Platform] = {}
