"""Files of a bucket on the disk of this node: fetched once for all processes, removed when room is needed.

CSC_CACHE names the folder. Otherwise it is `csc` in the user's cache folder, or one in the temporary folder where there
is no home to write to. CSC_CACHE_LIMIT_GB says how much it may hold; otherwise that is 80 % of what it holds already
and what is free on its disk when a process opens it.

    <key>            a complete file; its modification time says when it was last asked for
    partial/<key>/   a download in progress, or what a killed process left of one; `copy` in it has the size of the
                     complete file from the start, so that its room is counted before its bytes are there
    locks/<key>      an empty file, locked by the process that is fetching this file
    locks/room       an empty file, locked by the process that is making room

The key is the SHA-256 of the content; of files without a known SHA-256, that of their address and version.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from csc.errors import BadConfig, BadData
from csc.storage import download, explain_write_errors, local_path, locked, sha256_file

__all__ = ["NodeCache"]

_ATTEMPTS = 2
_SHARE = 0.8
_PAUSE = 0.05  # seconds between two looks for room


class NodeCache:
    """Local copies of remote files, up to a number of bytes.

    The files that were not asked for the longest are removed to make room. A process that has mapped such a file into
    memory can still read it: on Linux its content stays until the last map of it is closed.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        with explain_write_errors(root):
            for name in ("partial", "locks"):
                (root / name).mkdir(parents=True, exist_ok=True)

    @classmethod
    def of_this_node(cls) -> "NodeCache":
        """The cache that the processes of a user share on this machine."""
        root = _root()
        return cls(root, _limit(root))

    def fetch(self, uri: str, sha256: str, size: int, remedy: str = "write it again") -> Path:
        """A local copy of a remote file; open it at once, it may be removed later."""
        with self.fetched(uri, sha256, size, remedy) as path:
            return path

    @contextlib.contextmanager
    def fetched(self, uri: str, key: str, size: int, remedy: str, *, verify: bool = True) -> Iterator[Path]:
        """A local copy of a remote file, to be opened in the block.

        A copy that this call fetches or waits for is locked until the block ends. One that is there already is not:
        other processes may remove it before it is opened, though they remove those asked for longer ago first.

        If it is to be verified, `key` is the SHA-256 of its content; `remedy` says what to do if that is wrong.
        """
        if not re.fullmatch("[0-9a-f]{64}", key):
            raise BadData(f"{uri}: '{key}' is not a SHA-256 in hex; {remedy}")
        entry = self.root / key
        with contextlib.ExitStack() as entry_lock:
            if not _is_complete(entry, size):
                with explain_write_errors(self.root):
                    entry_lock.enter_context(locked(self._lock(key)))
                    if not _is_complete(entry, size):  # else another process has fetched it while this one waited
                        copy = self._reserve(key, size)
                        self._download(uri, copy, size, remedy, verify=verify)
            yield entry

    def _lock(self, name: str) -> Path:
        return self.root / "locks" / name

    def _reserve(self, key: str, size: int) -> Path:
        """Wait for room for a file, and reserve it."""
        copy = self.root / "partial" / key / "copy"
        shutil.rmtree(copy.parent, ignore_errors=True)
        (self.root / key).unlink(missing_ok=True)  # it has another size
        while not self._has_room(copy, size):
            time.sleep(_PAUSE)
        return copy

    def _has_room(self, copy: Path, size: int) -> bool:
        """Reserve `size` bytes for a copy, unless files that would have to go for it are in use.

        What killed processes left is removed first, then what was not asked for the longest. A file that is larger than
        the limit is alone in the cache.
        """
        with locked(self._lock("room")):
            busy = not all([self._remove(folder) for folder in (self.root / "partial").iterdir()])
            left = self.limit_bytes - _used_bytes(self.root)
            for _, length, path in sorted(_entries(self.root)):
                if left >= size and shutil.disk_usage(self.root).free >= size:
                    break
                if self._remove(path):
                    left += length
                else:
                    busy = True
            if left < size and busy:
                return False
            if shutil.disk_usage(self.root).free < size:
                raise BadData(
                    f"{self.root}: no room for another {size:,} bytes; free some of this disk or set CSC_CACHE to a "
                    "folder on another one"
                )
            copy.parent.mkdir()
            with copy.open("wb") as file:
                file.truncate(size)  # counts, and takes no room on the disk
            return True

    def _remove(self, path: Path) -> bool:
        """Remove a file of the cache, or the folder of a download, unless its lock is held."""
        try:
            with locked(self._lock(path.name), seconds=0):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _download(self, uri: str, copy: Path, size: int, remedy: str, *, verify: bool) -> None:
        """Fetch and check a file; once more if the first copy is wrong."""
        key, found = copy.parent.name, ""
        try:
            for _ in range(_ATTEMPTS):
                download(uri, copy)
                length, digest = copy.stat().st_size, sha256_file(copy) if verify else key
                if (length, digest) == (size, key):
                    copy.replace(self.root / key)
                    return
                found = f"{length:,} bytes with SHA-256 {digest[:12]}…"
        finally:
            shutil.rmtree(copy.parent, ignore_errors=True)
        expected = f"{size:,} bytes with SHA-256 {key[:12]}…"
        raise BadData(f"{uri}: has {found}, expected {expected}; {remedy}")


def _is_complete(entry: Path, size: int) -> bool:
    """Whether the complete file is here; if so, it counts as just asked for."""
    try:
        complete = entry.stat().st_size == size
        os.utime(entry)
    except FileNotFoundError:
        return False
    except PermissionError:  # of another user, but readable
        pass
    return complete


def _entries(root: Path) -> Iterator[tuple[float, int, Path]]:
    """When each file of the cache was last asked for, its size, its path."""
    for path in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            if path.is_file():
                yield path.stat().st_mtime, path.stat().st_size, path


def _used_bytes(root: Path) -> int:
    """The bytes of the cache, including those that downloads in progress will have."""
    in_progress = dict[str, int]()
    for copy in (root / "partial").glob("*/copy"):
        with contextlib.suppress(FileNotFoundError):  # it has become an entry, or failed
            in_progress[copy.parent.name] = copy.stat().st_size
    entries = {path.name: size for _, size, path in _entries(root)}  # listed last: a file that is renamed is not missed
    return sum({**entries, **in_progress}.values())


def _root() -> Path:
    """The folder named by the environment, else one that this user can write to."""
    if named := os.environ.get("CSC_CACHE"):
        root = local_path(named).absolute()
        with explain_write_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        return root
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "csc"
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    root = Path(tempfile.gettempdir()) / f"csc-{os.getuid()}"
    with explain_write_errors(root):
        root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():  # anybody could have put files there
        raise BadData(f"{root}: belongs to another user; set CSC_CACHE to a folder of your own")
    return root


def _limit(root: Path) -> int:
    text = os.environ.get("CSC_CACHE_LIMIT_GB")
    if not text:
        held = sum(size for _, size, _ in _entries(root))
        return int(_SHARE * (held + shutil.disk_usage(root).free))
    try:
        limit = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        limit = 0
    if limit <= 0:
        raise BadConfig(f"CSC_CACHE_LIMIT_GB: expected a number of gigabytes above 0, found '{text}'")
    return limit
