"""Parsers of files that people write and steps hand on, and of what servers answer, given what somebody changed."""

import functools
import json
import re
import types
from pathlib import Path
from unittest import mock

import pytest

from csc.artifacts import Metrics, Origin, RegisteredTask, Split, Training
from csc.config import resolve
from csc.data.scores import Scores
from csc.model import read_card
from csc.pipelines.cluster.endpoint import Endpoint
from csc.pipelines.cluster.steps import run_status
from csc.pipelines.profile import read_profile
from csc.replay.memory import Memory
from csc.storage.tensors import load_tensors
from csc.study.reading import read_study
from csc.training.checkpoint import _digest
from tests.bad_input.test_artifacts import keeper
from tests.fuzz.mutations import SEEDS, attempt, fuzz

pytestmark = pytest.mark.slow


@fuzz("profile/*")
def test_profiles(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("profile") / "mine.yaml"
    file.write_bytes(content)
    attempt(lambda: read_profile(str(file)))


@fuzz("study/*")
def test_studies(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("study") / "mine.yaml"
    file.write_bytes(content)
    attempt(lambda: read_study(str(file)))


@fuzz("config/*")
def test_settings(content: bytes):
    attempt(lambda: resolve("digits", content.decode("utf-8", "replace")))


@fuzz("origin/*")
def test_origins(content: bytes):
    attempt(lambda: Origin.from_json(content.decode("utf-8", "replace")))


@fuzz("record/*")
def test_records_between_steps(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("record") / "record.json"
    file.write_bytes(content)
    for kind in (Split, Metrics, Training, RegisteredTask):
        attempt(functools.partial(kind.read, file))


@fuzz("model/*")
def test_cards_of_models(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.json").write_bytes(content)

    def used() -> None:
        card = read_card(folder)
        assert card.artifact_metadata()
        assert set(card.thresholds) == set(card.classes)

    attempt(used)


@fuzz("tensors/*")
def test_safetensors(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("tensors") / "some.safetensors"
    file.write_bytes(content)
    attempt(lambda: load_tensors(file))
    attempt(keeper(file).restore)


@fuzz("checkpoint/*")
def test_facts_of_checkpoints(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    """The digest is right: only what it says of itself was changed."""
    from safetensors.torch import load_file, save_file

    file = tmp_path_factory.mktemp("checkpoint") / "task.safetensors"
    text, tensors = content.decode("utf-8", "replace"), load_file(next(SEEDS.glob("tensors/*")))
    save_file(tensors, file, {"csc": text, "sha256": _digest(text, tensors)})
    attempt(keeper(file).restore)


@fuzz("scores/*")
def test_scores(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("scores") / "scores.parquet"
    file.write_bytes(content)
    attempt(lambda: Scores.read(file))


@fuzz("memory/*")
def test_memories(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("memory") / "memory.parquet"
    file.write_bytes(content)
    attempt(lambda: Memory.read(file))


@fuzz("kubeflow/*")
def test_answers_of_kubeflow(content: bytes):
    endpoint = Endpoint("http://127.0.0.1:9")

    def used() -> None:
        run = endpoint.run("run-1")
        view = run_status(run, endpoint.spec(run))
        for step in view.steps:
            str(step)
        endpoint.find_or_create("experiment", "csc")

    with mock.patch.object(endpoint, "_send", return_value=content):
        attempt(used)


@fuzz("mlflow/*")
def test_answers_of_mlflow(content: bytes):
    from csc.tracking.queries import finished_runs
    from csc.tracking.registry import point_aliases
    from csc.tracking.tracked_run import find_run

    text = content.decode("utf-8", "replace")
    answer = types.SimpleNamespace(status_code=200, text=text, content=content, json=lambda: json.loads(text))
    environment = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with (
        mock.patch.dict("os.environ", environment),
        mock.patch("mlflow.utils.rest_utils.http_request", return_value=answer),
    ):
        attempt(find_run)
        attempt(lambda: finished_runs("digits-b0c2"))
        attempt(lambda: point_aliases("digits-b0c2-csc", "key"))


def test_every_seed_is_used_by_a_parser():
    texts = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    kinds = set(re.findall(r'^@fuzz\("(.*)"\)$', texts, re.MULTILINE))
    assert {file for kind in kinds for file in SEEDS.glob(kind)} == {
        file for file in SEEDS.rglob("*") if file.is_file()
    }
    assert all(list(SEEDS.glob(kind)) for kind in kinds)
