"""The cache of feature maps: what it holds, that it resumes, and that training on it is training."""

import hashlib
import json
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from csc.artifacts import Origin
from csc.data.dataset import Dataset
from csc.data.feature_maps import (
    CARD,
    WEIGHTS,
    FeatureCard,
    FeatureShards,
    Maps,
    backbone_weights,
    features_key,
    variant_uri,
    write_maps,
)
from csc.data.ingest.digits import ingest_digits
from csc.data.ingest.writer import WriteOptions
from csc.data.loading import image_batches
from csc.data.map_batches import map_batches
from csc.data.order import BatchRows
from csc.data.scores import Scores
from csc.data.views import View
from csc.errors import BadConfig, BadData, BadModel
from csc.methods import build_head
from csc.nets.backbone import StoredBackbone, build_backbone
from csc.nets.network import Network
from csc.scenario import Task
from csc.steps import embed as step
from csc.steps.embed import embed, unlabelled
from csc.storage import sha256_file, write_json
from csc.storage.tensors import save_tensors
from csc.training.start import start_on_maps
from csc.version import code_version
from tests.builders import contents
from tests.unit.training.bench import NEW, ROWS, SCENARIO, Bench, card_of, one_line, plain, settings, without_speed

FROZEN = ("backbone.frozen=true", "features.views=1")
HALF: dict[str, float] = {"rtol": 1e-3, "atol": 1e-5}  # what rounding to float16 may change


