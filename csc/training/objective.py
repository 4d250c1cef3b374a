"""From a batch to loss terms: a method, its networks, and the images that they look at."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from csc.config.schema import Config
from csc.data.loading import Batch
from csc.data.order import BatchRows
from csc.errors import BadConfig, BadModel
from csc.methods.base import LossInputs, Method, Replay
from csc.nets.ci_gcn import CIGCN
from csc.nets.correlation import statistical_cm
from csc.nets.network import Network, Outputs
from csc.replay.statistics import sample_features
from csc.training.batches import plain_batches
from csc.training.device import Precision
from csc.training.examples import Examples
from csc.training.exemplar_labels import ExemplarLabels

__all__ = ["Objective"]


@dataclass
class Objective:
    """What a task's training minimises, and what its method may ask of the task."""

    config: Config
    method: Method
    network: Network  # that learns; on its device, with what must not learn frozen
    prior: Network | None  # made for inference, if the method asks for it
    new: int  # how many classes are new
    examples: Examples
    precision: Precision
    backbone_is_frozen: bool  # in this task

    def __post_init__(self) -> None:
        self.group, self.classes = self.examples.group, self.examples.view.classes
        self.device, self.needs_intermediates = self.group.device, self.method.needs_intermediates
        # A frozen backbone is the same in both networks: it runs once, and both take its maps.
        learner, self._prior_network = (
            net.on_maps() if net and self.backbone_is_frozen else net for net in (self.network, self.prior)
        )
        compiled = torch.compile(learner) if self.config.train.compile else learner
        self.learner = self.group.learner(cast(nn.Module, compiled))  # averages gradients over processes
        self._prior_logits: Tensor | None = None
        self._exemplar_labels = ExemplarLabels.of(self.examples, self.new)
        self.samples_features = self.config.statistics.replay and self.prior is not None
        if self.samples_features and self.group.world > 1:
            raise BadConfig("statistics.replay=true: works in one process only; set train.processes=1")
        if self.samples_features and "statistics.mean" not in self.method.state:
            raise BadModel("statistics.replay=true: the prior model has no statistics; train it with this setting, too")

    @property
    def old(self) -> int:
        """How many classes are old."""
        return len(self.classes) - self.new

    def begin(self) -> None:
        """Prepare for the first update, also when training resumes."""
        # The prior model always says the same of cached maps without augmentation, so it is asked once.
        fixed = self.examples.maps_uri and not self.config.input.augment
        if self.prior is not None and fixed and not self.needs_intermediates:
            self._prior_logits = self.logits_of_prior()
        if self._exemplar_labels is not None and self.config.memory.relabel != "none":
            of_exemplars = self.examples.apply(cast(Network, self.prior), self.examples.exemplars)
            self._exemplar_labels.relabel(of_exemplars > 0, by_learner=self.config.memory.relabel == "both")
        self.method.begin(self)
        if any(name == "statistical_cm" for name, _ in self.network.head.named_buffers()):
            self._count_correlations()

    def logits_of_prior(self) -> Tensor:
        """What the prior model says of every training image without augmentation, exemplars included."""
        assert self.prior is not None
        return self.examples.apply(self.prior, range(len(self.examples.view))).to(self.device)

    def logits(self, rows: Sequence[int]) -> Tensor:
        """What the network says now of some training images, without augmentation."""
        return self.examples.apply(self.network.eval(), rows)

    def pooled_features(self) -> Tensor:
        """The pooled last maps of the task's own images (rows, channels)."""
        return self.features(lambda maps: maps.mean(dim=(2, 3)))

    def features_of_new_classes(self) -> list[Tensor]:
        """Of each new class, features of the task's images that hold it (images, channels), to take statistics of."""
        present = (self.labels()[:, -self.new :] > 0).T
        if self.config.statistics.pooling == "mean":
            pooled = self.pooled_features()
            return [pooled[images] for images in present]
        network = self.network.eval()
        head = cast(CIGCN, network.head)

        def under_mask(column: int, rows: Sequence[int]) -> Tensor:
            if not rows:
                return torch.zeros(0, head.channels)
            return self.examples.apply(lambda images: head.masked(network.features(images), column), rows)

        return [under_mask(self.old + c, images.nonzero()[:, 0].tolist()) for c, images in enumerate(present)]

    def features(self, pool: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function of the last maps gives for the task's own images (rows, …), in evaluation mode."""
        network = self.network.eval()
        return self.examples.apply(lambda images: pool(network.features(images)), range(self.examples.task_rows))

    def labels(self) -> Tensor:
        """Labels of the task's own images (rows, n), zero where they are unknown."""
        return torch.from_numpy(self.examples.view.targets()[: self.examples.task_rows]).float()

    def image_digests(self) -> Tensor:
        """A number (rows,) for each of the task's own images, by its name and its data set."""
        view = self.examples.view
        names = [f"{view.fingerprint}/{name}" for name in view.table["image_id"].to_pylist()[: self.examples.task_rows]]
        digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
        return torch.from_numpy(np.frombuffer(b"".join(digests), np.int64).copy())

    def sample_batches(self, size: int, most: int) -> Iterator[Batch]:
        """The task's own images without augmentation, drawn at random, at most so many."""
        examples = self.examples
        rows = np.random.default_rng([examples.seed, 3]).permutation(examples.task_rows)[:most].tolist()
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        for batch in plain_batches(examples.view, parts, self.config, examples.maps_uri, self.device):
            yield batch.to(self.device)

    def terms(self, batch: Batch, rows: BatchRows, others: Sequence[BatchRows] = ()) -> dict[str, Tensor]:
        """The loss terms of a batch, the same in all processes.

        Args:
            batch: this process's shard: rows of the task, then those of each draw from the memory.
            rows: the same rows of all processes.
            others: those of all other batches of an accumulated update.
        """
        sizes = [len(part) for part in rows.parts]
        share = sizes[0] / (sizes[0] + sum(len(other.own) for other in others))
        own = [len(self.group.shard(range(size))) for size in sizes]
        with self.precision.autocast:
            outputs, prior, samples = self._forward(batch, own[0])
            learner = outputs if samples is None else outputs.rows(slice(sum(own)))
            distances = self._distances(learner.rows(slice(own[0])), prior)

        def gather(values: Tensor) -> list[Tensor]:
            """The rows of all processes: those of the task, then those of each draw."""
            return [self.group.gather(part, size) for part, size in zip(torch.split(values, own), sizes, strict=True)]

        logits, targets = gather(learner.logits.float()), gather(batch.targets)
        per_image = {name: self.group.gather(values.float(), sizes[0]) for name, values in distances.items()}
        prior_logits = self.group.gather(prior.logits.float(), sizes[0]) if prior is not None else None
        known: Tensor | None = None
        replays: tuple[Replay, ...] = ()
        if (labels := self._exemplar_labels) is not None:
            shown = gather(batch.rows)
            targets = [labels.fill_in(*part) for part in zip(targets, logits, shown, strict=True)]
            of_update = [self._with_others(part, [other.parts[i] for other in others]) for i, part in enumerate(shown)]
            replays = tuple(
                Replay(logits[i], targets[i], labels.known[update], labels.logits[shown[i]], labels.stored[update])
                for i, update in enumerate(of_update)
                if i > 0
            )
            known = labels.known[of_update[0]] if self.config.memory.replay == "concat" else None
        inputs = LossInputs(logits[0], targets[0], self.new, prior_logits, known, per_image, replays, share)
        terms = self.method.loss(inputs) | self.method.penalty(self.network)
        if samples is not None:
            loss = self._loss_of_samples(outputs.rows(slice(sum(own), None)), samples, share)
            terms["drawn"] = self.config.statistics.weight * loss
        return terms

    def _distances(self, learner: Outputs, prior: Outputs | None) -> dict[str, Tensor]:
        return self.method.distances(learner, prior) if self.needs_intermediates else {}

    def _loss_of_samples(self, learner: Outputs, samples: Tensor, share: float) -> Tensor:
        """The method's loss of the features sampled for old classes, as of images without a new class."""
        with self.precision.autocast:
            prior = self._compute_prior(samples)
            distances = {name: values.float() for name, values in self._distances(learner, prior).items()}
        logits = learner.logits.float()
        inputs = LossInputs(
            logits, torch.zeros_like(logits), self.new, prior.logits.float(), None, distances, share=share
        )
        return torch.stack(list(self.method.loss(inputs).values())).sum()

    def _with_others(self, rows: Tensor, others: Sequence[Sequence[int]]) -> Tensor:
        """The rows of a batch, and after them those of the other batches of its update."""
        if not others:
            return rows
        return torch.cat([rows, torch.tensor([row for other in others for row in other], device=self.device)])

    def _forward(self, batch: Batch, own: int) -> tuple[Outputs, Outputs | None, Tensor | None]:
        """The learner's outputs on all images and sampled features; the prior's on the task's images; the features."""
        images = batch.images
        if self.backbone_is_frozen:
            with torch.no_grad():
                images = self.network.features(images)
        prior = self._prior_outputs(images[:own], batch.rows[:own])  # first, so that its memory is free for the learner
        samples = None
        if self.samples_features:
            features = sample_features(self.method.state, own)[:, :, None, None].to(images)
            samples = features.expand(-1, -1, *images.shape[2:])  # maps that are the same at all positions
            images = torch.cat([images, samples])  # in one pass: batch-norms see both
        return _as_outputs(self.learner(images, self.needs_intermediates)), prior, samples

    def _prior_outputs(self, images: Tensor, rows: Tensor) -> Outputs | None:
        """What the prior model says, if there is one: looked up where it is known, else computed."""
        if self._prior_logits is not None:
            return _as_outputs(self._prior_logits[rows])
        return None if self._prior_network is None else self._compute_prior(images)

    def _compute_prior(self, images: Tensor) -> Outputs:
        assert self._prior_network is not None
        intermediates = self.needs_intermediates
        with torch.no_grad(), torch.inference_mode(not intermediates):
            answer = _as_outputs(self._prior_network(images, intermediates))
        return answer if intermediates else _as_outputs(answer.logits.clone())  # autograd refuses inference tensors

    def _count_correlations(self) -> None:
        """Fill the head's statistical matrix from the task's labels and the prior model's scores."""
        labels = self.labels()
        matrix = self.network.head.get_buffer("statistical_cm")
        if self.config.labels == "seen":  # nothing is hidden: all classes are counted alike
            matrix.copy_(statistical_cm(labels))
            return
        old = self.old
        prior_logits = self.logits_of_prior()[: len(labels)].cpu() if self.prior is not None else None
        prior_cm = matrix[:old, :old].cpu().clone() if old else None
        matrix.copy_(statistical_cm(labels[:, old:], prior_logits, prior_cm))


def _as_outputs(answer: Tensor | Outputs) -> Outputs:
    """Logits alone as outputs, where nothing else is needed."""
    return answer if isinstance(answer, Outputs) else Outputs(answer, answer, (), None)
