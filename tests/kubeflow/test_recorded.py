"""The model of the backend does what a real one was seen to do."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp import compiler, dsl
from kfp.pipeline_spec import pipeline_spec_pb2

from csc.pipelines.package import write_package
from csc.pipelines.profile import read_profile
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.study import build_study
from csc.pipelines.window import Window
from csc.scenario import Scenario
from csc.study.cells import DataSource, cells
from csc.study.spec import Row, Study
from tests.kubeflow.driver import Driver, Output, Step, StepFailed, plan, read_package
from tests.kubeflow.pod import Pods
from tests.kubeflow.recorded import RECORDED
from tests.kubeflow.values import Refused, as_text, stored

pytestmark = pytest.mark.slow  # compiling takes a second or more each time

DIGITS, CLASSES = Scenario.parse("digits-b0c2"), 10
CHANGING = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "<uuid>"),
    (re.compile(r"(csc-[a-z0-9-]+)-[a-z0-9]{5}"), r"\1-<random>"),  # the workflow of a run
    (re.compile(r"\d+"), "<number>"),
)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """What the model makes of the pipelines that were recorded: a scenario, a window of it, a study."""
    folder, profile = tmp_path_factory.mktemp("compiled"), read_profile("kubeflow")
    study = Study("digits", "Digits", (Row("Fine-Tuning", "finetune"),), (DIGITS.name,), seeds=(0, 1))
    sources = {"digits": DataSource("s3://csc/data/digits", CLASSES)}
    compiled = [folder / name for name in ("scenario.yaml", "window.yaml", "study.yaml")]
    compile_pipeline(DIGITS, CLASSES, compiled[0], {}, profile)
    compile_pipeline(DIGITS, CLASSES, compiled[1], {}, profile, Window.parse("4-", DIGITS, CLASSES))
    write_package(build_study(study, cells(study, sources), sources, profile), compiled[2])
    return [step for path in compiled for step in plan(read_package(path))]


def form(value: Any) -> Any:
    """A value without what differs from run to run."""
    if isinstance(value, Mapping):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, list):
        return [form(item) for item in value]
    for pattern, name in CHANGING if isinstance(value, str) else ():
        value = pattern.fullmatch(value).expand(name) if pattern.fullmatch(value) else value
    return CHANGING[0][0].sub("<uuid>", value) if isinstance(value, str) else value


def parts(handed: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Inputs and outputs by kind and name; of a plain parameter the type alone, as its value is the run's own."""
    found = {}
    for side, kinds in handed.items():
        for kind, named in kinds.items():
            for name, value in named.items() if isinstance(named, Mapping) else [("", named)]:
                plain = kind == "parameterValues" and not isinstance(value, Mapping)
                found[f"{side}.{kind}", name] = type(value).__name__ if plain else form(value)
    return found


def without_logged(handed: Mapping[str, Any]) -> Mapping[str, Any]:
    """An input without what the step before has logged of its artifacts: the model here logs nothing."""
    copy = json.loads(json.dumps(handed))
    for listed in copy["inputs"].get("artifacts", {}).values():
        for artifact in listed["artifacts"]:
            kept = ("display_name", "store_session_info")
            artifact["metadata"] = {key: artifact["metadata"][key] for key in kept}
    return copy


@pytest.mark.parametrize("name", RECORDED)
def test_a_step_is_handed_what_a_real_backend_handed_it(name: str, steps: list[Step]):
    """Whatever a component still has of what it had then; inputs and outputs come and go with the project."""
    recorded = parts(without_logged(RECORDED[name]))
    alike = [step for step in steps if step.name == name.removesuffix("-2")]
    known = RECORDED[name]["inputs"].get("artifacts", {}).keys()
    made = parts(min(alike, key=lambda step: len(known ^ step.given.keys())).handed)
    common = recorded.keys() & made.keys()
    assert {key: made[key] for key in common} == {key: recorded[key] for key in common}
    assert len(common) > len(recorded) / 2, "too little is as it was: record again"
    assert {("outputs.artifacts", "executor-logs"), ("outputs.outputFile", "")} <= common


