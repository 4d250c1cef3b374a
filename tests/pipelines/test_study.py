"""The pipeline of a study compiles, to what the cluster's own schema accepts, within its size limits."""

import io
import json
import threading

import pytest
import yaml
from google.protobuf import json_format
from kfp import dsl
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.local import status
from kfp.local.orchestrator import enhanced_dag_orchestrator
from kfp.pipeline_spec import pipeline_spec_pb2

from csc.cli import main
from csc.components.collect.component import collect
from csc.errors import BadScenario
from csc.pipelines.local import study as study_local
from csc.pipelines.local.study import Teller
from csc.pipelines.package import STEPS, STEPS_LIMIT
from csc.pipelines.profile import Profile, read_profile
from csc.pipelines.study import compile_study, loops, parts
from csc.steps.collect import order_for
from csc.study import cells as cells_module
from csc.study.cells import Place, Result, cells
from csc.study.reading import read_study
from csc.study.spec import Row, Study

PLACES = {"coco": Place("s3://b/coco", 80), "voc": Place("/data/voc", 20), "digits": Place("/data/digits", 10)}
SIZE_BUDGET = 512 << 10
SPLITS = {"train": {"images": 9, "labels": 9}, "test": {"images": 9, "labels": 9}}
MAPS = {"backbone": {"frozen": True}, "features": {"views": 1}}


@pytest.fixture
def compiled(tmp_path):
    """Compile a study; return the documents of the file, and its size."""

    def compile_it(study, asked=None, profile=None, parallelism=None):
        path = tmp_path / "study.yaml"
        asked = cells(study, PLACES) if asked is None else asked
        compile_study(study, asked, PLACES, path, profile or Profile(), parallelism)
        return list(yaml.load_all(path.read_text(), yaml.CSafeLoader)), path.stat().st_size

    return compile_it


@pytest.fixture
def voc(tmp_path):
    """A data set of 20 classes that nobody will look into."""
    folder = tmp_path / "voc"
    folder.mkdir()
    card = {"name": "voc", "classes": [f"c{n:02d}" for n in range(20)], "splits": SPLITS, "fingerprint": "f" * 64}
    (folder / "dataset.json").write_text(json.dumps({**card, "source": {}, "difficult_is_member": False}))
    return folder


def loops_of(spec):
    """The loops of a compiled study by their place in the file: items, and how many run at the same time."""
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    found = [task for name, task in sorted(tasks.items()) if name.startswith("for-loop")]
    return [
        (
            [json.loads(item) for item in json.loads(task["parameterIterator"]["items"]["raw"])],
            task.get("iteratorPolicy", {}).get("parallelismLimit"),
        )
        for task in found
    ]


@pytest.mark.parametrize("profile", ["local", "kubeflow"])
def test_table_1_with_three_seeds_parses_strictly_and_stays_within_budget(compiled, profile):
    (spec, platform), size = compiled(read_study("table1"), profile=read_profile(profile))
    assert size <= SIZE_BUDGET
    parsed = json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    deployment = pipeline_spec_pb2.PipelineDeploymentConfig()
    json_format.ParseDict(json_format.MessageToDict(parsed.deployment_spec), deployment)
    assert len(deployment.executors) == (8 * 5 + 2) + (5 * 5 + 2) + 1
    kubernetes = json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec()).platforms["kubernetes"]
    for executor in json_format.MessageToDict(kubernetes.deployment_spec)["executors"].values():
        json_format.ParseDict(executor, kubernetes_executor_config_pb2.KubernetesExecutorConfig())
    assert [len(items) for items, _ in loops_of(spec)] == [69, 69]


def test_the_loops_run_over_settings_first_seeds_first_as_many_at_once_as_asked(compiled):
    study = read_study("table2").narrowed(["voc-b0c4"], ["csc", "er"])
    (spec, _), _ = compiled(study, parallelism=3)
    ((items, at_once),) = loops_of(spec)
    assert at_once == 3
    assert [(item["method"], item["seed"]) for item in items] == [(m, s) for s in range(3) for m in ("csc", "er")]
    assert items[1]["memory"] == {"per_class": 2}
    loop = next(part for name, part in spec["components"].items() if name.startswith("comp-for-loop"))
    inputs = loop["dag"]["tasks"]["csc-voc-b0c4"]["inputs"]["parameters"]
    assert inputs["data"]["runtimeValue"]["constant"] == "/data/voc"
    assert "loop-item" in inputs["config"]["componentInputParameter"]


