"""From JPEG bytes to a batch, against a plain Pillow pipeline; how long training waits for its data.

The plain pipeline is what the paper's code does with each image: open, convert, resize, `CutoutPIL`, RandAugment, float
tensor. Ours draws the same random numbers, so both do the same operations on the same images. The images are made up:
structure of all sizes as in photographs, objects with hard edges, grain; bytes per pixel as in COCO, and fewer.
"""

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor
from torchvision.io import decode_jpeg  # type: ignore[import-untyped]

from benchmarks import Result, interleaved
from csc.config import resolve
from csc.data.augment import CUTOUT_COLOUR, GREY, OPERATIONS, PROBABILITY, augment
from csc.data.decode import decode
from csc.data.ingest.images import scaled_down
from csc.data.loading import image_batches, workers_for
from csc.data.order import BatchRows
from csc.data.views import View
from csc.errors import CscError
from csc.nets.backbone import build_backbone
from csc.storage import sha256_file, write_json

__all__ = ["load"]

WIDTH, HEIGHT, SIZE, SHORT_SIDE = 640, 480, 224, 256
IMAGES, ROWS, ROUNDS = 6, 256, 4
MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 2.5, 40  # of the fast decoder from the exact one, as `decode` states them
TOLERANCE = 0.02  # share that augmentation may change otherwise than Pillow: where its shears round otherwise
NETWORK, NETWORK_SIZE, BATCH, SECONDS = "tf_efficientnet_lite0", 128, 32, 15.0
PLAIN = "plain Pillow, one core"


