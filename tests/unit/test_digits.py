import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from csc.data.dataset import Dataset
from csc.data.ingest import digits
from csc.data.ingest.digits import DIGIT_CLASSES, compose_scene, glyph_pools, ingest_digits
from csc.data.shards import ImageShards
from csc.errors import BadConfig, BadData


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return ingest_digits(tmp_path_factory.mktemp("digits") / "set", train=1000, test=50)


@pytest.fixture(scope="module")
def presence(dataset: Dataset) -> np.ndarray:
    """Which class is in which training scene, (1000, 10)."""
    rows = dataset.labels().to_pylist()
    return np.array([[name in row["labels"] for name in DIGIT_CLASSES] for row in rows if row["split"] == "train"])


def jpegs(dataset: Dataset) -> dict[str, bytes]:
    shards = ImageShards(dataset.shards_uri)
    rows = dataset.labels().to_pylist()
    return {row["image_id"]: bytes(shards.jpeg(row["shard"], row["row"])) for row in rows}


def test_the_folder_keeps_the_contract(dataset: Dataset):
    assert dataset.name == "digits"
    assert dataset.classes == DIGIT_CLASSES == tuple(str(digit) for digit in range(10))
    assert dataset.source == {"kind": "digits", "train": 1000, "test": 50, "size": 48, "seed": 0, "version": 1}
    assert dataset.splits == {"train": {"images": 1000, "labelled": 1000}, "test": {"images": 50, "labelled": 50}}
    table = dataset.labels()
    assert table.column_names == ["image_id", "split", "shard", "row", "labels", "difficult"]
    assert table["image_id"].to_pylist()[998:1002] == ["train-00998", "train-00999", "test-00000", "test-00001"]
    assert not any(table["difficult"].to_pylist())


def test_images_are_rgb_jpegs_of_the_asked_size(dataset: Dataset, tmp_path: Path):
    large = ingest_digits(tmp_path / "large", train=40, test=2, size=64)
    for content, size in ((jpegs(dataset)["train-00003"], 48), (jpegs(large)["test-00001"], 64)):
        with Image.open(io.BytesIO(content)) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (size, size))


def test_the_same_arguments_give_the_same_data_and_another_seed_other_data(tmp_path: Path):
    one, two, other = (
        ingest_digits(tmp_path / name, train=40, test=5, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != other.fingerprint


def test_a_scene_does_not_depend_on_how_many_are_made(dataset: Dataset, tmp_path: Path):
    many, few = jpegs(dataset), jpegs(ingest_digits(tmp_path / "few", train=40, test=5))
    assert all(many[image_id] == content for image_id, content in few.items())


def test_a_scene_is_the_same_alone_as_after_others():
    alone = compose_scene("test", 7)
    for index in range(7):
        compose_scene("test", index)
    again = compose_scene("test", 7)
    assert alone[1] == again[1]
    assert alone[0].tobytes() == again[0].tobytes()
    assert compose_scene("train", 7)[0].tobytes() != alone[0].tobytes()


def test_train_and_test_show_different_handwriting():
    pools = glyph_pools()
    train, test = (np.concatenate(pools[split]) for split in ("train", "test"))
    assert sorted([*train, *test]) == list(range(1797))
    images, classes = digits._handwriting()
    assert not {images[row].tobytes() for row in train} & {images[row].tobytes() for row in test}
    for split in ("train", "test"):
        for digit, rows in enumerate(pools[split]):
            assert (classes[rows] == digit).all()
            assert len(rows) > 50


def test_a_scene_takes_its_digits_from_the_pool_of_its_split(monkeypatch: pytest.MonkeyPatch):
    shown = {"train": set(), "test": set()}
    glyphs, split = digits._padded_glyphs(), "train"

    class Recorded(list[Image.Image]):
        def __getitem__(self, row):
            shown[split].add(int(row))
            return super().__getitem__(row)

    monkeypatch.setattr(digits, "_padded_glyphs", lambda: Recorded(glyphs))
    for split in shown:
        for index in range(200):
            compose_scene(split, index)
        assert shown[split] <= set(np.concatenate(glyph_pools()[split]).tolist())
        assert len(shown[split]) > 200


def test_a_digit_is_clearly_brighter_than_what_it_lies_on(monkeypatch: pytest.MonkeyPatch):
    paint, gains = digits._paint, []

    def watched(opacity: np.ndarray, below: np.ndarray, rng: np.random.Generator) -> None:
        mean = below.mean()
        paint(opacity, below, rng)
        gains.append(below[opacity == opacity.max()].mean() - mean)

    monkeypatch.setattr(digits, "_paint", watched)
    for index in range(200):
        compose_scene("train", index)
    assert len(gains) > 400
    assert min(gains) >= digits.CONTRAST - 2  # whole numbers are rounded


def test_a_scene_has_one_to_four_labels(presence: np.ndarray):
    counts = np.bincount(presence.sum(axis=1), minlength=5)
    assert len(counts) == 5
    assert counts[0] == 0
    assert (counts[1:] > 50).all()


def test_every_class_is_in_a_tenth_of_the_training_scenes_and_some_are_much_more_common(presence: np.ndarray):
    shares = presence.mean(axis=0)
    assert shares.min() >= 0.10
    assert shares.max() > 2 * shares.min()


def test_some_pairs_of_classes_are_common_and_some_are_rare(presence: np.ndarray):
    together = presence.T.astype(int) @ presence.astype(int)
    conditional = (together / presence.sum(axis=0)[:, None])[~np.eye(10, dtype=bool)]
    assert conditional.min() > 0  # every pair can be learnt
    assert conditional.max() / conditional.min() > 3


def test_a_second_call_does_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = ingest_digits(tmp_path / "set", train=40, test=5)
    before = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    monkeypatch.setattr(digits, "compose_scene", None)
    assert ingest_digits(tmp_path / "set", train=40, test=5) == first
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == before


def test_a_damaged_shard_is_made_again(tmp_path: Path):
    dataset = ingest_digits(tmp_path / "set", train=40, test=5)
    shard = tmp_path / "set" / "images" / "00000.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000])
    assert ingest_digits(tmp_path / "set", train=40, test=5) == dataset
    assert shard.read_bytes() == whole


def test_another_data_set_in_the_folder_is_kept(tmp_path: Path):
    first = ingest_digits(tmp_path / "set", train=40, test=5)
    with pytest.raises(BadData, match="already contains another data set"):
        ingest_digits(tmp_path / "set", train=41, test=5)
    assert Dataset.open(tmp_path / "set") == first


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"train": 0}, "train"), ({"test": 100_001}, "test"), ({"size": 16}, "size"), ({"seed": -1}, "seed")],
)
def test_an_impossible_value_is_named(tmp_path: Path, arguments: dict[str, int], key: str):
    with pytest.raises(BadConfig, match=f"^{key}: "):
        ingest_digits(tmp_path / "set", **arguments)
    assert not (tmp_path / "set").exists()


def test_a_missing_scikit_learn_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for function in (digits._handwriting, digits.glyph_pools, digits._padded_glyphs):
        monkeypatch.setattr(digits, function.__name__, function.__wrapped__)
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadData, match=r"pip install 'csc-mlcil\[data\]'"):
        ingest_digits(tmp_path / "set", train=40, test=5)
    assert not (tmp_path / "set").exists()


def test_scikit_learn_is_read_but_never_imported():
    code = "import sys; from csc.data.ingest import digits; digits.compose_scene('train', 0); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "csc.data.ingest.digits" in modules
    assert not {"sklearn", "scipy", "torch"} & set(modules)
