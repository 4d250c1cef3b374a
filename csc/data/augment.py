"""Augmentation of training images: one large cutout, then up to two random operations.

The paper's input pipeline, on uint8 RGB arrays (height, width, 3): `CutoutPIL(0.5)` followed by the RandAugment variant
whose policies are all ordered pairs of different (operation, magnitude) combinations, each half applied with
probability 0.5. All randomness comes from the generator that the caller passes. An array that is passed in may be
changed or returned: who needs it later keeps a copy.

The pixels are those of Pillow's `ImageOps`, `ImageEnhance` and `Image.transform`, for less work: what maps each value
alone is one lookup, and what Pillow computes in two dimensions but happens in one is computed in one. They are the same
bit for bit, but for shears (see there).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

__all__ = ["OPERATIONS", "Operation", "Pixels", "augment", "cutout", "rand_augment"]

Pixels = NDArray[np.uint8]

GREY = (128, 128, 128)  # what shearing, shifting or rotating leaves behind
CUTOUT_COLOUR = (125, 122, 113)
STEPS = 10  # magnitudes per operation; the first one, mostly no change, is never drawn
PROBABILITY = 0.5
ROUNDING = 1e-4  # more than float32 loses in a sum of four levels: what is whole stays whole when fractions are cut off

_VALUES = np.arange(256, dtype=np.uint8)


class Operation(NamedTuple):
    """One operation of RandAugment.

    Attributes:
        function: makes an array of (pixels, magnitude, generator); a new one, or the given one painted on.
        magnitudes: ten, from the weakest to the strongest.
    """

    function: Callable[[Pixels, float, np.random.Generator], Pixels]
    magnitudes: tuple[float, ...]


def augment(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """Apply `cutout` and then `rand_augment`."""
    return rand_augment(cutout(pixels, rng), rng)


def cutout(pixels: Pixels, rng: np.random.Generator, fraction: float = 0.5) -> Pixels:
    """Fill a rectangle, a fraction of the sides, around a random pixel with one random colour, in place."""
    height, width, _ = pixels.shape
    red, green, blue = rng.integers(0, 256, size=3).tolist()
    return _filled(pixels, int(fraction * width + 0.5), int(fraction * height + 0.5), (red, green, blue), rng)


def rand_augment(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """Draw two different (operation, magnitude) combinations and apply each with probability 0.5, in this order."""
    first = int(rng.integers(len(_COMBINATIONS)))
    second = int(rng.integers(len(_COMBINATIONS) - 1))
    if second >= first:
        second += 1  # uniform over all but the first
    for index in (first, second):
        function, magnitude = _COMBINATIONS[index]
        if rng.random() < PROBABILITY:
            pixels = function(pixels, magnitude, rng)
    return pixels


def _filled(pixels: Pixels, width: int, height: int, colour: tuple[int, int, int], rng: np.random.Generator) -> Pixels:
    """Paint a rectangle centred at a uniformly random pixel and clipped to the image."""
    rows, columns, _ = pixels.shape
    left = int(rng.integers(columns)) - width // 2
    top = int(rng.integers(rows)) - height // 2
    first, end = max(0, left), min(columns, left + width)
    pixels.reshape(rows, -1)[max(0, top) : top + height, 3 * first : 3 * end] = np.tile(
        np.array(colour, np.uint8), end - first
    )
    return pixels


def _signed(magnitude: float, rng: np.random.Generator) -> float:
    return magnitude if rng.random() < 0.5 else -magnitude


def _looked_up(pixels: Pixels, table: Pixels) -> Pixels:
    """Replace each value by its entry in a table of 256; nothing in numpy does so as fast as a translation of bytes."""
    return np.frombuffer(bytearray(pixels).translate(table.tobytes()), np.uint8).reshape(pixels.shape)


def _blended(one: Pixels, two: Pixels, factor: float) -> Pixels:
    """`one + factor * (two - one)`, cut off at both ends, in Pillow's arithmetic: each value is a pixel of its own."""
    return np.array(Image.blend(_levels(one), _levels(two), factor)).reshape(one.shape)


def _levels(pixels: Pixels) -> Image.Image:
    """All values as one row of a grey image that shares their memory."""
    return Image.frombuffer("L", (pixels.size, 1), pixels, "raw", "L", 0, 1)


