"""A study: its pipeline for a cluster, its cells as processes of this machine, and the command."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import yaml
from google.protobuf import json_format
from kfp import dsl
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from csc.artifacts import TableRequest
from csc.cli import _parser, main
from csc.cli.run import overrides_of
from csc.components.collect.component import collect
from csc.config import resolve
from csc.errors import BadScenario, TrackingError
from csc.pipelines.local.interrupts import interruptible
from csc.pipelines.package import STEPS, STEPS_LIMIT, write_package
from csc.pipelines.profile import Profile, read_profile
from csc.pipelines.study import build_study, loops, split_into_pipelines, table_request
from csc.study import cells as cells_module
from csc.study.cells import DataSource, Result, cells, distinct
from csc.study.live import RunningCell, picture
from csc.study.local import command_of, run_cells
from csc.study.reading import SHIPPED, read_study
from csc.study.spec import Row, Study

pytestmark = pytest.mark.slow  # compiling takes a second or more each time

SOURCES = {
    "coco": DataSource("s3://b/coco", 80),
    "voc": DataSource("/data/voc", 20),
    "voc8": DataSource("/data/voc8", 8),
    "voconce0": DataSource("/data/voconce0", 20),
    "voconce4": DataSource("/data/voconce4", 20),
    "digits": DataSource("/data/digits", 10),
}
ROOT = Path(__file__).parents[2]
SIZE_BUDGET = 512 << 10
SPLITS = {"train": {"images": 9, "labels": 9}, "test": {"images": 9, "labels": 9}}
MAPS = {"backbone": {"frozen": True}, "features": {"views": 1}}


@pytest.fixture
def compiled(tmp_path):
    """Compile a study; return the documents of the file, and its size."""

    def compile_it(study, asked=None, profile=None, parallelism=None):
        path = tmp_path / "study.yaml"
        asked = cells(study, SOURCES) if asked is None else asked
        write_package(build_study(study, asked, SOURCES, profile or Profile(), parallelism), path)
        return list(yaml.load_all(path.read_text(), yaml.CSafeLoader)), path.stat().st_size

    return compile_it


@pytest.fixture
def voc(tmp_path):
    """A data set of 20 classes that nobody will look into."""
    folder = tmp_path / "voc"
    folder.mkdir()
    card = {"name": "voc", "classes": [f"c{n:02d}" for n in range(20)], "splits": SPLITS, "fingerprint": "f" * 64}
    (folder / "dataset.json").write_text(
        json.dumps({**card, "source": {"kind": "voc2007"}, "difficult_is_member": False})
    )
    return folder


def loops_of(spec):
    """The loops of a compiled study in the order of the file: items, and how many run at the same time."""
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
    study = read_study("table2").subset(["voc-b0c4"], ["csc", "er"])
    (spec, _), _ = compiled(study, parallelism=3)
    assert all(one["description"] for one in spec["root"]["inputDefinitions"]["parameters"].values())
    ((items, at_once),) = loops_of(spec)
    assert at_once == 3
    assert [(item["method"], item["seed"]) for item in items] == [(m, s) for s in range(3) for m in ("csc", "er")]
    assert resolve("voc", items[1]).memory.per_class == 2
    loop = next(part for name, part in spec["components"].items() if name.startswith("comp-for-loop"))
    inputs = loop["dag"]["tasks"]["csc-voc-b0c4"]["inputs"]["parameters"]
    assert inputs["data"]["runtimeValue"]["constant"] == "/data/voc"
    assert "loop-item" in inputs["config"]["componentInputParameter"]


def test_the_profile_decides_how_many_cells_run_at_once_unless_told(compiled):
    study = read_study("figure3")
    (spec, _), _ = compiled(study, profile=read_profile("kubeflow"))
    assert loops_of(spec)[0][1] == read_profile("kubeflow").study.parallelism


def test_equal_runs_of_several_rows_come_once(compiled):
    study = read_study("table6").subset(seeds=[0])
    (spec, _), _ = compiled(study)
    ((items, _),) = loops_of(spec)
    assert len(study.rows) == 11
    assert len(items) == 10  # the buffer of size 0 is β = 4e-3 without one


def test_the_tables_come_last_whatever_becomes_of_the_cells(compiled):
    study = read_study("figure3").subset(seeds=[0, 1])
    asked = cells(study, SOURCES)
    (spec, _), _ = compiled(study, asked[1:])
    last = spec["root"]["dag"]["tasks"]["collect"]
    assert last["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert last["inputs"]["parameters"]["status"] == {"taskFinalStatus": {"producerTask": "exit-handler-1"}}
    assert not last["cachingOptions"].get("enableCache")
    request = json.loads(last["inputs"]["parameters"]["order"]["runtimeValue"]["constant"])
    assert request["tried"] == [1, 2, 3]
    assert request["sources"]["voc"] == "/data/voc"
    assert msgspec.convert(request["study"], Study) == study


def test_cells_that_cannot_be_run_are_left_out(compiled):
    study = read_study("table3").subset(seeds=[0], overrides={"backbone": {"frozen": "true"}})
    (spec, _), _ = compiled(study)
    assert all(item["method"] != "l2p" for items, _ in loops_of(spec) for item in items)


def test_maps_that_cells_share_are_made_once_before_all_of_them(compiled):
    study = read_study("table2").subset(["voc-b0c4", "voc-b10c2"], ["csc", "lwf"], overrides=MAPS)
    (spec, _), _ = compiled(study)
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert [name for name in tasks if name.startswith("embed")] == ["embed"]
    for name, task in tasks.items():
        if name.startswith("for-loop"):
            assert task["dependentTasks"] == ["embed"]
    scratch = study.subset(overrides={"init": "scratch"}, seeds=[0, 1])
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
    made = [(loop.scenario.name, [cell.row.label for cell in loop.cells]) for loop in loops(cells(study, SOURCES))]
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
    made = loops(cells(study, SOURCES))
    assert [(loop.scenario.name, len(loop.cells)) for loop in made] == [("voc-b0c4", 1)] * 3 + [("digits-b0c2", 1)] * 3


def test_a_study_is_cut_into_pipelines_that_a_cluster_can_hold():
    asked = cells(read_study("table1"), SOURCES)
    cut = split_into_pipelines(asked)
    assert sorted(cell.name for part in cut for cell in part) == sorted(cell.name for cell in asked)
    for part in cut:
        assert sum(5 * cell.tasks + 2 for cell in part) <= STEPS
    assert len(cut) == 53
    assert len(split_into_pipelines(asked[:2])) == 1
    assert [len(part) for part in split_into_pipelines(asked[:3], most=1)] == [1, 1, 1]


def test_a_run_of_more_steps_than_a_cluster_can_hold_is_refused_with_a_way_out():
    study = Study("mine", "Mine", (Row("CSC", "csc"),), ("coco-b0c2",), seeds=(0,))
    with pytest.raises(BadScenario, match=f"'coco-b0c2': a run has 202 steps, .* about {STEPS_LIMIT}; .*--tasks 1-10"):
        split_into_pipelines(cells(study, SOURCES))


def test_a_cell_was_tried_if_the_run_that_it_shares_with_another_was():
    study = Study("mine", "Mine", (Row("Ridge", "ridge"),), ("voc-b0c4",), seeds=(0, 1))
    asked = cells(study, SOURCES)
    request = TableRequest.from_json(table_request(study, SOURCES, distinct(asked)))
    assert len(distinct(asked)) == 1
    assert request.tried == (0, 1)


def test_collect_writes_the_tables_of_what_is_finished(voc, tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "finished_runs", lambda scenario: [])
    study = read_study("figure3").subset(seeds=[0])
    sources = {"voc": DataSource(str(voc), 20)}
    request = table_request(study, sources, cells(study, sources)[:1])
    made = {
        "page": dsl.HTML(uri=str(tmp_path / "page")),
        "table": dsl.Markdown(uri=str(tmp_path / "table")),
        "files": dsl.Artifact(uri=str(tmp_path / "files")),
    }
    (printed,) = collect.python_func(order=request, status=None, **made)
    assert "failed (1 of 2 cells): without H: see the log of its run" in printed
    assert "not run (1 of 2 cells): with H: not started or not finished" in printed
    assert (tmp_path / "page").read_text().startswith("<!DOCTYPE html>")
    assert "| with H | not run | 5.36 |  | – | 19.0 |" in (tmp_path / "table").read_text()
    assert sorted(path.suffix for path in (tmp_path / "files").iterdir()) == [".csv", ".html", ".md", ".tex", ".txt"]


# Cells on this machine


ROWS = (Row("CSC", "csc"), Row("LwF", "lwf"), Row("ER", "er"))


def cells_of(*rows, seeds=(0,)):
    return cells(Study("mine", "Mine", rows, ("voc-b0c4",), seeds=seeds), {"voc": DataSource("/d", 20, "f" * 64)})


def finished(cell):
    return Result(cell, {"last_mAP": 74.54, "avg_mAP": 81.2})


def python(program):
    return lambda cell: [sys.executable, "-c", program, cell.row.label]


def test_every_cell_that_ends_gets_a_line_and_a_failed_one_loses_no_other(capsys):
    program = "import sys; sys.exit(sys.argv[1] == 'LwF' and 'some line\\ncsc: /x: broken\\nthe whole log is y')"
    asked = cells_of(*ROWS)
    failed = run_cells(asked, python(program), finished, parallel=1)
    assert re.sub(r"\d+ s\b", "0 s", capsys.readouterr().out).splitlines() == [
        "[1/3] voc-b0c4 · CSC · seed 0: last mAP 74.5, average 81.2 (0 s)",
        "[2/3] voc-b0c4 · LwF · seed 0: failed after 0 s: /x: broken",
        "[3/3] voc-b0c4 · ER · seed 0: last mAP 74.5, average 81.2 (0 s)",
    ]
    assert failed == {asked[1].key: "/x: broken"}


def test_a_terminal_shows_the_cells_at_work_and_the_table_as_it_fills():
    from rich.console import Console

    asked = cells_of(*ROWS[:2], seeds=(0, 1))
    running = [RunningCell(asked[3].name, 83.0, "task 2/5 · epoch 3/9 · 126 s left")]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(picture(running, [finished(cell) for cell in asked[:3]]))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert lines == [
        "last mAP so far voc-b0c4",
        "CSC 74.5 (n=2)",
        "LwF 74.5 (n=1)",
        "voc-b0c4 · LwF · seed 1 1:23 task 2/5 · epoch 3/9 · 126 s left",
    ]


def test_cells_are_seen_at_work_on_a_terminal_and_their_ends_stay():
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.pipelines.test_study import ROWS, cells_of, finished, python, run_cells
run_cells(cells_of(ROWS[0]), python("import time; print('epoch 1/2', flush=True); time.sleep(1.5)"), finished)
"""
    seen = on_a_terminal([sys.executable, "-c", program])
    assert "epoch 1/2" in seen
    assert seen.index("epoch 1/2") < seen.index("[1/1] voc-b0c4 · CSC · seed 0: last mAP 74.5, average 81.2")


