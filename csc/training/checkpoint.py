"""Checkpoints within a task: one safetensors file per task, replaced atomically.

It holds everything that the next update depends on: weights, optimiser moments, schedule, loss scale, random states,
and how far training has come. Structure that is not a tensor travels as JSON in the file's header, so nothing is ever
unpickled. A digest of all of it is in the header, too: a file that was damaged is not used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from csc.errors import BadData, BadModel
from csc.storage import atomic_file, regular_file
from csc.storage.tensors import save_tensors
from csc.training.optimiser import laid_out_like

__all__ = ["Checkpoint", "EpochLog", "ResumePoint"]

EpochLog = dict[str, float]


@dataclass
class ResumePoint:
    """How far training has come."""

    log: list[EpochLog] = field(default_factory=list)  # one entry per finished epoch
    updates: int = 0  # finished ones of the epoch after these
    terms: dict[str, Tensor] = field(default_factory=dict)  # sums of the loss terms over these updates

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Count an update that is finished."""
        for name, value in terms.items():
            self.terms[name] = self.terms[name] + value if name in self.terms else value
        self.updates += 1


@dataclass
class Checkpoint:
    """The moving parts of a task's training, and the file that keeps them."""

    path: Path
    key: str  # names the run and task; a file with another key is not resumed
    network: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler

    def save(self, position: ResumePoint) -> None:
        """Keep the state after an update."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"terms.{name}": value for name, value in position.terms.items()}
        optimizer = self.optimizer.state_dict()
        for index, state in optimizer["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        metadata = {
            "key": self.key,
            "log": position.log,
            "updates": position.updates,
            "terms": list(position.terms),  # sums depend on their order
            "groups": optimizer["param_groups"],
            "scheduler": self.scheduler.state_dict() if self.scheduler else {},
            "scaler": self.scaler.state_dict(),
        }
        text = json.dumps(metadata)
        with atomic_file(self.path) as temporary:
            save_tensors(tensors, temporary, {"csc": text, "sha256": _digest(text, tensors)})

    def restore(self) -> ResumePoint:
        """Resume from the file, if it is there and of this run and task; a damaged one is a BadModel."""
        try:
            metadata, tensors = self._read()
        except FileNotFoundError:
            return ResumePoint()
        if metadata.get("key") != self.key:
            return ResumePoint()
        try:
            return self._load_state(metadata, tensors)
        except torch.OutOfMemoryError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            # Part of the state may be restored by now, so this process must not train on.
            reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
            raise BadData(f"{self.path}: a checkpoint of something else ({reason}); remove it to begin again") from None

    def _load_state(self, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> ResumePoint:
        self.network.load_state_dict(_below(tensors, "network."))
        self._restore_optimizer(_below(tensors, "optimizer."), metadata["groups"])
        if self.scheduler:
            self.scheduler.load_state_dict(metadata["scheduler"])
        if metadata["scaler"]:  # written where numbers needed no scaling, it is empty
            self.scaler.load_state_dict(metadata["scaler"])
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["random.cuda"])
        device = next(self.network.parameters()).device
        terms = {name: tensors[f"terms.{name}"].to(device) for name in metadata["terms"]}
        return ResumePoint(metadata["log"], metadata["updates"], terms)

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What the file holds, if its bytes are those that were written."""
        try:
            with safe_open(regular_file(self.path), framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise
        except (OSError, SafetensorError, ValueError) as error:
            raise BadModel(f"{self.path}: damaged checkpoint ({error})") from None
        text = header.get("csc", "")
        if header.get("sha256") != _digest(text, tensors):
            raise BadModel(f"{self.path}: damaged checkpoint (its digest is another)")
        try:
            metadata: dict[str, Any] = dict(json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadModel(f"{self.path}: damaged checkpoint ({error})") from None
        return metadata, tensors

    def _restore_optimizer(self, moments: dict[str, Tensor], groups: list[dict[str, Any]]) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = laid_out_like(parameters[int(index)], value)
        for group in groups:
            group["betas"] = tuple(group["betas"])
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of named tensors: their names, types, shapes and values."""
    digest = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
