"""Figures of a run as SVG, each whole in itself: it can stand in a page, in a file or in a tracking server.

Colours follow the reader's light or dark mode and stay apart for colour-blind eyes; every mark has a tooltip.
"""

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from csc.artifacts import Run, TaskResult
from csc.report.paper import paper_numbers
from csc.report.text import printable

__all__ = ["ap_heatmap", "confidence", "curve", "curves", "escape", "precision_recall_bars", "theme"]

WIDTH = 860
SERIES = {"mAP": "first", "CF1": "second", "OF1": "third"}

_LIGHT = {
    "ink": "#1b1f24",
    "muted": "#5d6670",
    "grid": "#e2e5e9",
    "surface": "#ffffff",
    "first": "#0b61a8",
    "second": "#c2500a",
    "third": "#0a7859",
    "heat": "#08376f",
    "on-heat": "#ffffff",
}
_DARK = {
    "ink": "#e7e9ec",
    "muted": "#9aa4ae",
    "grid": "#30363d",
    "surface": "#14171b",
    "first": "#6bb3f5",
    "second": "#f5995b",
    "third": "#4cc7a1",
    "heat": "#a9d1ff",
    "on-heat": "#0c1116",
}
# Of many lines: colours that stay apart on light and dark ground, then the same dashed.
_LINES = ("#0b7fd4", "#e0680f", "#12936c", "#c0448f", "#8a6d00", "#7b5fd6", "#d23c3c", "#5f7d8c")
_DASHES = ("none", "7 4", "2 3")
_RULES = """
.csc-figure { background: var(--surface); font: 12px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; max-width: 100%; height: auto; }
.csc-figure text { fill: var(--ink); }
.csc-figure .muted { fill: var(--muted); }
.csc-figure .strong { font-weight: 600; }
.csc-figure .small { font-size: 11px; }
.csc-figure .grid { stroke: var(--grid); }
.csc-figure .axis { stroke: var(--muted); }
.csc-figure .dashed { stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 5 4; }
.csc-figure .line { fill: none; stroke-width: 2.25; stroke-linejoin: round; }
.csc-figure .dot { stroke: var(--surface); stroke-width: 1.5; }
.csc-figure .heat { fill: var(--heat); }
.csc-figure .on-heat { fill: var(--on-heat); }
.csc-figure .first { fill: var(--first); } .csc-figure .line.first { fill: none; stroke: var(--first); }
.csc-figure .second { fill: var(--second); } .csc-figure .line.second { fill: none; stroke: var(--second); }
.csc-figure .third { fill: var(--third); } .csc-figure .line.third { fill: none; stroke: var(--third); }
"""


def theme(selector: str) -> str:
    """Return the CSS that gives `selector` the colours of light or dark mode as variables."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in tone.items()) for tone in (_LIGHT, _DARK))
    return f"{selector} {{ {light} }}\n@media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"


def escape(text: str) -> str:
    """Make any text, such as a class name, safe inside HTML and SVG, in content and in attributes.

    >>> escape('<b>&"x')
    '&lt;b&gt;&amp;&quot;x'
    """
    return html.escape(printable(text))


def curve(run: Run) -> str:
    """Draw mAP, CF1 and OF1 over the number of classes seen, with the paper's last mAP if it is known."""
    left, right, top, bottom = 46, WIDTH - 116, 14, 300
    seen = [len(task.seen) for task in run.tasks]
    span = max(seen[-1] - seen[0], 1)
    xs = [right - (right - left - 16) * (seen[-1] - count) / span for count in seen]
    marks = [_percent_grid(left, right, top, bottom), *_ticks(xs, [str(count) for count in seen], bottom)]
    marks.append(_text((left + right) / 2, bottom + 38, "classes seen", "muted", "middle"))
    ends = []
    for name, colour in reversed(SERIES.items()):  # mAP last, so that it lies on top
        ys = [_percent_y(task.metrics[name], top, bottom) for task in run.tasks]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        marks.append(f'<polyline class="line {colour}" points="{points}"/>')
        for x, y, task in zip(xs, ys, run.tasks, strict=True):
            tip = f"task {task.task}, {len(task.seen)} classes: {name} {task.metrics[name]:.1f}"
            marks.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{_title(tip)}</circle>')
        ends.append((ys[-1], f"{name} {run.last.metrics[name]:.1f}", f"strong {colour}"))
    paper = paper_numbers(run.scenario, run.method)
    if paper is not None:
        y = _percent_y(paper["last_mAP"], top, bottom)
        tip = f"the paper's last mAP: {paper['last_mAP']:.1f}"
        # Before the curves, so that it lies behind them.
        marks.insert(1, f'<path class="dashed" d="M{left} {y:.1f}H{right}">{_title(tip)}</path>')
        ends.append((y, f"paper mAP {paper['last_mAP']:.1f}", "muted"))
    spread = _spread([y for y, _, _ in ends], gap=15, lowest=bottom)
    marks += [_text(right + 10, y + 4, label, css) for y, (_, label, css) in zip(spread, ends, strict=True)]
    return _svg(WIDTH, bottom + 46, "mAP, CF1 and OF1 after each task", marks)


