"""The two images: who runs in them, what they say of themselves, what is in them and what is not."""

import json
import re
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import csc
from csc.pipelines.profile import read_profile
from csc.version import code_version
from tests.docker.conftest import Engine

pytestmark = pytest.mark.docker
KINDS = ("cpu", "train")
LARGEST = {"cpu": 0.9e9, "train": 7.5e9}
# As a cluster may hold a container: an arbitrary user, nothing to write to but /tmp, no network, no capabilities.
HELD = ("--rm", "--read-only", "--tmpfs=/tmp", "--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges")


def wait_until_answered(address: str, seconds: float = 90) -> None:
    """Wait for a server that is starting."""
    until = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until, f"no answer from {address}"
            time.sleep(0.5)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def inspected(engine: Engine, images: dict[str, str], kind: str) -> dict:
    return json.loads(engine("image", "inspect", images[kind]).stdout)[0]


def test_an_image_runs_as_a_numbered_user_and_says_what_it_is(inspected: dict, kind: str):
    config = inspected["Config"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", config["User"])
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    assert labels["title"] == f"csc-{kind}"
    assert labels["version"] == csc.__version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", labels["revision"])
    assert config["Cmd"] == ["csc", "doctor"]


def test_an_image_holds_no_secret_no_wheels_and_no_installer(engine: Engine, images: dict, inspected: dict, kind: str):
    names = {line.partition("=")[0] for line in inspected["Config"]["Env"]}
    assert not [name for name in names if re.search("SECRET|TOKEN|PASSWORD|KEY|AWS|INDEX", name)]
    history = engine("history", "--no-trunc", images[kind]).stdout
    assert "PIP_INDEX_URL" not in history
    look = ("find", "/mnt", "/build", "/opt/venv/bin", "-type", "f")
    found = engine("run", *HELD, images[kind], *look, check=False).stdout
    assert not [path for path in found.split() if path.startswith(("/mnt", "/build", "/opt/venv/bin/pip"))]


def test_an_image_is_not_larger_than_it_should_be(inspected: dict, kind: str):
    print(f"{kind}: {inspected['Size'] / 1e6:.0f} MB")
    assert inspected["Size"] < LARGEST[kind]


@pytest.mark.parametrize("user", ["", "4711:0"], ids=["own user", "any user"])
def test_doctor_finds_nothing_wrong_on_a_read_only_root(engine: Engine, images: dict, kind: str, user: str):
    given = [f"--user={user}"] if user else []
    said = engine("run", *HELD, *given, images[kind]).stdout
    assert f"csc       ok       {code_version()}" in said
    assert f"user {user.partition(':')[0] or 10001}," in said
    assert re.search(r"mlflow +ok", said)
    assert re.search(r"kfp +ok", said)
    assert bool(re.search(r"torch +missing +not in this image", said)) == (kind == "cpu")
    assert "nothing failed" in said


def test_doctor_says_what_to_do_where_nothing_can_be_written(engine: Engine, images: dict):
    done = engine("run", "--rm", "--read-only", "--network=none", images["cpu"], check=False)
    assert done.returncode == 1
    for variable in ("TMPDIR", "HOME", "CSC_CACHE"):
        assert f"(Read-only file system); set {variable} to a folder that can be written" in done.stdout


def test_doctor_says_that_servers_cannot_be_reached_and_shows_no_secret(engine: Engine, images: dict):
    environment = {
        "AWS_ACCESS_KEY_ID": "key-1234",
        "AWS_SECRET_ACCESS_KEY": "hidden-1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_DEFAULT_REGION": "us-east-1",
        "MLFLOW_TRACKING_TOKEN": "hidden-2",
        "MLFLOW_TRACKING_URI": "http://user:hidden-3@127.0.0.1:9",
    }
    given = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    words = ["csc", "doctor", "--data", "s3://bucket/voc"]
    done = engine("run", *HELD, *given, images["cpu"], *words, check=False)
    assert done.returncode == 1
    assert re.search(r"tracking +failed", done.stdout)
    assert re.search(r"data +failed .*the object store at http://127.0.0.1:9 does not answer", done.stdout)
    assert "hidden" not in done.stdout + done.stderr


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A real registry on this machine, and its address."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no registry: 'docker-registry' is not installed")
    from tests.s3 import free_ports

    address = f"127.0.0.1:{free_ports(1)[0]}"
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yaml").write_text(yaml.safe_dump(settings))
    words = [program, "serve", tmp_path / "registry.yaml"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_answered(f"http://{address}/v2/")
            yield address
        finally:
            process.terminate()


def test_push_notes_digests_that_can_be_pulled(engine: Engine, registry: str, tmp_path: Path):
    tags = {kind: f"tiny-{kind}:{csc.__version__}" for kind in KINDS}  # ours would take minutes to compress
    for kind, tag in tags.items():
        with tarfile.open(tmp_path / "content.tar", "w") as archive:
            archive.addfile(tarfile.TarInfo(kind))
        engine("import", str(tmp_path / "content.tar"), tag)
    file = tmp_path / "images.yaml"
    said = engine.make("push", f"REGISTRY={registry}/team", "NAME=tiny", f"DIGESTS={file}")
    profile = read_profile(str(file))
    for kind, image in (("cpu", profile.images.cpu), ("train", profile.images.train)):
        assert re.fullmatch(rf"{re.escape(registry)}/team/tiny-{kind}@sha256:[0-9a-f]{{64}}", image)
        assert image in said
        engine("image", "rm", "--force", image, tags[kind], f"{registry}/team/{tags[kind]}")
        engine("pull", image)
        engine("image", "rm", image)
