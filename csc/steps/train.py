"""train: teach a model the classes of one task."""

import contextlib
import copy
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.config import resolve
from csc.config.schema import Config
from csc.data.features import FeatureCard, backbone_weights, read_features, refuse_leaky
from csc.data.views import View, read_view
from csc.errors import BadConfig, BadModel
from csc.model import (
    MEMORY,
    METHOD_STATE,
    ModelCard,
    fingerprint,
    load_network,
    load_tensors,
    read_card,
    save_network,
    save_tensors,
)
from csc.replay.memory import Memory, read_memory, update, write_memory
from csc.retry import with_retries
from csc.scenario import Scenario, Task
from csc.serving.packaging import installed
from csc.steps.register import read_registered
from csc.steps.split_labels import read_split
from csc.storage import atomic_folder, write_json
from csc.tracking.runs import Registered, Tracker, fetch_model, model_here, run_key
from csc.version import code_version

if TYPE_CHECKING:
    from csc.nets.network import Network
    from csc.training.loop import Trainer

__all__ = ["learn", "train"]


@with_retries
def train(
    config: str,
    split: str,
    train_view: str,
    out: str,
    prior: str = "",
    checkpoints: str = "",
    features: str = "",
    pod: Mapping[str, Any] | None = None,
) -> dict[str, str | int]:
    """Train the model of one task, write it as a model folder, and return what it is.

    Args:
        config: settings as JSON.
        split: `split.json` of the task.
        train_view: `train.parquet` of the task; with it come image places, never another label.
        out: model folder to write.
        prior: `registered.json` of the task before; its model is fetched from the registry.
        checkpoints: folder that outlives this step, for taking up a try that died; beside `out` if empty.
        features: place of cached feature maps, from `embed`; the head then learns on them instead of images.
        pod: what the pipeline sets for the step's pod, by the names of kfp's TaskConfig; for several nodes.
    """
    from csc.distributed import group as distributed

    arguments = {
        "config": config,
        "split": split,
        "train_view": train_view,
        "out": out,
        "prior": prior,
        "checkpoints": checkpoints,
        "features": features,
    }
    scenario, task = read_split(split)
    settings = _settings(scenario, config, features)
    if settings.train.nodes > 1:
        from csc.distributed.trainjob import train_on_nodes

        before = read_registered(prior).model.fingerprint if prior else ""
        key = settings.fingerprint(scenario, read_view(train_view).fingerprint, code_version(), before)
        train_on_nodes(arguments, settings.train, task, key, pod or {})
    elif (processes := distributed.processes_for(settings.train.processes)) > 1:
        distributed.run(learn, arguments, processes)
    else:
        learn(**arguments)
    return read_card(Path(out)).facts()


def learn(config: str, split: str, train_view: str, out: str, prior: str, checkpoints: str, features: str) -> None:
    """Do the work of `train`, alone or as one of several processes; the first of them tracks and writes."""
    from csc.distributed import group as distributed
    from csc.training.loop import Trainer, seed_everything

    scenario, task = read_split(split)
    settings = _settings(scenario, config, features)
    view = read_view(train_view)
    before = read_registered(prior).model if prior else None
    with distributed.group() as group, _fetched(before, task) as prior_folder:
        seed_everything(settings.seed, task.index)
        start = _start(settings, scenario, task, view, prior_folder, features)
        # On cached maps a task takes seconds, less than MLflow takes to start: register then tells it all.
        tracker = Tracker(start.card) if group.is_main and not features else None
        if tracker is not None:
            tracker.log_inputs({"train": (train_view, len(view))}, before.model_id if before is not None else None)
        exemplars = _exemplars(settings, view, task, prior_folder)
        keep = Path(checkpoints) / run_key(start.card) if checkpoints else Path(out).parent
        trainer = Trainer(
            settings,
            view,
            start.network,
            start.prior,
            new=len(task.new),
            task=task.index,
            title=f"task {task.index}/{task.total}",
            checkpoint=_checkpoint(keep, task.index),
            origin=f"{start.card.initialisation.get('sha256')} {start.card.prior_fingerprint}",
            frozen_parameters=start.frozen_parameters,
            optimizer_state=start.optimizer_state,
            features=features,
            memory=exemplars if exemplars is not None and len(exemplars) else None,
            state=load_tensors(prior_folder / METHOD_STATE) if prior_folder else {},
            group=group,
            on_epoch=tracker.log_epoch if tracker is not None else lambda epoch, log: None,
        )
        if group.is_main:
            with contextlib.suppress(OSError):  # the model before is registered: nothing is left of it to take up
                _checkpoint(keep, task.index - 1).unlink()
        started = time.monotonic()
        log = trainer.run()
        seconds = time.monotonic() - started
        memory = _remembered(trainer, exemplars, view, task)
        if not group.is_main:
            return
        with atomic_folder(Path(out)) as folder:
            save_network(start.network, start.card, folder)
            if settings.release_quirks.persist_optimizer:
                trainer.save_optimizer(folder / "optimizer.safetensors")
            if trainer.method.state:
                save_tensors(trainer.method.state, folder / METHOD_STATE)
            if memory is not None:
                write_memory(memory, folder / MEMORY)
            facts = {"view": train_view, "images": len(view), "seconds": seconds, "packages": installed()}
            write_json(folder / "training.json", {**facts, "epochs": log})


