"""Where a data set grows: nothing but its own folder is needed, and trouble with that folder is one line."""

import errno
import fcntl
import io
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from csc.data.dataset import Dataset
from csc.data.ingest.images import Encoded, ListedImage
from csc.data.ingest.writer import SourceListing, WriteOptions, write_dataset
from csc.errors import BadData, CscError
from tests.builders import contents, picture

LISTING = [ListedImage(f"{row:02d}", "train" if row < 9 else "test", ("cat",), (), "") for row in range(12)]
NOBODY = 65534


def pictures(rows: Sequence[ListedImage]) -> Iterator[Encoded]:
    yield from (Encoded(picture(int(row.image_id), 8, 8), 8, 8) for row in rows)


def write(out: Path, images: Callable[..., Iterator[Encoded]] = pictures, said: io.StringIO | None = None) -> Dataset:
    return write_dataset(out, "cats", SourceListing(["cat"], LISTING, {}), images, options=WriteOptions(1, said, 3))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CscError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def shards_left(out: Path) -> list[str]:
    return sorted(path.stem for path in out.glob("partial/*.json"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the way to is open to everybody, for tests that are run by root as somebody else."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    if os.geteuid() == NOBODY and os.getuid() == 0:
        os.seteuid(0)
    shutil.rmtree(folder)


def become_somebody() -> None:
    if os.geteuid() == 0:
        os.seteuid(NOBODY)


@pytest.mark.parametrize(("call", "works"), [("mkdtemp", 2), ("mkstemp", 3), ("write", 0)])
def test_a_full_disk_costs_no_finished_shard(call: str, works: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    make, calls = getattr(tempfile, call, None), list[str]()

    def failing(*arguments: str, **options: str) -> object:
        calls.append("key, shard or record")
        if len(calls) > works:
            raise full
        assert make
        return make(*arguments, **options)

    def images(rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        if call == "write" and rows[0].image_id == "06":
            raise full
        return pictures(rows)

    with monkeypatch.context() as patch:
        if make:
            patch.setattr(tempfile, call, failing)
        message = refusal(lambda: write(tmp_path / "set", images))
    assert "No space left on device" in message
    assert shards_left(tmp_path / "set") == ["00000", "00001"]
    said = io.StringIO()
    write(tmp_path / "set", said=said)
    assert said.getvalue().startswith("an earlier attempt has finished 2 of 4 shards")


def test_a_disk_without_room_for_the_first_folder_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mkdir = Path.mkdir

    def failing(path: Path, *arguments: int, **options: bool) -> None:
        if path.name == "images":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", failing)
    assert "No space left on device; make room" in refusal(lambda: write(tmp_path / "set"))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_outside_the_target(tmp_path: Path):
    seen = list[list[str]]()

    def images(rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        seen.append([path.name for path in tmp_path.iterdir()])
        return pictures(rows)

    write(tmp_path / "set", images)
    assert seen == [["set"]] * 4


def test_a_mount_point_may_be_the_target(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root may mount")
    try:
        (disk / "lost+found").mkdir()
        assert write(disk) == Dataset.open(disk)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_of_ones_own_in_a_closed_one_may_be_the_target(open_folder: Path):
    become_somebody()
    out = open_folder / "closed" / "own"
    out.mkdir(parents=True)
    out.parent.chmod(0o555)
    assert write(out) == Dataset.open(out)
    out.parent.chmod(0o755)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o333, 0o555])
def test_a_target_one_may_not_use_is_refused_in_one_line(mode: int, open_folder: Path):
    become_somebody()
    (open_folder / "out").mkdir()
    (open_folder / "out").chmod(mode)
    assert str(open_folder / "out") in refusal(lambda: write(open_folder / "out"))
    assert [path.name for path in open_folder.iterdir()] == ["out"]
    (open_folder / "out").chmod(0o755)


def test_a_leftover_one_may_not_read_is_made_again(open_folder: Path):
    become_somebody()
    out = open_folder / "out"

    def images(rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        if rows[0].image_id == "06":
            raise BadData("06: broken image")
        return pictures(rows)

    refusal(lambda: write(out, images))
    (out / "partial" / "00000.json").chmod(0)
    (out / "images" / "00001.arrow").chmod(0)
    assert contents(write(out).path) == contents(write(open_folder / "clean").path)


@pytest.mark.parametrize("name", ["thesis.txt", "partial/thesis.txt", "images/00000.arrow"])
def test_a_folder_that_only_looks_begun_is_never_touched(name: str, tmp_path: Path):
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("the only copy")
    before = contents(tmp_path)
    assert "not a data set" in refusal(lambda: write(tmp_path / "out"))
    assert contents(tmp_path) == before


def test_a_folder_with_a_link_to_nothing_is_never_touched(tmp_path: Path):
    photos = tmp_path / "out" / "images"
    photos.mkdir(parents=True)
    (photos / "holiday.jpg").symlink_to(tmp_path / "gone.jpg")
    (photos / "thesis.jpg").write_text("the only copy")
    assert "not a data set" in refusal(lambda: write(tmp_path / "out"))
    assert sorted(path.name for path in photos.iterdir()) == ["holiday.jpg", "thesis.jpg"]


def test_a_failed_first_shard_takes_no_file_of_the_user_with_it(tmp_path: Path):
    images = tmp_path / "out" / "images"

    def fail(rows: object) -> None:
        images.mkdir()
        (images / "mine.jpg").write_text("the only copy")
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        write(tmp_path / "out", images=fail)
    assert contents(tmp_path / "out") == {"images": None, "images/mine.jpg": b"the only copy"}


def test_who_comes_second_waits_and_says_so(tmp_path: Path):
    class Said(io.StringIO):
        def flush(self) -> None:
            if "waiting" in self.getvalue():
                free.set()

    free, said, lock = threading.Event(), Said(), tmp_path / "set" / "partial" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = threading.Thread(target=write, args=(tmp_path / "set", pictures, said))
        second.start()
        assert free.wait(30)
        assert not list(tmp_path.glob("set/images/*"))
    second.join()
    assert said.getvalue().startswith(f"waiting for another ingest into {tmp_path / 'set'}\n")
    assert Dataset.open(tmp_path / "set").labels().num_rows == 12
