import dataclasses
import functools
import inspect
import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from csc.components.train.component import train as train_component
from csc.config import methods, resolve
from csc.data import views as partial
from csc.data.dataset import Dataset
from csc.data.ingest.digits import ingest_digits
from csc.data.ingest.images import Encoded, ListedImage
from csc.data.ingest.writer import SourceListing, WriteOptions, write_dataset
from csc.data.published import benchmark_note
from csc.data.shards import ImageShards
from csc.data.views import View, train_view
from csc.errors import BadData
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario, Task
from csc.steps.build_dataset import build_dataset
from csc.steps.ingest import ingest
from csc.steps.split_labels import split_labels
from csc.steps.train import train
from tests.builders import picture

VIEW = pa.schema(
    [("image_id", pa.string()), ("shard", pa.int32()), ("row", pa.int32()), ("labels", pa.list_(pa.int16()))]
)

JPEG = picture(0, 8, 8)
# What is drawn is small already; making it smaller would take minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the whole data set says of one image; the views must say less."""

    image_id: str
    split: str
    labels: frozenset[str]
    difficult: frozenset[str] = frozenset()

    def listed(self) -> ListedImage:
        return ListedImage(self.image_id, self.split, tuple(self.labels), tuple(self.difficult), "")


def named(count: int) -> list[str]:
    """Class names that occur nowhere else in a file by chance."""
    return [f"kind{index:02d}" for index in range(count)]


def write(
    folder: Path,
    truth: Sequence[Truth],
    classes: Sequence[str],
    *,
    name: str = "some",
    crowds: bool = False,
    shard_rows: int = 1024,
) -> Dataset:
    return write_dataset(
        folder / "set",
        name,
        SourceListing(classes, [image.listed() for image in truth], {"kind": "test"}, difficult_is_member=crowds),
        lambda rows: [Encoded(JPEG, 8, 8)] * len(rows),
        options=WriteOptions(shard_rows=shard_rows),
    )


def images(split: str, labels: Sequence[frozenset[str]], difficult: Sequence[frozenset[str]] = ()) -> list[Truth]:
    more = [*difficult, *[frozenset()] * (len(labels) - len(difficult))]
    rows = enumerate(zip(labels, more, strict=True))
    return [Truth(f"{split}-{row:04d}", split, own, extra - own) for row, (own, extra) in rows]


def tasks_that_fit(classes: Sequence[str]) -> list[Task]:
    """Every task of every Bx-Cy on these classes; equal ones of different scenarios once."""
    count = len(classes)
    cuts = [(base, increment) for base in range(count + 1) for increment in range(1, count + 1)]
    every = [task for base, increment in cuts for task in Scenario("some", base, increment).tasks(classes)]
    return list({(task.new, task.seen): task for task in every}.values())


def expected(
    truth: Sequence[Truth], split: str, member: Sequence[str], shown: Sequence[str], seen: Sequence[str], crowds: bool
) -> list[tuple[str, list[int]]]:
    """Images and labels of a view, worked out one image at a time."""
    rows = []
    for image in truth:
        present = image.labels | image.difficult if crowds else image.labels
        if image.split == split and present & set(member):
            rows.append((image.image_id, sorted(seen.index(name) for name in image.labels & set(shown))))
    return rows


def rows_of(view: View) -> list[tuple[str, list[int]]]:
    return [(row["image_id"], row["labels"]) for row in view.table.to_pylist()]


def there_and_back(view: View, folder: Path) -> View:
    view.write(folder / "view.parquet")
    return View.read(folder / "view.parquet")


def assert_only_the_task_shows(dataset: Dataset, truth: Sequence[Truth], task: Task, folder: Path) -> None:
    """The train view, as training reads it, tells of the new classes everything and of others nothing."""
    view = there_and_back(train_view(dataset, task), folder)
    crowds = dataset.difficult_is_member
    assert rows_of(view) == expected(truth, "train", task.new, task.new, task.seen, crowds)
    shown = {label for labels in view.table["labels"].to_pylist() for label in labels}
    assert shown <= set(range(len(task.old), len(task.seen)))
    assert not view.targets()[:, : len(task.old)].any()
    assert_nothing_else_in_the_file(folder / "view.parquet", dataset, task)


