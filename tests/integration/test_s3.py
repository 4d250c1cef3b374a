"""Reading and writing in a real object store: what works, and what a person is told when it does not."""

import io
import multiprocessing
import pickle
import random
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from csc.data.dataset import Dataset
from csc.data.ingest.images import Encoded, ListedImage, SourceImages
from csc.data.ingest.source import Source
from csc.data.ingest.writer import SourceListing, WriteOptions, write_dataset
from csc.data.shards import ImageShards
from csc.errors import BadData, CscError
from csc.storage import delete, download, exists, list_below, read_bytes, read_json, upload, write_bytes
from tests.builders import contents, ingest_voc2007, make_voc, picture, zipped

pytestmark = pytest.mark.slow  # a real object store

if TYPE_CHECKING:
    from tests.s3 import Store

pytest_plugins = ["tests.s3"]

CLASSES = ("bird", "cat", "dog")


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(BadData) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def upload_folder(folder: Path, uri: str) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: upload(path, f"{uri}/{path.relative_to(folder).as_posix()}"), files))
    return uri


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def test_a_small_file_is_written_found_read_and_removed(bucket: str):
    file = f"{bucket}/some folder/ü.json"
    assert not exists(file)
    write_bytes(file, b'{"a": [1, 2]}')
    assert exists(file)
    assert not exists(f"{bucket}/some folder")
    assert read_bytes(file) == b'{"a": [1, 2]}'
    assert read_json(file) == {"a": [1, 2]}
    write_bytes(file, b"{")
    assert refusal(lambda: read_json(file)).startswith(f"{file}: not readable as JSON (")
    delete(file)
    delete(file)
    assert not exists(file)
    assert refusal(lambda: read_json(file)) == f"{file}: no such object; check the name"


@pytest.mark.parametrize("size", [0, 1, 8 << 20, (20 << 20) + 1], ids=["empty", "byte", "one part", "parts"])
def test_a_file_comes_back_as_it_went(size: int, bucket: str, tmp_path: Path):
    (tmp_path / "file").write_bytes(noise(size))
    upload(tmp_path / "file", f"{bucket}/file")
    assert list(list_below(bucket)) == [("file", size)]
    download(f"{bucket}/file", tmp_path / "deep" / "copy")
    assert (tmp_path / "deep" / "copy").read_bytes() == noise(size)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


def test_a_listing_has_every_page_and_nothing_of_its_neighbours(bucket: str):
    names = sorted(f"{number % 7}/{number:04d}.jpg" for number in range(1100))
    strangers = ("2/file", "-1/file")
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: write_bytes(f"{bucket}/set/{name}", name.encode()), names))
        list(pool.map(lambda name: write_bytes(f"{bucket}/set{name}", b""), strangers))
    assert list(list_below(f"{bucket}/set")) == [(name, len(name)) for name in names]
    assert list(list_below(f"{bucket}/set/")) == list(list_below(f"{bucket}/set"))
    assert list(list_below(f"{bucket}/nothing")) == []
    with Source(f"{bucket}/set") as files:
        assert files.folders() == set("0123456")
        assert files.names("3") == {f"{number:04d}.jpg" for number in range(3, 1100, 7)}
        assert files.read("3/1095.jpg") == b"3/1095.jpg"


