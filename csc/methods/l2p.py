"""L2P: Learning to Prompt (Wang et al., CVPR 2022), for many labels."""

from typing import TYPE_CHECKING

from csc.config.groups import AtLeast1, Settings
from csc.config.schema import Config
from csc.errors import BadConfig
from csc.methods import register
from csc.methods.base import HEADS, HeadKind, LossInputs, Method

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.backbone import Backbone
    from csc.nets.network import Outputs
    from csc.nets.prompts import PromptedBackbone

__all__ = ["L2P", "L2pSettings"]


class L2pSettings(Settings, frozen=True):
    """A pool of prompts for a frozen transformer, and the pull of the chosen keys towards the images.

    Attributes:
        pool: prompts that there are.
        length: tokens of a prompt.
        chosen: prompts that an image gets.
        pull: weight of the distance between an image and the keys of its prompts.
    """

    pool: AtLeast1 = 10
    length: AtLeast1 = 5
    chosen: AtLeast1 = 5
    pull: float = 0.1

    def __post_init__(self) -> None:
        """Refuse to choose more prompts than there are."""
        if self.chosen > self.pool:
            raise BadConfig(f"l2p.chosen={self.chosen}: the pool has {self.pool} prompts")


HEADS["prompts"] = HeadKind(HEADS["linear"].build, L2pSettings)


@register
class L2P(Method):
    """L = L_cls(C^t) - λ Σ cos(query, chosen keys), on a frozen transformer with a pool of prompts.

    The pool is `csc.nets.prompts` (`head: prompts`), the classifier a linear layer. New classes learn from their
    labels; outputs of old classes have no loss, so nothing but the pool, which all tasks share, changes them.
    """

    name = "l2p"
    heads = ("prompts",)
    own_settings = (L2pSettings,)
    takes_frozen_backbone = False  # it brings its own, which is frozen but for the prompts
    needs_intermediates = True

    @staticmethod
    def unread(config: Config) -> frozenset[str]:
        """Of exemplars among the images only labels of the new classes count, whatever `memory.unknown` says."""
        return Method.unread(config) | ({"memory.unknown"} if config.memory.replay == "concat" else set())

    @classmethod
    def wrap(cls, config: Config, backbone: "Backbone") -> "PromptedBackbone":
        """The transformer with its pool of prompts."""
        from csc.nets.prompts import PromptedBackbone

        return PromptedBackbone(backbone, config.group(L2pSettings))

    def distances(self, learner: "Outputs", prior: "Outputs | None") -> "dict[str, Tensor]":
        """Per image: similarity to the chosen keys."""
        return {} if learner.pull is None else {"pull": learner.pull.float()}

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The classification loss of the new classes, and the pull of the chosen keys towards the images."""
        ce = self.classify(inputs, inputs.logits[:, inputs.old :], inputs.targets[:, inputs.old :])
        return {"ce": ce} | self.distance_terms(inputs, pull=-self.config.group(L2pSettings).pull)
