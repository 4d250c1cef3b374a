"""Steps in containers, without an engine: what they may see, who they are, how they end, what a person is told."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest

from csc.pipelines.local import containers
from csc.pipelines.local.containers import NoContainer, containers_for
from csc.pipelines.local.lock import exclusive_run
from csc.pipelines.local.steps import RunStep, Step

PACKAGE = """
deploymentSpec:
  executors:
    exec-a: {container: {image: "cpu:1"}}
    exec-b: {container: {image: "train:1"}}
    exec-c: {container: {image: "cpu:1"}}
---
platforms: {}
"""


class Container:
    """A container that prints some bytes and ends."""

    def __init__(self, chunks: list[bytes], code: int, run: str = "") -> None:
        self.chunks, self.code, self.removed = chunks, code, False
        self.labels = {"csc.run": run}

    def logs(self, stream: bool):
        assert stream
        yield from self.chunks

    def wait(self) -> dict[str, int]:
        assert not self.removed
        return {"StatusCode": self.code}

    def stop(self, timeout: int) -> None:
        assert not self.removed
        self.stopped = timeout > 0

    def remove(self, v: bool, force: bool) -> None:
        assert v
        assert force
        self.removed = True


class Engine:
    """What we use of a Docker client."""

    def __init__(
        self, known=("cpu:1", "train:1"), left=(), runtimes=("runc",), container=None, user="10001:10002"
    ) -> None:
        self.known, self.left, self.runtimes, self.user = known, left, runtimes, user
        self.container = container or Container([], 0)
        self.images = SimpleNamespace(get=self.get, pull=self.pull)
        self.containers = SimpleNamespace(list=self.list, run=self.run)

    def ping(self) -> None: ...

    def close(self) -> None: ...

    def info(self) -> dict:
        return {"Runtimes": {name: {} for name in self.runtimes}}

    def get(self, image: str):
        if image not in self.known:
            raise docker.errors.ImageNotFound(image)
        return SimpleNamespace(attrs={"Config": {"User": self.user}})

    def pull(self, image: str) -> None:
        raise docker.errors.APIError("unknown")

    def list(self, all: bool, filters: dict[str, list[str]]):
        self.asked = filters["label"]
        return self.left

    def run(self, image: str, command: Sequence[str], detach: bool, **options: object) -> Container:
        assert detach
        self.options = options
        return self.container


def start_a_step(start: RunStep, **variables: str) -> tuple[int, list[str]]:
    """Run a step; return how it ended and what it printed."""
    lines: list[str] = []
    return start(Step("cpu:1", ["x"], variables), lines.append), lines


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "package.yaml").write_text(PACKAGE)
    return folder


@pytest.fixture(autouse=True)
def somebody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unprivileged user whose environment says nothing."""
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 56)
    for name in containers._environment(tmp_path):
        monkeypatch.delenv(name, raising=False)


def options(monkeypatch, workdir: Path, engine: Engine | None = None, **arguments: str) -> dict:
    """What a container is started with."""
    engine = engine or Engine()
    monkeypatch.setattr(docker, "from_env", lambda: engine)
    given = {"data": str(workdir / "data"), "config": "{}"} | arguments
    with containers_for(workdir / "runs" / "package.yaml", given, workdir) as start:
        start_a_step(start)
    return engine.options


def seen(options: dict) -> list[str]:
    assert options["mounts"][0]["Target"] == "/tmp"
    for mount in options["mounts"][1:]:
        assert mount["Target"] == mount["Source"]
    return [mount["Target"] for mount in options["mounts"][1:]]


def test_a_step_is_held_as_on_a_cluster_and_is_whoever_started_it(monkeypatch, workdir):
    made = options(monkeypatch, workdir)
    assert made["user"] == "1234:56"
    assert made["read_only"]
    assert made["cap_drop"] == ["ALL"]
    assert seen(made) == [str(workdir)]
    assert made["network_mode"] is None
    assert made["device_requests"] == []
    assert options(monkeypatch, workdir, Engine(runtimes=("runc", "nvidia")))["device_requests"]


