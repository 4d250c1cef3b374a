"""Figures and tables of how a run was trained: its losses, and the time it took."""

import math
from collections.abc import Sequence

from csc.data.evidence import NO_TERMS, TaskFacts
from csc.data.progress import duration
from csc.report.svg import WIDTH, circle, label, legend, polyline, svg

__all__ = ["losses", "terms", "time_taken", "times"]

_COLOURS = ("first", "second", "third", "fourth")


def losses(tasks: Sequence[TaskFacts], width: float = WIDTH) -> str:
    """Draw the terms of the loss over the epochs of all tasks, one after the other."""
    left, right, top, bottom = 46, width - 12, 44, 250
    drawn = terms(tasks)
    values = [epoch[term] for task in tasks for epoch in task.epochs for term in drawn if term in epoch]
    low, high = min(0.0, *values), max(values) or 1.0
    epochs = sum(len(task.epochs) for task in tasks)

    def x_of(epoch: float) -> float:
        return left + (right - left) * epoch / epochs

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low or 1)

    marks = []
    for value in _round_values(low, high):
        marks.append(f'<path class="grid" d="M{left} {y_of(value):.1f}H{right}"/>')
        marks.append(label(left - 8, y_of(value) + 4, f"{value:g}", "muted", "end"))
    start = 0
    for task in tasks:
        marks.append(f'<path class="grid" d="M{x_of(start):.1f} {top - 6}V{bottom}"/>')
        if (x_of(start + len(task.epochs)) - x_of(start)) > 44:
            marks.append(label(x_of(start) + 4, top - 8, f"task {task.task}", "small muted"))
        for term, css in zip(drawn, _COLOURS, strict=False):
            points = [
                (x_of(start + number + 0.5), y_of(epoch[term]), epoch[term], number + 1)
                for number, epoch in enumerate(task.epochs)
                if term in epoch
            ]
            marks.append(polyline([(x, y) for x, y, _, _ in points], css))
            marks += [
                circle(x, y, 2.5, css, f"task {task.task}, epoch {number}: {term} {value:.4f}")
                for x, y, value, number in points
            ]
        start += len(task.epochs)
    marks.append(f'<path class="axis" d="M{left} {y_of(0):.1f}H{right}"/>')
    marks.append(label((left + right) / 2, bottom + 24, "epochs, task after task", "muted", "middle"))
    marks += legend(left, dict(zip(_COLOURS, drawn, strict=False)))
    return svg(width, bottom + 34, "Losses over the epochs", marks)


def terms(tasks: Sequence[TaskFacts]) -> list[str]:
    """The terms of the loss that were logged, as many as there are colours; their sum if it is all there is."""
    logged = dict.fromkeys(name for task in tasks for epoch in task.epochs for name in epoch)
    return [name for name in logged if name not in NO_TERMS][: len(_COLOURS)] or [n for n in logged if n == "loss"]


def _round_values(low: float, high: float) -> list[float]:
    """Some five round values between two bounds.

    >>> _round_values(-0.067, 0.66)
    [0.0, 0.2, 0.4, 0.6]
    """
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(step * number, 10) for number in range(first, last + 1)]


def times(tasks: Sequence[TaskFacts]) -> tuple[list[str], list[list[str]]]:
    """How long each task took, as the head and the rows of a table."""
    head = ["task", "images", "epochs", "training", "test images", "scoring"]
    rows = [
        [
            str(task.task),
            f"{task.train_images:,}",
            str(len(task.epochs)),
            time_taken(task.train_seconds),
            f"{task.test_images:,}",
            time_taken(task.test_seconds),
        ]
        for task in tasks
    ]
    return head, rows


def time_taken(seconds: float) -> str:
    """A duration, with tenths of a second if it is short.

    >>> time_taken(4.24), time_taken(42.4), time_taken(252)
    ('4.2 s', '42 s', '4 min 12 s')
    """
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
