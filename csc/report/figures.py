"""Figures of a run as SVG, each whole in itself, from its metrics alone; `width` is that of the page it stands in."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from csc.artifacts import Metrics, RunResults, TaskResult
from csc.report.paper import paper_row_for
from csc.report.svg import (
    WIDTH,
    bar,
    circle,
    compact,
    cut,
    label,
    legend,
    percent_grid,
    percent_y,
    polyline,
    spread,
    svg,
    ticks,
    title,
)

__all__ = [
    "ap_heatmap",
    "confidences",
    "curve",
    "curves",
    "precision_recall_bars",
    "task_matrix",
]

SERIES = {"mAP": "first", "CF1": "second", "OF1": "third"}
# Of many lines: colours that stay apart on light and dark ground; when all are used, the same ones dashed.
_LINES = ("#0b7fd4", "#e0680f", "#12936c", "#c0448f", "#8a6d00", "#7b5fd6", "#d23c3c", "#5f7d8c")
_DASHES = ("none", "7 4", "2 3")


def curve(run: RunResults, width: float = WIDTH) -> str:
    """Draw mAP, CF1 and OF1 over the number of classes seen, with the paper's last mAP if it is known."""
    left, right, top, bottom = 46, width - 116, 14, 300
    xs, marks = _course([len(task.seen) for task in run.tasks], left, right, top, bottom)
    ends = []
    for name, colour in reversed(SERIES.items()):  # mAP last, so that it lies on top
        ys = [percent_y(task.metrics[name], top, bottom) for task in run.tasks]
        marks.append(polyline(list(zip(xs, ys, strict=True)), colour))
        for x, y, task in zip(xs, ys, run.tasks, strict=True):
            tip = f"task {task.task}, {len(task.seen)} classes: {name} {task.metrics[name]:.1f}"
            marks.append(circle(x, y, 4.5, colour, tip))
        ends.append((ys[-1], f"{name} {run.last.metrics[name]:.1f}", f"strong {colour}"))
    paper, height = paper_row_for(run), bottom + 46
    if paper is not None:
        theirs, star = paper.numbers["last_mAP"], "*" if paper.note else ""
        y = percent_y(theirs, top, bottom)
        tip = f"the paper's last mAP: {theirs:.1f}" + (f"; {paper.note}" if paper.note else "")
        # Before the curves, so that it lies behind them.
        marks.insert(1, f'<path class="dashed" d="M{left} {y:.1f}H{right}">{title(tip)}</path>')
        ends.append((y, f"paper mAP {theirs:.1f}{star}", "muted"))
        if paper.note:
            marks.append(label(left, height + 12, cut(f"* {paper.note}", round(width / 6.6)), "muted", tip=paper.note))
            height += 24
    apart = spread([y for y, _, _ in ends], gap=15, lowest=bottom)
    marks += [label(right + 10, y + 4, text, css) for y, (_, text, css) in zip(apart, ends, strict=True)]
    return svg(width, height, "mAP, CF1 and OF1 after each task", marks)


