"""Statistics replay: what is kept of an old class is the mean and the spread of its features, never an image.

A task of few classes shows only images that hold one of them, so a new class is told apart from its neighbours in the
task and from nothing else. Features sampled from N(mean, diag std²) of each old class stand for the images that are not
there: they join a batch as images without a new class, and the prior model says which old classes they show.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["sample_features", "with_statistics"]


def with_statistics(state: Mapping[str, Tensor], members: Sequence[Tensor]) -> dict[str, Tensor]:
    """A method's state with the statistics of a task's new classes behind those of the old ones.

    `members` are the pooled features (images, D) of the images of each new class.
    """
    members = [of_class.double() for of_class in members]
    found = {
        "statistics.mean": torch.stack([of_class.sum(0) / max(len(of_class), 1) for of_class in members]),
        "statistics.images": torch.tensor([len(of_class) for of_class in members]),
    }
    spread = [
        (of_class - mean).square().sum(0) / max(len(of_class), 1)
        for of_class, mean in zip(members, found["statistics.mean"], strict=True)
    ]
    found["statistics.std"] = torch.stack(spread).sqrt()
    return dict(state) | {
        name: torch.cat([state[name], values]) if name in state else values for name, values in found.items()
    }


def sample_features(state: Mapping[str, Tensor], count: int) -> Tensor:
    """Features (count, D), each of an old class chosen at random among those that had images."""
    classes = state["statistics.images"].nonzero()[:, 0]
    chosen = classes[torch.randint(len(classes), (count,))]
    mean, std = state["statistics.mean"][chosen], state["statistics.std"][chosen]
    return (mean + std * torch.randn(mean.shape)).float()
