"""The door to files: every output appears whole or not at all."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from csc.errors import BadData

__all__ = ["atomic_file", "atomic_folder", "local_path", "read_json", "sha256_file", "write_json"]


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Turn a path or `file://` address into a local path; other places are refused by name."""
    text = os.fspath(uri)
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "file":
        raise BadData(
            f"{text}: '{scheme}://' is not a place this version can read or write; use a local or mounted path"
        )
    try:
        path = Path(rest if separator else text).expanduser()
        path.exists()  # a name that no file can have
    except (RuntimeError, OSError) as error:
        raise BadData(f"{text}: not a usable path ({getattr(error, 'strerror', None) or error})") from None
    return path


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill beside `target`; rename it to `target` when the block ends well, drop it otherwise."""
    with _writable(target):
        target = target.resolve()  # links stand for the folder they lead to
        if target == Path.cwd():
            raise BadData("cannot write the folder this command runs in; name it from outside")
    with _parent_of(target):
        with _writable(target):
            if target.exists() and not target.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is in its place")
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        old = aside.with_name(f"{aside.name}.old")
        try:
            yield aside
            aside.chmod(0o755)
            with _writable(target):
                if target.is_dir():
                    target.replace(old)
                aside.replace(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Give a file name to write beside `target`; rename it to `target` when the block ends well, drop it otherwise."""
    with _parent_of(target):
        with _writable(target):
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder is in its place")
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        aside = Path(name)
        try:
            yield aside
            aside.chmod(0o644)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _parent_of(target: Path) -> Iterator[None]:
    """Make the folders above `target`, where the final rename stays inside one file system; drop unused ones again."""
    with _writable(target):
        missing = [folder for folder in target.absolute().parents if not folder.exists()]
    try:
        with _writable(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(target.parent, os.W_OK):
                raise PermissionError(errno.EACCES, "permission denied")
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # not empty: in use
                folder.rmdir()


@contextlib.contextmanager
def _writable(target: Path) -> Iterator[None]:
    """Say in one line why a place cannot be written."""
    try:
        yield
    except OSError as error:
        raise BadData(f"cannot write {target}: {error.strerror or error}; choose a folder you may write to") from None


def write_json(target: Path, content: Any) -> None:
    """Write `content` as readable JSON, whole or not at all; a number that is not finite is an error."""
    with atomic_file(target) as aside:
        aside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON; a missing or broken file is reported by its name."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadData(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise BadData(f"{path}: not readable as JSON ({error})") from None


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