def test_the_profile_decides_how_many_cells_run_at_once_unless_told(compiled):
    study = read_study("figure3")
    (spec, _), _ = compiled(study, profile=read_profile("kubeflow"))
    assert loops_of(spec)[0][1] == read_profile("kubeflow").study.parallelism


def test_equal_runs_of_several_rows_come_once(compiled):
    study = read_study("table6").narrowed(seeds=[0])
    (spec, _), _ = compiled(study)
    ((items, _),) = loops_of(spec)
    assert len(study.rows) == 11
    assert len(items) == 10  # the buffer of size 0 is β = 4e-3 without one


def test_the_tables_come_last_whatever_becomes_of_the_cells(compiled):
    study = read_study("figure3").narrowed(seeds=[0, 1])
    asked = cells(study, PLACES)
    (spec, _), _ = compiled(study, asked[1:])
    last = spec["root"]["dag"]["tasks"]["collect"]
    assert last["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert last["inputs"]["parameters"]["status"] == {"taskFinalStatus": {"producerTask": "exit-handler-1"}}
    assert not last["cachingOptions"].get("enableCache")
    order = json.loads(last["inputs"]["parameters"]["order"]["runtimeValue"]["constant"])
    assert order["tried"] == [1, 2, 3]
    assert order["places"]["voc"] == {"data": "/data/voc", "classes": 20}
    assert Study.from_json(json.dumps(order["study"])) == study


def test_cells_that_cannot_be_run_are_left_out(compiled):
    study = read_study("table3").narrowed(seeds=[0], overrides={"backbone": {"frozen": "true"}})
    (spec, _), _ = compiled(study)
    assert all(item["method"] != "l2p" for items, _ in loops_of(spec) for item in items)


def test_maps_that_cells_share_are_made_once_before_all_of_them(compiled):
    study = read_study("table2").narrowed(["voc-b0c4", "voc-b10c2"], ["csc", "lwf"], overrides=MAPS)
    (spec, _), _ = compiled(study)
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert [name for name in tasks if name.startswith("embed")] == ["embed"]
    for name, task in tasks.items():
        if name.startswith("for-loop"):
            assert task["dependentTasks"] == ["embed"]
    scratch = study.narrowed(overrides={"init": "scratch"}, seeds=[0, 1])
    (spec, _), _ = compiled(scratch)
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert len([name for name in tasks if name.startswith("embed")]) == 2  # random weights are those of a seed


def test_a_loop_waits_only_for_the_maps_of_its_own_cells(compiled):
    rows = (
        Row("images", "csc"),
        Row("maps", "csc", settings=MAPS),
        Row("small", "lwf", by_scenario={"voc-b0c4": {**MAPS, "input": {"size": 96}}}),
    )
    study = Study("mine", "Mine", rows, ("voc-b0c4", "voc-b10c2", "digits-b0c2"), seeds=(0,))
    (spec, _), _ = compiled(study)
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    names = sorted((name for name in tasks if name.startswith("for-loop")), key=lambda name: int(name.split("-")[2]))
    made = [(loop.scenario.name, [cell.row.label for cell in loop.cells]) for loop in loops(cells(study, PLACES))]
    assert [(*loop, tasks[name].get("dependentTasks", [])) for loop, name in zip(made, names, strict=True)] == [
        ("voc-b0c4", ["images"], []),
        ("voc-b0c4", ["maps", "small"], ["embed", "embed-2"]),
        ("voc-b10c2", ["images", "small"], []),
        ("voc-b10c2", ["maps"], ["embed"]),
        ("digits-b0c2", ["images", "small"], []),
        ("digits-b0c2", ["maps"], ["embed-3"]),
    ]


def test_cells_whose_pipelines_differ_in_shape_get_loops_of_their_own():
    rows = (
        Row("images", "csc"),
        Row("maps", "csc", settings=MAPS),
        Row("nodes", "csc", settings={"train": {"nodes": 2}}),
    )
    study = Study("mine", "Mine", rows, ("voc-b0c4", "digits-b0c2"), seeds=(0,))
    made = loops(cells(study, PLACES))
    assert [(loop.scenario.name, len(loop.cells)) for loop in made] == [("voc-b0c4", 1)] * 3 + [("digits-b0c2", 1)] * 3


def test_a_study_is_cut_into_pipelines_that_a_cluster_can_hold():
    asked = cells(read_study("table1"), PLACES)
    cut = parts(asked)
    assert sorted(cell.name for part in cut for cell in part) == sorted(cell.name for cell in asked)
    for part in cut:
        assert sum(5 * cell.tasks + 2 for cell in part) <= STEPS
    assert len(cut) == 53
    assert len(parts(asked[:2])) == 1
    assert [len(part) for part in parts(asked[:3], most=1)] == [1, 1, 1]


def test_a_run_of_more_steps_than_a_cluster_can_hold_is_refused_with_a_way_out():
    study = Study("mine", "Mine", (Row("CSC", "csc"),), ("coco-b0c2",), seeds=(0,))
    with pytest.raises(BadScenario, match=f"'coco-b0c2': a run has 202 steps, .* about {STEPS_LIMIT}; .*--tasks 1-10"):
        parts(cells(study, PLACES))


def test_collect_writes_the_tables_of_what_is_finished(voc, tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "finished_runs", lambda scenario: [])
    study = read_study("figure3").narrowed(seeds=[0])
    places = {"voc": Place(str(voc), 20)}
    order = order_for(study, places, {cell.name for cell in cells(study, places)[:1]})
    made = {
        "page": dsl.HTML(uri=str(tmp_path / "page")),
        "table": dsl.Markdown(uri=str(tmp_path / "table")),
        "files": dsl.Artifact(uri=str(tmp_path / "files")),
    }
    printed = collect.python_func(order=order, status=None, **made)
    assert "failed (1 of 2 cells): without H: see the log of its run" in printed
    assert "not run (1 of 2 cells): with H: not started or not finished" in printed
    assert (tmp_path / "page").read_text().startswith("<!DOCTYPE html>")
    assert "| with H | not run | 5.36 |  | – | 19.0 |" in (tmp_path / "table").read_text()
    assert sorted(path.suffix for path in (tmp_path / "files").iterdir()) == [".csv", ".html", ".md", ".tex", ".txt"]


# What a person sees of cells that run side by side


@pytest.fixture
def teller():
    """A teller that finds every cell finished."""

    def looked_up(cell):
        return Result(cell, {"last_mAP": 74.54, "avg_mAP": 81.2})

    return Teller(io.StringIO(), io.StringIO(), 2, looked_up)


def some_cells():
    rows = (Row("CSC", "csc"), Row("LwF", "lwf"))
    return cells(Study("mine", "Mine", rows, ("voc-b0c4",), seeds=(0,)), {"voc": Place("/d", 20, "f" * 64)})


def test_lines_of_cells_side_by_side_are_kept_apart(teller):
    turn = threading.Barrier(2)

    def talk(cell):
        with teller.cell(cell) as voice:
            for piece in ("half a ", f"line of {cell.row.label}\n", "csc.errors.BadData: /x: broken\n"):
                turn.wait()
                teller.write(piece)
            teller.tell(voice, succeeded=cell.row.label == "CSC")

    threads = [threading.Thread(target=talk, args=(cell,)) for cell in some_cells()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = teller.log.getvalue().splitlines()
    assert "voc-b0c4 · CSC · seed 0 | half a line of CSC" in log
    assert "voc-b0c4 · LwF · seed 0 | half a line of LwF" in log
    said = sorted(line.partition("] ")[2] for line in teller.out.getvalue().splitlines())
    assert said == [
        "voc-b0c4 · CSC · seed 0: last mAP 74.5, average 81.2 (0 s)",
        "voc-b0c4 · LwF · seed 0: failed after 0 s: /x: broken",
    ]
    assert list(teller.failed.values()) == ["/x: broken"]


def test_the_reason_of_a_crash_is_the_last_line_that_says_anything(teller):
    with teller.cell(some_cells()[0]) as voice:
        teller.write("Traceback (most recent call last):\nRuntimeError: CUDA out of memory\n\n------\n")
        teller.write("Task 'train-6' finished with status FAILURE\n")
        assert voice.reason == "RuntimeError: CUDA out of memory"


def test_runs_that_wait_for_a_step_that_failed_are_told_why(teller):
    first, second = some_cells()
    with teller.cell(first) as voice:
        teller.tell(voice, succeeded=True)
    teller.write("csc.errors.BadData: init=/x: no such file\n")
    teller.blame([first, second], "kfp says little")
    assert teller.failed == {second.key: "init=/x: no such file"}
    assert teller.out.getvalue().splitlines()[-1] == "1 runs could not begin: init=/x: no such file"


def test_turns_of_a_loop_are_told_by_number_and_none_begins_after_an_interrupt(teller, monkeypatch):
    seen = []

    def execute(task_name, **rest):
        seen.append(task_name)
        return {}, status.Status.SUCCESS

    monkeypatch.setattr(enhanced_dag_orchestrator, "execute_task", execute)
    with study_local._told(teller, {"for-loop-3": some_cells()}):
        enhanced_dag_orchestrator.execute_task(task_name="for-loop-3-iteration-1")
        enhanced_dag_orchestrator.execute_task(task_name="train")
        teller.stopped = True
        ended = enhanced_dag_orchestrator.execute_task(task_name="for-loop-3-iteration-0")
    assert ended == ({}, status.Status.FAILURE)
    assert seen == ["for-loop-3-iteration-1", "train"]
    assert teller.out.getvalue().startswith("[1/2] voc-b0c4 · LwF · seed 0: last mAP 74.5")
    assert enhanced_dag_orchestrator.execute_task is execute


# The command


def test_a_dry_run_lists_every_cell_and_writes_nothing(voc, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    words = ["study", "table2", "--data", str(voc), "--scenarios", "voc-b0c4,coco-b0c10", "--methods", "csc,lwf"]
    assert main([*words, "--seeds", "0", "--workdir", str(tmp_path / "work"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "to run    voc-b0c4 · LwF (0) · seed 0",
        "to run    voc-b0c4 · CSC (0) · seed 0",
        "not run   coco-b0c10 · LwF (0) · seed 0: no data set 'coco' at hand; name its place with --data",
        "not run   coco-b0c10 · CSC (0) · seed 0: no data set 'coco' at hand; name its place with --data",
        "4 cells, 0 finished, 2 to run",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["voc"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "study 'table9': no such file"),
        (["table2", "--seeds", "a"], "--seeds a: expected whole numbers"),
        (["table2", "--methods", "krt"], "--methods krt: study 'table2' has no such row"),
        (["table2", "--methods", ","], "--methods: chooses nothing; name at least one"),
        (["table2", "--methods", ""], "--methods: chooses nothing; name at least one"),
        (["table2", "--scenarios", ","], "--scenarios: chooses nothing; name at least one"),
        (["table2", "--set", "seed=1"], "--set seed: a study has several; choose among them with --seeds"),
        (["table2", "--set", "method=csc"], "--set method: a study has several; choose among them with --methods"),
        (["table2", "--scenarios", "voc"], "scenario 'voc': expected"),
        (["table2", "--parallel", "0"], "--parallel 0: expected 1 or more"),
        (
            ["table2", "--set", "train.epoch=1", "--compile", "x.yaml", "--data", "s3://b/voc"],
            "no cell can be run: train.ep",
        ),
        (["table2", "--compile", "x.txt"], "--compile x.txt: expected a file name that ends in .yaml"),
        (["table2"], "no data set 'voc' at hand; name its place with --data"),
        (["table2", "--data", "coco=VOC"], "holds the data set 'voc'"),
        (["table2", "--data", "VOC", "--data", "voc=VOC/."], "/voc/.: the data set 'voc' was given before; give one"),
        (
            ["table2", "--data", "s3://b/1", "--data", "voc=s3://b/2", "--compile", "x.yaml"],
            "--data s3://b/2: the data set 'voc' was given before; give one place for each",
        ),
        (["table1", "--data", "VOC"], "--data: gives voc, but the scenarios of study 'table1' need coco"),
        (
            ["table1", "--data", "voc=s3://b/voc", "--compile", "x.yaml"],
            "--data: gives voc, but the scenarios of study 'table1' need coco",
        ),
        (["table2", "--scenarios", "voc-b0c4,coco-b0c10", "--data", "s3://b/x", "--compile", "x.yaml"], "--data NAME="),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_one_line_and_exit_code_2(words, message, voc, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    monkeypatch.chdir(tmp_path)
    assert main(["study", *(word.replace("VOC", str(voc)) for word in words)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["voc"]


def test_compiling_for_a_cluster_looks_at_no_data_and_writes_what_fits(tmp_path, capsys):
    out = tmp_path / "study.yaml"
    words = ["study", "table2", "--data", "s3://nowhere/voc", "--scenarios", "voc-b0c4", "--profile", "kubeflow"]
    assert main([*words, "--methods", "csc", "--compile", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}: 3 runs\n"
    assert main([*words, "--methods", "csc,lwf", "--compile", str(out)]) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["study-1.yaml", "study-2.yaml", "study.yaml"]
