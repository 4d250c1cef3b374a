"""The workflow of every pipeline stays within what Argo can hold, by the model of it in `tests.kubeflow.argo`."""

import json
from collections import Counter
from pathlib import Path

import pytest

from csc.pipelines.package import STEPS, STEPS_LIMIT, write_package
from csc.pipelines.profile import SHIPPED, read_profile
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.study import build_study, split_into_pipelines
from csc.pipelines.window import Window
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario
from csc.study.cells import DataSource, cells
from csc.study.reading import read_study
from csc.study.spec import Row, Study
from tests.kubeflow import argo
from tests.kubeflow.argo import LIMIT, measure
from tests.kubeflow.driver import read_package

pytestmark = pytest.mark.slow  # compiling takes a second or more each time

RECORDED = Path(__file__).parents[1] / "kubeflow" / "recorded"
PROFILES = [name for name in SHIPPED if name.startswith("kubeflow")]
SOURCES = {name: DataSource(f"s3://csc/data/{name}", classes) for name, classes in CLASS_COUNTS.items()}
MAPS = {"backbone": {"frozen": True}, "features": {"views": 1}}
BUDGET = LIMIT // 2  # of a scenario's run, compressed
STEP_BUDGET = 6_300  # of a step, compressed


@pytest.fixture
def size_of(tmp_path):
    """Compile a scenario for a cluster, and measure it."""

    def measured(name, settings=None, tasks=None, profile="kubeflow", on_cluster=True):
        scenario = Scenario.parse(name)
        classes, path = CLASS_COUNTS[scenario.dataset], tmp_path / "pipeline.yaml"
        window = Window.parse(tasks, scenario, classes)
        compile_pipeline(scenario, classes, path, settings or {}, read_profile(profile), window, on_cluster=on_cluster)
        return measure(read_package(path))

    return measured


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", ["digits-b0c2", "coco-b0c5"])
def test_the_shipped_profiles_stay_within_the_budget(size_of, name, profile):
    size = size_of(name, profile=profile)
    assert size.compressed <= BUDGET
    assert size.compressed_status / size.steps <= STEP_BUDGET


@pytest.mark.parametrize("name", sorted(set(PAPER_SCENARIOS) - {"coco-b0c5"}))
def test_the_papers_scenarios_stay_within_the_budget(size_of, name):
    assert size_of(name).compressed <= BUDGET


@pytest.mark.parametrize(
    ("settings", "tasks", "budget"),
    [
        (MAPS, None, BUDGET),
        (MAPS, "2-", BUDGET),
        ({}, "2-", BUDGET),
        ({"train": {"nodes": 2}}, None, LIMIT * 5 // 8),  # a step of several nodes is handed the settings of its pods
    ],
    ids=str,
)
def test_sixteen_tasks_in_every_form_stay_within_the_budget(size_of, settings, tasks, budget):
    size = size_of("coco-b0c5", settings, tasks)
    assert size.steps >= 79
    assert size.compressed <= budget
    assert size.compressed_status / size.steps <= STEP_BUDGET


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_longest_run_that_is_not_refused_fits(size_of, nodes):
    size = size_of("coco-b28c2", {"train": {"nodes": nodes}})
    assert STEPS_LIMIT - 5 < size.steps <= STEPS_LIMIT
    assert size.compressed < LIMIT * 0.97


FORMS = {
    "one scenario": read_study("table2").subset(["voc-b0c4"]),
    "three scenarios": Study("mine", "Mine", (Row("CSC", "csc"),), ("voc-b0c4", "voc-b10c2", "voc-b4c2"), seeds=(0,)),
    "two data sets": Study("mine", "Mine", (Row("CSC", "csc"),), ("voc-b0c4", "coco-b0c10", "digits-b0c2"), seeds=(0,)),
    "maps": Study("mine", "Mine", (Row("CSC", "csc", settings=MAPS),), ("voc-b0c4",), seeds=(0, 1, 2)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_pipelines_of_a_study_fill_at_most_three_quarters(tmp_path, form):
    path, study = tmp_path / "study.yaml", FORMS[form]
    first = split_into_pipelines(cells(study, SOURCES))[0]
    write_package(build_study(study, first, SOURCES, read_profile("kubeflow")), path, on_cluster=True)
    size = measure(read_package(path))
    assert STEPS * 0.7 < size.steps <= STEPS + 5  # the tables, and steps that make maps
    assert size.compressed <= LIMIT * 3 // 4


def test_the_nodes_are_those_of_a_real_run(size_of, monkeypatch):
    """Except for the containers of a run from the cache, which have no first try."""
    seen = {}
    honest = argo.Run

    def kept(*words):
        seen["run"] = honest(*words)
        return seen["run"]

    monkeypatch.setattr(argo, "Run", kept)
    size = size_of("digits-b0c2", on_cluster=False)  # the recorded pipeline had no exit handler
    listed = json.loads((RECORDED / "run-cached.json").read_text())["run_details"]["task_details"]
    real = Counter(task["display_name"] for task in listed)
    workflow = next(name for name in real if name.startswith("csc-digits-b0c2-") and not name.endswith("(0)"))
    made = Counter(node["displayName"].replace(seen["run"].name, workflow) for node in seen["run"].nodes.values())
    assert made.pop("executor(0)") == size.steps == real["executor"]
    assert real.pop("executor(0)") == 1
    assert made == real


def test_larger_steps_and_more_of_them_are_seen(size_of, tmp_path):
    """The model can tell: settings that are written out take more of every step, and a task takes its steps."""
    path = tmp_path / "pipeline.yaml"
    small = size_of("digits-b0c2")
    large = measure(read_package(path), config=json.dumps({"note": "x" * 2000}))
    assert large.status > small.status + 5 * 2 * 6 * 2000  # five tasks, two steps that get them, six copies
    assert size_of("digits-b0c2", tasks="1-4").status < small.status * 0.85
