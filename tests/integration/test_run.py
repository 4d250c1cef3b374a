"""A scenario through the compiled pipeline: results, tracking, registry, reuse; kills are in `tests/faults`."""

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request

import pytest

from tests.integration.conftest import command, csc, environment, inside, last_results

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]

NAME = "digits-b0c4-csc"


@pytest.fixture
def client(undisturbed):
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{undisturbed[0]}/mlflow.db")


def runs(client):
    """Parents and children of the one experiment, by role."""
    experiment = client.get_experiment_by_name("csc-digits")
    found = client.search_runs([experiment.experiment_id])
    role = {"scenario": [], "task": []}
    for run in found:
        role[run.data.tags["csc.role"]].append(run)
    return role["scenario"], sorted(role["task"], key=lambda run: run.data.tags["csc.task"])


def test_run_ends_in_a_table_with_one_row_per_task_and_says_where_to_look(undisturbed):
    workdir, printed = undisturbed
    assert "10 classes in 3 tasks (4 + 4 + 2); the last task is smaller" in printed
    table = printed[printed.index("mAP  CF1") if "mAP  CF1" in printed else printed.index(" task ") :]
    results = last_results(workdir)
    assert len(results) == 3
    for word in ("average", f"{results[-1]['mAP']:.1f}", "initialisation scratch", "seed 0"):
        assert word in table
    (page,) = workdir.glob("digits-b0c4-csc-seed0-*.html")
    assert page.read_text().startswith("<!")
    assert f"models:/{NAME}@final" in printed
    assert list((workdir / "checkpoints").iterdir()) == []


def test_tracking_has_one_parent_with_the_curve_and_one_child_per_task(client):
    (parent,), children = runs(client)
    assert len(children) == 3
    assert [metric.step for metric in client.get_metric_history(parent.info.run_id, "mAP")] == [1, 2, 3]
    assert {"avg_mAP", "last_mAP", "last_CF1", "last_OF1"} <= set(parent.data.metrics)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["cigcn.width"] == "16"
    for child in children:
        assert child.info.status == "FINISHED"
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert [metric.step for metric in client.get_metric_history(child.info.run_id, "train/loss")] == [1, 2]
        names = {item.dataset.name for item in child.inputs.dataset_inputs}
        assert {name.split()[-1] for name in names} == {"train", "test"}
    for tag in ("csc.scenario", "csc.method", "csc.seed", "csc.data", "csc.code_version", "csc.initialisation"):
        assert parent.data.tags[tag]


def test_models_are_registered_with_aliases_and_the_model_before_as_input(client):
    _, children = runs(client)
    before = None
    for number, child in enumerate(children, start=1):
        version = client.get_model_version_by_alias(NAME, f"task-{number:02d}")
        assert int(version.version) == number
        (output,) = child.outputs.model_outputs
        assert version.source == f"models:/{output.model_id}"
        inputs = [item.model_id for item in client.get_run(child.info.run_id).inputs.model_inputs]
        assert inputs == ([] if before is None else [before])
        before = output.model_id
        assert client.get_logged_model(before).status == "READY"
    assert int(client.get_model_version_by_alias(NAME, "final").version) == 3


def test_registered_model_works_by_itself_and_holds_no_pickle(undisturbed, scenes, tmp_path):
    workdir, _ = undisturbed
    image = tmp_path / "scene.jpg"
    from csc.data.shards import ImageShards

    image.write_bytes(ImageShards(scenes / "images").jpeg(0, 0))
    program = (
        "import mlflow, sys; mlflow.set_tracking_uri(sys.argv[1])\n"
        f"answer = mlflow.pyfunc.load_model('models:/{NAME}@final').predict([sys.argv[2]])\n"
        "assert list(answer.columns) == list('0123456789'), answer.columns\n"
        "assert answer.shape == (1, 10) and ((answer >= 0) & (answer <= 1)).all().all()\n"
        "import csc; assert 'code' in csc.__file__.split('/'), csc.__file__  # its own code, not what is installed\n"
    )
    script = tmp_path / "use_model.py"
    script.write_text(program)
    uri = f"sqlite:///{workdir}/mlflow.db"
    done = subprocess.run(
        [*command("x")[:1], script, uri, image], capture_output=True, text=True, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0, done.stderr
    for file in (workdir / "mlflow-artifacts").rglob("*"):
        assert file.suffix not in (".pkl", ".pt", ".pth", ".bin"), file
        if file.is_file():
            assert not file.read_bytes()[:2].startswith((b"\x80\x04", b"\x80\x05", b"PK")), file


def test_predict_names_classes_with_confidences(undisturbed, scenes, tmp_path):
    workdir, _ = undisturbed
    from csc.data.shards import ImageShards

    image = tmp_path / "scene.jpg"
    image.write_bytes(ImageShards(scenes / "images").jpeg(0, 1))
    done = inside("predict", f"models:/{NAME}@final", image, "--threshold", "0", "--workdir", workdir)
    assert done.returncode == 0, done.stderr
    name, found = done.stdout.strip().split("\t")
    assert name == str(image)
    assert len(found.split(", ")) == 10


def test_ui_serves_the_runs_of_the_work_folder(undisturbed):
    workdir, _ = undisturbed
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = command("ui", "--workdir", workdir, "--port", port)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(), start_new_session=True
    ) as server:
        try:
            line = next(line for line in server.stdout if line.startswith("MLflow on "))
            address = line.split()[2]
            assert address == f"http://127.0.0.1:{port}"
            question = f"{address}/api/2.0/mlflow/experiments/get-by-name?experiment_name=csc-digits"
            with urllib.request.urlopen(question, timeout=30) as reply:  # it answers as soon as it says so
                found = json.load(reply)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    assert found["experiment"]["name"] == "csc-digits"


