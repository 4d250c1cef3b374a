"""A trained model at work: images in, class names with confidences out."""

import base64
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from csc.errors import BadData
from csc.model import load_network

__all__ = ["Predictor", "TooLarge", "above", "from_base64", "open_image"]

BATCH = 32
# All that is ever decoded: Pillow knows formats that start other programs, and images may come from anyone.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")


class TooLarge(BadData):
    """An image with more pixels than may be decoded."""


class Predictor:
    """A model folder, loaded and ready."""

    def __init__(self, folder: str | Path) -> None:
        self.network, self.card = load_network(Path(folder))
        settings = self.card.settings()
        self.size, self.threshold = settings.input.size, settings.threshold

    def confidences(self, images: Iterable[Any]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        """Confidences (images, classes) of files, encoded bytes, base64 text, Pillow images or RGB arrays."""
        import torch

        loaded = [_load(image, number, self.size) for number, image in enumerate(images, start=1)]
        batches = []
        for start in range(0, len(loaded), BATCH):
            pixels = torch.from_numpy(np.stack(loaded[start : start + BATCH])).permute(0, 3, 1, 2)
            with torch.inference_mode():
                batches.append(self.network(pixels).sigmoid().numpy())
        return np.concatenate(batches) if batches else np.empty((0, len(self.card.classes)), np.float32)


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


def _load(image: Any, number: int, size: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Any of the accepted forms of an image as uint8 (size, size, 3); errors name it by its path or its number."""
    try:
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim not in (2, 3):
                raise ValueError(f"expected uint8 of two or three axes, got {image.dtype} of {image.ndim}")
            opened = Image.fromarray(image)
        else:
            opened = image if isinstance(image, Image.Image) else open_image(_encoded(image))
        return np.asarray(opened.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
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


def above(confidences: Sequence[float], classes: Sequence[str], threshold: float) -> list[tuple[str, float]]:
    """Class names with confidences above a threshold, most confident first."""
    chosen = [(name, float(value)) for name, value in zip(classes, confidences, strict=True) if value > threshold]
    return sorted(chosen, key=lambda pair: -pair[1])
