"""The page of a run with its evidence: what it shows, what it says in words, and how large it may get."""

import json
import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from csc.artifacts import RunResults
from csc.data.evidence import Evidence, EvidenceImage, Reliability, TaskFacts
from csc.report.findings import findings
from csc.report.graph import pairs_across_tasks
from csc.report.images import forgotten
from csc.report.overlay import heat_colours, matrix_png
from csc.report.page import run_page
from csc.report.recipe import command, compared_settings
from tests.tracked import fresh_database
from tests.unit.test_report import EVIL, make_run

if TYPE_CHECKING:
    from tests.reported import Reported

pytest_plugins = ["tests.reported"]
pytestmark = pytest.mark.xdist_group("reported")


def changed(evidence: Evidence, **facts: object) -> Evidence:
    return Evidence(msgspec.structs.replace(evidence.facts, **facts), evidence.images)


def said(run: RunResults, *evidence: Evidence) -> str:
    return "\n".join(found.text for found in findings(run, evidence))


# ---- the page


def test_the_page_is_well_formed_and_has_every_section(made: "Reported"):
    root = ET.fromstring(run_page(made.run, made.evidence))
    sections = {section.get("id") for section in root.iter("section")}
    wanted = {"course", "classes", "confidence", "images", "over-time", "label-graph", "training", "make-it-again"}
    assert sections == wanted
    assert {link.get("href") for link in root.find(".//nav")} == {f"#{name}" for name in wanted}
    for name in made.run.last.seen:
        assert root.find(f".//details[@id='class-{made.run.last.seen.index(name)}']//b").text == name


def test_the_page_has_the_counts_of_the_slider_and_nothing_from_elsewhere(made: "Reported"):
    html = run_page(made.run, made.evidence)
    counts = json.loads(ET.fromstring(html).find(".//script[@id='counts']").text)
    facts = made.evidence[-1].facts
    assert counts["found"] == facts.found
    assert counts["threshold"] == facts.threshold
    addresses = re.findall(r"\b(?:src|href)=[\"'](.*?)[\"']|url\((.*?)\)", html)
    assert all((one + other).startswith(("#", "data:image/")) for one, other in addresses)


def test_an_image_is_in_the_page_once_however_often_it_is_shown(made: "Reported"):
    html = run_page(made.run, made.evidence)
    thumbnails = re.findall(r"url\(data:image/jpeg;base64,(.*?)\)", html)
    shown = re.findall(r'class="picture t(\d+)"', html)
    assert len(thumbnails) == len(set(thumbnails)) == len(set(shown))
    assert len(shown) > 1.2 * len(thumbnails)


def test_a_page_without_evidence_says_that_it_is_missing(made: "Reported"):
    for evidence in ((), made.evidence[:-1]):
        html = run_page(made.run, evidence)
        assert "kept no evidence" in html
        sections = {section.get("id") for section in ET.fromstring(html).iter("section")}
        assert sections == {"course", "classes", "confidence"}


def test_names_of_classes_cannot_break_the_page(made: "Reported"):
    names = ["</script>", EVIL, *made.run.last.seen[2:]]
    run = make_run("digits-b0c4", sizes=(4, 4, 2), classes=names)
    old = dict(zip(made.run.last.seen, names, strict=True))
    images = tuple(msgspec.structs.replace(image, name=old[image.name]) for image in made.evidence[-1].images)
    facts = msgspec.structs.replace(made.evidence[-1].facts, classes=names)
    root = ET.fromstring(run_page(run, [Evidence(facts, images)]))
    assert json.loads(root.find(".//script[@id='counts']").text)["classes"] == names
    assert [name.text for name in root.findall(".//details/summary/b")][:2] == names[:2]


@pytest.mark.slow
def test_sixteen_tasks_of_eighty_classes_make_a_page_below_6_mb_in_seconds(made: "Reported"):
    names = [f"class {number}" for number in range(80)]
    run = make_run("coco-b5c5", sizes=(5,) * 16, classes=names)
    evidence = [_large(made.evidence[-1], names[: len(task.seen)], task.task) for task in run.tasks]
    started = time.monotonic()
    html = run_page(run, evidence)
    assert time.monotonic() - started < 20
    assert len(html.encode()) < 6_000_000


