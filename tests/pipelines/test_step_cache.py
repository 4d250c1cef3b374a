"""The cache of a local run: it gives out what was written, to the byte, or nothing."""

from pathlib import Path

import pytest
from kfp import dsl

from csc.pipelines.local.cache import StepCache


class Pipeline:
    """Two steps, the second of which reads what the first has made; each is run unless the cache has it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran, self.reused, self.damaged = folder, [], [], []
        self.tries, self.config = 0, '{"seed": 1}'

    def run(self) -> None:
        self.ran, self.reused, self.damaged = [], [], []
        self.tries += 1
        cache = StepCache(self.folder / "cache", self.reused.append, lambda *names: self.damaged.append(names))
        view = self.step(cache, "build", {"task": 1}, self.build)
        self.step(cache, "train", {"view": view["view"], "config": self.config}, self.train)

    def step(self, cache: StepCache, name: str, arguments: dict, make) -> dict:
        key = cache.compute_key(component_name=f"comp-{name}", image="i", full_command=["c"], arguments=arguments)
        if (outputs := cache.get(key)) is None:
            self.ran.append(name)
            outputs = make()
            cache.put(key, outputs)
        return outputs

    def build(self) -> dict:
        path = self.folder / str(self.tries) / "view"
        path.parent.mkdir()
        path.write_text("rows")
        return {"view": dsl.Dataset(name="view", uri=str(path)), "count": 3}

    def train(self) -> dict:
        path = self.folder / str(self.tries) / "model"
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "weights").write_text("weights")
        return {"model": dsl.Model(name="model", uri=str(path))}


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
    pipeline.build = lambda: {"view": dsl.Dataset(name="view", uri=str(tmp_path / "other")), "count": 3}
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