def on_a_terminal(command):
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while chunk := os.read(ours, 4096):
            seen += chunk
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "exit code 3, no output"),
    ],
)
def test_a_cell_that_dies_without_our_error_line_says_what_is_known(program, reason):
    assert list(run_cells(cells_of(ROWS[0]), python(program), finished).values()) == [reason]


def test_a_run_that_succeeds_without_a_result_has_failed():
    missing = run_cells(cells_of(ROWS[0]), python(""), lambda cell: Result(cell, {}, missing="failed", reason="gone"))
    assert list(missing.values()) == ["gone"]

    def away(cell):
        raise TrackingError("MLflow does not answer")

    assert list(run_cells(cells_of(ROWS[0]), python(""), away).values()) == ["MLflow does not answer"]


# A process that notes when it begins and when it ends.
NOTES = """
import sys, time
with open({notes!r}, "a") as notes: print("begin", sys.argv[1], file=notes)
time.sleep(0.5)
with open({notes!r}, "a") as notes: print("end", sys.argv[1], file=notes)
"""


def test_as_many_cells_run_at_once_as_asked(tmp_path):
    notes = tmp_path / "notes"
    run_cells(cells_of(*ROWS), python(NOTES.format(notes=str(notes))), finished, parallel=3)
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["begin"] * 3 + ["end"] * 3


