"""Ridge regression: the head of a frozen backbone in closed form. Ours, not of the paper."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from csc.config.groups import AtLeast0, NotNegative, Settings
from csc.config.schema import Config
from csc.errors import BadConfig
from csc.methods import register
from csc.methods.base import HEADS, HeadKind, Method

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.analytic import AnalyticHead
    from csc.nets.head import Head
    from csc.training.objective import Objective

__all__ = ["RidgeRegression", "RidgeSettings"]

CHUNK = 4096  # images whose h are there at a time


class RidgeSettings(Settings, frozen=True):
    """The closed form: its penalty, and the features h that it is linear in.

    Attributes:
        penalty: λ, in units of trace(A) / size.
        relative: whether it is in these units; otherwise it is λ itself.
        bias: whether there is a constant among the features.
        standardise: whether features are, by the mean and the deviation of the base task.
        pooling: of the maps: their mean, the root of it, or mean and maximum side by side. The root makes a class
            that fills a corner count for more, next to one that fills the image.
        hidden: random features that the pooled ones are expanded to; 0 for none.
        once: whether an image that comes again in a later task is counted once; digests of image names are kept then.
    """

    penalty: NotNegative = 1.0
    relative: bool = True
    bias: bool = True
    standardise: bool = True
    pooling: Literal["mean", "root", "mean_max"] = "mean"
    hidden: AtLeast0 = 0
    once: bool = False


def _analytic(config: Config, channels: int, task_sizes: Sequence[int]) -> "Head":
    from csc.nets.analytic import AnalyticHead

    return AnalyticHead(channels, sum(task_sizes), config.group(RidgeSettings), config.seed)


HEADS["ridge"] = HeadKind(_analytic, RidgeSettings)


@register
class RidgeRegression(Method):
    """W = (A + λ I)⁻¹ C  with  A = Σ h hᵀ  and  C = Σ h yᵀ  over all images of all tasks so far.

    The sums, in double precision, are all that goes from task to task. h are the pooled features of the frozen
    backbone, standardised by the mean and the standard deviation of the base task, and a constant for the bias
    (`csc.nets.analytic`). In y old classes are 0 in the images of a new task; there are no pseudo-labels. So T tasks
    give exactly what one solution over their images with the same mean and deviation gives, in whatever order.

    With `once`, an image that comes again adds to C only. In the tasks of a scenario every image of a class is in the
    task of that class, so C is then complete and W is that of ridge regression with all labels at once. New images that
    show an old class without its label (`csc extend`) count as images without it.

    With `backbone.frozen=after_base` the base task first trains the backbone under a linear head, with the
    classification loss, as any method would; then it is frozen, and the sums begin.

    Scores: z = W h is near 0 and 1, but no probability. Take z of a class as normal around μ₁ where the class is
    present and around μ₀ elsewhere, with one variance s² and a share π of present ones. The log-odds are linear in z,

        (μ₁ - μ₀) / s² · z - (μ₁² - μ₀²) / 2s² + ln π / (1 - π),

    and all four numbers follow from A and C, exactly, for old classes too. They scale and shift z in the head.
    """

    name = "ridge"
    heads = ("ridge",)
    memory_settings = None
    solves = True

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse a backbone that learns, and a regulariser of a loss that there is not."""
        if not config.backbone.frozen:
            raise BadConfig(
                f"backbone.frozen=false: method '{config.method}' keeps sums of features, which go stale when the "
                "backbone learns; set backbone.frozen=true, or after_base"
            )
        if config.max_entropy.beta:
            raise BadConfig(f"max_entropy.beta: method '{config.method}' has no loss to add it to; leave it at 0")

    @staticmethod
    def unread(config: Config) -> frozenset[str]:
        """The settings of training: nothing is trained but a backbone that learns in the base task."""
        learns = config.backbone.learns(is_base=True)
        groups = ("release_quirks.",) if learns else ("release_quirks.", "loss.", "train.")
        of_training = {key for key in config.flat() if key.startswith(groups)} | {"train.lr", "input.augment"}
        read = {"train.batch_size", "train.amp", "train.channels_last"}  # of one pass without augmentation
        if learns:
            read |= {"release_quirks.no_shuffle", "input.augment"}
        return Method.unread(config) | (of_training - read)

    @classmethod
    def is_random(cls, config: Config) -> bool:
        """Only random features are, and a backbone that learns or whose weights are not given."""
        return (
            config.group(RidgeSettings).hidden > 0 or config.init == "scratch" or config.backbone.learns(is_base=True)
        )

    def solve(self, objective: "Objective") -> dict[str, float]:
        """Add the task's images to the sums, solve, and turn scores into probabilities."""
        import torch

        settings, head = self.config.group(RidgeSettings), cast("AnalyticHead", objective.network.head)
        pooled, labels = objective.features(head.pooled), objective.labels()
        if "A" not in self.state and settings.standardise:
            head.standardise(pooled)
        size = head.linear.in_features + 1  # the last is the constant
        A = self.state.get("A", torch.zeros(size, size, dtype=torch.float64))
        C = torch.zeros(size, labels.shape[1], dtype=torch.float64)
        if "C" in self.state:
            C[:, : self.state["C"].shape[1]] = self.state["C"]
        fresh, prior = self._note_fresh(objective), self.prior_solution()
        for first in range(0, len(pooled), CHUNK):
            rows = slice(first, first + CHUNK)
            h = head.expanded(pooled[rows].to(objective.device)).cpu().double()
            h = torch.cat([h, h.new_ones(len(h), 1)], dim=1)
            y, weights = self.weighted(h, labels[rows].double(), fresh[rows], prior)
            A = A + (weights * fresh[rows].unsqueeze(1) * h).T @ h
            C = C + (weights * h).T @ y
        self.state |= {"A": A, "C": C}
        W = self._solution(A, C)
        head.load(W, *log_odds(A, C, W, self.class_frequencies(A, C)))
        error = (W * (A @ W - 2 * C)).sum() / A[-1, -1] + C[-1].sum() / A[-1, -1]  # y² = y
        return {"squared_error": float(error) / C.shape[1]}

    def weighted(
        self, h: "Tensor", labels: "Tensor", fresh: "Tensor", prior: "Tensor | None"
    ) -> "tuple[Tensor, Tensor]":
        """The targets of some images (B, n), and how much each image counts (B, 1); `fresh` ones (B,) are new to A."""
        return labels, labels.new_ones(len(labels), 1)

    def prior_solution(self) -> "Tensor | None":
        """W of the task before, for `weighted`, if that asks for it."""
        return None

    def class_frequencies(self, A: "Tensor", C: "Tensor") -> "Tensor":
        """π of each class (n,): its share of the images so far."""
        return (C[-1] + 0.5) / (A[-1, -1] + 1)

    def _solution(self, A: "Tensor", C: "Tensor") -> "Tensor":
        """W (size, n); its last row, of the constant, is zero without a bias."""
        import torch

        settings = self.config.group(RidgeSettings)
        size = len(A) if settings.bias else len(A) - 1
        solved = A[:size, :size].clone()
        solved.diagonal().add_(settings.penalty * (solved.trace() / size if settings.relative else 1.0))
        W = torch.zeros_like(C)
        W[:size] = torch.linalg.solve(solved, C[:size])
        return W

    def _note_fresh(self, objective: "Objective") -> "Tensor":
        """Which images were in no task before (images,), and note them; with `once` the others are left out of A."""
        import torch

        digests = objective.image_digests()
        if not self.config.group(RidgeSettings).once:
            return torch.ones(len(digests), dtype=torch.float64)
        known = self.state.get("images", digests[:0])
        fresh = ~torch.isin(digests, known)
        self.state["images"] = torch.cat([known, digests[fresh]])
        return fresh.double()


def log_odds(A: "Tensor", C: "Tensor", W: "Tensor", frequencies: "Tensor") -> "tuple[Tensor, Tensor]":
    """Scale and shift (n,) that turn z = W h of each class into log-odds, from the sums and π of the classes (n,)."""
    total, present = A[-1, -1], C[-1]  # how much all images weigh, and those of each class
    inside = (W * C).sum(0) / present.clamp(min=1)  # μ₁
    outside = (A[-1] @ W - present * inside) / (total - present).clamp(min=1)  # μ₀
    squares = (W * (A @ W)).sum(0) / total
    weighted = (present + 0.5) / (total + 1)  # π, where images weigh as in the sums
    variance = (squares - weighted * inside**2 - (1 - weighted) * outside**2).clamp(min=1e-6)
    scale, share = (inside - outside) / variance, frequencies.clamp(max=0.999)
    return scale, (share / (1 - share)).log() - scale * (inside + outside) / 2
