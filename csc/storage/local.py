"""Local files: an output appears complete or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from csc.errors import BadData

__all__ = [
    "atomic_file",
    "atomic_folder",
    "ensure_parents",
    "explain_write_errors",
    "json_digest",
    "locked",
    "read_regular",
    "regular_file",
    "sha256_file",
    "too_long_error",
]


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target`; rename it to `target` if the block succeeds, else remove it."""
    with explain_write_errors(target):
        target = target.resolve()  # write to the folder that a link points to
        if target == Path.cwd():
            raise BadData("cannot write the folder this command runs in; name it from outside")
    with ensure_parents(target):
        with explain_write_errors(target):
            if target.exists() and not target.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "there is a file of this name")
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        old = temporary.with_name(f"{temporary.name}.old")
        try:
            yield temporary
            temporary.chmod(0o755)
            with explain_write_errors(target):
                if target.is_dir():
                    target.replace(old)
                temporary.replace(target)
        finally:
            if old.exists() and not target.exists():  # interrupted between the two renames
                old.replace(target)
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield an empty file next to `target`; rename it to `target` if the block succeeds, else remove it."""
    with ensure_parents(target), explain_write_errors(target):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "there is a folder of this name")
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(0o644)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def ensure_parents(target: Path) -> Iterator[None]:
    """Make the folders above `target`; remove those that are still empty when the block ends."""
    with explain_write_errors(target):
        missing = [folder for folder in target.absolute().parents if not folder.exists()]
    try:
        with explain_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(target.parent, os.W_OK):
                raise PermissionError(errno.EACCES, "permission denied")
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


@contextlib.contextmanager
def locked(path: Path, *, seconds: float = math.inf) -> Iterator[int]:
    """Hold the lock of a file or folder, which excludes all other processes and threads and ends with its process.

    Yields its descriptor, through which its holder reads and writes: by then its name may be that of another file.

    A file is made if there is none. A lock that others hold for longer than some seconds is a BlockingIOError, one
    that its holder has removed a FileNotFoundError.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    until = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX if math.isinf(seconds) else fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.05)
        try:
            if os.fstat(descriptor).st_nlink == 0:
                raise FileNotFoundError(f"{path} was removed")
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the same open file
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_write_errors(target: Path | str) -> Iterator[None]:
    """Turn an OSError of the block into one line that says why `target` cannot be written."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room or choose another disk" if full else "choose a folder you may write to"
        raise BadData(f"cannot write {target}: {error.strerror or error}; {remedy}") from None


def regular_file(path: str | Path) -> Path:
    """Return the path of a file; a pipe or a device is an OSError, for whoever opens it may wait for ever."""
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
    return path


def read_regular(path: Path, limit: int | None) -> bytes:
    """Read a whole file; a pipe or a device is an OSError, and so is a file above the limit."""
    size = regular_file(path).stat().st_size
    if limit is not None and size > limit:
        raise too_long_error(size, limit)
    return path.read_bytes()


def too_long_error(size: int, limit: int) -> OSError:
    """The error for a file that has more bytes than anything of its kind should have."""
    return OSError(f"it has {size:,} bytes, at most {limit:,} are read")


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(content: Any) -> str:
    """Return the SHA-256 of plain data as JSON, whatever the order of its keys, in hex."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
