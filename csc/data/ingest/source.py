"""Raw data to ingest: a folder, a zip file or a folder of zip files, local or in a bucket, read without unpacking."""

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from csc.data.cache import NodeCache
from csc.errors import BadData
from csc.storage import (
    is_remote,
    join,
    list_below,
    local_path,
    read_bytes,
    read_regular,
    regular_file,
    too_long_error,
    version_of,
    versions_below,
)

__all__ = ["LONGEST_TABLE", "DamagedFile", "Source"]

_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_ARCHIVES = (".zip", *_TARS)
LONGEST = 100_000_000  # bytes of an image or of the annotation of one image
LONGEST_TABLE = 8_000_000_000  # bytes of a file with the annotations of a whole set; that of COCO has 0.4


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
        self._zips: list[zipfile.ZipFile] = []
        self._files = self._opened()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        for archive in self._zips:
            archive.close()

    def __reduce__(self) -> tuple[type["Source"], tuple[str]]:
        return Source, (str(self.path),)

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request to an object store."""
        return is_remote(self.path) and not self._zips

    def names(self, folder: str | PurePosixPath = "") -> frozenset[str]:
        """The names of the files directly in a folder; empty when there is no such folder."""
        return self._list(PurePosixPath(folder)).files

    def folders(self, folder: str | PurePosixPath = "") -> frozenset[str]:
        """The names of the folders directly in a folder, without hidden ones and what macOS adds to a zip."""
        return _visible(self._list(PurePosixPath(folder)).folders)

    def tops(self) -> list[PurePosixPath]:
        """Where a set may begin: in the source itself, or in one of its folders."""
        return [PurePosixPath(), *(PurePosixPath(name) for name in sorted(self.folders()))]

    def has(self, name: str | PurePosixPath) -> bool:
        """Whether there is a file of this name."""
        path = PurePosixPath(name)
        return path.name in self.names(path.parent)

    def read(self, name: str | PurePosixPath, limit: int = LONGEST) -> bytes:
        """The content of one file, which may have at most so many bytes."""
        path = PurePosixPath(name)
        try:
            if _points_outside(path):
                raise FileNotFoundError
            return self._files.read(path, limit)
        except FileNotFoundError:
            raise BadData(f"{self.where(path)}: no such file") from None
        except OSError as error:
            raise BadData(f"{self.where(path)}: not readable ({error}); copy or download it again") from None
        except _ZIP_ERRORS as error:
            raise DamagedFile(f"{self.where(path)}: not readable ({error}); copy or download it again") from None

    def version(self, name: str | PurePosixPath) -> "Version":
        """Size, and modification time, checksum or ETag of a file: differs when the content has changed."""
        return self._files.version(PurePosixPath(name))

    def still_packed(self) -> str:
        """Text for a "not found" error that names archives which are not looked into."""
        found = sorted(name for name in self.names() if name.lower().endswith(_ARCHIVES))
        return f" (unpack {', '.join(found)} here first)" if found else ""

    def where(self, name: str | PurePosixPath) -> str:
        """How an error names a file: in one line, whatever characters the name has."""
        path = PurePosixPath(name)
        text = f"{self.path}/{path}" if path.parts else str(self.path)
        return text if text.isprintable() else ascii(text)

    def _opened(self) -> "_Folder | _Members":
        """Open a folder, a zip file or, given as text, an address in a bucket."""
        if isinstance(self.path, Path) and self.path.is_dir():
            return self._opened_folder(self.path)
        if isinstance(self.path, Path) and not self.path.exists():
            raise self._missing()
        name = str(self.path).lower()
        if name.endswith(_TARS):
            raise BadData(f"{self.path}: tar files are not read; unpack all of the set into one folder and give that")
        if name.endswith((".json", ".csv")):
            raise BadData(f"{self.path}: one file of a set; give the folder that has it and the images")
        if isinstance(self.path, Path):
            self._zips = [_opened_zip(self.path, self.path)]
        elif name.endswith(".zip"):
            self._zips = [_opened_copy(self.path)]
        else:
            return self._opened_prefix(self.path)
        return _members_of(self._zips)

    def _opened_folder(self, path: Path) -> "_Folder | _Members":
        folder = _Folder(path)
        try:
            files, folders = folder.list(PurePosixPath())
        except OSError as error:
            raise BadData(f"{path}: not readable ({error}); expected a folder you may read") from None
        zips = [path / name for name in sorted(files) if name.lower().endswith(".zip")]
        if not zips or _visible(folders):
            return folder
        self._zips = [_opened_zip(file, file) for file in zips]
        return _members_of(self._zips)

    def _opened_prefix(self, uri: str) -> "_Members":
        if next(list_below(uri), None) is None:
            raise self._missing()
        return _Members(
            lambda path, limit: read_bytes(join(uri, str(path)), limit),
            lambda: {PurePosixPath(name): (size, tag) for name, size, tag in versions_below(uri)},
        )

    def _missing(self) -> BadData:
        return BadData(f"{self.path}: no such folder or zip file; give the one that has the images and annotations")

    def _list(self, folder: PurePosixPath) -> "_Listing":
        if folder not in self._listings:
            try:
                self._listings[folder] = _Listing() if _points_outside(folder) else self._files.list(folder)
            except (OSError, ValueError) as error:
                raise BadData(f"{self.where(folder)}: not readable ({error}); expected a folder you may read") from None
        return self._listings[folder]


Version = tuple[int, int | str]


class _Listing(NamedTuple):
    """The names directly in one folder."""

    files: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


class _Folder:
    """The files below a local folder; a missing file is a FileNotFoundError, a missing folder is empty."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: PurePosixPath, limit: int) -> bytes:
        return read_regular(self._root / path, limit)

    def version(self, path: PurePosixPath) -> Version:
        try:
            stat = (self._root / path).stat()
        except OSError:
            return 0, 0  # reading the file raises the error
        return stat.st_size, stat.st_mtime_ns

    def list(self, folder: PurePosixPath) -> _Listing:
        files: set[str] = set()
        folders: set[str] = set()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).add(entry.name)
        return _Listing(frozenset(files), frozenset(folders))


