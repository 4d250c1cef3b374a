"""Raw data to ingest: a folder, a zip file or a folder of zip files, local or in a bucket, read without unpacking."""

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from csc.data.cache import NodeCache
from csc.errors import BadData
from csc.storage import is_remote, join, list_below, local_path, read_bytes, version_of, versions_below

__all__ = ["DamagedFile", "Source"]

_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_ARCHIVES = (".zip", *_TARS)


class DamagedFile(BadData):
    """A zip member whose bytes do not match its checksum; reading it again will not help."""


class Source:
    """A folder or a zip file; names inside are relative, with forward slashes, and cannot point outside.

    A local folder with zip files and no folders, as a download leaves it, is read as if they were unpacked there.

    In a bucket, an address that ends in `.zip` is a zip file, copied to the cache of this node first; any other is a
    prefix, listed once and only when a listing is needed. Threads may share a source; pickling it for another process
    sends only its address.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self.path: Path | str = os.fspath(uri) if is_remote(uri) else local_path(uri)
        self._listings: dict[PurePosixPath, _Listing] = {}
        self._files = _opened(self.path)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __reduce__(self) -> tuple[type["Source"], tuple[str]]:
        return Source, (str(self.path),)

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request to an object store."""
        return isinstance(self._files, _Prefix)

    def names(self, folder: str | PurePosixPath = "") -> frozenset[str]:
        """The names of the files directly in a folder; empty when there is no such folder."""
        return self._list(PurePosixPath(folder)).files

    def folders(self, folder: str | PurePosixPath = "") -> frozenset[str]:
        """The names of the folders directly in a folder, without hidden ones and what macOS adds to a zip."""
        return _visible(self._list(PurePosixPath(folder)).folders)

    def has(self, name: str | PurePosixPath) -> bool:
        """Whether there is a file of this name."""
        path = PurePosixPath(name)
        return path.name in self.names(path.parent)

    def read(self, name: str | PurePosixPath) -> bytes:
        """The content of one file."""
        path = PurePosixPath(name)
        try:
            if _points_outside(path):
                raise FileNotFoundError
            return self._files.read(path)
        except FileNotFoundError:
            raise BadData(f"{self.where(path)}: no such file") from None
        except OSError as error:
            raise BadData(f"{self.where(path)}: not readable ({error}); copy or download it again") from None
        except _ZIP_ERRORS as error:
            raise DamagedFile(f"{self.where(path)}: not readable ({error}); copy or download it again") from None

    def version(self, name: str | PurePosixPath) -> tuple[int, int | str]:
        """Size, and modification time, checksum or ETag of a file: differs when the content has changed."""
        return self._files.version(PurePosixPath(name))

    def still_packed(self) -> str:
        """Text for a "not found" error that names archives which are not looked into."""
        found = sorted(name for name in self.names() if name.lower().endswith(_ARCHIVES))
        return f" (unpack {', '.join(found)} here first)" if found else ""

    def where(self, name: str | PurePosixPath) -> str:
        """How an error names a file: in one line, whatever characters the name has."""
        text = f"{self.path}/{PurePosixPath(name)}"
        return text if text.isprintable() else ascii(text)

    def _list(self, folder: PurePosixPath) -> "_Listing":
        if folder not in self._listings:
            try:
                self._listings[folder] = _Listing() if _points_outside(folder) else self._files.list(folder)
            except (OSError, ValueError) as error:
                raise BadData(f"{self.where(folder)}: not readable ({error}); expected a folder you may read") from None
        return self._listings[folder]


class _Listing(NamedTuple):
    """The names directly in one folder."""

    files: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


class _Files(Protocol):
    """Files by relative path; a missing file is a FileNotFoundError, a missing folder is empty."""

    def read(self, path: PurePosixPath) -> bytes: ...

    def version(self, path: PurePosixPath) -> tuple[int, int | str]: ...

    def list(self, folder: PurePosixPath) -> _Listing: ...

    def close(self) -> None: ...