def curves(lines: Mapping[str, Sequence[float]], seen: Sequence[int]) -> str:
    """Draw the mAP of several methods over the number of classes seen, each named at its end.

    Args:
        lines: by name, a value per task.
        seen: classes after each task.
    """
    left, right, top = 46, WIDTH - 210, 14
    bottom = max(300, top + 15 * len(lines))
    span = max(seen[-1] - seen[0], 1)
    xs = [right - (right - left - 16) * (seen[-1] - count) / span for count in seen]
    marks = [_percent_grid(left, right, top, bottom), *_ticks(xs, [str(count) for count in seen], bottom)]
    marks.append(_text((left + right) / 2, bottom + 38, "classes seen", "muted", "middle"))
    ends = []
    for index, (name, values) in enumerate(lines.items()):
        colour = _LINES[index % len(_LINES)]
        dashes = _DASHES[index // len(_LINES) % len(_DASHES)]
        ys = [_percent_y(value, top, bottom) for value in values]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        marks.append(f'<polyline class="line" stroke="{colour}" stroke-dasharray="{dashes}" points="{points}"/>')
        for x, y, count, value in zip(xs, ys, seen, values, strict=True):
            tip = _title(f"{name}, {count} classes: mAP {value:.1f}")
            marks.append(f'<circle class="dot" fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">{tip}</circle>')
        ends.append((ys[-1], f"{_cut(name, 24)} {values[-1]:.1f}", colour, name))
    spread = _spread([y for y, *_ in ends], gap=15, lowest=bottom)
    for y, (_, label, colour, name) in zip(spread, ends, strict=True):
        marks.append(f'<rect fill="{colour}" x="{right + 10}" y="{y - 5:.1f}" width="9" height="9" rx="2"/>')
        marks.append(_text(right + 25, y + 4, label, "small", title=name))
    return _svg(WIDTH, bottom + 46, "mAP after each task", marks)


def ap_heatmap(run: Run) -> str:
    """Draw the AP of each class after each task: classes in rows by task of arrival, tasks in columns."""
    left, top, row_height, group_gap, lost_width = 206, 40, 20, 8, 84
    cell = min(74.0, (WIDTH - left - lost_width) / len(run.tasks))
    edge = left + cell * len(run.tasks)
    centres = [left + cell * (column + 0.5) for column in range(len(run.tasks))]
    marks = [_text(x, top - 8, str(task.task), "muted", "middle") for x, task in zip(centres, run.tasks, strict=True)]
    marks.append(_text(left + cell * len(run.tasks) / 2, top - 25, "AP after task", "muted", "middle"))
    marks.append(_text(edge + lost_width - 4, top - 8, "since best", "muted", "end"))
    y = float(top)
    for group, arrival in enumerate(run.tasks):
        earlier = run.tasks[group - 1] if group else None
        marks.append(_text(2, y + 14, _arrival(earlier, arrival), "muted"))
        for name in arrival.seen[len(earlier.seen) if earlier else 0 :]:
            after = list(zip(centres, run.tasks, strict=True))[group:]
            values = [(x, task, task.metrics["AP"][name]) for x, task in after]
            marks.append(_text(left - 10, y + 14, _cut(name), "", "end", title=name))
            marks += [_heat_cell(x, y, cell, row_height, name, task, ap) for x, task, ap in values]
            lost = max(ap for _, _, ap in values) - values[-1][2]
            marks.append(_text(edge + lost_width - 4, y + 14, f"−{lost:.1f}" if lost >= 0.05 else "0", "muted", "end"))
            y += row_height
        y += group_gap
    return _svg(edge + lost_width, y, "AP of each class after each task", marks)


def confidence(run: Run) -> str:
    """Draw how confident the last model is of labels that are there and of labels that are not."""
    left, right, top, bottom = 46, WIDTH - 16, 34, 250
    bins = run.last.metrics["confidence"]
    edges, threshold = bins["edges"], run.last.metrics["threshold"]
    decades = math.ceil(math.log10(max(10, *bins["positives"], *bins["negatives"])))

    def y_of(count: float) -> float:  # one count must be seen, so the axis begins below 1
        return bottom - (bottom - top) * (math.log10(count) + 0.3) / (decades + 0.3)

    def x_of(value: float) -> float:
        return left + (right - left) * value

    marks = []
    for power in range(decades + 1):
        marks.append(f'<path class="grid" d="M{left} {y_of(10**power):.1f}H{right}"/>')
        marks.append(_text(left - 8, y_of(10**power) + 4, _compact(10**power), "muted", "end"))
    for index, (low, high) in enumerate(pairwise(edges)):
        width = (x_of(high) - x_of(low)) / 2 - 5
        for side, (kind, css) in enumerate((("negatives", "second"), ("positives", "first"))):
            if count := bins[kind][index]:
                x, y = x_of(low) + 4 + side * (width + 2), y_of(count)
                tip = f"confidence {low:g} to {high:g}: {count:,} labels {_MEANING[kind]}"
                marks.append(_bar(x, y, width, bottom - y, css, tip))
                marks.append(_text(x + width / 2, y - 4, _compact(count), "small muted", "middle"))
    marks.append(f'<path class="axis" d="M{left} {bottom}H{right}"/>')
    marks += _ticks([x_of(edge) for edge in edges], [f"{edge:g}" for edge in edges], bottom)
    marks.append(_text((left + right) / 2, bottom + 38, "confidence", "muted", "middle"))
    marks.append(f'<path class="dashed" d="M{x_of(threshold):.1f} {top - 12}V{bottom}"/>')
    low = threshold < 0.5  # then the free room is on the other side
    x, anchor = (x_of(threshold) + 6, "start") if low else (x_of(threshold) - 6, "end")
    marks.append(_text(x, top - 14, f"threshold {threshold:g}", "muted", anchor))
    marks += _legend(right - 230 if low else left, [("second", "label absent"), ("first", "label present")])
    return _svg(WIDTH, bottom + 46, "Confidences of the last model", marks)


def precision_recall_bars(run: Run) -> str:
    """Draw precision beside recall after each task, as a mean over classes (CP, CR) and over all labels (OP, OR)."""
    top, bottom, middle = 62, 262, WIDTH / 2
    marks = _legend(46, [("first", "precision"), ("second", "recall")])
    for left, right, precision, recall, what in (
        (46, middle - 30, "CP", "CR", "mean over classes"),
        (middle + 24, WIDTH, "OP", "OR", "over all labels"),
    ):
        gap = run.last.metrics[recall] - run.last.metrics[precision]
        marks.append(_text(left, top - 20, f"{precision}, {recall}: {what}", "strong"))
        at_the_end = f"{recall} − {precision} at the end: {gap:+.1f}".replace("-", "−")
        marks.append(_text(right, top - 20, at_the_end, "muted", "end"))
        marks.append(_percent_grid(left, right, top, bottom))
        slot = (right - left) / len(run.tasks)
        width, apart = min(22.0, slot * 0.38), min(1.0, slot * 0.05)
        centres = [left + slot * (index + 0.5) for index in range(len(run.tasks))]
        for x, task in zip(centres, run.tasks, strict=True):
            for start, name, css in ((x - width - apart, precision, "first"), (x + apart, recall, "second")):
                value = task.metrics[name]
                y = _percent_y(value, top, bottom)
                marks.append(_bar(start, y, width, bottom - y, css, f"task {task.task}: {name} {value:.1f}"))
        marks += _ticks(centres, [str(task.task) for task in run.tasks], bottom)
        marks.append(_text((left + right) / 2, bottom + 38, "task", "muted", "middle"))
    return _svg(WIDTH, bottom + 46, "Precision and recall after each task", marks)


_MEANING = {"positives": "present", "negatives": "absent"}


def _svg(width: float, height: float, label: str, marks: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="csc-figure" role="img" aria-label="{escape(label)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">'
        f"<style>{theme('.csc-figure')}{_RULES}</style>\n" + "\n".join(marks) + "\n</svg>"
    )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _text(x: float, y: float, content: str, css: str = "", anchor: str = "start", title: str = "") -> str:
    tip = _title(title) if title else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(content)}{tip}</text>'


