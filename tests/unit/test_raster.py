"""Figures as pixels: what the SVG says, where it says it."""

import pytest

from csc.report.raster import SCALE, raster
from csc.report.svg import bar, circle, label, polyline, svg

WHITE, FIRST, SECOND, GRID = (255, 255, 255), (0x0B, 0x61, 0xA8), (0xC2, 0x50, 0x0A), (0xE3, 0xE6, 0xEA)


def test_every_mark_has_its_position_and_colour():
    marks = [
        bar(10, 5, 20, 10, "first", "a tip is not drawn"),
        circle(50, 10, 4, "second", ""),
        polyline([(10, 40), (30, 40)], "second"),
        '<path class="grid" d="M40 40H60"/>',
        '<rect class="second" fill-opacity="0.5" x="70" y="5" width="10" height="10"/>',
    ]
    image = raster(svg(100, 60, "a figure", marks))
    assert image.size == (100 * SCALE, 60 * SCALE)

    def seen(x, y):
        return image.getpixel((x * SCALE, y * SCALE))

    assert [seen(x, y) for x, y in ((20, 10), (50, 10), (20, 40), (5, 10), (90, 50))] == [
        *(FIRST, SECOND, SECOND, WHITE, WHITE)
    ]
    assert GRID in [image.getpixel((50 * SCALE, 40 * SCALE + offset)) for offset in (-1, 0)]
    assert seen(75, 10) == pytest.approx([(255 + part) / 2 for part in SECOND], abs=1)


def test_text_stands_at_its_anchor_and_a_dashed_line_has_gaps():
    image = raster(svg(100, 60, "", [label(90, 20, "100 %", "", "end"), '<path class="dashed" d="M10 40L90 40"/>']))
    dark = [x for x in range(100) if min(image.getpixel((x * SCALE, 16 * SCALE))) < 128]
    assert dark
    assert 55 < min(dark) <= max(dark) <= 90
    line = [image.getpixel((x * SCALE, 40 * SCALE)) == WHITE for x in range(10, 90)]
    assert 15 < sum(line) < 60


def test_a_mark_that_it_cannot_draw_is_not_left_out_in_silence():
    with pytest.raises(KeyError):
        raster(svg(10, 10, "", ['<g transform="translate(1 1)"></g>']))
    with pytest.raises(ValueError, match="straight line"):
        raster(svg(10, 10, "", ['<path class="grid" d="M0 0C1 1 2 2 3 3"/>']))
