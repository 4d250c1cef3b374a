r"""Incremental cross-attention: the head of KRT (Dong et al., ICCV 2023), one embedding per task from shared layers.

A feature map becomes P tokens x. The shared transfer token KT asks, with one retention token KR_i of each task i:

    c_i = Attention(query N(KT); keys and values of N([KT, KR_i, x_1 … x_P]))      N: layer-norm
    u_i = KT + W_o c_i,     e_i = u_i + MLP(N'(u_i)),     z_i = W_i N_i(e_i) + b_i

Only KR_i tells the tasks apart, and KT is the same for every image. So nothing is computed twice:

- The query q is one vector per attention head: the score of a token y is (W_kᵀ q) · y, no keys are made.
- Values are linear: a W_v y summed over tokens is W_v of the summed tokens, one per attention head, not per token.
- The softmax over [KT, KR_i, x] is that over [KT, x], whose sum of exponentials is exp(s), and a share of KR_i in it:
  c_i = (1 - r_i) c + r_i W_v KR_i with r_i = sigmoid(score(KR_i) - s). Tasks cost next to nothing.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from csc.nets.head import Head

if TYPE_CHECKING:
    from csc.methods.krt import KrtSettings

__all__ = ["IncrementalCrossAttention"]

GRID = 7  # positions of a 224 px image to a side; maps of another size see the position embedding interpolated
MLP_RATIO = 4


class IncrementalCrossAttention(Head):
    """A head that answers each task's classes from an embedding of the task's own.

    First weights are the released ones: the projection Kaiming-normal, linear weights normal with `init_std` (0.01, too
    little for widths far below the published ones), tokens and positions normal with 0.02. Classifiers of later tasks
    have PyTorch's defaults. `task_sizes` says how many classes each task has brought.
    """

    def __init__(self, channels: int, task_sizes: Sequence[int], settings: "KrtSettings") -> None:
        super().__init__()
        self.channels, self.settings = channels, settings
        self.task_sizes, self.classes = tuple(task_sizes), sum(task_sizes)
        width = settings.width
        self.projection = nn.Conv2d(channels, width, 1)
        self.position = nn.Parameter(torch.empty(1, width, GRID, GRID))
        self.transfer = nn.Parameter(torch.empty(1, width))
        self.tokens = nn.ParameterList(torch.empty(1, width) for _ in task_sizes)
        self.block = ClassAttention(width, settings.heads)
        self.heads = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size)) for size in task_sizes)
        nn.init.kaiming_normal_(self.projection.weight, mode="fan_out")
        for layer in [*self.block.modules(), *self.heads[0].modules()]:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=settings.init_std)
        for token in (self.position, self.transfer, *self.tokens):
            nn.init.trunc_normal_(token, std=0.02)

    def resized(self, classes: int) -> "IncrementalCrossAttention":
        """A head with the same settings and fresh weights, with one more task for the classes that came."""
        return IncrementalCrossAttention(self.channels, (*self.task_sizes, classes - self.classes), self.settings)

    def old_parameters(self) -> list[str]:
        """Names of the tokens and classifiers of all tasks but the last."""
        names = []
        for task, head in enumerate(self.heads[:-1]):
            names += [f"tokens.{task}", *(f"heads.{task}.{name}" for name, _ in head.named_parameters())]
        return names

    def logits_and_features(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the embeddings (B, tasks, width) that they are read from."""
        embeddings = self.block(self.transfer, torch.cat([*self.tokens]), self.image_tokens(maps))
        logits = [head(embeddings[:, task]) for task, head in enumerate(self.heads)]
        return torch.cat(logits, dim=1), embeddings

    def image_tokens(self, maps: Tensor) -> Tensor:
        """(B, channels, h, w) → (B, P, width), a token for each position."""
        position: Tensor = self.position
        if maps.shape[2:] != position.shape[2:]:
            position = interpolate(position, maps.shape[2:], mode="bilinear", align_corners=False)
        return cast(Tensor, self.projection(maps) + position).flatten(2).transpose(1, 2)


class ClassAttention(nn.Module):
    """One transformer block in which a single token asks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, MLP_RATIO * width), nn.GELU(), nn.Linear(MLP_RATIO * width, width)
        )

    def forward(self, transfer: Tensor, retention: Tensor, image: Tensor) -> Tensor:
        """What the transfer token (1, D) learns of an image (B, P, D) with each retention token (T, D): (B, T, D)."""
        asking, own = self.norm(transfer), self.norm(retention)
        seen = torch.cat([asking.expand(len(image), 1, -1), self.norm(image)], dim=1)  # (B, 1 + P, D)
        weights, share = self._weights(asking, own, seen)
        pooled = weights.transpose(1, 2).to(seen.dtype) @ seen  # (B, H, D)
        common = torch.einsum("bhw,hdw->bhd", pooled, self._by_head(self.value.weight)).unsqueeze(1)  # (B, 1, H, D/H)
        value = self.value(own).view(len(own), self.heads, -1)  # (T, H, D/H)
        context = common + share.unsqueeze(3).to(common.dtype) * (value - common)
        embeddings: Tensor = transfer + self.output(context.flatten(2))
        return embeddings + cast(Tensor, self.mlp(embeddings))

    def attention(self, transfer: Tensor, retention: Tensor, image: Tensor) -> Tensor:
        """How much of what is learned with each retention token comes from each position (B, T, P): a mean of heads."""
        asking, own = self.norm(transfer), self.norm(retention)
        weights, share = self._weights(asking, own, torch.cat([asking.expand(len(image), 1, -1), self.norm(image)], 1))
        return torch.einsum("bph,bth->btp", weights[:, 1:], 1 - share) / self.heads

    def _weights(self, asking: Tensor, own: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The softmax over [KT, x] (B, 1 + P, H), and the share r_i of KR_i in that over [KT, KR_i, x] (B, T, H)."""
        probe = self._probe(asking)
        scores, own_scores = _full(seen @ probe), _full(own @ probe)  # (B, 1 + P, H), (T, H)
        return scores.softmax(dim=1), (own_scores - scores.logsumexp(dim=1, keepdim=True)).sigmoid()

    def _probe(self, asking: Tensor) -> Tensor:
        """W_kᵀ q of each head, scaled (D, H): its product with a token is the token's score."""
        q: Tensor = self.query(asking).view(self.heads, -1, 1)
        return (q * self._by_head(self.key.weight)).sum(dim=1).T / math.sqrt(q.shape[1])

    def _by_head(self, weight: Tensor) -> Tensor:
        """(D, D) → (H, D / H, D)."""
        return weight.view(self.heads, -1, weight.shape[1])


def _full(scores: Tensor) -> Tensor:
    """In single precision at least: exponentials of half-precise scores are too coarse."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
