"""Checkpoints within a task: one safetensors file per task, replaced atomically after each epoch.

It holds everything that the next epoch depends on: weights, optimiser moments, schedule, loss scale, random states.
Structure that is not a tensor travels as JSON in the file's header, so nothing is ever unpickled.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from csc.model import save_tensors
from csc.storage import atomic_file
from csc.training.optimiser import laid_out_like

__all__ = ["Checkpoint"]


@dataclass
class Checkpoint:
    """The moving parts of a task's training, and the file that keeps them."""

    path: Path
    key: str  # names the run and task; a file with another key is not resumed
    network: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler

    def save(self, log: list[dict[str, float]]) -> None:
        """Keep the state after an epoch; `log` has one entry per finished epoch."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        optimizer = self.optimizer.state_dict()
        for index, state in optimizer["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        facts = {
            "key": self.key,
            "log": log,
            "groups": optimizer["param_groups"],
            "scheduler": self.scheduler.state_dict() if self.scheduler else {},
            "scaler": self.scaler.state_dict(),
        }
        with atomic_file(self.path) as aside:
            save_tensors(tensors, aside, {"csc": json.dumps(facts)})

    def restore(self) -> list[dict[str, float]]:
        """Resume from the last finished epoch and return the log so far; an empty log if there is none."""
        try:
            with safe_open(self.path, framework="pt") as file:
                facts = json.loads(file.metadata()["csc"])
                if facts["key"] != self.key:
                    return []
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return []  # never written, or cut off by a full disk: start the task again
        self.network.load_state_dict(_below(tensors, "network."))
        self._restore_optimizer(_below(tensors, "optimizer."), facts["groups"])
        if self.scheduler:
            self.scheduler.load_state_dict(facts["scheduler"])
        if facts["scaler"]:  # written where numbers needed no scaling, it is empty
            self.scaler.load_state_dict(facts["scaler"])
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["random.cuda"])
        log: list[dict[str, float]] = facts["log"]
        return log

    def _restore_optimizer(self, moments: dict[str, Tensor], groups: list[dict[str, Any]]) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = laid_out_like(parameters[int(index)], value)
        for group in groups:
            group["betas"] = tuple(group["betas"])
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
