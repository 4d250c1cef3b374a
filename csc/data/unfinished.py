"""Where a data set grows until it is whole: finished shards and a record of each, so that a second try goes on.

A local data set grows in the hidden folder `.NAME.partial` beside its target and is renamed in the end. In an object
store, where nothing can be renamed, the shards go to the target at once, the records to `partial/` below it, and
`dataset.json`, which makes all this a data set, comes last. Nobody can be kept waiting there: who comes last with other
work takes the place, and whoever had it stops. Bad data leaves nothing behind; whatever else goes wrong leaves what is
finished for the next try.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from csc.data.shards import Images, Listed, Shard, cut_short, write_shard
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
    sha256_file,
    upload,
    writable,
    write_bytes,
    write_json,
)

__all__ = ["Bucket", "Folder", "refuse_foreign", "unfinished"]


def refuse_foreign(target: str | os.PathLike[str]) -> None:
    """Refuse a target that holds something else than a data set, whole or begun."""
    if is_remote(target):
        own = ("dataset.json", "partial/key")
        names = {name for name, _ in list_below(os.fspath(target))}
        strange = bool(names) and names.isdisjoint(own)
    else:
        path = local_path(target)
        strange = path.is_file() or (path.exists() and not (path / "dataset.json").is_file() and any(path.iterdir()))
    if strange:
        raise BadData(f"{target}: exists and is not a data set; choose an empty or new folder for --out")


@contextlib.contextmanager
def unfinished(target: str | os.PathLike[str], key: str) -> Iterator[tuple["Folder | Bucket", dict[int, Shard]]]:
    """Give the place where a data set grows, and the shards that an earlier try has finished there.

    On a local disk, a second process that wants the same place waits for the first.

    Args:
        target: of the data set.
        key: stands for all that the shards depend on; what was made from anything else is dropped.
    """
    if is_remote(target):
        bucket = Bucket(os.fspath(target).rstrip("/"), key)
        finished = bucket.take_up()
        with _dropped_if_bad(bucket):
            yield bucket, finished
        return
    path = local_path(target)
    with writable(path):
        path = path.resolve()  # links stand for the folder they lead to
        if path == Path.cwd():
            raise BadData("cannot write the folder this command runs in; name it from outside")
    folder = Folder(path.with_name(f".{path.name}.partial"), path)
    with parent_of(path), _lock(folder.root), _dropped_if_bad(folder):
        yield folder, folder.take_up(key)


@contextlib.contextmanager
def _dropped_if_bad(place: "Folder | Bucket") -> Iterator[None]:
    try:
        yield
    except BadData:
        place.drop()
        raise


def _lock(root: Path) -> TextIO:
    """Make a folder and hold it until the returned file is closed."""
    while True:
        with writable(root), contextlib.suppress(FileNotFoundError):
            root.mkdir(exist_ok=True)
            lock = (root / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_nlink:
                return lock
            lock.close()  # whoever held it has finished and removed the folder


@dataclass(frozen=True)
class Folder:
    """Unfinished work on a local disk."""

    root: Path
    target: Path

    @property
    def _whole(self) -> Path:
        return self.root / "set"

    def _files(self, number: int) -> tuple[Path, Path]:
        return self._whole / "images" / f"{number:05d}.arrow", self.root / f"{number:05d}.json"

    def take_up(self, key: str) -> dict[int, Shard]:
        """Return what is finished; drop all else."""
        mark = self.root / "key"
        if not mark.is_file() or mark.read_text(encoding="utf-8") != key:
            self._clear(keep=set())
            write_bytes(mark, key.encode())
        records = {int(path.stem): _read(str(path)) for path in self.root.glob("[0-9]*.json")}
        finished = {number: shard for number, shard in records.items() if shard and self._is_whole(number, shard)}
        self._clear(keep={mark, *(path for number in finished for path in self._files(number))})
        (self._whole / "images").mkdir(parents=True, exist_ok=True)
        return finished

    def _is_whole(self, number: int, shard: Shard) -> bool:
        path = self._files(number)[0]
        return path.is_file() and sha256_file(path) == shard.sha256

    def _clear(self, keep: Set[Path]) -> None:
        for path in self.root.rglob("*"):
            if path.is_file() and path.name != "lock" and path not in keep:
                path.unlink()

    def make(self, images: Images, number: int, rows: Sequence[Listed]) -> Shard:
        """Make one shard and record it."""
        path, record = self._files(number)
        try:
            with atomic_file(path) as aside:
                shard = write_shard(aside, rows, images)
            write_json(record, asdict(shard))
        except OSError as error:
            raise cut_short(f"cannot write {path}: {error.strerror or error}") from None
        return shard

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Let `complete` add what lies beside the shards, then put all of it in its place."""
        try:
            complete(self._whole)
            self._whole.replace(self.target)
        except OSError as error:
            raise cut_short(f"cannot write {self.target}: {error.strerror or error}") from None
        self.drop()

    def drop(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.root, ignore_errors=True)