def test_cells_that_share_maps_wait_for_the_first_of_them_and_others_do_not(tmp_path):
    notes = tmp_path / "notes"
    rows = (Row("maps", "csc", settings=MAPS), Row("same", "lwf", settings=MAPS), Row("images", "csc"))
    asked = cells_of(*rows)
    run_cells(asked, python(NOTES.format(notes=str(notes))), finished, parallel=3)
    lines = notes.read_text().splitlines()
    assert lines.index("end maps") < lines.index("begin same")
    assert lines.index("begin images") < lines.index("end maps")


def test_cells_with_most_views_come_first_then_first_seeds_and_equal_runs_once():
    views = {**MAPS, "features": {"views": 3}}
    rows = (Row("images", "csc"), Row("again", "csc"), Row("maps", "csc", settings=views))
    order = [(cell.row.label, cell.seed) for cell in distinct(cells_of(*rows, seeds=(1, 0)))]
    assert order == [("maps", 0), ("maps", 1), ("images", 0), ("images", 1)]


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_cells(tmp_path, signal_number):
    notes = tmp_path / "notes"
    program = f"""
import sys, time
from csc.pipelines.local.interrupts import interruptible
try:
    with interruptible():
        with open({str(notes)!r}, "a") as notes: print("begin", file=notes)
        time.sleep(60)
except KeyboardInterrupt:
    with open({str(notes)!r}, "a") as notes: print("closed", file=notes)
"""
    begun = threading.Event()

    def interrupt():
        while not begun.wait(0.05):
            if notes.is_file() and len(notes.read_text().splitlines()) == 2:
                os.kill(os.getpid(), signal_number)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), interruptible():
        run_cells(cells_of(*ROWS), python(program), finished, parallel=2)
    begun.set()
    thread.join()
    assert notes.read_text().split() == ["begin", "begin", "closed", "closed"]


