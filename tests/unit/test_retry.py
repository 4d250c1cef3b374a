"""Retries inside a step: what may pass is waited for, what is refused is refused at once."""

import contextlib
import gc
import importlib
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from csc import retry, steps, storage
from csc.data.ingest.coco import ingest_coco
from csc.errors import (
    BadConfig,
    BadData,
    BadModel,
    CscError,
    StoreUnavailable,
    TrackingError,
    TrackingUnavailable,
    Unavailable,
)
from csc.retry import Retries, with_retries
from csc.steps.ingest import ingest
from csc.storage import read_bytes
from csc.tracking.calls import translate_errors
from csc.tracking.queries import ping_server
from csc.tracking.server import connect
from tests.builders import make_coco
from tests.tracked import fresh_database
from tests.trained import trained

if TYPE_CHECKING:
    from tests.s3 import Store

pytest_plugins = ["tests.s3"]

ASKED = Retries(times=3, wait=60, factor=2, within=86400)


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_to_search() -> None:
    """Between two tries a step looks for garbage; in all that other tests have loaded, for a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, each over as soon as it begins; nothing is asked for yet."""
    for name in Retries().environment():
        monkeypatch.delenv(name, raising=False)
    made: list[float] = []
    clock = SimpleNamespace(sleep=made.append, monotonic=lambda: sum(made))
    monkeypatch.setattr(retry, "time", clock)
    return made


def ask(monkeypatch: pytest.MonkeyPatch, retries: Retries = ASKED) -> None:
    for name, value in retries.environment().items():
        monkeypatch.setenv(name, value)


def failing(*errors: BaseException) -> Any:
    """A step whose first tries end in these errors, and which then returns how many tries there were."""
    left = list(errors)

    @with_retries
    def step() -> int:
        if left:
            raise left.pop(0)
        return len(errors) + 1

    return step


def test_what_may_pass_is_tried_again_after_growing_pauses_with_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], capsys: pytest.CaptureFixture[str]
):
    ask(monkeypatch)
    errors = StoreUnavailable("s3://a: busy"), TrackingUnavailable("MLflow\n is away"), Unavailable("gone")
    assert failing(*errors)() == 4
    assert pauses == [60, 120, 240]
    assert capsys.readouterr().out.splitlines() == [
        "retry: s3://a: busy; trying again in 60 s (1 of 3)",
        "retry: MLflow is away; trying again in 120 s (2 of 3)",
        "retry: gone; trying again in 240 s (3 of 3)",
    ]


def test_what_does_not_pass_ends_the_step_with_its_last_error(monkeypatch: pytest.MonkeyPatch, pauses: list[float]):
    ask(monkeypatch)
    with pytest.raises(Unavailable, match=r"^4$"):
        failing(*(Unavailable(str(number)) for number in range(1, 9)))()
    assert len(pauses) == 3


