"""oEWC: online elastic weight consolidation (Schwarz et al., ICML 2018), for many labels."""

from typing import TYPE_CHECKING

from csc.config.groups import AtLeast1, NotNegative, Settings, Unit
from csc.errors import BadModel
from csc.methods import register
from csc.methods.finetune import FineTune

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.network import Network
    from csc.training.objective import Objective

__all__ = ["OewcSettings", "OnlineEWC"]


class OewcSettings(Settings, frozen=True):
    """Strength of the penalty, decay of the Fisher information, and how it is estimated.

    Attributes:
        weight: of the penalty.
        gamma: what is left of the Fisher information after each task.
        samples: images that it is estimated on.
        batch_size: images whose gradients are squared together.
    """

    weight: NotNegative = 100.0
    gamma: Unit = 1.0
    samples: AtLeast1 = 2000
    batch_size: AtLeast1 = 4


@register
class OnlineEWC(FineTune):
    """L = L_cls + λ Σ F (θ - θ*)²: fine-tuning, with weights held where they mattered.

    After each task F ← γ F + F_t and θ* ← θ. F_t is the mean squared gradient of the log-likelihood of the task's
    labels, Σ_c over C^t, on a sample of its images, taken `batch_size` at a time: the square of the sum of independent
    gradients is the sum of their squares, on average. Rows of a head that came later have F = 0.
    """

    name = "oewc"
    own_settings = (OewcSettings,)

    def begin(self, objective: "Objective") -> None:
        """Refuse a prior model without Fisher information."""
        super().begin(objective)
        has_old = objective.old > 0
        if has_old and not any(name.startswith("fisher.") for name in self.state):
            raise BadModel("method=oewc: the prior model has no Fisher information; train it with this method, too")

    def penalty(self, network: "Network") -> "dict[str, Tensor]":
        """λ Σ F (θ - θ*)²; nothing in the base task."""
        from csc.methods.losses import quadratic_penalty

        held = {
            name: value
            for name, value in network.named_parameters()
            if value.requires_grad and f"fisher.{name}" in self.state
        }
        if not held:
            return {}
        fishers = [self._on(value, f"fisher.{name}") for name, value in held.items()]
        stars = [self._on(value, f"star.{name}") for name, value in held.items()]
        return {"ewc": self.config.group(OewcSettings).weight * quadratic_penalty(fishers, stars, list(held.values()))}

    def finish(self, objective: "Objective") -> None:
        """Estimate the Fisher information of the task and keep the weights."""
        import torch

        from csc.methods.losses import binary_cross_entropy

        network, settings = objective.network.eval(), self.config.group(OewcSettings)
        learned = {name: value for name, value in network.named_parameters() if value.requires_grad}
        fisher: dict[str, Tensor] = {}
        images = 0
        for batch in objective.sample_batches(settings.batch_size, settings.samples):
            logits, targets = network(batch.images)[:, -objective.new :], batch.targets[:, -objective.new :]
            likelihood = -objective.new * binary_cross_entropy(logits, targets)  # Σ over classes, mean over images
            gradients = torch.autograd.grad(likelihood, list(learned.values()), allow_unused=True)
            for name, gradient in zip(learned, gradients, strict=True):
                if gradient is not None:  # layers of a backbone that lie behind its last maps have none
                    fisher[name] = fisher.get(name, 0) + gradient.square() * len(logits) ** 2
            images += len(logits)
        for name, found in fisher.items():
            earlier = self._on(learned[name], f"fisher.{name}")
            self.state[f"fisher.{name}"] = (settings.gamma * earlier + found / images).cpu()
            self.state[f"star.{name}"] = learned[name].detach().cpu().clone()

    def _on(self, parameter: "Tensor", name: str) -> "Tensor":
        """A kept tensor on the device and in the shape of its parameter, zero where the parameter has grown."""
        import torch

        kept = self.state.get(name)
        if kept is None:
            return torch.zeros_like(parameter)
        if kept.device != parameter.device or kept.shape != parameter.shape:
            grown = torch.zeros_like(parameter)
            grown[tuple(slice(size) for size in kept.shape)] = kept.to(parameter.device)
            self.state[name] = kept = grown
        return kept
