"""Where a data set grows until it is whole: finished shards and a record of each, so that a second try goes on.

The shards go to their place in the target at once, the records to `partial/` beside them, and `dataset.json`, which
makes all this a data set, comes last. Nothing is renamed: an object store cannot, and a folder may be a mount point.

A record names the key of its shard. Shards that were made from the same images in the same way are taken up, whatever
ended the earlier try; all others are dropped. A try that ends before its first shard is finished leaves nothing.

In a folder, who comes second waits. In an object store nobody can be kept waiting: who comes last with other work takes
the place, and whoever had it stops.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from csc.data.ingest.shards import Images, Part, Shard, cut_short, is_whole, write_shard
from csc.errors import BadData, CscError
from csc.storage import (
    atomic_file,
    delete,
    exists,
    is_remote,
    join,
    list_below,
    local_path,
    parent_of,
    read_bytes,
    read_json,
    upload,
    writable,
    write_bytes,
    write_json,
)

__all__ = ["Bucket", "Folder", "refuse_foreign", "unfinished"]

_CARD, _MARK, _LOCK = "dataset.json", "partial/key", "partial/lock"
_IN_PARTIAL = re.compile(r"lock|\.?\d{5,}\.json.*")
_OF_THE_DISK = "lost+found"  # every new ext4 volume has it


def refuse_foreign(target: str | os.PathLike[str]) -> None:
    """Refuse a target that holds something else than a data set, whole or begun."""
    if is_remote(target):
        names = {name for name, _ in list_below(os.fspath(target))}
        strange = bool(names) and names.isdisjoint((_CARD, _MARK))
    else:
        strange = _is_foreign(local_path(target))
    if strange:
        raise BadData(f"{target}: exists and is not a data set; choose an empty or new folder for --out")


def _is_foreign(path: Path) -> bool:
    try:
        if not path.is_dir():
            return path.exists()
        names = {entry.name for entry in path.iterdir()} - {_OF_THE_DISK}
        begun = "partial" in names and all(_IN_PARTIAL.fullmatch(file.name) for file in path.glob("partial/*"))
        return bool(names) and not begun and not (path / _CARD).is_file()
    except OSError as error:
        raise BadData(f"{path}: not readable ({error.strerror or error}); choose a folder you may use") from None


@contextlib.contextmanager
def unfinished(
    target: str | os.PathLike[str], parts: Sequence[Part], key: str, stream: TextIO
) -> Iterator[tuple["Folder | Bucket", dict[int, Shard]]]:
    """Give the place where a data set grows, and the shards that an earlier try has finished there.

    Args:
        target: of the data set.
        parts: what its shards are made from.
        key: stands for the whole data set.
        stream: where to say that somebody else is at work.
    """
    if is_remote(target):
        bucket = Bucket(os.fspath(target).rstrip("/"), key)
        with _nothing_left_of_nothing(bucket):
            yield bucket, bucket.take_up(parts)
        return
    folder = Folder(local_path(target).absolute())
    lock = folder.target / _LOCK
    with parent_of(lock), _locked(lock, stream), _nothing_left_of_nothing(folder):
        yield folder, folder.take_up(parts)


@contextlib.contextmanager
def _nothing_left_of_nothing(place: "Folder | Bucket") -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(CscError):  # what went wrong first is what counts
            if not place.has_finished():
                place.drop()
        raise


def _locked(lock: Path, stream: TextIO) -> TextIO:
    """Hold a lock until the returned file is closed."""
    while True:
        with writable(lock), contextlib.suppress(FileNotFoundError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.write(f"waiting for another ingest into {lock.parent.parent}\n")
                stream.flush()
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # whoever held it has finished and removed it


@dataclass(frozen=True)
class Folder:
    """Unfinished work on a local disk."""

    target: Path

    def _files(self, number: int) -> tuple[Path, Path]:
        return self.target / f"images/{number:05d}.arrow", self.target / f"partial/{number:05d}.json"

    def take_up(self, parts: Sequence[Part]) -> dict[int, Shard]:
        """Return what is finished; drop all else."""
        finished = {}
        with writable(self.target):
            for part in parts:
                path, record = self._files(part.number)
                shard = _read(str(record), part.key) if record.exists() else None
                if shard and is_whole(path, shard.sha256):
                    finished[part.number] = shard
            if not exists(self.target / _CARD):  # nobody has finished it while we waited
                self._clear(keep={self.target / _LOCK, *(file for number in finished for file in self._files(number))})
                (self.target / "images").mkdir(exist_ok=True)
        return finished

    def _clear(self, keep: set[Path]) -> None:
        for path in (*self.target.glob("images/*"), *self.target.glob("partial/*")):
            if path.is_file() and path not in keep:
                path.unlink()

    def make(self, images: Images, part: Part) -> Shard:
        """Make one shard and record it."""
        path, record = self._files(part.number)
        try:
            with atomic_file(path) as aside:
                shard = write_shard(aside, part.rows, images)
            write_json(record, _recorded(shard, part))
        except OSError as error:
            raise cut_short(f"cannot write {path}: {error.strerror or error}") from None
        return shard

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Let `complete` add what lies beside the shards; then all of it is a data set."""
        try:
            complete(self.target)
        except OSError as error:
            raise cut_short(f"cannot write {self.target}: {error.strerror or error}") from None
        self.drop()

    def has_finished(self) -> bool:
        """Whether there is a shard that another try can take up."""
        return any(self.target.glob("partial/*.json"))

    def drop(self) -> None:
        """Leave nothing but a data set that is whole."""
        if not exists(self.target / _CARD):
            shutil.rmtree(self.target / "images", ignore_errors=True)
        shutil.rmtree(self.target / "partial", ignore_errors=True)