def test_cells_side_by_side_share_the_cores_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr("csc.study.local.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = "import os, sys; sys.exit(str(os.environ.get('OMP_NUM_THREADS')))"

    def threads(parallel):
        return set(run_cells(cells_of(*ROWS), python(program), finished, parallel=parallel).values())

    assert threads(3) == {"2"}
    assert threads(100) == {"2"}  # there are three
    assert threads(1) == {"None"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(3) == {"5"}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_command_of_a_cell_asks_for_just_its_run(name):
    for cell in cells(read_study(name).subset(seeds=[7]), SOURCES):
        words = command_of(cell, "work", ["--runner", "subprocess"])[3:]
        arguments = _parser().parse_args(words)
        assert resolve(cell.scenario.dataset, overrides_of(arguments)) == cell.config
        assert (arguments.scenario, arguments.data) == (cell.scenario.name, cell.source.uri)
        assert (arguments.workdir, arguments.runner) == ("work", "subprocess")


# The command


def test_a_dry_run_lists_every_cell_and_writes_nothing(voc, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    words = ["study", "table2", "--data", str(voc), "--scenarios", "voc-b0c4,coco-b0c10", "--methods", "csc,lwf"]
    assert main([*words, "--seeds", "0", "--workdir", str(tmp_path / "work"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "to run    voc-b0c4 · LwF (0) · seed 0",
        "to run    voc-b0c4 · CSC (0) · seed 0",
        "not run   coco-b0c10 · LwF (0) · seed 0: no data set 'coco' at hand; give its uri with --data",
        "not run   coco-b0c10 · CSC (0) · seed 0: no data set 'coco' at hand; give its uri with --data",
        "4 cells, 0 finished, 2 to run",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["voc"]


def test_markdown_shows_several_studies_and_runs_nothing(voc, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    words = ["study", "table2", "figure3", "--data", str(voc), "--seeds", "0", "--workdir", str(tmp_path / "work")]
    assert main([*words, "--markdown"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("# Claims\n")
    assert output.count("\n# ") == 2
    assert "| CSC | 0 | not run |" in output
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
        (["table2", "figure3"], "runs one study at a time; several can be summarised with --markdown"),
        (["table2", "--data", "VOC", "--markdown", "x.md"], "x.md: expected a document with the lines"),
        (
            ["table2", "--set", "train.epoch=1", "--compile", "x.yaml", "--data", "s3://b/voc"],
            "train.epoch: no row of study 'table2' reads such a setting",
        ),
        (["table2", "--compile", "x.txt"], "--compile x.txt: expected a file name that ends in .yaml"),
        (["table2"], "no data set 'voc' at hand; give its uri with --data"),
        (["table2", "--data", "coco=VOC"], "holds the data set 'voc'"),
        (["table2", "--data", "VOC", "--data", "voc=VOC/."], "/voc/.: the data set 'voc' was given before; give one"),
        (
            ["table2", "--data", "s3://b/1", "--data", "voc=s3://b/2", "--compile", "x.yaml"],
            "--data s3://b/2: the data set 'voc' was given before; give one uri for each",
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
