"""A registered model at work: images in, class names with confidences out."""

import base64
import binascii
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from csc.errors import BadData
from csc.model import load_network

__all__ = ["Predictor", "above"]

BATCH = 32


class Predictor:
    """A model folder, loaded and ready; also what `mlflow.pyfunc.load_model` gives."""

    def __init__(self, folder: str | Path) -> None:
        self.network, self.card = load_network(Path(folder))
        self.size = self.card.settings().input.size

    def confidences(self, images: Iterable[Any]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        """Confidences (images, classes) of files, encoded bytes, base64 text, Pillow images or RGB arrays."""
        import torch

        loaded = [_load(image, self.size) for image in images]
        batches = []
        for start in range(0, len(loaded), BATCH):
            pixels = torch.from_numpy(np.stack(loaded[start : start + BATCH])).permute(0, 3, 1, 2)
            with torch.inference_mode():
                batches.append(self.network(pixels).sigmoid().numpy())
        return np.concatenate(batches) if batches else np.empty((0, len(self.card.classes)), np.float32)

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """A data frame with one row per image and one column of confidences per class.

        Args:
            model_input: a list of images, or a data frame whose first column holds them.
            params: none are used; MLflow passes them to every model.
        """
        import pandas as pd

        images = model_input.iloc[:, 0].tolist() if isinstance(model_input, pd.DataFrame) else model_input
        single = isinstance(images, (str, bytes, bytearray, memoryview, Path, Image.Image))
        if single or (isinstance(images, np.ndarray) and images.ndim == 3 and images.shape[-1] == 3):
            images = [images]
        return pd.DataFrame(self.confidences(images), columns=list(self.card.classes))


def _load_pyfunc(path: str) -> Predictor:
    """Called by MLflow with the folder of the model's data."""
    return Predictor(path)


def _load(image: Any, size: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Any of the accepted forms of an image as uint8 (size, size, 3)."""
    where = _name(image)
    try:
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim not in (2, 3):
                raise ValueError(f"expected uint8 of two or three axes, got {image.dtype} of {image.ndim}")
            opened = Image.fromarray(image)
        else:
            opened = image if isinstance(image, Image.Image) else Image.open(io.BytesIO(_encoded(image)))
        return np.asarray(opened.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    except UnidentifiedImageError:
        raise BadData(f"{where}: not an image of a known format") from None
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise BadData(f"{where}: not readable as an image ({error})") from None


def _name(image: Any) -> str:
    """How an error names an image."""
    if isinstance(image, (str, Path)):
        return str(image) if len(str(image)) < 200 else f"{str(image)[:40]}…"
    return f"image given as {type(image).__name__}"


def _encoded(image: Any) -> bytes:
    """Encoded bytes of an image given as bytes, path or base64 text."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, Path)):
        if os.path.isfile(image):  # noqa: PTH113 - unlike Path, it takes text of any length
            return Path(image).read_bytes()
        try:
            return base64.b64decode(str(image), validate=True)
        except binascii.Error:
            raise FileNotFoundError("no such file") from None
    raise TypeError("expected a path, bytes, base64 text, a Pillow image or an array")


def above(confidences: Sequence[float], classes: Sequence[str], threshold: float) -> list[tuple[str, float]]:
    """Class names with confidences above a threshold, most confident first."""
    chosen = [(name, float(value)) for name, value in zip(classes, confidences, strict=True) if value > threshold]
    return sorted(chosen, key=lambda pair: -pair[1])
