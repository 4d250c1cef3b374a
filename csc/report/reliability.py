"""Figures of reliability: how far confidence can be trusted, and what a threshold makes of it."""

from collections.abc import Mapping

import numpy as np

from csc import metrics
from csc.data.evidence import THRESHOLDS, Reliability, TaskFacts
from csc.report.svg import (
    WIDTH,
    bar,
    circle,
    label,
    legend,
    percent_grid,
    percent_y,
    polyline,
    svg,
    ticks,
    title,
)

__all__ = ["at_threshold", "ece", "nearest_threshold", "reliability_diagram", "threshold_curves"]

_LINES = {"CP": "first", "CR": "second", "CF1": "third", "OF1": "fourth"}


def nearest_threshold(value: float) -> int:
    """The index of the one of the `THRESHOLDS` that is nearest to a value."""
    return min(round(100 * value), len(THRESHOLDS) - 1)


def at_threshold(facts: TaskFacts, index: int) -> dict[str, float]:
    """The numbers at one of the `THRESHOLDS`, in percent."""
    found, predicted = (np.array([of_class[index] for of_class in counts]) for counts in (facts.found, facts.predicted))
    return {name: 100 * value for name, value in metrics.rates(found, predicted, np.array(facts.present)).items()}


def ece(bins: Reliability) -> float:
    """The expected calibration error in percent."""
    return 100 * metrics.calibration_error(bins.count, bins.confidence, bins.present)


def reliability_diagram(groups: Mapping[str, Reliability], width: float = WIDTH) -> str:
    """Draw for each group of classes how often a label is present, by confidence; on the diagonal it can be trusted."""
    side = (width - 60 * (len(groups) - 1)) / len(groups) if width > 600 else width
    top, height = 46, 250
    marks = []
    for number, (name, bins) in enumerate(groups.items()):
        x, y = (number * (side + 60), 0) if width > 600 else (0, number * (height + 110))
        left, right, upper, lower = x + 46, x + min(side, 400) - 8, y + top, y + top + height
        marks.append(label(left, y + 18, f"{name} classes", "strong"))
        marks.append(label(right, y + 18, f"ECE {ece(bins):.1f} %", "strong", "end"))
        marks += [percent_grid(left, right, upper, lower), *_reliability_bars(bins, left, right, upper, lower)]
        marks.append(f'<path class="dashed" d="M{left:.1f} {lower}L{right:.1f} {upper}"/>')
        shown = [tick / 5 for tick in range(6)]
        marks += ticks([left + (right - left) * tick for tick in shown], [f"{tick:g}" for tick in shown], lower)
        marks.append(label((left + right) / 2, lower + 38, "confidence", "muted", "middle"))
        marks.append(label(left, upper - 10, "labels that are present, %", "muted"))
    tall = top + height + 46
    return svg(width, tall if width > 600 else tall + (len(groups) - 1) * (height + 110), "Reliability", marks)


def _reliability_bars(bins: Reliability, left: float, right: float, top: float, bottom: float) -> list[str]:
    """A bar per bin, the more opaque the more labels it has, and the gap to where it would be trustworthy."""
    marks, most = [], max(max(bins.count), 1)
    size = (right - left) / len(bins.count)
    for index, (count, confidence, present) in enumerate(zip(bins.count, bins.confidence, bins.present, strict=True)):
        if not count:
            continue
        share, mean = 100 * present / count, 100 * confidence / count
        y, ideal = percent_y(share, top, bottom), percent_y(mean, top, bottom)
        x = left + index * size
        tip = f"confidence about {mean / 100:.2f}: {present:,} of {count:,} labels are present ({share:.0f} %)"
        marks.append(bar(x + 1, y, size - 2, bottom - y, "first", tip))
        css = "second" if mean > share else "third"
        gap = f'x="{x + 1:.1f}" y="{min(y, ideal):.1f}" width="{size - 2:.1f}" height="{abs(y - ideal):.1f}"'
        marks.append(f'<rect class="{css}" fill-opacity="0.28" {gap}>{title(tip)}</rect>')
        many = f'x="{x + 1:.1f}" y="{bottom + 2}" width="{(size - 2) * count / most:.1f}" height="3"'
        marks.append(f'<rect class="muted" {many}>{title(tip)}</rect>')
    return marks


def threshold_curves(facts: TaskFacts, marked: int, width: float = WIDTH) -> str:
    """Draw precision, recall and F1 against the threshold; a script may move the mark and choose a class."""
    threshold, now = THRESHOLDS[marked], at_threshold(facts, marked)
    left, right, top, bottom = 46, width - 12, 34, 274
    points = [at_threshold(facts, index) for index in range(len(THRESHOLDS))]
    xs = [left + (right - left) * value for value in THRESHOLDS]
    marks = [percent_grid(left, right, top, bottom)]
    for name, css in _LINES.items():
        ys = [percent_y(point[name], top, bottom) for point in points]
        marks.append(polyline(list(zip(xs, ys, strict=True)), f"{css} series-{name}"))
    shown = [tick / 10 for tick in range(0, 11, 1 if width > 600 else 2)]
    marks += ticks([left + (right - left) * tick for tick in shown], [f"{tick:g}" for tick in shown], bottom)
    marks.append(label((left + right) / 2, bottom + 38, "threshold", "muted", "middle"))
    at = left + (right - left) * threshold
    frame = f'data-left="{left}" data-right="{right}" data-top="{top}" data-bottom="{bottom}"'
    marks.append(f'<g class="mark" {frame} transform="translate({at:.1f} 0)">')
    marks.append(f'<path class="dashed" d="M0 {top - 8}V{bottom}"/></g>')
    for name, css in _LINES.items():
        tip = f"{name} {now[name]:.1f} at {threshold:g}"
        marks.append(circle(at, percent_y(now[name], top, bottom), 4.5, f"{css} dot-{name}", tip))
    spelled_out = {"CP": "precision (CP)", "CR": "recall (CR)"} if width > 600 else {}
    marks += legend(left, {css: spelled_out.get(name, name) for name, css in _LINES.items()})
    return svg(width, bottom + 46, "Precision, recall and F1 against the threshold", marks)