class _Folder:
    """The files below a local folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: PurePosixPath) -> bytes:
        return (self._root / path).read_bytes()

    def version(self, path: PurePosixPath) -> tuple[int, int]:
        try:
            stat = (self._root / path).stat()
        except OSError:
            return 0, 0  # reading it will tell why
        return stat.st_size, stat.st_mtime_ns

    def list(self, folder: PurePosixPath) -> _Listing:
        files: set[str] = set()
        folders: set[str] = set()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).add(entry.name)
        return _Listing(frozenset(files), frozenset(folders))

    def close(self) -> None: ...


class _Zips:
    """The members of one or several local zip files; of a name that several have, the first counts."""

    def __init__(self, archives: Sequence[zipfile.ZipFile]) -> None:
        self._archives = archives
        self._members: dict[PurePosixPath, tuple[zipfile.ZipFile, zipfile.ZipInfo]] = {}
        for archive in archives:
            for member in archive.infolist():
                if not member.is_dir():
                    self._members.setdefault(PurePosixPath(member.filename), (archive, member))
        self._listings = _listings(self._members)

    def read(self, path: PurePosixPath) -> bytes:
        if path not in self._members:
            raise FileNotFoundError
        archive, member = self._members[path]
        return archive.read(member)

    def version(self, path: PurePosixPath) -> tuple[int, int]:
        _, member = self._members[path]
        return member.file_size, member.CRC

    def list(self, folder: PurePosixPath) -> _Listing:
        return self._listings.get(folder, _Listing())

    def close(self) -> None:
        for archive in self._archives:
            archive.close()


class _Prefix:
    """The objects below a prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        if next(list_below(uri), None) is None:
            raise _missing(uri)

    def read(self, path: PurePosixPath) -> bytes:
        return read_bytes(join(self._uri, str(path)))

    def version(self, path: PurePosixPath) -> tuple[int, str]:
        return self._versions.get(path, (0, ""))

    def list(self, folder: PurePosixPath) -> _Listing:
        return self._listings.get(folder, _Listing())

    @cached_property
    def _versions(self) -> dict[PurePosixPath, tuple[int, str]]:
        return {PurePosixPath(name): (size, tag) for name, size, tag in versions_below(self._uri)}

    @cached_property
    def _listings(self) -> dict[PurePosixPath, _Listing]:
        return _listings(self._versions)

    def close(self) -> None: ...


def _opened(path: Path | str) -> _Files:
    """Open a folder, a zip file or, given as text, an address in a bucket."""
    name = str(path).lower()
    if isinstance(path, Path) and path.is_dir():
        return _opened_folder(path)
    if isinstance(path, Path) and not path.exists():
        raise _missing(path)
    if name.endswith(_TARS):
        raise BadData(f"{path}: tar files are not read; unpack all of the set into one folder and give that")
    if isinstance(path, Path):
        return _Zips([_opened_zip(path, path)])
    return _Zips([_opened_copy(path)]) if name.endswith(".zip") else _Prefix(path)


def _opened_folder(path: Path) -> _Files:
    folder = _Folder(path)
    try:
        files, folders = folder.list(PurePosixPath())
    except OSError as error:
        raise BadData(f"{path}: not readable ({error}); expected a folder you may read") from None
    zips = [path / name for name in sorted(files) if name.lower().endswith(".zip")]
    return _Zips([_opened_zip(file, file) for file in zips]) if zips and not _visible(folders) else folder


def _opened_zip(file: Path, named: Path | str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (OSError, *_ZIP_ERRORS) as error:
        raise BadData(
            f"{named}: not readable as a zip file ({error}); give a whole zip or an unpacked folder"
        ) from None


def _opened_copy(uri: str) -> zipfile.ZipFile:
    """Open a zip file of a bucket from the cache of this node; it is copied there unless this version is there."""
    size, tag = version_of(uri)
    key = hashlib.sha256(f"{uri} {tag}".encode()).hexdigest()
    cache = NodeCache.of_this_node()
    if not (cache.root / key).exists():
        print(f"copying {uri} ({size / 1e9:.1f} GB) to {cache.root}", flush=True)
    with cache.fetched(uri, key, size, "give a whole zip", verify=False) as file:
        return _opened_zip(file, uri)


def _missing(path: Path | str) -> BadData:
    return BadData(f"{path}: no such folder or zip file; give the one that has the images and annotations")


def _visible(folders: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in folders if not name.startswith((".", "__MACOSX")))


def _points_outside(path: PurePosixPath) -> bool:
    return path.is_absolute() or ".." in path.parts


def _listings(members: Iterable[PurePosixPath]) -> dict[PurePosixPath, _Listing]:
    """Group files by folder."""
    files: dict[PurePosixPath, set[str]] = {}
    folders: dict[PurePosixPath, set[str]] = {}
    for path in members:
        files.setdefault(path.parent, set()).add(path.name)
    for folder in files:
        for child in (folder, *folder.parents):
            folders.setdefault(child.parent, set()).add(child.name)
    return {
        folder: _Listing(frozenset(files.get(folder, ())), frozenset(folders.get(folder, set()) - {""}))
        for folder in {*files, *folders}
    }