def _large(like: Evidence, names: list[str], task: int) -> Evidence:
    """Evidence with as many images as a run on COCO keeps; photographs of 96 pixels have 2 to 3 kB."""
    generator = np.random.default_rng(task)
    jpeg = next(image.thumbnail for image in like.images if image.thumbnail)
    images = [
        EvidenceImage(kind, name, f"{name} {kind} {shot}", 0.9, [name], thumbnail, generator.bytes(196), heat_width=14)
        for name in names
        for kind, shots, shown in (("hit", 3, 3), ("false alarm", 3, 3), ("miss", 3, 3), ("panel", 16, 3))
        for shot in range(shots)
        for thumbnail in [jpeg + generator.bytes(3000 - len(jpeg)) if shot < shown else b""]
    ]
    size = len(names)
    counts = [sorted(generator.integers(0, 2000, 100).tolist(), reverse=True) for _ in names]
    facts = msgspec.structs.replace(
        like.facts,
        task=task,
        classes=names,
        old=size - 5,
        present=[2000] * size,
        predicted=counts,
        found=counts,
        correlation=generator.normal(size=(size, size)).round(4).tolist(),
    )
    return Evidence(facts, tuple(images))


# ---- findings


def test_it_is_said_that_no_score_exceeds_the_threshold(made: "Reported"):
    silent = changed(made.evidence[-1], predicted=[[0] * 100] * 10, found=[[0] * 100] * 10)
    assert "No score exceeds 0.5, so nothing is predicted: CF1 and OF1 are 0." in said(made.run, silent)
    one = [[0] * 100, *[[5] * 100] * 9]
    text = said(made.run, changed(made.evidence[-1], predicted=one))
    assert "1 class is never predicted, as no score of theirs exceeds 0.5: 0." in text


def test_an_extended_model_is_not_said_to_know_only_what_was_judged():
    task = make_run().tasks[0]
    run = msgspec.structs.replace(make_run(), tasks=(msgspec.structs.replace(task, task=3),))
    assert "the model knows, only those of task 3 are judged, with a mAP of" in said(run)
    assert "The model knows" not in said(run)


def test_the_class_that_lost_most_is_named_with_its_loss():
    run = make_run()
    last = run.last.metrics
    name = max(run.last.seen, key=lambda name: last.best_AP[name] - last.AP[name])
    assert f"Class {name} lost {last.best_AP[name] - last.AP[name]:.1f} points" in said(run)


def test_over_confidence_is_said_with_an_example(made: "Reported"):
    bins = Reliability(count=[900, 100], confidence=[90.0, 85.0], present=[90, 25])
    text = said(made.run, changed(made.evidence[-1], reliability={"old": bins, "new": bins}))
    assert "Old classes are over-confident: of labels scored about 0.85, only 25 % are present." in text
    trusted = Reliability(count=[900, 100], confidence=[90.0, 85.0], present=[90, 85])
    text = said(made.run, changed(made.evidence[-1], reliability={"new": trusted}))
    assert "Confidence can be trusted: the ECE is 0.0 % or less." in text


def test_the_errors_of_old_and_new_classes_are_said_before_and_after_scaling(made: "Reported"):
    errors = {"ECE_old": 12.34, "ECE_new": 4.5, "ECE_old_T": 5.0, "ECE_new_T": 3.21}
    scaled = msgspec.structs.replace(made.run.last.metrics, **errors, temperature=1.5)
    last = msgspec.structs.replace(made.run.last, metrics=scaled)
    run = msgspec.structs.replace(made.run, tasks=(*made.run.tasks[:-1], last))
    both = "The calibration error (ECE) is 12.3 % on old classes and 4.5 % on new ones; after scaling"
    for text in (said(run), said(run, *made.evidence), run_page(run, made.evidence)):
        assert f"{both} by the temperature 1.50, 5.0 % and 3.2 %." in text
    fresh = msgspec.structs.replace(last, new=last.seen, metrics=msgspec.structs.replace(scaled, temperature=1.0))
    alone = said(msgspec.structs.replace(run, tasks=(fresh,)))
    assert "The calibration error (ECE) is 4.5 % on new classes." in alone


