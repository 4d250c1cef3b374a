"""The progress lines."""

import io
from types import SimpleNamespace

import pytest

import csc.data.progress
from csc.data.progress import Bar, Progress
from tests.unit.training.bench import LINEAR, Bench, settings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only when told."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(csc.data.progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def run_epochs(stream: io.StringIO, clock: SimpleNamespace) -> None:
    """Two epochs of 40 images in batches of 10, a second each."""
    progress = Progress("task 1/2", 2, 40, stream)
    for epoch in range(2):
        for _ in range(4):
            clock.now += 1
            progress.advance(epoch, 10)
        progress.epoch(epoch, {"ce": 0.5, "kd": 0.25})


def test_a_log_gets_one_line_per_epoch(clock: SimpleNamespace):
    stream = io.StringIO()
    run_epochs(stream, clock)
    assert stream.getvalue() == (
        "task 1/2 · epoch 1/2 · loss ce 0.5000 · kd 0.2500 · 10 images/s · 4 s left\n"
        "task 1/2 · epoch 2/2 · loss ce 0.5000 · kd 0.2500 · 10 images/s · 0 s left\n"
    )


def test_a_terminal_line_is_rewritten_in_place(clock: SimpleNamespace):
    stream = Terminal()
    run_epochs(stream, clock)
    lines = stream.getvalue().split("\n")
    assert len(lines) == 3
    assert lines[2] == ""
    for line in lines[:2]:
        writes = line.split("\r\x1b[K")
        assert writes[0] == ""
        assert len(writes) == 1 + 4 + 1  # every second, then the whole epoch
        assert "ce 0.5000" in writes[-1]


def test_the_time_left_falls_steadily(clock: SimpleNamespace):
    stream = Terminal()
    run_epochs(stream, clock)
    writes = stream.getvalue().replace("\n", "").split("\r\x1b[K")[1:]
    left = [int(write.rsplit("· ", 1)[1].split()[0]) for write in writes]
    assert left == [7, 6, 5, 4, 4, 3, 2, 1, 0, 0]


def test_a_terminal_is_not_flooded(clock: SimpleNamespace):
    stream = Terminal()
    progress = Progress("task", 1, 1000, stream)
    for _ in range(100):
        clock.now += 0.01
        progress.advance(0, 1)
    assert 3 <= stream.getvalue().count("\r") <= 5


def test_training_reports_each_epoch_to_a_log(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.trainer(settings(LINEAR)).run()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" · ")[:2] for line in lines] == [["task", "epoch 1/2"], ["task", "epoch 2/2"]]
    assert all(" · loss ce " in line for line in lines)


def run_bar(stream: io.StringIO, clock: SimpleNamespace, seconds: float = 12.0, done: int = 0) -> None:
    """Twenty steps of 50 images."""
    with Bar("ingest", 1000, "images", stream, done) as bar:
        for _ in range((1000 - done) // 50):
            clock.now += seconds
            bar.advance(50)


def test_a_log_of_long_work_gets_a_line_for_each_tenth_and_one_at_the_end(clock: SimpleNamespace):
    stream = io.StringIO()
    run_bar(stream, clock)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ingest · 100/1,000 images · 4.2 images/s · 3 min 36 s left"
    assert [line.split()[2] for line in lines[:-1]] == [f"{tenth}00/1,000" for tenth in range(1, 10)]
    assert lines[-1] == "ingest · 1,000 images · 4.2 images/s · 4 min 0 s"


def test_a_log_of_short_work_gets_one_line(clock: SimpleNamespace):
    stream = io.StringIO()
    run_bar(stream, clock, seconds=0.1)
    assert stream.getvalue() == "ingest · 1,000 images · 500 images/s · 2 s\n"


def test_work_of_an_earlier_try_counts_as_done_but_not_as_speed(clock: SimpleNamespace):
    stream = Terminal()
    run_bar(stream, clock, seconds=1, done=500)
    writes = stream.getvalue().split("\r\x1b[K")[1:]
    assert writes[0] == "ingest · 550/1,000 images · 50 images/s · 9 s left"
    assert writes[-1] == "ingest · 500 images · 50 images/s · 10 s\n"


def test_a_live_bar_stays_in_one_line_and_is_not_flooded(clock: SimpleNamespace):
    stream = Terminal()
    run_bar(stream, clock, seconds=0.05)
    assert stream.getvalue().count("\n") == 1
    assert 4 <= stream.getvalue().count("\r\x1b[K") <= 6


@pytest.mark.parametrize(("stream", "left"), [(io.StringIO(), ""), (Terminal(), "\r\x1b[K")])
def test_work_that_fails_leaves_a_clean_line_and_no_claim(stream: io.StringIO, left: str):
    def fail() -> None:
        with Bar("ingest", 10, "images", stream) as bar:
            bar.advance(5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert stream.getvalue() == left


def test_a_bar_of_nothing_ends_well(clock: SimpleNamespace):
    stream = io.StringIO()
    with Bar("ingest", 0, "images", stream):
        pass
    assert stream.getvalue() == "ingest · 0 images · 0.0 images/s · 0 s\n"
