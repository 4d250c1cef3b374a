"""Steps in containers of this machine: which images, what they see of the machine, who they are, and how they end.

A container is held as a cluster would hold it: an unprivileged user, no capabilities, a read-only root file system. It
sees the work folder, the data and whatever files the settings name, each at the path it has outside.
"""

import codecs
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from csc.errors import CscError
from csc.pipelines.local.lock import is_running
from csc.pipelines.local.steps import GRACE_SECONDS, RunStep, Show, Step
from csc.tracking.server import database_of

if TYPE_CHECKING:
    from docker import DockerClient

__all__ = ["NoContainer", "containers_for"]

_WORKDIR_LABEL, _RUN_LABEL = "csc.workdir", "csc.run"
# Variables that a step may need to reach data, tracking and weights, and how those end that name a file or folder.
_PASSED_ON = ("AWS_", "CSC_", "HF_", "MLFLOW_", "OMP_NUM_THREADS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_PATHS = ("_BUNDLE", "_CACHE", "_DIR", "_FILE", "_HOME", "_PATH")
_SHARED_MEMORY = "8g"  # at most; loader processes hand batches through it


class NoContainer(CscError):
    """No engine, no image, or nothing that a container may write to."""


@contextlib.contextmanager
def containers_for(package: Path, arguments: Mapping[str, str], workdir: Path) -> Iterator[RunStep]:
    """What runs a step of a compiled pipeline in a container of its image.

    kfp has a way of its own, which lets the engine remove a container that has ended: one that is gone before its exit
    code is read counts as a success, and one whose run is interrupted works on.
    """
    from docker.types import Mount

    with _engine() as client:
        images = sorted(_images(package))
        for image in images:
            _make_available(client, image)
        _remove_leftovers(client, workdir, package.stem)
        environment = _environment(workdir)
        visible = [Mount(str(path), str(path), type="bind") for path in _visible(workdir, arguments, environment)]
        options = {
            **_options(client),
            "user": _user(client, images[0], workdir),
            "mounts": [Mount("/tmp", None, type="volume"), *visible],  # the first on disk, and gone with the container
            "network_mode": "host" if _names_this_machine(environment) else None,
            "labels": {_WORKDIR_LABEL: str(workdir), _RUN_LABEL: package.stem},
        }

        def run(step: Step, show: Show) -> int:
            variables = {**environment, **step.variables}
            return _run_to_its_end(client, step, show, {**options, "environment": variables})

        yield run


@contextlib.contextmanager
def _engine() -> "Iterator[DockerClient]":
    """The engine that DOCKER_HOST names; its refusals come out as one line."""
    import docker
    from requests.exceptions import RequestException

    try:
        with contextlib.closing(docker.from_env()) as client:
            client.ping()
            yield client
    except (docker.errors.DockerException, RequestException) as error:
        reason = " ".join(str(error).split())
        raise NoContainer(
            f"--runner docker: {reason}; is the engine running and may you use it? "
            "'docker info' tells, --runner subprocess needs none"
        ) from None


def _images(package: Path) -> set[str]:
    """The images that a compiled pipeline names."""
    specification = next(yaml.load_all(package.read_text(encoding="utf-8"), yaml.CSafeLoader))
    return {executor["container"]["image"] for executor in specification["deploymentSpec"]["executors"].values()}


def _make_available(client: "DockerClient", image: str) -> None:
    import docker

    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        print(f"pulling image {image} …", flush=True)
        try:
            client.images.pull(image)
        except docker.errors.APIError:
            raise NoContainer(
                f"--runner docker: there is no image {image}, here or in a registry; build it with 'make images'"
            ) from None


def _remove_leftovers(client: "DockerClient", workdir: Path, run: str) -> None:
    """End what killed runs of the work folder have left running, this one among them: it would write the same files."""
    for container in client.containers.list(all=True, filters={"label": [f"{_WORKDIR_LABEL}={workdir}"]}):
        name = container.labels[_RUN_LABEL]
        if name == run or not is_running(workdir, name):
            container.remove(v=True, force=True)


def _user(client: "DockerClient", image: str, workdir: Path) -> str:
    """Who the steps are: ourselves, or the image's user if we are root, who then gets a new work folder."""
    outputs = workdir / "pipeline"
    outputs.mkdir(parents=True, exist_ok=True)
    if os.getuid() != 0:
        return f"{os.getuid()}:{os.getgid()}"
    user = str(client.images.get(image).attrs["Config"]["User"])
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", user)
    if numbers is None:
        raise NoContainer(
            f"--runner docker: the user of image {image} is '{user}', expected numbers such as 10001:10001; "
            "root gives the work folder to that user: build the image with USER 10001:10001, or do not run as root"
        )
    uid, gid = int(numbers[1]), int(numbers[2] or 0)  # without a group, the engine takes root's
    if workdir.stat().st_uid != uid:
        if {path.name for path in workdir.iterdir()} - {"pipeline", "runs"}:
            raise NoContainer(
                f"{workdir}: belongs to another user than the steps of the images, {user}; "
                f"choose a new --workdir, or hand it over with 'chown -R {user} {workdir}'"
            )
        for folder in (workdir, outputs):
            os.chown(folder, uid, gid)
    return user


def _environment(workdir: Path) -> dict[str, str]:
    """The variables of this process that the steps get to see; not those that name a missing path.

    Files of a bucket are fetched into the work folder, once for all steps, unless a folder for them is named.
    """
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    there = {name: value for name, value in passed.items() if not name.endswith(_PATHS) or Path(value).exists()}
    proxies = {name: value for name, value in os.environ.items() if name.upper() in _PROXIES}
    return {"CSC_CACHE": str(workdir / "fetched")} | there | proxies


def _names_this_machine(environment: Mapping[str, str]) -> bool:
    """Whether a server is meant that only this machine's own network reaches."""
    hosts = {urlsplit(value).hostname for name, value in environment.items() if "://" in value}
    return not hosts.isdisjoint({"localhost", "127.0.0.1", "::1"})


def _visible(workdir: Path, arguments: Mapping[str, str], environment: Mapping[str, str]) -> list[Path]:
    """Every file and folder of this machine that the steps must see, none of them inside another."""
    named = [value for name, value in environment.items() if name.endswith(_PATHS)]
    config = json.loads(arguments["config"])
    named += [arguments["data"], arguments.get("test", "")]
    named += [config.get("init", ""), config.get("agcn", {}).get("embeddings", "")]
    if (database := database_of(environment.get("MLFLOW_TRACKING_URI", ""))) is not None:
        named.append(str(database.parent))  # SQLite writes files next to it
    there = {Path(name).absolute() for name in named if name and (Path(name).is_file() or Path(name).is_dir())}
    wanted = {workdir, *there}
    return sorted(path for path in wanted if wanted.isdisjoint(path.parents))


def _options(client: "DockerClient") -> dict[str, Any]:
    """How a container is held, whatever it does."""
    from docker.types import DeviceRequest

    gpus = [DeviceRequest(count=-1, capabilities=[["gpu"]])] if "nvidia" in client.info()["Runtimes"] else []
    return {
        "init": True,  # hands on signals
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "shm_size": _SHARED_MEMORY,
        "working_dir": str(Path.cwd()),  # what settings name relative to it is found
        "device_requests": gpus,
    }


def _run_to_its_end(client: "DockerClient", step: Step, show: Show, options: Mapping[str, Any]) -> int:
    """Run a container, hand on its output line by line, and return its exit code."""
    from docker.errors import DockerException

    container = client.containers.run(step.image, step.command, detach=True, **options)
    try:
        pending = ""
        for text in codecs.iterdecode(container.logs(stream=True), "utf-8", "replace"):
            *lines, pending = (pending + text).split("\n")
            for line in lines:
                show(line)
        if pending:
            show(pending)
        return int(container.wait()["StatusCode"])
    except BaseException:
        with contextlib.suppress(DockerException):
            container.stop(timeout=GRACE_SECONDS)  # training writes a checkpoint
        raise
    finally:
        container.remove(v=True, force=True)