def assert_nothing_else_in_the_file(path: Path, dataset: Dataset, task: Task) -> None:
    """Positions, labels as numbers, and facts of the whole data set: nothing more is in the file."""
    file = pq.ParquetFile(path)
    assert [(field.name, str(field.type)) for field in file.schema_arrow] == [
        ("image_id", "string"),
        ("shard", "int32"),
        ("row", "int32"),
        ("labels", "list<element: int16>"),
    ]
    assert set(file.metadata.metadata) == {b"csc", b"ARROW:schema"}
    facts = json.loads(file.metadata.metadata[b"csc"])
    assert re.fullmatch("[0-9a-f]{64}", facts.pop("digest"))
    assert facts.pop("note") in ("", benchmark_note(dataset))
    assert facts == {
        "classes": list(task.seen),
        "images": dataset.shards_uri,
        "fingerprint": dataset.fingerprint,
    }
    assert not any(field.metadata for field in file.schema_arrow)
    content = path.read_bytes()
    future = set(dataset.classes) - set(task.seen)
    assert not {name for name in future if name.encode() in content}


def assert_test_shows_all_seen(dataset: Dataset, truth: Sequence[Truth], task: Task, folder: Path) -> None:
    rows = expected(truth, "test", task.seen, task.seen, task.seen, dataset.difficult_is_member)
    if not rows:
        with pytest.raises(BadData, match=f"no test image for task {task.index};"):
            partial.test_view(dataset, task)
        return
    view = there_and_back(partial.test_view(dataset, task), folder)
    assert rows_of(view) == rows
    assert view.classes == task.seen
    assert_nothing_else_in_the_file(folder / "view.parquet", dataset, task)


@st.composite
def truths(draw: st.DrawFn) -> tuple[list[str], list[Truth], bool]:
    """Classes, images with any labels, and whether crowds make an image a member; each class is in train."""
    classes = named(draw(st.integers(4, 12)))
    some = st.frozensets(st.sampled_from(classes), max_size=5)
    labels = draw(st.lists(some, max_size=8))
    labels.append(frozenset(classes) - frozenset().union(*labels))
    difficult = draw(st.lists(some, max_size=len(labels)))
    in_test = draw(st.lists(some, min_size=1, max_size=4))
    truth = [*images("train", labels, difficult), *images("test", in_test, draw(st.lists(some, max_size=len(in_test))))]
    return classes, truth, draw(st.booleans())


@settings(max_examples=10, deadline=None, phases=PHASES)
@given(truths())
def test_training_never_sees_a_label_of_another_task(drawn: tuple[list[str], list[Truth], bool]):
    classes, truth, crowds = drawn
    with tempfile.TemporaryDirectory() as name:
        dataset = write(Path(name), truth, classes, crowds=crowds)
        for task in tasks_that_fit(classes):
            assert_only_the_task_shows(dataset, truth, task, Path(name))


@settings(max_examples=8, deadline=None, phases=PHASES)
@given(truths())
def test_a_test_view_has_all_seen_labels_and_no_future_one(drawn: tuple[list[str], list[Truth], bool]):
    classes, truth, crowds = drawn
    with tempfile.TemporaryDirectory() as name:
        dataset = write(Path(name), truth, classes, crowds=crowds)
        for task in tasks_that_fit(classes):
            assert_test_shows_all_seen(dataset, truth, task, Path(name))