def test_steps_see_the_data_the_weights_the_database_and_files_that_settings_name(monkeypatch, workdir, tmp_path):
    for folder in ("data", "tracking", "cache"):
        (tmp_path / folder).mkdir()
    for file in ("weights.safetensors", "ca.crt"):
        (tmp_path / file).touch()
    (workdir / "inside").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracking/mlflow.db")
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("CSC_OTHER_FILE", str(workdir / "inside"))
    monkeypatch.chdir(tmp_path)
    made = options(
        monkeypatch, workdir, data=str(tmp_path / "data"), config=json.dumps({"init": "weights.safetensors"})
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "words.npz").touch()
    config = json.dumps({"agcn": {"embeddings": "words.npz"}})
    extension = options(monkeypatch, workdir, data=str(tmp_path / "data"), test=str(tmp_path / "old"), config=config)
    assert {str(tmp_path / name) for name in ("data", "old", "words.npz")} < set(seen(extension))
    names = ("ca.crt", "cache", "data", "tracking", "weights.safetensors", "work")
    assert seen(made) == [str(tmp_path / name) for name in names]
    assert made["working_dir"] == str(tmp_path)


def test_data_in_a_bucket_and_words_that_are_no_files_are_not_mounted(monkeypatch, workdir):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/etc")
    assert seen(options(monkeypatch, workdir, data="s3://bucket/voc", config='{"init": "hub"}')) == [str(workdir)]


def test_files_of_a_bucket_are_kept_in_the_work_folder_unless_another_is_named(monkeypatch, workdir, tmp_path):
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "not there"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nor there"))
    assert options(monkeypatch, workdir)["environment"] == {"CSC_CACHE": str(workdir / "fetched")}
    monkeypatch.setenv("CSC_CACHE", str(tmp_path))
    assert options(monkeypatch, workdir)["environment"] == {"CSC_CACHE": str(tmp_path)}


def test_steps_get_what_reaches_data_and_tracking_and_nothing_else(monkeypatch, workdir):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("GITHUB_TOKEN", "not theirs")
    given = options(monkeypatch, workdir)["environment"]
    assert given.keys() - {"CSC_CACHE"} == {
        "AWS_ACCESS_KEY_ID",
        "MLFLOW_TRACKING_TOKEN",
        "OMP_NUM_THREADS",
        "https_proxy",
    }


@pytest.mark.parametrize(
    ("variable", "value", "network"),
    [
        ("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000", "host"),
        ("MLFLOW_TRACKING_URI", "http://me:pass@localhost:5000/path", "host"),
        ("AWS_ENDPOINT_URL_S3", "http://[::1]:8333", "host"),
        ("MLFLOW_TRACKING_URI", "https://mlflow.example.com", None),
        ("MLFLOW_TRACKING_URI", "sqlite:////somewhere/mlflow.db", None),
    ],
)
def test_servers_of_this_machine_are_reached_through_its_network(monkeypatch, workdir, variable, value, network):
    monkeypatch.setenv(variable, value)
    assert options(monkeypatch, workdir)["network_mode"] == network


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """We are root; what is handed over, and to which user."""
    handed: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: handed.append((Path(path).name, uid, gid)))
    return handed


def test_root_gives_a_new_folder_to_the_user_of_the_image(monkeypatch, workdir, as_root):
    assert options(monkeypatch, workdir)["user"] == "10001:10002"
    assert as_root == [("work", 10001, 10002), ("pipeline", 10001, 10002)]


def test_root_gives_away_no_folder_with_other_things_in_it(monkeypatch, workdir, as_root):
    (workdir / "mlflow.db").touch()
    with pytest.raises(NoContainer, match=r"hand it over with 'chown -R 10001:10002 .*work'"):
        options(monkeypatch, workdir)
    assert as_root == []


