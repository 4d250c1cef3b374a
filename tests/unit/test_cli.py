import dataclasses
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from csc import cli
from csc.cli import lists
from csc.config import methods, resolve
from csc.data.dataset import Dataset
from csc.data.ingest import digits
from csc.data.ingest.coco import COCO_CLASSES, ingest_coco
from csc.data.ingest.output import Output
from csc.data.ingest.writer import WriteOptions
from csc.errors import BadData, BadScenario
from csc.scenario import PAPER_SCENARIOS, Scenario
from csc.steps.ingest import ingest
from tests.builders import contents, make_coco, make_voc, picture, write_voc_xml, zipped

LONG = "x" * 300


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each thing that a command may be pointed at."""
    folder = tmp_path_factory.mktemp("shelf")
    make_coco(folder / "raw")
    ingest_coco(folder / "raw", folder / "animals", "animals")
    whole = zipped(folder / "raw", folder / "whole.zip").read_bytes()
    (folder / "broken.zip").write_bytes(whole[: len(whole) // 2])
    (folder / "file").write_text("the only copy")
    (folder / "a.jpg").write_bytes(picture(1))
    (folder / "text.jpg").write_text("no image")
    for name in ("empty", "folder.yaml", "spoilt", "no-model"):
        (folder / name).mkdir()
    (folder / "spoilt" / "dataset.json").write_text("{")
    (folder / "no-model" / "model.json").write_text('{"format": 1}')
    return folder


@pytest.fixture
def cwd(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shelf as the present folder, and no tracking server."""
    shutil.copytree(shelf, tmp_path / "cwd")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # so that what a command sets is undone afterwards
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    return tmp_path / "cwd"


