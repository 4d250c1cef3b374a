"""Windows of tasks: what people type, and the pipelines that come of it."""

import pytest
import yaml

from csc.errors import BadScenario
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.window import Window
from csc.scenario import Scenario
from tests.kfp_server import parse_strictly

DIGITS = Scenario.parse("digits-b0c2")  # five tasks


@pytest.mark.parametrize(
    ("text", "first", "last", "shown"),
    [
        (None, 1, 5, "1-5"),
        ("2-4", 2, 4, "2-4"),
        ("3-", 3, 5, "3-5"),
        ("-2", 1, 2, "1-2"),
        ("3", 3, 3, "3"),
        ("3-3", 3, 3, "3"),
        (" 2 - 4 ", 2, 4, "2-4"),
    ],
)
def test_a_window_is_read_as_people_type_it(text, first, last, shown):
    window = Window.parse(text, DIGITS, 10)
    assert (window.first, window.last, str(window)) == (first, last, shown)
    assert window.is_complete == (first == 1 and last == 5)


@pytest.mark.parametrize("text", ["", "-", "0", "0-2", "6", "4-6", "3-2", "a-b", "1-2-3", "1.5", "9999999", "１"])
def test_another_window_is_refused_with_the_number_of_tasks_or_an_example(text):
    with pytest.raises(BadScenario, match=r"has tasks 1 to 5|for instance 2-4"):
        Window.parse(text, DIGITS, 10)


@pytest.fixture(scope="module")
def tasks_of(tmp_path_factory):
    """The tasks of a window's pipeline, and its components."""

    def compiled(text):
        path = tmp_path_factory.mktemp("window") / "some.yaml"
        compile_pipeline(DIGITS, 10, path, window=Window.parse(text, DIGITS, 10))
        documents = list(yaml.load_all(path.read_text(), yaml.CSafeLoader))
        parse_strictly(documents)
        return documents[0]["root"]["dag"]["tasks"]

    return compiled


def names(tasks):
    return sorted(task["taskInfo"]["name"] for task in tasks.values())


def test_a_window_from_the_first_task_has_no_look_into_the_registry(tasks_of):
    tasks = tasks_of("-2")
    assert names(tasks) == ["ingest", "report", "task-01", "task-02"]
    assert "base-task" in tasks


def test_a_later_window_starts_from_the_registered_model_before_it(tasks_of):
    tasks = tasks_of("3-4")
    assert names(tasks) == ["ingest", "prior", "report", "task-03", "task-04"]
    constants = {name: value["runtimeValue"]["constant"] for name, value in prior_inputs(tasks).items()}
    assert constants == {"scenario": "digits-b0c2", "task": 2.0}
    first = tasks["incremental-task"]["inputs"]
    assert first["artifacts"]["prior"]["taskOutputArtifact"]["producerTask"] == "prior"
    assert first["parameters"]["task"]["runtimeValue"]["constant"] == 3.0
    assert first["parameters"]["tasks"]["runtimeValue"]["constant"] == 5.0  # of the scenario, not of the window
    assert tasks["report"]["inputs"]["artifacts"]["registered"]["taskOutputArtifact"]["producerTask"] == (
        "incremental-task-2"
    )


def prior_inputs(tasks):
    """The constant inputs of the prior step; the others come from the run and from ingest."""
    inputs = tasks["prior"]["inputs"]["parameters"]
    assert inputs["config"] == {"componentInputParameter": "config"}
    assert inputs["origin"]["taskOutputParameter"]["producerTask"] == "ingest"
    return {name: value for name, value in inputs.items() if "runtimeValue" in value}