OPERATIONS: dict[str, Callable[[str, Path], object]] = {
    "exists": lambda uri, _: exists(uri),
    "read_bytes": lambda uri, _: read_bytes(uri),
    "write_bytes": lambda uri, _: write_bytes(uri, b"x"),
    "list_below": lambda uri, _: list(list_below(uri)),
    "delete": lambda uri, _: delete(uri),
    "upload": lambda uri, folder: upload(folder / "file", uri),
    "download": lambda uri, folder: download(uri, folder / "copy"),
    "zip": lambda uri, _: Source(f"{uri}.zip"),
    "dataset": lambda uri, _: Dataset.open(uri),
    "source": lambda uri, _: Source(uri),
}
BROKEN: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "not-the-secret"}, ("access denied", "AWS_SECRET_ACCESS_KEY")),
    "key": ({"AWS_ACCESS_KEY_ID": "not-the-key"}, ("access denied", "AWS_ACCESS_KEY_ID")),
    "line end in key": ({"AWS_ACCESS_KEY_ID": "key-of-the-tests\n"}, ("check the keys",)),
    "no key": ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, ("no credentials", "AWS_PROFILE")),
    "endpoint": ({"AWS_ENDPOINT_URL_S3": "NOBODY"}, ("does not answer", "NOBODY")),
    "bucket": ({}, ("no such bucket", "AWS_ENDPOINT_URL_S3")),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_store_that_cannot_be_used_is_reported_in_one_line(
    broken: str, bucket: str, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_bytes(b"x")
    settings, words = BROKEN[broken]
    for name, value in settings.items():
        monkeypatch.setenv(name, value.replace("NOBODY", nobody))
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries to connect
    prefix = bucket.replace("s3://csc/", "s3://no-such-bucket/") if broken == "bucket" else bucket
    for operation in OPERATIONS.values():
        message = refusal(lambda: operation(f"{prefix}/file", tmp_path))  # noqa: B023
        assert message.startswith(f"{prefix}/file")
        for word in words:
            assert word.replace("NOBODY", nobody) in message
        assert "of-the-tests" not in message
        assert "not-the" not in message
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("operation", ["read_bytes", "download", "zip", "dataset", "source"])
def test_a_name_that_nothing_has_is_reported_in_one_line(operation: str, bucket: str, tmp_path: Path):
    message = refusal(lambda: OPERATIONS[operation](f"{bucket}/file", tmp_path))
    assert message.startswith(f"{bucket}/file")
    assert "no such" in message or "not a data set" in message
    assert not (tmp_path / "copy").exists()


def test_the_endpoint_of_mlflow_counts_if_there_is_no_other(
    bucket: str, store: "Store", monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", store.endpoint)
    write_bytes(f"{bucket}/file", b"x")
    assert read_bytes(f"{bucket}/file") == b"x"


def test_threads_and_forked_processes_share_the_settings_but_no_connection(bucket: str):
    write_bytes(f"{bucket}/file", noise(1000))
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(read_bytes, [f"{bucket}/file"] * 50)) == {noise(1000)}
    with multiprocessing.get_context("fork").Pool(2) as processes:
        assert set(processes.map(read_bytes, [f"{bucket}/file"] * 20)) == {noise(1000)}


def test_a_zip_is_copied_once_for_all_processes_and_again_when_it_was_replaced(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kinds = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
    members = {f"{number:02d}.bin": noise(50_000 + number) + bytes(number) for number in range(9)}

    def put() -> None:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as made:
            for number, (name, content) in enumerate(members.items()):
                made.writestr(name, content, kinds[number % 3])
        write_bytes(f"{bucket}/some.ZIP", archive.getvalue())

    put()
    with Source(f"{bucket}/some.ZIP") as files:
        assert files.names() == set(members)
        with multiprocessing.get_context("spawn").Pool(2) as processes:
            assert processes.map(files.read, members) == list(members.values())
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(files.read, members)) == list(members.values())
    assert len(cached(tmp_path)) == 1
    assert capsys.readouterr().out == f"copying {bucket}/some.ZIP (0.0 GB) to {tmp_path / 'cache of the node'}\n"
    members["00.bin"] = noise(1)
    put()
    assert Source(f"{bucket}/some.ZIP").read("00.bin") == noise(1)
    assert len(cached(tmp_path)) == 2


def test_a_damaged_zip_is_reported_by_its_name_or_its_member(bucket: str, tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / "raw" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "raw" / name).write_bytes(noise(1000))
    whole = zipped(tmp_path / "raw", tmp_path / "raw.zip").read_bytes()
    offset = whole.index(noise(1000))
    for name, content, words in (
        ("cut", whole[:-100], "cut.zip: not readable as a zip file ("),
        ("data", whole[:offset] + b"123" + whole[offset + 3 :], "data.zip/second: not readable (Bad CRC-32"),
        ("header", b"123" + whole[3:], "header.zip/second: not readable (Bad magic number"),
    ):
        write_bytes(f"{bucket}/{name}.zip", content)
        assert f"{bucket}/{words}" in refusal(lambda: Source(f"{bucket}/{name}.zip").read("second"))  # noqa: B023


def test_a_source_in_a_bucket_lists_and_reads_as_the_folder(bucket: str, tmp_path: Path):
    make_voc(tmp_path / "raw")
    uploaded = upload_folder(tmp_path / "raw", f"{bucket}/raw")
    write_bytes(f"{bucket}/voc.zip", zipped(tmp_path / "raw", tmp_path / "voc.zip").read_bytes())
    write_bytes(f"{bucket}/secret", b"outside")
    for uri in (uploaded, f"{uploaded}/", f"{bucket}/voc.zip"):
        with Source(tmp_path / "raw") as folder, Source(uri) as files:
            for name in ("", "VOCdevkit/VOC2007", "VOCdevkit/VOC2007/Annotations", "nowhere", "..", "/"):
                assert files.names(name) == folder.names(name)
                assert files.folders(name) == folder.folders(name)
            annotation = "VOCdevkit/VOC2007/Annotations/000003.xml"
            assert files.has(annotation)
            assert files.read(annotation) == folder.read(annotation)
            for name in ("../secret", "/secret", "VOCdevkit/none.txt"):
                assert not files.has(name)
                assert "no such" in refusal(lambda: files.read(name))  # noqa: B023
            assert pickle.loads(pickle.dumps(files)).read(annotation) == folder.read(annotation)


def test_a_source_that_only_reads_never_lists_the_whole_prefix(bucket: str, monkeypatch: pytest.MonkeyPatch):
    for number in range(3):
        write_bytes(f"{bucket}/raw/{number}", b"x")
    files = pickle.loads(pickle.dumps(Source(f"{bucket}/raw")))
    monkeypatch.setattr("csc.data.ingest.source.versions_below", lambda _: pytest.fail("listed"))
    assert files.read("2") == b"x"


def test_what_grows_below_a_source_is_no_part_of_its_state(bucket: str, tmp_path: Path):
    rows = [ListedImage("a", "train", (), (), "a.jpeg")]

    def state() -> str:
        with Source(f"{bucket}/raw") as files:
            return SourceImages(files).state(rows)

    write_bytes(f"{bucket}/raw/a.jpeg", picture(1))
    before = state()
    write_bytes(f"{bucket}/raw/set/images/00000.arrow", b"a shard of ours")
    assert state() == before
    write_bytes(f"{bucket}/raw/a.jpeg", picture(2))
    assert state() != before


def test_a_broken_image_in_a_bucket_can_be_left_out_and_a_store_that_fails_cannot(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    voc = make_voc(tmp_path / "raw")
    (voc / "JPEGImages/000009.jpg").write_text("no image")
    uploaded = upload_folder(tmp_path / "raw", f"{bucket}/raw")
    here = ingest_voc2007(tmp_path / "raw", tmp_path / "here", options=WriteOptions(skip_bad=True))
    there = ingest_voc2007(uploaded, tmp_path / "there", options=WriteOptions(skip_bad=True))
    assert there.source["skipped"] == ["000009"]
    assert contents(there.path) == contents(here.path)

    def failing(uri: str, limit: int) -> bytes:
        if uri.endswith("000008.jpg"):
            raise BadData(f"{uri}: the object store does not answer")
        return read_bytes(uri, limit)

    monkeypatch.setattr("csc.data.ingest.source.read_bytes", failing)
    with pytest.raises(CscError, match="does not answer; what is finished is kept"):
        ingest_voc2007(uploaded, tmp_path / "again", options=WriteOptions(skip_bad=True))


@pytest.mark.parametrize("change", ["cut", "not there"])
def test_a_damaged_shard_in_a_bucket_is_written_again_by_the_same_ingest(change: str, bucket: str, tmp_path: Path):
    make_voc(tmp_path / "raw")
    dataset = ingest_voc2007(tmp_path / "raw", f"{bucket}/voc", options=WriteOptions(shard_rows=4))
    shard = f"{bucket}/voc/images/00001.arrow"
    whole = read_bytes(shard)
    delete(shard)
    if change == "cut":
        write_bytes(shard, whole[:-9])
    assert ingest_voc2007(tmp_path / "raw", f"{bucket}/voc", options=WriteOptions(shard_rows=4)) == dataset
    assert read_bytes(shard) == whole


def test_raw_data_in_a_bucket_makes_the_same_data_set(bucket: str, tmp_path: Path):
    make_voc(tmp_path / "raw")
    uploaded = upload_folder(tmp_path / "raw", f"{bucket}/raw")
    here = ingest_voc2007(tmp_path / "raw", tmp_path / "here")
    there = ingest_voc2007(uploaded, tmp_path / "there")
    assert contents(there.path) == contents(here.path)


@pytest.fixture
def animals(bucket: str, tmp_path: Path) -> tuple[Dataset, Dataset]:
    """A data set of four shards: the folder and its copy in a bucket."""
    listing = [
        ListedImage(f"{number}", "train" if number < 6 else "test", (CLASSES[number % 3],), (), f"{number}")
        for number in range(8)
    ]
    here = write_dataset(
        tmp_path / "animals",
        "animals",
        SourceListing(CLASSES, listing, {"kind": "test"}),
        lambda rows: [Encoded(picture(int(row.file)), 48, 36) for row in rows],
        options=WriteOptions(shard_rows=2),
    )
    return here, Dataset.open(upload_folder(here.path, f"{bucket}/animals"))


def images(dataset: Dataset) -> list[bytes]:
    shards = ImageShards(dataset.shards_uri)
    return [bytes(shards.jpeg(row["shard"], row["row"])) for row in dataset.labels().to_pylist()]


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache of the node").glob("*") if path.is_file()]


def test_a_data_set_in_a_bucket_reads_as_its_folder(animals: tuple[Dataset, Dataset], bucket: str, tmp_path: Path):
    here, there = animals
    assert (there.uri, there.shards_uri) == (f"{bucket}/animals", f"{bucket}/animals/images")
    assert there == Dataset.open(f"{bucket}/animals/")
    assert msgspec.structs.replace(there, uri=here.uri) == here
    assert there.labels().equals(here.labels())
    assert not cached(tmp_path)
    assert images(there) == images(here)
    assert len(cached(tmp_path)) == len(list(here.path.glob("images/*.arrow"))) == 4
    assert refusal(lambda: there.path).startswith(f"{bucket}/animals: 's3://' is not possible here")


def read_in_a_child(shards_uri: str, log: Path, barrier: Any) -> bytes:
    """Read one image after all children have come here; note each download."""
    import csc.data.cache

    fetch = csc.data.cache.download

    def noted(uri: str, path: Path) -> None:
        with log.open("a") as file:
            file.write(f"{uri}\n")
        fetch(uri, path)

    csc.data.cache.download = noted
    barrier.wait()
    return bytes(ImageShards(shards_uri).jpeg(0, 1))


def test_of_several_processes_that_ask_at_once_one_downloads(animals: tuple[Dataset, Dataset], tmp_path: Path):
    here, there = animals
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(3) as pool:
        barrier = manager.Barrier(3)
        asked = [(there.shards_uri, tmp_path / "log", barrier)] * 3
        answers = pool.starmap(read_in_a_child, asked, chunksize=1)
    assert set(answers) == {bytes(ImageShards(here.shards_uri).jpeg(0, 1))}
    assert (tmp_path / "log").read_text().splitlines() == [f"{there.shards_uri}/00000.arrow"]


@pytest.mark.parametrize("change", ["other bytes", "cut", "not there"])
def test_a_shard_that_is_not_what_the_data_set_says_is_refused_and_not_kept(
    change: str, animals: tuple[Dataset, Dataset], tmp_path: Path
):
    here, there = animals
    whole, shard = (here.path / "images/00001.arrow").read_bytes(), f"{there.shards_uri}/00001.arrow"
    if change == "not there":
        delete(shard)
    else:
        write_bytes(shard, whole[:-9] if change == "cut" else whole[:-9] + b"123456789")
    shards = ImageShards(there.shards_uri)
    message = refusal(lambda: shards.jpeg(1, 0))
    assert message.startswith(f"{shard}: ")
    assert not cached(tmp_path)
    write_bytes(shard, whole)
    assert bytes(shards.jpeg(1, 0)) == bytes(ImageShards(here.shards_uri).jpeg(1, 0))


def test_a_small_cache_holds_what_was_asked_for_last(
    animals: tuple[Dataset, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, there = animals
    sizes = [path.stat().st_size for path in here.path.glob("images/*.arrow")]
    monkeypatch.setenv("CSC_CACHE_LIMIT_GB", str(2.5 * max(sizes) / 1e9))
    shards, same = ImageShards(there.shards_uri), ImageShards(here.shards_uri)
    first = shards.jpeg(0, 0)
    for _ in range(2):
        for shard in range(4):
            assert bytes(shards.jpeg(shard, 0)) == bytes(same.jpeg(shard, 0))
            assert len(cached(tmp_path)) <= 2
    assert bytes(first) == bytes(same.jpeg(0, 0))  # still mapped, though its file is gone


def test_a_data_set_without_an_index_of_its_shards_is_refused(animals: tuple[Dataset, Dataset]):
    _, there = animals
    index = f"{there.shards_uri}/index.json"
    write_bytes(index, b"[{}]")
    for shard in (0, 7):
        assert refusal(lambda: ImageShards(there.shards_uri).jpeg(shard, 0)).startswith(f"{index}: ")  # noqa: B023
    delete(index)
    assert refusal(lambda: ImageShards(there.shards_uri).jpeg(0, 0)).startswith(f"{index}: ")
