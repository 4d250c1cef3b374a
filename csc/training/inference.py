"""What networks say of the images of a view, without learning."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from csc.config.schema import Config
from csc.data.views import View
from csc.distributed.group import Group, single_process
from csc.nets.network import Network
from csc.training.batches import plain_batches
from csc.training.device import for_inference

__all__ = ["apply_to_rows", "confidences"]


def confidences(
    network: Network, view: View, config: Config, maps_uri: str = "", group: Group | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sigmoid confidences of a network on a view, batch by batch: (rows, float32 confidences), in full precision.

    Every process of a group gets all of them, each image scored by one.
    """
    group = group or single_process()
    scorer = for_inference(network, config, group.device)
    for rows, logits in apply_to_rows(scorer, view, range(len(view)), config, maps_uri, group):
        yield rows, logits.sigmoid()


def apply_to_rows(
    function: Callable[[Tensor], Tensor], view: View, rows: Sequence[int], config: Config, maps_uri: str, group: Group
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a function of images returns for some rows of a view, batch by batch: (rows, float32 values).

    Every process of the group gets all of them.
    """
    size = 2 * config.train.batch_size * group.world
    shares = [rows[start : start + size] for start in range(0, len(rows), size)]
    batches = plain_batches(view, [group.shard(share) for share in shares], config, maps_uri, group.device)
    for share, batch in zip(shares, batches, strict=True):
        with torch.inference_mode():
            values = function(batch.to(group.device).images).float()
            gathered = group.gather(values, len(share)).cpu()
        yield torch.tensor(share), gathered
