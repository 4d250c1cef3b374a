"""Batches."""

import copy
import dataclasses
import io
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.load import LARGEST_DIFFERENCE, MEAN_DIFFERENCE, _photograph, _view
from csc.data import loading
from csc.data.decode import _scaled, decode
from csc.data.loading import Batch, Batches, Workers, image_batches, workers_for
from csc.data.order import BatchRows, Draw, Plan, draw_exemplars, epoch_batches
from csc.data.views import View
from csc.errors import BadData
from csc.training.inference import confidences
from tests.unit.training.bench import (
    NEW,
    ROWS,
    Bench,
    changed,
    first_rows,
    fresh_network,
    one_line,
    plain,
    settings,
    state_of,
)

WAYS: list[Workers] = [0, "thread", 2]


def plan_of(epochs: range, seed: int = 0, rows: int = ROWS) -> Plan:
    return [(epoch, [BatchRows(batch) for batch in epoch_batches(rows, 8, seed, epoch)]) for epoch in epochs]


def load(
    view: View, *, seed: int = 0, epoch: int = 0, workers: Workers = 0, augment: bool = True, epochs: int = 1
) -> list[Batch]:
    plan = plan_of(range(epoch, epoch + epochs), seed)
    return list(image_batches(view, plan, seed=seed, size=32, augment=augment, workers=workers))


def by_row(batches: list[Batch]) -> dict[int, Tensor]:
    return {int(row): image for batch in batches for row, image in zip(batch.rows, batch.images, strict=True)}


def same(one: list[Batch], two: list[Batch]) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) and torch.equal(a.rows, b.rows)
        for a, b in pairs
    )


def encoded(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, **({"format": "JPEG", "quality": 90} | options))
    return file.getvalue()


def difference(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return abs(one.astype(int) - two)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.fixture(scope="module")
def photograph() -> bytes:
    return _photograph(np.random.default_rng(0), quality=94)


@pytest.mark.parametrize("workers", WAYS[1:])
@pytest.mark.parametrize("epochs", [1, 3])
def test_any_way_of_loading_gives_the_same_batches(views: dict[int, View], workers: Workers, epochs: int):
    assert same(load(views[1], workers=0, epochs=epochs), load(views[1], workers=workers, epochs=epochs))


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}], ids=["epoch", "seed"])
def test_another_epoch_or_seed_gives_another_order_and_other_augmentation(views: dict[int, View], other: dict):
    first, second = load(views[1]), load(views[1], **other)
    assert same(first, load(views[1]))
    rows = [torch.cat([batch.rows for batch in batches]).tolist() for batches in (first, second)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(ROWS))
    one, two = by_row(first), by_row(second)
    assert not any(torch.equal(one[row], two[row]) for row in one)


def test_without_augmentation_an_image_is_the_same_in_every_epoch(views: dict[int, View]):
    one, two = by_row(load(views[1], augment=False)), by_row(load(views[1], augment=False, epoch=5))
    assert all(torch.equal(one[row], two[row]) for row in one)


@pytest.mark.parametrize("workers", WAYS)
def test_several_epochs_are_those_of_each_alone(views: dict[int, View], workers: Workers):
    together = load(views[1], epoch=1, epochs=2, workers=workers)
    assert same(together, load(views[1], epoch=1) + load(views[1], epoch=2))


def test_batches_are_bytes_with_the_labels_of_their_rows(views: dict[int, View]):
    for batch in load(views[2]):
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape == (len(batch.rows), 3, 32, 32)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.targets.dtype == torch.float32
        assert np.array_equal(batch.targets.numpy(), views[2].targets()[batch.rows.numpy()])
        assert batch.targets[:, :NEW].sum() == 0


@pytest.mark.parametrize(
    ("count", "sizes"), [(17, [8, 8]), (18, [8, 8, 2]), (16, [8, 8]), (9, [8]), (8, [8]), (2, [2]), (1, [1])]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_last_batch_of_one_image_is_left_out(count: int, sizes: list[int], shuffle: bool):
    batches = epoch_batches(count, 8, seed=0, epoch=0, shuffle=shuffle)
    assert [len(rows) for rows in batches] == sizes
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(count))


