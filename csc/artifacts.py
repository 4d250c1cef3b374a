"""The contracts between steps: what each file and parameter holds, and how it is read and written.

    contract         stored as                     made by                used by
    Origin           parameter `origin`            ingest                 the steps that read data
    TableRequest     parameter `order`             the study's pipeline   collect
    DatasetFacts     dataset.json                  ingest                 people, and the pages of a cluster
    FeatureCard      features.json, with the maps  embed                  train, evaluate       csc.data.feature_maps
    Split            split.json                    split_labels           build_dataset, train
    View             train.parquet, test.parquet   build_dataset          train, evaluate       csc.data.views
    ModelCard        model.json, in the model      train                  whoever loads it      csc.model
    Training         training.json, in the model   train                  register
    Memory           memory.parquet, in the model  train                  the next task         csc.replay.memory
    Scores           scores.parquet                evaluate               comparisons           csc.data.scores
    Metrics          metrics.json                  evaluate               register, log_old_classes
    Evidence         evidence.parquet              evaluate               report                csc.data.evidence
    RegisteredTask   registered.json               register, prior        the next task, report, log_old_classes

Those with a module at the end of their line are described there, the others here. What does not follow its contract is
refused in one line that names the file and the key. Files have digests, so that damage is noticed where it is read.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec

from csc.errors import BadData, BadModel, BadScenario, CscError, explained
from csc.scenario import Task
from csc.storage import json_digest, read_json, write_json

__all__ = [
    "EVIDENCE",
    "HEADLINE",
    "SCORES",
    "DatasetFacts",
    "Metrics",
    "Origin",
    "RegisteredTask",
    "RegisteredVersion",
    "RunResults",
    "Split",
    "TableRequest",
    "TaskResult",
    "Training",
]


SCORES, EVIDENCE = "scores.parquet", "evidence.parquet"  # in the folder that `evaluate` makes
HEADLINE = ("mAP", "CF1", "OF1", "FPR", "forgetting")  # of `Metrics`: what every short summary shows
_Study = TypeVar("_Study")
_DIGEST = "sha256"  # key of a file, next to those of its contract
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _texts(content: object) -> Iterator[str]:
    """Yield all texts in decoded JSON, keys too."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for item in (*content, *content.values()):
            yield from _texts(item)
    elif isinstance(content, list):
        for item in content:
            yield from _texts(item)


class _Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain data with a JSON form; keys that are missing, unknown or of another type are refused."""

    refusal: ClassVar[type[CscError]] = BadData
    made_by: ClassVar[str] = ""

    @classmethod
    def from_plain(cls, content: object, where: str) -> Self:
        """Check decoded JSON; `where` is the file or parameter that it comes from, for the message."""
        try:
            made = msgspec.convert(content, cls)
            # They are printed, and the content may come from a server.
            if strange := next((text for text in _texts(content) if _CONTROL.search(text)), None):
                raise BadData(f"{strange[:60]!r} has control characters")
            return made
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the second: half a surrogate pair
            remedy = f"; make it with the {cls.made_by} step" if cls.made_by else ""
            raise cls.refusal(f"{where}: {explained(error)}{remedy}") from None
        except BadData as error:
            raise cls.refusal(f"{where}: {error}") from None

    def to_plain(self) -> dict[str, Any]:
        """The same as dictionaries, lists, numbers and text."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def read(cls, path: str | Path, named: str = "") -> Self:
        """Read what `write` wrote, and refuse content that has changed since; errors call the file `named`."""
        named = named or str(path)
        content = read_json(Path(path), named)
        digest = content.pop(_DIGEST, None) if isinstance(content, dict) else None
        if digest not in (None, json_digest(content)):  # none: written by hand, or by a version before there were any
            remedy = f"; make it with the {cls.made_by} step" if cls.made_by else ""
            raise cls.refusal(f"{named}: has changed since it was written (its digest is another){remedy}")
        return cls.from_plain(content, named)

    def write(self, path: str | Path) -> None:
        """Write a file, whole or not at all."""
        content = self.to_plain()
        write_json(Path(path), {**content, _DIGEST: json_digest(content)})