@dataclass(frozen=True)
class Bucket:
    """Unfinished work in an object store; the file `partial/key` tells whose it is."""

    target: str
    key: str

    def _at(self, name: str) -> str:
        return join(self.target, name)

    def _names(self, number: int) -> tuple[str, str]:
        return f"images/{number:05d}.arrow", f"partial/{number:05d}.json"

    def _owner(self) -> str:
        """The key of whoever is at work here; empty if nobody is."""
        return read_bytes(self._at(_MARK)).decode() if exists(self._at(_MARK)) else ""

    def take_up(self, parts: Sequence[Part]) -> dict[int, Shard]:
        """Return what is finished; drop all else, unless another is at the same work and has not recorded it yet."""
        others = self._owner() != self.key
        if others:
            write_bytes(self._at(_MARK), self.key.encode())  # from here on they stop
        sizes, finished = dict(list_below(self.target)), dict[int, Shard]()
        for part in parts:
            name, record = self._names(part.number)
            shard = _read(self._at(record), part.key) if record in sizes else None
            if shard and sizes.get(name) == shard.bytes:
                finished[part.number] = shard
        if others and _CARD not in sizes:
            keep = {_MARK, *(name for number in finished for name in self._names(number))}
            for name in sizes.keys() - keep:
                if name.startswith(("images/", "partial/")):
                    delete(self._at(name))
        return finished

    def make(self, images: Images, part: Part) -> Shard:
        """Make one shard on the local disk, upload it and record it."""
        with _on_local_disk() as folder:
            path = folder / "shard.arrow"
            shard = write_shard(path, part.rows, images)
            with _may_pass():
                self._put(path, shard, part)
        return shard

    def _put(self, path: Path, shard: Shard, part: Part) -> None:
        name, record = self._names(part.number)
        if self._owner() == self.key:
            upload(path, self._at(name))
            write_bytes(self._at(record), json.dumps(_recorded(shard, part)).encode())
        elif not exists(self._at(_CARD)):  # one that is finished may be the same: `finish` will tell
            raise self._taken()

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Let `complete` make what lies beside the shards; upload it, the card of the data set last."""
        with _on_local_disk() as folder, _may_pass():
            (folder / "images").mkdir()
            complete(folder)
            card = folder / _CARD
            for path in (*(path for path in folder.rglob("*") if path.is_file() and path != card), card):
                if self._owner() != self.key:
                    self._refuse_another(card)
                    break
                upload(path, self._at(path.relative_to(folder).as_posix()))
            self._delete("partial")

    def _refuse_another(self, card: Path) -> None:
        """Accept what somebody else has finished here meanwhile only if it is the same data set."""
        if not exists(self._at(_CARD)) or read_bytes(self._at(_CARD)) != card.read_bytes():
            raise self._taken()

    def _taken(self) -> CscError:
        return CscError(
            f"{self.target}: another ingest, of other data or with other settings, has taken this place meanwhile; "
            "choose another --out for one of the two"
        )

    def has_finished(self) -> bool:
        """Whether there is a shard that another try can take up."""
        return any(name.endswith(".json") for name, _ in list_below(self._at("partial")))

    def drop(self) -> None:
        """Leave nothing; what somebody else has begun or finished meanwhile is not ours to touch."""
        if self._owner() in ("", self.key):
            if not exists(self._at(_CARD)):
                self._delete("images")
            self._delete("partial")

    def _delete(self, folder: str) -> None:
        for name, _ in list(list_below(self._at(folder))):
            delete(join(self.target, folder, name))


@contextlib.contextmanager
def _on_local_disk() -> Iterator[Path]:
    """Give a folder for what will be uploaded."""
    try:
        with tempfile.TemporaryDirectory(prefix="csc-") as folder:
            yield Path(folder)
    except OSError as error:
        raise cut_short(f"cannot write {error.filename or 'a temporary file'}: {error.strerror or error}") from None


@contextlib.contextmanager
def _may_pass() -> Iterator[None]:
    try:
        yield
    except BadData as error:
        raise cut_short(error) from None


def _recorded(shard: Shard, part: Part) -> dict[str, object]:
    return {"key": part.key, **asdict(shard)}


def _read(record: str, key: str) -> Shard | None:
    """The shard that a record tells of; none if it is of another key or was not written whole."""
    try:
        content = read_json(record)
        return Shard(**content) if content.pop("key") == key else None
    except (BadData, TypeError, KeyError, AttributeError):
        return None