@settings(max_examples=8, deadline=None, phases=PHASES)
@given(truths())
def test_the_upper_bound_sees_exactly_the_seen_labels(drawn: tuple[list[str], list[Truth], bool]):
    classes, truth, crowds = drawn
    with tempfile.TemporaryDirectory() as name:
        dataset = write(Path(name), truth, classes, crowds=crowds)
        for task in tasks_that_fit(classes):
            view = there_and_back(train_view(dataset, task, labels="seen"), Path(name))
            assert rows_of(view) == expected(truth, "train", task.seen, task.seen, task.seen, crowds)
            assert_nothing_else_in_the_file(Path(name) / "view.parquet", dataset, task)


@settings(max_examples=15, deadline=None, phases=PHASES)
@given(truths(), st.data())
def test_labels_of_other_tasks_cannot_change_a_training_file(
    drawn: tuple[list[str], list[Truth], bool], data: st.DataObject
):
    """Two data sets that agree on the new classes of a task give the same bytes, whatever else they say."""
    classes, truth, crowds = drawn
    task = data.draw(st.sampled_from(tasks_that_fit(classes)))
    others = frozenset(classes) - set(task.new)
    some = st.frozensets(st.sampled_from(sorted(others)), max_size=5) if others else st.just(frozenset())
    changed = [
        dataclasses.replace(
            image,
            labels=image.labels - others | data.draw(some),
            difficult=image.difficult - others,
        )
        for image in truth
    ]
    cover = Truth("train-9999", "train", others)  # so that each class is in train, whatever was drawn
    content = []
    for version in (truth, changed):
        rows = sorted([*version, cover], key=lambda image: (image.split == "test", image.image_id))
        with tempfile.TemporaryDirectory() as name:
            view = train_view(write(Path(name), rows, classes, crowds=crowds), task)
            dataclasses.replace(view, shards_uri="images", fingerprint="").write(Path(name) / "view.parquet")
            content.append((Path(name) / "view.parquet").read_bytes())
    assert content[0] == content[1]


@functools.cache
def _drawn(count: int) -> tuple[Truth, ...]:
    """A set of the size of a benchmark's class list: one to five labels to an image, each class several times."""
    rng, classes = random.Random(count), named(count)
    splits = []
    for split, size in (("train", 3 * count), ("test", count)):
        labels = [frozenset({*rng.sample(classes, rng.randrange(5)), classes[row % count]}) for row in range(size)]
        labels += [frozenset()] * 3  # images without a label belong to no task
        splits += images(split, labels, [frozenset(rng.sample(classes, 1)) for _ in labels])
    return tuple(splits)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Dataset]:
    """Generated sets with the names and class counts of the real ones; crowds count in COCO only."""
    return {
        name: write(tmp_path_factory.mktemp(name), _drawn(count), named(count), name=name, crowds=name == "coco")
        for name, count in CLASS_COUNTS.items()
    }


@pytest.mark.parametrize("name", ["digits-b0c2", *PAPER_SCENARIOS])
def test_training_never_sees_a_label_of_another_task_in_the_scenarios_of_the_paper(
    name: str, benchmarks: Mapping[str, Dataset], tmp_path: Path
):
    scenario = Scenario.parse(name)
    dataset, truth = benchmarks[scenario.dataset], _drawn(CLASS_COUNTS[scenario.dataset])
    for task in scenario.tasks(dataset.classes):
        assert_only_the_task_shows(dataset, truth, task, tmp_path)
        assert_test_shows_all_seen(dataset, truth, task, tmp_path)


def run_data_steps(dataset: Dataset, name: str, config: str, folder: Path) -> Iterator[tuple[Task, Path, Path]]:
    """Run the steps before training of every task; give the task and the two files that training reads."""
    scenario = Scenario.parse(name)
    origin = ingest(name, str(dataset.path)).to_json()
    for task in scenario.tasks(dataset.classes):
        split, train_out, test_out = (folder / f"{task.index}-{part}" for part in ("split", "train", "test"))
        split_labels(origin, name, task.index, task.total, str(split))
        build_dataset(origin, str(split), config, str(train_out), str(test_out))
        yield task, split, train_out


