"""A real tracking server for tests: MLflow on PostgreSQL, its artifacts in the object store of `tests.s3`.

A test module that says `pytest_plugins = ["tests.s3", "tests.mlflow_server"]` can ask for `servers`: a running
`mlflow server` and the database behind it, either of which can be stopped and started again. They are started once per
test process, when a test first asks for them, and end with the tests.

The programs of PostgreSQL are looked for on the path and where Debian puts them. Root on a machine with apt-get
installs them if they are missing and the packages can be fetched; otherwise the tests are skipped, with that reason.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.debian import install
from tests.s3 import Store, free_ports

_START_SECONDS = 120
_PASSWORD = "password-of-the-database"


def postgres_programs() -> Path:
    """The folder of PostgreSQL's programs; skips if there is none and none can be installed."""
    if (found := _installed_postgres()) is not None:
        return found
    install("postgresql", missing="no PostgreSQL")
    if (found := _installed_postgres()) is None:
        pytest.skip("no PostgreSQL: installed, but its programs are not where Debian puts them")
    return found


def _installed_postgres() -> Path | None:
    folders = [Path(found).resolve().parent] if (found := shutil.which("postgres")) else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").is_file()), None)


def _ready(probe: Callable[[], object], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when a probe works; nothing but trying tells that a server is up."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(Exception):
            probe()
            return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args} did not start: {log.read_text(errors='replace')[-2000:]}")


@dataclass
class Database:
    """PostgreSQL with its files in a folder, under an account that is not root, asking for a password."""

    programs: Path
    folder: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def uri(self) -> str:
        """The address, password and all, that the tracking server is given."""
        return f"postgresql+psycopg2://csc:{_PASSWORD}@127.0.0.1:{self.port}/postgres"

    def _account(self) -> dict[str, str | int]:
        """Who runs it; PostgreSQL refuses root."""
        if os.geteuid() != 0:
            return {}
        names = {entry.pw_name for entry in pwd.getpwall()}
        account = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
        return {"user": account.pw_uid, "group": account.pw_gid}

    def create(self) -> None:
        """Make an empty database."""
        account = self._account()
        secret = self.folder / "password"
        secret.write_text(_PASSWORD)
        if account:
            for path in (self.folder, secret):
                os.chown(path, int(account["user"]), int(account["group"]))
        options = ["--username=csc", f"--pwfile={secret}", "--auth=scram-sha-256", "--no-sync", "--encoding=UTF8"]
        words = [self.programs / "initdb", *options, "-D", self.folder / "data"]
        subprocess.run(words, check=True, capture_output=True, cwd=self.folder, **account)

    def start(self) -> None:
        """Listen; return when it answers."""
        import psycopg2

        settings = ("listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=", "fsync=off")
        options = [word for setting in settings for word in ("-c", setting)]
        words = [self.programs / "postgres", "-D", self.folder / "data", *options]
        log = self.folder / "log"
        with log.open("ab") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=file, cwd=self.folder, **self._account())
        login = {"host": "127.0.0.1", "port": self.port, "user": "csc", "password": _PASSWORD, "dbname": "postgres"}
        _ready(lambda: psycopg2.connect(**login).close(), self.process, log)

    def stop(self) -> None:
        """End at once: connections break, what was committed stays."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()
            self.process = None


@dataclass
class TrackingServer:
    """`mlflow server` with artifacts that it hands out itself, so that clients need no keys of the store."""

    database: Database
    store: Store
    folder: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def uri(self) -> str:
        """The tracking address of clients."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; return when it answers."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Listen as soon as it can."""
        words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--backend-store-uri", self.database.uri, "--workers", "1"]
        words += ["--artifacts-destination", f"s3://{self.store.bucket}/mlflow"]
        hidden = {"AWS_CA_BUNDLE", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"}
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        # What runs evaluations of language models takes as long to start as all the rest.
        settings = {"MLFLOW_S3_ENDPOINT_URL": self.store.endpoint, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "log").open("ab") as file:
            self.process = subprocess.Popen(
                words,
                stdout=file,
                stderr=file,
                cwd=self.folder,
                env=inherited | self.store.environment() | settings,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when it answers."""
        assert self.process is not None
        _ready(lambda: urllib.request.urlopen(f"{self.uri}/health", timeout=5), self.process, self.folder / "log")

    def stop(self) -> None:
        """End it and its workers at once, whatever they do."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class Servers:
    """Everything a run needs elsewhere: object store, database, tracking server."""

    store: Store
    database: Database
    tracking: TrackingServer

    def heal(self) -> None:
        """Start whatever a test left stopped."""
        for one in (self.database, self.tracking):
            if one.process is None or one.process.poll() is not None:
                one.start()


@pytest.fixture(scope="session")
def _running(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    programs = postgres_programs()
    # Not below pytest's own folder: the database runs under another account, which may not look in there.
    folder = Path(tempfile.mkdtemp(prefix="csc-database-"))
    database = Database(programs, folder)
    tracking = TrackingServer(database, store, tmp_path_factory.mktemp("tracking"))
    try:
        database.create()
        database.start()
        tracking.start()
        yield Servers(store, database, tracking)
    finally:
        tracking.stop()
        database.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def servers(_running: Servers) -> Servers:
    """The tracking server and the database behind it, both running."""
    _running.heal()
    return _running
