"""Small pictures inside a page: heat maps over images, matrices as pixels, all as data URIs."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["data_uri", "encode_png", "heat_colours", "heatmap_png", "matrix_png"]

_COLD, _WARM = np.array([10, 14, 44], np.float32), np.array([255, 122, 0], np.float32)
_NEGATIVE, _POSITIVE = (31, 111, 196), (214, 93, 14)


def heat_colours(heat: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Colours (h, w, 4) to lay over an image: dark where the model does not look, a warm glow where it does.

    >>> heat_colours(np.array([[0, 255]], np.uint8)).tolist()
    [[[10, 14, 44, 158], [255, 122, 0, 107]]]
    """
    share = (heat.astype(np.float32) / 255)[..., None]
    colour = _COLD + (_WARM - _COLD) * share
    opacity = 0.62 * (1 - share) ** 2 + 0.42 * share**3
    return np.concatenate([colour, 255 * opacity], axis=2).astype(np.uint8)


def heatmap_png(image: Image.Image, heat: NDArray[np.uint8]) -> bytes:
    """An image with a heat map laid over it."""
    smooth = Image.fromarray(heat).resize(image.size, Image.Resampling.BICUBIC)
    colours = Image.fromarray(heat_colours(np.asarray(smooth)))
    return encode_png(Image.alpha_composite(image.convert("RGBA"), colours).convert("RGB"), optimize=False)


def matrix_png(matrix: NDArray[np.floating], largest: float) -> bytes:
    """A matrix as pixels: blue below zero, orange above, clear at zero, so that it suits light and dark pages."""
    share = np.clip(np.abs(matrix) / max(largest, 1e-12), 0, 1)
    pixels = np.zeros((*matrix.shape, 4), np.uint8)
    pixels[..., :3] = np.where((matrix < 0)[..., None], _NEGATIVE, _POSITIVE)
    pixels[..., 3] = (255 * share).round()
    return encode_png(Image.fromarray(pixels))


def encode_png(image: Image.Image, *, optimize: bool = True) -> bytes:
    """An image as PNG; `optimize` makes that of a photograph 5 % smaller and takes ten times as long."""
    target = io.BytesIO()
    image.save(target, "PNG", optimize=optimize, compress_level=3)
    return target.getvalue()


def data_uri(image: bytes) -> str:
    """An encoded image inside a page."""
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