@pytest.mark.parametrize("name", ["voc-b10c2", "coco-b40c10"])
def test_the_files_that_the_train_step_reads_hold_no_label_of_another_task(
    name: str, benchmarks: Mapping[str, Dataset], tmp_path: Path
):
    dataset = benchmarks[Scenario.parse(name).dataset]
    truth, crowds = _drawn(len(dataset.classes)), dataset.difficult_is_member
    for task, split, view in run_data_steps(dataset, name, "{}", tmp_path):
        content = json.loads(split.read_text())
        assert re.fullmatch("[0-9a-f]{64}", content.pop("sha256"))
        assert content == {
            "scenario": name,
            "task": task.index,
            "tasks": task.total,
            "new": list(task.new),
            "seen": list(task.seen),
        }
        assert rows_of(View.read(view)) == expected(truth, "train", task.new, task.new, task.seen, crowds)
        assert_nothing_else_in_the_file(view, dataset, task)


def test_the_train_step_takes_no_other_file():
    parameters = inspect.signature(train).parameters
    assert set(parameters) == {"config_json", "split", "train_view", "prior", "checkpoints", "features", "pod", "out"}


def test_the_train_component_is_given_neither_the_data_set_nor_its_origin():
    inputs = {"config", "checkpoints", "features", "split", "train_view", "prior"}
    assert set(train_component.component_spec.inputs) == inputs


def test_the_image_shards_that_a_view_points_to_hold_no_label(benchmarks: Mapping[str, Dataset]):
    dataset = benchmarks["voc"]
    view = train_view(dataset, Scenario.parse("voc-b0c4").tasks(dataset.classes)[1])
    assert view.shards_uri == dataset.shards_uri
    assert {path.name for path in Path(view.shards_uri).iterdir()} == {"00000.arrow", "index.json"}
    for path in Path(view.shards_uri).glob("*.arrow"):
        with pa.memory_map(str(path)) as source:
            assert pa.ipc.open_file(source).schema.names == ["image_id", "jpeg", "width", "height"]
        assert b"kind" not in path.read_bytes()


@pytest.mark.parametrize("method", methods())
def test_of_all_methods_only_joint_is_given_more_than_the_labels_of_the_task(
    method: str, benchmarks: Mapping[str, Dataset], tmp_path: Path
):
    dataset, truth = benchmarks["digits"], _drawn(10)
    config = resolve("digits", {"method": method}).to_json()
    for task, _, view in run_data_steps(dataset, "digits-b4c3", config, tmp_path):
        shown = task.seen if method == "joint" else task.new
        assert rows_of(View.read(view)) == expected(truth, "train", shown, shown, task.seen, crowds=False)


def test_a_view_points_to_the_images_it_names(tmp_path: Path):
    classes = named(4)
    truth = [*images("train", [frozenset({classes[row % 4]}) for row in range(10)]), *images("test", [{classes[0]}])]
    dataset = write(tmp_path, truth, classes, shard_rows=3)
    view = train_view(dataset, Task(2, 2, tuple(classes[2:]), tuple(classes)))
    assert view.table["shard"].to_pylist() == [0, 1, 2, 2]
    shards = ImageShards(view.shards_uri)
    for row in view.table.to_pylist():
        assert bytes(shards.jpeg(row["shard"], row["row"])) == JPEG
        with pa.memory_map(f"{view.shards_uri}/{row['shard']:05d}.arrow") as source:
            assert pa.ipc.open_file(source).read_all()["image_id"][row["row"]].as_py() == row["image_id"]


