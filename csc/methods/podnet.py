"""PODNet: pooled outputs distillation (Douillard et al., ECCV 2020), as KRT adapts it to many labels."""

from typing import TYPE_CHECKING

from csc.config.groups import MemorySettings, NotNegative, Settings
from csc.methods import register
from csc.methods.base import LossInputs
from csc.methods.er import ER

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.network import Outputs

__all__ = ["PODNet", "PodnetSettings"]


class PodnetSettings(Settings, frozen=True):
    """Weights of the pooled maps and of the final features.

    Attributes:
        spatial: weight of the pooled maps.
        flat: weight of the final features.
    """

    spatial: NotNegative = 5.0
    flat: NotNegative = 180.0


@register
class PODNet(ER):
    """L = L_cls + √(n / n_new) (λ_c L_spatial + λ_f L_flat), with exemplars among the images.

    L_spatial: at each stage of the backbone, the squared maps summed over the width and over the height, laid side by
    side and normalised; the Euclidean distance between learner and prior, averaged over stages. L_flat: 1 - cosine of
    the pooled final features. Both are zero for a frozen backbone: what is left then is ER.
    """

    name = "podnet"
    memory_settings = MemorySettings
    own_settings = (PodnetSettings,)
    needs_prior = True
    needs_intermediates = True

    def distances(self, learner: "Outputs", prior: "Outputs | None") -> "dict[str, Tensor]":
        """Per image: distance of the pooled maps and of the final features."""
        import torch
        from torch.nn.functional import cosine_similarity

        if prior is None:
            return {}
        pairs = list(zip(learner.stages, prior.stages, strict=True))
        spatial = torch.stack([(_pooled(mine) - _pooled(before)).norm(dim=1) for mine, before in pairs]).mean(0)
        mine, before = (outputs.stages[-1].float().mean(dim=(2, 3)) for outputs in (learner, prior))
        return {"spatial": spatial, "flat": 1 - cosine_similarity(mine, before)}

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The classification loss of one batch, and how far the backbone has moved."""
        settings, growth = self.config.group(PodnetSettings), (inputs.logits.shape[1] / inputs.new) ** 0.5
        moved = self.distance_terms(inputs, spatial=settings.spatial * growth, flat=settings.flat * growth)
        return super().terms(inputs) | moved


def _pooled(stage: "Tensor") -> "Tensor":
    """(B, c, h, w) → (B, c (h + w)) of unit length."""
    import torch
    from torch.nn.functional import normalize

    squared = stage.float().square()
    return normalize(torch.cat([squared.sum(dim=3).flatten(1), squared.sum(dim=2).flatten(1)], dim=1))
