"""Images as they go into shards: whatever a file holds is an image in 8-bit colours or refused by its name."""

import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, UnidentifiedImageError

from csc.data import FORMATS
from csc.data.ingest.images import BrokenImage, checked_jpeg, scaled_down


def encoded(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def shades(jpeg: bytes) -> list[int]:
    """The grey values of the four corners of a picture in four shades."""
    image = Image.open(io.BytesIO(jpeg)).convert("L")
    right, bottom = image.width - 1, image.height - 1
    return [image.getpixel(corner) for corner in ((0, 0), (right, 0), (0, bottom), (right, bottom))]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_keeps_its_shades(kind: str):
    grey = np.kron(np.array([[0, 64], [128, 255]], np.uint16) * 257, np.ones((32, 32), np.uint16))
    content = encoded(Image.fromarray(grey), kind)
    assert Image.open(io.BytesIO(content)).mode.startswith("I;16")
    for jpeg in (checked_jpeg(content, "grey")[0], scaled_down(content, 32).jpeg):
        assert np.abs(np.subtract(shades(jpeg), [0, 64, 128, 255])).max() <= 4


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused_by_name(dtype: type):
    content = encoded(Image.fromarray(np.ones((8, 8), dtype)), "TIFF")
    with pytest.raises(BrokenImage, match=r"^depth\.tif: broken image \(32 bits to a pixel"):
        checked_jpeg(content, "depth.tif")


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_of_any_format_is_a_broken_image_or_an_image(kind: str):
    rng = random.Random(kind)
    whole = encoded(Image.frombytes("RGB", (32, 32), rng.randbytes(32 * 32 * 3)), kind)
    for _ in range(150):
        content = bytearray(whole)
        for offset in rng.choices(range(min(len(content), 160)), k=3):
            content[offset] = rng.randrange(256)
        try:
            checked_jpeg(bytes(content), "fuzzed")
        except BrokenImage as error:
            assert str(error).startswith("fuzzed: broken image (")  # noqa: PT017
            assert len(str(error).splitlines()) == 1  # noqa: PT017


def test_whatever_a_decoder_raises_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def failing(*_: object, **__: object) -> Image.Image:
        raise NotImplementedError("no such\nfourcc")

    monkeypatch.setattr(Image, "open", failing)
    with pytest.raises(BrokenImage, match=r"^a\.dds: broken image \(no such fourcc\); "):
        checked_jpeg(b"", "a.dds")


def test_a_machine_without_memory_is_no_broken_image(monkeypatch: pytest.MonkeyPatch):
    def failing(*_: object, **__: object) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(Image, "open", failing)
    with pytest.raises(MemoryError):
        checked_jpeg(b"", "a.png")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    "read", [lambda content: checked_jpeg(content, "a.jpg"), lambda content: scaled_down(content, 4)]
)
def test_a_file_of_a_format_that_starts_programs_starts_none(
    read: Callable[[bytes], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\n")
    program.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(program))
    with pytest.raises((BrokenImage, UnidentifiedImageError)):
        read(EPS)
    assert not (tmp_path / "started").exists()