@pytest.mark.parametrize(("crowds", "ids"), [(True, ["train-0000", "train-0001"]), (False, ["train-0000"])])
def test_an_object_that_is_set_apart_makes_a_member_in_coco_and_not_in_voc(
    crowds: bool, ids: list[str], tmp_path: Path
):
    labels = [frozenset({"kind00"}), frozenset({"kind01"}), frozenset({"kind01"})]
    truth = [*images("train", labels, [frozenset(), {"kind00"}]), *images("test", labels, [frozenset(), {"kind00"}])]
    dataset = write(tmp_path, truth, named(2), crowds=crowds)
    task = Scenario("some", 1, 1).tasks(named(2))[0]
    train_rows, test_rows = (
        train_view(dataset, task).table.to_pylist(),
        partial.test_view(dataset, task).table.to_pylist(),
    )
    assert [row["image_id"] for row in train_rows] == ids
    assert [row["image_id"].replace("test", "train") for row in test_rows] == ids
    for rows in (train_rows, test_rows):
        assert [row["labels"] for row in rows] == [[0], []][: len(ids)]
    assert train_view(dataset, task).targets().tolist() == [[True], [False]][: len(ids)]


def test_targets_are_multi_hot_over_the_seen_classes(tmp_path: Path):
    truth = [
        *images("train", [frozenset({"kind00", "kind02", "kind03"}), frozenset({"kind01"}), frozenset({"kind03"})]),
        *images("test", [frozenset({"kind00", "kind03"}), frozenset({"kind02"}), frozenset({"kind01"})]),
    ]
    dataset = write(tmp_path, truth, named(4))
    first, second = Scenario("some", 2, 2).tasks(named(4))
    assert train_view(dataset, first).targets().astype(int).tolist() == [[1, 0], [0, 1]]
    assert train_view(dataset, second).targets().astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert partial.test_view(dataset, first).targets().astype(int).tolist() == [[1, 0], [0, 1]]
    every = [[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]]
    assert partial.test_view(dataset, second).targets().astype(int).tolist() == every


def test_a_task_without_a_training_image_is_named(tmp_path: Path):
    dataset = write(tmp_path, [*images("train", [frozenset(named(4))]), *images("test", [{"kind00"}])], named(4))
    table = dataset.labels()
    labels = pa.array([["kind00"], ["kind00"]], table.schema.field("labels").type)
    pq.write_table(table.set_column(4, table.schema.field("labels"), labels), dataset.path / "labels.parquet")
    dataset = msgspec.structs.replace(dataset, labels_sha256="")
    first, second = Scenario("some", 2, 2).tasks(named(4))
    assert len(train_view(dataset, first)) == 1
    with pytest.raises(BadData, match=r"no training image for task 2; .* kind02, kind03$"):
        train_view(dataset, second)


def test_a_task_without_a_test_image_is_named(tmp_path: Path):
    dataset = write(tmp_path, [*images("train", [frozenset(named(4))]), *images("test", [{"kind03"}])], named(4))
    first, second = Scenario("some", 2, 2).tasks(named(4))
    with pytest.raises(BadData, match=r"no test image for task 1;"):
        partial.test_view(dataset, first)
    assert len(partial.test_view(dataset, second)) == 1


def view_file(folder: Path) -> bytes:
    table = pa.table({"image_id": ["a"], "shard": [0], "row": [0], "labels": [[0]]})
    View(table, ("x",), "images", "f").write(folder / "whole.parquet")
    return (folder / "whole.parquet").read_bytes()


@pytest.mark.parametrize("shards_uri", ["/data/im ages", "s3://bucket/some set/images"])
def test_a_view_survives_being_written_and_read(shards_uri: str, tmp_path: Path):
    table = pa.table({"image_id": ["a"], "shard": [0], "row": [0], "labels": [[0]]}, schema=VIEW)
    view = there_and_back(View(table, ("x", "ü\n"), shards_uri, "f"), tmp_path)
    assert view.table.equals(table)
    assert (view.classes, view.shards_uri, view.fingerprint) == (("x", "ü\n"), shards_uri, "f")
    assert [path.name for path in tmp_path.iterdir()] == ["view.parquet"]


