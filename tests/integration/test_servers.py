"""A scenario with nothing of value on this machine: data in a bucket, runs and models on an MLflow server, and faults.

The servers are real: SeaweedFS with enforced keys, `mlflow server` on PostgreSQL with its artifacts in the same bucket.
"""

import http.client
import http.server
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from csc import storage
from csc.data.ingest.digits import ingest_digits
from csc.data.shards import ImageShards
from csc.errors import TrackingError
from csc.model import read_card
from tests.faults.proxy import body_of
from tests.integration.conftest import command, environment, last_results
from tests.tracked import Plugin, Tracked
from tests.trained import Trained, trained

if TYPE_CHECKING:
    from tests.mlflow_server import Servers
    from tests.s3 import Store

pytest_plugins = ["tests.s3", "tests.mlflow_server"]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

SCENARIO = "digits-b0c5"
MODEL = f"models:/{SCENARIO}-csc@final"
PATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "7", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1"}
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def outside(servers: "Servers", **more: str) -> dict[str, str]:
    """The environment of a person whose data and results are elsewhere."""
    return environment() | servers.store.environment() | {"MLFLOW_TRACKING_URI": servers.tracking.uri} | more


def csc(*words: object, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*words), capture_output=True, text=True, env=env, timeout=600)


def said(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line of a refusal, which tells no secret."""
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.strip()
    assert len(line.splitlines()) == 1, line
    assert line.startswith("csc: ")
    for secret in ("of-the-tests", "not-the", "password-of"):
        assert secret not in line
    return line


def client_of(servers: "Servers") -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(servers.tracking.uri)


@pytest.fixture(scope="session")
def data(store: "Store", tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small data set in the bucket, made there by ingest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_CA_BUNDLE", raising=False)
        for name, value in (store.environment() | {"CSC_CACHE": str(tmp_path_factory.mktemp("cache"))}).items():
            patch.setenv(name, value)
        storage.s3._client.cache_clear()
        address = f"s3://{store.bucket}/data/digits"
        ingest_digits(address, train=240, test=80, size=32)
        yield address
        storage.s3._client.cache_clear()


@pytest.fixture
def finished(_finished: tuple[Path, str], servers: "Servers") -> tuple[Path, str]:
    """A scenario run that nothing disturbed: its work folder and what it printed."""
    return _finished


@pytest.fixture(scope="session")
def _finished(_running: "Servers", data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    _running.heal()
    workdir = tmp_path_factory.mktemp("finished")
    done = csc("run", SCENARIO, "--data", data, "--workdir", workdir, env=outside(_running))
    assert done.returncode == 0, done.stdout + done.stderr
    return workdir, done.stdout


def card_of(workdir: Path) -> Any:
    """The card of the first model that a run has made."""
    return read_card(min(workdir.glob("pipeline/**/model/model.json")).parent)


def test_a_whole_scenario_leaves_its_results_on_the_servers(finished: tuple[Path, str], servers: "Servers"):
    workdir, printed = finished
    assert MODEL in printed
    assert not list(workdir.rglob("mlflow.db"))
    tracked = Tracked(client_of(servers), card_of(workdir))
    count = tracked.count()
    assert count["runs"] == [1, 2]
    assert count["open"] == []
    assert count["points"][0]["mAP"] == [1, 2]
    assert [points["train/loss"] for points in count["points"][1:]] == [[1, 2], [1, 2]]
    assert count["priors"] == [0, 0, 1]
    assert tracked.versions() == [1, 2]
    version = tracked.client.get_model_version_by_alias(f"{SCENARIO}-csc", "final")
    model = tracked.client.get_logged_model(version.source.removeprefix("models:/"))
    assert model.artifact_location.startswith("mlflow-artifacts:/")
    kept = [name for name, _ in storage.list_below(f"s3://{servers.store.bucket}/mlflow")]
    assert any(name.endswith(f"{model.model_id}/artifacts/data/model/model.safetensors") for name in kept)
    assert any(name.endswith("artifacts/report.html") for name in kept)


def test_predict_fetches_the_model_without_keys_of_the_store(
    finished: tuple[Path, str], servers: "Servers", data: str, tmp_path: Path
):
    image = tmp_path / "scene.jpg"
    image.write_bytes(ImageShards(f"{data}/images").jpeg(0, 0))
    keyless = {name: value for name, value in outside(servers).items() if not name.startswith("AWS_")}
    done = csc("predict", MODEL, image, "--threshold", "0", "--workdir", tmp_path, env=keyless)
    assert done.returncode == 0, done.stderr
    name, found = done.stdout.strip().split("\t")
    assert name == str(image)
    assert len(found.split(", ")) == 10


def test_the_same_command_again_finds_everything_done(finished: tuple[Path, str], servers: "Servers", data: str):
    workdir, _ = finished
    tracked = Tracked(client_of(servers), card_of(workdir))
    before = tracked.count()
    done = csc("run", SCENARIO, "--data", data, "--workdir", workdir, env=outside(servers))
    assert done.returncode == 0, done.stderr
    assert "task 2 · register        reused" in done.stdout
    assert tracked.count() == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "not-the-secret"}, "access denied; check the keys"),
        ({"AWS_ACCESS_KEY_ID": "not-the-key"}, "access denied; check the keys"),
        ({"bucket": "no-such-bucket"}, "no such bucket; check its name"),
    ],
    ids=["secret", "key", "bucket"],
)
def test_a_store_that_refuses_is_reported_before_anything_starts(
    wrong: dict[str, str], message: str, servers: "Servers", data: str, tmp_path: Path
):
    address = data.replace(servers.store.bucket, wrong["bucket"], 1) if "bucket" in wrong else data
    env = outside(servers) | {name: value for name, value in wrong.items() if name.isupper()}
    for words in (("run", SCENARIO, "--data", address), ("ingest", "digits", "--out", address)):
        options = ("--workdir", tmp_path) if words[0] == "run" else ()
        assert message in said(csc(*words, *options, env=env))


def follow(words: tuple[object, ...], env: dict[str, str], events: dict[str, Callable[[], None]]) -> tuple[int, str]:
    """Run `csc`, and let things happen when lines with certain words come; return its exit code and all it printed."""
    left, printed = dict(events), []
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        for line in process.stdout or ():
            printed.append(line)
            for words_of_event in [word for word in left if word in line]:
                left.pop(words_of_event)()
    assert not left, f"never came to {list(left)}: {''.join(printed)}"
    return process.returncode, "".join(printed)


def test_a_server_that_goes_away_is_waited_for_and_one_that_stays_away_costs_no_work(
    finished: tuple[Path, str], servers: "Servers", data: str, tmp_path: Path
):
    def restart() -> None:
        servers.tracking.stop()
        servers.tracking.launch()

    words = ("run", SCENARIO, "--data", data, "--workdir", tmp_path, "--seed", "1", "--tasks")
    code, printed = follow((*words, "1-1"), outside(servers, **PATIENT), {"task 1/2 · epoch 1/2": restart})
    assert code == 0, printed
    assert "does not answer" not in printed

    impatient = outside(servers, **IMPATIENT)
    code, printed = follow((*words, "2-2"), impatient, {"task 2/2 · epoch 1/2": servers.tracking.stop})
    assert code == 2, printed
    away = f"MLflow at {servers.tracking.uri} does not answer ("  # connection refused, or broken if it had just begun
    lines = [line.strip() for line in printed.splitlines() if "does not answer" in line]
    assert [line.partition(away)[0] for line in lines] == ["task 2/2: ", "csc: "]  # train goes on, register ends
    assert lines[0].endswith("training goes on without it")
    assert lines[1].endswith("then repeat the command: nothing finished is lost")
    assert "task 2 · evaluate" in printed

    servers.heal()
    done = csc(*words, "2-2", env=impatient)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "task 2 · train           reused" in done.stdout
    client = client_of(servers)
    assert Tracked(client, card_of(tmp_path)).count() == Tracked(client, card_of(finished[0])).count()
    assert len(last_results(tmp_path)) == 2


@pytest.fixture
def here(servers: "Servers", monkeypatch: pytest.MonkeyPatch) -> "Servers":
    """The servers for code in this process, which waits no longer than it must."""
    settings = {"MLFLOW_TRACKING_URI": servers.tracking.uri, "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0"}
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**settings, **IMPATIENT}.items():
        monkeypatch.setenv(name, value)
    return servers


@pytest.fixture(scope="session")
def undisturbed(_running: "Servers", tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two tasks leave on the server when nothing happens."""
    _running.heal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", _running.tracking.uri)
        card = two_tasks(tmp_path_factory.mktemp("undisturbed"), 100).card
    return Tracked(client_of(_running), card).count()


def two_tasks(folder: Path, seed: int) -> Trained:
    """Train and register two tasks; the seed makes them a scenario run of their own."""
    first, second = trained(folder, 1, seed), trained(folder, 2, seed)
    first.train()
    first.register()
    second.train()
    second.register(first)
    return second


class Lossy(http.server.BaseHTTPRequestHandler):
    """Passes requests on, and loses the first answer to each: the deed is done, and nobody hears of it."""

    port: int
    lost: set[tuple[str, bytes]]
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = body_of(self)
        headers = {name: value for name, value in self.headers.items() if name != "Transfer-Encoding"}
        server = http.client.HTTPConnection("127.0.0.1", self.port)
        server.request(self.command, self.path, body, headers)
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if self.command != "GET" and (self.path, body) not in self.lost:
            self.lost.add((self.path, body))
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_nothing_is_made_twice_when_answers_are_lost(
    here: "Servers", undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    handler = type("Handler", (Lossy,), {"port": here.tracking.port, "lost": set()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{proxy.server_port}")
        card = two_tasks(tmp_path, 101).card
        proxy.shutdown()
    lost = {path.rpartition("/mlflow/")[2] for path, _ in handler.lost}
    assert {"runs/create", "logged-models", "model-versions/create", "runs/log-batch", "runs/outputs"} <= lost
    assert Tracked(client_of(here), card).count() == undisturbed


def test_a_database_that_goes_away_and_comes_back_is_waited_for(
    here: "Servers", undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from urllib3.util import Retry

    pause, tried = Retry.sleep, threading.Event()

    def noted(self: Any, response: Any = None) -> None:
        tried.set()
        pause(self, response)

    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Retry, "sleep", noted)
    here.database.stop()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(two_tasks, tmp_path, 102)
        assert tried.wait(60)
        here.database.start()
        card = running.result(timeout=300).card
    assert Tracked(client_of(here), card).count() == undisturbed


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(TrackingError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert "password-of" not in message
    return message


def test_a_database_that_stays_away_is_reported(here: "Servers", tmp_path: Path):
    here.database.stop()
    message = refusal(lambda: two_tasks(tmp_path, 103))
    assert message.startswith(f"MLflow at {here.tracking.uri} answers only with errors (50")
    assert message.endswith("nothing finished is lost")


def test_a_server_that_hangs_is_reported_and_leaves_nothing_double(
    here: "Servers", undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = trained(tmp_path, 1, 104), trained(tmp_path, 2, 104)
    first.train()
    assert here.tracking.process is not None
    os.killpg(here.tracking.process.pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as hasty:
            hasty.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
            hasty.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
            assert "does not answer (timed out)" in refusal(first.register)
    finally:
        os.killpg(here.tracking.process.pid, signal.SIGCONT)
    first.register()
    second.train()
    second.register(first)
    assert Tracked(client_of(here), first.card).count() == undisturbed


def test_a_server_whose_bucket_is_missing_is_reported(here: "Servers", tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.mlflow_server import TrackingServer
    from tests.s3 import Store

    broken = TrackingServer(here.database, Store(here.store.endpoint, bucket="no-such-bucket"), tmp_path)
    try:
        broken.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", broken.uri)
        # It refuses before it has read the file, so that the answer may be lost with the connection.
        assert refusal(lambda: two_tasks(tmp_path, 105)).startswith(f"MLflow at {broken.uri} ")
    finally:
        broken.stop()


def test_a_name_that_the_server_does_not_allow_is_reported(
    here: "Servers", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    wrong = here.tracking.uri.replace("127.0.0.1", "mlflow.example")
    address = ("127.0.0.1", here.tracking.port)
    with monkeypatch.context() as renamed:
        renamed.setattr("urllib3.util.connection.create_connection", connects_to(address))
        renamed.setenv("MLFLOW_TRACKING_URI", wrong)
        renamed.setenv("NO_PROXY", "mlflow.example")
        message = refusal(lambda: two_tasks(tmp_path, 106))
    assert message == f"MLflow at {wrong} refuses to be called by this name; add it to the server's --allowed-hosts"


def connects_to(address: tuple[str, int]) -> Callable[..., Any]:
    """A way to connect to one address, whatever is asked for, as a cluster's name service would."""
    import urllib3.util.connection

    connect = urllib3.util.connection.create_connection
    return lambda _, *arguments, **options: connect(address, *arguments, **options)


def test_the_runs_of_kfps_plugin_are_used_on_a_server_too(
    here: "Servers", undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    client = client_of(here)
    plugin = Plugin(client, client.create_experiment("KFP-Default"), monkeypatch)
    plugin.start_pipeline("digits-b0c4")
    first, second = trained(tmp_path, 1, 107), trained(tmp_path, 2, 107)
    injected = []
    for task, prior in ((first, None), (second, first)):
        injected.append(plugin.start_step(task.card.task, "train"))
        task.train()
        plugin.end_step(injected[-1], config='"{}"')
        step = plugin.start_step(task.card.task, "register")
        task.register(prior)
        plugin.end_step(step, model='"x"')
    tracked = Tracked(client, first.card, "KFP-Default")
    assert [run.info.run_id for run in tracked.runs("task")] == [run.info.run_id for run in injected]
    same = ("runs", "open", "points", "datasets", "priors", "outputs", "models", "versions")
    assert {key: tracked.count()[key] for key in same} == {key: undisturbed[key] for key in same}