# What a person types, and the words that the answer must have.
RUN: list[tuple[str, tuple[str, ...]]] = [
    ("run voc", ("'voc'", "voc-b10c2")),
    ("run voc-b4", ("'voc-b4'", "voc-b10c2")),
    ("run voc-c4", ("'voc-c4'", "voc-b10c2")),
    ("run voc-b-1c2", ("'voc-b-1c2'", "voc-b10c2")),
    ("run VOC-B4-C2", ("'VOC-B4-C2'", "voc-b10c2")),
    ("run voc-b0c0 --data animals", ("'voc-b0c0'", "c0 is not possible")),
    ("run digits-b11c2", ("'digits-b11c2'", "11 classes", "has 10")),
    ("run digits-b0c11", ("'digits-b0c11'", "11 classes", "has 10")),
    ("run voc-b21c1 --data nowhere", ("'voc-b21c1'", "21 classes", "has 20")),
    ("run animals-b5c1 --data animals", ("'animals-b5c1'", "5 classes", "has 4")),
    ("run voc-b0c4", ("voc-b0c4", "--data is missing", "csc ingest")),
    ("run mine-b0c4", ("mine-b0c4", "--data is missing")),
    ("run digts-b0c2", ("--data is missing", "did you mean digits-b0c2?")),
    ("run coca-b0c10", ("--data is missing", "did you mean coco-b0c10?")),
    ("run digits-b0c2 --set backbone.name=resnet999", ("backbone.name=resnet999", "did you mean")),
    ("run digits-b0c2 --set init=nowhere.safetensors", ("init=nowhere.safetensors", "no such file")),
    ("run mine-b0c4 --data nowhere", ("nowhere", "data set")),
    ("run mine-b0c4 --data empty", ("empty", "data set")),
    ("run mine-b0c4 --data file", ("file", "data set")),
    ("run mine-b0c4 --data spoilt", ("dataset.json", "not readable as JSON")),
    ("run voc-b0c4 --data gs://bucket/set", ("gs://bucket/set", "s3://bucket/prefix")),
    ("run voc-b0c4 --data ~no-such-user/set", ("~no-such-user/set",)),
    (f"run voc-b0c4 --data {LONG}", ("xxx",)),
    ("run digits-b0c2 --method icarl", ("'icarl'", "agcn, agcn-r, csc, csc-r")),
    ("run digits-b0c2 --method CSC", ("'CSC'", "agcn, agcn-r, csc, csc-r")),
    ("run digits-b0c2 --set method.x=1", ("method", "agcn, agcn-r, csc, csc-r")),
    ("run digits-b0c2 --set train.epochs", ("--set train.epochs", "key=value")),
    ("run digits-b0c2 --set =3", ("--set =3", "key=value")),
    ("run digits-b0c2 --set train.epochs=three", ("train.epochs=three", "a whole number")),
    ("run digits-b0c2 --set train.epochs=0", ("train.epochs=0", "1 or more")),
    ("run digits-b0c2 --set train.epoch=1", ("train.epoch", "train.epochs")),
    ("run digits-b0c2 --set epochs=1", ("epochs", "no such key", "train")),
    ("run digits-b0c2 --set train=1", ("train", "expected a group of", "epochs")),
    ("run digits-b0c2 --set loss.alpha=1.5", ("loss.alpha=1.5", "between 0 and 1")),
    ("run digits-b0c2 --set loss.alpha=nan", ("loss.alpha=nan", "a number")),
    ("run digits-b0c2 --set head=mlp", ("head=mlp", "ci_gcn, linear")),
    ("run digits-b0c2 --set train.epochs=1 --set train.lr=x", ("train.lr=x", "a positive number")),
    ("run digits-b0c2 --seed -1", ("seed=-1", "0 or more")),
    ("run digits-b0c2 --seed 99999999999999999999", ("seed=99999999999999999999", "expected")),
    ("run digits-b0c2 --workdir file", ("file", "--workdir")),
    ("run digits-b0c2 --workdir file/below", ("file/below", "--workdir")),
    ("run digits-b0c2 --workdir ~no-such-user/work", ("~no-such-user/work",)),
    (f"run digits-b0c2 --workdir {LONG}", ("xxx",)),
]
COMPILE: list[tuple[str, tuple[str, ...]]] = [
    ("compile voc -o v.yaml", ("'voc'", "voc-b10c2")),
    ("compile voc-b21c1 -o v.yaml", ("21 classes", "has 20")),
    ("compile voc-b0c4 -o v.json", ("v.json", ".yaml")),
    ("compile voc-b0c4 -o v", ("-o v", ".yaml")),
    ("compile mine-b0c4 -o v.yaml", ("'mine'", "--data")),
    ("compile coco2-b0c10 -o v.yaml", ("'coco2'", "--data", "did you mean coco-b0c10?")),
    ("compile mine-b0c4 -o v.yaml --data nowhere", ("nowhere", "data set")),
    ("compile mine-b0c4 -o v.yaml --data gs://bucket/set", ("gs://bucket/set", "s3://bucket/prefix")),
    ("compile digits-b0c5 -o file/v.yaml", ("cannot write", "file/v.yaml")),
    ("compile digits-b0c5 -o folder.yaml", ("folder.yaml",)),
    (f"compile digits-b0c5 -o {LONG}.yaml", ("xxx",)),
]
INGEST: list[tuple[str, tuple[str, ...]]] = [
    ("ingest voc2007 --out out", ("voc2007", "--source is missing")),
    ("ingest coco2014 --out out", ("coco2014", "--source is missing")),
    ("ingest coco --out out", ("coco", "--source is missing")),
    ("ingest voc2007 --source nowhere --out out", ("nowhere", "no such folder or zip")),
    ("ingest coco --source nowhere --out out", ("nowhere", "no such folder or zip")),
    ("ingest coco --source broken.zip --out out", ("broken.zip", "not readable as a zip")),
    ("ingest voc2007 --source file --out out", ("file", "not readable as a zip")),
    ("ingest voc2007 --source raw --out out", ("raw", "not a VOC 2007 layout")),
    ("ingest coco --source empty --out out", ("empty", "not a COCO layout")),
    ("ingest coco2014 --source raw --out out", ("the 80 of COCO 2014",)),
    ("ingest coco --source raw/annotations/instances_train2014.json --out out", ("the folder that has it",)),
    ("ingest csv --source raw --out out --verify", ("--verify", "only for coco")),
    ("ingest coco --source raw --out out --class-order nowhere.txt", ("nowhere.txt", "no such file")),
    ("ingest coco --source gs://bucket/raw --out out", ("gs://bucket/raw", "s3://bucket/prefix")),
    ("ingest coco --source ~no-such-user/raw --out out", ("~no-such-user/raw",)),
    (f"ingest coco --source {LONG} --out out", ("xxx",)),
    ("ingest coco --source raw --out out --name my_set!", ("my_set!",)),
    ("ingest coco --source raw --out out --name a/b", ("a/b",)),
    ("ingest coco --source raw --out gs://bucket/set", ("gs://bucket/set", "s3://bucket/prefix")),
    ("ingest coco --source raw --out out --workers 0", ("--workers 0", "1 or more")),
    ("ingest coco --source raw --out out --short-side -3", ("--short-side -3", "1 or more")),
    ("ingest digits --out out --short-side 32", ("--short-side", "made in their size")),
    ("ingest digits --out out --source raw", ("ingest digits", "--source", "need no source")),
    ("ingest digits --out out --name numbers", ("ingest digits", "--name", "'digits'")),
    ("ingest voc2007 --source raw --out out --name pets", ("ingest voc2007", "--name", "always named 'voc'")),
    ("ingest coco --source raw --out raw", ("raw", "not a data set")),
    ("ingest coco --source raw --out file", ("file", "not a data set")),
    ("ingest coco --source raw --out file/below", ("cannot write", "file/below")),
    ("ingest coco --source raw --out animals --name beasts", ("animals", "another data set")),
    ("ingest digits --out file", ("file", "not a data set")),
    ("ingest digits --out ~no-such-user/set", ("~no-such-user/set",)),
]
USE: list[tuple[str, tuple[str, ...]]] = [
    ("predict no-model nowhere.jpg", ("nowhere.jpg", "no such image file")),
    ("predict no-model a.jpg nowhere.jpg", ("nowhere.jpg", "no such image file")),
    ("predict no-model empty", ("empty", "no image files")),
    ("predict no-model *.gif", ("*.gif", "no file matches")),
    ("predict no-model a.jpg --threshold 80", ("--threshold 80", "between 0 and 1")),
    ("predict no-model a.jpg --threshold nan", ("--threshold nan", "between 0 and 1")),
    ("sample digits -n 0 --out new", ("-n 0", "expected 1 to")),
    ("sample digits --out file", ("file", "not a folder")),
    (f"predict no-model {LONG}", ("xxx",)),
    ("predict models:/nothing@final a.jpg", ("work", "no runs there yet")),
    ("predict models:/nothing/1 a.jpg --workdir file", ("file",)),
    ("predict nowhere a.jpg", ("nowhere", "not a model")),
    ("predict empty a.jpg", ("empty", "not a model")),
    ("predict file a.jpg", ("file", "not a model")),
    ("predict animals a.jpg", ("animals", "not a model")),
    ("predict no-model a.jpg", ("no-model", "not a model")),
    ("predict s3://bucket/model a.jpg", ("s3:", "bucket/model")),
    ("ui", ("no runs there yet", "csc run digits-b0c2")),
    ("show", ("no runs there yet", "csc run digits-b0c2")),
    ("settings no-such-thing", ("no-such-thing", "no setting")),
    ("ui --workdir nowhere", ("nowhere", "no runs there yet")),
    ("ui --workdir ~no-such-user/work", ("~no-such-user/work",)),
]
EVERY = [*RUN, *COMPILE, *INGEST, *USE]