def test_some_recordings_have_a_prior_and_it_has_no_type_at_all():
    """What made every task after the first fail."""
    priors = [inputs["prior"]["artifacts"][0] for inputs in _input_artifacts() if "prior" in inputs]
    assert len(priors) >= 3
    assert all("type" not in prior for prior in priors)
    others = [
        one for inputs in _input_artifacts() for name in inputs.keys() - {"prior"} for one in inputs[name]["artifacts"]
    ]
    assert all(one["type"] == {"instanceSchema": ""} for one in others)


def _input_artifacts() -> list[dict[str, Any]]:
    return [recorded["inputs"].get("artifacts", {}) for recorded in RECORDED.values()]


def test_what_is_handed_parses_strictly_as_what_was_recorded_does(steps: list[Step]):
    for handed in (*RECORDED.values(), *(step.handed for step in steps)):
        json_format.ParseDict(handed, pipeline_spec_pb2.ExecutorInput())
        assert all(handed["inputs"].values())  # a part that is empty is left out


# What the recordings do not show is from the source of the backend


@pytest.mark.parametrize(
    ("logged", "kept"),
    [("text", "text"), (1.5, 1.5), (True, 1), (False, 0), ([1, 2], {"list": [1, 2]}), ({"a": 1}, {"struct": {"a": 1}})],
)
def test_metadata_comes_back_as_the_store_keeps_it(logged: Any, kept: Any):
    found = stored(logged, "x")
    assert (found, type(found)) == (kept, type(kept))


def test_null_cannot_be_kept():
    with pytest.raises(Refused, match=r"^step: model\.seed: null cannot be stored$"):
        stored(None, "step: model.seed")


@pytest.mark.parametrize(("value", "text"), [("a", "a"), (3.0, "3"), (0.5, "0.5"), (True, "true"), (["a"], '["a"]')])
def test_any_parameter_can_be_text(value: Any, text: str):
    assert as_text(value) == text


@dsl.component
def make(number: int, word: str = "plain") -> str:
    return word * number


@dsl.component
def put(word: str, thing: dsl.Output[dsl.Model], before: dsl.Input[dsl.Model] = None):
    thing.metadata["word"] = word


@dsl.component
def gather(words: list, things: dsl.Input[list[dsl.Model]]):
    pass


@dsl.component
def close(run: str, status: dsl.PipelineTaskFinalStatus):
    pass


@dsl.pipeline
def chain(number: int, word: str = "inner") -> dsl.Model:
    made = make(number=number, word=word)
    first = put(word=made.output)
    return put(word=f"{word}-{number}", before=first.outputs["thing"]).outputs["thing"]


@dsl.pipeline(name="everything")
def everything(numbers: list[int], last: int = 3):
    with dsl.ExitHandler(close(run=dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER)):
        with dsl.ParallelFor(numbers) as number:
            word = make(number=number)
            thing = put(word=word.output)
        gather(words=dsl.Collected(word.output), things=dsl.Collected(thing.outputs["thing"]))
        put(word="after", before=chain(number=last).output)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("everything") / "everything.yaml"
    compiler.Compiler().compile(everything, str(path))
    return read_package(path)


def launch(step: Step) -> Output:
    """Do what the components of `everything` do."""
    given = step.parameters
    if step.name == "make":
        if given["number"] == 13:
            raise StepFailed("bad luck")
        return {"parameterValues": {"Output": given.get("word", "plain") * given["number"]}}
    return {
        "artifacts": {"thing": {"artifacts": [{"metadata": {"word": given["word"]}}]}} if step.name == "put" else {}
    }