ROWS: dict[str, tuple[dict[str, object], str]] = {
    "null shard": ({"shard": [None]}, "a value is missing"),
    "negative row": ({"row": [-1]}, "a negative row"),
    "unknown label": ({"labels": [[2]]}, "a label is not one of the 2 classes"),
    "null label": ({"labels": [[None]]}, "a value is missing"),
}


@pytest.mark.parametrize(("change", "words"), ROWS.values(), ids=ROWS)
def test_rows_that_no_view_can_have_are_refused(change: dict[str, object], words: str, tmp_path: Path):
    rows = {"image_id": ["a"], "shard": [0], "row": [0], "labels": [[0]]} | change
    with pytest.raises(BadData, match=words):
        there_and_back(View(pa.table(rows, schema=VIEW), ("x", "y"), "/data/images", "f"), tmp_path)


def test_any_flipped_bit_of_a_view_is_noticed_or_makes_no_difference(tmp_path: Path):
    table = pa.table({"image_id": ["a", "b"], "shard": [0, 0], "row": [0, 1], "labels": [[0], [0, 1]]}, schema=VIEW)
    view, path = View(table, ("x", "y"), "/data/images", "f"), tmp_path / "view.parquet"
    view.write(path)
    whole, noticed = path.read_bytes(), 0
    for offset in range(0, len(whole), 7):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        try:
            assert View.read(path).table.equals(table)
        except BadData:
            noticed += 1
    assert noticed > 20


@pytest.mark.parametrize("part", ["nothing", "start", "half", "all but a byte", "text"])
def test_a_broken_view_is_refused_by_its_name(part: str, tmp_path: Path):
    whole = view_file(tmp_path)
    kept = {"nothing": 0, "start": 10, "half": len(whole) // 2, "all but a byte": len(whole) - 1}
    path = tmp_path / "broken.parquet"
    path.write_bytes(whole[: kept[part]] if part in kept else b"image_id,shard,row\n")
    with pytest.raises(BadData) as caught:
        View.read(path)
    assert str(caught.value).startswith(f"{path}: not a task view (")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"pandas": "{}"},
        {"csc": "no JSON"},
        {"csc": "[]"},
        {"csc": "{}"},
        {"csc": '{"classes": 3, "images": 4}'},
        {"csc": '{"classes": [], "images": 4, "fingerprint": ""}'},
    ],
    ids=str,
)
def test_a_parquet_file_of_something_else_is_refused(metadata: dict[str, str] | None, tmp_path: Path):
    table = pa.table({"image_id": ["a"], "shard": [0], "row": [0], "labels": [[0]]}).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "other.parquet")
    with pytest.raises(BadData, match="not a task view"):
        View.read(tmp_path / "other.parquet")


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_view_that_is_not_there_is_refused(kind: str, tmp_path: Path):
    if kind == "folder":
        (tmp_path / "view.parquet").mkdir()
    with pytest.raises(BadData, match=r"view\.parquet: not a task view"):
        View.read(tmp_path / "view.parquet")


def test_the_label_table_of_the_data_set_is_not_a_view(benchmarks: Mapping[str, Dataset]):
    with pytest.raises(BadData, match="not a task view"):
        View.read(benchmarks["voc"].path / "labels.parquet")


@pytest.mark.parametrize("name", ["digits-b0c2", "digits-b4c3"])
def test_held_out_images_are_tested_on_and_never_trained_on(tmp_path: Path, name: str):
    dataset = ingest_digits(tmp_path / "digits", train=120, test=20)
    for task in Scenario.parse(name).tasks(dataset.classes):
        whole = set(train_view(dataset, task).table["image_id"].to_pylist())
        taught = set(train_view(dataset, task, held_out=5).table["image_id"].to_pylist())
        tested = set(partial.test_view(dataset, task, held_out=5).table["image_id"].to_pylist())
        assert taught
        assert tested
        assert not taught & tested
        assert whole - taught == whole & tested
        assert not tested & set(partial.test_view(dataset, task).table["image_id"].to_pylist())
