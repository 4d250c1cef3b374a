"""A figure of differences: where each may lie, and whether zero is within."""

from collections.abc import Sequence

from csc.report.svg import WIDTH, circle, cut, label, svg, ticks
from csc.study.intervals import Interval

__all__ = ["draw_intervals"]

_COLOURS = {"above": "third", "below": "second", "level": "muted", "open": "muted"}


def draw_intervals(rows: Sequence[tuple[str, Interval]], width: float = WIDTH) -> str:
    """Draw a line for each interval, with a dot at its mean, around the line of no difference."""
    narrow = width < 600  # names stand above their lines
    names = width if narrow else 0.42 * width
    left, right, top, step = (24 if narrow else names + 24), width - 24, 12, 42 if narrow else 24
    bottom = top + step * len(rows)
    ends = [end for _, found in rows for end in (found.low, found.high, found.mean, 0.0) if end is not None]
    least, most = min(ends), max(ends)
    scale = (right - left) / max(most - least, 1e-9)

    def x(value: float) -> float:
        return left + (value - least) * scale

    marks = [f'<path class="dashed" d="M{x(0):.1f} {top - 6}V{bottom}"/>']
    for index, (name, found) in enumerate(rows):
        y, css = top + step * index + step - 12, _COLOURS[found.verdict]
        low, high = (found.mean if end is None else end for end in (found.low, found.high))
        tip = f"{name}: {found.mean:+.1f}" + ("" if found.low is None else f", {low:+.1f} to {high:+.1f}")
        x_name, y_name, anchor = (0.0, y - 14, "start") if narrow else (names, y + 4, "end")
        marks.append(label(x_name, y_name, cut(name, round(names / 6.6)), "", anchor, name))
        marks.append(f'<path class="axis" stroke-width="2" d="M{x(low):.1f} {y}H{x(high):.1f}"/>')
        marks.append(circle(x(found.mean), y, 5, css, tip))
    shown = [least, 0.0, most] if least < 0 < most else [least, most]
    digits = 1 if most - least > 1 else 2
    written = [f"{value:+.{digits}f}".replace("-", "−") if value else "0" for value in shown]
    marks += ticks([x(value) for value in shown], written, bottom)
    return svg(width, bottom + 28, "Differences with their intervals", marks)
