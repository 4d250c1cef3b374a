"""train: teach a model the classes of one task."""

import contextlib
import copy
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from csc.config import Config, resolve
from csc.data.partial import View, read_view
from csc.errors import BadModel
from csc.model import ModelCard, fingerprint, load_network, save_network
from csc.scenario import Scenario, Task
from csc.steps.register import read_registered
from csc.steps.split_labels import read_split
from csc.storage import atomic_folder, write_json
from csc.tracking import Registered, Tracker, fetch_model, run_key
from csc.version import code_version

if TYPE_CHECKING:
    from csc.nets.network import Network

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
    from csc.training import Trainer, seed_everything

    scenario, task = read_split(split)
    settings = resolve(Scenario.parse(scenario).dataset, config)
    view = read_view(train_view)
    before = read_registered(prior).model if prior else None
    with _fetched(before, task) as prior_folder:
        seed_everything(settings.seed, task.index)
        start = _start(settings, scenario, task, view, prior_folder)
        tracker = Tracker(start.card)
        tracker.log_dataset(train_view, "train", len(view))
        if before is not None:
            tracker.log_prior(before.model_id)
        keep = Path(checkpoints) / run_key(start.card) if checkpoints else Path(out).parent
        trainer = Trainer(
            settings,
            view,
            start.network,
            start.prior,
            new=len(task.new),
            task=task.index,
            title=f"task {task.index}/{task.total}",
            checkpoint=keep / f"task-{task.index:02d}.safetensors",
            frozen_parameters=start.frozen_parameters,
            optimizer_state=start.optimizer_state,
            on_epoch=tracker.log_epoch,
        )
        started = time.monotonic()
        log = trainer.run()
        seconds = time.monotonic() - started
        for epoch, entry in enumerate(log):  # an earlier try may have died between its checkpoint and its log
            tracker.log_epoch(epoch, entry)
    with atomic_folder(Path(out)) as folder:
        save_network(start.network, start.card, folder)
        if settings.release_quirks.persist_optimizer:
            trainer.save_optimizer(folder / "optimizer.safetensors")
        write_json(folder / "training.json", {"images": len(view), "seconds": seconds, "epochs": log})


@contextlib.contextmanager
def _fetched(before: Registered | None, task: Task) -> Iterator[Path | None]:
    """The model of the task before, from the registry, for as long as it is needed; none for the base task."""
    if (task.index > 1) != (before is not None):
        raise BadModel(f"task {task.index}/{task.total}: {'needs a' if task.index > 1 else 'has no'} prior model")
    if before is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="csc-prior-") as folder:
        yield fetch_model(before.uri, Path(folder))


@dataclass
class _Start:
    """What a task's training starts from."""

    network: "Network"
    prior: "Network | None"  # the teacher, if the method asks for one
    card: ModelCard
    frozen_parameters: tuple[str, ...] = ()
    optimizer_state: Path | None = None


def _start(settings: Config, scenario: str, task: Task, view: View, prior_folder: Path | None) -> _Start:
    """Build the network to train: from the initialisation, or grown from the model before."""
    from csc.methods import registered

    kind = registered()[settings.method]
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
        return _initialised(settings, card)
    return _grown(settings, card, prior_folder, task, needs_prior=kind.needs_prior)


def _initialised(settings: Config, card: ModelCard) -> _Start:
    from csc.nets.backbone import initialise, normalisation
    from csc.nets.network import Network, build_head

    backbone, origin = initialise(settings.backbone, settings.init, allow_leaky=settings.allow_leaky_init)
    mean, std = normalisation(backbone)
    network = Network(backbone, build_head(settings, backbone.channels, len(card.classes)), mean, std)
    facts = {"initialisation": {**asdict(origin), "text": str(origin)}, "mean": mean, "std": std}
    return _Start(network, None, ModelCard(**{**vars(card), **facts}))


def _grown(settings: Config, card: ModelCard, prior_folder: Path, task: Task, *, needs_prior: bool) -> _Start:
    from csc.nets.growth import grow, grown_parameters

    prior, prior_card = load_network(prior_folder)
    _check_prior(prior_card, settings, card, task)
    network = copy.deepcopy(prior)
    quirks = settings.release_quirks
    network.head = grow(prior.head, len(task.seen), reset_biases=quirks.legacy_bias_reset)
    grown = tuple(f"head.{name}" for name in grown_parameters(prior.head, network.head))
    moments = prior_folder / "optimizer.safetensors"
    facts = {"initialisation": prior_card.initialisation, "mean": prior_card.mean, "std": prior_card.std}
    return _Start(
        network,
        prior if needs_prior else None,
        ModelCard(**{**vars(card), **facts}),
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
    if (then.backbone, then.head, then.cigcn) != (settings.backbone, settings.head, settings.cigcn):
        raise BadModel(f"the prior model has another backbone or head than {settings.backbone.name}, {settings.head}")
