"""CI-GCN from 20 to 10,000 classes: full matrices against the low-rank graph (`cigcn.rank`).

A case is forward and backward of the head on the same random maps. Memory is counted, not sampled: parameters and
whatever autograd keeps for backward, from a pass over shapes alone, so it is exact and known for any size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import Result, interleaved
from csc.methods.csc import CigcnSettings
from csc.nets.ci_gcn import CIGCN

__all__ = ["head_memory", "scale"]

SIZES = (20, 80, 400, 1_000, 4_000, 10_000)
RANK = 64
FEATURES, SIDE, WIDTH, BATCH = 1280, 7, 256, 2  # maps of tf_efficientnet_lite0 at 224 px
ROOM = 2 << 30  # bytes; what would need more is predicted and not run
ROUNDS = 3
PASSED = 2_000  # classes; a smaller head passes several times per turn, to be long enough to time
LINEAR = 1.5  # cost per class at 10,000 classes relative to 1,000: near linear


def scale() -> list[Result]:
    """Cost of a step relative to a full graph of 20 classes; low-rank cost per class at 10,000 relative to 1,000."""
    cases = [(classes, rank) for rank in (0, RANK) for classes in SIZES]
    memory = {case: head_memory(*case) for case in cases}
    seconds = _seconds([case for case in cases if _fits(memory[case])])
    results = []
    for case in cases[1:]:
        title = f"{_name(*case)}, {_parameters(*case):.2f} M parameters"
        if case in seconds:
            results.append(_relative(f"{title}: time", seconds[case] / seconds[cases[0]], _name(*cases[0])))
        else:
            title += f" (does not fit {ROOM >> 30} GiB)"
        results.append(_relative(f"{title}: memory", memory[case] / memory[cases[0]], _name(*cases[0])))
    large, small = (10_000, RANK), (1_000, RANK)
    for what, growth in ("time", seconds[large] / seconds[small]), ("memory", memory[large] / memory[small]):
        per_class = growth * small[0] / large[0]
        results.append(_relative(f"{_name(*large)}: {what} per class", per_class, _name(*small), LINEAR))
    return results


def head_memory(classes: int, rank: int, batch: int = BATCH) -> int:
    """Bytes of a head's parameters and of all that autograd keeps from forward to backward, maps included.

    >>> head_memory(10_000, rank=0) > 6 * head_memory(10_000, rank=64)
    True
    """
    with torch.device("meta"):  # shapes without memory
        head = _head(classes, rank)
        maps = _maps(batch)
    kept = {parameter.untyped_storage()._cdata: parameter.nbytes for parameter in head.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = head(maps)
    assert logits.requires_grad  # holds all that was kept until here, so no address came twice
    return sum(kept.values())


def _relative(case: str, ratio: float, to: str, goal: float | None = None) -> Result:
    return Result("scale", case, ratio, goal, to, "lower")


def _head(classes: int, rank: int) -> CIGCN:
    return CIGCN(FEATURES, classes, CigcnSettings(width=WIDTH, rank=rank))


def _maps(batch: int) -> Tensor:
    return torch.randn(batch, FEATURES, SIDE, SIDE).contiguous(memory_format=torch.channels_last)


def _seconds(cases: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Best seconds of one pass of each case."""
    passes = {case: max(1, PASSED // case[0]) for case in cases}
    best = interleaved({_name(*case): _work(*case, passes[case]) for case in cases}, ROUNDS)
    return {case: best[_name(*case)] / passes[case] for case in cases}


def _work(classes: int, rank: int, passes: int) -> Callable[[], None]:
    head, maps = _head(classes, rank), _maps(BATCH)

    def work() -> None:
        for _ in range(passes):
            head(maps).sum().backward()
            head.zero_grad(set_to_none=True)  # or the cases would fill the memory together

    return work


def _fits(memory: int) -> bool:
    """Backward makes a gradient for almost everything that is kept, so a step needs about twice as much."""
    return 2 * memory <= ROOM


def _parameters(classes: int, rank: int) -> float:
    """In millions."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _head(classes, rank).parameters()) / 1e6


def _name(classes: int, rank: int) -> str:
    return f"{f'rank {rank}' if rank else 'full'}, {classes:,} classes"