def refused(arguments: list[str], cwd: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; return its one line, after a look at the folder that it must leave alone."""
    before = contents(cwd)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("csc: ")
    assert error.endswith("\n")
    assert len(error.splitlines()) == 1, error
    after = contents(cwd)
    assert after.keys() == before.keys()
    assert after == before
    return error


@pytest.mark.parametrize(("typed", "words"), EVERY, ids=[typed.replace(LONG, "xxx...") for typed, _ in EVERY])
def test_bad_input_ends_in_one_line_and_nothing_written(
    typed: str, words: tuple[str, ...], cwd: Path, capsys: pytest.CaptureFixture[str]
):
    line = refused(typed.split(), cwd, capsys)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", ""],
        ["run", "voc b0c4"],
        ["run", "voc-b0c4\n"],
        ["run", "voc\nb0c4"],
        ["run", f"voc-b{'9' * 5000}c2", "--data", "animals"],
        ["run", "digits-b0c2", "--set", ""],
        ["run", "digits-b0c2", "--set", "train.epochs=1\n2"],
        ["run", "digits-b0c2", "--method", ""],
        ["compile", "voc-b0c4", "-o", ""],
        ["ingest", "coco", "--source", "raw", "--out", "out", "--name", ""],
        ["ingest", "coco", "--source", "raw", "--out", "out", "--name", "my set"],
        ["ingest", "digits", "--out", ""],
        ["predict", "no-model", ""],
        ["predict", "no-model", "no\nwhere.jpg"],
    ],
    ids=lambda arguments: ascii(" ".join(arguments))[:60],
)
def test_input_with_blanks_and_line_breaks_ends_in_one_line_too(
    arguments: list[str], cwd: Path, capsys: pytest.CaptureFixture[str]
):
    assert len(refused(arguments, cwd, capsys)) > 20


@pytest.mark.parametrize(
    "typed",
    [
        "nonsense",
        "run",
        "run digits-b0c2 --seed one",
        "run digits-b0c2 --unknown 1",
        "run digits-b0c2 --set",
        "compile voc-b0c4",
        "ingest",
        "ingest voc2040 --source raw --out out",
        "ingest coco --source raw",
        "predict animals",
        "predict animals a.jpg --threshold high",
        "ui --port many",
        "scenarios voc",
    ],
)
def test_a_command_of_another_form_ends_in_its_usage(typed: str, cwd: Path, capsys: pytest.CaptureFixture[str]):
    before = contents(cwd)
    with pytest.raises(SystemExit) as caught:
        cli.main(typed.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: csc")
    assert "error: " in error.splitlines()[-1]
    assert contents(cwd) == before


def test_the_bare_command_prints_its_help(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: csc")
    assert "ingest" in printed.out
    assert printed.err == ""


# What only the first step of a run finds out.
INGEST_STEP: list[tuple[str, str, type[Exception], tuple[str, ...]]] = [
    ("voc-b0c4", "nowhere", BadData, ("nowhere", "not a data set", "csc ingest")),
    ("voc-b0c4", "empty", BadData, ("empty", "not a data set")),
    ("voc-b0c4", "file", BadData, ("file", "not a data set")),
    ("voc-b0c4", "raw", BadData, ("raw", "not a data set")),
    ("voc-b0c4", "spoilt", BadData, ("dataset.json", "not readable as JSON")),
    ("voc-b0c4", "animals", BadData, ("'animals'", "'voc-b0c4'", "'voc'")),
    ("digits-b0c2", "animals", BadData, ("'animals'", "'digits'")),
    ("digits-b0c2", "file", BadData, ("file",)),
    ("animals-b5c1", "animals", BadScenario, ("5 classes", "has 4")),
    ("animals", "animals", BadScenario, ("'animals'", "voc-b10c2")),
    ("voc-b0c4", "s3://bucket/set", BadData, ("s3://bucket/set",)),
    ("voc-b0c4", LONG, BadData, ("xxx",)),
]


@pytest.mark.parametrize(
    ("scenario", "data", "error", "words"),
    INGEST_STEP,
    ids=[f"{scenario} {data[:20]}" for scenario, data, _, _ in INGEST_STEP],
)
def test_the_ingest_step_refuses_data_that_does_not_fit(
    scenario: str, data: str, error: type[Exception], words: tuple[str, ...], cwd: Path
):
    before = contents(cwd)
    with pytest.raises(error) as caught:
        ingest(scenario, data)
    assert len(str(caught.value).splitlines()) == 1
    for word in words:
        assert word in str(caught.value)
    assert contents(cwd) == before


def test_the_ingest_step_reports_what_it_found(cwd: Path, capsys: pytest.CaptureFixture[str]):
    origin = ingest("ANIMALS-b1c2", "animals")
    assert origin.data == str(cwd / "animals")
    assert origin.fingerprint == Dataset.open("animals").fingerprint
    printed = capsys.readouterr().out
    for words in ("4 classes in 3 tasks (1 + 2 + 1)", "last task is smaller", "train 6", "test 4"):
        assert words in printed


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str], errors: str = "") -> list[str]:
    """Run a command that must succeed; return its lines."""
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == errors
    return captured.out.splitlines()


def test_scenarios_lists_those_of_the_paper_with_their_tasks(capsys: pytest.CaptureFixture[str]):
    *lines, last = printed(["scenarios"], capsys)
    assert [line.partition(":")[0] for line in lines] == ["digits-b0c2", *PAPER_SCENARIOS]
    assert "voc-b10c2: 20 classes in 6 tasks (10 + 2 + 2 + 2 + 2 + 2)" in lines
    assert "<data set>-b<base classes>c<classes per task>" in last


def test_methods_lists_every_method_with_a_line_on_it(capsys: pytest.CaptureFixture[str]):
    lines = printed(["methods"], capsys)
    assert dict(line.split(maxsplit=1) for line in lines) == methods()


def test_settings_are_listed_with_default_range_readers_and_meaning(capsys: pytest.CaptureFixture[str]):
    lines = printed(["settings"], capsys)[:-1]
    listed = {
        line.partition(" = ")[0]: (line, meaning.strip()) for line, meaning in zip(lines[::2], lines[1::2], strict=True)
    }
    known = {key for name in methods() for key in resolve("voc", {"method": name}).flat()}
    assert known <= listed.keys()
    assert all(len(meaning) > 10 for _, meaning in listed.values())
    line, meaning = listed["train.epochs"]
    assert line.split(maxsplit=3) == ["train.epochs", "=", "20", "a whole number, 1 or more · all methods"]
    assert meaning == "passes over the images of a task."
    assert listed["oewc.weight"][0].endswith("a number, 0 or more · oewc")
    assert "· all methods but " in listed["memory.total"][0]
    assert [line.split()[0] for line in printed(["settings", "lr_base"], capsys)[:-1:2]] == ["train.lr_base"]


def test_a_dry_run_says_what_would_be_done_and_does_nothing(cwd: Path, capsys: pytest.CaptureFixture[str]):
    before = contents(cwd)
    words = ["run", "digits-b0c5", "--dry-run", "--set", "train.epochs=3", "--seed", "1"]
    lines = printed(words, capsys)
    assert lines[0] == "digits-b0c5: 10 classes in 2 tasks (5 + 5)"
    assert lines[1] == "method    csc, seed 1, train.epochs=3"
    assert lines[2].endswith("(will be made)")
    assert lines[3:] == ["task 1    to run", "task 2    to run"]
    assert contents(cwd) == before


def test_a_missing_extra_is_one_line_that_names_it(tmp_path: Path):
    code = "import sys; sys.modules['kfp'] = None; from csc.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "compile", "voc-b0c4", "-o", "v.yaml"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    said = "csc: not installed: kfp; run: pip install 'csc-mlcil[pipelines]', or [all] for everything\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_ui_refuses_a_port_that_is_taken(cwd: Path, capsys: pytest.CaptureFixture[str]):
    (cwd / "work").mkdir()
    (cwd / "work" / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} (Address already in use)" in refused(["ui", "--port", str(port)], cwd, capsys)


def test_ui_finds_a_free_port_if_asked_for_port_0(cwd: Path, monkeypatch: pytest.MonkeyPatch):
    def start(words: list[str], **_: object) -> None:
        raise InterruptedError(words[words.index("--port") + 1])

    (cwd / "work").mkdir()
    (cwd / "work" / "mlflow.db").touch()
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(InterruptedError, match=r"^[1-9]\d+$"):
        cli.main(["ui", "--port", "0"])


def next_command(lines: list[str]) -> tuple[str, str]:
    """The scenario and the data that the last line proposes."""
    match = re.fullmatch(r"next: csc run (\S+) --data (\S+)", lines[-1])
    assert match, lines[-1]
    return match[1], match[2]


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_ingest_voc_prints_the_counts_and_what_to_do_next(form: str, cwd: Path, capsys: pytest.CaptureFixture[str]):
    source = make_voc(cwd / "voc-raw").parent
    if form == "zip":
        source = zipped(source, cwd / "voc.zip")
    lines = printed(["ingest", "voc2007", "--source", str(source), "--out", "voc"], capsys)
    assert lines[0].startswith("ingest · 10 images · ")
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["train", "6", "images", "(published:", "5,011),"],
        ["test", "4", "images", "(published:", "4,952),"],
    ]
    assert "note: train: 6 images (published: 5,011)" in lines
    assert any("20 classes · fingerprint" in line for line in lines)
    assert next_command(lines) == ("voc-b0c4", "voc")
    ingest(*next_command(lines))


def test_ingest_voc_says_what_it_left_out(cwd: Path, capsys: pytest.CaptureFixture[str]):
    voc = make_voc(cwd / "voc-raw")
    write_voc_xml(voc, "000008", [("zebra", False)])
    arguments = ["ingest", "voc2007", "--source", str(voc), "--out", "voc"]
    assert cli.main(arguments) == 2
    assert "'zebra'" in capsys.readouterr().err
    lines = printed([*arguments, "--skip-bad"], capsys)
    assert lines[3].split()[:2] == ["test", "3"]
    assert any(line.startswith("note: left out 1 images") and "000008" in line for line in lines)


@pytest.mark.parametrize("name", ["custom", "my-set", "2024_v1.5"])
def test_ingest_coco_prints_the_counts_and_what_to_do_next(name: str, cwd: Path, capsys: pytest.CaptureFixture[str]):
    lines = printed(["ingest", "coco", "--source", "raw", "--out", "out", "--name", name], capsys)
    assert [line.split(", ")[1] for line in lines[1:3]] == ["6 with a label", "4 with a label"]
    assert not [line for line in lines if "published" in line or line.startswith("note:")]
    assert next_command(lines) == (f"{name}-b0c2", "out")
    ingest(*next_command(lines))


@pytest.mark.parametrize("name", ["Animals", "ANIMALS"])
def test_a_name_with_capitals_is_refused_or_can_be_run(name: str, cwd: Path, capsys: pytest.CaptureFixture[str]):
    code = cli.main(["ingest", "coco", "--source", "raw", "--out", "out", "--name", name])
    captured = capsys.readouterr()
    if code == 0:
        ingest(*next_command(captured.out.splitlines()))
    else:
        assert name in captured.err
        assert not (cwd / "out").exists()


def test_ingest_coco2014_prints_the_counts_and_what_to_do_next(cwd: Path, capsys: pytest.CaptureFixture[str]):
    make_coco(cwd / "coco-raw", COCO_CLASSES)
    lines = printed(["ingest", "coco2014", "--source", "coco-raw", "--out", "coco"], capsys)
    assert "train        6 images (published: 82,783), 6 with a label (published: 82,081)" in lines
    assert "note: test: 4 images (published: 40,504)" in lines
    assert any("80 classes · fingerprint" in line for line in lines)
    assert next_command(lines) == ("coco-b0c10", "coco")


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_ingest_scales_images_and_goes_on_where_it_stopped(
    workers: str, cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("csc.data.ingest.writer.WriteOptions", functools.partial(WriteOptions, shard_rows=4))
    arguments = ["ingest", "coco", "--source", "raw", "--out", "out", "--short-side", "20", "--workers", workers]
    with monkeypatch.context() as stopped:
        stopped.setattr(Output, "finish", interrupted)
        assert cli.main(arguments) == 130
    assert "the same command resumes the work" in capsys.readouterr().err
    lines = printed(arguments, capsys)
    assert lines[0] == "an earlier attempt has finished 3 of 3 shards; resuming"
    assert lines[1].startswith("ingest · 0 images")
    source = Dataset.open("out").source
    assert (source["short_side"], source["jpeg_quality"]) == (20, 90)
    assert printed(arguments, capsys)[0].startswith("compare with what is there · 10 images")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ingest_digits_prints_the_counts_and_what_to_do_next(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(digits, "ingest_digits", functools.partial(digits.ingest_digits, train=40, test=5))
    lines = printed(["ingest", "digits", "--out", "scenes"], capsys)
    assert [line.split()[:2] for line in lines[1:3]] == [["train", "40"], ["test", "5"]]
    assert next_command(lines) == ("digits-b0c2", "scenes")
    ingest(*next_command(lines))


def test_ingest_digits_refuses_a_folder_with_another_data_set(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(digits, "ingest_digits", functools.partial(digits.ingest_digits, train=40, test=5))
    line = refused(["ingest", "digits", "--out", "animals"], cwd, capsys)
    assert "animals: already contains another data set" in line


@pytest.mark.parametrize("name", ["empty", "animals"])
def test_ingest_into_the_present_folder_makes_a_data_set_or_leaves_everything(
    name: str, cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(cwd / name)
    arguments = ["ingest", "coco", "--source", "../raw", "--out", ".", "--name", "animals"]
    before = contents(cwd)
    if cli.main(arguments) == 0:
        assert Dataset.open(cwd / name).labels().num_rows == 10
    else:
        assert capsys.readouterr().err.startswith("csc: ")
        assert contents(cwd) == before


@pytest.mark.parametrize(
    ("arguments", "announced", "tasks"),
    [
        (["digits-b0c5"], "digits-b0c5: 10 classes in 2 tasks (5 + 5)", 2),
        (["Animals-b1c2", "--data", "animals"], "animals-b1c2: 4 classes in 3 tasks (1 + 2 + 1); the last", 3),
    ],
)
def test_compile_writes_a_pipeline(
    arguments: list[str], announced: str, tasks: int, cwd: Path, capsys: pytest.CaptureFixture[str]
):
    lines = printed(["compile", *arguments, "-o", "deep/down/some.yaml"], capsys)
    assert lines[0].startswith(announced)
    assert lines[-1] == "wrote deep/down/some.yaml"
    pipeline, *_ = yaml.safe_load_all((cwd / "deep" / "down" / "some.yaml").read_text())
    steps = pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert len(steps) == tasks + 2  # and ingest and report
    assert pipeline["pipelineInfo"]["name"] == f"csc-{Scenario.parse(arguments[0]).name}"


def test_compile_writes_the_same_file_again(cwd: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("one.yaml", "other.yml"):
        printed(["compile", "digits-b0c5", "-o", name], capsys)
    assert (cwd / "one.yaml").read_bytes() == (cwd / "other.yml").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model folder with untrained weights."""
    from csc.methods import build_head
    from csc.model import ModelCard, save_network
    from csc.nets.backbone import build_backbone, normalisation
    from csc.nets.network import Network

    config = resolve("digits", {"input": {"size": 32}, "method": "lwf"})
    backbone = build_backbone(config.backbone)
    mean, std = normalisation(backbone)
    card = ModelCard(
        method="lwf",
        scenario="digits-b0c2",
        task=1,
        tasks=5,
        classes=("0", "1"),
        new=("0", "1"),
        config=json.loads(config.to_json()),
        initialisation={"text": "scratch"},
        mean=mean,
        std=std,
        data_fingerprint="",
        prior_fingerprint="",
        code_version="",
    )
    folder = tmp_path_factory.mktemp("model")
    save_network(Network(backbone, build_head(config, backbone.channels, (2,)), mean, std), card, folder)
    return folder


def test_predict_prints_a_line_per_image_with_the_classes_above_the_threshold(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
):
    lines = printed(["predict", str(model), "a.jpg", "a.jpg", "--threshold", "0"], capsys)
    assert len(lines) == 2
    assert lines[0] == lines[1]
    image, found = lines[0].split("\t")
    assert image == "a.jpg"
    assert {part.split()[0] for part in found.split(", ")} == {"0", "1"}
    assert printed(["predict", str(model), "a.jpg", "--threshold", "1"], capsys) == ["a.jpg\t(nothing)"]


def test_predict_refuses_what_is_not_an_image(model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]):
    line = refused(["predict", str(model), "a.jpg", "text.jpg"], cwd, capsys)
    assert "text.jpg" in line
    assert "image" in line


def test_predict_refuses_an_image_too_large_to_decode(
    model: Path, cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert "a.jpg" in refused(["predict", str(model), "a.jpg"], cwd, capsys)


def test_predict_refuses_a_model_with_broken_weights(model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(model, "model")
    (cwd / "model" / "model.safetensors").write_bytes(b"no weights")
    line = refused(["predict", "model", "a.jpg"], cwd, capsys)
    assert "model.safetensors" in line


def test_an_interrupted_command_says_that_it_can_be_taken_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(lists, "SCENARIOS", dataclasses.replace(lists.SCENARIOS, run=interrupted))
    assert cli.main(["scenarios"]) == 130
    error = capsys.readouterr().err
    assert error.startswith("csc: interrupted")
    assert len(error.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error():
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    code = "import sys; from csc.cli import main; sys.stdin.read(); sys.exit(main(['methods']))"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    ) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
