"""A scenario with every step in its container: the same numbers as in processes, and nothing left behind."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from csc.data.ingest.digits import ingest_digits
from tests.docker.conftest import Engine
from tests.integration.conftest import command, last_results
from tests.integration.conftest import scenes as scenes  # a fixture

if TYPE_CHECKING:
    from tests.mlflow_server import Servers

pytest_plugins = ["tests.s3", "tests.mlflow_server"]
pytestmark = pytest.mark.docker
SCENARIO = "digits-b0c2"
STEPS = 1 + 5 * 5 + 1  # ingest, five of each task, report


@pytest.fixture(scope="module")
def profile(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile that names the images of the tests."""
    file = tmp_path_factory.mktemp("profile") / "images.yaml"
    file.write_text(yaml.safe_dump({"images": images}))
    return file


def environment(engine: Engine) -> dict[str, str]:
    hidden = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID")
    return {name: value for name, value in engine.environment.items() if name not in hidden}


def run(engine: Engine, *words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command("run", *words), capture_output=True, text=True, env=environment(engine), timeout=1200)


@pytest.fixture(scope="module")
def in_processes(engine: Engine, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of the same run in processes."""
    workdir = tmp_path_factory.mktemp("processes")
    done = run(engine, SCENARIO, "--data", scenes, "--workdir", workdir)
    assert done.returncode == 0, done.stdout + done.stderr
    return workdir


@pytest.fixture(scope="module")
def in_containers(
    engine: Engine, scenes: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The work folder of a run in containers, and what it printed."""
    _let_others_in(scenes)
    workdir = tmp_path_factory.mktemp("containers")
    _let_others_in(workdir)
    words = (SCENARIO, "--data", scenes, "--workdir", workdir, "--runner", "docker", "--profile", profile)
    done = run(engine, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return workdir, done.stdout


def _let_others_in(folder: Path) -> None:
    """pytest's folders are closed to others, so also to the images' user."""
    for above in folder.parents:
        if above.name.startswith("pytest-"):
            above.chmod(0o755)
    folder.chmod(0o755)


def user_of_the_steps() -> int:
    return os.getuid() or 10001


def test_containers_compute_the_same_numbers_as_processes(in_processes: Path, in_containers: tuple[Path, str]):
    numbers = last_results(in_containers[0])
    assert len(numbers) == 5
    assert numbers == last_results(in_processes)


def test_a_person_sees_the_steps_and_their_lines(in_containers: tuple[Path, str]):
    printed = in_containers[1]
    assert printed.count("done in") == STEPS
    assert re.search(r"task 5/5 · epoch 2/2 · .* images/s", printed)
    assert "task 5/5: models:/digits-b0c2-csc/5 (alias task-05)" in printed
    assert "models:/digits-b0c2-csc@final" in printed


def test_what_steps_wrote_belongs_to_their_user_and_no_container_is_left(
    engine: Engine, in_containers: tuple[Path, str]
):
    workdir = in_containers[0]
    written = [workdir / "mlflow.db", workdir / "mlflow-artifacts", workdir / "pipeline"]
    written += [path for folder in written[1:] for path in folder.rglob("*")]
    assert len(written) > 100
    assert {path.stat().st_uid for path in written} == {user_of_the_steps()}
    assert engine("ps", "--all", "--quiet", f"--filter=label=csc.workdir={workdir}").stdout == ""


def test_registered_models_name_the_versions_they_were_trained_with(in_containers: tuple[Path, str]):
    (first, *_) = (in_containers[0] / "mlflow-artifacts").rglob("requirements.txt")
    assert re.search(r"^torch==\d", first.read_text(), re.MULTILINE)


def test_a_second_run_reuses_every_step_and_ends_what_a_killed_one_has_left_running(
    engine: Engine, images: dict[str, str], scenes: Path, profile: Path, in_containers: tuple[Path, str]
):
    left = [f"--label=csc.workdir={in_containers[0]}", "--label=csc.run=killed", "--network=none"]
    engine("run", "--detach", *left, "--entrypoint=sleep", images["cpu"], "1000")
    words = ("--data", scenes, "--workdir", in_containers[0], "--runner", "docker", "--profile", profile)
    done = run(engine, SCENARIO, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"reused from earlier runs: {STEPS - 1} of {STEPS} steps" in done.stdout
    assert engine("ps", "--all", "--quiet", f"--filter=label=csc.workdir={in_containers[0]}").stdout == ""


def test_a_refusal_inside_a_container_is_one_line(engine: Engine, scenes: Path, profile: Path, tmp_path: Path):
    _let_others_in(tmp_path)
    words = ("--workdir", tmp_path / "work", "--runner", "docker", "--profile", profile, "--set", "init=/no/weights")
    done = run(engine, SCENARIO, "--data", scenes, *words)
    assert done.returncode == 2
    assert re.fullmatch(r"csc: .*/no/weights.*\n", done.stderr)


def test_a_run_on_servers_killed_while_a_container_works_is_taken_up_without_it(
    engine: Engine, servers: "Servers", bucket: str, profile: Path, tmp_path: Path
):
    ingest_digits(f"{bucket}/digits", train=240, test=80, size=32)
    _let_others_in(tmp_path)
    workdir = tmp_path / "work"
    outside = environment(engine) | servers.store.environment() | {"MLFLOW_TRACKING_URI": servers.tracking.uri}
    folders = ("--data", f"{bucket}/digits", "--workdir", workdir)
    words = command("run", "digits-b0c5", *folders, "--runner", "docker", "--profile", profile)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=outside, start_new_session=True) as victim:
        assert any("task 1/2 · epoch 1/2" in line for line in victim.stdout)
        os.killpg(victim.pid, signal.SIGKILL)
    label = f"--filter=label=csc.workdir={workdir}"
    assert len(engine("ps", "--quiet", label).stdout.split()) == 1  # it works on
    done = subprocess.run(words, capture_output=True, text=True, env=outside, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "task 1 · split-labels    reused" in done.stdout
    assert len(last_results(workdir)) == 2
    assert engine("ps", "--all", "--quiet", label).stdout == ""
    assert not list(workdir.glob("mlflow*"))  # all of it is on the server


def test_a_folder_of_somebody_else_is_refused_with_what_to_do(
    engine: Engine, scenes: Path, profile: Path, in_processes: Path
):
    if os.getuid() != 0:
        pytest.skip("only root runs steps as another user")
    words = ("--data", scenes, "--workdir", in_processes, "--runner", "docker", "--profile", profile)
    done = run(engine, SCENARIO, *words)
    assert done.returncode == 2
    assert f"hand it over with 'chown -R 10001:10001 {in_processes}'" in done.stderr


def test_a_missing_image_is_one_line(engine: Engine, scenes: Path, tmp_path: Path):
    profile = tmp_path / "profile.yaml"
    profile.write_text("images: {cpu: 127.0.0.1:9/no-such-image:1}\n")
    words = ("--data", scenes, "--workdir", tmp_path / "work", "--runner", "docker", "--profile", profile)
    done = run(engine, SCENARIO, *words)
    assert done.returncode == 2
    assert "there is no image 127.0.0.1:9/no-such-image:1, here or in a registry" in done.stderr
