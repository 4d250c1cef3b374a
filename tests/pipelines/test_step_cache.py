"""The cache of a local run: it gives out what was written, to the byte, or nothing."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl

from csc.pipelines.local import runner
from csc.pipelines.local.cache import StepCache
from csc.pipelines.local.interrupts import interruptible
from csc.pipelines.local.steps import Show, Step
from csc.pipelines.scenario import Results


class Pipeline:
    """Two steps, the second of which reads what the first has made; each is run unless the cache has it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran, self.reused, self.damaged = folder, [], [], []
        self.tries, self.config = 0, '{"seed": 1}'

    def run(self) -> None:
        self.ran, self.reused, self.damaged = [], [], []
        self.tries += 1
        cache = StepCache(self.folder / "cache", self.reused.append, lambda *names: self.damaged.append(names))
        listed = self.step(cache, "build", {"parameterValues": {"task": 1}}, self.build)
        assert listed["parameterValues"] == {"count": 3}
        inputs = {"parameterValues": {"config": self.config}, "artifacts": {"view": listed["artifacts"]["view"]}}
        self.step(cache, "train", inputs, self.train)

    def step(self, cache: StepCache, name: str, inputs: dict, make: Callable[[], dict]) -> dict[str, Any]:
        """What a step lists for kfp."""
        file = self.folder / str(self.tries) / name / "executor_output.json"
        given = json.dumps({"inputs": inputs, "outputs": {"outputFile": str(file)}})
        asked = Step("image", ["python", "code", "--executor_input", given, "--function_to_execute", name], {})
        if not cache.restore(asked):
            self.ran.append(name)
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(make()))
            cache.keep(asked)
        return json.loads(file.read_text())

    def build(self) -> dict:
        path = self.folder / str(self.tries) / "view"
        path.write_text("rows")
        return {"parameterValues": {"count": 3}, "artifacts": artifact("view", path)}

    def train(self) -> dict:
        path = self.folder / str(self.tries) / "model"
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "weights").write_text("weights")
        return {"artifacts": artifact("model", path)}


def artifact(name: str, path: Path) -> dict[str, Any]:
    return {name: {"artifacts": [{"name": name, "uri": str(path), "metadata": {"images": 3}}]}}


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    made = Pipeline(tmp_path)
    made.run()
    assert made.ran == ["build", "train"]
    return made


def test_steps_whose_outputs_are_as_they_were_written_are_reused(pipeline: Pipeline):
    pipeline.run()
    assert (pipeline.ran, pipeline.reused, pipeline.damaged) == ([], ["build", "train"], [])


def test_a_run_is_resumed_with_another_number_of_processes_and_not_with_other_settings(pipeline: Pipeline):
    pipeline.config = '{"seed": 1, "train": {"workers": 4, "processes": 2}}'
    pipeline.run()
    assert pipeline.ran == []
    pipeline.config = '{"seed": 1, "train": {"workers": 4, "epochs": 2}}'
    pipeline.run()
    assert pipeline.ran == ["train"]