def load() -> list[Result]:
    """Speed per core relative to plain Pillow, and the share of training time that goes into waiting."""
    jpegs, smaller = (
        [_photograph(np.random.default_rng(seed), quality) for seed in range(IMAGES)] for quality in (94, 85)
    )
    _check(jpegs)
    with _one_thread():
        reduced = [scaled_down(jpeg, SHORT_SIDE).jpeg for jpeg in jpegs]
        per_core = [_pipelines(smaller), _pipelines(jpegs), _pipelines(jpegs, reduced), *_decoders(jpegs)]
    return [*per_core, _waiting(jpegs)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread: on a busy machine plain Pillow would wait for a second one and make ours look fast."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(jpegs: Sequence[bytes]) -> None:
    """Raise if what is about to be timed does not give the pixels that it should."""
    for seed, jpeg in enumerate(jpegs):
        exact, fast = decode(jpeg, SIZE, "exact"), decode(jpeg, SIZE, "fast")
        difference = abs(exact.astype(int) - fast)
        if difference.mean() > MEAN_DIFFERENCE or difference.max() > LARGEST_DIFFERENCE:
            found = f"{difference.mean():.2f} on average, {difference.max()} at most"
            raise CscError(f"bench load: fast decoding is off by {found}")
        image = _plain_augment(Image.fromarray(exact), np.random.default_rng(seed))
        if (augment(exact, np.random.default_rng(seed)) != np.asarray(image)).mean() > TOLERANCE:
            raise CscError(f"bench load: augmentation with seed {seed} does not give the pixels of plain Pillow")


def _pipelines(jpegs: Sequence[bytes], reduced: Sequence[bytes] = ()) -> Result:
    """Decode, resize and augment the same images in the same ways: batches of our loader, images of plain Pillow.

    Our loader may read them as `csc ingest --short-side` has stored them, which is not held against a goal.
    """
    with tempfile.TemporaryDirectory() as folder:
        view = _view(reduced or jpegs, ROWS, Path(folder))

        def ours(rows: range) -> Callable[[], object]:
            plan = [(0, [BatchRows(rows)] * (ROUNDS + 1))]  # one epoch: nothing is kept; one loader, as in training
            return partial(next, image_batches(view, plan, seed=0, size=SIZE, augment=True, workers=0))

        def plain(rows: range) -> None:
            for row in rows:
                image = _plain_decode(jpegs[row % len(jpegs)])
                _as_floats(_plain_augment(image, np.random.default_rng([0, 0, row])))

        works: dict[str, Callable[[], object]] = {}
        for rows in _batches(view):
            works |= {f"ours {rows}": ours(rows), f"plain {rows}": partial(plain, rows)}
        best = interleaved(works, ROUNDS)
    ratio = sum(best[name] for name in works if "plain" in name) / sum(best[name] for name in works if "ours" in name)
    case = f"decode, resize, augment to {SIZE} px, JPEGs of {sum(map(len, jpegs)) / len(jpegs) / 1000:.0f} KB"
    if reduced:
        return Result("load", f"{case}, ingested with --short-side {SHORT_SIDE}", ratio, None, PLAIN)
    return Result("load", case, ratio, 2.5, PLAIN)


def _decoders(jpegs: Sequence[bytes]) -> list[Result]:
    """The decoders alone, on the whole image and where they can at half its sides."""

    def over_all(function: Callable[[bytes], object]) -> Callable[[], None]:
        def work() -> None:
            for jpeg in jpegs:
                function(jpeg)

        return work

    half = {"min_height": HEIGHT // 2, "min_width": WIDTH // 2}
    variants: dict[str, Callable[[bytes], object]] = {
        "Pillow": lambda jpeg: Image.open(io.BytesIO(jpeg)).convert("RGB"),
        "Pillow draft, 1/2": _draft,
        "torchvision": lambda jpeg: decode_jpeg(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8)),
        "simplejpeg": lambda jpeg: simplejpeg.decode_jpeg(jpeg, "RGB"),
        "simplejpeg, 1/2": lambda jpeg: simplejpeg.decode_jpeg(jpeg, "RGB", **half),
    }
    best = interleaved({name: over_all(function) for name, function in variants.items()}, 4 * ROUNDS)
    plain = best.pop("Pillow")
    decoding = [Result("load", f"decode with {name}", plain / best[name], None, PLAIN) for name in best]
    whole = {"ours": over_all(lambda jpeg: decode(jpeg, SIZE)), "plain": over_all(_plain_decode)}
    both = interleaved(whole, 4 * ROUNDS)
    return [*decoding, Result("load", f"decode and resize to {SIZE} px", both["plain"] / both["ours"], None, PLAIN)]


def _draft(jpeg: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(jpeg))
    image.draft("RGB", (SIZE, SIZE))
    return image.convert("RGB")


def _waiting(jpegs: Sequence[bytes]) -> Result:
    """Train on a CPU for some seconds and see how much of them the loop spends in `next`."""
    backbone = build_backbone(resolve("voc", {"backbone": {"name": NETWORK}, "init": "scratch"}).backbone)
    backbone.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.Adam(backbone.parameters(), fused=True)

    def step(images: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        backbone((images - 127.5) / 127.5).mean().backward()
        optimizer.step()

    step(torch.zeros((BATCH, 3, NETWORK_SIZE, NETWORK_SIZE), dtype=torch.uint8))
    with tempfile.TemporaryDirectory() as folder:
        view = _view(jpegs, 1000 * BATCH, Path(folder))
        workers = workers_for("auto", torch.device("cpu"))
        plan = [(0, [BatchRows(rows) for rows in _batches(view)])]  # one epoch: nothing that is kept in memory helps
        batches = image_batches(view, plan, seed=0, size=NETWORK_SIZE, augment=True, workers=workers)
        started = time.perf_counter()
        while time.perf_counter() < started + SECONDS:
            step(next(batches).images)
        share = batches.waited / (time.perf_counter() - started)
        batches.close()
    case = f"waiting for data, {NETWORK} {NETWORK_SIZE} px on a CPU"
    return Result("load", case, share, 0.05, "time of training", better="lower")


def _view(jpegs: Sequence[bytes], rows: int, folder: Path) -> View:
    """A view of many rows that show the same few images in turn."""
    with pa.ipc.new_file(str(folder / "00000.arrow"), pa.schema([("jpeg", pa.binary())])) as writer:
        writer.write_batch(pa.record_batch([pa.array(jpegs, pa.binary())], names=["jpeg"]))
    shard = folder / "00000.arrow"
    entry = {"rows": len(jpegs), "bytes": shard.stat().st_size, "sha256": sha256_file(shard)}
    write_json(folder / "index.json", [entry])
    columns = {
        "image_id": pa.array(map(str, range(rows))),
        "shard": pa.array(np.zeros(rows, np.int32)),
        "row": pa.array(np.arange(rows, dtype=np.int32) % len(jpegs)),
        "labels": pa.array([[0]] * rows, pa.list_(pa.int16())),
    }
    return View(pa.table(columns), ("any",), str(folder), "")


def _batches(view: View) -> list[range]:
    return [range(start, start + BATCH) for start in range(0, len(view), BATCH)]


def _photograph(rng: np.random.Generator, quality: int) -> bytes:
    """A JPEG whose contrast grows with the size of the detail, as in a photograph; 160 KB at quality 94."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for octave in range(7):
        shape = (3 * 2**octave + 1, 4 * 2**octave + 1)
        *colours, light = (_enlarged(rng.normal(0, 0.75**octave, shape)) for _ in range(4))
        pixels += light[..., None] + 0.5 * np.stack(colours, axis=-1)
    image = Image.fromarray((128 + 45 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for number in range(12):
        x, y, width, height, *colour = rng.integers(0, (WIDTH, HEIGHT, 150, 150, 256, 256, 256)).tolist()
        shape_of = draw.ellipse if number % 2 else draw.rectangle
        shape_of((x, y, x + width, y + height), fill=tuple(colour))
    grain = rng.normal(0, 8, (HEIGHT, WIDTH, 1)) + rng.normal(0, 3, (HEIGHT, WIDTH, 3))
    encoded = io.BytesIO()
    Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=quality)
    return encoded.getvalue()


def _enlarged(plane: NDArray[np.float64]) -> NDArray[np.float32]:
    image = Image.fromarray(plane.astype(np.float32))
    return np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))


def _plain_decode(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def _as_floats(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)


def _plain_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """`csc.data.augment` as one writes it down first, with Pillow's own operations; also the reference of its tests."""
    red, green, blue = rng.integers(0, 256, size=3).tolist()
    image = _fill(image, int(image.width / 2 + 0.5), int(image.height / 2 + 0.5), (red, green, blue), rng)
    combinations = [(name, magnitude) for name in OPERATIONS for magnitude in OPERATIONS[name].magnitudes[1:]]
    first, second = int(rng.integers(len(combinations))), int(rng.integers(len(combinations) - 1))
    for index in (first, second + (second >= first)):
        if rng.random() < PROBABILITY:
            name, magnitude = combinations[index]
            image = _PLAIN_OPERATIONS[name](image, magnitude, rng)
    return image


def _fill(
    image: Image.Image, width: int, height: int, colour: tuple[int, int, int], rng: np.random.Generator
) -> Image.Image:
    left = int(rng.integers(image.width)) - width // 2
    top = int(rng.integers(image.height)) - height // 2
    box = (max(0, left), max(0, top), min(image.width, left + width), min(image.height, top + height))
    image = image.copy()
    if box[0] < box[2] and box[1] < box[3]:
        image.paste(colour, box)
    return image


def _signed(magnitude: float, rng: np.random.Generator) -> float:
    return magnitude if rng.random() < 0.5 else -magnitude


def _affine(image: Image.Image, a: float, b: float, c: float, d: float, how: Image.Resampling) -> Image.Image:
    """Move along the rows by a x + b, along the columns by c y + d."""
    return image.transform(image.size, Image.Transform.AFFINE, (1, a, b, c, 1, d), how, fillcolor=GREY)


def _turn(image: Image.Image, degrees: float) -> Image.Image:
    rotated = image.convert("RGBA").rotate(degrees)
    return Image.composite(rotated, Image.new("RGBA", rotated.size, (*GREY, 128)), rotated).convert("RGB")


_CUBIC, _NEAREST = Image.Resampling.BICUBIC, Image.Resampling.NEAREST
_PLAIN_OPERATIONS: dict[str, Callable[[Image.Image, float, np.random.Generator], Image.Image]] = {
    "invert": lambda image, _, rng: ImageOps.invert(image),
    "cutout": lambda image, side, rng: _fill(image, int(side), int(side), CUTOUT_COLOUR, rng),
    "sharpness": lambda image, by, rng: ImageEnhance.Sharpness(image).enhance(1 + _signed(by, rng)),
    "autocontrast": lambda image, _, rng: ImageOps.autocontrast(image),
    "posterize": lambda image, bits, rng: ImageOps.posterize(image, int(bits)),
    "shearX": lambda image, by, rng: _affine(image, _signed(by, rng), 0, 0, 0, _CUBIC),
    "translateX": lambda image, by, rng: _affine(image, 0, _signed(by, rng) * image.width, 0, 0, _NEAREST),
    "translateY": lambda image, by, rng: _affine(image, 0, 0, 0, _signed(by, rng) * image.height, _NEAREST),
    "shearY": lambda image, by, rng: _affine(image, 0, 0, _signed(by, rng), 0, _CUBIC),
    "rotate": lambda image, degrees, rng: _turn(image, degrees),
    "equalize": lambda image, _, rng: ImageOps.equalize(image),
    "contrast": lambda image, by, rng: ImageEnhance.Contrast(image).enhance(1 + _signed(by, rng)),
    "color": lambda image, by, rng: ImageEnhance.Color(image).enhance(1 + _signed(by, rng)),
    "solarize": lambda image, threshold, rng: ImageOps.solarize(image, int(np.ceil(threshold))),
    "brightness": lambda image, by, rng: ImageEnhance.Brightness(image).enhance(1 + _signed(by, rng)),
}
