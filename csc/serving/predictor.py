"""A trained model at work: images in, class names with confidences out."""

import base64
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from csc.data import FORMATS
from csc.errors import BadData
from csc.model import load_network

__all__ = ["BATCH", "Prediction", "Predictor", "TooLarge", "above", "from_base64", "open_image"]

BATCH = 32
SHOWN = 480  # pixels of the longer side of an image that people look at


class TooLarge(BadData):
    """An image with more pixels than may be decoded."""


class Predictor:
    """A model folder, loaded and ready."""

    def __init__(self, folder: str | Path) -> None:
        self.network, self.card = load_network(Path(folder))
        self.size, self.thresholds = self.card.resolved_config().input.size, self.card.thresholds

    def confidences(self, images: Iterable[Any]) -> NDArray[np.float32]:
        """Confidences (images, classes) of files, encoded bytes, base64 text, Pillow images or RGB arrays."""
        rows = [prediction.confidences for prediction in self.predictions(images)]
        return np.stack(rows) if rows else np.empty((0, len(self.card.classes)), np.float32)

    def predictions(self, images: Iterable[Any], *, maps: bool = False) -> "Iterator[Prediction]":
        """What the model says of images, a batch at a time; with `maps`, also where it looks."""
        import torch

        if maps:
            from csc.nets.activation import class_activation_maps
        numbered = enumerate(images, start=1)
        while batch := [_load(image, number, self.size, shown=maps) for number, image in islice(numbered, BATCH)]:
            pixels = torch.from_numpy(np.stack([squashed for squashed, _ in batch])).permute(0, 3, 1, 2)
            with torch.inference_mode():
                confidences = self.network(pixels).sigmoid().numpy()
                seen = class_activation_maps(self.network, pixels).numpy() if maps else [None] * len(batch)
            for (_, image), confidence, own_maps in zip(batch, confidences, seen, strict=True):
                yield Prediction(confidence, image, own_maps)


@dataclass(frozen=True)
class Prediction:
    """What a model says of an image."""

    confidences: NDArray[np.float32]  # (classes,)
    image: Image.Image | None  # to look at, if maps were asked for
    maps: NDArray[np.float32] | None  # (classes, h, w): where it looks for each class, from 0 to 1


def open_image(encoded: bytes) -> Image.Image:
    """Read the head of an encoded image, which tells its size; pixels are decoded when they are asked for."""
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadData(f"not an image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError as error:
        raise TooLarge(f"too large ({str(error).split(',')[0]})") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise BadData(f"not readable as an image ({error})") from None


def from_base64(text: str) -> bytes:
    """The bytes that a text stands for."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # characters beyond ASCII, or, as binascii.Error, beyond the alphabet of base64
        raise BadData("not base64 text") from None


def _load(image: Any, number: int, size: int, shown: bool) -> tuple[NDArray[np.uint8], Image.Image | None]:
    """Any of the accepted forms of an image as uint8 (size, size, 3), and, if asked for, one to show to people.

    Errors name it by its path or its number.
    """
    try:
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim not in (2, 3):
                raise ValueError(f"expected uint8 of two or three axes, got {image.dtype} of {image.ndim}")
            opened = Image.fromarray(image)
        else:
            opened = image if isinstance(image, Image.Image) else open_image(_encoded(image))
        colours = opened.convert("RGB")
        squashed = np.asarray(colours.resize((size, size), Image.Resampling.BILINEAR))
        return squashed, ImageOps.contain(colours, (SHOWN, SHOWN)) if shown else None
    except BadData as error:
        raise BadData(f"{_name(image, number)}: {error}") from None
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise BadData(f"{_name(image, number)}: not readable as an image ({error})") from None


def _name(image: Any, number: int) -> str:
    """How an error names an image."""
    return str(image) if isinstance(image, (str, Path)) and len(str(image)) < 200 else f"image {number}"


def _encoded(image: Any) -> bytes:
    """Encoded bytes of an image given as bytes, path or base64 text."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, Path)):
        if os.path.isfile(image):  # noqa: PTH113 - unlike Path, it takes text of any length
            return Path(image).read_bytes()
        if isinstance(image, Path):
            raise BadData("no such file")
        try:
            return from_base64(image)
        except BadData:
            raise BadData("no such file, and not base64 text") from None
    raise TypeError("expected a path, bytes, base64 text, a Pillow image or an array")


def above(confidences: Sequence[float], thresholds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Names of classes with confidences above their thresholds, most confident first.

    >>> above([0.7, 0.9, 0.75], {"cat": 0.5, "cow": 0.8, "dog": 0.8})
    [('cow', 0.9), ('cat', 0.7)]
    """
    pairs = zip(thresholds.items(), confidences, strict=True)
    chosen = [(name, float(value)) for (name, threshold), value in pairs if value > threshold]
    return sorted(chosen, key=lambda pair: -pair[1])
