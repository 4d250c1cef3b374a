"""What is known of the rows of a task with a memory: the labels of its images and exemplars, and stored logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csc.training.examples import Examples

__all__ = ["ExemplarLabels"]


@dataclass
class ExemplarLabels:
    """Tables with a row for each of the task's images, then for each exemplar, and a column for each class."""

    own: int  # rows that are the task's own images
    old: int  # classes that are old
    known: Tensor  # which labels are known, or filled in
    logits: Tensor  # that were stored with an exemplar
    stored: Tensor  # for which classes
    by_prior: Tensor | None = None  # labels of old classes that the prior model has filled in; none if nobody does
    by_learner: Tensor | None = None  # labels of new classes that the learner fills in at each update, if it does

    @classmethod
    def of(cls, examples: Examples, new: int) -> "ExemplarLabels | None":
        """The tables of a task with so many new classes; None if it has no memory."""
        memory, device = examples.memory, examples.group.device
        if memory is None:
            return None
        shape = examples.task_rows, len(examples.view.classes)
        known, nothing = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        known[:, -new:] = True
        stored = torch.arange(shape[1]) < torch.from_numpy(memory.stored).unsqueeze(1)
        return cls(
            own=examples.task_rows,
            old=shape[1] - new,
            known=torch.cat([known, torch.from_numpy(memory.known_mask())]).to(device),
            logits=torch.cat([nothing, torch.from_numpy(memory.logits)]).to(device),
            stored=torch.cat([nothing.bool(), stored]).to(device),
        )

    def relabel(self, predicted: Tensor, *, by_learner: bool) -> None:
        """Mark unknown labels of exemplars as known, as models fill them in (`memory.relabel`).

        `predicted` is what the prior model finds in them (exemplars, old classes); the learner may add the new classes.
        """
        own, old, unknown = self.own, self.old, ~self.known
        unknown[:own] = False
        self.by_prior = torch.zeros_like(self.known)
        self.by_prior[own:, :old] = predicted.to(self.known.device) & unknown[own:, :old]
        self.known = self.known.clone()
        self.known[own:, : None if by_learner else old] = True
        if by_learner:
            unknown[:, :old] = False
            self.by_learner = unknown

    def fill_in(self, targets: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Targets of some rows (B, n), with the labels that models fill in; `logits` are the learner's."""
        if self.by_prior is not None:
            targets = targets.maximum(self.by_prior[rows].to(targets.dtype))
        if self.by_learner is not None:
            targets = torch.where(self.by_learner[rows], (logits.detach() > 0).to(targets.dtype), targets)
        return targets