class _Parameter(_Contract, frozen=True):
    """A contract that travels as a parameter of the pipeline, not as a file."""

    parameter: ClassVar[str]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read back what `to_json` wrote."""
        try:
            return cls.from_plain(json.loads(text), f"parameter {cls.parameter}")
        except (ValueError, RecursionError) as error:
            raise BadData(f"parameter {cls.parameter}: not readable as JSON ({error})") from None

    def to_json(self) -> str:
        """The value of the parameter."""
        return json.dumps(self.to_plain(), sort_keys=True)


class Origin(_Parameter, frozen=True):
    """What everything after ingest is made from: the data, by uri and content, and the code; and who tracks it.

    It is a parameter so that the pipeline's cache never serves results of other data or other code, nor those that
    only another tracking server knows.
    """

    parameter: ClassVar[str] = "origin"

    data: str
    fingerprint: str
    code: str
    tracking: str = ""


class TableRequest(_Parameter, frozen=True):
    """What the tables of a study are made from: the study, its data sets, and the cells that its pipeline runs."""

    parameter: ClassVar[str] = "order"

    study: dict[str, Any]  # what `csc.study.spec.Study` holds; contracts know nothing of studies
    sources: dict[str, str]  # uris of the data sets, by name
    tried: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]  # cells by number, which is shorter than their names

    def study_as(self, study_type: type[_Study]) -> _Study:
        """The study as an object of this type; refused if it is none."""
        try:
            return msgspec.convert(self.study, study_type)
        except msgspec.ValidationError as error:
            raise BadData(f"parameter {self.parameter}: study: {explained(error)}") from None


class DatasetFacts(_Contract, frozen=True):
    """What a data set is and where: the first artifact of a run."""

    display_name: str
    uri: str
    fingerprint: str
    classes: int
    train_images: int
    test_images: int


class Split(_Contract, frozen=True, rename={"index": "task", "total": "tasks"}):
    """Which classes a task of a scenario brings (`new`), and which there are with it (`seen`)."""

    refusal: ClassVar[type[CscError]] = BadScenario
    made_by: ClassVar[str] = "split_labels"

    scenario: str
    index: int
    total: int
    new: tuple[str, ...]
    seen: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.total:
            raise BadData(f"task {self.index} of {self.total}; expected one from 1 to {self.total}")
        if not self.new or self.seen[-len(self.new) :] != self.new or len(set(self.seen)) < len(self.seen):
            raise BadData("expected new classes that are the last of seen, and no class twice")

    @property
    def task(self) -> Task:
        """The task itself."""
        return Task(self.index, self.total, self.new, self.seen)


class Training(_Contract, frozen=True):
    """How a model was trained."""

    made_by: ClassVar[str] = "train"

    view: str  # path of the training view
    images: int
    seconds: float
    packages: dict[str, str]  # versions of what the model needs to be loaded
    epochs: list[dict[str, float]]  # the losses of each


class Metrics(_Contract, frozen=True):
    """The numbers of a model after a task, as `csc.metrics.evaluate` describes them."""

    made_by: ClassVar[str] = "evaluate"

    mAP: float  # noqa: N815  # the names of the paper
    CF1: float
    OF1: float
    CP: float
    CR: float
    OP: float
    OR: float
    FPR: float
    ECE: float
    H: float
    forgetting: float
    images: int
    threshold: float
    AP: dict[str, float]
    best_AP: dict[str, float]  # noqa: N815
    confidence: dict[str, list[int | float]]
    # Calibration: of old and new classes, adaptive (A), after temperature scaling (T); F1 at the model's thresholds.
    ECE_old: float = 0.0
    ECE_new: float = 0.0
    AECE: float = 0.0
    AECE_old: float = 0.0
    AECE_new: float = 0.0
    ECE_T: float = 0.0
    ECE_old_T: float = 0.0
    ECE_new_T: float = 0.0
    AECE_T: float = 0.0
    AECE_old_T: float = 0.0
    AECE_new_T: float = 0.0
    CF1_own: float = 0.0
    OF1_own: float = 0.0
    temperature: float = 1.0

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class TaskResult(_Contract, frozen=True):
    """One task of a run, with the metrics of the model after it."""

    task: int  # from 1
    new: tuple[str, ...]
    seen: tuple[str, ...]
    metrics: Metrics
    train_images: int
    seconds: float  # of training

    def __post_init__(self) -> None:
        if missing := [name for name in self.seen if name not in self.metrics.AP]:
            raise BadData(f"task {self.task}: no AP of {', '.join(missing)}; evaluate the task again")


class RunResults(_Contract, frozen=True):
    """The results of a scenario run: what it was made from, and its tasks in order."""

    scenario: str
    method: str
    seed: int
    initialisation: str  # where the first weights came from
    data_fingerprint: str
    code_version: str
    tasks: tuple[TaskResult, ...]  # those that are finished, at least one
    held_out: int = 0  # of so many training images one was held out, and tested on; 0 for tests on the test images
    settings: dict[str, Any] = {}  # those that differ from the method's own, by dotted key
    data_note: str = ""  # how the data differ from the benchmark of their name; empty if they do not

    def __post_init__(self) -> None:
        if not self.tasks:
            raise BadData(f"{self.scenario} {self.method}: no finished task, nothing to report")
        for earlier, task in pairwise(self.tasks):
            if task.task <= earlier.task or task.seen[: len(earlier.seen)] != earlier.seen:
                raise BadData(
                    f"task {task.task}: its seen classes must begin with those of task {earlier.task}, in task order"
                )

    @property
    def summary(self) -> dict[str, float]:
        """The numbers the paper's tables print: last and average."""
        from csc import metrics

        return metrics.summary([msgspec.structs.asdict(task.metrics) for task in self.tasks])

    @property
    def last(self) -> TaskResult:
        """The task whose model is the result."""
        return self.tasks[-1]


class RegisteredVersion(_Contract, frozen=True):
    """A model version: what one task hands to the next."""

    name: str
    version: str
    model_id: str
    fingerprint: str
    run_id: str
    parent_run_id: str
    location: str = ""

    @property
    def uri(self) -> str:
        """The uri by which anyone can load it."""
        return f"models:/{self.name}/{self.version}"


class RegisteredTask(_Contract, frozen=True):
    """The model version of a task, and the results of the run up to it."""

    refusal: ClassVar[type[CscError]] = BadModel
    made_by: ClassVar[str] = "register"

    model: RegisteredVersion
    run: RunResults
