"""KRT: Knowledge Restore and Transfer (Dong et al., ICCV 2023)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from csc.config.groups import AtLeast1, NotNegative, Settings, StatisticsSettings, Unit
from csc.config.schema import Config
from csc.errors import BadConfig, BadModel
from csc.methods import register
from csc.methods.base import HEADS, HeadKind, LossInputs, Method

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.head import Head
    from csc.nets.network import Network, Outputs
    from csc.training.objective import Objective

__all__ = ["KRT", "KrtSettings", "class_thresholds", "search_threshold"]

STEP, STEPS, TOLERANCE = 0.005, 100, 0.1
LOWEST, HIGHEST = 1e-4, 0.999999


class KrtSettings(Settings, frozen=True):
    """The cross-attention head, the weight that keeps its old tokens' answers, and the pseudo-label threshold.

    Attributes:
        width: of the tokens.
        heads: of the attention.
        init_std: deviation of the first weights of linear layers.
        tokens: weight of the distance to the prior model's tokens.
        threshold: confidence at which an old class counts as a pseudo-label, to begin with.
        labels_per_image: of the data set, on average.
        of_classes: how many classes that average is over.
        per_class: gives each old class a threshold of its own; ours.
    """

    width: AtLeast1 = 384
    heads: AtLeast1 = 8
    init_std: NotNegative = 0.01
    tokens: NotNegative = 100.0
    threshold: Unit = 0.8
    labels_per_image: NotNegative = 2.9
    of_classes: AtLeast1 = 80
    per_class: bool = False

    def __post_init__(self) -> None:
        """Refuse a width that the attention heads cannot share."""
        if self.width % self.heads:
            raise BadConfig(f"krt.width={self.width}: expected a multiple of krt.heads={self.heads}")


def _attention(config: Config, channels: int, task_sizes: Sequence[int]) -> "Head":
    from csc.nets.attention import IncrementalCrossAttention

    return IncrementalCrossAttention(channels, task_sizes, config.group(KrtSettings))


HEADS["attention"] = HeadKind(_attention, KrtSettings)


@register
class KRT(Method):
    """L = L_cls(z, y or ŷ) + λ √(n / n_new) (1 - cos(e, e of the prior)), with hard pseudo-labels ŷ for old classes.

    Restore: ŷ = [σ(z of the prior) > η], added to whatever labels there are. η is chosen at the start of each task such
    that images have `labels_per_image` × n_old / `of_classes` pseudo-labels on average: the old classes' share of an
    image's labels. The search starts from η of the task before.

    Transfer: e are the embeddings of the old tasks, side by side, in the cross-attention head (`head: attention`, in
    `csc.nets.attention`). Retention tokens and classifiers of old tasks do not learn.

    With `per_class`, each class has an η of its own, at which it gets its share of those pseudo-labels: the share that
    its labels have among the labels of all old classes, each counted in its own task.
    """

    name = "krt"
    heads = ("attention", "linear")
    own_settings = (KrtSettings, StatisticsSettings)
    required_settings = ("krt.labels_per_image", "krt.of_classes")
    needs_prior = True
    needs_intermediates = True

    def __init__(self, config: Config, state: "Mapping[str, Tensor] | None" = None) -> None:
        super().__init__(config, state)
        self.settings = config.group(KrtSettings)
        # η, as the last task left it; or one for each old class
        self.threshold: float | Tensor = float(self.state.get("threshold", self.settings.threshold))

    @staticmethod
    def unread(config: Config) -> frozenset[str]:
        """Settings of the attention, with another head."""
        of_attention = {"krt.width", "krt.heads", "krt.init_std"} if config.head != "attention" else set()
        return Method.unread(config) | of_attention

    def begin(self, objective: "Objective") -> None:
        """Look for η, with what the prior model says of the task's images."""
        import torch

        if objective.prior is None:
            return
        scores = objective.logits_of_prior().sigmoid()
        expected = self.settings.labels_per_image * scores.shape[1] / self.settings.of_classes
        if self.settings.per_class:
            if "labels" not in self.state:
                raise BadModel("krt.per_class=true: the prior model has no count of its labels; train it so, too")
            share = self.state["labels"].to(scores) / self.state["labels"].sum()
            self.threshold = class_thresholds(scores, expected * share)
            return
        self.threshold, found = search_threshold(scores, expected, float(self.threshold))
        self.state["threshold"] = torch.tensor(self.threshold, dtype=torch.float64)
        if abs(found - expected) > TOLERANCE and objective.group.is_main:
            counts = f"{found:.2f} pseudo-labels per image above {self.threshold:.4f}, expected {expected:.2f}"
            print(f"krt: {counts}", flush=True)

    def finish(self, objective: "Objective") -> None:
        """Count the labels of the new classes, for thresholds of their own."""
        import torch

        super().finish(objective)
        if self.settings.per_class:
            counts = objective.labels()[:, -objective.new :].sum(0)
            self.state["labels"] = torch.cat([self.state.get("labels", counts[:0]), counts])

    def frozen_parameters(self, network: "Network") -> Iterable[str]:
        """The old tasks' tokens and classifiers; another head has none."""
        from csc.nets.attention import IncrementalCrossAttention

        head = network.head
        return [f"head.{name}" for name in head.old_parameters()] if isinstance(head, IncrementalCrossAttention) else []

    def distances(self, learner: "Outputs", prior: "Outputs | None") -> "dict[str, Tensor]":
        """Per image: how far the old tasks' embeddings have turned."""
        from torch.nn.functional import cosine_similarity

        if prior is None:
            return {}
        before = prior.representation.float()
        now = learner.representation[:, : before.shape[1]].float()
        return {"tokens": 1 - cosine_similarity(now.flatten(1), before.flatten(1))}

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The classification loss of one batch, and the turn of the old embeddings."""
        import torch

        targets, known = inputs.targets, None
        if inputs.prior_logits is not None:
            pseudo = inputs.prior_logits.sigmoid() > self.threshold
            targets = torch.cat(
                [targets[:, : inputs.old].maximum(pseudo.to(targets.dtype)), targets[:, inputs.old :]], 1
            )
        if inputs.known is not None and self.config.memory.unknown == "masked":
            known = inputs.known.clone()
            known[:, : inputs.old] = True  # by a label or a pseudo-label
        weight = self.settings.tokens * (inputs.logits.shape[1] / inputs.new) ** 0.5
        ce = self.classify(inputs, inputs.logits, targets, known)
        return {"ce": ce} | self.distance_terms(inputs, tokens=weight)


def class_thresholds(scores: "Tensor", expected: "Tensor") -> "Tensor":
    """Of each class (classes,), the threshold that `expected` (classes,) of its scores per image exceed."""
    above = (expected * len(scores)).round().long().clamp(0, len(scores) - 1)
    return scores.sort(dim=0, descending=True).values.gather(0, above.unsqueeze(0))[0]


def search_threshold(scores: "Tensor", expected: float, start: float) -> tuple[float, float]:
    """Walk from `start` to a threshold that about `expected` scores of an image exceed.

    Steps have a fixed size, and the walk ends within a tolerance that is absolute; where it would go on for too long
    or step over the goal for ever, it ends at the nearest threshold that it passed.

    Args:
        scores: (images, classes), between 0 and 1.
        expected: how many per image.
        start: first threshold.

    Returns:
        The threshold, and how many scores per image exceed it.
    """
    import torch

    rising = scores.double().flatten().sort().values

    def exceeding(thresholds: "Tensor") -> "Tensor":
        return (len(rising) - torch.searchsorted(rising, thresholds, right=True)).double() / len(scores)

    first = torch.tensor([start], dtype=torch.float64, device=scores.device)
    direction = 1 if exceeding(first) > expected else -1
    path = (first + direction * STEP * torch.arange(STEPS + 1).to(first)).clamp(LOWEST, HIGHEST)
    counts = exceeding(path)
    gaps = (counts - expected).abs()
    near = (gaps <= TOLERANCE).nonzero()
    best = int(near[0]) if len(near) else int(gaps.argmin())
    return float(path[best]), float(counts[best])