def test_other_code_reuses_nothing(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("csc.pipelines.local.cache.code_version", lambda: "0.1.0+other")
    pipeline.run()  # though the view is the same to the byte
    assert (pipeline.ran, pipeline.reused) == (["build", "train"], [])


def test_only_the_step_whose_output_is_damaged_runs_again_if_it_makes_the_same(pipeline: Pipeline, tmp_path: Path):
    (tmp_path / "1" / "view").write_text("rowz")
    pipeline.run()
    assert (pipeline.ran, pipeline.reused, pipeline.damaged) == (["build"], ["train"], [("build", "view")])
    pipeline.run()
    assert (pipeline.ran, pipeline.damaged) == ([], [])


@pytest.mark.parametrize("change", ["another byte", "one file less", "one file more", "all gone"])
def test_a_folder_is_compared_with_all_its_files(pipeline: Pipeline, tmp_path: Path, change: str):
    weights = tmp_path / "1" / "model" / "deep" / "weights"
    if change == "another byte":
        weights.write_text("weightz")
    elif change == "one file more":
        weights.with_name("more").touch()
    else:
        weights.unlink()
    if change == "all gone":
        weights.parent.rmdir()
        weights.parents[1].rmdir()
    pipeline.run()
    assert (pipeline.ran, pipeline.reused) == (["train"], ["build"])


@pytest.mark.parametrize("content", ["", "{}", "[]", "{"])
def test_outputs_whose_digests_are_lost_are_made_again(pipeline: Pipeline, tmp_path: Path, content: str):
    for file in (tmp_path / "cache").glob("*.sha256"):
        file.write_text(content)
    pipeline.run()
    assert pipeline.ran == ["build", "train"]


def test_another_content_of_an_input_is_another_step(pipeline: Pipeline, tmp_path: Path):
    (tmp_path / "1" / "view").unlink()
    made = {"parameterValues": {"count": 3}, "artifacts": artifact("view", tmp_path / "other")}
    pipeline.build = lambda: made
    (tmp_path / "other").write_text("other rows")
    pipeline.run()
    assert pipeline.ran == ["build", "train"]


@pytest.mark.parametrize("change", ["another value", "not UTF-8", "no artifact any more"])
def test_outputs_whose_entry_is_damaged_are_made_again(pipeline: Pipeline, tmp_path: Path, change: str):
    for file in (tmp_path / "cache").glob("*.json"):
        content = file.read_bytes()
        changes = {"another value": (b": 3", b": 2"), "not UTF-8": (b"count", b"co\xf5nt")}
        file.write_bytes(content.replace(*changes.get(change, (b"artifact", b"artifacu"))))
    pipeline.run()
    assert "build" in pipeline.ran
    pipeline.run()
    assert pipeline.ran == []


@pytest.mark.parametrize("trouble", ["an output is missing", "the disk is full"])
def test_a_step_that_cannot_be_remembered_is_run_again(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
):
    (tmp_path / "1" / "view").unlink()
    with monkeypatch.context() as broken:
        if trouble == "the disk is full":
            broken.setattr("csc.pipelines.local.cache.write_json", no_room)
        else:
            nothing = {"parameterValues": {"count": 3}, "artifacts": artifact("view", tmp_path / "nowhere")}
            broken.setattr(pipeline, "build", lambda: nothing)
        pipeline.run()
    assert "build" in pipeline.ran
    pipeline.run()
    assert pipeline.ran[0] == "build"


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_reused_step_gives_kfp_what_it_gave_before_and_one_without_cache_always_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    @dsl.component
    def look(): ...

    @dsl.component
    def report(count: int, page: dsl.Output[dsl.HTML]) -> str: ...

    @dsl.pipeline
    def both() -> Results:
        look().set_caching_options(False)
        made = report(count=2)
        return Results(made.outputs["Output"], made.outputs["page"])

    ran = []

    def start(step: Step, show: Show) -> int:
        ran.append(step.name)
        listed: dict[str, Any] = {}
        step.output_file.parent.mkdir(parents=True)
        if step.name == "report":
            (page := step.output_file.with_name("page")).write_text("page")
            listed = {"parameterValues": {"Output": f"table {len(ran)}"}, "artifacts": artifact("page", page)}
        step.output_file.write_text(json.dumps(listed))
        return 0

    monkeypatch.setattr(runner, "_step_runner", lambda *_: contextlib.nullcontext(start))
    compiler.Compiler().compile(both, str(tmp_path / "both.yaml"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    with interruptible():  # as commands run it
        first, second = (runner.run_compiled(tmp_path / "both.yaml", {}, tmp_path) for _ in range(2))
    assert (ran.count("report"), ran.count("look")) == (1, 2)
    assert (first.reused, second.reused) == ((), ("report",))
    assert (first.table, first.page) == (second.table, second.page)
    assert second.page.read_text() == "page"
