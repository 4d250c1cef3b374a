"""docs/kfp.md: kfp's own command line, kfp.local and components as functions, run as the page has them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from csc.cli import _parser
from csc.data.ingest.digits import ingest_digits
from csc.pipelines.scenario import compile_pipeline
from csc.scenario import Scenario
from tests.kfp_server import TOKEN, KfpServer, parse_strictly, running

pytest_plugins = ["tests.cluster"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine")]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kfp.md").read_text()
FILE, LOCAL, FUNCTION = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KFP = [shlex.split(line) for line in re.findall(r"^\$ kfp (.*)$", PAGE, re.MULTILINE)]
CSC = re.findall(r"^\$ csc (.*)$", PAGE, re.MULTILINE)
HOST = "https://kubeflow.example.com/pipeline"

Csc = Callable[..., tuple[int, list[str], str]]


def run(*words: object, **more: str) -> "subprocess.CompletedProcess[str]":
    """A command in the present folder, which is also home: kfp keeps notes there."""
    environment = {**os.environ, "HOME": str(Path.cwd()), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment, timeout=300)


def kfp(*words: object) -> "subprocess.CompletedProcess[str]":
    return run(Path(sys.executable).with_name("kfp"), *words)


def compiled(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(Path(file).read_text()))


@pytest.fixture
def profile(tmp_path: Path) -> None:
    """The profile that the page names."""
    text = (ROOT / "pipelines/profiles/kubeflow.yaml").read_text()
    (tmp_path / "my-cluster.yaml").write_text(text.replace("registry.example.com", "registry.internal"))


def test_the_commands_of_the_page_are_found():
    assert [words[:2] for words in KFP] == [["dsl", "compile"], ["--endpoint", HOST], ["--endpoint", HOST]]
    for command in CSC:
        _parser().parse_args(shlex.split(command))


def test_kfp_compiles_the_shipped_file():
    assert (ROOT / "pipelines/digits.py").read_text().endswith(FILE)
    words = [ROOT / word if word.startswith("pipelines/") else word for word in KFP[0]]
    done = kfp(*words)
    assert done.returncode == 0, done.stderr
    assert f"saved to {Path.cwd()}/digits.yaml" in done.stdout
    compile_pipeline(Scenario.parse("digits-b0c2"), 10, Path("ours.yaml"), on_cluster=True)
    spec, ours = parse_strictly(compiled("digits.yaml")), parse_strictly(compiled("ours.yaml"))
    assert spec.root.input_definitions == ours.root.input_definitions
    assert list(spec.root.dag.tasks) == list(ours.root.dag.tasks)
    assert len(Path("digits.yaml").read_text()) > 3 * len(Path("ours.yaml").read_text())


def test_kfp_compiles_a_file_with_a_profile(profile: None):
    with_profile = FILE.replace("on_cluster=True", 'on_cluster=True, profile=read_profile("my-cluster.yaml")')
    Path("mine.py").write_text(f"from csc.pipelines.profile import read_profile\n{with_profile}")
    done = kfp("dsl", "compile", "--py", "mine.py", "--output", "mine.yaml")
    assert done.returncode == 0, done.stderr
    documents = compiled("mine.yaml")
    parse_strictly(documents)
    images = {one["container"]["image"] for one in documents[0]["deploymentSpec"]["executors"].values()}
    assert images == {"registry.internal/csc-cpu:latest", "registry.internal/csc-train:latest"}
    assert "csc-mlflow" in Path("mine.yaml").read_text()


def created(words: list[str], server: KfpServer, *more: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of the page against a server."""
    return kfp(*more, *(server.host if word == HOST else word for word in words))


def test_kfp_starts_a_run_of_what_csc_compiles(profile: None, csc: Csc):
    code, _, error = csc(*shlex.split(CSC[0]))
    assert (code, error) == (0, "")
    with running(KfpServer()) as server:
        done = created(KFP[1], server)
        assert done.returncode == 0, done.stderr
        (run_id,) = server.runs
        assert f"Run details: {server.host}/#/runs/details/{run_id}" in done.stdout
        assert server.runs[run_id]["display_name"] == "first"
        sent = server.runs[run_id]["pipeline_spec"]
        assert [sent["pipeline_spec"], sent["platform_spec"]] == compiled("digits.yaml")
        defaults = sent["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
        assert json.loads(defaults["config"]["defaultValue"])["train"] == {"epochs": 1}
        assert (defaults["data"]["defaultValue"], defaults["gpus"]["defaultValue"]) == ("s3://csc/data/digits", "1")
        code, lines, error = csc("status", run_id, "--host", server.host)
        assert (code, error) == (0, "")
        assert lines[1:3] == ["ingest                   succeeded after 48 s", "task 1 · split-labels    running"]


def test_arguments_that_kfp_is_given_arrive_as_text(profile: None, csc: Csc):
    csc(*shlex.split(CSC[0]))
    with running(KfpServer()) as server:
        done = created(KFP[2], server)
        assert done.returncode == 0, done.stderr
        (started,) = server.runs.values()
        assert started["runtime_config"]["parameters"] == {
            "data": "s3://csc/data/digits",
            "gpus": "2",
            "config": '{"train": {"epochs": 2}}',
        }
        done = created([*KFP[1], "gpus=2"], server)
        assert done.returncode == 1
        assert "(400)" in done.stderr
        assert "'gpus' has another type" in done.stderr
        assert len(server.runs) == 1


def test_kfp_with_a_token_and_a_namespace(profile: None, csc: Csc):
    csc(*shlex.split(CSC[0]))
    with running(KfpServer(token=TOKEN, multi_user=True)) as server:
        done = created(KFP[1], server, "--existing-token", TOKEN, "--namespace", "team")
        assert done.returncode == 0, done.stderr
        assert [one["namespace"] for one in server.experiments.values()] == ["team"]
        assert len(server.runs) == 1


@pytest.fixture
def digits(tmp_path: Path) -> None:
    """A small data set where the page has one."""
    ingest_digits(tmp_path / "data" / "digits", train=60, test=30, size=32)


def test_kfp_local_runs_the_pipeline_in_a_script(digits: None):
    report = "import json\nprint(json.dumps([run.outputs['table'], run.outputs['page'].path]))\n"
    Path("script.py").write_text(LOCAL.replace("b0c5", "b0c10") + report)  # one task: kfp starts Python for each step
    done = run(sys.executable, "script.py", MLFLOW_TRACKING_URI="sqlite:///mlflow.db")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    table, page = json.loads(done.stdout.splitlines()[-1])
    assert table in done.stdout
    assert table.startswith(" digits-b0c10 · csc\n")
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in table
    assert "<html" in Path(page).read_text()
    assert Path("mlflow.db").is_file()


def test_a_component_is_a_function(digits: None):
    done = run(sys.executable, "-c", FUNCTION)
    assert done.returncode == 0, done.stderr
    (said,) = re.findall(r"print\(.*\)  # (.*)", FUNCTION)
    assert done.stdout.splitlines()[-1] == said
