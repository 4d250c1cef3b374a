"""The label graph of a model as it grew: the matrix that relates the classes, task by task."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from csc.data.evidence import TaskFacts
from csc.report.overlay import data_uri, matrix_png
from csc.report.svg import WIDTH, cut, label, svg, title

__all__ = ["growth", "pairs_across_tasks"]

_NAMED = 24  # classes at most, for their names to fit
_EARLIER = 6  # matrices next to the last one, at most
_PAIRS = 5  # of classes


def growth(tasks: Sequence[TaskFacts], width: float = WIDTH) -> str:
    """Draw the matrix after each task, blocks of old and new classes marked, all in one scale of colours."""
    earlier = np.linspace(0, len(tasks) - 2, min(len(tasks) - 1, _EARLIER)).round().astype(int)  # evenly apart
    largest = max(float(np.abs(_off_diagonal(task)).max(initial=0)) for task in tasks)
    names = len(tasks[-1].classes) <= _NAMED and width > 600
    gutter = 96 if names else 4
    side = min(width - gutter - 8, 380.0)
    marks = _matrix(tasks[-1], tasks, gutter, 28, side, largest, names)
    height = 28 + side + 12
    x, y = (gutter + side + 28, 28.0) if width > 600 else (4.0, height + 24)
    rows = max(math.ceil(len(earlier) / 2), 1)
    small = min((width - x - 18) / 2, (side + 26) / rows - 26 if width > 600 else 150.0)
    for number, index in enumerate(earlier):
        left, top = x + number % 2 * (small + 14), y + number // 2 * (small + 26)
        marks += _matrix(tasks[index], tasks, left, top, small, largest, False)
        height = max(height, top + small + 8)
    return svg(width, height, "The label graph after each task", marks)


def _matrix(
    task: TaskFacts, tasks: Sequence[TaskFacts], left: float, top: float, side: float, largest: float, names: bool
) -> list[str]:
    matrix = np.array(task.correlation)
    count = len(matrix)
    cell = side / count
    box = f'x="{left:.1f}" y="{top:.1f}" width="{side:.1f}" height="{side:.1f}"'
    marks = [
        label(left, top - 8, f"after task {task.task}", "small muted"),
        f'<image {box} preserveAspectRatio="none" style="image-rendering: pixelated" '
        f'href="{data_uri(matrix_png(matrix, largest))}"/>',
    ]
    for earlier in tasks:
        if 0 < earlier.old < count:
            at = cell * earlier.old
            css = "axis" if earlier.old == task.old else "grid"
            across, down = f"M{left:.1f} {top + at:.1f}h{side:.1f}", f"M{left + at:.1f} {top:.1f}v{side:.1f}"
            marks.append(f'<path class="{css}" d="{across}{down}"/>')
    marks.append(f'<rect class="frame" stroke-opacity="0.35" {box}/>')
    if names:
        marks += [
            label(left - 8, top + cell * (row + 0.5) + 4, cut(name, 13), "small", "end", tip=name)
            for row, name in enumerate(task.classes)
        ]
        marks += _cells(task, matrix, left, top, cell)
    return marks


def _cells(task: TaskFacts, matrix: NDArray[np.float64], left: float, top: float, cell: float) -> list[str]:
    """Clear cells over the picture, for their tooltips."""
    marks = []
    for row, target in enumerate(task.classes):
        for column, source in enumerate(task.classes):
            tip = title(f"{target} gathers from {source}: {matrix[row, column]:+.3f}")
            box = f'x="{left + cell * column:.1f}" y="{top + cell * row:.1f}" width="{cell:.1f}" height="{cell:.1f}"'
            marks.append(f'<rect {box} fill-opacity="0">{tip}</rect>')
    return marks


def pairs_across_tasks(tasks: Sequence[TaskFacts]) -> list[tuple[str, str, float]]:
    """The strongest entries that relate classes of different tasks: who gathers, from whom, how much."""
    last = tasks[-1]
    matrix = _off_diagonal(last)
    bounds = [task.old for task in tasks if task.old]
    arrival = np.searchsorted(bounds, np.arange(len(matrix)), side="right")
    across = np.where(arrival[:, None] != arrival[None, :], np.abs(matrix), 0)
    strongest = np.argsort(-across, axis=None, kind="stable")[:_PAIRS]
    positions = [divmod(int(index), len(matrix)) for index in strongest]
    return [
        (last.classes[row], last.classes[column], float(matrix[row, column]))
        for row, column in positions
        if across[row, column] > 0
    ]


def _off_diagonal(task: TaskFacts) -> NDArray[np.float64]:
    """The matrix without what classes take from themselves."""
    matrix = np.array(task.correlation, np.float64)
    np.fill_diagonal(matrix, 0)
    return matrix