@pytest.mark.parametrize(
    "error",
    [BadData("x"), BadConfig("x"), BadModel("x"), TrackingError("x"), CscError("x"), ValueError(), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_refused_input_and_mistakes_of_ours_are_never_tried_again(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], capsys: pytest.CaptureFixture[str], error: Exception
):
    ask(monkeypatch)
    with pytest.raises(type(error)):
        failing(error)()
    assert (pauses, capsys.readouterr().out) == ([], "")


def test_nothing_is_tried_again_unless_asked_for(pauses: list[float]):
    with pytest.raises(Unavailable):
        failing(Unavailable("away"))()
    assert pauses == []


def test_no_try_begins_later_than_allowed(monkeypatch: pytest.MonkeyPatch, pauses: list[float]):
    ask(monkeypatch, Retries(times=9, wait=60, factor=2, within=200))
    with pytest.raises(Unavailable):
        failing(*[Unavailable("away")] * 9)()
    assert pauses == [60, 120]  # the next try would begin after 420 s


def test_the_number_alone_brings_the_usual_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CSC_RETRY_TIMES", "2")
    monkeypatch.setenv("CSC_RETRY_WAIT", "")
    assert Retries.from_environment() == Retries(times=2, wait=60, factor=2, within=7 * 86400)


@pytest.mark.parametrize("retries", [ASKED, Retries(0, 0.5, 1, 1e7), Retries(12, 7, 1.25, 31536000)], ids=str)
def test_what_is_handed_over_arrives(monkeypatch: pytest.MonkeyPatch, retries: Retries):
    ask(monkeypatch, retries)
    assert Retries.from_environment() == retries


@pytest.mark.parametrize(
    ("name", "value"),
    [("TIMES", "many"), ("TIMES", "-1"), ("TIMES", "1.5"), ("TIMES", "inf"), ("WAIT", "60s"), ("FACTOR", "0.5")],
)
def test_a_variable_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(f"CSC_RETRY_{name}", value)
    with pytest.raises(BadConfig, match=rf"^CSC_RETRY_{name}={value}: expected a .*number, [01] or more$"):
        failing()()


def test_what_a_failed_try_held_is_free_before_the_next(monkeypatch: pytest.MonkeyPatch):
    """A network that a try has put on a GPU would leave no room for the same network again."""

    class Network:
        def __init__(self) -> None:
            self.itself = self  # no count of references frees it

    held: list[weakref.ref[Network]] = []

    @with_retries
    def step() -> list[bool]:
        alive = [reference() is not None for reference in held]
        network = Network()
        held.append(weakref.ref(network))
        if len(held) < 3:
            raise Unavailable("away")
        return alive

    ask(monkeypatch)
    gc.disable()
    try:
        assert step() == [False, False]
    finally:
        gc.enable()


STEPS = sorted(path.stem for path in Path(steps.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_tried_again(name: str, monkeypatch: pytest.MonkeyPatch):
    step = getattr(importlib.import_module(f"csc.steps.{name}"), name)
    assert step.__wrapped__.__module__ == f"csc.steps.{name}"
    monkeypatch.setenv("CSC_RETRY_TIMES", "many")
    with pytest.raises(BadConfig, match=r"^CSC_RETRY_TIMES=many"):
        step()


class Wire(ThreadingHTTPServer):
    """A server that gives prepared answers, the last one again and again."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answers: list[tuple[int, bytes]] = []
        self.asked = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    server: Wire

    def answer(self) -> None:
        self.server.asked += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """A server that both the object store's client and MLflow's take for theirs."""
    with Wire() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        use(monkeypatch, server.address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        monkeypatch.setattr("time.sleep", lambda _: None)  # of boto3 and MLflow between their own tries
        yield server
        server.shutdown()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let this process know one store and nothing else of this machine."""
    from tests.s3 import Store

    for name in [name for name in os.environ if name.startswith(("AWS_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name, value in Store(endpoint).environment().items():
        monkeypatch.setenv(name, value)
    storage.s3._client.cache_clear()


def error_answer(status: int, code: str) -> tuple[int, bytes]:
    return status, f"<Error><Code>{code}</Code></Error>".encode()


@pytest.mark.slow
def test_a_store_that_is_ill_for_longer_than_boto3_waits_is_asked_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, pauses: list[float], capsys: pytest.CaptureFixture[str]
):
    ask(monkeypatch)
    wire.answers = [error_answer(503, "SlowDown")] * (2 * storage.s3._ATTEMPTS) + [(200, b"whole")]
    assert with_retries(read_bytes)("s3://bucket/file") == b"whole"
    assert pauses == [60, 120]
    assert capsys.readouterr().out.splitlines() == [
        f"retry: s3://bucket/file: the object store at {wire.address} refused (SlowDown); try again later; "
        f"trying again in {pause} s ({number} of 3)"
        for number, pause in ((1, 60), (2, 120))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "passes"),
    [
        (500, "InternalError", True),
        (503, "SlowDown", True),
        (503, "ServiceUnavailable", True),
        (504, "GatewayTimeout", True),
        (429, "TooManyRequests", True),
        (400, "RequestTimeout", True),
        (501, "NotImplemented", False),
        (403, "AccessDenied", False),
        (403, "SignatureDoesNotMatch", False),
        (404, "NoSuchKey", False),
        (404, "NoSuchBucket", False),
        (400, "ExpiredToken", False),
        (418, "UnknownCode", False),
    ],
)
def test_what_a_store_refuses_is_not_asked_for_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, pauses: list[float], status: int, code: str, passes: bool
):
    ask(monkeypatch)
    wire.answers = [error_answer(status, code)]
    with pytest.raises(BadData) as caught:
        with_retries(read_bytes)("s3://bucket/file")
    assert isinstance(caught.value, Unavailable) == passes
    assert len(pauses) == (3 if passes else 0)


def test_a_store_that_nobody_reaches_may_be_back(monkeypatch: pytest.MonkeyPatch, nobody: str):
    use(monkeypatch, nobody)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        read_bytes("s3://bucket/file")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    storage.s3._client.cache_clear()
    with pytest.raises(BadData) as caught:
        read_bytes("s3://bucket/file")
    assert not isinstance(caught.value, Unavailable)  # keys that are missing stay so


NO_EXPERIMENTS = 200, json.dumps({"experiments": []}).encode()


@pytest.mark.parametrize(
    "status", [503, 429, *(pytest.param(code, marks=pytest.mark.slow) for code in (500, 502, 504))]
)
def test_a_tracking_server_that_is_ill_for_longer_than_mlflow_waits_is_asked_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, pauses: list[float], status: int
):
    ask(monkeypatch)
    wire.answers = [(status, b"ill")] * 3 + [NO_EXPERIMENTS]
    assert with_retries(ping_server)() == wire.address
    assert (pauses, wire.asked) == ([60], 4)  # MLflow's own three come first


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_tracking_server_that_refuses_is_asked_once(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, pauses: list[float], status: int
):
    ask(monkeypatch)
    wire.answers = [(status, b"no")]
    with pytest.raises(TrackingError) as caught:
        with_retries(ping_server)()
    assert not isinstance(caught.value, Unavailable)
    assert (pauses, wire.asked) == ([], 1)


def test_a_tracking_server_that_nobody_reaches_may_be_back(monkeypatch: pytest.MonkeyPatch, nobody: str):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nobody)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingUnavailable, match=r"does not answer \(connection refused\)"):
        ping_server()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [None, error_answer(503, "SlowDown"), error_answer(403, "AccessDenied")], ids=str)
