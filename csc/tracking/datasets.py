"""Data as MLflow notes it with a run: the data set of a scenario, and the views of its tasks, each with a digest."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from csc.model import ModelCard
from csc.scenario import Scenario
from csc.storage import json_digest

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

__all__ = ["data_set", "task_view"]


def data_set(card: ModelCard, shards_uri: str) -> "DatasetInput":
    """The data set that a scenario is run on, with the uri of its image shards."""
    return _input(Scenario.parse(card.scenario).dataset, card.data_fingerprint[:16], shards_uri, {})


def task_view(card: ModelCard, context: str, path: str, rows: int) -> "DatasetInput":
    """A view of a task, for training or for testing: the file and how many images it has."""
    name = f"{card.scenario} task {card.task:02d} {context}"
    return _input(name, _digest(card, context), path, {"mlflow.data.context": context, "csc.rows": str(rows)})


def _digest(card: ModelCard, context: str) -> str:
    """A digest of all that decides which rows a view has: register, which cannot read every view, finds it too."""
    decides = [card.data_fingerprint, card.scenario, card.task, card.classes, card.new, context]
    decides += [card.config.get(name) for name in ("labels", "held_out")]
    return json_digest(decides)[:16]


def _input(name: str, digest: str, source: str, tags: Mapping[str, str]) -> "DatasetInput":
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.data.sources import LocalArtifactDatasetSource
    from mlflow.entities import DatasetInput, InputTag

    dataset = MetaDataset(LocalArtifactDatasetSource(source), name=name, digest=digest)._to_mlflow_entity()
    return DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()])
