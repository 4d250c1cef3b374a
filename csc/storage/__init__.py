"""Files, local or in an object store: every output appears complete or not at all.

A URI is a local path or `s3://bucket/prefix`. Only this package imports boto3.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from csc.errors import BadData
from csc.storage import s3
from csc.storage.local import (
    atomic_file,
    atomic_folder,
    ensure_parents,
    explain_write_errors,
    json_digest,
    locked,
    read_regular,
    regular_file,
    sha256_file,
    too_long_error,
)
from csc.storage.s3 import download, upload, version_of, versions_below
from csc.storage.uris import NoSuchFile, absolute, is_remote, join, local_path

__all__ = [
    "absolute",
    "atomic_file",
    "atomic_folder",
    "atomic_output",
    "delete",
    "delete_below",
    "download",
    "each_key_once",
    "ensure_parents",
    "exists",
    "explain_write_errors",
    "is_remote",
    "join",
    "json_digest",
    "list_below",
    "local_path",
    "locked",
    "move_into",
    "read_bytes",
    "read_json",
    "read_regular",
    "regular_file",
    "sha256_file",
    "too_long_error",
    "upload",
    "version_of",
    "versions_below",
    "write_bytes",
    "write_json",
]

_LOST_AND_FOUND = "lost+found"  # every new ext4 volume has it


@contextlib.contextmanager
def atomic_output(uri: str) -> Iterator[Path]:
    """Yield a local file to write; its content appears at `uri`, local or remote, if the block succeeds."""
    if not is_remote(uri):
        with atomic_file(local_path(uri)) as path:
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="csc-upload-") as folder:
        path = Path(folder) / "file"
        yield path
        upload(path, uri)


def read_json(uri: str | os.PathLike[str], named: str = "") -> Any:
    """Read JSON; an error names the file, by the name by which the user knows it."""
    try:
        text = read_bytes(uri).decode("utf-8")
        return json.loads(text, object_pairs_hook=each_key_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{named or uri}: not readable as JSON ({error})") from None


def each_key_once(pairs: list[tuple[str, Any]], problem: str = "key {!r} is given twice") -> dict[str, Any]:
    """Make an object of JSON; raise ValueError for a key that it has twice, of which the last would silently win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(problem.format(next(key for key in found if counts[key] > 1)))
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def read_bytes(uri: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Read a whole file, which may have at most so many bytes; an error names it."""
    if is_remote(uri):
        return s3.read(os.fspath(uri), limit)
    path = local_path(uri)
    try:
        return read_regular(path, limit)
    except FileNotFoundError:
        raise NoSuchFile(f"{path}: no such file") from None
    except OSError as error:
        raise BadData(f"{path}: not readable ({error.strerror or error})") from None


def write_bytes(uri: str | os.PathLike[str], content: bytes) -> None:
    """Write a small file atomically."""
    if is_remote(uri):
        s3.write(os.fspath(uri), content)
        return
    with atomic_file(local_path(uri)) as temporary:
        temporary.write_bytes(content)


def write_json(uri: str | os.PathLike[str], content: Any) -> None:
    """Write indented JSON atomically; a number that is not finite is an error."""
    write_bytes(uri, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def exists(uri: str | os.PathLike[str]) -> bool:
    """Whether there is a file of this name; a bucket or folder that cannot be read is an error."""
    try:
        if is_remote(uri):
            version_of(os.fspath(uri))
            return True
        return local_path(uri).is_file()
    except NoSuchFile:
        return False
    except OSError as error:
        raise BadData(f"{uri}: not readable ({error.strerror or error})") from None


def list_below(uri: str | os.PathLike[str]) -> Iterator[tuple[str, int]]:
    """Name (relative, with forward slashes) and size of every file below a folder or prefix."""
    if is_remote(uri):
        yield from ((name, size) for name, size, _ in versions_below(os.fspath(uri)))
        return
    root = local_path(uri)
    try:
        for folder, folders, names in os.walk(root, onerror=_raise):
            folders[:] = [name for name in folders if name != _LOST_AND_FOUND]
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                    found = path.stat() if path.exists() else path.lstat()  # a link to nothing is a file too
                    yield path.relative_to(root).as_posix(), found.st_size
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BadData(f"{root}: not readable ({error.strerror or error}); choose a folder you may use") from None


def _raise(error: OSError) -> None:
    raise error


def move_into(path: Path, uri: str) -> None:
    """Move a local file to its final name, local (on the same disk) or remote."""
    if is_remote(uri):
        upload(path, uri)
        return
    target = local_path(uri)
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        path.chmod(0o644)
        path.replace(target)


def delete(uri: str) -> None:
    """Remove a file; one that does not exist is no error."""
    if is_remote(uri):
        s3.delete(uri)
        return
    path = local_path(uri)
    with explain_write_errors(path):
        path.unlink(missing_ok=True)


def delete_below(uri: str) -> None:
    """Remove a folder, or all objects below a prefix, as far as that is possible."""
    if not is_remote(uri):
        shutil.rmtree(local_path(uri), ignore_errors=True)
        return
    for name, _ in list(list_below(uri)):
        delete(join(uri, name))
