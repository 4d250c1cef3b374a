"""A registered model at work: images in, class names with confidences out."""

import base64
import binascii
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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
        if isinstance(images, (str, bytes, Path, Image.Image)):
            images = [images]
        return pd.DataFrame(self.confidences(images), columns=list(self.card.classes))


def _load_pyfunc(path: str) -> Predictor:
    """Called by MLflow with the folder of the model's data."""
    return Predictor(path)


def _load(image: Any, size: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Any of the accepted forms of an image as uint8 (size, size, 3)."""
    if isinstance(image, Image.Image):
        opened = image
    elif isinstance(image, np.ndarray):
        opened = Image.fromarray(image)
    else:
        content, where = _encoded(image)
        try:
            opened = Image.open(io.BytesIO(content))
            opened.load()
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise BadData(f"{where}: not readable as an image ({error})") from None
    return np.asarray(opened.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


def _encoded(image: Any) -> tuple[bytes, str]:
    """Encoded bytes of an image given as bytes, path or base64 text, and how to name it."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image), "image bytes"
    path = Path(image)
    try:
        if path.is_file():
            return path.read_bytes(), str(path)
        return base64.b64decode(str(image), validate=True), "base64 image"
    except (OSError, binascii.Error, ValueError):
        name = str(image) if len(str(image)) < 200 else f"{str(image)[:40]}…"
        raise BadData(f"{name}: no such image file") from None


def above(confidences: Sequence[float], classes: Sequence[str], threshold: float) -> list[tuple[str, float]]:
    """Class names with confidences above a threshold, most confident first."""
    chosen = [(name, float(value)) for name, value in zip(classes, confidences, strict=True) if value > threshold]
    return sorted(chosen, key=lambda pair: -pair[1])
