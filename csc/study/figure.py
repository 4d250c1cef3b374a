"""A figure of differences: where each may lie, and whether zero is within."""

from collections.abc import Sequence

from csc.report.svg import WIDTH, circle, cut, label, svg, ticks
from csc.study.intervals import Interval

__all__ = ["draw_intervals"]

_COLOURS = {"above": "third", "below": "second", "level": "muted", "open": "muted"}


def draw_intervals(rows: Sequence[tuple[str, Interval]], width: float = WIDTH) -> str:
    """Draw a line for each interval, with a dot at its mean, around the line of no difference."""
    names = 0.42 * width
    left, right, top, step = names + 12, width - 16, 12, 24
    bottom = top + step * len(rows)
    ends = [end for _, found in rows for end in (found.low, found.high, found.mean, 0.0) if end is not None]
    least, most = min(ends), max(ends)
    scale = (right - left) / max(most - least, 1e-9)

    def x(value: float) -> float:
        return left + (value - least) * scale

    marks = [f'<path class="dashed" d="M{x(0):.1f} {top - 6}V{bottom}"/>']
    for index, (name, found) in enumerate(rows):
        y, css = top + step * index + step / 2, _COLOURS[found.verdict]
        low, high = (found.mean if end is None else end for end in (found.low, found.high))
        tip = f"{name}: {found.mean:+.1f}" + ("" if found.low is None else f", {low:+.1f} to {high:+.1f}")
        marks.append(label(names, y + 4, cut(name, round(names / 6.6)), "", "end", name))
        marks.append(f'<path class="axis" stroke-width="2" d="M{x(low):.1f} {y}H{x(high):.1f}"/>')
        marks.append(circle(x(found.mean), y, 5, css, tip))
    shown = [least, 0.0, most] if least < 0 < most else [least, most]
    marks += ticks([x(value) for value in shown], [f"{value:+.1f}" if value else "0" for value in shown], bottom)
    return svg(width, bottom + 28, "Differences with their intervals", marks)