@dataclass(frozen=True)
class Bucket:
    """Unfinished work in an object store; the file `partial/key` tells whose it is."""

    target: str
    key: str

    @property
    def _card(self) -> str:
        return join(self.target, "dataset.json")

    @property
    def _mark(self) -> str:
        return join(self.target, "partial/key")

    def _names(self, number: int) -> tuple[str, str]:
        return f"images/{number:05d}.arrow", f"partial/{number:05d}.json"

    def _owner(self) -> str:
        """The key of whoever is at work here; empty if nobody is."""
        return read_bytes(self._mark).decode() if exists(self._mark) else ""

    def take_up(self) -> dict[int, Shard]:
        """Return what is finished; drop all else."""
        if self._owner() != self.key:
            self._clear()
            write_bytes(self._mark, self.key.encode())
            return {}
        sizes = dict(list_below(self.target))
        names = [name for name in sizes if name.startswith("partial/") and name.endswith(".json")]
        records = {int(Path(name).stem): _read(join(self.target, name)) for name in names}
        return {
            number: shard
            for number, shard in records.items()
            if shard and sizes.get(self._names(number)[0]) == shard.bytes
        }

    def make(self, images: Images, number: int, rows: Sequence[Listed]) -> Shard:
        """Make one shard on the local disk, upload it and record it."""
        name, record = self._names(number)
        with tempfile.TemporaryDirectory(prefix="csc-") as folder:
            path = Path(folder) / "shard.arrow"
            try:
                shard = write_shard(path, rows, images)
            except OSError as error:
                raise cut_short(f"cannot write {path}: {error.strerror or error}") from None
            with _may_pass():
                if self._owner() == self.key:
                    upload(path, join(self.target, name))
                    write_bytes(join(self.target, record), json.dumps(asdict(shard)).encode())
                elif not exists(self._card):  # one that is finished may be the same: `finish` will tell
                    raise self._taken()
        return shard

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Let `complete` make what lies beside the shards; upload it, the card of the data set last."""
        with tempfile.TemporaryDirectory(prefix="csc-") as name, _may_pass():
            folder = Path(name)
            (folder / "images").mkdir()
            complete(folder)
            card = folder / "dataset.json"
            for path in (*(path for path in folder.rglob("*") if path.is_file() and path != card), card):
                if self._owner() != self.key:
                    self._refuse_another(card)
                    break
                upload(path, join(self.target, path.relative_to(folder).as_posix()))
            self._delete("partial")

    def _refuse_another(self, card: Path) -> None:
        """Accept what somebody else has finished here meanwhile only if it is the same data set."""
        if not exists(self._card) or read_bytes(self._card) != card.read_bytes():
            raise self._taken()

    def _taken(self) -> CscError:  # not BadData, upon which the work of the other would be dropped
        return CscError(
            f"{self.target}: another ingest, of other data or with other settings, has taken this place meanwhile; "
            "choose another --out for one of the two"
        )

    def drop(self) -> None:
        """Leave nothing; what somebody else has begun or finished meanwhile is not ours to touch."""
        if self._owner() in ("", self.key):
            self._clear()

    def _clear(self) -> None:
        if not exists(self._card):
            self._delete("images")
        self._delete("partial")

    def _delete(self, folder: str) -> None:
        for name, _ in list(list_below(join(self.target, folder))):
            delete(join(self.target, folder, name))


@contextlib.contextmanager
def _may_pass() -> Iterator[None]:
    try:
        yield
    except BadData as error:
        raise cut_short(error) from None


def _read(record: str) -> Shard | None:
    """What a record says; none if it was not written whole."""
    try:
        return Shard(**read_json(record))
    except (BadData, TypeError):
        return None
