import hashlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import csc.data.shards
from csc.data import cache as module
from csc.data.cache import NodeCache
from csc.data.feature_maps import FeatureShards, write_maps
from csc.data.shards import ImageShards
from csc.errors import BadConfig, BadData, CscError
from csc.storage import locked

FORK = multiprocessing.get_context("fork")


def refusal(action: Callable[[], object], kind: type[CscError] = BadData) -> str:
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


class Shop:
    """Files that can be fetched by name; every download is noted in a file, whichever process made it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        folder.mkdir()

    def put(self, name: str, size: int = 1000) -> tuple[str, str, int]:
        """Make a file; return what a cache is asked for."""
        content = random.Random(name).randbytes(size)
        (self.folder / name).write_bytes(content)
        return f"s3://shop/{name}", hashlib.sha256(content).hexdigest(), size

    def download(self, uri: str, path: Path) -> None:
        """Stand in for the download from an object store."""
        with self.log.open("a") as log:
            log.write(f"{uri.rpartition('/')[2]}\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name("aside")  # as the real one does; a file that is overwritten has no length for a moment
        shutil.copyfile(self.folder / uri.rpartition("/")[2], aside)
        aside.replace(path)

    def downloads(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    made = Shop(tmp_path / "shop")
    monkeypatch.setattr(module, "download", made.download)
    return made


def held(cache: NodeCache) -> set[str]:
    return {path.name for path in cache.root.iterdir() if path.is_file()}


def test_a_file_is_downloaded_once_and_then_found(shop: Shop, tmp_path: Path):
    wanted = shop.put("one")
    for _ in range(3):
        path = NodeCache(tmp_path / "cache", 10_000).fetch(*wanted)
        assert path.read_bytes() == (shop.folder / "one").read_bytes()
    assert shop.downloads() == ["one"]
    assert not list((tmp_path / "cache" / "partial").iterdir())


def test_the_same_content_at_another_address_is_the_same_file(shop: Shop, tmp_path: Path):
    cache, (uri, sha256, size) = NodeCache(tmp_path / "cache", 10_000), shop.put("one")
    assert cache.fetch(uri, sha256, size) == cache.fetch("s3://elsewhere/set", sha256, size)


def test_of_threads_that_ask_at_once_one_downloads(shop: Shop, tmp_path: Path):
    cache, wanted, together = NodeCache(tmp_path / "cache", 10_000), shop.put("one"), threading.Barrier(6)

    def ask(_: int) -> bytes:
        together.wait()
        return cache.fetch(*wanted).read_bytes()

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(6))) == {(shop.folder / "one").read_bytes()}
    assert shop.downloads() == ["one"]


def test_of_processes_that_ask_at_once_one_downloads(shop: Shop, tmp_path: Path):
    wanted, together = [shop.put(name) for name in ("one", "two")], FORK.Barrier(4)

    def ask() -> None:
        cache = NodeCache(tmp_path / "cache", 10_000)
        together.wait()
        for one in wanted:
            assert cache.fetch(*one).read_bytes() == (shop.folder / one[0].rpartition("/")[2]).read_bytes()

    children = [FORK.Process(target=ask) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert sorted(shop.downloads()) == ["one", "two"]


def test_what_was_asked_for_longest_ago_makes_room(shop: Shop, tmp_path: Path):
    cache = NodeCache(tmp_path / "cache", 3500)
    wanted = {name: shop.put(name) for name in "abcd"}
    for age, name in enumerate("abc"):
        os.utime(cache.fetch(*wanted[name]), (age, age))
    cache.fetch(*wanted["a"])  # used again, so no longer the oldest
    cache.fetch(*wanted["d"])
    assert held(cache) == {wanted[name][1] for name in "acd"}
    cache.fetch(*shop.put("large", 9000))
    assert len(held(cache)) == 1  # too large for the limit, and yet needed
    cache.fetch(*wanted["b"])
    assert held(cache) == {wanted["b"][1]}


def test_a_file_that_makes_room_stays_readable_for_whoever_has_it_open(shop: Shop, tmp_path: Path):
    cache, wanted = NodeCache(tmp_path / "cache", 1500), shop.put("one")
    with cache.fetch(*wanted).open("rb") as file:
        cache.fetch(*shop.put("two"))
        assert wanted[1] not in held(cache)
        assert file.read() == (shop.folder / "one").read_bytes()


def test_a_full_disk_makes_room_too_and_is_reported_if_that_is_not_enough(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = NodeCache(tmp_path / "cache", 1_000_000)
    for name in "abc":
        cache.fetch(*shop.put(name))

    def usage(_: Path) -> Any:
        return shutil._ntuple_diskusage(4000, 0, 3500 - 1000 * len(held(cache)))

    monkeypatch.setattr(module.shutil, "disk_usage", usage)
    cache.fetch(*shop.put("d", 1400))
    assert len(held(cache)) == 3
    message = refusal(lambda: cache.fetch(*shop.put("e", 4000)))
    assert message.startswith(f"{cache.root}: no room for another 4,000 bytes")
    assert "CSC_CACHE" in message
    assert not list((cache.root / "partial").iterdir())


@pytest.mark.parametrize("change", ["other bytes", "cut", "longer"])
def test_wrong_content_is_fetched_a_second_time_then_refused_and_never_kept(change: str, shop: Shop, tmp_path: Path):
    cache, wanted = NodeCache(tmp_path / "cache", 10_000), shop.put("one")
    good = (shop.folder / "one").read_bytes()
    (shop.folder / "one").write_bytes({"other bytes": bytes(1000), "cut": good[:-1], "longer": good + b"x"}[change])
    message = refusal(lambda: cache.fetch(*wanted))
    assert message.startswith("s3://shop/one: has ")
    assert wanted[1][:12] in message
    assert shop.downloads() == ["one", "one"]
    assert held(cache) == set()
    assert not list((cache.root / "partial").iterdir())


def test_a_copy_that_was_damaged_on_the_way_is_fetched_again(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def damaged_once(uri: str, path: Path) -> None:
        shop.download(uri, path)
        if len(shop.downloads()) == 1:
            path.write_bytes(b"damaged")

    monkeypatch.setattr(module, "download", damaged_once)
    wanted = shop.put("one")
    assert NodeCache(tmp_path / "cache", 10_000).fetch(*wanted).stat().st_size == 1000
    assert shop.downloads() == ["one", "one"]


def test_a_file_that_was_cut_on_the_disk_is_fetched_again(shop: Shop, tmp_path: Path):
    cache, wanted = NodeCache(tmp_path / "cache", 10_000), shop.put("one")
    cache.fetch(*wanted).write_bytes(b"")
    assert cache.fetch(*wanted).read_bytes() == (shop.folder / "one").read_bytes()


@pytest.mark.parametrize("asked", ["one", "two"])
def test_a_process_killed_in_a_download_leaves_no_lock_and_nothing_that_counts(
    asked: str, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache, reached = NodeCache(tmp_path / "cache", 1500), FORK.Event()  # room for one
    first = shop.put("one")

    def stuck(_: str, path: Path) -> None:
        path.with_name(".half").write_bytes(bytes(500))
        reached.set()
        signal.pause()

    with monkeypatch.context() as patch:
        patch.setattr(module, "download", stuck)
        child = FORK.Process(target=cache.fetch, args=first)
        child.start()
    assert reached.wait(30)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert list((cache.root / "partial").iterdir())
    wanted = shop.put(asked)
    assert cache.fetch(*wanted).read_bytes() == (shop.folder / asked).read_bytes()
    assert not list((cache.root / "partial").iterdir())


def test_a_download_under_way_is_left_alone_by_one_that_needs_room(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache, one, two = NodeCache(tmp_path / "cache", 2500), shop.put("one"), shop.put("two")
    cache.fetch(*shop.put("old"))

    def nested(uri: str, path: Path) -> None:
        shop.download(uri, path)
        if uri == one[0]:
            cache.fetch(*two)  # as another process would, in the middle of this download

    monkeypatch.setattr(module, "download", nested)
    assert cache.fetch(*one).read_bytes() == (shop.folder / "one").read_bytes()
    assert held(cache) == {one[1], two[1]}


def test_however_many_ask_at_once_the_limit_holds(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache, together, most = NodeCache(tmp_path / "cache", 2500), threading.Barrier(8), list[int]()
    wanted = [shop.put(name) for name in "abcdefgh"]

    def slow(uri: str, path: Path) -> None:
        time.sleep(0.05)
        shop.download(uri, path)
        with locked(cache.root / "locks" / "room"):  # nothing comes or goes meanwhile, a copy may become a whole file
            under_way = {folder.name for folder in (cache.root / "partial").iterdir()}
            most.append(len(under_way | held(cache)))

    def ask(one: tuple[str, str, int]) -> bytes:
        together.wait()
        with cache.fetched(*one, "") as path:
            time.sleep(0.01)  # what is not open yet makes no room
            return path.read_bytes()

    monkeypatch.setattr(module, "download", slow)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, wanted))
    assert found == [(shop.folder / name).read_bytes() for name in "abcdefgh"]
    assert len(shop.downloads()) == 8
    assert max(most) == 2
    assert len(held(cache)) <= 2


def test_a_file_larger_than_the_limit_waits_until_it_is_alone(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache, begun = NodeCache(tmp_path / "cache", 1500), threading.Event()

    def slow(uri: str, path: Path) -> None:
        begun.set()
        time.sleep(0.1)
        shop.download(uri, path)

    monkeypatch.setattr(module, "download", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.fetch, *shop.put("one"))
        assert begun.wait(30)
        large = cache.fetch(*shop.put("large", 9000))
        assert first.done()
    assert held(cache) == {large.name}


@pytest.mark.parametrize("sha256", ["", "../../etc/passwd", "A" * 64, "0" * 63])
def test_a_name_that_is_no_digest_never_becomes_a_path(sha256: str, tmp_path: Path):
    assert "is not a SHA-256" in refusal(lambda: NodeCache(tmp_path / "cache", 1).fetch("s3://shop/x", sha256, 1))


def hide_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("CSC_CACHE", "CSC_CACHE_LIMIT_GB", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


def test_the_folder_is_the_named_one_or_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hide_home(monkeypatch, tmp_path / "home")
    assert NodeCache.of_this_node().root == tmp_path / "home" / ".cache" / "csc"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert NodeCache.of_this_node().root == tmp_path / "xdg" / "csc"
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "named" / "deep"))
    assert NodeCache.of_this_node().root == tmp_path / "named" / "deep"


def test_without_a_home_to_write_to_the_temporary_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    (tmp_path / "temp").mkdir()
    hide_home(monkeypatch, tmp_path / "file")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "temp"))
    cache = NodeCache.of_this_node()
    assert cache.root == tmp_path / "temp" / f"csc-{os.getuid()}"
    assert cache.root.stat().st_mode & 0o777 == 0o700
    owner = os.getuid()
    cache.root.rename(cache.root.with_name(f"csc-{owner + 1}"))
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    message = refusal(NodeCache.of_this_node)
    assert "belongs to another user" in message
    assert "CSC_CACHE" in message


def test_a_named_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "file" / "cache"))
    assert refusal(NodeCache.of_this_node).startswith(f"cannot write {tmp_path / 'file' / 'cache'}: ")


def test_the_limit_is_the_named_one_or_a_share_of_the_disk(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hide_home(monkeypatch, tmp_path / "home")
    NodeCache(tmp_path / "home" / ".cache" / "csc", 10_000).fetch(*shop.put("one", 1000))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9000, 5000, 4000))
    assert NodeCache.of_this_node().limit_bytes == 4000  # 80 % of what is free and what is held
    monkeypatch.setenv("CSC_CACHE_LIMIT_GB", "1.5")
    assert NodeCache.of_this_node().limit_bytes == 1_500_000_000


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "10 GB", "1e-12"])
def test_a_limit_that_is_none_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CSC_CACHE", str(tmp_path))
    monkeypatch.setenv("CSC_CACHE_LIMIT_GB", text)
    assert refusal(NodeCache.of_this_node, BadConfig).startswith("CSC_CACHE_LIMIT_GB: expected a number of gigabytes")


@pytest.fixture
def shards(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageShards:
    """Three shards with two images each, in a bucket."""
    index = []
    for shard in range(3):
        path = shop.folder / f"{shard:05d}.arrow"
        with pa.ipc.new_file(str(path), pa.schema([("jpeg", pa.binary())])) as writer:
            for row in range(2):
                writer.write_batch(pa.record_batch({"jpeg": [f"{shard} {row}".encode()]}))
        content = path.read_bytes()
        index.append({"rows": 2, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    monkeypatch.setattr("csc.data.shards.read_json", lambda _: index)
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CSC_CACHE_LIMIT_GB", str(1.5 * len(content) / 1e9))  # room for one
    return ImageShards("s3://shop/images")


def test_images_of_a_bucket_are_mapped_from_the_cache(shards: ImageShards, shop: Shop):
    assert [bytes(shards.jpeg(0, row)) for row in (0, 1, 0)] == [b"0 0", b"0 1", b"0 0"]
    assert shop.downloads() == ["00000.arrow"]
    assert shards.where(2, 7) == "s3://shop/images/00002.arrow row 7"


def test_maps_of_files_that_made_room_are_let_go_at_the_next_miss(shards: ImageShards, shop: Shop):
    kept = shards.jpeg(0, 0)
    for shard in (1, 2, 0):
        assert bytes(shards.jpeg(shard, 1)) == f"{shard} 1".encode()
    assert bytes(kept) == b"0 0"
    assert shop.downloads() == ["00000.arrow", "00001.arrow", "00002.arrow", "00000.arrow"]
    assert len(shards._files._maps) <= 2


def test_a_file_that_makes_room_before_it_is_mapped_is_fetched_again(
    shards: ImageShards, shop: Shop, monkeypatch: pytest.MonkeyPatch
):
    fetched = NodeCache.fetched

    @contextmanager
    def dropped_once(self: NodeCache, *wanted: Any) -> Iterator[Path]:
        with fetched(self, *wanted) as path:
            if len(shop.downloads()) == 1:
                path.unlink()
            yield path

    monkeypatch.setattr(NodeCache, "fetched", dropped_once)
    assert bytes(shards.jpeg(1, 0)) == b"1 0"
    assert shop.downloads() == ["00001.arrow"] * 2


def test_a_copy_that_was_damaged_on_this_node_is_fetched_again(shards: ImageShards, shop: Shop, tmp_path: Path):
    shards.jpeg(0, 0)
    (copy,) = (path for path in (tmp_path / "cache").iterdir() if path.is_file())
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    csc.data.shards._sha256.cache_clear()  # as in another process
    assert bytes(pickle.loads(pickle.dumps(shards)).jpeg(0, 1)) == b"0 1"
    assert shop.downloads() == ["00000.arrow"] * 2


def test_a_worker_maps_the_files_itself(shards: ImageShards, shop: Shop):
    shards.jpeg(0, 0)
    packed = pickle.dumps(shards)
    assert len(packed) < 500
    assert bytes(pickle.loads(packed).jpeg(0, 1)) == b"0 1"
    assert shop.downloads() == ["00000.arrow"]


def test_feature_maps_whose_files_made_room_leave_the_disk(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index = []
    for shard in range(4):
        path = shop.folder / f"{shard:05d}.arrow"
        rows = write_maps([np.full((2, 8, 8, 16), shard, np.float16)], (16, 8, 8), path)
        content = path.read_bytes()
        index.append({"rows": rows, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    monkeypatch.setattr("csc.data.shards.read_json", lambda _: index)
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CSC_CACHE_LIMIT_GB", str(1.5 * len(content) / 1e9))  # room for one
    maps = FeatureShards("s3://shop/features", 0, (16, 8, 8))
    for shard in (0, 1, 2, 3, 0):
        assert (maps.map(shard, 1) == shard).all()
    held_by_us = {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line}
    assert len([path for path in held_by_us if path.startswith(str(tmp_path))]) <= 1  # until the next miss
    assert refusal(lambda: maps.map(4, 0)).endswith("index.json: has no shard 4; remove the folder and embed again")
    (shop.folder / "00002.arrow").write_bytes(b"damaged")
    assert refusal(lambda: maps.map(2, 0)).endswith("remove the folder and embed again")


@pytest.mark.parametrize("index", [{}, [1], [{}], 5, [{"sha256": "0" * 64, "bytes": 1, "rows": 1}, {"bytes": "x"}]])
def test_an_index_of_another_form_is_refused(index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("csc.data.shards.read_json", lambda _: index)
    monkeypatch.setenv("CSC_CACHE", str(tmp_path / "cache"))
    message = refusal(lambda: FeatureShards("s3://shop/features", 0, (16, 8, 8)).map(0, 0))
    assert message.startswith("s3://shop/features/view-00/index.json: no rows, bytes and sha256 of each shard (")
