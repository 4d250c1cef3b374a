"""Batches of a view, for training and without learning: of images, or of their cached maps."""

from collections.abc import Sequence

import torch

from csc.config.schema import Config
from csc.data.loading import Batches, image_batches, workers_for
from csc.data.map_batches import map_batches
from csc.data.order import BatchRows, Plan
from csc.data.views import View

__all__ = ["load_batches", "plain_batches"]


def plain_batches(
    view: View, batches: Sequence[Sequence[int]], config: Config, maps_uri: str, device: torch.device
) -> Batches:
    """Batches of the given rows, without augmentation."""
    return load_batches(view, [(0, [BatchRows(rows) for rows in batches])], config, maps_uri, device)


def load_batches(
    view: View,
    plan: Plan,
    config: Config,
    maps_uri: str,
    device: torch.device,
    *,
    seed: int = 0,
    augment: bool = False,
) -> Batches:
    """The batches of a plan, one after the other: of images, or of the cached maps at `maps_uri`."""
    if maps_uri:
        return map_batches(view, maps_uri, plan, seed, variants=config.features.views if augment else 0)
    return image_batches(
        view,
        plan,
        seed=seed,
        size=config.input.size,
        mode=config.input.decode,
        augment=augment,
        workers=workers_for(config.train.workers, device),
    )