def _settings(scenario: str, config: str, features: str) -> Config:
    """The settings of a run; maps that they do not ask for are refused, and so is asking for maps nobody made."""
    settings = resolve(Scenario.parse(scenario).dataset, config)
    if bool(settings.features.views) != bool(features):
        raise BadConfig(
            f"features.views={settings.features.views}, but the pipeline has {'an' if features else 'no'} embed step; "
            "compile it with the same settings"
        )
    return settings


@contextlib.contextmanager
def _fetched(before: Registered | None, task: Task) -> Iterator[Path | None]:
    """The model of the task before, from the registry, for as long as it is needed; none for the base task."""
    if (task.index > 1) != (before is not None):
        raise BadModel(f"task {task.index}/{task.total}: {'needs a' if task.index > 1 else 'has no'} prior model")
    if before is None:
        yield None
    elif (here := model_here(before)) is not None:
        yield here
    else:
        with tempfile.TemporaryDirectory(prefix="csc-prior-") as folder:
            yield fetch_model(before.uri, Path(folder))


def _checkpoint(keep: Path, task: int) -> Path:
    """The file that holds the state of a task's training, in the folder of its run."""
    return keep / f"task-{task:02d}.safetensors"


def _exemplars(settings: Config, view: View, task: Task, prior_folder: Path | None) -> Memory | None:
    """What the model before remembers, as this task may see it; none if the method replays nothing."""
    if settings.memory.sampler == "none":
        return None
    kept = read_memory(prior_folder / MEMORY) if prior_folder else Memory.empty(view.fingerprint)
    return kept.taught(view, task, settings.memory.labels)


def _remembered(trainer: "Trainer", exemplars: Memory | None, view: View, task: Task) -> Memory | None:
    """What the model remembers after the task."""
    if exemplars is None:
        return None
    return update(
        exemplars,
        view,
        task,
        trainer.config.memory,
        seed=trainer.config.seed,
        features=lambda: trainer.pooled_features().numpy(),
        logits=(lambda rows: trainer.logits(rows).numpy()) if trainer.method.stores_logits else None,
    )


@dataclass
class _Start:
    """What a task's training starts from."""

    network: "Network"
    prior: "Network | None"  # the teacher, if the method asks for one
    card: ModelCard
    frozen_parameters: tuple[str, ...] = ()
    optimizer_state: Path | None = None


