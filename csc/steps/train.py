"""train: teach a model the classes of one task."""

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from csc.config import Config, resolve
from csc.data.partial import View, read_view
from csc.errors import BadModel
from csc.model import ModelCard, load_network, save_network
from csc.scenario import Scenario, Task
from csc.steps.register import read_registered
from csc.steps.split_labels import read_split
from csc.storage import atomic_folder, write_json
from csc.tracking import Registered, Tracker, fetch_model, run_key
from csc.version import code_version

if TYPE_CHECKING:
    from csc.nets.network import Network
    from csc.training import EpochLog

__all__ = ["train"]


def train(config: str, split: str, train_view: str, out: str, prior: str = "", checkpoints: str = "") -> None:
    """Train the model of one task and write it as a model folder.

    Args:
        config: settings as JSON.
        split: `split.json` of the task.
        train_view: `train.parquet` of the task; with it come image places, never another label.
        out: model folder to write.
        prior: `registered.json` of the task before; its model is fetched from the registry.
        checkpoints: folder that outlives this step, for taking up a try that died; beside `out` if empty.
    """
    scenario, task = read_split(split)
    settings = resolve(Scenario.parse(scenario).dataset, config)
    view = read_view(train_view)
    before = read_registered(prior).model if prior else None
    if (task.index > 1) != (before is not None):
        raise BadModel(f"task {task.index}/{task.total}: {'needs' if task.index > 1 else 'has no'} prior model")
    with tempfile.TemporaryDirectory(prefix="csc-prior-") as folder:
        prior_folder = fetch_model(before.uri, Path(folder)) if before else None
        _train(settings, scenario, task, view, Path(out), before, prior_folder, checkpoints, train_view)


def _train(
    settings: Config,
    scenario: str,
    task: Task,
    view: View,
    out: Path,
    before: Registered | None,
    prior_folder: Path | None,
    checkpoints: str,
    train_view: str,
) -> None:
    from csc.methods import registered
    from csc.training import Trainer, seed_everything

    kind = registered()[settings.method]
    seed_everything(settings.seed, task.index)
    prior, network, card, grown = _networks(settings, scenario, task, view, prior_folder, kind.continues)
    tracker = Tracker(card)
    tracker.log_dataset(train_view, "train", len(view))
    if before is not None:
        tracker.log_prior(before.model_id)
    quirks = settings.release_quirks
    inherited = prior_folder / "optimizer.safetensors" if prior_folder and quirks.persist_optimizer else None
    keep = Path(checkpoints) / run_key(card) if checkpoints else out.parent
    trainer = Trainer(
        settings,
        view,
        network,
        prior if kind.needs_prior else None,
        new=len(task.new),
        task=task.index,
        title=f"task {task.index}/{task.total}",
        checkpoint=keep / f"task-{task.index:02d}.safetensors",
        frozen_parameters=tuple(grown) if quirks.freeze_grown_layers else (),
        optimizer_state=inherited if inherited and inherited.is_file() else None,
        on_epoch=lambda epoch, log: tracker.log_metrics(tracker.child, _named(log), epoch + 1),
    )
    started = time.monotonic()
    log = trainer.run()
    with atomic_folder(out) as folder:
        save_network(network, card, folder)
        if quirks.persist_optimizer:
            trainer.save_optimizer(folder / "optimizer.safetensors")
        write_json(
            folder / "training.json", {"images": len(view), "seconds": time.monotonic() - started, "epochs": log}
        )


def _named(log: "EpochLog") -> dict[str, float]:
    return {f"train/{name}": value for name, value in log.items()}


def _networks(
    settings: Config, scenario: str, task: Task, view: View, prior_folder: Path | None, continues: bool
) -> "tuple[Network | None, Network, ModelCard, list[str]]":
    """The prior network, the network to train, its card, and the names of its grown parameters."""
    from csc.model import fingerprint
    from csc.nets.backbone import initialise, normalisation
    from csc.nets.growth import grow, grown_parameters
    from csc.nets.network import Network, build_head

    prior, prior_card, grown = None, None, []
    if prior_folder is not None:
        prior, prior_card = load_network(prior_folder)
        _check_prior(prior_card, settings, scenario, task)
    if prior_folder is None or prior is None or prior_card is None or not continues:
        backbone, origin = initialise(settings.backbone, settings.init, allow_leaky=settings.allow_leaky_init)
        mean, std = normalisation(backbone)
        network = Network(backbone, build_head(settings, backbone.channels, len(task.seen)), mean, std)
        initialisation = {**asdict(origin), "text": str(origin)}
    else:
        network, _ = load_network(prior_folder)
        head = grow(network.head, len(task.seen), reset_biases=settings.release_quirks.legacy_bias_reset)
        grown = [f"head.{name}" for name in grown_parameters(network.head, head)]
        network.head = head
        mean, std, initialisation = prior_card.mean, prior_card.std, prior_card.initialisation
    card = ModelCard(
        method=settings.method,
        scenario=scenario,
        task=task.index,
        tasks=task.total,
        classes=task.seen,
        new=task.new,
        config=json.loads(settings.to_json()),
        initialisation=initialisation,
        mean=tuple(mean),
        std=tuple(std),
        data_fingerprint=view.fingerprint,
        prior_fingerprint=fingerprint(prior_folder) if prior_folder else "",
        code_version=code_version(),
    )
    return prior, network, card, grown


def _check_prior(card: ModelCard, settings: Config, scenario: str, task: Task) -> None:
    if card.classes != task.old or card.scenario != scenario or card.task != task.index - 1:
        raise BadModel(
            f"the prior model is task {card.task} of {card.scenario} with {len(card.classes)} classes, "
            f"task {task.index} of {scenario} needs the model of task {task.index - 1} with {len(task.old)}"
        )
    if card.settings().backbone != settings.backbone or card.settings().head != settings.head:
        raise BadModel(
            f"the prior model has another backbone or head than this run ({settings.backbone.name}, {settings.head})"
        )
