"""What a person sees of a run on this machine, and what a run keeps to itself in a shared work folder."""

import contextlib
import errno
import fcntl
import io
import shutil
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from kfp import compiler, components, dsl

from csc.data.ingest.coco import ingest_coco
from csc.errors import BadData, Terminated
from csc.pipelines.local import display, runner
from csc.pipelines.local.cache import cache_folder
from csc.pipelines.local.display import PlainDisplay
from csc.pipelines.local.interrupts import interruptible
from csc.pipelines.local.lock import LONGEST_TEMPORARY, exclusive_run
from csc.pipelines.local.reporter import RunReporter, step_titles
from csc.pipelines.local.steps import Show, Step
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.window import Window
from csc.scenario import Scenario
from csc.steps.ingest import ingest
from tests.builders import make_coco

DIGITS = Scenario.parse("digits-b0c4")


def titles(path: Path, tasks: str | None = None) -> dict[str, str]:
    compile_pipeline(DIGITS, 10, path, window=Window.parse(tasks, DIGITS, 10))
    return step_titles(components.load_component_from_file(str(path)).pipeline_spec)


@pytest.fixture(scope="module")
def all_titles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return titles(tmp_path_factory.mktemp("pipeline") / "p.yaml")


@pytest.fixture
def reporter(all_titles: dict[str, str]) -> RunReporter:
    return RunReporter(PlainDisplay(io.StringIO()), io.StringIO(), all_titles)


def said(reporter: RunReporter) -> list[str]:
    return reporter.display.out.getvalue().splitlines()


def test_titles_are_those_of_the_pipeline_whatever_kfp_calls_the_steps(all_titles: dict[str, str], tmp_path: Path):
    assert len(all_titles) == 1 + 3 * 5 + 1
    assert all_titles["train"] == "task 1 · train"
    assert all_titles["split-labels-3"] == "task 3 · split-labels"
    assert all_titles["ingest"] == "ingest"
    window = titles(tmp_path / "window.yaml", "2-3")
    assert (window["train"], window["train-2"], window["prior"]) == ("task 2 · train", "task 3 · train", "prior")


def test_reused_steps_have_the_titles_of_their_tasks(reporter: RunReporter):
    for name in ("train", "train-2", "evaluate-2", "report"):
        reporter.reuse(name)
    assert reporter.reused == ["task 1 · train", "task 2 · train", "task 2 · evaluate", "report"]
    assert said(reporter)[0] == "task 1 · train           reused"
    assert "task 2 · evaluate reused" in reporter.log.getvalue()


@pytest.mark.parametrize(
    "error", ["csc.errors.BadData", "csc.storage.uris.NoSuchFile", "csc.distributed.cluster.ClusterUnavailable"]
)
def test_an_error_of_ours_is_known_wherever_its_class_is(reporter: RunReporter, error: str):
    reporter.begin("train")
    for line in ("ValueError: of somebody else", "csc.training: not an error", f"{error}: no such file: split"):
        reporter.line(line)
    assert reporter.error == "no such file: split"


def test_lines_of_our_steps_are_shown_all_others_only_logged(reporter: RunReporter):
    reporter.begin("train")
    for line in ("task 1/3 · epoch 1/2", "some library talks", "retry: no answer; trying again in 60 s"):
        reporter.line(line)
    assert said(reporter)[1:] == ["  task 1/3 · epoch 1/2", "  retry: no answer; trying again in 60 s"]
    assert "some library talks" in reporter.log.getvalue()


def test_a_run_says_whose_preset_an_unknown_data_set_has(
    reporter: RunReporter, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    data = ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "set", "animals").path
    capsys.readouterr()
    ingest("animals-b0c2", str(data))
    reporter.begin("ingest")
    for line in capsys.readouterr().out.splitlines():
        reporter.line(line)
    shown = said(reporter)
    assert shown[1].startswith("  data: train ")
    assert shown[2].startswith("  note: no preset is named 'animals': settings are those of 'coco'")


def test_what_a_stopped_step_said_begins_after_the_inputs_that_kfp_prints(reporter: RunReporter):
    for step in ("train", "train-2"):
        reporter.begin(step)
        for line in ("[KFP Executor INFO]: Got executor_input:", "{", '    "inputs": {', "    }", "}"):
            reporter.line(line)
        reporter.line("warming up")
        reporter.line("}")  # of the step itself
    assert reporter.tail == ["warming up", "}"]


