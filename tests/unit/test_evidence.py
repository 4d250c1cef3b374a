"""The evidence of a task: counts that give the metrics again, images of each kind, a file that is whole or refused."""

import contextlib
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

from csc import metrics
from csc.data.evidence import THRESHOLDS, Evidence
from csc.errors import BadData
from csc.report.reliability import at_threshold, ece

if TYPE_CHECKING:
    from tests.reported import Reported

pytest_plugins = ["tests.reported"]
pytestmark = pytest.mark.xdist_group("reported")


def test_counts_give_the_numbers_that_scores_give_at_every_threshold(made: "Reported"):
    facts, scores = made.evidence[-1].facts, made.scores
    for index, threshold in enumerate(THRESHOLDS):
        expected = metrics.precision_recall_f1(scores.confidences, scores.targets, threshold)
        counted = at_threshold(facts, index)
        for name in ("CP", "CR", "CF1", "OP", "OR", "OF1"):
            assert counted[name] == pytest.approx(100 * expected[name], abs=1e-9)


def test_bins_give_the_calibration_error_of_old_and_new_classes(made: "Reported"):
    facts, scores = made.evidence[-1].facts, made.scores
    for name, part in (("old", slice(0, facts.old)), ("new", slice(facts.old, None))):
        expected = metrics.expected_calibration_error(scores.confidences[:, part], scores.targets[:, part])
        assert ece(facts.reliability[name]) == pytest.approx(100 * expected)
    assert set(made.evidence[0].facts.reliability) == {"new"}


def test_images_are_of_the_kind_that_they_are_said_to_be(made: "Reported"):
    evidence = made.evidence[-1]
    kinds = {kind: evidence.images_of(kind) for kind in ("hit", "false alarm", "miss")}
    assert all(kinds.values())
    threshold = evidence.facts.threshold
    for kind, images in kinds.items():
        for image in images:
            assert (image.score > threshold) == (kind != "miss")
            assert (image.name in image.labels) == (kind != "false alarm")
            assert image.thumbnail.startswith(b"\xff\xd8")
            heat = np.frombuffer(image.heat, np.uint8).reshape(-1, image.heat_width)
            assert heat.max() in (0, 255)
    for name in evidence.facts.classes:
        scores = [image.score for image in evidence.images_of("hit", name)]
        assert scores == sorted(scores, reverse=True)


def test_the_panel_shows_the_same_images_of_a_class_after_every_task(made: "Reported"):
    panels = [{(s.name, s.image_id) for s in evidence.images_of("panel")} for evidence in made.evidence]
    for earlier, later in pairwise(panels):
        assert earlier
        assert earlier < later


def test_the_label_graph_has_a_row_for_each_class(made: "Reported"):
    for evidence in made.evidence:
        assert np.array(evidence.facts.correlation).shape == (len(evidence.facts.classes),) * 2
        assert evidence.facts.correlation_name == "A_g"


def test_evidence_survives_its_file_and_an_image_is_stored_once(made: "Reported", tmp_path: Path):
    evidence = made.evidence[-1]
    twice = replace(evidence, images=evidence.images * 2)
    for name, content in (("once", evidence), ("twice", twice)):
        content.write(tmp_path / name)
        assert Evidence.read(tmp_path / name) == content
    assert (tmp_path / "twice").stat().st_size < 1.2 * (tmp_path / "once").stat().st_size


def test_a_flipped_bit_of_evidence_is_noticed_or_makes_no_difference(made: "Reported", tmp_path: Path):
    evidence = made.evidence[0]
    evidence.write(tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for offset in range(4, len(whole), len(whole) // 100):
        (tmp_path / "file").write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with contextlib.suppress(BadData):
            assert Evidence.read(tmp_path / "file").images == evidence.images


def test_what_is_not_evidence_is_refused_in_one_line(made: "Reported", tmp_path: Path):
    (tmp_path / "text").write_text("no evidence")
    made.evidence[0].write(tmp_path / "bare")
    pq.write_table(pq.read_table(tmp_path / "bare").replace_schema_metadata({}), tmp_path / "bare")
    os.mkfifo(tmp_path / "pipe")
    for file in (
        *(tmp_path / name for name in ("text", "bare", "missing", "pipe")),
        made.folder / "task-1/test.parquet",
    ):
        with pytest.raises(BadData, match=r"not the evidence of a task .* evaluate step") as caught:
            Evidence.read(file)
        assert "\n" not in str(caught.value)
