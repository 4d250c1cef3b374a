"""The embedded data set: scenes of real handwritten digits, composed without a download.

The 1,797 digits (8 x 8 pixels) ship inside scikit-learn. A scene shows one to four of them on a noisy background; its
labels are the digits it shows. Which digits meet in a scene is uneven on purpose, as in photographs: some pairs are
common, some are rare. Scene i of a split depends on the seed, the split and i alone, never on how many are made.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from csc.data.dataset import SPLITS, Dataset
from csc.data.ingest.classes import in_order
from csc.data.ingest.images import Encoded, ListedImage, as_jpeg
from csc.data.ingest.repair import is_undamaged
from csc.data.ingest.writer import DEFAULTS, SourceListing, WriteOptions, write_dataset
from csc.errors import BadConfig, BadData

__all__ = ["DIGIT_CLASSES", "compose_scene", "glyph_pools", "ingest_digits"]

DIGIT_CLASSES = tuple("0123456789")
VERSION = 1  # raise it with every change that alters a scene
TRAIN_SHARE = 0.7
JPEG_QUALITY = 90
SCENES_AT_MOST = 100_000  # the ids have five figures and must rise in lexicographic order
SIZE_AT_LEAST = 32  # below it, the smallest digits have fewer pixels than their originals

# How often a class opens a scene, and which classes like or avoid each other: not aligned with any order of tasks.
FREQUENCY = (1.3, 0.7, 1.1, 0.4, 0.9, 1.4, 0.45, 1.0, 0.6, 0.75)
STRONG_PAIRS = ((0, 4), (0, 7), (1, 2), (1, 9), (2, 8), (3, 5), (3, 6), (4, 9), (5, 8), (6, 7))
WEAK_PAIRS = ((0, 3), (0, 8), (1, 5), (1, 6), (2, 4), (2, 7), (3, 9), (4, 6), (5, 9), (7, 8))
STRONG, WEAK = 4.0, 0.25

# Share of scenes with one, two, three, four digits; the largest height of a digit then, as a part of the scene's side.
COUNT_SHARES = (0.2, 0.3, 0.3, 0.2)
LARGEST = (0.55, 0.5, 0.45, 0.4)
SMALLEST = 0.33
PLACEMENTS, COLOURS = 16, 16  # how many to try
OVERLAP = 0.05  # of the smaller of two boxes
TILT = 10.0  # degrees to either side
CONTRAST = 80  # by how much a digit is at least brighter than what lies below it

# Enlargement blurs the pen stroke: from a grey value to an opacity whose edge is steep again and its rim clear.
_STROKE = ((np.arange(256) - 80) * 128 // 112).clip(0, 128).astype(np.int16)

Box = tuple[int, int, int, int]  # left, top, right, bottom
Background = tuple[NDArray[np.int16], NDArray[np.int16]]  # shades and clouds


def ingest_digits(
    out: str | os.PathLike[str],
    train: int = 3000,
    test: int = 1000,
    size: int = 48,
    seed: int = 0,
    options: WriteOptions = DEFAULTS,
) -> Dataset:
    """Compose the data set and write it; an existing one with the same source is only opened.

    Args:
        out: folder or `s3://` prefix of the data set.
        train: number of training scenes.
        test: number of test scenes, made of handwriting that training never shows.
        size: side of a scene, in pixels.
        seed: of all random choices; the handwriting split and the co-occurrence of classes do not depend on it.
        options: how many processes, and where to print progress.
    """
    _check(train=train, test=test, size=size, seed=seed)
    counts = {"train": train, "test": test}
    source: dict[str, Any] = {"kind": "digits", **counts, "size": size, "seed": seed, "version": VERSION}
    if Dataset.exists(out):
        present = Dataset.open(out)
        if present.source != source or present.classes != in_order(DIGIT_CLASSES, options.class_order):
            raise BadData(f"{out}: already contains another data set; choose another --out or remove it")
        if is_undamaged(present):
            return present
    scenes = SourceListing(DIGIT_CLASSES, _listing(counts, seed), source)
    return write_dataset(out, "digits", scenes, _Scenes(size, seed), options=options)


def _check(*, train: int, test: int, size: int, seed: int) -> None:
    for key, count in (("train", train), ("test", test)):
        if not 1 <= count <= SCENES_AT_MOST:
            raise BadConfig(f"{key}: {count} scenes are not possible; choose 1 to {SCENES_AT_MOST}")
    if size < SIZE_AT_LEAST:
        raise BadConfig(f"size: scenes of {size} pixels are too small to read; choose {SIZE_AT_LEAST} or more")
    if seed < 0:
        raise BadConfig(f"seed: {seed} is negative; choose 0 or more")


def _listing(counts: dict[str, int], seed: int) -> Iterator[ListedImage]:
    for split, count in counts.items():
        for index in range(count):
            _, _, classes = _begin_scene(split, index, seed)
            yield ListedImage(f"{split}-{index:05d}", split, _names(classes), (), str(index))


@dataclass(frozen=True)
class _Scenes:
    """The listed scenes, composed."""

    size: int
    seed: int

    def __call__(self, rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        for row in rows:
            image, _ = compose_scene(row.split, int(row.file), self.size, self.seed)
            yield Encoded(as_jpeg(image, JPEG_QUALITY), self.size, self.size)


def compose_scene(split: str, index: int, size: int = 48, seed: int = 0) -> tuple[Image.Image, tuple[str, ...]]:
    """Compose scene number `index` of a split; return the RGB image and its classes in order, each once."""
    rng, (shades, clouds), classes = _begin_scene(split, index, seed)
    pools, glyphs = glyph_pools()[split], _padded_glyphs()
    canvas = _enlarged(_enlarged(shades, len(clouds)) + clouds, size)  # (size, size, 3)
    boxes: list[Box] = []
    for digit in classes:
        height = size * rng.uniform(SMALLEST, LARGEST[len(classes) - 1])
        glyph = glyphs[pools[digit][rng.integers(len(pools[digit]))]]
        opacity = _ink(glyph, height, rng.uniform(-TILT, TILT))
        box = _free_box(opacity.shape[1], opacity.shape[0], boxes, size, rng)
        boxes.append(box)
        _paint(opacity, canvas[box[1] : box[3], box[0] : box[2]], rng)
    canvas += _grain(canvas.shape, rng)
    return _image(canvas), _names(classes)


def _begin_scene(split: str, index: int, seed: int) -> tuple[np.random.Generator, Background, list[int]]:
    """Draw the background of a scene and its digits; return the generator for the rest, and both."""
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    return rng, _draw_background(rng), _draw_classes(rng)


def _names(digits: Sequence[int]) -> tuple[str, ...]:
    """Classes in order, each once."""
    return tuple(DIGIT_CLASSES[digit] for digit in sorted(set(digits)))


@functools.cache
def _handwriting() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read the digits, (1797, 8, 8) from 0 to 16, and their classes; importing scikit-learn itself takes seconds."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise BadData("the digits come with scikit-learn, which is not installed; run: pip install 'csc-mlcil[data]'")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise BadData(
            f"{path}: digits not readable ({error}); run: pip install --force-reinstall scikit-learn"
        ) from None
    return table[:, :64].reshape(-1, 8, 8), table[:, 64]


@functools.cache
def glyph_pools() -> dict[str, tuple[NDArray[np.intp], ...]]:
    """For each split, the rows of the digits that it may show, one array per class; no row is in both splits."""
    _, classes = _handwriting()
    rng = np.random.default_rng(0)  # fixed: a model trained on one seed meets no known handwriting in another's test
    shuffled = [rng.permutation(np.flatnonzero(classes == digit)) for digit in range(len(DIGIT_CLASSES))]
    cuts = [round(TRAIN_SHARE * len(rows)) for rows in shuffled]
    pairs = list(zip(shuffled, cuts, strict=True))
    return {"train": tuple(rows[:cut] for rows, cut in pairs), "test": tuple(rows[cut:] for rows, cut in pairs)}


@functools.cache
def _padded_glyphs() -> list[Image.Image]:
    """All digits as grey images with a dark rim, so that tilting cuts nothing off."""
    images, _ = _handwriting()
    padded = np.pad(images.astype(np.uint16) * 255 // 16, ((0, 0), (1, 1), (1, 1))).astype(np.uint8)
    return [Image.fromarray(glyph) for glyph in padded]


@functools.cache
def _affinity() -> NDArray[np.float64]:
    """How much a class in a scene attracts another, (10, 10)."""
    affinity = np.ones((len(DIGIT_CLASSES), len(DIGIT_CLASSES)))
    for pairs, weight in ((STRONG_PAIRS, STRONG), (WEAK_PAIRS, WEAK)):
        for one, other in pairs:
            affinity[one, other] = affinity[other, one] = weight
    np.fill_diagonal(affinity, WEAK)
    return affinity


def _draw_classes(rng: np.random.Generator) -> list[int]:
    """Draw the digits of a scene one after another, each by its frequency and its affinity to those before."""
    count = 1 + int(np.searchsorted(np.cumsum(COUNT_SHARES[:-1]), rng.random(), side="right"))
    weights = np.array(FREQUENCY)
    classes: list[int] = []
    for _ in range(count):
        steps = weights.cumsum()
        classes.append(int(steps[:-1].searchsorted(rng.random() * steps[-1], side="right")))
        weights *= _affinity()[classes[-1]]
    return classes


def _draw_background(rng: np.random.Generator) -> Background:
    """Draw broad shades of a base colour, (3, 3, 3), and finer clouds, (n, n, 3), each of a random strength."""
    cells, shade, cloud = int(rng.integers(8, 17)), int(rng.integers(5, 30)), int(rng.integers(3, 20))
    base = rng.integers(20, 110, size=3, dtype=np.int16)
    shades = base + rng.integers(-shade, shade + 1, size=(3, 3, 3), dtype=np.int16)
    return shades, rng.integers(-cloud, cloud + 1, size=(cells, cells, 3), dtype=np.int16)


def _enlarged(pixels: NDArray[np.int16], size: int) -> NDArray[np.int16]:
    image = _image(pixels).resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).astype(np.int16)


def _image(pixels: NDArray[np.int16]) -> Image.Image:
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _ink(glyph: Image.Image, height: float, tilt: float) -> NDArray[np.int16]:
    """Enlarge and tilt a digit in one bicubic step; return its opacity, 0 to 128, cropped to the pen stroke."""
    side, scale, angle = math.ceil(height * 1.25), 8 / height, math.radians(tilt)
    a, b = scale * math.cos(angle), scale * math.sin(angle)
    c, f = 5 - (a + b) * side / 2, 5 - (a - b) * side / 2  # the centre of the 10 x 10 glyph stays the centre
    large = glyph.transform((side, side), Image.Transform.AFFINE, (a, b, c, -b, a, f), Image.Resampling.BICUBIC)
    left, top, right, bottom = large.getbbox() or (0, 0, side, side)
    opacity: NDArray[np.int16] = _STROKE[np.asarray(large)[top:bottom, left:right]]
    return opacity


def _free_box(width: int, height: int, taken: list[Box], size: int, rng: np.random.Generator) -> Box:
    """Try some positions; take the first that hardly overlaps the digits before, or the one that overlaps least."""
    best, least = (0, 0, width, height), math.inf
    for across, down in rng.random((PLACEMENTS, 2)).tolist():
        left, top = int(across * (size - width + 1)), int(down * (size - height + 1))
        box = (left, top, left + width, top + height)
        overlap = max([_overlap(box, other) for other in taken], default=0.0)
        if overlap < least:
            best, least = box, overlap
        if least <= OVERLAP:
            break
    return best


def _overlap(one: Box, other: Box) -> float:
    """The common area of two boxes as a part of the smaller box."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))


def _paint(opacity: NDArray[np.int16], below: NDArray[np.int16], rng: np.random.Generator) -> None:
    """Paint a digit over a part of the scene, in place."""
    mean = int(below.sum(dtype=np.int32)) // below.size
    colour = np.array(_contrasting_colour(mean, rng), np.int16)
    below += (colour - below) * opacity[:, :, None] >> 7  # 255 * 128 just fits in 16 bits


def _contrasting_colour(mean: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """Draw a colour that is clearly brighter than `mean`, the brightness of what the digit will lie on."""
    for red, green, blue in rng.integers(60, 256, size=(COLOURS, 3)).tolist():
        if (red + green + blue) // 3 - mean >= CONTRAST:
            return red, green, blue
    return 255, 255, 255


def _grain(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int16]:
    """Fine noise of a random strength."""
    strength = int(rng.integers(4, 20))
    return rng.integers(-strength, strength + 1, size=shape, dtype=np.int16)