@pytest.mark.parametrize("user", ["", "nobody", "nobody:10002"])
def test_root_is_told_of_an_image_whose_user_has_no_number(monkeypatch, workdir, as_root, user):
    with pytest.raises(NoContainer, match=f"the user of image cpu:1 is '{user}', expected numbers such as 10001:1"):
        options(monkeypatch, workdir, Engine(user=user))
    assert as_root == []


def test_a_user_without_a_group_is_in_that_of_root(monkeypatch, workdir, as_root):
    assert options(monkeypatch, workdir, Engine(user="10001"))["user"] == "10001"
    assert as_root == [("work", 10001, 0), ("pipeline", 10001, 0)]


def test_what_killed_runs_left_is_removed_and_what_runs_at_work_have_is_not(monkeypatch, workdir):
    left = {name: Container([], 0, name) for name in ("package", "killed", "at-work")}
    engine = Engine(left=list(left.values()))
    with exclusive_run(workdir, "at-work", {"scenario": "s", "data": "d", "config": "{}"}):
        assert options(monkeypatch, workdir, engine)["labels"] == {"csc.workdir": str(workdir), "csc.run": "package"}
    assert engine.asked == [f"csc.workdir={workdir}"]
    assert {name: container.removed for name, container in left.items()} == {
        "package": True,
        "killed": True,
        "at-work": False,
    }


def test_a_pull_is_announced_before_it_takes_its_time(monkeypatch, workdir, capsys):
    engine = Engine(known=("train:1",))
    said = []
    engine.images.pull = lambda image: said.append(capsys.readouterr().out)
    options(monkeypatch, workdir, engine)
    assert said == ["pulling image cpu:1 …\n"]


def test_a_step_gets_its_own_variables_on_top_of_those_of_all_steps(monkeypatch, workdir):
    engine = Engine()
    monkeypatch.setattr(docker, "from_env", lambda: engine)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    monkeypatch.setenv("CSC_RETRY_TIMES", "9")
    with containers_for(workdir / "runs" / "package.yaml", {"data": "", "config": "{}"}, workdir) as start:
        start_a_step(start, CSC_RETRY_TIMES="3")
        environment, engine.container = engine.options["environment"], Container([], 0)
        start_a_step(start)
    assert (environment["MLFLOW_TRACKING_URI"], environment["CSC_RETRY_TIMES"]) == ("http://mlflow", "3")
    assert engine.options["environment"]["CSC_RETRY_TIMES"] == "9"


def test_a_missing_image_is_named_with_what_to_do(monkeypatch, workdir):
    with pytest.raises(NoContainer, match="there is no image train:1, here or in a registry; build it with 'make imag"):
        options(monkeypatch, workdir, Engine(known=("cpu:1",)))


def test_a_missing_engine_is_one_line(monkeypatch, workdir):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{workdir}/no.sock")
    runner = containers_for(workdir / "runs" / "package.yaml", {}, workdir)
    with pytest.raises(NoContainer, match="is the engine running and may you use it"), runner:
        pass


@pytest.mark.parametrize("code", [0, 1, 137])
def test_output_comes_line_by_line_and_then_the_exit_code(monkeypatch, workdir, code):
    middle_dot = "task 1 · done\n".encode()
    container = Container([middle_dot[:8], middle_dot[8:] + b"one\ntwo", b"\nlast"], code)
    engine = Engine(container=container)
    monkeypatch.setattr(docker, "from_env", lambda: engine)
    with containers_for(workdir / "runs" / "package.yaml", {"data": "", "config": "{}"}, workdir) as start:
        assert start_a_step(start) == (code, ["task 1 · done", "one", "two", "last"])
    assert container.removed


def test_an_interrupted_container_is_stopped_and_removed(monkeypatch, workdir):
    class Interrupted(Container):
        def logs(self, stream: bool):
            raise KeyboardInterrupt

    container = Interrupted([], 0)
    with pytest.raises(KeyboardInterrupt):
        containers._run_to_its_end(Engine(container=container), Step("cpu:1", ["x"], {}), print, {})
    assert container.stopped
    assert container.removed
