"""A data set that is being written, so that an interrupted ingest can be resumed.

Finished shards go to `images/` at once and a note on each to `partial/`. `dataset.json`, which makes it a data set,
comes last. The target folder is never renamed: an object store cannot, and a folder may be a mount point.

A note has the key of its shard. Shards with the same key, so of the same images written in the same way, are kept,
whatever ended the earlier attempt; all others are deleted. An attempt that ends before its first shard leaves nothing.

`partial/key` names the work that was started last. In a folder, a second process waits for a lock. An object store has
no locks: there a process that finds another key stops.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from csc.data.dataset import Dataset
from csc.data.ingest.images import ReadImages
from csc.data.ingest.shard_writer import Part, Shard, write_shard
from csc.data.shards import has_sha256, shard_name
from csc.errors import BadData, CscError, resumable_error
from csc.storage import (
    absolute,
    delete,
    delete_below,
    ensure_parents,
    exists,
    explain_write_errors,
    is_remote,
    join,
    list_below,
    local_path,
    locked,
    move_into,
    read_bytes,
    read_json,
    write_bytes,
)

__all__ = ["Output", "refuse_foreign", "resume"]

_CARD, _KEY, _LOCK = "dataset.json", "partial/key", "partial/lock"
_OURS = re.compile(r"images/(\d{5,}\.arrow|index\.json)|partial/.+")  # what an attempt may leave, and a next one delete


def refuse_foreign(target: str | os.PathLike[str]) -> None:
    """Refuse a target that contains anything but a finished or unfinished data set."""

    def is_dataset() -> bool:
        """The key is looked for first: it is deleted only after the card is written."""
        return exists(join(target, _KEY)) or Dataset.exists(target)

    if is_dataset():
        return
    is_file = not is_remote(target) and local_path(target).is_file()
    ours = (_LOCK, "partial/.key.")  # the second: a key that is being written
    foreign = is_file or any(not name.startswith(ours) for name, _ in list_below(target))
    if foreign and not is_dataset():  # else another process has begun since the first question
        raise BadData(f"{target}: exists and is not a data set; choose an empty or new folder for --out")


@contextlib.contextmanager
def resume(
    target: str | os.PathLike[str], parts: Sequence[Part], key: str, stream: TextIO
) -> Iterator[tuple["Output", dict[int, Shard]]]:
    """Yield the output, and the shards that an earlier attempt has finished there.

    `key` is the hash of all that the data set is made from. If the block fails and there is no finished shard, the
    output is removed.
    """
    output = Output(absolute(target), key)
    with contextlib.ExitStack() as stack:
        if not is_remote(target):
            lock = Path(output.uri, _LOCK)
            stack.enter_context(ensure_parents(lock))
            _lock(lock, stream, stack)
        try:
            yield output, output.take_over(parts)
        except BaseException:
            with contextlib.suppress(CscError):  # the first error is the one to report
                if not output.has_shards():
                    output.drop()
            raise


def _lock(lock: Path, stream: TextIO, stack: contextlib.ExitStack) -> None:
    """Hold a lock until the stack is closed; who has to wait for it says so."""
    while True:
        with explain_write_errors(lock), contextlib.suppress(FileNotFoundError):  # who held it has removed it
            try:
                lock.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError:  # raised, too, if another process removes the folder at this moment
                if lock.parent.exists() and not lock.parent.is_dir():
                    raise
            try:
                stack.enter_context(locked(lock, seconds=0))
            except BlockingIOError:
                stream.write(f"waiting for another ingest into {lock.parent.parent}\n")
                stream.flush()
                stack.enter_context(locked(lock))
            return


@dataclass(frozen=True)
class Output:
    """An unfinished data set in a folder, whose lock this process holds, or in an object store."""

    uri: str
    key: str

    def take_over(self, parts: Sequence[Part]) -> dict[int, Shard]:
        """Go on with what an earlier attempt left: return its shards that can be kept, and delete the others.

        What another process may be writing stays.
        """
        may_delete = self._owner() != self.key or not is_remote(self.uri)
        write_bytes(self._at(_KEY), self.key.encode())  # from here on processes with another key stop
        sizes, finished = dict(list_below(self.uri)), dict[int, Shard]()
        for part in parts:
            name, shard_note = _names(part.number)
            shard = _read(self._at(shard_note), part.key) if shard_note in sizes else None
            if not shard or sizes.get(name) != shard.bytes:
                continue
            if is_remote(self.uri) or has_sha256(Path(self._at(name)), shard.sha256):  # in a store the size is enough
                finished[part.number] = shard
        if may_delete and not Dataset.exists(self.uri):  # else another process has finished it while this one waited
            keep = {_KEY, _LOCK, *(name for number in finished for name in _names(number))}
            for name in filter(_OURS.fullmatch, sizes.keys() - keep):
                delete(self._at(name))
        return finished

    def make(self, read_images: ReadImages, part: Part) -> Shard:
        """Write one shard and its note."""
        with self._temporary_folder() as folder:
            path = folder / "shard.arrow"
            shard = write_shard(path, part.rows, read_images)
            with _resumable():
                name, shard_note = _names(part.number)
                if self._owner() == self.key:
                    move_into(path, self._at(name))
                    write_bytes(self._at(shard_note), json.dumps({"key": part.key, **asdict(shard)}).encode())
                elif not Dataset.exists(self.uri):  # if there is one, `finish` compares
                    raise self._taken()
        return shard

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Add the files that `complete` writes, the card of the data set last."""
        with self._temporary_folder() as folder, _resumable():
            (folder / "images").mkdir()
            complete(folder)
            card = folder / _CARD
            for path in (*(path for path in folder.rglob("*") if path.is_file() and path != card), card):
                if self._owner() != self.key:
                    if not Dataset.exists(self.uri) or read_bytes(self._at(_CARD)) != card.read_bytes():
                        raise self._taken()
                    break  # another process has finished the same data set
                move_into(path, self._at(path.relative_to(folder).as_posix()))
            delete_below(self._at("partial"))

    def has_shards(self) -> bool:
        """Whether there is a finished shard."""
        return any(name.endswith(".json") for name, _ in list_below(self._at("partial")))

    def drop(self) -> None:
        """Delete the unfinished data set; what another process has begun or finished meanwhile stays."""
        if self._owner() in ("", self.key):
            if not Dataset.exists(self.uri):
                for name in filter(_OURS.fullmatch, [name for name, _ in list_below(self.uri)]):
                    delete(self._at(name))
            delete_below(self._at("partial"))
            with contextlib.suppress(BadData, OSError):  # in an object store, or not empty
                local_path(self._at("images")).rmdir()

    def _at(self, name: str) -> str:
        return join(self.uri, name)

    def _owner(self) -> str:
        """The key of the work that was started last; empty if there is none."""
        return read_bytes(self._at(_KEY)).decode() if exists(self._at(_KEY)) else ""

    @contextlib.contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        """Yield a local folder; of a local target, on the same disk."""
        parent = None if is_remote(self.uri) else self._at("partial")
        try:
            with tempfile.TemporaryDirectory(prefix="tmp-", dir=parent, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
        except OSError as error:
            where = error.filename or (self.uri if parent else "a temporary file")
            raise resumable_error(f"cannot write {where}: {error.strerror or error}") from None

    def _taken(self) -> CscError:
        return CscError(
            f"{self.uri}: another ingest, of other data or with other settings, writes there too; "
            "choose another --out for one of the two"
        )


def _names(number: int) -> tuple[str, str]:
    return f"images/{shard_name(number)}", f"partial/{number:05d}.json"


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except BadData as error:
        raise resumable_error(error) from None


def _read(shard_note: str, key: str) -> Shard | None:
    """The shard of a note; none if the note has another key or is incomplete."""
    try:
        content = read_json(shard_note)
        return Shard(**content) if content.pop("key") == key else None
    except (BadData, TypeError, KeyError, AttributeError):
        return None
