"""What a task's training starts from: an initialisation, cached maps, or the prior model."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from csc.config.layers import method_class
from csc.config.schema import Config
from csc.data.feature_maps import FeatureCard, backbone_weights, map_channels, read_feature_card, refuse_leaky
from csc.data.order import task_seed
from csc.data.views import View
from csc.errors import BadModel
from csc.methods import HEADS, build_head
from csc.model import MOMENTS, ModelCard, fingerprint, load_network, load_tensors
from csc.nets.backbone import StoredBackbone, initialise, normalisation
from csc.nets.head import grow, grown_parameters
from csc.nets.network import Network
from csc.scenario import Scenario, Task
from csc.version import code_version

__all__ = ["Start", "seed_everything", "start_on_maps", "start_task"]


def seed_everything(seed: int, task: int) -> None:
    """Make what follows depend on the seed and the task alone."""
    torch.manual_seed(task_seed(seed, task))
    torch.backends.cudnn.deterministic = True


@dataclass
class Start:
    """What a task's training starts from."""

    network: Network
    prior: Network | None  # if the method asks for it
    card: ModelCard
    frozen_parameters: tuple[str, ...] = ()
    moments: Path | None = None  # of the optimiser that trained the prior model, to go on with


def start_task(
    settings: Config, scenario: str, task: Task, view: View, prior_folder: Path | None, features: str = ""
) -> Start:
    """Build the network to train: from the initialisation, or grown from the prior model."""
    kind = method_class(settings.method)
    card = ModelCard(
        method=settings.method,
        scenario=scenario,
        task=task.index,
        tasks=task.total,
        classes=task.seen,
        new=task.new,
        config=settings.tree(),
        initialisation={},
        mean=(),
        std=(),
        data_fingerprint=view.fingerprint,
        prior_fingerprint=fingerprint(prior_folder) if prior_folder else "",
        code_version=code_version(),
    )
    if prior_folder is None or not kind.continues:
        return start_on_maps(settings, card, features) if features else _initialised(settings, card)
    prior, prior_card = load_network(prior_folder, map_channels=map_channels(features))
    _check_prior(prior_card, settings, card, task)
    start = _grown(settings, prior, task, replace(card, **_inherited(prior_card)), prior_folder)
    wanted = kind.needs_prior or settings.memory.relabel != "none"
    return start if wanted else replace(start, prior=None)


def _initialised(settings: Config, card: ModelCard) -> Start:
    plain, origin = initialise(settings.backbone, settings.init, allow_leaky=settings.allow_leaky_init)
    mean, std = normalisation(plain)
    backbone = method_class(settings.method).wrap(settings, plain)
    network = Network(backbone, build_head(settings, backbone.channels, card.task_sizes), mean, std)
    return Start(network, None, replace(card, initialisation=origin.facts(), mean=mean, std=std))


def start_on_maps(settings: Config, card: ModelCard, features: str) -> Start:
    """A fresh head on cached maps; the backbone that made them comes along as weights."""
    made = read_feature_card(features)
    refuse_leaky(made, settings)
    backbone = StoredBackbone(load_tensors(backbone_weights(features)), made.shape[0])
    network = Network(backbone, build_head(settings, backbone.channels, card.task_sizes), made.mean, made.std)
    return Start(network, None, replace(card, **_inherited(made)))


def _inherited(before: ModelCard | FeatureCard) -> dict[str, Any]:
    """What a model takes over from whatever its backbone came from."""
    return {"initialisation": before.initialisation, "mean": before.mean, "std": before.std}


def _grown(settings: Config, prior: Network, task: Task, card: ModelCard, prior_folder: Path) -> Start:
    network = copy.deepcopy(prior)
    quirks = settings.release_quirks
    network.head = grow(prior.head, len(task.seen), reset_biases=quirks.legacy_bias_reset)
    grown = tuple(f"head.{name}" for name in grown_parameters(prior.head, network.head))
    moments = prior_folder / MOMENTS
    return Start(
        network,
        prior,
        card,
        grown if quirks.freeze_grown_layers and not method_class(settings.method).solves else (),
        moments if quirks.persist_optimizer and moments.is_file() else None,
    )


def _head_settings(settings: Config) -> object:
    """The settings that the head reads; none if it reads none."""
    kind = HEADS[settings.head].settings
    return settings.group(kind) if kind else None


def _check_prior(before: ModelCard, settings: Config, card: ModelCard, task: Task) -> None:
    """Refuse a model that this task cannot continue."""
    expected = Scenario.parse(card.scenario).before.name
    if (before.scenario, before.task, before.classes) != (expected, task.index - 1, task.old):
        raise BadModel(
            f"the prior model is task {before.task} of {before.scenario} with {len(before.classes)} classes, "
            f"task {task.index} of {card.scenario} needs that of task {task.index - 1} with {len(task.old)}"
        )
    then = before.settings()
    if (then.backbone, then.head, _head_settings(then)) != (settings.backbone, settings.head, _head_settings(settings)):
        raise BadModel(
            f"the prior model has another backbone, head or settings of them than this task, with "
            f"{settings.backbone.name} and {settings.head}"
        )
    if then.held_out != settings.held_out:
        raise BadModel(f"the prior model was trained with held_out={then.held_out}, this task has {settings.held_out}")
    if settings.memory.sampler not in ("none", then.memory.sampler):
        raise BadModel(
            f"the prior model remembers with memory.sampler={then.memory.sampler}, this task asks for "
            f"{settings.memory.sampler}"
        )