def _bar(x: float, y: float, width: float, height: float, css: str, tip: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="{css}" {box}>{_title(tip)}</rect>'


def _heat_cell(x: float, y: float, width: float, height: float, name: str, task: TaskResult, ap: float) -> str:
    """Draw one AP as the opacity of one colour, so that low values sink into the page in either mode."""
    tip = _title(f"{name} after task {task.task}: AP {ap:.1f}")
    box = f'x="{x - width / 2 + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}"'
    rect = f'<rect class="heat" {box} fill-opacity="{0.04 + 0.0096 * ap:.3f}">{tip}</rect>'
    if width < 30:
        return rect
    return rect + _text(x, y + 14, f"{ap:.1f}", "small on-heat" if ap > 55 else "small", "middle")


def _arrival(earlier: TaskResult | None, task: TaskResult) -> str:
    """Name the task in which classes arrived, or the tasks when the run does not hold all of them."""
    first = earlier.task + 1 if earlier else 1
    return f"task {task.task}" if first == task.task else f"task {first}–{task.task}"


def _percent_y(value: float, top: float, bottom: float) -> float:
    return bottom - (bottom - top) * value / 100


def _percent_grid(left: float, right: float, top: float, bottom: float) -> str:
    """Draw the grid of an axis from 0 to 100 %."""
    marks = []
    for value in range(0, 101, 20):
        y = _percent_y(value, top, bottom)
        marks.append(f'<path class="{"grid" if value else "axis"}" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        marks.append(_text(left - 8, y + 4, f"{value} %" if value == 100 else str(value), "muted", "end"))
    return "\n".join(marks)


def _ticks(xs: Sequence[float], labels: Sequence[str], bottom: float) -> list[str]:
    """Write the labels below an axis; one that would touch its neighbour is left out."""
    marks, free = [], -math.inf
    for x, label in zip(xs, labels, strict=True):
        if x >= free:
            marks.append(_text(x, bottom + 18, label, "muted", "middle"))
            free = x + 7 * len(label) + 6
    return marks


def _legend(left: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    marks, x = [], left
    for css, label in entries:
        marks.append(f'<rect class="{css}" x="{x:.1f}" y="4" width="11" height="11" rx="2"/>')
        marks.append(_text(x + 16, 14, label))
        x += 16 + 7 * len(label) + 16
    return marks


def _spread(positions: Sequence[float], gap: float, lowest: float) -> list[float]:
    """Move labels apart until each has `gap` to itself, in their order and not below `lowest`."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    moved = list(positions)
    for above, index in pairwise(order):
        moved[index] = max(moved[index], moved[above] + gap)
    limit = lowest
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def _cut(name: str, length: int = 20) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _compact(count: int) -> str:
    """Write a count in at most four characters.

    >>> [_compact(count) for count in (7, 1000, 1234, 56789, 2_000_000)]
    ['7', '1k', '1.2k', '57k', '2M']
    """
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.{0 if count >= 10 * size or count % size == 0 else 1}f}{unit}"
    return str(count)