def curves(lines: Mapping[str, Sequence[float]], seen: Sequence[int], width: float = WIDTH) -> str:
    """Draw the mAP of several methods, by name, over the classes seen after each task; on a phone names stand below."""
    narrow = width < 600
    left, right, top = 46, width - (12 if narrow else 210), 14
    bottom = 300 if narrow else max(300, top + 15 * len(lines))
    xs, marks = _course(seen, left, right, top, bottom)
    ends = []
    for index, (name, values) in enumerate(lines.items()):
        colour = _LINES[index % len(_LINES)]
        dashes = _DASHES[index // len(_LINES) % len(_DASHES)]
        ys = [percent_y(value, top, bottom) for value in values]
        paint = f' stroke="{colour}" stroke-dasharray="{dashes}"'
        marks.append(polyline(list(zip(xs, ys, strict=True)), "", paint))
        for x, y, count, value in zip(xs, ys, seen, values, strict=True):
            marks.append(circle(x, y, 4, "", f"{name}, {count} classes: mAP {value:.1f}", f' fill="{colour}"'))
        ends.append((ys[-1], f"{cut(name, 40 if narrow else 24)} {values[-1]:.1f}", colour, name))
    below = [bottom + 62.0 + 18 * index for index in range(len(ends))]
    apart = below if narrow else spread([y for y, *_ in ends], gap=15, lowest=bottom)
    x = left if narrow else right + 10
    for y, (_, text, colour, name) in zip(apart, ends, strict=True):
        marks.append(f'<rect fill="{colour}" x="{x}" y="{y - 5:.1f}" width="9" height="9" rx="2"/>')
        marks.append(label(x + 15, y + 4, text, "small", tip=name))
    return svg(width, below[-1] + 14 if narrow else bottom + 46, "mAP after each task", marks)


def _course(seen: Sequence[int], left: float, right: float, top: float, bottom: float) -> tuple[list[float], list[str]]:
    """The axes of percent over classes seen, and where each task stands on the lower one."""
    span = max(seen[-1] - seen[0], 1)
    xs = [right - (right - left - 16) * (seen[-1] - count) / span for count in seen]
    marks = [percent_grid(left, right, top, bottom), *ticks(xs, [str(count) for count in seen], bottom)]
    return xs, [*marks, label((left + right) / 2, bottom + 38, "classes seen", "muted", "middle")]


def ap_heatmap(run: RunResults, width: float = WIDTH) -> str:
    """Draw the AP of each class after each task: classes in rows by task of arrival, tasks in columns."""
    narrow = width < 600
    left, top, row_height, group_gap, lost_width = 96 if narrow else 206, 40, 20, 8, 62 if narrow else 84
    cell = min(74.0, (width - left - lost_width) / len(run.tasks))
    edge = left + cell * len(run.tasks)
    centres = [left + cell * (column + 0.5) for column in range(len(run.tasks))]
    marks = ticks(centres, [str(task.task) for task in run.tasks], top - 26)
    marks.append(label(left + cell * len(run.tasks) / 2, top - 25, "AP after task", "muted", "middle"))
    marks.append(label(edge + lost_width - 4, top - 8, "since best", "muted", "end"))
    y = float(top)
    for group, arrival in enumerate(run.tasks):
        earlier = run.tasks[group - 1] if group else None
        names = arrival.seen[len(earlier.seen) if earlier else 0 :]
        if not narrow:
            marks.append(label(2, y + 14, _arrival(names, earlier, arrival), "muted"))
        for name in names:
            after = list(zip(centres, run.tasks, strict=True))[group:]
            values = [(x, task, task.metrics["AP"][name]) for x, task in after]
            marks.append(label(left - 10, y + 14, cut(name, 12 if narrow else 20), "", "end", tip=name))
            for x, task, ap in values:
                tip = f"{name} after task {task.task}: AP {ap:.1f}"
                marks.append(_heat_cell(x - cell / 2, y, cell, row_height, ap, tip))
            lost = max(ap for _, _, ap in values) - values[-1][2]
            marks.append(label(edge + lost_width - 4, y + 14, f"−{lost:.1f}" if lost >= 0.05 else "0", "muted", "end"))
            y += row_height
        y += group_gap
    return svg(edge + lost_width, y, "AP of each class after each task", marks)


def task_matrix(run: RunResults, width: float = WIDTH) -> str:
    """Draw the mean AP of each task's classes after each task: the lower triangle of continual learning."""
    left, top, height = 74, 40, 28
    cell = min(74.0, (width - left) / len(run.tasks))
    centres = [left + cell * (column + 0.5) for column in range(len(run.tasks))]
    marks = ticks(centres, [str(task.task) for task in run.tasks], top - 26)
    marks.append(label(left + cell * len(run.tasks) / 2, top - 25, "classes of task", "muted", "middle"))
    for row, after in enumerate(run.tasks):
        y = top + row * height
        marks.append(label(left - 10, y + 18, f"after {after.task}", "muted", "end"))
        seen = 0
        for column, arrival in enumerate(run.tasks[: row + 1]):
            names, seen = arrival.seen[seen:], len(arrival.seen)
            ap = sum(after.metrics["AP"][name] for name in names) / len(names)
            tip = f"classes of task {arrival.task} after task {after.task}: mean AP {ap:.1f}"
            marks.append(_heat_cell(left + cell * column, y, cell, height, ap, tip))
    return svg(left + cell * len(run.tasks), top + height * len(run.tasks), "Mean AP by task", marks)


def confidences(models: Mapping[str, Metrics], width: float = WIDTH) -> str:
    """Draw how confident models are of labels that are there and of labels that are not, all in one scale."""
    counts = [count for model in models.values() for kind in _MEANING for count in model.confidence[kind]]
    decades = math.ceil(math.log10(max(10, *counts)))
    across = 2 if width > 600 and len(models) > 1 else 1
    side, tall = (width - 36 * (across - 1)) / across, 296 if len(models) == 1 else 326
    marks = legend(40, {"second": "label absent", "first": "label present"})
    for number, (name, model) in enumerate(models.items()):
        left, top = 40 + number % across * (side + 36), 44 + number // across * tall
        if name:
            top += 30
            marks.append(label(left - 30, top - 36, cut(name, round(side / 7.8)), "strong", tip=name))
        marks += _histogram(model, left, left + side - 50, top, top + 206, decades)
    return svg(width, tall * math.ceil(len(models) / across), "Confidences of the last model", marks)


def _histogram(model: Metrics, left: float, right: float, top: float, bottom: float, decades: int) -> list[str]:
    """Bars of labels by confidence, their counts on a logarithmic scale, and the threshold."""
    bins, threshold = model.confidence, model.threshold

    def y_of(count: float) -> float:  # one count must be seen, so the axis begins below 1
        return bottom - (bottom - top) * (math.log10(count) + 0.3) / (decades + 0.3)

    def x_of(value: float) -> float:
        return left + (right - left) * value

    marks = []
    for power in range(decades + 1):
        marks.append(f'<path class="grid" d="M{left:.1f} {y_of(10**power):.1f}H{right:.1f}"/>')
        marks.append(label(left - 8, y_of(10**power) + 4, compact(10**power), "muted", "end"))
    gap = 4 if right - left > 600 else 1
    for index, (low, high) in enumerate(pairwise(bins["edges"])):
        room = (x_of(high) - x_of(low)) / 2 - gap - 1
        for side, (kind, css) in enumerate((("negatives", "second"), ("positives", "first"))):
            if count := int(bins[kind][index]):
                x, y = x_of(low) + gap + side * (room + 2), y_of(count)
                tip = f"confidence {low:g} to {high:g}: {count:,} labels {_MEANING[kind]}"
                marks.append(bar(x, y, room, bottom - y, css, tip))
                if room > 20:
                    marks.append(label(x + room / 2, y - 4, compact(count), "small muted", "middle"))
    marks.append(f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>')
    marks += ticks([x_of(edge) for edge in bins["edges"]], [f"{edge:g}" for edge in bins["edges"]], bottom)
    marks.append(label((left + right) / 2, bottom + 38, "confidence", "muted", "middle"))
    marks.append(f'<path class="dashed" d="M{x_of(threshold):.1f} {top - 12:.1f}V{bottom:.1f}"/>')
    x, anchor = (x_of(threshold) + 6, "start") if threshold < 0.5 else (x_of(threshold) - 6, "end")
    return [*marks, label(x, top - 14, f"threshold {threshold:g}", "muted", anchor)]


def precision_recall_bars(run: RunResults, width: float = WIDTH) -> str:
    """Draw precision next to recall after each task, as a mean over classes (CP, CR) and over all labels (OP, OR)."""
    middle = width / 2
    sides = (
        [(46.0, middle - 30, 62.0), (middle + 24, width, 62.0)] if width > 600 else [(46, width, 62), (46, width, 356)]
    )
    marks = legend(sides[0][0], {"first": "precision", "second": "recall"})
    for (left, right, top), (precision, recall, what) in zip(sides, _MEANS, strict=True):
        bottom = top + 200
        gap = run.last.metrics[recall] - run.last.metrics[precision]
        marks.append(label(left, top - 20, f"{precision}, {recall}: {what}", "strong"))
        at_the_end = f"{recall} − {precision} at the end: {gap:+.1f}".replace("-", "−")
        marks.append(label(right, top - (20 if width > 600 else 6), at_the_end, "muted", "end"))
        marks.append(percent_grid(left, right, top, bottom))
        slot = (right - left) / len(run.tasks)
        thick, apart = min(22.0, slot * 0.38), min(1.0, slot * 0.05)
        centres = [left + slot * (index + 0.5) for index in range(len(run.tasks))]
        for x, task in zip(centres, run.tasks, strict=True):
            for start, name, css in ((x - thick - apart, precision, "first"), (x + apart, recall, "second")):
                value = task.metrics[name]
                y = percent_y(value, top, bottom)
                marks.append(bar(start, y, thick, bottom - y, css, f"task {task.task}: {name} {value:.1f}"))
        marks += ticks(centres, [str(task.task) for task in run.tasks], bottom)
        marks.append(label((left + right) / 2, bottom + 38, "task", "muted", "middle"))
    return svg(width, sides[-1][2] + 246, "Precision and recall after each task", marks)


_MEANING = {"positives": "present", "negatives": "absent"}
_MEANS = (("CP", "CR", "mean over classes"), ("OP", "OR", "over all labels"))


def _heat_cell(x: float, y: float, width: float, height: float, ap: float, tip: str) -> str:
    """Draw one AP as the opacity of one colour, so that low values sink into the page in either mode."""
    box = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}"'
    rect = f'<rect class="heat" {box} fill-opacity="{0.04 + 0.0096 * ap:.3f}">{title(tip)}</rect>'
    if width < 30:
        return rect
    css = "small on-heat" if ap > 55 else "small"
    return rect + label(x + width / 2, y + height / 2 + 4, f"{ap:.1f}", css, "middle")


def _arrival(names: Sequence[str], earlier: TaskResult | None, task: TaskResult) -> str:
    """Name the task in which classes arrived, or the tasks when the run does not hold all of them."""
    if all(name in task.new for name in names):
        return f"task {task.task}"
    return f"task {earlier.task + 1 if earlier else 1}–{task.task}"
