"""A container engine, and our images built by it, for tests that `make test-docker` runs.

An engine that answers is used as it is. Otherwise one is started for the tests alone, and installed first where that is
possible: as root on Debian. The base image is made of Debian's packages, the wheels come from the package index once,
and the images are then built without any network. CSC_TEST_BASE and CSC_TEST_WHEELHOUSE name a base image and a folder
of wheels to use instead.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.debian import install

ROOT = Path(__file__).parents[2]
NAME = "csc-test"  # images of a person on the same engine keep their names
BASE = f"{NAME}-base:latest"
DISK = 18e9
PACKAGES = ["docker.io", "iptables", "mmdebstrap", "docker-registry"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("markexpr") == "docker"
    for item in items:
        if item.path.parent == Path(__file__).parent and not asked:
            item.add_marker(pytest.mark.skip(reason="containers, left out: 'make test-docker' runs them"))


@dataclass(frozen=True)
class Engine:
    """A running engine, and a client that can build images with it."""

    program: str
    host: str

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that uses this engine."""
        return {**os.environ, "DOCKER": self.program, "NAME": NAME} | ({"DOCKER_HOST": self.host} if self.host else {})

    def __call__(self, *words: str, check: bool = True, **options: object) -> "subprocess.CompletedProcess[str]":
        """Call the client."""
        done = subprocess.run([self.program, *words], capture_output=True, text=True, env=self.environment, **options)
        assert done.returncode == 0 or not check, f"docker {' '.join(words)}\n{done.stdout}{done.stderr}"
        return done

    def make(self, *words: str) -> str:
        """Call make in the checkout, and return what it printed."""
        done = subprocess.run(["make", *words], capture_output=True, text=True, env=self.environment, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine of these tests."""
    if shutil.disk_usage(tempfile.gettempdir()).free < DISK:
        pytest.skip(f"the images take {DISK / 1e9:.0f} GB of disk while they are built, and there is less")
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        yield Engine(_client(), os.environ.get("DOCKER_HOST", ""))
        return
    _install()
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="csc-docker-", ignore_cleanup_errors=True))
        )
        yield stack.enter_context(_started(folder))


def _install() -> None:
    """Install whatever is missing, where we may."""
    if os.getuid() != 0:
        pytest.skip("no container engine runs, and only root can start one here")
    if not (shutil.which("dockerd") and shutil.which("mmdebstrap")):
        install(*PACKAGES, missing="no container engine")


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[Engine]:
    """An engine that keeps everything in a folder and leaves the machine's network as it is."""
    host = f"unix://{folder}/docker.sock"
    settings = {"host": host, "data-root": folder / "data", "exec-root": folder / "exec", "pidfile": folder / "pid"}
    options = [f"--{name}={value}" for name, value in settings.items()]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["dockerd", *options, "--bridge=none", "--iptables=false", "--ip6tables=false"], stdout=log, stderr=log
        )
    try:
        engine = Engine(_client(), host)
        until = time.monotonic() + 60
        while engine("info", check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > until:
                pytest.skip(f"dockerd does not start here: {(folder / 'log').read_text()[-300:]}")
            time.sleep(0.2)
        yield engine
    finally:
        process.terminate()
        process.wait(60)
        for left in (folder / "exec" / "netns").glob("*"):  # mounts, which dockerd leaves
            subprocess.run(["umount", left], capture_output=True)


def _client() -> str:
    """A client that can build with BuildKit: the newer ones need a plugin for it, the older ones have it."""
    for program in filter(None, (shutil.which("docker"), "/usr/bin/docker")):
        if not Path(program).is_file():
            continue
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        number = re.search(r"version (\d+)", version)
        plugin = subprocess.run([program, "buildx", "version"], capture_output=True).returncode == 0
        if plugin or (number and 20 <= int(number[1]) < 23):
            return program
    pytest.skip("the Docker client cannot build: install its buildx plugin")


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """A base image with Python: Debian's, from its packages."""
    if given := os.environ.get("CSC_TEST_BASE"):
        return given
    if engine("image", "inspect", BASE, check=False).returncode == 0:
        return BASE
    if not shutil.which("mmdebstrap") or os.getuid() != 0:
        pytest.skip("no base image: CSC_TEST_BASE names none, and only root with mmdebstrap can make one")
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "base.tar"
        include = "--include=python3,python3-venv,ca-certificates"
        words = ["mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", archive]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no base image: mmdebstrap failed: {done.stderr.strip()[-300:]}")
        engine("import", str(archive), BASE)
    return BASE


@pytest.fixture(scope="session")
def images(engine: Engine, base: str) -> dict[str, str]:
    """Our two images, built by `make images` from wheels."""
    with tempfile.TemporaryDirectory(prefix="csc-wheels-") as folder:
        wheelhouse = os.environ.get("CSC_TEST_WHEELHOUSE")
        if wheelhouse is None:
            wheelhouse = folder
            done = subprocess.run(["make", "wheelhouse", f"WHEELHOUSE={folder}"], capture_output=True, cwd=ROOT)
            if done.returncode != 0:
                pytest.skip(f"no wheels: {done.stderr.decode().strip()[-300:]}; CSC_TEST_WHEELHOUSE names a folder")
        print(engine.make("images", f"BASE={base}", f"WHEELHOUSE={wheelhouse}"))
    return {kind: f"{NAME}-{kind}:latest" for kind in ("cpu", "train")}
