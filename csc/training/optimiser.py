"""Adam for a task: groups of parameters, the schedule of the rate, and moments from the task before.

At their first call torch's optimisers import the compiler, only to tell it to leave them alone. That takes longer than
training a head on cached maps, and nothing here compiles an optimiser.
"""

import inspect
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from csc.config.groups import TrainSettings
from csc.errors import BadConfig
from csc.storage.tensors import load_tensors, save_tensors

__all__ = ["EagerAdam", "inherit_moments", "laid_out_like", "make_optimizer", "make_schedule", "save_moments"]

for _name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    _plain = inspect.unwrap(getattr(Optimizer, _name))
    _plain.__dynamo_disable = _plain  # where torch keeps the version that its compiler has wrapped


class EagerAdam(Adam):
    """torch's Adam, without torch's compiler."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        return inspect.unwrap(Adam.step)(self, closure)


def make_optimizer(network: nn.Module, settings: TrainSettings, rate: float) -> EagerAdam:
    """Fresh Adam; vectors and biases without weight decay; the backbone with its own share of the rate."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith(".bias")
            groups.setdefault((name.startswith("backbone."), decays), []).append(parameter)
    if not groups:
        raise BadConfig("nothing to train: backbone.frozen and release_quirks.freeze_grown_layers leave nothing")
    return EagerAdam(
        [
            {
                "params": parameters,
                "lr": rate * (settings.backbone_lr_scale if of_backbone else 1.0),
                "weight_decay": settings.weight_decay if decays else 0.0,
            }
            for (of_backbone, decays), parameters in groups.items()
        ],
        fused=True,
    )


def make_schedule(optimizer: Optimizer, settings: TrainSettings, updates: int) -> LRScheduler | None:
    """One cycle over all updates of a task, or none for a constant rate."""
    if settings.schedule == "constant":
        return None
    total, warm_up = max(updates, 2), settings.pct_start
    if any(math.isclose(warm_up * total, end) for end in (1, total)):
        warm_up -= 1e-6  # a phase of no length would divide by zero
    rates = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, max_lr=rates, total_steps=total, pct_start=warm_up)


def save_moments(optimizer: Optimizer, network: nn.Module, path: Path) -> None:
    """Keep Adam's moments by parameter name, for the task after."""
    names = {id(value): name for name, value in network.named_parameters()}
    moments = {
        f"{names[id(parameter)]}:{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names  # not those of a head that a closed form has replaced
        for key, value in state.items()
    }
    save_tensors(moments, path)


def inherit_moments(optimizer: Optimizer, network: nn.Module, path: Path) -> None:
    """Take over the moments of all parameters that kept their shape."""
    moments = load_tensors(path)
    for name, parameter in network.named_parameters():
        state = {
            key: moments[f"{name}:{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}:{key}" in moments
        }
        if parameter.requires_grad and state and state["exp_avg"].shape == parameter.shape:
            optimizer.state[parameter] = {key: laid_out_like(parameter, value) for key, value in state.items()}


def laid_out_like(parameter: Tensor, moment: Tensor) -> Tensor:
    """A moment where its parameter is and in its memory format: the fused optimiser walks both as raw memory."""
    return torch.empty_like(parameter).copy_(moment) if moment.shape == parameter.shape else moment.to(parameter.device)
