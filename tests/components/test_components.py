"""Each component does its step when called as a plain function, as a user would in a notebook."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from kfp import dsl

from csc.artifacts import DatasetFacts, Metrics
from csc.components.build_dataset.component import build_dataset
from csc.components.embed.component import embed
from csc.components.evaluate.component import evaluate
from csc.components.ingest.component import ingest
from csc.components.register.component import register
from csc.components.report.component import report
from csc.components.split_labels.component import split_labels
from csc.components.train.component import train
from csc.data.ingest.digits import ingest_digits
from tests.tracked import fresh_database

pytestmark = pytest.mark.slow

SETTINGS = {
    "train": {"epochs": 1, "batch_size": 16},
    "backbone": {"name": "test_byobnet"},
    "cigcn": {"width": 8},
    "input": {"size": 32},
}
ON_MAPS = {**SETTINGS, "backbone": {"name": "test_byobnet", "frozen": True}, "features": {"views": 1}}


@pytest.fixture(scope="module", params=[SETTINGS, ON_MAPS], ids=["images", "maps"])
def chain(request, tmp_path_factory):
    """Two tasks of a tiny scenario, component by component, on images or on cached maps; every artifact by name."""
    config = json.dumps(request.param)
    folder = tmp_path_factory.mktemp("components")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", fresh_database(folder))
        data = ingest_digits(folder / "digits", train=60, test=30, size=32).path
        made = {"config": config, "features": "", "dataset": dsl.Dataset(uri=str(folder / "dataset.json"))}
        (made["origin"],) = ingest.python_func(scenario="digits-b0c5", data=str(data), dataset=made["dataset"])
        if request.param is ON_MAPS:
            (made["features"],) = embed.python_func(origin=made["origin"], scenario="digits-b0c5", config=config)
        maps = {"features": made["features"]}
        prior = None
        for task in (1, 2):

            def artifact(kind, name, task=task):
                (folder / f"task-{task}").mkdir(exist_ok=True)
                made[f"{name}-{task}"] = kind(name=name, uri=str(folder / f"task-{task}" / name))
                return made[f"{name}-{task}"]

            split = artifact(dsl.Artifact, "split")
            split_labels.python_func(origin=made["origin"], scenario="digits-b0c5", task=task, tasks=2, split=split)
            views = [artifact(dsl.Dataset, name) for name in ("train_view", "test_view")]
            build_dataset.python_func(
                origin=made["origin"], config=config, split=split, train_view=views[0], test_view=views[1]
            )
            model = artifact(dsl.Model, "model")
            train.python_func(
                config=config, checkpoints="", split=split, train_view=views[0], model=model, prior=prior, **maps
            )
            results = {"metrics": artifact(dsl.Metrics, "metrics"), "scores": artifact(dsl.Dataset, "scores")}
            roc = artifact(dsl.ClassificationMetrics, "roc")
            evaluate.python_func(model=model, test_view=views[1], prior=prior, roc=roc, **results, **maps)
            registered = artifact(dsl.Model, "registered")
            register.python_func(model=model, test_view=views[1], registered=registered, prior=prior, **results)
            prior = registered
        made["page"] = dsl.HTML(name="page", uri=str(folder / "report.html"))
        made["markdown"] = dsl.Markdown(name="table", uri=str(folder / "table.md"))
        (made["table"],) = report.python_func(registered=prior, page=made["page"], table=made["markdown"])
        yield made


def test_ingest_names_data_code_and_tracking_server(chain):
    origin = json.loads(chain["origin"])
    assert len(origin["fingerprint"]) == 64
    assert origin["code"].startswith("0.")
    assert origin["tracking"].startswith("sqlite:///")


def test_the_artifact_of_ingest_says_what_and_where_the_data_are(chain):
    facts = chain["dataset"].metadata
    assert facts["display_name"] == "digits"
    assert facts["fingerprint"] == json.loads(chain["origin"])["fingerprint"]
    assert (facts["train_images"], facts["test_images"], facts["classes"]) == (60, 30, 10)
    assert DatasetFacts.read(chain["dataset"].path).to_plain() == facts


def test_model_artifacts_say_what_they_are_and_where_they_are_registered(chain):
    model, registered = chain["model-2"].metadata, chain["registered-2"].metadata
    assert model["display_name"] == "digits-b0c5 csc, task 2 of 2"
    assert (model["classes"], model["seed"]) == (10, 0)
    assert registered["mlflow_uri"] == "models:/digits-b0c5-csc/2"
    assert len(registered["mlflow_run"]) == 32  # its id: a database has no pages
    assert registered["mAP"] == chain["metrics-2"].metadata["mAP"]
    assert all(isinstance(value, str | int | float) for value in [*model.values(), *registered.values()])


def test_splits_chain_old_and_new_classes(chain):
    first, second = (json.loads(Path(chain[f"split-{task}"].path).read_text()) for task in (1, 2))
    assert first["new"] == first["seen"] == list("01234")
    assert (second["new"], second["seen"]) == (list("56789"), list("0123456789"))


def test_every_metric_can_be_computed_again_from_the_scores(chain):
    from csc import metrics
    from csc.data.scores import Scores

    stored = Metrics.read(chain["metrics-2"].path).to_plain()
    before = Metrics.read(chain["metrics-1"].path)
    found = Scores.read(Path(chain["scores-2"].path) / "scores.parquet")
    assert found.classes == tuple("0123456789")
    calibration = json.loads((Path(chain["model-2"].path) / "model.json").read_text())["calibration"]
    scored = found.confidences, found.targets, found.classes
    assert metrics.evaluate(*scored, stored["threshold"], before.best_AP, old=5, **calibration) == stored


def test_headline_numbers_are_shown_by_the_pipeline_too(chain):
    assert set(chain["metrics-2"].metadata) == {"mAP", "CF1", "OF1", "FPR", "forgetting"}


def test_the_pipeline_draws_a_roc_curve_from_one_corner_to_the_other(chain):
    points = chain["roc-2"].metadata["confidenceMetrics"]
    assert {key for point in points for key in point} == {"confidenceThreshold", "falsePositiveRate", "recall"}
    rates = [(point["falsePositiveRate"], point["recall"]) for point in points]
    assert (rates[0], rates[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert rates == sorted(rates)
    assert len(points) <= 102
    json.dumps(points, allow_nan=False)


def test_model_card_says_what_the_model_is_made_from(chain):
    from csc.model import fingerprint, read_card

    first, second = (Path(chain[f"model-{task}"].path) for task in (1, 2))
    card = read_card(second)
    assert card.classes == tuple("0123456789")
    assert card.prior_fingerprint == fingerprint(first)
    assert card.data_fingerprint == json.loads(chain["origin"])["fingerprint"]
    assert card.initialisation["text"] == "scratch"


def test_registering_again_adds_no_version_and_no_run(chain, monkeypatch):
    folder = Path(chain["page"].path).parent
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("csc-digits").experiment_id

    def count():
        models = client.search_logged_models([experiment])
        return len(client.search_runs([experiment])), len(client.search_model_versions("")), len(models)

    before, record = count(), json.loads(Path(chain["registered-2"].path).read_text())
    register.python_func(
        model=chain["model-2"],
        metrics=chain["metrics-2"],
        test_view=chain["test_view-2"],
        scores=chain["scores-2"],
        registered=chain["registered-2"],
        prior=chain["registered-1"],
    )
    assert count() == before == (3, 2, 2)
    assert json.loads(Path(chain["registered-2"].path).read_text()) == record


def test_report_has_the_table_and_the_page(chain):
    assert "digits-b0c5" in chain["table"]
    page = Path(chain["page"].path).read_text()
    assert "<svg" in page
    assert "What the model sees" in page
    assert "after task 1" in page
    assert "| 2 | 5, 6, 7, 8, 9 | 10 |" in Path(chain["markdown"].path).read_text()


def test_a_registered_model_takes_images_whatever_it_was_trained_on(chain):
    """Scores of images through the whole model are those of the evaluation, up to the half precision of maps."""
    from csc.data.dataset import Dataset
    from csc.data.scores import Scores
    from csc.data.shards import ImageShards
    from csc.data.views import View
    from csc.serving.predictor import Predictor

    view = View.read(chain["test_view-2"].path)
    shards = ImageShards(Dataset.open(json.loads(chain["origin"])["data"]).shards_uri)
    positions = zip(view.table["shard"].to_pylist(), view.table["row"].to_pylist(), strict=True)
    found = Predictor(chain["model-2"].path).confidences([bytes(shards.jpeg(*position)) for position in positions])
    np.testing.assert_allclose(
        found, Scores.read(Path(chain["scores-2"].path) / "scores.parquet").confidences, atol=5e-3
    )


def test_maps_and_settings_must_agree(chain, tmp_path):
    from csc.errors import BadConfig

    with pytest.raises(BadConfig, match=r"features\.views"):
        train.python_func(
            config=chain["config"],
            checkpoints="",
            features="" if chain["features"] else str(tmp_path),
            split=chain["split-1"],
            train_view=chain["train_view-1"],
            model=dsl.Model(uri=str(tmp_path / "model")),
        )
    assert list(tmp_path.iterdir()) == []


def test_train_refuses_a_prior_that_does_not_fit(chain, tmp_path):
    from csc.errors import BadModel

    with pytest.raises(BadModel, match="has no prior model"):
        train.python_func(
            config=chain["config"],
            checkpoints="",
            features=chain["features"],
            split=chain["split-1"],
            train_view=chain["train_view-1"],
            model=dsl.Model(uri=str(tmp_path / "model")),
            prior=chain["registered-1"],
        )
    with pytest.raises(BadModel, match="needs a prior model"):
        train.python_func(
            config=chain["config"],
            checkpoints="",
            features=chain["features"],
            split=chain["split-2"],
            train_view=chain["train_view-2"],
            model=dsl.Model(uri=str(tmp_path / "model")),
        )
    assert list(tmp_path.iterdir()) == []
