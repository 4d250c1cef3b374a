"""The parts that figures are drawn from: SVG text that follows the reader's light or dark mode.

Colours stay apart for colour-blind eyes; every mark can have a tooltip.
"""

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from csc.report.text import printable

__all__ = [
    "LIGHT",
    "PHONE",
    "WIDTH",
    "bar",
    "circle",
    "compact",
    "cut",
    "escape",
    "label",
    "legend",
    "percent_grid",
    "percent_y",
    "polyline",
    "spread",
    "svg",
    "theme",
    "ticks",
    "title",
]

WIDTH, PHONE = 860, 342  # of a figure in a page on a desk, and on a phone

_COLOURS = {  # on light and on dark ground
    "ink": ("#16191d", "#e8eaed"),
    "muted": ("#59626c", "#9ba5af"),
    "grid": ("#e3e6ea", "#2d333a"),
    "surface": ("#ffffff", "#111418"),
    "panel": ("#f5f7f9", "#1a1e24"),
    "first": ("#0b61a8", "#6bb3f5"),
    "second": ("#c2500a", "#f5995b"),
    "third": ("#0a7859", "#4cc7a1"),
    "fourth": ("#7a4fc0", "#b69af0"),
    "heat": ("#08376f", "#a9d1ff"),
    "on-heat": ("#ffffff", "#0c1116"),
}
LIGHT, _DARK = ({name: tones[mode] for name, tones in _COLOURS.items()} for mode in (0, 1))
_SERIES = ("first", "second", "third", "fourth")
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
.csc-figure .frame { fill: none; stroke: var(--ink); }
"""
_RULES += "".join(f".csc-figure .{name} {{ fill: var(--{name}); }}\n" for name in _SERIES)
_RULES += "".join(f".csc-figure .line.{name} {{ fill: none; stroke: var(--{name}); }}\n" for name in _SERIES)


def theme(selector: str) -> str:
    """The CSS that gives `selector` the colours of light or dark mode as variables; paper is always light."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in tone.items()) for tone in (LIGHT, _DARK))
    return f"{selector} {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"


def escape(text: str) -> str:
    """Make any text, such as a class name, safe inside HTML and SVG, in content and in attributes.

    >>> escape('<b>&"x')
    '&lt;b&gt;&amp;&quot;x'
    """
    return html.escape(printable(text))


def svg(width: float, height: float, name: str, marks: Sequence[str]) -> str:
    """A whole figure, which can stand in a page, in a file or in a tracking server."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="csc-figure" role="img" aria-label="{escape(name)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">'
        f"<style>{theme('.csc-figure')}{_RULES}</style>\n" + "\n".join(marks) + "\n</svg>"
    )


def title(text: str) -> str:
    """A tooltip."""
    return f"<title>{escape(text)}</title>"


def label(x: float, y: float, content: str, css: str = "", anchor: str = "start", tip: str = "") -> str:
    """A line of text."""
    inside = escape(content) + (title(tip) if tip else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{inside}</text>'


def bar(x: float, y: float, width: float, height: float, css: str, tip: str) -> str:
    """A rectangle with a tooltip."""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="{css}" {box}>{title(tip)}</rect>'


def polyline(points: Sequence[tuple[float, float]], css: str, paint: str = "") -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {css}"{paint} points="{path}"/>'


def circle(x: float, y: float, radius: float, css: str, tip: str, paint: str = "") -> str:
    """A dot with a tooltip."""
    return f'<circle class="dot {css}"{paint} cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{title(tip)}</circle>'


def percent_y(value: float, top: float, bottom: float) -> float:
    """Where a value stands on an axis from 0 to 100 %."""
    return bottom - (bottom - top) * value / 100


def percent_grid(left: float, right: float, top: float, bottom: float) -> str:
    """The grid of an axis from 0 to 100 %."""
    marks = []
    for value in range(0, 101, 20):
        y = percent_y(value, top, bottom)
        marks.append(f'<path class="{"grid" if value else "axis"}" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        marks.append(label(left - 8, y + 4, f"{value} %" if value == 100 else str(value), "muted", "end"))
    return "\n".join(marks)


def ticks(xs: Sequence[float], labels: Sequence[str], bottom: float) -> list[str]:
    """The labels below an axis; one that would touch its neighbour is left out."""
    marks, free = [], -math.inf
    for x, text in zip(xs, labels, strict=True):
        if x >= free:
            marks.append(label(x, bottom + 18, text, "muted", "middle"))
            free = x + 7 * len(text) + 6
    return marks


def legend(left: float, entries: Mapping[str, str]) -> list[str]:
    """What the colours mean: a text for each, at the top of a figure."""
    marks, x = [], left
    for css, text in entries.items():
        marks.append(f'<rect class="{css}" x="{x:.1f}" y="4.0" width="11" height="11" rx="2"/>')
        marks.append(label(x + 16, 14, text))
        x += 16 + 6.4 * len(text) + 14
    return marks


def spread(positions: Sequence[float], gap: float, lowest: float) -> list[float]:
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


def cut(name: str, length: int) -> str:
    """At most so many characters."""
    return name if len(name) <= length else name[: length - 1] + "…"


def compact(count: int) -> str:
    """Write a count in at most four characters.

    >>> [compact(count) for count in (7, 1000, 1234, 56789, 2_000_000)]
    ['7', '1k', '1.2k', '57k', '2M']
    """
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.{0 if count >= 10 * size or count % size == 0 else 1}f}{unit}"
    return str(count)
