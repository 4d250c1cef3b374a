"""The live display of a run: what a terminal shows of it, and how long it expects the rest to take."""

import io

import pytest
from rich.console import Console

from csc.data.progress import Bar, Progress, ProgressTick
from csc.pipelines.local.live_display import Forecast, LiveDisplay

TITLES = [f"task {task} · {step}" for task in (1, 2, 3) for step in ("train", "evaluate", "register")]


@pytest.fixture
def display() -> LiveDisplay:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    display = LiveDisplay(console.file, {1: 4, 2: 4, 3: 2}, console)
    display.expect(["ingest", *TITLES, "report"])
    return display


def drawn(display: LiveDisplay) -> str:
    with display.console.capture() as capture:
        display.console.print(display.live.get_renderable())
    return capture.get()


def printed(display: LiveDisplay) -> list[str]:
    return [line.rstrip() for line in display.console.file.getvalue().splitlines()]


def test_the_step_at_work_is_drawn_with_its_bar_its_speed_and_the_time_left(display: LiveDisplay):
    display.begin("task 1 · train")
    assert "task 1 · train 0 s" in drawn(display)
    display.progress(ProgressTick("epoch 2/5", 50, 200, "images", 1234.5, left=40.0))
    display.line("task 1/3 · epoch 1/5 · ce 0.6 · kd 0.2 · 1200 images/s · 50 s left")
    first = drawn(display)
    for words in ("task 1 · train", "epoch 2/5", "━", "1,234 images/s", "ce 0.6 · kd 0.2", "task 1: 40 s left"):
        assert words in first
    assert "scenario: about 1 min 40 s left" in first  # 4 classes more, then 2, at 10 s each
    display.progress(ProgressTick("epoch 2/5", 150, 200, "images", 1234.5, left=20.0))
    assert drawn(display) != first


def test_finished_tasks_are_lines_and_reused_ones_say_so(display: LiveDisplay):
    for step in ("train", "evaluate", "register"):
        display.reuse(f"task 1 · {step}")
    display.reuse("task 2 · train")
    display.begin("task 2 · evaluate")
    display.line("task 2/3: mAP 61.20 · CF1 3.00 on 67 test images, 8 classes")
    display.end("task 2 · evaluate", 1.0)
    display.begin("task 2 · register")
    display.line("retry: no answer; trying again in 60 s")
    display.end("task 2 · register", 1.0)
    display.line("task 3/3 · asked to stop · saved after update 3 of 9 in epoch 1; the next try resumes there")
    display.begin("report")
    display.end("report", 2.0)
    assert printed(display) == [
        "✓ task 1   reused",
        "  retry: no answer; trying again in 60 s",
        "✓ task 2   mAP 61.20 · CF1 3.00 · 1 step reused (0 s)",
        "  task 3/3 · asked to stop · saved after update 3 of 9 in epoch 1; the next try resumes there",
        "✓ report   (2 s)",
    ]


def test_a_note_is_shown_whole_and_takes_nothing_from_the_line_of_its_step(display: LiveDisplay):
    display.begin("ingest")
    display.line("data: train 20 · test 10 images · fingerprint abc")
    display.line(f"note: {'a word ' * 20}at the end")
    display.end("ingest", 1.0)
    shown = printed(display)
    assert " ".join(" ".join(shown[:-1]).split()) == f"note: {'a word ' * 20}at the end"
    assert shown[-1] == "✓ ingest   train 20 · test 10 images · fingerprint abc (1 s)"


def test_the_forecast_counts_what_is_still_to_come_by_the_classes_of_its_tasks():
    forecast = Forecast({1: 4, 2: 4, 3: 2})
    forecast.coming = set(TITLES)
    assert forecast.left("task 1 · evaluate", 1.0, None) is None
    forecast.ended("task 1 · train", 40.0)
    forecast.ended("task 1 · evaluate", 4.0)
    forecast.ended("task 1 · register", 2.0)
    task, scenario = forecast.left("task 2 · train", 10.0, 30.0)
    assert task == pytest.approx(30 + 4 + 2)
    assert scenario == pytest.approx(30 + 4 + 2 + 20 + 2 + 1)
    assert forecast.left("task 2 · train", 10.0, None) == pytest.approx((30 + 6, 30 + 6 + 23))
    forecast.coming -= {"task 3 · train", "task 3 · evaluate", "task 3 · register"}
    assert forecast.left("task 2 · train", 90.0, None) == pytest.approx((6, 6))


def test_an_interrupted_display_leaves_the_cursor_visible(display: LiveDisplay):
    def interrupted() -> None:
        with display:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    shown = display.console.file.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize("asked", [True, False])
def test_work_reports_its_progress_in_lines_if_it_is_asked_to(asked: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CSC_PROGRESS", "1" if asked else "")
    monkeypatch.setattr("csc.data.progress.REFRESH", 0.0)
    out = io.StringIO()
    training = Progress("task 1/2", epochs=3, images_per_epoch=100, stream=out, finished=1)
    training.advance(1, 60)
    training.advance(1, 40)
    training.epoch(1, {})
    training.advance(2, 60)
    with Bar("data: embed", 10, "images", out) as bar:
        bar.advance(4)
    reports = [report for line in out.getvalue().splitlines() if (report := ProgressTick.parse(line))]
    found = [(report.title, report.done, report.total) for report in reports]
    expected = [("epoch 2/3", 60, 100), ("epoch 2/3", 100, 100), ("epoch 3/3", 60, 100), ("data: embed", 4, 10)]
    assert found == (expected if asked else [])
