"""L2P: Learning to Prompt (Wang et al., CVPR 2022), for many labels."""

from torch import Tensor

from csc.methods import register
from csc.methods.base import Method, Step
from csc.nets.network import Outputs

__all__ = ["L2P"]


@register
class L2P(Method):
    """L = L_cls(C^t) - λ Σ cos(query, chosen keys), on a frozen transformer with a pool of prompts.

    The pool is `csc.nets.prompts` (`head: prompts`), the classifier a linear layer. New classes learn from their
    labels; outputs of old classes have no loss, so nothing but the pool, which all tasks share, changes them.
    """

    name = "l2p"
    looks_inside = True

    def distances(self, learner: Outputs, prior: Outputs | None) -> dict[str, Tensor]:
        """Per image: similarity to the chosen keys."""
        return {} if learner.pull is None else {"pull": learner.pull.float()}

    def terms(self, step: Step) -> dict[str, Tensor]:
        """The classification loss of the new classes, and the pull of the chosen keys towards the images."""
        terms = {"ce": self.classify(step.logits[:, step.old :], step.targets[:, step.old :]), **self.replayed(step)}
        for name, values in step.distances.items():
            terms[name] = -self.config.l2p.pull * values.mean()
        return terms