def test_loops_collections_sub_pipelines_defaults_and_references_are_resolved(documents: list[dict[str, Any]]):
    driver = Driver(documents, launch)
    driver.run(numbers=[1.0, 2.0])
    handed = {step.path.removeprefix("exit-handler-1/"): step for step in driver.steps}
    loop = next(path.partition("[")[0] for path in handed if "[" in path)
    assert handed[f"{loop}[1]/make"].parameters == {"number": 2, "word": "plain"}
    assert handed[f"{loop}[1]/put"].parameters == {"word": "plainplain"}
    gathered = handed["gather"]
    assert gathered.parameters == {"words": ["plain", "plainplain"]}
    assert [one["metadata"]["word"] for one in gathered.handed["inputs"]["artifacts"]["things"]["artifacts"]] == [
        "plain",
        "plainplain",
    ]
    assert handed["chain/make"].parameters == {"number": 3, "word": "inner"}
    assert "artifacts" not in handed["chain/put"].handed["inputs"]
    assert handed["chain/put-2"].parameters["word"] == "inner-3"
    (before,) = handed["put-2"].handed["inputs"]["artifacts"]["before"]["artifacts"]
    assert before["metadata"]["word"] == "inner-3"
    assert before["uri"] == handed["chain/put-2"].handed["outputs"]["artifacts"]["thing"]["artifacts"][0]["uri"]
    assert driver.steps[-1].parameters["run"] == driver.job
    assert driver.steps[-1].parameters["status"]["state"] == "COMPLETE"
    assert driver.failed == {}


def test_after_a_failure_nothing_runs_that_needs_it_and_the_exit_step_is_told(documents: list[dict[str, Any]]):
    driver = Driver(documents, launch)
    driver.run(numbers=[13, 2])
    assert list(driver.failed.values()) == ["bad luck"]
    names = [step.name for step in driver.steps]
    assert "gather" not in names
    assert names.count("put") == 4  # the other item of the loop, and what does not depend on it
    assert driver.steps[-1].parameters["status"]["state"] == "FAILED"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "neither value nor default value provided for non-optional parameter numbers"),
        ({"numbers": 3}, "input parameter numbers type mismatch: expect LIST, got int"),
        ({"numbers": [1], "last": "3"}, "input parameter last type mismatch: expect NUMBER_INTEGER, got str"),
        ({"numbers": ["1"]}, "type mismatch: expect NUMBER_INTEGER, got str"),
        ({"numbers": [1], "more": 1}, "arguments that the pipeline does not have: more"),
    ],
)
def test_what_the_backend_refuses_is_refused(documents: list[dict[str, Any]], arguments: dict[str, Any], text: str):
    with pytest.raises(Refused, match=text):
        Driver(documents, launch).run(**arguments)


@pytest.mark.parametrize(
    ("left", "text"),
    [
        ('{"parameterValues": {"Output": NaN}}', "NaN is no JSON"),
        ('{"parameterValues": {"Output": "a"}, "surprise": 1}', "surprise"),
        ("{}", "failed to read output parameter Output"),
        (None, "exit code 1"),
    ],
)
def test_a_step_fails_that_leaves_what_the_launcher_cannot_read(
    documents: list[dict[str, Any]], tmp_path: Path, left: str | None, text: str
):
    def start(command: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
        if left is None:
            return 1, "its last lines"
        handed = json.loads(command[command.index("--executor_input") + 1])
        file = Path(handed["outputs"]["outputFile"])
        file.parent.mkdir(parents=True)
        file.write_text(left)
        return 0, ""

    step = next(step for step in plan(documents, numbers=[1]) if step.name == "make")
    with pytest.raises(StepFailed, match=text):
        Pods(tmp_path, start)(step)


def test_an_input_that_no_step_has_written_is_missed(documents: list[dict[str, Any]], tmp_path: Path):
    step = next(step for step in plan(documents, numbers=[1]) if step.given)
    with pytest.raises(StepFailed, match="failed to download input artifact"):
        Pods(tmp_path, lambda command, environment: (0, ""))(step)