class _Members:
    """The members of zip files, or the objects below a prefix; these are listed when a listing is first asked for."""

    def __init__(
        self, read: Callable[[PurePosixPath, int], bytes], versions: Callable[[], dict[PurePosixPath, Version]]
    ) -> None:
        self.read = read
        self._find_versions = versions

    def version(self, path: PurePosixPath) -> Version:
        return self._versions.get(path, (0, ""))

    def list(self, folder: PurePosixPath) -> _Listing:
        return self._listings.get(folder, _Listing())

    @cached_property
    def _versions(self) -> dict[PurePosixPath, Version]:
        return self._find_versions()

    @cached_property
    def _listings(self) -> dict[PurePosixPath, _Listing]:
        files: dict[PurePosixPath, set[str]] = {}
        folders: dict[PurePosixPath, set[str]] = {}
        for path in self._versions:
            files.setdefault(path.parent, set()).add(path.name)
        for folder in files:
            for child in (folder, *folder.parents):
                folders.setdefault(child.parent, set()).add(child.name)
        return {
            folder: _Listing(frozenset(files.get(folder, ())), frozenset(folders.get(folder, set()) - {""}))
            for folder in {*files, *folders}
        }


def _members_of(archives: Sequence[zipfile.ZipFile]) -> _Members:
    """The members of some zip files; of a name that several have, the first counts."""
    members: dict[PurePosixPath, tuple[zipfile.ZipFile, zipfile.ZipInfo]] = {}
    for archive in archives:
        for member in archive.infolist():
            if member.filename and not member.is_dir():  # a damaged list may have members without a name
                members.setdefault(PurePosixPath(member.filename), (archive, member))

    def read(path: PurePosixPath, limit: int) -> bytes:
        if path not in members:
            raise FileNotFoundError
        archive, member = members[path]
        if member.file_size > limit:
            raise too_long_error(member.file_size, limit)
        return archive.read(member)  # never more than it says

    return _Members(read, lambda: {path: (member.file_size, member.CRC) for path, (_, member) in members.items()})


def _opened_zip(file: Path, named: Path | str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(regular_file(file))
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


def _visible(folders: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in folders if not name.startswith((".", "__MACOSX")))


def _points_outside(path: PurePosixPath) -> bool:
    return path.is_absolute() or ".." in path.parts
