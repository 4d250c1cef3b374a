"""A training step never makes the host wait for the GPU: it runs no operation whose answer the host must read.

There is no GPU here, so a spy looks at every operation of a step on the CPU, forward and backward, and knows by name
those that wait on a GPU. What it cannot see: copies from the GPU to the host (`.cpu()`, `.tolist()`), as both are the
same memory here; the scaler of float16 gradients, which reads at every step whether they are finite and is off on the
CPU; and torch's SyncBatchNorm on several GPUs (docs/cluster.md).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.methods import _Case
from csc.config import base_method, methods
from csc.methods import registered

WAITS = {
    "_local_scalar_dense",  # item(), float(), bool()
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",  # torch.tensor(…): the GPU would get it by a copy that is waited for
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
MASKS = (torch.bool, torch.uint8)


class Spy(TorchDispatchMode):
    """Fails where an operation runs that would wait for a GPU."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        masked = name in INDEXES and any(index is not None and index.dtype in MASKS for index in args[1])
        assert not masked, f"{operation} with a mask waits for the GPU"
        assert name not in WAITS, f"{operation} waits for the GPU"
        with self:  # an operation may come as a whole, above all in inference mode: look at its parts
            answer = operation.decompose(*args, **kwargs)
        return operation(*args, **kwargs) if answer is NotImplemented else answer


@pytest.mark.parametrize("method", [name for name in methods() if not registered()[base_method(name)].solves])
def test_a_step_does_not_wait_for_the_gpu(method: str):
    step = _Case(method, *(("test_vit", 160) if method == "l2p" else ("test_resnet", 32))).step()
    with Spy():
        step()


NUMBERS, MASK = torch.arange(4), torch.tensor([True, False, True, False])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool((x > 1).any()),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 1),
        lambda x: x.masked_select(MASK),
        lambda x: x[MASK],
        lambda x: x.clone().index_put_((MASK,), x[:2]),
        lambda x: x.bincount(minlength=9),
        lambda x: x.unique(),
        lambda x: x.unique_consecutive(),
        lambda x: x.repeat_interleave(x),
        lambda x: x.equal(x + 1),
        lambda x: x.allclose(x + 1),
        lambda x: x + torch.tensor([1, 2, 3, 4]),
    ],
)
def test_the_spy_finds_what_waits(waiting: Callable[[Tensor], Any], inference: bool):
    with torch.inference_mode(inference), pytest.raises(AssertionError, match="waits for the GPU"), Spy():
        waiting(NUMBERS)


def test_the_spy_lets_pass_what_does_not_wait():
    with Spy():
        where = torch.where(NUMBERS > 1, NUMBERS, 0)
        counts = NUMBERS.new_zeros(9).scatter_add_(0, NUMBERS, torch.ones_like(NUMBERS))
        picked = NUMBERS[NUMBERS.flip(0)].masked_fill(MASK, 7)
    assert (where.tolist(), counts.tolist()) == ([0, 0, 2, 3], [1, 1, 1, 1, 0, 0, 0, 0, 0])
    assert picked.tolist() == [7, 2, 7, 0]
