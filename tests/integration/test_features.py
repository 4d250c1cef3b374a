"""Runs on cached feature maps, from a folder and from a bucket, through the compiled pipeline."""

import json
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from csc.data.dataset import Dataset
from csc.data.shards import ImageShards
from tests.integration.conftest import SMALL, csc, inside, last_results
from tests.tracked import fresh_database

pytest_plugins = ["tests.s3"]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("features")]

ON_MAPS = (*SMALL, "backbone.frozen=true", "features.views=1", "input.augment=false")


@pytest.fixture(scope="module")
def embedded(scenes, tmp_path_factory):
    """A finished run on maps: the copy of the data that holds them, the work folder, its scores and what it printed."""
    folder = tmp_path_factory.mktemp("maps")
    data = folder / "set"
    data.mkdir()
    for item in Path(scenes).iterdir():
        (data / item.name).symlink_to(item)
    fresh_database(folder / "work")
    done = csc("run", "digits-b0c5", "--data", data, "--workdir", folder / "work", settings=ON_MAPS)
    assert done.returncode == 0, done.stdout + done.stderr
    scored = list((folder / "work" / "pipeline").rglob("scores/scores.parquet"))
    return data, folder / "work", scored, done.stdout


def test_the_maps_are_made_once_and_every_method_and_seed_uses_them(embedded):
    data, workdir, _, output = embedded
    assert "embed view 0" in output
    assert len(list((data / "features").iterdir())) == 1
    linear = [item for item in ON_MAPS if not item.startswith("cigcn.")]
    again = csc("run", "digits-b0c5", "--method", "lwf", "--data", data, "--workdir", workdir, settings=linear)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "feature maps are there" in again.stdout
    assert "embed view 0" not in again.stdout
    assert len(last_results(workdir)) == 2


def test_the_registry_has_the_epochs_and_the_lineage(embedded):
    from mlflow.tracking import MlflowClient

    _, workdir, *_ = embedded
    client = MlflowClient(f"sqlite:///{workdir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("csc-digits").experiment_id
    version = client.get_model_version_by_alias("digits-b0c5-csc", "task-02")
    child = client.get_run(version.run_id)
    assert [metric.step for metric in client.get_metric_history(version.run_id, "train/loss")] == [1, 2]
    assert len(child.inputs.model_inputs) == 1
    contexts = [tag.value for item in child.inputs.dataset_inputs for tag in item.tags if "context" in tag.key]
    assert sorted(contexts) == ["test", "train"]
    assert len(client.search_runs([experiment], "tags.`csc.run_key` = '" + child.data.tags["csc.run_key"] + "'")) == 3


def test_the_registered_model_takes_images_and_says_what_its_head_said_of_their_maps(embedded, tmp_path):
    data, workdir, scored, _ = embedded
    scores = next(table for table in map(pq.read_table, map(str, scored)) if "score:9" in table.column_names)
    scores = scores.slice(0, 1)
    labels = Dataset.open(data).labels()
    image = labels.filter(pc.equal(labels["image_id"], scores["image_id"][0])).to_pylist()[0]
    (tmp_path / "scene.jpg").write_bytes(ImageShards(data / "images").jpeg(image["shard"], image["row"]))
    model = "models:/digits-b0c5-csc@task-02"
    done = inside("predict", model, tmp_path / "scene.jpg", "--threshold", "0", "--workdir", workdir)
    assert done.returncode == 0, done.stderr
    answer = {name: float(value) for name, value in map(str.split, done.stdout.strip().split("\t")[1].split(", "))}
    assert sorted(answer) == list("0123456789")
    assert answer == pytest.approx({name: scores[f"score:{name}"][0].as_py() for name in answer}, abs=1e-2)


def test_data_maps_and_cache_work_from_a_bucket(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "cache"))
    done = csc("run", "digits-b0c5", "--data", f"{bucket}/digits", "--workdir", tmp_path / "work", settings=ON_MAPS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(last_results(tmp_path / "work")) == 2
    views = [path for path in (tmp_path / "work" / "pipeline").rglob("train_view") if path.is_file()]
    assert len(views) == 2
    cached = [path for path in (tmp_path / "cache").iterdir() if path.is_file()]
    assert cached  # shards of maps, and of images while they were embedded
    from csc.storage import list_below

    names = {name for name, _ in list_below(f"{bucket}/digits")}
    assert {"dataset.json", "labels.parquet", "images/index.json", "images/00000.arrow"} <= names
    assert any(name.endswith("features.json") for name in names)
    assert not any(name.startswith("partial/") for name in names)
    assert Dataset.open(f"{bucket}/digits").splits["train"]["images"] > 0
    assert json.dumps(last_results(tmp_path / "work"))
