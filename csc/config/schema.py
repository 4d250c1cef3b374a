"""The settings of a run: everything that decides its outcome, apart from the data and the scenario.

`csc.config.groups` has the groups that all methods share. Settings that only one method or one head reads are declared
where they are read (`csc.methods`). `csc.config.layers` says how the settings of a run come together.
"""

import hashlib
import json
from collections.abc import Container
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from csc.config.groups import (
    AtLeast0,
    BackboneSettings,
    FeaturesSettings,
    InputSettings,
    LossSettings,
    MaxEntropySettings,
    MemorySettings,
    RegisterSettings,
    ReleaseQuirksSettings,
    Settings,
    StatisticsSettings,
    Text,
    TrainSettings,
    Unit,
)
from csc.config.tree import flatten
from csc.errors import BadConfig

__all__ = ["EXECUTION_ONLY", "Config"]

_Group = TypeVar("_Group", bound=Settings)

# Settings that change no result, such as how the work is shared out: a run may be resumed with other values.
EXECUTION_ONLY = ("train.workers", "train.processes", "train.nodes", "register.min_map", "register.max_drop")


class Config(Settings, frozen=True):
    """Everything that decides the outcome of a run, apart from the data and the scenario.

    These are the settings of every method. Those of a run are a subtype that adds the groups which its method and head
    read (`csc.config.layers`), so a setting that nothing reads is no part of a run.

    Attributes:
        method: learning method.
        seed: of all random choices.
        init: first weights of the backbone: hub, scratch, or a .safetensors file.
        allow_leaky_init: whether weights that have seen the labels of COCO are accepted, and marked.
        head: what turns maps into scores; each method says which it takes.
        labels: which labels training sees: those of the task, or of all classes so far (an upper bound).
        held_out: if not 0, one of so many training images is tested on, in the place of the test images.
        threshold: confidence above which a class counts as present.
    """

    method: str = "csc"
    seed: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    init: Text = "hub"
    allow_leaky_init: bool = False
    head: str = "linear"
    labels: Literal["task", "seen"] = "task"
    held_out: AtLeast0 = 0
    threshold: Unit = 0.8
    backbone: BackboneSettings = BackboneSettings()
    input: InputSettings = InputSettings()
    features: FeaturesSettings = FeaturesSettings()
    train: TrainSettings = TrainSettings()
    loss: LossSettings = LossSettings()
    max_entropy: MaxEntropySettings = MaxEntropySettings()
    release_quirks: ReleaseQuirksSettings = ReleaseQuirksSettings()
    register: RegisterSettings = RegisterSettings()
    memory: ClassVar[MemorySettings] = MemorySettings()  # of methods that never replay; others have such a group
    statistics: ClassVar[StatisticsSettings] = StatisticsSettings()  # likewise, of methods that draw no features

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        views = self.features.views
        if self.held_out == 1:
            raise BadConfig("held_out=1: holds out all training images; 5 holds out a fifth of them")
        if self.train.batch_norm == "frozen" and self.init == "scratch":
            raise BadConfig("train.batch_norm=frozen: random weights have no statistics to keep; set live")
        if self.statistics.replay and not self.backbone.frozen:
            raise BadConfig(
                "statistics.replay=true: features of a backbone that learns go stale; set backbone.frozen=true"
            )
        if self.statistics.pooling == "masks" and self.head != "ci_gcn":
            raise BadConfig(f"statistics.pooling=masks: head '{self.head}' has no masks; set head=ci_gcn, or mean")
        if views and self.backbone.learns(is_base=True):
            raise BadConfig(
                f"features.views={views}: maps of a backbone that learns go stale; set backbone.frozen=true"
            )
        if views > 1 and not self.input.augment:
            raise BadConfig(f"features.views={views}: without input.augment all views are the same; set it to 1")

    @property
    def resolved_batch_norm(self) -> str:
        """The setting `train.batch_norm`, with `auto` resolved.

        The paper is silent; the released code keeps those of the base task. From trained weights, those of the weights
        were better for each method tried, by far; from scratch live ones were (REPRODUCIBILITY.md).
        """
        chosen = self.train.batch_norm
        return chosen if chosen != "auto" else "live" if self.init == "scratch" else "frozen"

    def group(self, group_type: type[_Group]) -> _Group:
        """The group of a type that a method or a head declares."""
        return next(group for group in msgspec.structs.astuple(self) if isinstance(group, group_type))

    def tree(self) -> dict[str, Any]:
        """All settings as plain nested data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def to_json(self) -> str:
        """All settings as canonical JSON."""
        return json.dumps(self.tree(), sort_keys=True)

    def flat(self) -> dict[str, Any]:
        """Dotted keys and plain values, for tracking and tables."""
        return dict(flatten(self.tree()))

    def unread(self) -> Container[str]:
        """Settings that the run never reads because of others; its method says which (`csc.config.layers`)."""
        return ()

    def decisive(self) -> dict[str, Any]:
        """Those entries of `flat` that decide a result."""
        unread = self.unread()
        return {key: value for key, value in self.flat().items() if key not in EXECUTION_ONLY and key not in unread}

    def fingerprint(self, *more: str) -> str:
        """A short digest of what decides a result and whatever else identifies a run."""
        settings = json.dumps(self.decisive(), sort_keys=True)
        return hashlib.sha256("\n".join([settings, *more]).encode()).hexdigest()[:16]

    def run_key(self, scenario: str, data: str, code: str, extended: str = "") -> str:
        """The key of a scenario run, a digest of settings, scenario, data, code, and the model that is extended.

        Runs with the same key are the same run. Data and the model are given by their fingerprints.
        """
        return self.fingerprint(scenario, data, code, *([extended] if extended else []))