def test_each_draw_shows_an_image_in_its_own_way_and_always_in_the_same(views: dict[int, View]):
    def shown(own: list[int], *draws: Draw) -> Batch:
        return next(image_batches(views[1], [(0, [BatchRows(own, draws)])], seed=0, size=32, augment=True, workers=0))

    batch = shown([3, 4], Draw([3, 4], 1), Draw([4, 3], 2))
    assert batch.rows.tolist() == [3, 4, 3, 4, 4, 3]
    assert torch.equal(batch.targets[0], batch.targets[5])
    assert len({image.numpy().tobytes() for image in batch.images}) == 6
    assert torch.equal(shown([], Draw([4], 2)).images[0], batch.images[4])


def test_exemplars_are_drawn_without_repetition_and_each_draw_has_its_number():
    draws = draw_exemplars(range(10, 16), 4, 5, seed=0, epoch=0)
    assert [draw.number for draw in draws] == [1, 2, 3, 4, 5]
    assert all(len(set(draw.rows)) == 4 and set(draw.rows) <= set(range(10, 16)) for draw in draws)
    assert len({tuple(draw.rows) for draw in draws}) > 1
    assert draws == draw_exemplars(range(10, 16), 4, 5, seed=0, epoch=0)
    assert draws != draw_exemplars(range(10, 16), 4, 5, seed=0, epoch=1)


def test_a_lone_last_image_does_not_stop_training(bench: Bench):
    trainer = bench.trainer(settings("train.epochs=1"), view=first_rows(bench.views[1], 9))
    assert trainer.updates_per_epoch == 1
    assert len(trainer.run()) == 1


@pytest.mark.parametrize("workers", WAYS)
def test_evaluation_reads_the_rows_it_is_told(views: dict[int, View], workers: Workers):
    parts = [range(19), [19], []]
    batches = list(plain(views[1], parts, size=32, workers=workers))
    assert [batch.rows.tolist() for batch in batches] == [list(range(19)), [19], []]
    assert [len(batch.images) for batch in batches] == [len(batch.targets) for batch in batches] == [19, 1, 0]
    loaded = by_row(load(views[1], augment=False))
    assert all(torch.equal(image, loaded[row]) for row, image in by_row(batches).items())


def test_confidences_are_those_of_the_network_and_do_not_depend_on_the_batch(views: dict[int, View]):
    config = settings()
    network = fresh_network(config).train()
    before = state_of(network)
    rows, values = zip(*confidences(network, views[1], config), strict=True)
    assert torch.cat(rows).tolist() == list(range(ROWS))
    one = next(plain(views[1], [[0]], size=32, workers=0))
    with torch.no_grad():
        expected = copy.deepcopy(network).eval()(one.images).sigmoid()
    torch.testing.assert_close(torch.cat(values)[:1], expected, rtol=1e-4, atol=1e-5)
    assert torch.cat(values).shape == (ROWS, NEW)
    assert network.training  # it may go on learning, and be saved
    assert changed(before, network) == set()


def test_by_itself_a_cpu_gets_a_thread_and_a_gpu_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for cores, workers in ((4, 3), (1, 1), (256, loading.MOST_WORKERS)):
        monkeypatch.setattr(loading, "cores", lambda cores=cores: cores)
        assert workers_for("auto", torch.device("cpu")) == "thread"
        assert workers_for("auto", torch.device("cuda")) == workers


@pytest.mark.parametrize(("ranks", "workers"), [("1", 8), ("4", 5), ("8", 2), ("24", 1), ("48", 1)])
def test_the_ranks_of_a_node_share_its_cores(ranks: str, workers: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "cores", lambda: 24)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert workers_for("auto", torch.device("cuda")) == workers


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wanted", [0, 3])
def test_a_number_of_workers_is_taken_as_it_is(wanted: int, device: str):
    assert workers_for(wanted, torch.device(device)) == wanted


@pytest.mark.parametrize("workers", WAYS)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_missing_shard_is_reported_by_its_file(views: dict[int, View], tmp_path: Path, workers: Workers, mode: str):
    nowhere = dataclasses.replace(views[1], shards_uri=str(tmp_path))
    with pytest.raises(BadData, match=r"00000\.arrow") as error:
        next(plain(nowhere, [[0]], size=32, workers=workers, mode=mode))
    assert one_line(error)


