"""LwF: Learning without Forgetting, the baseline that CSC builds on."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from csc.config.groups import LossSettings, NotNegative, Settings, StatisticsSettings, Unit
from csc.config.schema import Config
from csc.methods import register
from csc.methods.base import LossInputs, Method

if TYPE_CHECKING:
    from torch import Tensor

    from csc.training.objective import Objective

__all__ = ["DistillationSettings", "LwF"]


class DistillationSettings(LossSettings, frozen=True):
    """α, the weight of the labels against the prior model, and what stands for the labels of old classes.

    `kd` takes the prior model's soft outputs, `negative` zeros, `masked` nothing.

    Attributes:
        alpha: weight of the labels; the rest is that of the prior model.
        alpha_power: p of a schedule, where α : 1 - α is multiplied by (n_old / n_new)^p; ours.
        old_labels: what stands for the labels of old classes.
        logit_adjustment: how often the log-odds of a new class in the task are added to its logits in CE; ours.
    """

    alpha: Unit = 0.15
    alpha_power: float = 0.0
    old_labels: Literal["kd", "negative", "masked"] = "kd"
    logit_adjustment: NotNegative = 0.0


@register
class LwF(Method):
    """L = α CE(new) + (1-α) KD(old): new classes from labels, old ones from the prior model.

    KD is the binary cross-entropy to σ(z of the prior): its soft outputs are the pseudo-labels. The base task is CE
    alone. Exemplars among the images have CE on all labels that they know, and KD on the other old classes.
    """

    name = "lwf"
    loss_settings = DistillationSettings
    own_settings: ClassVar[tuple[type[Settings], ...]] = (StatisticsSettings,)
    needs_prior = True
    adjustment: "Tensor | float" = 0.0  # (n,), what is added to logits in CE

    @staticmethod
    def unread(config: Config) -> frozenset[str]:
        """Without KD there is nothing to weigh labels against; only CE of new classes is adjusted.

        Of exemplars among the images only known labels count, whatever `memory.unknown` says.
        """
        old_labels = config.group(DistillationSettings).old_labels
        unread = {"loss.alpha", "loss.alpha_power"} if old_labels != "kd" else set()
        unread |= {"loss.logit_adjustment"} if old_labels == "negative" else set()
        return Method.unread(config) | unread | ({"memory.unknown"} if config.memory.replay == "concat" else set())

    def begin(self, objective: "Objective") -> None:
        """Work out the adjustment of logits, if the settings ask for one."""
        if weight := self.config.group(DistillationSettings).logit_adjustment:
            log_odds = objective.labels().mean(0).logit(eps=0.001)
            log_odds[: -objective.new] = 0
            self.adjustment = (weight * log_odds).to(objective.device)

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """CE and KD of one batch."""
        alpha, ce, kd = self.alpha(inputs), self.label_loss(inputs), self.prior_loss(inputs)
        return {"ce": ce} if kd is None else {"ce": alpha * ce, "kd": (1 - alpha) * kd}

    def alpha(self, inputs: LossInputs) -> float:
        """α, or what the schedule makes of it."""
        settings = self.config.group(DistillationSettings)
        if not settings.alpha_power or not inputs.old:
            return settings.alpha
        weight: float = settings.alpha * (inputs.old / inputs.new) ** settings.alpha_power
        return weight / (weight + 1 - settings.alpha)

    def label_loss(self, inputs: LossInputs) -> "Tensor":
        """CE of the labels that there are; with `old_labels=negative` of all classes."""
        if self.config.group(DistillationSettings).old_labels == "negative":
            return self.classify(inputs, inputs.logits, inputs.targets)
        return self.classify_known(replace(inputs, logits=inputs.logits + self.adjustment))

    def prior_loss(self, inputs: LossInputs) -> "Tensor | None":
        """KD of the old classes whose labels are not known; none in the base task, or if the settings say so."""
        if self.config.group(DistillationSettings).old_labels != "kd" or inputs.prior_logits is None:
            return None
        unknown = None if inputs.known is None else ~inputs.known[:, : inputs.old]
        return self.distil(inputs, inputs.logits[:, : inputs.old], inputs.prior_logits.sigmoid(), unknown)
