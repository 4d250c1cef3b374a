"""What a task's training starts from: an initialisation, cached maps, or the prior model."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from csc.config.layers import method_class
from csc.config.schema import Config
from csc.data.feature_maps import FeatureCard, backbone_weights, map_channels, refuse_leaky
from csc.data.order import task_seed
from csc.data.views import View
from csc.errors import BadModel
from csc.methods import HEADS, build_head
from csc.model import MOMENTS, ModelCard, fingerprint, load_network
from csc.nets.backbone import StoredBackbone, initialise, normalisation
from csc.nets.head import grow, grown_parameters
from csc.nets.network import Network
from csc.scenario import Scenario, Task
from csc.storage.tensors import load_tensors
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
    config: Config, scenario: str, task: Task, view: View, prior_folder: Path | None, maps_uri: str = ""
) -> Start:
    """Build the network to train: from the initialisation, or grown from the prior model."""
    method = method_class(config.method)
    card = ModelCard(
        method=config.method,
        scenario=scenario,
        task=task.index,
        tasks=task.total,
        classes=task.seen,
        new=task.new,
        config=config.tree(),
        initialisation={},
        mean=(),
        std=(),
        data_fingerprint=view.fingerprint,
        prior_fingerprint=fingerprint(prior_folder) if prior_folder else "",
        code_version=code_version(),
    )
    if prior_folder is None or not method.continues:
        return start_on_maps(config, card, maps_uri) if maps_uri else _initialised(config, card)
    prior, prior_card = load_network(prior_folder, map_channels=map_channels(maps_uri))
    _check_prior(prior_card, config, card, task)
    start = _grown(config, prior, task, replace(card, **_inherited(prior_card)), prior_folder)
    uses_prior = method.needs_prior or config.memory.relabel != "none"
    return start if uses_prior else replace(start, prior=None)


def _initialised(config: Config, card: ModelCard) -> Start:
    plain, initialisation = initialise(config.backbone, config.init, allow_leaky=config.allow_leaky_init)
    mean, std = normalisation(plain)
    backbone = method_class(config.method).wrap(config, plain)
    network = Network(backbone, build_head(config, backbone.channels, card.task_sizes), mean, std)
    return Start(network, None, replace(card, initialisation=initialisation.to_plain(), mean=mean, std=std))


def start_on_maps(config: Config, card: ModelCard, maps_uri: str) -> Start:
    """A fresh head on cached maps; the backbone that made them comes along as weights."""
    maps_card = FeatureCard.read(maps_uri)
    refuse_leaky(maps_card, config)
    backbone = StoredBackbone(load_tensors(backbone_weights(maps_uri)), maps_card.shape[0])
    network = Network(backbone, build_head(config, backbone.channels, card.task_sizes), maps_card.mean, maps_card.std)
    return Start(network, None, replace(card, **_inherited(maps_card)))


def _inherited(before: ModelCard | FeatureCard) -> dict[str, Any]:
    """What a model takes over from whatever its backbone came from."""
    return {"initialisation": before.initialisation, "mean": before.mean, "std": before.std}


def _grown(config: Config, prior: Network, task: Task, card: ModelCard, prior_folder: Path) -> Start:
    network = copy.deepcopy(prior)
    quirks = config.release_quirks
    network.head = grow(prior.head, len(task.seen), reset_biases=quirks.legacy_bias_reset)
    grown = tuple(f"head.{name}" for name in grown_parameters(prior.head, network.head))
    moments = prior_folder / MOMENTS
    return Start(
        network,
        prior,
        card,
        grown if quirks.freeze_grown_layers and not method_class(config.method).solves else (),
        moments if quirks.persist_optimizer and moments.is_file() else None,
    )


def _head_settings(config: Config) -> object:
    """The settings that the head reads; none if it reads none."""
    group = HEADS[config.head].settings
    return config.group(group) if group else None


def _check_prior(before: ModelCard, config: Config, card: ModelCard, task: Task) -> None:
    """Refuse a model that this task cannot continue."""
    expected = Scenario.parse(card.scenario).before.name
    if (before.scenario, before.task, before.classes) != (expected, task.index - 1, task.old):
        raise BadModel(
            f"the prior model is task {before.task} of {before.scenario} with {len(before.classes)} classes, "
            f"task {task.index} of {card.scenario} needs that of task {task.index - 1} with {len(task.old)}"
        )
    then = before.resolved_config()
    if (then.backbone, then.head, _head_settings(then)) != (config.backbone, config.head, _head_settings(config)):
        raise BadModel(
            f"the prior model has another backbone, head or settings of them than this task, with "
            f"{config.backbone.name} and {config.head}"
        )
    if then.held_out != config.held_out:
        raise BadModel(f"the prior model was trained with held_out={then.held_out}, this task has {config.held_out}")
    if config.memory.sampler not in ("none", then.memory.sampler):
        raise BadModel(
            f"the prior model remembers with memory.sampler={then.memory.sampler}, this task asks for "
            f"{config.memory.sampler}"
        )