def test_show_prints_a_run_however_it_is_named(undisturbed, scenes):
    workdir, _ = undisturbed
    names = ([], ["digits-b0c4"], [NAME], [f"models:/{NAME}/2"])
    shown = [inside("show", *name, "--workdir", workdir) for name in names]
    assert {done.stdout for done in shown} == {shown[0].stdout}
    lines = shown[0].stdout.splitlines()
    assert re.match(r"digits-b0c4 · csc · .* · seed 0 · finished · started 20", lines[0])
    assert lines[1] == "settings  backbone.name=test_byobnet · cigcn.width=16 · input.size=32 · train.epochs=2"
    assert lines[2] == f"model     models:/{NAME}/3"
    tasks = last_results(workdir)
    last, first = tasks[-1]["AP"]["0"], tasks[0]["AP"]["0"]
    assert any(re.fullmatch(rf" 0  [▁-█]{{3}} +{first:.1f} → +{last:.1f}  \(.*\)", line) for line in lines)
    assert re.fullmatch(rf" 9    [▁-█] +{tasks[-1]['AP']['9']:.1f}", lines[-1])
    unknown = inside("show", "voc-b0c4", "--workdir", workdir)
    assert (unknown.returncode, "no run 'voc-b0c4'" in unknown.stderr) == (2, True)
    plan = inside(*command("run", "digits-b0c4", "--data", scenes, "--workdir", workdir, "--dry-run")[3:])
    assert [f"task {number}    finished, mAP {task['mAP']:.1f}" for number, task in enumerate(tasks, 1)] == (
        plan.stdout.splitlines()[-3:]
    )


def test_second_call_reuses_every_step_and_adds_nothing(undisturbed, scenes, client):
    workdir, _ = undisturbed
    expected = last_results(workdir)
    done = csc("run", "digits-b0c4", "--data", scenes, "--workdir", workdir)
    assert done.returncode == 0, done.stderr
    assert "task 3 · train           reused" in done.stdout
    assert "reused from earlier runs: 16 of 17 steps" in done.stdout
    parents, children = runs(client)
    assert (len(parents), len(children)) == (1, 3)
    assert len(client.search_model_versions(f"name = '{NAME}'")) == 3
    assert last_results(workdir) == expected


def flip_a_byte(workdir, step, output):
    """Change the newest output of a step in the middle."""
    path = max(workdir.glob(f"pipeline/*/*/{step}/{output}"), key=lambda path: path.stat().st_mtime)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_artifacts_that_change_between_two_runs_are_made_again_and_the_numbers_stay(undisturbed, scenes, client):
    workdir, _ = undisturbed
    words = ("run", "digits-b0c4", "--data", scenes, "--workdir", workdir)
    expected = last_results(workdir)
    damages = [
        {
            ("task 1 · split-labels", "split"): ("split-labels", "split"),
            ("task 1 · evaluate", "scores"): ("evaluate", "scores/scores.parquet"),
            ("task 2 · build-dataset", "train_view"): ("build-dataset-2", "train_view"),
            ("task 2 · evaluate", "metrics"): ("evaluate-2", "metrics"),
            ("task 3 · build-dataset", "test_view"): ("build-dataset-3", "test_view"),
            ("task 3 · register", "registered"): ("register-3", "registered"),
        },
        {("task 2 · train", "model"): ("train-2", "model/model.safetensors")},
    ]
    for damage in damages:
        for step, output in damage.values():
            flip_a_byte(workdir, step, output)
        done = csc(*words)
        assert done.returncode == 0, done.stderr
        for step, output in damage:
            assert f"{step}: {output} has changed since it was written; the step runs again" in done.stdout
        assert done.stdout.count("has changed since it was written") == len(damage)
        assert "task 1 · train           reused" in done.stdout
        assert last_results(workdir) == expected
    assert len(client.search_model_versions(f"name = '{NAME}'")) == 3
