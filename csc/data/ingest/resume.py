"""A data set that is being written, so that an interrupted ingest can be resumed.

Finished shards go to `images/` at once and a record of each to `partial/`. `dataset.json`, which makes it a data set,
comes last. The target folder is never renamed: an object store cannot, and a folder may be a mount point.

A record has the key of its shard. Shards with the same key, so of the same images written in the same way, are kept,
whatever ended the earlier attempt; all others are deleted. An attempt that ends before its first shard leaves nothing.

In a folder, a second process waits for a lock. An object store has no locks: there `partial/key` names the work that
was started last, and an older one with another key stops.
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

from csc.data.ingest.shards import Images, Part, Shard, has_sha256, resumable_error, write_shard
from csc.errors import BadData, CscError
from csc.storage import (
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
)

__all__ = ["Output", "refuse_foreign", "resume"]

_CARD, _KEY, _LOCK = "dataset.json", "partial/key", "partial/lock"
_IN_PARTIAL = re.compile(r"lock|tmp-.*|\.?\d{5,}\.json.*")
_OF_THE_DISK = "lost+found"  # every new ext4 volume has it


def refuse_foreign(target: str | os.PathLike[str]) -> None:
    """Refuse a target that contains anything but a finished or unfinished data set."""
    if is_remote(target):
        names = {name for name, _ in list_below(os.fspath(target))}
        foreign = bool(names) and names.isdisjoint((_CARD, _KEY))
    else:
        foreign = _is_foreign(local_path(target))
    if foreign:
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
def resume(
    target: str | os.PathLike[str], parts: Sequence[Part], key: str, stream: TextIO
) -> Iterator[tuple["Output", dict[int, Shard]]]:
    """Yield the output, and the shards that an earlier attempt has finished there.

    Args:
        target: folder or `s3://` prefix of the data set.
        parts: what its shards are made from.
        key: hash of all that the data set is made from.
        stream: where to say that this process waits for another.
    """
    with contextlib.ExitStack() as stack:
        if is_remote(target):
            output = Output(os.fspath(target).rstrip("/"), key)
        else:
            output = Output(str(local_path(target).absolute()), key)
            lock = Path(output.target, _LOCK)
            stack.enter_context(parent_of(lock))
            stack.enter_context(_locked(lock, stream))
        stack.enter_context(drop_if_empty(output))
        yield output, output.finished_shards(parts)


@contextlib.contextmanager
def drop_if_empty(output: "Output") -> Iterator[None]:
    """If the block fails and there is no finished shard, remove the output."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CscError):  # the first error is the one to report
            if not output.has_shards():
                output.drop()
        raise


def _locked(lock: Path, stream: TextIO) -> TextIO:
    """Take a lock; closing the returned file releases it."""
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
            file.close()  # the process that held it has finished and removed it