def _shear(pixels: Pixels, magnitude: float, rng: np.random.Generator, axis: int) -> Pixels:
    """Move each line along an axis in proportion to its distance from the edge, with cubic interpolation on the line.

    All of a line moves equally far: it is interpolated with four weights of its own, then shifted by whole pixels.
    Pillow interpolates each pixel for itself, in two dimensions and in double precision, and cuts off fractions. Where
    its rounding decides, values here are one level off: one of 300 in photographs, one of 50 in images of two colours.
    """
    side, lines = pixels.shape[axis], pixels.shape[1 - axis]
    shift = _signed(magnitude, rng) * (np.arange(lines) + 0.5)
    whole = np.floor(shift)
    between = _between(pixels, shift - whole, axis)
    sheared = np.full_like(pixels, GREY[0])
    old, new = between.swapaxes(1, axis), sheared.swapaxes(1, axis)  # (lines, along them, 3)
    ends = (np.flatnonzero(np.diff(whole)) + 1).tolist()
    for line, end in zip([0, *ends], [*ends, lines], strict=True):
        by = int(whole[line]) + 1
        start, stop = max(0, -by), min(side, side + 1 - by)
        if start < stop:
            new[line:end, start:stop] = old[line:end, start + by : stop + by]
    return sheared


def _between(pixels: Pixels, d: NDArray[np.float64], axis: int) -> Pixels:
    """Values of each line at its own fraction d of the way from each pixel to the next; one more than it has pixels.

    They are v₁ + d (v₂ - v₀) + d² (2 v₀ - 2 v₁ + v₂ - v₃) + d³ (v₁ - v₀ + v₂ - v₃), ordered by pixels. The first lies
    before the first pixel, the last behind the last one: a pixel ends half way to the next, what is beyond is grey.
    """
    weights = np.stack([d * (d * (2 - d) - 1), 1 + d * d * (d - 2), d * (1 + d * (1 - d)), d * d * (d - 1)])
    of_lines = weights[:, :, None] if axis == 1 else np.repeat(weights, 3, axis=1)[:, None]
    w = torch.from_numpy(of_lines.astype(np.float32))
    padded = np.empty([side + 4 * (number == axis) for number, side in enumerate(pixels.shape)], np.float32)
    new, old = padded.swapaxes(0, axis), pixels.swapaxes(0, axis)
    new[:2], new[2:-2], new[-2:] = old[0], old, old[-1]
    flat, step = torch.from_numpy(padded.reshape(len(padded), -1)), (1, 3)[axis]
    v = [flat.narrow(axis, step * first, step * (len(old) + 1)) for first in range(4)]
    value = torch.full_like(v[0], ROUNDING)
    for tap in range(4):
        value.addcmul_(v[tap], w[tap])
    shape = [side + (number == axis) for number, side in enumerate(pixels.shape)]
    between: Pixels = value.clamp_(0, 255).numpy().astype(np.uint8).reshape(shape)
    ends = between.swapaxes(0, axis)
    ends[0, d < 0.5] = ends[-1, d >= 0.5] = GREY[0]
    return between


def _translate(pixels: Pixels, magnitude: float, rng: np.random.Generator, axis: int) -> Pixels:
    """Move along an axis by a part of its side, rounded to whole pixels; to the left or up if the sign is positive."""
    by = math.floor(_signed(magnitude, rng) * pixels.shape[axis] + 0.5)
    result = np.full_like(pixels, GREY[0])
    new, old = result.swapaxes(0, axis), pixels.swapaxes(0, axis)
    if by >= 0:
        new[: len(old) - by] = old[by:]
    else:
        new[-by:] = old[:by]
    return result


def _rotate(pixels: Pixels, magnitude: float, _: np.random.Generator) -> Pixels:
    """Rotate counter-clockwise only."""
    return np.array(Image.fromarray(pixels).rotate(magnitude, fillcolor=GREY))


def _posterize(pixels: Pixels, magnitude: float, _: np.random.Generator) -> Pixels:
    return pixels & np.uint8(256 - (1 << (8 - int(magnitude))))


def _solarize(pixels: Pixels, magnitude: float, _: np.random.Generator) -> Pixels:
    return _looked_up(pixels, np.where(magnitude > _VALUES, _VALUES, 255 - _VALUES))


def _square(pixels: Pixels, magnitude: float, rng: np.random.Generator) -> Pixels:
    return _filled(pixels, int(magnitude), int(magnitude), CUTOUT_COLOUR, rng)