@pytest.fixture
def data(dataset: Dataset, tmp_path: Path) -> str:
    """A data set of this test alone: the same images, no maps yet."""
    return copied(dataset, tmp_path / "set")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Four shards, three of them with training images."""
    out = tmp_path_factory.mktemp("shards") / "set"
    return ingest_digits(out, train=60, test=20, options=WriteOptions(shard_rows=24))


def copied(dataset: Dataset, copy: Path) -> str:
    copy.mkdir()
    for item in dataset.path.iterdir():
        if item.name != "features":
            (copy / item.name).symlink_to(item)
    return str(copy)


def origin(data: str) -> str:
    return Origin(data, Dataset.open(data).fingerprint, code_version()).to_json()


def embedded(data: str, *items: str) -> str:
    return embed(origin(data), SCENARIO, settings(*FROZEN, *items).to_json())


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(BadData, match="remove the folder and embed again") as error:
        action()
    assert one_line(error)
    return str(error.value)


def test_maps_are_what_the_backbone_sees(data: str, views: dict[int, View]):
    features = embedded(data)
    card = FeatureCard.read(features)
    config = settings(*FROZEN)
    torch.manual_seed(config.seed * 1_000 + 1)
    network = Network(build_backbone(config.backbone), torch.nn.Identity(), card.mean, card.std).eval()
    images = next(plain(views[2], [range(ROWS)], size=config.input.size, workers=0)).images
    with torch.inference_mode():
        expected = network.features(images)
    found = next(map_batches(views[2], features, [(0, [BatchRows(range(ROWS))])], 0, variants=1))
    assert found.images.dtype == torch.float16
    assert found.images.is_contiguous(memory_format=torch.channels_last)
    assert tuple(found.images.shape[1:]) == card.shape
    torch.testing.assert_close(found.images.float(), expected, **HALF)
    assert found.targets.shape == (ROWS, 2 * NEW)


def weights_file(path: Path, seed: int = 0, classes: int = 0) -> Path:
    """Weights as training leaves them behind, and a head for so many classes."""
    torch.manual_seed(seed)
    net = build_backbone(settings().backbone).net
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 2)
    save_tensors({**net.state_dict(), "fc.weight": torch.zeros(classes, 8)}, path)
    return path


def test_the_network_that_embeds_is_folded_and_the_weights_next_to_the_maps_are_not(
    data: str, tmp_path: Path, views: dict[int, View], monkeypatch: pytest.MonkeyPatch
):
    made = list[Any]()
    run = step._Embedding.run
    monkeypatch.setattr(step._Embedding, "run", lambda self, count: (made.append(self), run(self, count))[1])
    init = weights_file(tmp_path / "weights.safetensors")
    features = embedded(data, f"init={init}", "train.channels_last=auto")
    assert not any(isinstance(part, nn.BatchNorm2d) for part in made[0].network.modules())
    kept, given = load_file(backbone_weights(features)), load_file(init)
    backbone = build_backbone(settings().backbone)
    assert set(kept) == set(backbone.state_dict())
    assert all(torch.equal(value, given[name.removeprefix("net.")]) for name, value in kept.items())
    backbone.load_state_dict(kept)
    card = FeatureCard.read(features)
    network = Network(backbone, nn.Identity(), card.mean, card.std).eval()
    images = next(plain(views[1], [range(ROWS)], size=32, workers=0)).images
    with torch.inference_mode():
        expected = network.features(images)
    found = next(map_batches(views[1], features, [(0, [BatchRows(range(ROWS))])], 0, variants=0)).images
    torch.testing.assert_close(found.float(), expected, **HALF)


def test_nothing_next_to_the_maps_reveals_a_label(data: str):
    features = Path(embedded(data))
    files = {str(path.relative_to(features)) for path in features.rglob("*") if path.is_file()}
    assert files == {CARD, WEIGHTS, "view-00/00000.arrow", "view-00/index.json"}
    with pa.memory_map(str(features / "view-00" / "00000.arrow")) as source:
        assert pa.ipc.open_file(source).schema.names == ["map"]
    assert set(json.loads((features / CARD).read_text())) == {
        "key", "shape", "views", "backbone", "initialisation", "mean", "std"
    }  # fmt: skip


def test_augmented_views_are_maps_of_augmented_images(data: str, views: dict[int, View]):
    features = embedded(data, "input.augment=true", "features.views=2")
    card = FeatureCard.read(features)
    assert card.variants == 2
    config = settings()
    torch.manual_seed(config.seed * 1_000 + 1)
    network = Network(build_backbone(config.backbone), torch.nn.Identity(), card.mean, card.std).eval()
    shard, row = (views[1].table[name][3].as_py() for name in ("shard", "row"))
    whole = unlabelled(Dataset.open(data), Dataset.open(data).labels().drop_columns("labels"))
    batch = next(
        image_batches(whole, [(2, [BatchRows([row])])], seed=shard, size=config.input.size, augment=True, workers=0)
    )
    with torch.inference_mode():
        expected = network.features(batch.images)[0].permute(1, 2, 0)
    found = torch.from_numpy(FeatureShards(features, 2, card.shape).map(shard, row).astype(np.float32))
    torch.testing.assert_close(found, expected, **HALF)


@pytest.mark.slow
def test_one_loader_makes_a_view_and_the_position_of_an_image_decides_its_augmentation(
    sharded: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaders = list[Any]()
    monkeypatch.setattr(
        "csc.data.loading.image_batches",
        lambda *arguments, **options: (loaders.append(options), image_batches(*arguments, **options))[1],
    )
    for module in ("csc.steps.embed", "csc.data.feature_maps"):
        monkeypatch.setattr(f"{module}.BATCH_ROWS", 16)  # borders of batches and of shards are not the same
    features = embedded(copied(sharded, tmp_path / "set"), "input.augment=true")
    assert len(loaders) == 2
    config, card, table = settings(), FeatureCard.read(features), sharded.labels().drop_columns("labels")
    torch.manual_seed(config.seed * 1_000 + 1)
    network = Network(build_backbone(config.backbone), torch.nn.Identity(), card.mean, card.std).eval()
    for shard in range(3):
        rows = unlabelled(sharded, table.slice(24 * shard, 24))
        plan = [(1, [BatchRows(range(16)), BatchRows(range(16, 24))])]
        batches = image_batches(rows, plan, seed=shard, size=config.input.size, augment=True, workers=0)
        with torch.inference_mode():
            expected = torch.cat([network.features(batch.images).permute(0, 2, 3, 1) for batch in batches])
        found = np.stack([FeatureShards(features, 1, card.shape).map(shard, row) for row in range(24)])
        torch.testing.assert_close(torch.from_numpy(found).float(), expected, **HALF)


def test_training_draws_from_the_augmented_views_and_changes_them_by_epoch(data: str, views: dict[int, View]):
    features = embedded(data, "input.augment=true", "features.views=3")
    plan = [(epoch, [BatchRows(range(ROWS))]) for epoch in range(2)]
    first, second = (batch.images for batch in map_batches(views[1], features, plan, 7, variants=3))
    plain = next(map_batches(views[1], features, plan, 7, variants=0)).images
    again = next(map_batches(views[1], features, plan, 7, variants=3)).images
    assert torch.equal(first, again)
    only = next(map_batches(views[1], features, plan, 7, variants=1)).images
    card, columns = FeatureCard.read(features), [views[1].table[name].to_pylist() for name in ("shard", "row")]
    of_first_view = [FeatureShards(features, 1, card.shape).map(*position) for position in zip(*columns, strict=True)]
    assert np.array_equal(only.permute(0, 2, 3, 1).numpy(), np.stack(of_first_view[:ROWS]))  # there are three
    assert not torch.equal(first, second)
    assert not any(torch.equal(one, other) for one, other in zip(first, plain, strict=True))


def test_finished_maps_are_not_made_again(data: str, monkeypatch: pytest.MonkeyPatch):
    features = embedded(data)
    monkeypatch.setattr(step, "_Embedding", None)  # nothing may be computed
    assert embedded(data) == features
    assert embedded(data, "train.epochs=3", "method=lwf", "loss.alpha=0.5") == features


def test_more_views_keep_those_that_are_there(data: str):
    features = embedded(data, "input.augment=true")
    plain = Path(variant_uri(features, 0), "00000.arrow")
    before = plain.stat()
    assert embedded(data, "input.augment=true", "features.views=2") == features
    assert plain.stat().st_mtime_ns == before.st_mtime_ns
    assert FeatureCard.read(features).variants == 2


def test_an_embedding_that_was_cut_off_goes_on(data: str, monkeypatch: pytest.MonkeyPatch):
    whole = embedded(data, "input.augment=true", "features.views=2")
    files = {path.name: path.read_bytes() for path in Path(variant_uri(whole, 2)).iterdir()}
    for path in (Path(whole, CARD), *Path(variant_uri(whole, 2)).iterdir()):
        path.unlink()
    made: list[int] = []
    make = step._Embedding._make
    monkeypatch.setattr(
        step._Embedding, "_make", lambda self, view, *rest: (made.append(view), make(self, view, *rest))[1]
    )
    assert embedded(data, "input.augment=true", "features.views=2") == whole
    assert made == [2]
    assert {path.name: path.read_bytes() for path in Path(variant_uri(whole, 2)).iterdir()} == files


class Killed(BaseException):
    """The end of a process."""


def test_a_killed_embedding_goes_on_with_the_shards_that_are_missing(
    sharded: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    items = ("input.augment=true", "features.views=1")
    whole = embedded(copied(sharded, tmp_path / "whole"), *items)
    data, made = copied(sharded, tmp_path / "set"), list[str]()

    def killed(batches: Iterable[Maps], shape: tuple[int, int, int], path: Path) -> int:
        if len(made) == 5:
            raise Killed
        made.append(path.name)
        return write_maps(batches, shape, path)

    monkeypatch.setattr(step, "write_maps", killed)
    with pytest.raises(Killed):
        embedded(data, *items)
    made[:] = ["first two of the second view"]
    assert contents(Path(embedded(data, *items))) == contents(Path(whole))
    assert len(made) == 3


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_damaged_shards_are_made_again_and_no_others(
    damage: Callable[[Path], None], sharded: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, items = copied(sharded, tmp_path / "set"), ("input.augment=true", "features.views=1")
    features = Path(embedded(data, *items))
    whole, made = contents(features), list[str]()

    def noted(batches: Iterable[Maps], shape: tuple[int, int, int], path: Path) -> int:
        made.append(path.name.split(".")[1])
        return write_maps(batches, shape, path)

    monkeypatch.setattr(step, "write_maps", noted)
    for file in ("view-00/00001.arrow", "view-00/00003.arrow", "view-01/00000.arrow"):
        damage(features / file)
    assert embedded(data, *items) == str(features)
    assert contents(features) == whole
    assert made == ["00001", "00003", "00000"]


def test_what_a_killed_embedding_left_is_removed_when_the_maps_are_complete(sharded: Dataset, tmp_path: Path):
    data = copied(sharded, tmp_path / "set")
    left = Path(embedded(copied(sharded, tmp_path / "name"))).name
    hidden = Path(data, "features", left, "view-00", ".00001.arrow.x1")
    hidden.parent.mkdir(parents=True)
    hidden.touch()
    embedded(data)
    assert not hidden.exists()


@pytest.mark.parametrize("moment", ["computes a shard", "notes a finished shard"])
def test_of_two_embeddings_at_once_the_slower_spoils_nothing(
    moment: str, sharded: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = copied(sharded, tmp_path / "set")
    note, begun, whole = step._Embedding._note, list[int](), dict[str, Any]()

    def overtaken() -> None:
        begun.append(len(begun))
        if len(begun) == 2:
            monkeypatch.undo()
            found = contents(Path(embedded(data, "input.augment=true", "features.views=2")))
            whole.update({name: content for name, content in found.items() if "/." not in name})

    def computed_apart(batches: Iterable[Maps], shape: tuple[int, int, int], path: Path) -> int:
        overtaken()
        return write_maps((maps + np.float16(0.125) for maps in batches), shape, path)  # as another device rounds

    def noted_late(*arguments: Any) -> None:
        overtaken()
        note(*arguments)

    if moment == "computes a shard":
        monkeypatch.setattr(step, "write_maps", computed_apart)
    else:
        monkeypatch.setattr(step._Embedding, "_note", noted_late)
    features = Path(embedded(data))
    assert len(begun) == 2
    assert contents(features) == whole
    assert FeatureCard.read(str(features)).variants == 2
    for view, shards in enumerate((4, 3, 3)):
        index = json.loads((features / f"view-{view:02d}" / "index.json").read_text())
        files = sorted((features / f"view-{view:02d}").glob("*.arrow"))
        assert [shard["sha256"] for shard in index] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
        assert len(files) == shards


def test_an_index_that_another_run_set_back_is_completed_in_order(
    sharded: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = contents(Path(embedded(copied(sharded, tmp_path / "whole"))))
    note, noted = step._Embedding._note, list[int]()

    def set_back(embedding: Any, view: int, number: int, entry: Any) -> None:
        noted.append(number)
        if noted == [0, 1, 2]:
            index = Path(embedding.uri, "view-00", "index.json")
            index.write_text(json.dumps(json.loads(index.read_text())[:1]))
        note(embedding, view, number, entry)

    monkeypatch.setattr(step._Embedding, "_note", set_back)
    assert contents(Path(embedded(copied(sharded, tmp_path / "set")))) == whole
    assert noted == [0, 1, 2, 1, 2, 3]


def test_a_card_is_not_believed_if_an_index_lacks_shards(sharded: Dataset, tmp_path: Path):
    data = copied(sharded, tmp_path / "set")
    features = Path(embedded(data, "input.augment=true", "features.views=1"))
    whole = contents(features)
    for view in ("view-00", "view-01"):
        index = features / view / "index.json"
        index.write_text(json.dumps(json.loads(index.read_text())[:-1]))
        embedded(data, "input.augment=true", "features.views=1")
        assert contents(features) == whole


@pytest.mark.parametrize("item", ["input.size=48", "backbone.output_stride=32", "seed=1", "input.decode=exact"])
def test_what_decides_a_map_is_in_the_key(dataset: Dataset, item: str):
    names = {features_key(settings(*FROZEN, *more), dataset.fingerprint) for more in ((), (item,))}
    assert len(names) == 2
    assert features_key(settings(*FROZEN), "other data") not in names


@pytest.mark.parametrize("changed", ["csc.data.feature_maps.sources_digest", "csc.data.feature_maps.metadata.version"])
def test_maps_of_other_code_lie_elsewhere(dataset: Dataset, changed: str, monkeypatch: pytest.MonkeyPatch):
    before = features_key(settings(*FROZEN), dataset.fingerprint)
    monkeypatch.setattr(changed, lambda *_: "other")
    assert features_key(settings(*FROZEN), dataset.fingerprint) != before


def test_weights_that_were_damaged_on_this_node_are_fetched_again(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uri = embedded(data)
    card, weights = FeatureCard.read(uri), Path(uri, WEIGHTS)
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(FeatureCard, "read", lambda _: card)
    monkeypatch.setattr("csc.data.cache.download", lambda _, path: shutil.copyfile(weights, path))
    copy = backbone_weights("s3://bucket/maps")
    flip(copy)
    assert backbone_weights("s3://bucket/maps").read_bytes() == weights.read_bytes()


def test_maps_of_other_weights_from_the_hub_lie_elsewhere(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = (weights_file(tmp_path / f"{seed}.safetensors", seed) for seed in range(2))
    behind_the_name = [first]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(behind_the_name[-1]))
    features = embedded(data, "init=hub")
    assert embedded(data, "init=hub") == features
    assert embedded(data, f"init={first}") == features  # the same weights
    behind_the_name.append(second)
    assert embedded(data, "init=hub") != features


def test_finished_maps_of_weights_that_leak_are_refused_unless_allowed(
    data: str, tmp_path: Path, tasks: tuple[Task, ...]
):
    init = f"init={weights_file(tmp_path / 'innocent.safetensors', classes=80)}"
    features = embedded(data, init, "allow_leaky_init=true")
    assert embedded(data, init, "allow_leaky_init=true") == features
    with pytest.raises(BadModel, match="allow_leaky_init=true") as error:
        embedded(data, init)
    assert one_line(error)
    for allowed in (True, False):
        config = settings(*FROZEN, init, f"allow_leaky_init={allowed}")
        with nullcontext() if allowed else pytest.raises(BadModel, match=r"MS-COCO.*allow_leaky_init=true"):
            start_on_maps(config, card_of(config, tasks[0]), features)


def test_training_on_maps_is_training_with_a_frozen_backbone(data: str, bench: Bench):
    """Equal up to the half precision of the maps."""
    config = settings(*FROZEN)
    features = embedded(data)
    card = FeatureCard.read(features)

    def losses(images: bool) -> list[float]:
        torch.manual_seed(config.seed * 1_000 + 1)
        backbone = build_backbone(config.backbone)
        torch.manual_seed(1)
        head = build_head(config, backbone.channels, (NEW,))
        stored = StoredBackbone({}, card.shape[0])
        network = Network(backbone if images else stored, head, card.mean, card.std)
        checkpoint = bench.folder / f"{images}.safetensors"
        log = bench.trainer(config, network, checkpoint_file=checkpoint, maps_uri="" if images else features).run()
        return [epoch["loss"] for epoch in without_speed(log)]

    np.testing.assert_allclose(losses(images=False), losses(images=True), rtol=2e-3)


def test_a_stored_backbone_keeps_its_weights_through_saving_and_loading():
    backbone = build_backbone(settings().backbone)
    stored = StoredBackbone(backbone.state_dict(), backbone.channels)
    network = Network(stored, torch.nn.Identity(), (0.5,) * 3, (0.5,) * 3)
    assert set(network.state_dict()) == {f"backbone.{name}" for name in backbone.state_dict()}
    other = Network(StoredBackbone({}, backbone.channels), torch.nn.Identity(), (0.5,) * 3, (0.5,) * 3)
    other.load_state_dict(network.state_dict())
    assert all(torch.equal(other.state_dict()[name], value) for name, value in network.state_dict().items())
    assert not list(network.parameters())


@pytest.mark.parametrize(
    ("items", "part"),
    [
        (("features.views=1",), "backbone.frozen=true"),
        (("features.views=1", "backbone.frozen=after_base"), "backbone.frozen=true"),
        (("features.views=2", "backbone.frozen=true", "input.augment=false"), "set it to 1"),
        (("features.views=-1",), "0 or more"),
    ],
)
def test_settings_that_no_cache_can_serve_are_refused(items: tuple[str, ...], part: str):
    with pytest.raises(BadConfig, match=part) as error:
        settings(*items)
    assert one_line(error)


def test_a_step_refuses_to_embed_without_being_asked_to(data: str):
    with pytest.raises(BadConfig, match=r"features\.views"):
        embed(origin(data), SCENARIO, settings().to_json())


def test_maps_that_are_not_there_are_named(tmp_path: Path, views: dict[int, View]):
    with pytest.raises(BadData, match=r"features\.json") as error:
        map_batches(views[1], str(tmp_path), [(0, [BatchRows([0, 1])])], 0, variants=0)
    assert one_line(error)
    (tmp_path / CARD).write_text(json.dumps({"key": "x"}))
    with pytest.raises(BadData, match="embed again"):
        FeatureCard.read(str(tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"views": "x"},
        {"views": None},
        {"shape": [96, 2]},
        {"shape": ["a", 2, 2]},
        {"shape": 96},
        {"mean": "abc"},
        {"backbone": {}},
        {"backbone": []},
        {"backbone": {"bytes": "x", "sha256": ""}},
        {"initialisation": None},
    ],
)
def test_a_card_with_values_of_another_kind_is_refused(data: str, wrong: dict[str, Any]):
    card = Path(embedded(data), CARD)
    card.write_text(json.dumps(json.loads(card.read_text()) | wrong))
    for read in (lambda: FeatureCard.read(str(card.parent)), lambda: embedded(data)):
        assert refusal(read).startswith(f"{card}: ")


@pytest.mark.parametrize("content", ["{}", "[1]", "[{}]", '[{"rows": "x"}]', "5"])
def test_an_index_of_another_form_is_refused(data: str, content: str):
    index = Path(variant_uri(embedded(data), 0), "index.json")
    index.write_text(content)
    assert refusal(lambda: embedded(data)).startswith(f"{index}: ")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damaged_weights_are_refused_by_training_and_made_again_by_embedding(
    data: str, tasks: tuple[Task, ...], damage: Callable[[Path], None]
):
    features, config = embedded(data), settings(*FROZEN)
    whole = contents(Path(features))
    damage(Path(features, WEIGHTS))
    message = refusal(lambda: start_on_maps(config, card_of(config, tasks[0]), features))
    assert message.startswith(f"{features}/{WEIGHTS}: ")
    assert embedded(data) == features
    assert contents(Path(features)) == whole


@pytest.mark.parametrize(
    ("rows", "shape", "reason"),
    [(3, (96, 2, 2), "has no row 70"), (80, (96, 1, 2), "2 × 2 × 96"), (80, (97, 2, 2), "2 × 2 × 96")],
)
def test_a_shard_with_too_few_rows_or_other_maps_is_refused(
    rows: int, shape: tuple[int, int, int], reason: str, tmp_path: Path
):
    channels, height, width = shape
    file = Path(variant_uri(str(tmp_path), 0), "00000.arrow")
    file.parent.mkdir()
    write_maps([np.zeros((rows, height, width, channels), np.float16)], shape, file)
    entry = {"rows": rows, "bytes": file.stat().st_size, "sha256": sha256_file(file)}
    write_json(file.with_name("index.json"), [entry])
    message = refusal(lambda: FeatureShards(str(tmp_path), 0, (96, 2, 2)).map(0, 70))
    assert message.startswith(f"{file}: ")
    assert reason in message


@contextmanager
def small_disk(room: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes; as on a full disk, that shows while writing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_maps_that_do_not_fit_on_the_disk_are_one_line_and_leave_nothing(data: str):
    with pytest.raises(BadData, match=r"cannot write .*File too large") as error, small_disk(8192):
        embedded(data)
    assert one_line(error)
    assert contents(Path(data, "features")) == {}
    assert FeatureCard.read(embedded(data)).variants == 0


def test_scores_that_do_not_fit_on_the_disk_are_one_line_and_leave_nothing(tmp_path: Path, views: dict[int, View]):
    view, none = views[1], np.zeros((ROWS, NEW), np.float32)
    scores = Scores(none, view.targets(), view.classes, view.table["image_id"])
    with pytest.raises(BadData, match=r"cannot write .*scores\.parquet: .*File too large") as error, small_disk(64):
        scores.write(tmp_path / "scores.parquet")
    assert one_line(error)
    assert contents(tmp_path) == {}