@dataclass(frozen=True)
class Output:
    """An unfinished data set in a folder, whose lock this process holds, or in an object store."""

    target: str
    key: str

    def finished_shards(self, parts: Sequence[Part]) -> dict[int, Shard]:
        """Return the shards that can be kept; delete the others, unless another process may be writing them."""
        alone = self._claim()
        sizes, finished = self._sizes(), dict[int, Shard]()
        for part in parts:
            name, record = _names(part.number)
            shard = _read(self._uri(record), part.key) if record in sizes else None
            if shard and sizes.get(name) == shard.bytes and self._is_intact(name, shard):
                finished[part.number] = shard
        if alone and not exists(self._uri(_CARD)):  # else another process has finished it while this one waited
            keep = {_KEY, _LOCK, *(name for number in finished for name in _names(number))}
            for name in sizes.keys() - keep:
                self._delete(name)
        return finished

    def make(self, images: Images, part: Part) -> Shard:
        """Write one shard and its record."""
        with self._temporary_folder() as folder:
            path = folder / "shard.arrow"
            shard = write_shard(path, part.rows, images)
            with _resumable():
                name, record = _names(part.number)
                if self._is_ours():
                    self._move(path, name)
                    write_bytes(self._uri(record), json.dumps({"key": part.key, **asdict(shard)}).encode())
                elif not exists(self._uri(_CARD)):  # if there is one, `finish` compares
                    raise self._taken()
        return shard

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Add the files that `complete` writes, the card of the data set last."""
        with self._temporary_folder() as folder, _resumable():
            (folder / "images").mkdir()
            complete(folder)
            card = folder / _CARD
            for path in (*(path for path in folder.rglob("*") if path.is_file() and path != card), card):
                if not self._is_ours():
                    self._refuse_another(card)
                    break
                self._move(path, path.relative_to(folder).as_posix())
            self._delete_folder("partial")

    def has_shards(self) -> bool:
        """Whether there is a finished shard."""
        return any(name.startswith("partial/") and name.endswith(".json") for name in self._sizes())

    def drop(self) -> None:
        """Delete the unfinished data set; what another process has begun or finished meanwhile stays."""
        if not is_remote(self.target) or self._owner() in ("", self.key):
            if not exists(self._uri(_CARD)):
                self._delete_folder("images")
            self._delete_folder("partial")

    def _uri(self, name: str) -> str:
        return join(self.target, name)

    def _claim(self) -> bool:
        """Make the output ours; return whether nobody else works on it."""
        if not is_remote(self.target):
            with writable(Path(self.target)):
                Path(self._uri("images")).mkdir(exist_ok=True)
            return True
        if self._owner() == self.key:
            return False
        write_bytes(self._uri(_KEY), self.key.encode())  # from here on the others stop
        return True

    def _owner(self) -> str:
        """The key in the object store; empty if there is none."""
        return read_bytes(self._uri(_KEY)).decode() if exists(self._uri(_KEY)) else ""

    def _is_ours(self) -> bool:
        return not is_remote(self.target) or self._owner() == self.key

    def _sizes(self) -> dict[str, int]:
        """Names and sizes of the files in `images/` and `partial/`."""
        if is_remote(self.target):
            return {name: size for name, size in list_below(self.target) if name.startswith(("images/", "partial/"))}
        folder = Path(self.target)
        paths = (*folder.glob("images/*"), *folder.glob("partial/*"))
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}

    def _is_intact(self, name: str, shard: Shard) -> bool:
        """Whether a shard has its bytes; of one in an object store the size is enough."""
        return is_remote(self.target) or has_sha256(Path(self._uri(name)), shard.sha256)

    @contextlib.contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        """Yield a local folder; of a local target, on the same disk."""
        parent = None if is_remote(self.target) else self._uri("partial")
        try:
            with tempfile.TemporaryDirectory(prefix="tmp-", dir=parent, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
        except OSError as error:
            where = error.filename or (self.target if parent else "a temporary file")
            raise resumable_error(f"cannot write {where}: {error.strerror or error}") from None

    def _move(self, path: Path, name: str) -> None:
        if is_remote(self.target):
            upload(path, self._uri(name))
        else:
            path.chmod(0o644)
            path.replace(self._uri(name))

    def _delete(self, name: str) -> None:
        if is_remote(self.target):
            delete(self._uri(name))
            return
        path = Path(self._uri(name))
        with writable(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _delete_folder(self, folder: str) -> None:
        if not is_remote(self.target):
            shutil.rmtree(self._uri(folder), ignore_errors=True)
            return
        for name, _ in list(list_below(self._uri(folder))):
            delete(join(self.target, folder, name))

    def _refuse_another(self, card: Path) -> None:
        """Accept what another process has finished meanwhile only if it is the same data set."""
        if not exists(self._uri(_CARD)) or read_bytes(self._uri(_CARD)) != card.read_bytes():
            raise self._taken()

    def _taken(self) -> CscError:
        return CscError(
            f"{self.target}: another ingest, of other data or with other settings, writes there too; "
            "choose another --out for one of the two"
        )


def _names(number: int) -> tuple[str, str]:
    return f"images/{number:05d}.arrow", f"partial/{number:05d}.json"


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except BadData as error:
        raise resumable_error(error) from None


def _read(record: str, key: str) -> Shard | None:
    """The shard of a record; none if it has another key or the record is incomplete."""
    try:
        content = read_json(record)
        return Shard(**content) if content.pop("key") == key else None
    except (BadData, TypeError, KeyError, AttributeError):
        return None
