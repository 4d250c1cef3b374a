"""Files of a bucket on the disk of this node: fetched once, however many processes ask, dropped when room is needed.

CSC_CACHE names the folder. Otherwise it is `csc` in the user's cache folder, or one in the temporary folder where there
is no home to write to. CSC_CACHE_LIMIT_GB says how much it may hold; otherwise that is 80 % of what it holds already
and what is free on its disk when a process opens it.

    <sha256>            a whole, verified file; its modification time says when it was last asked for
    partial/<sha256>/   a download under way, or what a killed process left of one; `copy` in it is as long as the whole
                        file from the start, so that its room is counted before its bytes are there
    locks/<sha256>      an empty file, locked by the process that is fetching this content
    locks/room          an empty file, locked by the process that is making room
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from csc.errors import BadConfig, BadData
from csc.storage import download, local_path, sha256_file, writable

__all__ = ["NodeCache"]

_TRIES = 2
_SHARE = 0.8
_PAUSE = 0.05  # seconds between two looks for room


class NodeCache:
    """Local copies of remote files, by content, up to a number of bytes.

    Files that were asked for longest ago make room for new ones. A process that has mapped such a file into memory goes
    on reading it: on Linux its content stays until the last map of it is gone.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        with writable(root):
            for name in ("partial", "locks"):
                (root / name).mkdir(parents=True, exist_ok=True)

    @classmethod
    def of_this_node(cls) -> "NodeCache":
        """The cache that the processes of a user share on this machine."""
        root = _root()
        return cls(root, _limit(root))

    def fetch(self, uri: str, sha256: str, size: int, remedy: str = "write it again") -> Path:
        """A local copy of a remote file; open it at once, others may need its room later."""
        with self.fetched(uri, sha256, size, remedy) as path:
            return path

    @contextlib.contextmanager
    def fetched(self, uri: str, sha256: str, size: int, remedy: str) -> Iterator[Path]:
        """A local copy of a remote file, to be opened in the block: what was just fetched makes no room until then.

        Args:
            uri: where to get it if it is not here.
            sha256: of its content, in hex.
            size: of its content, in bytes.
            remedy: what makes it anew, should it not be what it should.
        """
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise BadData(f"{uri}: '{sha256}' is not a SHA-256 in hex; {remedy}")
        entry = self.root / sha256
        with contextlib.ExitStack() as until_it_is_open:
            if not _holds(entry, size):
                with writable(self.root):
                    until_it_is_open.enter_context(self._locked(sha256))
                    if not _holds(entry, size):  # else another process has fetched it while this one waited
                        self._get(uri, entry, size, remedy)
            yield entry

    def _get(self, uri: str, entry: Path, size: int, remedy: str) -> None:
        """Fetch what is not here, when there is room for it."""
        copy = self.root / "partial" / entry.name / "copy"
        shutil.rmtree(copy.parent, ignore_errors=True)
        entry.unlink(missing_ok=True)  # cut, since it does not hold what it should
        while not self._has_room(copy, size):
            time.sleep(_PAUSE)
        self._download(uri, copy, entry, size, remedy)

    @contextlib.contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Be the only one, of all processes and threads, that has this lock; it ends with its process."""
        with (self.root / "locks" / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the same open file

    def _has_room(self, copy: Path, size: int) -> bool:
        """Set `size` bytes aside for a copy, unless others are busy with files that would have to go for it.

        What killed processes left goes first, then what was asked for longest ago. A file that is larger than the limit
        is alone in the cache.
        """
        with self._locked("room"):
            busy = not all([self._drop(folder) for folder in (self.root / "partial").iterdir()])
            left = self.limit_bytes - _held(self.root)
            for _, length, path in sorted(_entries(self.root)):
                if left >= size and shutil.disk_usage(self.root).free >= size:
                    break
                if self._drop(path):
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

    def _drop(self, path: Path) -> bool:
        """Remove a file of the cache, or the folder of a download, unless somebody is busy with this content."""
        try:
            with self._locked(path.name, wait=False):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _download(self, uri: str, copy: Path, entry: Path, size: int, remedy: str) -> None:
        """Fetch and verify a file; a second time if the first copy is not what it should be."""
        found = ""
        try:
            for _ in range(_TRIES):
                download(uri, copy)
                length, digest = copy.stat().st_size, sha256_file(copy)
                if (length, digest) == (size, entry.name):
                    copy.replace(entry)
                    return
                found = f"{length:,} bytes with SHA-256 {digest[:12]}…"
        finally:
            shutil.rmtree(copy.parent, ignore_errors=True)
        expected = f"{size:,} bytes with SHA-256 {entry.name[:12]}…"
        raise BadData(f"{uri}: has {found}, expected {expected}; {remedy}")


def _holds(entry: Path, size: int) -> bool:
    """Whether the whole file is here; if so, it counts as just asked for."""
    try:
        whole = entry.stat().st_size == size
        os.utime(entry)
    except FileNotFoundError:
        return False
    except PermissionError:  # of another user: good to read all the same
        pass
    return whole


def _entries(root: Path) -> Iterator[tuple[float, int, Path]]:
    """When each file of the cache was last asked for, its size, its path."""
    for path in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process needed room
            if path.is_file():
                yield path.stat().st_mtime, path.stat().st_size, path


def _held(root: Path) -> int:
    """The bytes of the cache, those that downloads under way will have included."""
    under_way = dict[str, int]()
    for copy in (root / "partial").glob("*/copy"):
        with contextlib.suppress(FileNotFoundError):  # it has become an entry, or failed
            under_way[copy.parent.name] = copy.stat().st_size
    entries = {path.name: size for _, size, path in _entries(root)}  # looked for last: no file is missed on its way
    return sum({**entries, **under_way}.values())


def _root() -> Path:
    """The folder named by the environment, else one that this user can write to."""
    if named := os.environ.get("CSC_CACHE"):
        root = local_path(named).absolute()
        with writable(root):
            root.mkdir(parents=True, exist_ok=True)
        return root
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "csc"
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    root = Path(tempfile.gettempdir()) / f"csc-{os.getuid()}"
    with writable(root):
        root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():  # anybody could have put files there
        raise BadData(f"{root}: belongs to another user; set CSC_CACHE to a folder of your own")
    return root


def _limit(root: Path) -> int:
    text = os.environ.get("CSC_CACHE_LIMIT_GB")
    if not text:
        whole = sum(size for _, size, _ in _entries(root))
        return int(_SHARE * (whole + shutil.disk_usage(root).free))
    try:
        limit = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        limit = 0
    if limit <= 0:
        raise BadConfig(f"CSC_CACHE_LIMIT_GB: expected a number of gigabytes above 0, found '{text}'")
    return limit