def _start(
    settings: Config, scenario: str, task: Task, view: View, prior_folder: Path | None, features: str = ""
) -> _Start:
    """Build the network to train: from the initialisation, or grown from the model before."""
    from csc.methods import kind_of

    kind = kind_of(settings)
    card = ModelCard(
        method=settings.method,
        scenario=scenario,
        task=task.index,
        tasks=task.total,
        classes=task.seen,
        new=task.new,
        config=json.loads(settings.to_json()),
        initialisation={},
        mean=(),
        std=(),
        data_fingerprint=view.fingerprint,
        prior_fingerprint=fingerprint(prior_folder) if prior_folder else "",
        code_version=code_version(),
    )
    if prior_folder is None or not kind.continues:
        return _on_maps(settings, card, features) if features else _initialised(settings, card)
    channels = read_features(features).shape[0] if features else 0
    prior, prior_card = load_network(prior_folder, map_channels=channels)
    _check_prior(prior_card, settings, card, task)
    start = _grown(settings, prior, task, ModelCard(**{**vars(card), **_inherited(prior_card)}), prior_folder)
    return start if kind.needs_prior else replace(start, prior=None)


def _initialised(settings: Config, card: ModelCard) -> _Start:
    from csc.nets.backbone import initialise, normalisation
    from csc.nets.network import Network, build_head, with_prompts

    plain, origin = initialise(settings.backbone, settings.init, allow_leaky=settings.allow_leaky_init)
    mean, std = normalisation(plain)
    backbone = with_prompts(settings, plain)
    network = Network(backbone, build_head(settings, backbone.channels, card.groups), mean, std)
    facts = {"initialisation": {**asdict(origin), "text": str(origin)}, "mean": mean, "std": std}
    return _Start(network, None, ModelCard(**{**vars(card), **facts}))


def _on_maps(settings: Config, card: ModelCard, features: str) -> _Start:
    """A fresh head on cached maps; the backbone that made them comes along as weights."""
    from csc.nets.backbone import StoredBackbone
    from csc.nets.network import Network, build_head

    made = read_features(features)
    refuse_leaky(made, settings)
    backbone = StoredBackbone(load_tensors(backbone_weights(features)), made.shape[0])
    network = Network(backbone, build_head(settings, backbone.channels, card.groups), made.mean, made.std)
    return _Start(network, None, ModelCard(**{**vars(card), **_inherited(made)}))


def _inherited(before: ModelCard | FeatureCard) -> dict[str, Any]:
    """What a model takes over from whatever its backbone came from."""
    return {"initialisation": before.initialisation, "mean": before.mean, "std": before.std}


def _grown(settings: Config, prior: "Network", task: Task, card: ModelCard, prior_folder: Path) -> _Start:
    """The prior network with a larger head."""
    from csc.nets.growth import grow, grown_parameters

    network = copy.deepcopy(prior)
    quirks = settings.release_quirks
    network.head = grow(prior.head, len(task.seen), reset_biases=quirks.legacy_bias_reset)
    grown = tuple(f"head.{name}" for name in grown_parameters(prior.head, network.head))
    moments = prior_folder / "optimizer.safetensors"
    return _Start(
        network,
        prior,
        card,
        grown if quirks.freeze_grown_layers else (),
        moments if quirks.persist_optimizer and moments.is_file() else None,
    )


def _check_prior(before: ModelCard, settings: Config, card: ModelCard, task: Task) -> None:
    """Refuse a model that this task cannot continue."""
    if (before.scenario, before.task, before.classes) != (card.scenario, task.index - 1, task.old):
        raise BadModel(
            f"the prior model is task {before.task} of {before.scenario} with {len(before.classes)} classes, "
            f"task {task.index} of {card.scenario} needs that of task {task.index - 1} with {len(task.old)}"
        )
    then = before.settings()
    shapes = [(s.backbone, s.head, s.cigcn, s.agcn.width, s.krt.width, s.krt.heads, s.l2p) for s in (then, settings)]
    if shapes[0] != shapes[1]:
        raise BadModel(f"the prior model has another backbone or head than {settings.backbone.name}, {settings.head}")
    if then.held_out != settings.held_out:
        raise BadModel(f"the prior model was trained with held_out={then.held_out}, this task has {settings.held_out}")
    if then.memory.sampler != settings.memory.sampler:
        raise BadModel(
            f"the prior model remembers with memory.sampler={then.memory.sampler}, this task asks for "
            f"{settings.memory.sampler}"
        )