@pytest.mark.parametrize("workers", WAYS)
def test_a_broken_image_is_reported_where_its_batch_would_be(photograph: bytes, tmp_path: Path, workers: Workers):
    view = _view([photograph, photograph, photograph[:20_000], photograph], 8, tmp_path)
    batches = plain(view, [[0, 1], [3, 4], [5, 6], [7]], size=32, workers=workers)
    assert [len(next(batches).rows) for _ in range(2)] == [2, 2]
    with pytest.raises(BadData, match=r"00000\.arrow row 2: broken image \(image file is truncated") as error:
        next(batches)
    assert one_line(error)
    assert list(batches) == []
    assert loader_threads() == []


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\xff\xd8\xff\xe0\x00\x10JFIF"])
def test_what_is_no_image_is_reported_alike_by_both_decoders(content: bytes, tmp_path: Path):
    view = _view([content], 1, tmp_path)
    texts = []
    for mode in ("fast", "exact"):
        with pytest.raises(BadData, match="row 0: broken image") as error:
            next(plain(view, [[0]], size=32, workers=0, mode=mode))
        assert one_line(error)
        texts.append(str(error.value).partition("0x")[0])
    assert texts[0] == texts[1]


def test_a_thread_ends_with_the_last_batch(views: dict[int, View]):
    assert len(load(views[1], workers="thread")) == 3
    assert loader_threads() == []


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_thread_ends_when_its_consumer_stops_early(views: dict[int, View], taken: int):
    batches = image_batches(views[1], plan_of(range(50)), seed=0, size=32, augment=True, workers="thread")
    for _ in range(taken):
        next(batches)
    assert bool(loader_threads()) == bool(taken)
    batches.close()
    assert loader_threads() == []
    assert list(batches) == []


def test_a_thread_ends_when_its_consumer_fails(views: dict[int, View]):
    def consumer() -> None:
        for _ in image_batches(views[1], plan_of(range(50)), seed=0, size=32, augment=False, workers="thread"):
            raise KeyError("something else")

    with pytest.raises(KeyError):
        consumer()
    assert loader_threads() == []


def test_a_thread_works_a_few_batches_ahead():
    loaded: list[int] = []

    def load_one(key: tuple[int, list[int]]) -> Batch:
        loaded.append(key[0])
        return Batch(torch.empty(0), torch.empty(0), torch.tensor(key[1]))

    batches = Batches(loading._from_thread(load_one, [(number, [number]) for number in range(20)]))
    assert loaded == []
    for number in range(20):
        assert next(batches).rows.tolist() == [number]
        assert set(range(number + 1)) <= set(loaded) <= set(range(number + 1 + loading.AHEAD))
    assert sorted(loaded) == list(range(20))


