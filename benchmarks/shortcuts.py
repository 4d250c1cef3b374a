"""What shortcuts of the training code are worth: folded batch-norms, kept memory, an optimiser without a compiler."""

import subprocess
import sys

import torch

from benchmarks import Result, interleaved
from csc.config.groups import BackboneSettings
from csc.nets.backbone import build_backbone
from csc.nets.folding import fold_batch_norms

__all__ = ["shortcuts"]

CASES = (("tf_efficientnet_lite0", 128, 32, 1.2), ("tresnet_m", 224, 8, 1.0))  # size, batch, goal
ROUNDS = 8
# A new process each: the compiler is imported once in the life of one. Only the first update is timed.
FIRST_UPDATE = """
import time, torch
from {module} import {kind}
head = torch.nn.Linear(1280, 20)
head(torch.ones(2, 1280)).sum().backward()
started = time.perf_counter()
{kind}(head.parameters(), fused=True).step()
print(time.perf_counter() - started)
"""
# A new process each, too: what is set stays set.
TRAINING_STEPS = """
import time, torch
from csc.config.groups import BackboneSettings
from csc.nets.backbone import build_backbone
from csc.training.device import disable_malloc_trim
{before}
network, images, seconds = build_backbone(BackboneSettings("tf_efficientnet_lite0")), torch.randn(32, 3, 128, 128), []
for _ in range(6):
    started = time.perf_counter()
    network(images).sum().backward()
    seconds.append(time.perf_counter() - started)
print(min(seconds))
"""


def shortcuts() -> list[Result]:
    """How much faster the code is with each shortcut than without it."""
    optimisers = ("torch.optim", "Adam"), ("csc.training.optimiser", "EagerAdam")
    plain, eager = (_seconds(FIRST_UPDATE.format(module=module, kind=kind)) for module, kind in optimisers)
    given_back, kept = (_seconds(TRAINING_STEPS.format(before=before)) for before in ("", "disable_malloc_trim()"))
    return [
        *(_folded(*case) for case in CASES),
        Result("shortcuts", "first update of a process", plain / eager, 2.0, "torch's Adam, which loads a compiler"),
        Result("shortcuts", "training step", given_back / kept, 1.0, "memory that is given back after each step"),
    ]


def _folded(name: str, size: int, batch: int, goal: float) -> Result:
    """A forward pass of the prior model, batch-norms as they are against folded ones."""
    plain, folded = (
        build_backbone(BackboneSettings(name)).eval().to(memory_format=torch.channels_last) for _ in range(2)
    )
    fold_batch_norms(folded.net)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        best = interleaved({"plain": lambda: plain(images), "folded": lambda: folded(images)}, ROUNDS)
    ratio = best["plain"] / best["folded"]
    return Result("shortcuts", f"prior forward, {name} {size} px", ratio, goal, "batch-norms that are not folded")


def _seconds(code: str) -> float:
    """What a program prints; the better of two processes."""
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    return min(float(process.stdout) for process in done)
