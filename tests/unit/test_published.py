"""What a data set is compared with follows from its content, not from its name."""

from pathlib import Path
from typing import Any

import pytest

from csc.data.dataset import Dataset
from csc.data.ingest.coco import ingest_coco
from csc.data.published import benchmark_note
from csc.steps.ingest import ingest
from tests.builders import make_coco

WHOLE = {"train": {"images": 5011, "labelled": 5011}, "test": {"images": 4952, "labelled": 4952}}
PART = {"train": {"images": 3366, "labelled": 3366}, "test": {"images": 3337, "labelled": 3337}}


def dataset(name: str, splits: dict[str, dict[str, int]], **source: Any) -> Dataset:
    return Dataset("data", name, (), splits, "f", source, False)


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (dataset("voc", WHOLE, kind="voc2007"), ""),
        (dataset("pets", PART, kind="coco"), ""),
        (
            dataset("voc", PART, kind="voc2007"),
            "not VOC 2007 as published: train: 3,366 images (published: 5,011); test: 3,337 images (published: 4,952)",
        ),
        (
            dataset("voc", WHOLE, kind="voc2007", short_side=96),
            "not VOC 2007 as published: images scaled down to 96 px",
        ),
        (dataset("voc", PART, kind="voc2012"), "this 'voc' is made from 'voc2012', not from VOC 2007"),
        (dataset("coco", PART, kind="coco"), "this 'coco' is made from 'coco', not from COCO 2014"),
    ],
)
def test_a_data_set_that_is_not_the_benchmark_of_its_name_says_so(given: Dataset, note: str):
    assert benchmark_note(given) == note


def test_a_run_says_whose_settings_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "set", "pets")
    ingest("pets-b0c2", str(tmp_path / "set"))
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    assert note == "note: no preset is named 'pets': settings are those of 'coco'; choose your own with held_out=5"


def test_an_extended_model_has_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "set", "pets")
    ingest("voc-b0c4+3", str(tmp_path / "set"))
    assert "note: " not in capsys.readouterr().out