def test_the_time_spent_waiting_is_counted(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 1.5, 10.0, 10.25, 20.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    batch = Batch(torch.empty(0), torch.empty(0), torch.empty(0))
    batches = Batches(batch for _ in range(2))
    assert batches.waited == 0
    assert next(batches) is batch
    assert batches.waited == 1.5
    assert list(batches) == [batch]
    assert batches.waited == 1.75


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize(("limit", "decoded"), [(1 << 20, 1), (0, 3)], ids=["small", "large"])
@pytest.mark.parametrize("workers", [0, "thread"])
def test_a_small_set_is_decoded_once(
    views: dict[int, View],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    decoded: int,
    workers: Workers,
    augment: bool,
):
    counts: Counter[bytes] = Counter()

    def counting(jpeg: memoryview, size: int, mode: str) -> np.ndarray:
        counts[bytes(jpeg)] += 1
        return decode(jpeg, size, mode)

    expected = [batch for epoch in range(3) for batch in load(views[1], epoch=epoch, augment=augment)]
    monkeypatch.setattr(loading, "decode", counting)
    monkeypatch.setattr(loading, "KEPT_BYTES", limit)
    assert same(load(views[1], epochs=3, augment=augment, workers=workers), expected)
    assert set(counts.values()) == {decoded}
    assert len(counts) == ROWS


@pytest.mark.parametrize("size", [64, 128, 224])
def test_fast_decoding_stays_within_its_tolerance(photograph: bytes, size: int):
    off = difference(decode(photograph, size, "fast"), decode(photograph, size, "exact"))
    assert 0 < off.mean() <= MEAN_DIFFERENCE
    assert off.max() <= LARGEST_DIFFERENCE


def test_the_stated_tolerance_is_the_one_that_is_held():
    stated = " ".join(str(decode.__doc__).split())
    assert f"up to {MEAN_DIFFERENCE} levels of 255 on average and up to {LARGEST_DIFFERENCE} in single values" in stated


@pytest.mark.parametrize(("size", "scale"), [(32, 8), (60, 8), (61, 4), (224, 2), (240, 2), (241, 1), (448, 1)])
def test_the_decoder_scales_as_far_as_the_size_allows(photograph: bytes, size: int, scale: int):
    pixels = _scaled(photograph, size)
    assert pixels is not None
    assert pixels.shape == (480 // scale, 640 // scale, 3)


def test_bytes_from_a_shard_take_the_fast_path(photograph: bytes):
    assert _scaled(memoryview(pa.py_buffer(photograph)), 224) is not None
    assert _scaled(memoryview(pa.array([photograph])[0].as_buffer()), 224) is not None


@pytest.mark.parametrize("size", [96, 150, 400])
def test_an_image_that_is_not_scaled_is_off_by_one_level_at_most(photograph: bytes, size: int):
    jpeg = encoded(Image.open(io.BytesIO(photograph)).resize((151, 97)))
    off = difference(decode(jpeg, size, "fast"), decode(jpeg, size, "exact"))
    assert off.max() <= 1
    assert off.mean() < 0.05


def test_an_image_of_the_right_size_is_the_same_in_both_modes(photograph: bytes):
    jpeg = encoded(Image.open(io.BytesIO(photograph)).resize((128, 128)))
    assert np.array_equal(decode(jpeg, 128, "fast"), decode(jpeg, 128, "exact"))


FORMS = {
    "progressive": lambda image: encoded(image, progressive=True),
    "whole colour": lambda image: encoded(image, subsampling="4:4:4"),
    "half colour": lambda image: encoded(image, subsampling="4:2:2"),
    "grey": lambda image: encoded(image.convert("L")),
    "ink": lambda image: encoded(image.convert("CMYK")),
    "no transform": lambda image: encoded(image, keep_rgb=True),
    "restarts": lambda image: encoded(image, restart_marker_rows=1),
    "turned by its metadata": lambda image: encoded(image, exif=_turned()),
    "one column": lambda image: encoded(image.resize((1, 90))),
    "bytes behind the end": lambda image: encoded(image) + b"more",
    "damaged": lambda image: _damaged(encoded(image)),
    "another format": lambda image: encoded(image, format="PNG"),
}


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _damaged(jpeg: bytes) -> bytes:
    """Bytes are missing in the middle, which Pillow lives with."""
    middle = len(jpeg) // 2
    return jpeg[:middle] + bytes(100) + jpeg[middle + 100 :]


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_image_comes_out_as_pillow_reads_it(photograph: bytes, form: str):
    jpeg = FORMS[form](Image.open(io.BytesIO(photograph)).resize((181, 120)))
    with Image.open(io.BytesIO(jpeg)) as image:
        plain = np.asarray(image.convert("RGB").resize((100, 100), Image.Resampling.BILINEAR))
    assert np.array_equal(decode(jpeg, 100, "exact"), plain)
    assert difference(decode(jpeg, 100, "fast"), plain).max() <= 1
    fast = decode(jpeg, 40, "fast")
    assert (fast.shape, fast.dtype, fast.flags.writeable) == ((40, 40, 3), np.uint8, True)
    assert difference(fast, decode(jpeg, 40, "exact")).mean() <= MEAN_DIFFERENCE


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_batches_are_decoded_as_told(photograph: bytes, tmp_path: Path, mode: str):
    view = _view([photograph], 1, tmp_path)
    expected = torch.from_numpy(decode(photograph, 64, mode)).permute(2, 0, 1)
    assert torch.equal(next(plain(view, [[0]], size=64, workers=0, mode=mode)).images[0], expected)


def test_loading_leaves_the_random_state_of_torch_alone(views: dict[int, View]):
    before = torch.get_rng_state()
    for workers in WAYS:
        load(views[1], workers=workers)
    assert torch.equal(torch.get_rng_state(), before)