def test_a_cf1_of_nothing_is_explained_without_evidence_too(made: "Reported"):
    nothing = msgspec.structs.replace(made.run.last.metrics, CF1=0.0, OF1=0.0)
    run = msgspec.structs.replace(made.run, tasks=(msgspec.structs.replace(made.run.last, metrics=nothing),))
    assert "Nothing is predicted correctly above 0.5: CF1 and OF1 are 0." in said(run)


def test_the_paper_is_compared_in_points():
    run = make_run("voc-b0c4", "csc")
    apart = run.last.metrics.mAP - 85.1
    side = "above" if apart > 0 else "below"
    assert f"{abs(apart):.1f} points {side} the paper's 85.1 %" in said(run)


# ---- images, graph, recipe


def test_forgotten_images_were_found_by_an_earlier_model_and_are_missed_now(made: "Reported"):
    def after(task: int, *scores: float) -> Evidence:
        images = [EvidenceImage("panel", "0", f"image {n}", score, ["0"]) for n, score in enumerate(scores)]
        facts = msgspec.structs.replace(made.evidence[0].facts, task=task, threshold=0.8)
        return Evidence(facts, tuple(images))

    lost, known = forgotten(
        [after(1, 0.9, 0.7, 0.95, 0.85), after(2, 0.99, 0.1, 0.9, 0.8), after(3, 0.5, 0.1, 0.9, 0.2)]
    )
    assert known == 3
    assert [(image.image_id, best, task) for image, best, task in lost["0"]] == [
        ("image 3", 0.85, 1),
        ("image 0", 0.99, 2),
    ]


def test_the_strongest_links_join_classes_of_different_tasks(made: "Reported"):
    matrix = np.zeros((10, 10))
    matrix[0, 1], matrix[4, 2], matrix[9, 0] = 9.0, -3.0, 2.0
    tasks = [evidence.facts for evidence in made.evidence]
    last = msgspec.structs.replace(tasks[-1], correlation=matrix.tolist())
    assert pairs_across_tasks([*tasks[:-1], last]) == [("4", "2", -3.0), ("9", "0", 2.0)]


def test_the_recipe_names_what_differs_from_the_method_and_how_to_run_it(made: "Reported"):
    facts: TaskFacts = made.evidence[-1].facts
    assert ("train.epochs", "3", "9") in compared_settings(made.run, facts)
    assert "csc run digits-b0c4 --method csc --seed 0" in command(made.run, facts)
    assert "--set train.epochs=3" in command(made.run, facts)
    assert "--data" not in command(made.run, facts)
    extended = msgspec.structs.replace(made.run, scenario="digits-b0c4+2")
    begin = "csc extend models:/digits-b0c4-csc@task-02 --method csc --seed 0 --data "
    assert command(extended, facts).startswith(begin)
    begin = "csc extend models:/digits-b0c4-lwf@task-02 --method csc "  # the model that it extends keeps its name
    assert command(extended, facts, "digits-b0c4-lwf").startswith(begin)


def test_a_heat_map_is_clearest_where_the_model_looks():
    colours = heat_colours(np.array([[0, 128, 255]], np.uint8))
    assert colours.shape == (1, 3, 4)
    assert colours[0, 0, 3] > colours[0, 1, 3]
    assert tuple(colours[0, 2, :3]) == (255, 122, 0)


def test_a_matrix_of_zeros_is_a_clear_picture():
    assert matrix_png(np.zeros((2, 2)), 0.0).startswith(b"\x89PNG")


@pytest.mark.slow
def test_evidence_is_kept_with_the_run_and_fetched_again(
    made: "Reported", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path))
    from csc.artifacts import EVIDENCE
    from csc.model import read_card
    from csc.tracking.files import fetch_evidence, keep_file
    from csc.tracking.runs import Tracker

    for task in (2, 1):
        tracker = Tracker(read_card(made.folder / f"task-{task}" / "model"))
        keep_file(tracker, str(made.folder / f"task-{task}" / EVIDENCE))
    assert fetch_evidence(tracker.scenario_run_id) == made.evidence[:2]
