"""Augmentation of training images: one large cutout, then up to two random operations.

The paper's input pipeline, on Pillow RGB images: `CutoutPIL(0.5)` followed by the RandAugment variant whose policies
are all ordered pairs of different (operation, magnitude) combinations, each half applied with probability 0.5. All
randomness comes from the generator that the caller passes. No function modifies the image it is given.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

__all__ = ["OPERATIONS", "Operation", "augment", "cutout", "rand_augment"]

GREY = (128, 128, 128)  # what shearing, shifting or rotating leaves behind
CUTOUT_COLOUR = (125, 122, 113)
STEPS = 10  # magnitudes per operation; the first one, mostly no change, is never drawn
PROBABILITY = 0.5


class Operation(NamedTuple):
    """One operation of RandAugment.

    Attributes:
        function: makes a new image of (image, magnitude, generator).
        magnitudes: ten, from the weakest to the strongest.
    """

    function: Callable[[Image.Image, float, np.random.Generator], Image.Image]
    magnitudes: tuple[float, ...]


def augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Apply `cutout` and then `rand_augment`; the result is always a new image."""
    return rand_augment(cutout(image, rng), rng)


def cutout(image: Image.Image, rng: np.random.Generator, fraction: float = 0.5) -> Image.Image:
    """Fill a rectangle around a random pixel with one random colour, on a copy.

    Args:
        image: RGB.
        rng: draws the centre and the colour.
        fraction: of the image's sides; the part of the rectangle that leaves the image is lost.
    """
    width, height = image.size
    red, green, blue = rng.integers(0, 256, size=3).tolist()
    return _filled(image, int(fraction * width + 0.5), int(fraction * height + 0.5), (red, green, blue), rng)


def rand_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Draw two different (operation, magnitude) combinations and apply each with probability 0.5, in this order.

    Args:
        image: RGB.
        rng: draws the combinations, whether each is applied, and signs and places inside the operations.

    Returns:
        A new image, or the given one when neither is applied.
    """
    first = int(rng.integers(len(_COMBINATIONS)))
    second = int(rng.integers(len(_COMBINATIONS) - 1))
    if second >= first:
        second += 1  # uniform over all but the first
    for index in (first, second):
        function, magnitude = _COMBINATIONS[index]
        if rng.random() < PROBABILITY:
            image = function(image, magnitude, rng)
    return image


def _filled(
    image: Image.Image, width: int, height: int, colour: tuple[int, int, int], rng: np.random.Generator
) -> Image.Image:
    """Paint a rectangle centred at a uniformly random pixel and clipped to the image, on a copy."""
    left = int(rng.integers(image.width)) - width // 2
    top = int(rng.integers(image.height)) - height // 2
    box = (max(0, left), max(0, top), min(image.width, left + width), min(image.height, top + height))
    result = image.copy()
    if box[0] < box[2] and box[1] < box[3]:
        result.paste(colour, box)
    return result


def _signed(magnitude: float, rng: np.random.Generator) -> float:
    return magnitude if rng.random() < 0.5 else -magnitude


def _affine(
    image: Image.Image, coefficients: tuple[float, float, float, float, float, float], resampling: Image.Resampling
) -> Image.Image:
    """Transform about the upper left corner: the coefficients lead from a new pixel to an old one."""
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, resampling, fillcolor=GREY)


def _shear_x(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, _signed(magnitude, rng), 0, 0, 1, 0), Image.Resampling.BICUBIC)


def _shear_y(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, 0, 0, _signed(magnitude, rng), 1, 0), Image.Resampling.BICUBIC)


def _translate_x(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, 0, _signed(magnitude, rng) * image.width, 0, 1, 0), Image.Resampling.NEAREST)


def _translate_y(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, _signed(magnitude, rng) * image.height), Image.Resampling.NEAREST)


def _rotate(image: Image.Image, magnitude: float, _: np.random.Generator) -> Image.Image:
    """Rotate counter-clockwise only; the transparent corners of the rotated image show the grey below it."""
    rotated = image.convert("RGBA").rotate(magnitude)
    return Image.composite(rotated, Image.new("RGBA", rotated.size, (*GREY, 128)), rotated).convert(image.mode)


def _posterize(image: Image.Image, magnitude: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.posterize(image, int(magnitude))


def _solarize(image: Image.Image, magnitude: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.solarize(image, math.ceil(magnitude))  # no pixel value lies between a threshold and its ceiling


def _square(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return _filled(image, int(magnitude), int(magnitude), CUTOUT_COLOUR, rng)


def _color(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Color(image).enhance(1 + _signed(magnitude, rng))


def _contrast(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(1 + _signed(magnitude, rng))


def _sharpness(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(1 + _signed(magnitude, rng))


def _brightness(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1 + _signed(magnitude, rng))


def _invert(image: Image.Image, _magnitude: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.invert(image)


def _autocontrast(image: Image.Image, _magnitude: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, _magnitude: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.equalize(image)


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
    "shearX": Operation(_shear_x, _range(0, 0.3)),
    "translateX": Operation(_translate_x, _range(0, 150 / 331)),  # part of the side
    "translateY": Operation(_translate_y, _range(0, 150 / 331)),
    "shearY": Operation(_shear_y, _range(0, 0.3)),
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
