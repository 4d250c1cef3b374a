"""A scenario run without its training: real data, models that have learned nothing, evaluated by the real step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from csc.artifacts import EVIDENCE, Metrics, RunResults, TaskResult, Training
from csc.config import resolve
from csc.data.dataset import Dataset
from csc.data.evidence import Evidence
from csc.data.ingest.digits import ingest_digits
from csc.data.scores import Scores
from csc.data.views import test_view as view_of_test
from csc.model import ModelCard, save_network
from csc.scenario import Scenario
from csc.steps.evaluate import evaluate

SCENARIO = "digits-b0c4"  # three tasks


@dataclass(frozen=True)
class Reported:
    """What the report of a run is made from, and what it was made from itself."""

    run: RunResults
    evidence: tuple[Evidence, ...]
    scores: Scores  # of the last task
    folder: Path


def reported(folder: Path, settings: Mapping[str, Any] | None = None) -> Reported:
    """Make a run of three tasks in a folder."""
    data = ingest_digits(folder / "data", train=40, test=60)
    overrides = {"threshold": 0.5, "input": {"size": 32}, **(settings or {})}
    cuts = Scenario.parse(SCENARIO).tasks(data.classes)
    tasks, evidence, best = [], [], {}
    for cut in cuts:
        task_folder = folder / f"task-{cut.index}"
        card = _save_model(task_folder / "model", cut, data, overrides)
        view_of_test(data, cut).write(task_folder / "test.parquet")
        names = [str(task_folder / name) for name in ("model", "test.parquet", "scores", "metrics.json")]
        metrics = evaluate(*names, evidence_out=str(task_folder / EVIDENCE))
        best = {name: max(ap, best.get(name, ap)) for name, ap in metrics.AP.items()}
        complete = Metrics(**(metrics.to_plain() | {"best_AP": best}))
        tasks.append(TaskResult(cut.index, cut.new, cut.seen, complete, train_images=4, seconds=1.5))
        evidence.append(Evidence.read(task_folder / EVIDENCE))
    run = RunResults(SCENARIO, card.method, 0, "scratch", data.fingerprint, "1.0", tuple(tasks))
    return Reported(run, tuple(evidence), Scores.read(folder / f"task-{len(cuts)}" / "scores"), folder)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """A run that tests share and leave as it is."""
    return reported(tmp_path_factory.mktemp("reported"), {"train": {"epochs": 3}})


def _save_model(folder: Path, cut: Any, data: Dataset, overrides: Mapping[str, Any]) -> ModelCard:
    import torch

    from csc.methods import build_head
    from csc.nets.backbone import build_backbone, normalisation
    from csc.nets.network import Network

    torch.manual_seed(cut.index)
    config = resolve("digits", overrides)
    backbone = build_backbone(config.backbone)
    mean, std = normalisation(backbone)
    card = ModelCard(
        method=config.method,
        scenario=SCENARIO,
        task=cut.index,
        tasks=cut.total,
        classes=cut.seen,
        new=cut.new,
        config=json.loads(config.to_json()),
        initialisation={"text": "scratch"},
        mean=mean,
        std=std,
        data_fingerprint=data.fingerprint,
        prior_fingerprint="",
        code_version="1.0",
    )
    folder.mkdir(parents=True)
    save_network(Network(backbone, build_head(config, backbone.channels, card.task_sizes), mean, std), card, folder)
    epochs = [{"loss": 1.0 / epoch, "ce": 0.9 / epoch, "images_per_second": 9.0} for epoch in (1, 2, 3)]
    Training("train.parquet", 4, 1.5, {"torch": "2"}, epochs).write(folder / "training.json")
    return card
