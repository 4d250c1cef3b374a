"""The contracts between steps: what is written is read back, and anything else is refused by file and key."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from csc.artifacts import (
    DatasetFacts,
    Metrics,
    Origin,
    RegisteredTask,
    RegisteredVersion,
    Split,
    TableRequest,
    Training,
)
from csc.data.columns import from_numpy, strings
from csc.data.scores import Scores
from csc.data.views import View
from csc.errors import BadData, CscError
from csc.pipelines.study import table_request
from csc.steps.collect import collect
from csc.study.cells import DataSource, cells
from csc.study.spec import Row, Study
from tests.trained import metrics, record

CONTRACTS: tuple[Any, ...] = (
    DatasetFacts("digits", "data", "f" * 64, 10, 60, 30),
    Split("voc-b0c4", 2, 5, ("dog",), ("cat", "dog")),
    Training("train.parquet", 10, 1.5, {"torch": "2"}, [{"loss": 0.5}]),
    metrics(("cat", "dog")),
    record(RegisteredVersion("voc-b0c4-csc", "1", "m", "f", "r", "p")),
)
every_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: type(one).__name__)


@every_contract
def test_what_is_written_is_read_back(contract: Any, tmp_path: Path):
    contract.write(tmp_path / "file.json")
    assert type(contract).read(tmp_path / "file.json") == contract


def without_a_key(content: dict[str, Any]) -> str:
    key = next(iter(content))
    del content[key]
    return f"missing key '{key}'"


def with_a_key_too_many(content: dict[str, Any]) -> str:
    content["stranger"] = 1
    return "unknown key 'stranger'"


def with_a_wrong_value(content: dict[str, Any]) -> str:
    key = next(iter(content))
    content[key] = [[]]
    return f"in {key}"


@every_contract
@pytest.mark.parametrize("spoil", [without_a_key, with_a_key_too_many, with_a_wrong_value])
def test_a_file_that_breaks_its_contract_is_refused_by_its_name_and_key(
    contract: Any, spoil: Callable[[dict[str, Any]], str], tmp_path: Path
):
    content = contract.to_plain()
    said = spoil(content)
    (tmp_path / "file.json").write_text(json.dumps(content))
    with pytest.raises(CscError) as caught:
        type(contract).read(tmp_path / "file.json")
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'file.json'}: ")
    assert said in line
    assert len(line.splitlines()) == 1


@every_contract
def test_no_flipped_bit_changes_what_is_read(contract: Any, tmp_path: Path):
    file = tmp_path / "file.json"
    contract.write(file)
    written = file.read_bytes()
    for position in range(len(written)):
        for bit in (0, 5):  # the second makes letters small or large
            changed = bytearray(written)
            changed[position] ^= 1 << bit
            file.write_bytes(changed)
            with contextlib.suppress(CscError):
                assert type(contract).read(file) == contract, position  # a space became another


@pytest.mark.parametrize("content", ["[]", "{", "1"])
def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path):
    (tmp_path / "registered.json").write_text(content)
    with pytest.raises(CscError, match=r"registered\.json: "):
        RegisteredTask.read(tmp_path / "registered.json")


def test_an_origin_survives_being_a_parameter():
    origin = Origin("s3://bucket/voc", "f" * 64, "0.1.0+abc", "http://mlflow")
    assert Origin.from_json(origin.to_json()) == origin
    for text, said in [("{", "not readable as JSON"), ("{}", "missing key 'data'"), ("[]", "expected object")]:
        with pytest.raises(BadData, match=f"^parameter origin: .*{said}"):
            Origin.from_json(text)


STUDY = Study("mine", "Mine", (Row("CSC", "csc"), Row("LwF", "lwf")), ("voc-b0c4",), seeds=(0,))
SOURCES = {"voc": DataSource("s3://bucket/voc", 20)}


def test_the_request_of_a_study_survives_being_a_parameter():
    request = TableRequest.from_json(table_request(STUDY, SOURCES, cells(STUDY, SOURCES)[1:]))
    assert request.study_as(Study) == STUDY
    assert (request.sources, request.tried) == ({"voc": "s3://bucket/voc"}, (1,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"study": {"name": "mine"}}, "study: missing key 'title'"),
        ({"study": {"name": "mine", "title": 3}}, "study: expected str, got int in title"),
        ({"sources": {"voc": {"data": "s3://bucket/voc"}}}, "expected str, got object in sources"),
        ({"tried": [-1]}, "expected int >= 0 in tried"),
        ({"tried": [2]}, "tried: no cell 2; the study has 2, from 0"),
        ({"cells": []}, "unknown key 'cells'"),
    ],
)
def test_an_order_that_breaks_its_contract_is_refused_before_anything_is_written(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(DataSource, "open", lambda uri: DataSource(uri, 20))
    request = json.loads(table_request(STUDY, SOURCES, cells(STUDY, SOURCES)[1:])) | change
    with pytest.raises(BadData, match=f"^parameter order: {said}") as caught:
        collect(json.dumps(request), *(str(tmp_path / name) for name in ("page", "table", "files")))
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_order_that_collect_would_refuse_is_refused_before_its_runs():
    with pytest.raises(BadData, match=r"study 'mine': 'Mine\\x1b\[2J' has control characters"):
        table_request(msgspec.structs.replace(STUDY, title="Mine\x1b[2J"), SOURCES, [])


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path):
    broken = Metrics(**{**metrics(("dog",)).to_plain(), "mAP": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.write(tmp_path / "metrics.json")
    assert list(tmp_path.iterdir()) == []


NAMES = ("dog", "target:dog", "score:dog", "image_id", "score:", "target:target:dog", "a b/c\n", "")


def run_status(labels: list[list[int]], classes: tuple[str, ...]) -> View:
    offsets = np.cumsum([0, *map(len, labels)]).astype(np.int32)
    values = np.array([label for row in labels for label in row], np.int16)
    lists = pa.ListArray.from_arrays(from_numpy(offsets), from_numpy(values))
    names = strings([f"image {row}" for row in range(len(labels))])
    return View(pa.Table.from_arrays([names, lists], names=["image_id", "labels"]), classes, "images", "")


def test_scores_of_classes_of_any_name_are_read_back(tmp_path: Path):
    view = run_status([[0, 3], [1], [], [2, 4, 5, 6, 7]], NAMES)
    confidences = np.random.default_rng(0).random((4, len(NAMES)), np.float32)
    Scores(confidences, view.targets(), view.classes, view.table["image_id"]).write(tmp_path / "scores.parquet")
    found = Scores.read(tmp_path / "scores.parquet")
    assert found.classes == NAMES
    np.testing.assert_array_equal(found.confidences, confidences)
    np.testing.assert_array_equal(found.targets, view.targets())


def test_any_flipped_bit_of_scores_is_noticed_or_makes_no_difference(tmp_path: Path):
    view, path = run_status([[0], [1], [0, 1]], ("cat", "dog")), tmp_path / "scores.parquet"
    confidences = np.random.default_rng(0).random((3, 2), np.float32)
    Scores(confidences, view.targets(), view.classes, view.table["image_id"]).write(path)
    whole, noticed = path.read_bytes(), 0
    for offset in range(0, len(whole), 3):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        try:
            found = Scores.read(path)
        except BadData:
            noticed += 1
            continue
        np.testing.assert_array_equal(found.confidences, confidences)
        np.testing.assert_array_equal(found.targets, view.targets())
    assert noticed > len(whole) / 10


def test_a_table_of_something_else_is_not_taken_for_scores(tmp_path: Path):
    pq.write_table(pa.table({"image_id": ["a"], "dog": [0.5]}), tmp_path / "table.parquet")
    (tmp_path / "text").write_text("text")
    for name in ("table.parquet", "text", "missing"):
        with pytest.raises(BadData, match=f"{name}: not scores .*evaluate step"):
            Scores.read(tmp_path / name)
