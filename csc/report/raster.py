"""A figure as pixels, for pages that show images only: the marks of `csc.report.svg`, in its colours for paper.

Drawn with Pillow, which every image of a step has. It knows the marks that our figures are made of, and refuses others.
"""

import re
from collections.abc import Callable
from xml.etree import ElementTree

from PIL import Image, ImageDraw, ImageFont

from csc.report.svg import LIGHT

__all__ = ["raster"]

SCALE = 2  # pixels of the image per pixel of the figure
FINER = 2  # drawn so much larger and then made smaller: Pillow does not smooth lines
_ZOOM = SCALE * FINER
_DASH, _GAP = 5.0, 4.0
_COLOURS = LIGHT | {"axis": LIGHT["muted"], "dashed": LIGHT["muted"]}
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # of SVG and of Pillow, on the line of the text
_PATH = re.compile(r"M([\d.]+) ([\d.]+)([HVL])([\d.]+)(?: ([\d.]+))?")

Mark = ElementTree.Element
Point = tuple[float, float]


def raster(figure: str) -> Image.Image:
    """The image of a figure that `csc.report.svg` made."""
    marks = ElementTree.fromstring(figure)
    width, height = (round(float(marks.attrib[side])) for side in ("width", "height"))
    image = Image.new("RGB", (width * _ZOOM, height * _ZOOM), LIGHT["surface"])
    draw = ImageDraw.Draw(image, "RGBA")  # colours may be translucent
    for mark in marks:
        kind = mark.tag.rpartition("}")[2]
        if kind != "style":
            _DRAWN[kind](draw, mark)
    return image.reduce(FINER)


def _colour(mark: Mark) -> str:
    """The colour of a mark, from the last of its CSS classes that has one, with the mark's opacity."""
    names = [name for name in mark.get("class", "").split() if name in _COLOURS]
    return _COLOURS[names[-1] if names else "ink"] + f"{round(255 * float(mark.get('fill-opacity', 1))):02x}"


def _numbers(mark: Mark, *names: str) -> list[float]:
    return [float(mark.attrib[name]) * _ZOOM for name in names]


def _text(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    classes = mark.get("class", "").split()
    x, y = _numbers(mark, "x", "y")
    font = ImageFont.load_default((11 if "small" in classes else 12) * _ZOOM)
    bold = 0.25 * _ZOOM if "strong" in classes else 0
    anchor = _ANCHORS[mark.attrib["text-anchor"]]
    words = (mark.text or "").replace("−", "-")  # a character that the font lacks
    draw.text((x, y), words, _colour(mark), font, anchor, stroke_width=bold)


def _rect(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    x, y, width, height = _numbers(mark, "x", "y", "width", "height")
    if width >= 1 and height >= 1:
        draw.rectangle((x, y, x + width - 1, y + height - 1), _colour(mark))


def _circle(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    x, y, radius = _numbers(mark, "cx", "cy", "r")
    draw.circle((x, y), radius, _colour(mark), LIGHT["surface"], round(1.5 * _ZOOM))


def _polyline(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    points = [tuple(float(value) * _ZOOM for value in point.split(",")) for point in mark.attrib["points"].split()]
    draw.line(points, _colour(mark), round(2.25 * _ZOOM), joint="curve")


def _path(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    found = _PATH.fullmatch(mark.attrib["d"])
    if found is None:
        raise ValueError(f"a path of one straight line expected: {mark.attrib['d']}")
    x, y, kind, first, second = found.groups()
    end = {"H": (first, y), "V": (x, first), "L": (first, second)}[kind]
    start, stop = ((float(across) * _ZOOM, float(down) * _ZOOM) for across, down in ((x, y), end))
    pieces = _dashes(start, stop) if mark.get("class") == "dashed" else [(start, stop)]
    for piece in pieces:
        draw.line(piece, _colour(mark), _ZOOM)


def _dashes(start: Point, stop: Point) -> list[tuple[Point, Point]]:
    (x, y), (across, down) = start, (stop[0] - start[0], stop[1] - start[1])
    count = max(round((across**2 + down**2) ** 0.5 / ((_DASH + _GAP) * _ZOOM)), 1)
    share = _DASH / (_DASH + _GAP)
    ends = [(number / count, (number + share) / count) for number in range(count)]
    return [((x + a * across, y + a * down), (x + b * across, y + b * down)) for a, b in ends]


_DRAWN: dict[str, Callable[[ImageDraw.ImageDraw, Mark], None]] = {
    "text": _text,
    "rect": _rect,
    "circle": _circle,
    "polyline": _polyline,
    "path": _path,
}