def test_a_step_that_says_nothing_for_long_is_reported_ever_more_rarely(reporter: RunReporter):
    reporter.begin("register-2")
    reporter.line("Retrying: connection refused")
    start = time.monotonic()
    for seconds in range(0, 500, 10):
        reporter.display.break_silence(start + seconds)
    last = "its last line: Retrying: connection refused"
    assert said(reporter)[1:] == [f"  running for {seconds} s; {last}" for seconds in (60, 120, 240, 480)]


def test_silence_is_watched_while_kfp_runs(reporter: RunReporter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(display, "_SILENCE", 0.5)
    with reporter.display:
        reporter.begin("train")
        time.sleep(1.2)
    assert said(reporter)[1].endswith("its last line: no output yet")


def test_a_run_waits_for_another_that_clears_up_after_it(tmp_path: Path):
    with exclusive_run(tmp_path, "one", {}):
        lock = (tmp_path / "runs" / "one.lock").open("a+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    threading.Timer(0.3, lock.close).start()
    with exclusive_run(tmp_path, "one", {}):
        assert lock.closed


def test_the_same_run_twice_at_once_is_refused_and_other_runs_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("csc.pipelines.local.lock._CLEARING_SECONDS", 0.2)
    with exclusive_run(tmp_path, "one", {}) as folder, exclusive_run(tmp_path, "two", {}) as other:
        assert folder != other
        with pytest.raises(BadData, match="the same run is going on there"), exclusive_run(tmp_path, "one", {}):
            pass
    with exclusive_run(tmp_path, "one", {}):
        pass


def test_a_run_whose_work_folder_was_removed_ends_in_peace_and_leaves_a_new_lock_alone(tmp_path: Path):
    lock = tmp_path / "work" / "runs" / "one.lock"
    with exclusive_run(tmp_path / "work", "one", {}):
        shutil.rmtree(tmp_path / "work")
    assert not lock.exists()
    with exclusive_run(tmp_path / "work", "one", {}):
        lock.unlink()
        lock.write_text("of another process")
    assert lock.read_text() == "of another process"


def test_a_disk_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    refused = pytest.raises(
        BadData, match=r"one\.lock: cannot be locked \(No locks available\); choose another --workdir$"
    )
    with refused, exclusive_run(tmp_path, "one", {}):
        pass


def test_a_folder_of_temporary_files_is_refused_if_its_name_is_too_long_for_sockets(
    monkeypatch: pytest.MonkeyPatch,
):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        fits, too_long = (Path(short, (LONGEST_TEMPORARY - len(short) - 1 + more) * "x") for more in (0, 1))
        for folder in (fits, too_long):
            folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(fits))
        with exclusive_run(Path(short), "one", {}) as temporary, socket.socket(socket.AF_UNIX) as made:
            Path(f"{temporary}/pymp-12345678").mkdir()  # as the processes of a step do
            made.bind(f"{temporary}/pymp-12345678/listener-12345678")
        monkeypatch.setattr(tempfile, "tempdir", str(too_long))
        with (
            pytest.raises(BadData, match=f"TMPDIR={too_long}: too long for the sockets"),
            exclusive_run(Path(short), "one", {}),
        ):
            pass


def test_runs_reuse_only_their_own_steps(tmp_path: Path):
    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    Path(tmp_path, "mlflow.db").touch()
    caches = {cache_folder(tmp_path, name, tracking) for name in ("one", "two")}
    assert len(caches) == 2
    kept = cache_folder(tmp_path, "one", tracking) / "step.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert cache_folder(tmp_path, "one", tracking) == kept.parent
    assert kept.is_file()
    Path(tmp_path, "mlflow.db").unlink()
    cache_folder(tmp_path, "one", tracking)
    assert not kept.exists()


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_no_step_begins_after_a_signal_whose_exception_was_lost(
    number: int, kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    @dsl.component
    def step(): ...

    @dsl.pipeline
    def two_steps():
        step().after(step())

    begun: list[str] = []

    def start(asked: Step, show: Show) -> int:
        begun.append(asked.name)
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in a finaliser
            signal.raise_signal(number)
        return 0

    monkeypatch.setattr(runner, "_step_runner", lambda *_: contextlib.nullcontext(start))
    compiler.Compiler().compile(two_steps, str(tmp_path / "two.yaml"))
    before = signal.getsignal(number)
    with interruptible(), pytest.raises(kind) as raised:
        runner.run_compiled(tmp_path / "two.yaml", {}, tmp_path, PlainDisplay(io.StringIO()))
    assert type(raised.value) is kind
    assert len(begun) == 1
    assert signal.getsignal(number) is before