def _color(pixels: Pixels, magnitude: float, rng: np.random.Generator) -> Pixels:
    return np.array(ImageEnhance.Color(Image.fromarray(pixels)).enhance(1 + _signed(magnitude, rng)))


def _contrast(pixels: Pixels, magnitude: float, rng: np.random.Generator) -> Pixels:
    grey = np.asarray(Image.fromarray(pixels).convert("L"))
    mean = np.full_like(_VALUES, int(float(grey.sum()) / grey.size + 0.5))
    return _looked_up(pixels, _blended(mean, _VALUES, 1 + _signed(magnitude, rng)))


def _sharpness(pixels: Pixels, magnitude: float, rng: np.random.Generator) -> Pixels:
    return _blended(_smoothed(pixels), pixels, 1 + _signed(magnitude, rng))


def _smoothed(pixels: Pixels) -> Pixels:
    """Mean of the 3 by 3 neighbours with weight 5 for the middle one; the border stays. No mean is halfway."""
    wide = pixels.astype(np.uint16)
    columns = wide[:-2] + wide[1:-1]
    columns += wide[2:]
    total = wide[1:-1, 1:-1] * np.uint16(4)
    total += 6
    for column in range(3):
        total += columns[:, column : column + total.shape[1]]
    total //= 13
    smoothed = pixels.copy()
    smoothed[1:-1, 1:-1] = total
    return smoothed


def _brightness(pixels: Pixels, magnitude: float, rng: np.random.Generator) -> Pixels:
    return _looked_up(pixels, _blended(np.zeros_like(_VALUES), _VALUES, 1 + _signed(magnitude, rng)))


def _invert(pixels: Pixels, _magnitude: float, _: np.random.Generator) -> Pixels:
    return 255 - pixels


def _autocontrast(pixels: Pixels, _magnitude: float, _: np.random.Generator) -> Pixels:
    """Spread the values of each colour over the whole range; a colour of one value stays."""
    rows = pixels.reshape(len(pixels), -1)
    lowest, highest = rows.min(axis=0).reshape(-1, 3).min(axis=0), rows.max(axis=0).reshape(-1, 3).max(axis=0)
    tables = np.tile(_VALUES, (3, 1))
    for table, low, high in zip(tables, lowest.tolist(), highest.tolist(), strict=True):
        if high > low:
            scale = 255.0 / (high - low)
            table[:] = (_VALUES * scale - low * scale).clip(0, 255)
    return np.array(Image.fromarray(pixels).point(tables.ravel().tolist()))


def _equalize(pixels: Pixels, _magnitude: float, _: np.random.Generator) -> Pixels:
    return np.array(ImageOps.equalize(Image.fromarray(pixels)))


def _range(weakest: float, strongest: float) -> tuple[float, ...]:
    return tuple(np.linspace(weakest, strongest, STEPS).tolist())


def _whole_range(weakest: int, strongest: int) -> tuple[float, ...]:
    return tuple(round(magnitude) for magnitude in _range(weakest, strongest))


OPERATIONS: dict[str, Operation] = {
    "invert": Operation(_invert, _range(0, 0)),
    "cutout": Operation(_square, _whole_range(0, 20)),  # side in pixels
    "sharpness": Operation(_sharpness, _range(0, 0.9)),
    "autocontrast": Operation(_autocontrast, _range(0, 0)),
    "posterize": Operation(_posterize, _whole_range(8, 4)),  # bits kept
    "shearX": Operation(partial(_shear, axis=1), _range(0, 0.3)),
    "translateX": Operation(partial(_translate, axis=1), _range(0, 150 / 331)),  # part of the side
    "translateY": Operation(partial(_translate, axis=0), _range(0, 150 / 331)),
    "shearY": Operation(partial(_shear, axis=0), _range(0, 0.3)),
    "rotate": Operation(_rotate, _range(0, 30)),  # degrees
    "equalize": Operation(_equalize, _range(0, 0)),
    "contrast": Operation(_contrast, _range(0, 0.9)),
    "color": Operation(_color, _range(0, 0.9)),
    "solarize": Operation(_solarize, _range(256, 0)),  # pixel values from here on are inverted
    "brightness": Operation(_brightness, _range(0, 0.9)),
}

_COMBINATIONS = [
    (operation.function, operation.magnitudes[index]) for operation in OPERATIONS.values() for index in range(1, STEPS)
]
