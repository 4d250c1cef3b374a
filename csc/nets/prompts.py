"""L2P's backbone: a frozen vision transformer that learned prompts steer (Wang et al., CVPR 2022).

A pool holds M prompts of L tokens and a key for each. The frozen transformer f gives an image x the query q, the final
[CLS] feature of a pass without prompts. The K prompts with the largest cos(q, key) then stand between [CLS] and the
patches of a second pass, and the feature of the image is the mean of their K · L outputs:

    maps = mean f([CLS, P_1 … P_K, patches])_prompts,     pull = Σ_K cos(q, key_k)
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from csc.errors import BadConfig
from csc.nets.backbone import Backbone, Intermediates

if TYPE_CHECKING:
    from csc.methods.l2p import L2pSettings

__all__ = ["PromptedBackbone"]


class PromptedBackbone(nn.Module):
    """A pool of prompts before a transformer whose weights never change; prompts and keys are all that learns.

    In training the batch votes: all its images get the prompts that most of them would choose. In evaluation each
    image has its own, because a prediction must not depend on other images (the released code votes there as
    well). Prompts have no position: the pre-trained table knows only [CLS] and patches, and a prompt that learns can
    hold in itself whatever a position would add.
    """

    def __init__(self, backbone: Backbone, settings: "L2pSettings") -> None:
        super().__init__()
        net: Any = backbone.net
        if getattr(net, "cls_token", None) is None or not hasattr(net, "blocks"):
            name = getattr(net, "default_cfg", {}).get("architecture", type(net).__name__)
            raise BadConfig(
                f"head=prompts: needs a vision transformer with a class token, backbone.name={name} is none; "
                "try vit_base_patch16_224.augreg_in21k"
            )
        self.net, self.channels, self.chosen = net.requires_grad_(False).eval(), backbone.channels, settings.chosen
        self.prompts = nn.Parameter(torch.empty(settings.pool, settings.length, self.channels).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(settings.pool, self.channels).uniform_(-1, 1))

    def train(self, mode: bool = True) -> "PromptedBackbone":
        """Set the mode of the pool; the transformer stays in evaluation."""
        super().train(mode)
        self.net.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images → maps (B, channels, 1, 1)."""
        return self.intermediates(images).maps

    def intermediates(self, images: Tensor) -> Intermediates:
        """Maps, and how near the chosen keys are to the images."""
        with torch.no_grad():
            tokens = self.net.norm_pre(self.net._pos_embed(self.net.patch_embed(images)))
            query = self.net.norm(self.net.blocks(tokens))[:, 0]
        cosines = cosine_similarity(query.float().unsqueeze(1), self.keys, dim=2)  # (B, M), also of half-precise passes
        choice = self.choose(cosines.detach())
        prompts = self.prompts[choice].flatten(1, 2)  # (B, K · L, D)
        first = self.net.num_prefix_tokens
        prompted = torch.cat([tokens[:, :first], prompts.to(tokens.dtype), tokens[:, first:]], dim=1)
        outputs = self.net.norm(self.net.blocks(prompted))[:, first : first + prompts.shape[1]]
        maps = outputs.mean(dim=1)[:, :, None, None]
        return Intermediates(maps, (maps,), cosines.gather(1, choice).sum(dim=1))

    def choose(self, cosines: Tensor) -> Tensor:
        """Which prompts each image gets (B, K), from the cosines to all keys (B, M)."""
        choice = cosines.topk(self.chosen, dim=1).indices
        if not self.training:
            return choice
        picked = choice.flatten()  # not counted by bincount, which waits for the GPU to learn how long its answer is
        votes = picked.new_zeros(len(self.keys)).scatter_add_(0, picked, torch.ones_like(picked))
        if dist.is_initialized():  # the batch is that of all processes
            dist.all_reduce(votes)
        winners = votes.argsort(descending=True, stable=True)[: self.chosen]
        return winners.expand(len(cosines), -1)