def test_a_bucket_of_models_that_clients_use_themselves_may_be_back_unless_it_refuses(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, nobody: str, tmp_path: Path, answer: tuple[int, bytes] | None
):
    if answer is not None:
        wire.answers = [answer]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path))
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", wire.address if answer else nobody)
    (tmp_path / "file").write_text("content")
    client = connect()
    run = client.create_run(client.create_experiment("bucket", "s3://bucket/models"))
    with pytest.raises(TrackingError) as caught, translate_errors():
        client.log_artifact(run.info.run_id, str(tmp_path / "file"))
    refused = answer is not None and answer[0] == 403
    assert isinstance(caught.value, Unavailable) != refused, caught.value
    assert ("keeps its models in an object store that" in str(caught.value)) != refused


@pytest.mark.slow
@pytest.mark.services  # a real store is started, twice
def test_a_store_that_is_stopped_and_started_again_costs_a_step_some_time(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from tests.s3 import free_ports, object_store

    ports, folder = free_ports(10), tmp_path / "store"
    folder.mkdir()
    monkeypatch.setattr("tests.s3.free_ports", lambda count: ports[:count])
    with contextlib.ExitStack() as running:
        with object_store(folder) as store:
            use(monkeypatch, store.endpoint)
            data = f"s3://{store.bucket}/animals"
            ingest_coco(make_coco(tmp_path / "raw"), data, "animals")
            first = ingest("animals-b0c2", data)
        ask(monkeypatch, Retries(times=20, wait=1, factor=1))
        capsys.readouterr()

        def pause(seconds: float) -> None:
            if not pauses:
                running.enter_context(object_store(folder))
            pauses.append(seconds)
            time.sleep(seconds)  # it takes files before it finds those of old

        monkeypatch.setattr(retry.time, "sleep", pause)
        assert ingest("animals-b0c2", data) == first
    lines = capsys.readouterr().out.splitlines()
    assert "does not answer" in lines[0]
    assert [line.rpartition("; ")[2] for line in lines if line.startswith("retry: ")] == [
        f"trying again in 1 s ({number} of 20)" for number in range(1, len(pauses) + 1)
    ]


@pytest.mark.slow
def test_a_tracking_server_that_starts_late_costs_register_one_pause(
    bucket: str, store: "Store", monkeypatch: pytest.MonkeyPatch, pauses: list[float], tmp_path: Path
):
    from tests.mlflow_server import TrackingServer

    database: Any = SimpleNamespace(uri=f"sqlite:///{tmp_path}/mlflow.db")
    server = TrackingServer(database, store, tmp_path)
    ask(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(retry.time, "sleep", lambda pause: (pauses.append(pause), server.start()))
    task = trained(tmp_path / "steps", 1)
    try:
        assert task.register()["model"]["version"] == "1"
    finally:
        server.stop()
    assert pauses == [60]


@pytest.mark.slow
def test_a_training_whose_store_goes_away_resumes_in_the_same_process_and_ends_in_the_same_model(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from csc.data.ingest.digits import ingest_digits
    from csc.steps.build_dataset import build_dataset
    from csc.steps.split_labels import split_labels
    from csc.steps.train import train
    from csc.tracking.runs import Tracker

    small = {"backbone": {"name": "test_byobnet"}, "cigcn": {"width": 8}, "input": {"size": 32}}
    config = json.dumps({**small, "train": {"epochs": 3, "batch_size": 16, "workers": 0}})
    origin = ingest("digits-b0c5", str(ingest_digits(tmp_path / "set", train=40, test=10, size=32).path)).to_json()
    split, view, test = (str(tmp_path / name) for name in ("split.json", "train.parquet", "test.parquet"))
    split_labels(origin, "digits-b0c5", 1, 2, split)
    build_dataset(origin, split, config, view, test)
    ask(monkeypatch)
    log_epoch, trained_epochs = Tracker.log_epoch, list[int]()

    def logged(tracker: Tracker, epoch: int, log: dict[str, float]) -> None:
        log_epoch(tracker, epoch, log)
        trained_epochs.append(epoch)
        if trained_epochs == [0, 1]:
            raise StoreUnavailable("s3://bucket/00001.arrow: does not answer")

    monkeypatch.setattr(Tracker, "log_epoch", logged)
    models = []
    for name in ("disturbed", "undisturbed"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path / f"{name} tracking"))
        train(config, split, view, str(tmp_path / name / "model"), checkpoints=str(tmp_path / name / "checkpoints"))
        models.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert pauses == [60]
    assert "s3://bucket/00001.arrow: does not answer; trying again in 60 s (1 of 3)" in capsys.readouterr().out
    assert trained_epochs == [0, 1, 2] * 2  # none of the first try's again
    assert models[0] == models[1]
