"""train: teach a model the classes of one task."""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.artifacts import RegisteredTask, RegisteredVersion, Split, Training
from csc.config import resolve
from csc.config.schema import Config
from csc.data.views import View
from csc.errors import BadConfig, BadModel
from csc.model import (
    MEMORY,
    METHOD_STATE,
    MOMENTS,
    TRAINING_LOG,
    check_files,
    fingerprint,
    read_card,
    save_network,
)
from csc.replay.memory import Memory
from csc.replay.update import update
from csc.retry import with_retries
from csc.scenario import Scenario, Task
from csc.serving.packaging import installed
from csc.storage import atomic_folder
from csc.storage.tensors import load_tensors, save_tensors
from csc.tracking.registry import fetch_model, local_model
from csc.tracking.runs import Tracker, run_key
from csc.version import code_version

if TYPE_CHECKING:
    from csc.training.objective import Objective

__all__ = ["learn", "train"]


@with_retries
def train(
    config_json: str,
    split: str,
    train_view: str,
    out: str,
    prior: str = "",
    checkpoints: str = "",
    features: str = "",
    pod: Mapping[str, Any] | None = None,
) -> dict[str, str | int]:
    """Train the model of one task, write it as a model folder, and return what it is.

    The view has no label of another task. The model of `prior` is fetched from the registry. `checkpoints` is a folder
    that outlives this step, for resuming a try that died; next to `out` if empty. `pod` is what the pipeline sets for
    the step's pod, by the names of kfp's TaskConfig, for several nodes.
    """
    from csc.distributed.launch import processes_for, run_in_processes

    arguments = {"config_json": config_json, "split": split, "train_view": train_view, "out": out, "prior": prior}
    arguments |= {"checkpoints": checkpoints, "features": features}
    task_split = Split.read(split)
    scenario, task = task_split.scenario, task_split.task
    config = _config(scenario, config_json, features)
    if config.train.nodes > 1:
        from csc.distributed.trainjob import train_on_nodes

        prior_fingerprint = RegisteredTask.read(prior).model.fingerprint if prior else ""
        key = config.fingerprint(scenario, View.read(train_view).fingerprint, code_version(), prior_fingerprint)
        train_on_nodes(arguments, config.train, task, key, pod or {})
    elif (processes := processes_for(config.train.processes)) > 1:
        run_in_processes(learn, arguments, processes)
    else:
        learn(**arguments)
    return read_card(Path(out)).artifact_metadata()


def learn(config_json: str, split: str, train_view: str, out: str, prior: str, checkpoints: str, features: str) -> None:
    """Do the work of `train`, alone or as one of several processes; the first of them tracks and writes."""
    from csc.distributed.group import join_group
    from csc.training.calibration import calibrate
    from csc.training.loop import Trainer
    from csc.training.optimiser import save_moments
    from csc.training.start import seed_everything, start_task

    task_split = Split.read(split)
    scenario, task = task_split.scenario, task_split.task
    config = _config(scenario, config_json, features)
    view = View.read(train_view)
    prior_version = RegisteredTask.read(prior).model if prior else None
    prior_id = prior_version.model_id if prior_version is not None else None
    with join_group() as group, _fetched(prior_version, task) as prior_folder:
        seed_everything(config.seed, task.index)
        start = start_task(config, scenario, task, view, prior_folder, features)
        # On cached maps a task takes seconds, less than MLflow takes to start: register then logs everything.
        tracker = Tracker(start.card) if group.is_main and not features else None
        if tracker is not None:
            tracker.log_inputs({"train": (train_view, len(view))}, prior_id)
        exemplars = _exemplars(config, view, task, prior_folder)
        keep = Path(checkpoints) / run_key(start.card) if checkpoints else Path(out).parent
        trainer = Trainer(
            config,
            view,
            start.network,
            start.prior,
            new=len(task.new),
            task=task.index,
            title=f"task {task.index}/{task.total}",
            checkpoint_file=_checkpoint(keep, task.index),
            lineage=f"{start.card.initialisation.get('sha256')} {start.card.prior_fingerprint}",
            frozen_parameters=start.frozen_parameters,
            moments=start.moments,
            maps_uri=features,
            memory=exemplars if exemplars is not None and len(exemplars) else None,
            state=load_tensors(prior_folder / METHOD_STATE) if prior_folder else {},
            group=group,
            on_epoch=tracker.log_epoch if tracker is not None else lambda epoch, log: None,
        )
        if group.is_main:
            with contextlib.suppress(OSError):  # the prior model is registered: nothing of it is left to resume
                _checkpoint(keep, task.index - 1).unlink()
        started = time.monotonic()
        with tracker.measuring() if tracker is not None else contextlib.nullcontext():
            log = trainer.run()
        seconds = time.monotonic() - started
        memory = _remembered(trainer.objective, exemplars, view, task)
        card = replace(start.card, calibration=calibrate(trainer.objective, prior_folder))
        if not group.is_main:
            return
        with atomic_folder(Path(out)) as folder:
            if config.release_quirks.persist_optimizer:
                save_moments(trainer.optimizer, trainer.network, folder / MOMENTS)
            if trainer.method.state:
                save_tensors(trainer.method.state, folder / METHOD_STATE)
            if memory is not None:
                memory.write(folder / MEMORY)
            save_network(trainer.network, card, folder)
            Training(train_view, len(view), seconds, installed(), log).write(folder / TRAINING_LOG)


def _config(scenario: str, config_json: str, features: str) -> Config:
    """The settings of a run, which must ask for cached maps if and only if there are some."""
    config = resolve(Scenario.parse(scenario).dataset, config_json)
    if bool(config.features.views) != bool(features):
        raise BadConfig(
            f"features.views={config.features.views}, but the pipeline has {'an' if features else 'no'} embed step; "
            "compile it with the same settings"
        )
    return config


@contextlib.contextmanager
def _fetched(prior: RegisteredVersion | None, task: Task) -> Iterator[Path | None]:
    """The prior model, from the registry and as it was registered; none for the base task."""
    if (task.index > 1) != (prior is not None):
        raise BadModel(f"task {task.index}/{task.total}: {'needs a' if task.index > 1 else 'has no'} prior model")
    if prior is None:
        yield None
    elif (here := local_model(prior)) is not None:
        yield here
    else:
        with tempfile.TemporaryDirectory(prefix="csc-prior-") as folder:
            fetched = fetch_model(prior.uri, Path(folder))
            check_files(fetched, read_card(fetched))  # names the file that is damaged
            if fingerprint(fetched) != prior.fingerprint:
                raise BadModel(f"{prior.uri}: not the model that was registered; run task {task.index - 1} again")
            yield fetched


def _checkpoint(keep: Path, task: int) -> Path:
    return keep / f"task-{task:02d}.safetensors"


def _exemplars(config: Config, view: View, task: Task, prior_folder: Path | None) -> Memory | None:
    """What the prior model remembers, as this task may see it; none if the method replays nothing."""
    if config.memory.sampler == "none":
        return None
    kept = Memory.read(prior_folder / MEMORY) if prior_folder else Memory.empty(view.fingerprint)
    return kept.extended_to(view, task, config.memory.labels)


def _remembered(objective: "Objective", exemplars: Memory | None, view: View, task: Task) -> Memory | None:
    if exemplars is None:
        return None
    return update(
        exemplars,
        view,
        task,
        objective.config.memory,
        seed=objective.config.seed,
        features=lambda: objective.pooled_features().numpy(),
        logits=(lambda rows: objective.logits(rows).numpy()) if objective.method.stores_logits else None,
    )
