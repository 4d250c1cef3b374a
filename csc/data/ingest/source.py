"""Where raw data lies: a folder, a zip file or a folder of zip files, here or in a bucket, read without unpacking."""

import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Protocol

from csc.errors import BadData
from csc.storage import is_remote, join, list_below, local_path, open_remote, read_bytes, versions_below

__all__ = ["DamagedFile", "Source"]

_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_ARCHIVES = (".zip", *_TARS)
_HEADER = 30
_ENCRYPTED = 1


class DamagedFile(BadData):
    """A file in a zip whose bytes are not those that were packed; reading it again will not help."""


class Source:
    """A folder or a zip file; names inside are relative, with forward slashes, and never lead out of it.

    A local folder with zip files and no folders, as a download leaves it, is read as if they were unpacked there.

    In a bucket, an address that ends in `.zip` is a zip file, read by ranges; any other is a prefix, listed once and
    only if somebody asks what there is. Threads may share a source. Another process needs one of its own, opened there
    or pickled; for a bucket that costs a few requests.
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
            if _leads_out(path):
                raise FileNotFoundError
            return self._files.read(path)
        except FileNotFoundError:
            raise BadData(f"{self.where(path)}: no such file") from None
        except OSError as error:
            raise BadData(f"{self.where(path)}: not readable ({error}); copy or download it again") from None
        except _ZIP_ERRORS as error:
            raise DamagedFile(f"{self.where(path)}: not readable ({error}); copy or download it again") from None

    def version(self, name: str | PurePosixPath) -> tuple[int, int | str]:
        """What changes with the content of a file: its size, and its time of change, checksum or ETag."""
        return self._files.version(PurePosixPath(name))

    def still_packed(self) -> str:
        """What to add when something is not found: archives that lie here and are not looked into."""
        found = sorted(name for name in self.names() if name.lower().endswith(_ARCHIVES))
        return f" (unpack {', '.join(found)} here first)" if found else ""

    def where(self, name: str | PurePosixPath) -> str:
        """How an error names a file: in one line, whatever characters the name has."""
        text = f"{self.path}/{PurePosixPath(name)}"
        return text if text.isprintable() else ascii(text)

    def _list(self, folder: PurePosixPath) -> "_Listing":
        if folder not in self._listings:
            try:
                self._listings[folder] = _Listing() if _leads_out(folder) else self._files.list(folder)
            except (OSError, ValueError) as error:
                raise BadData(f"{self.where(folder)}: not readable ({error}); expected a folder you may read") from None
        return self._listings[folder]


class _Listing(NamedTuple):
    """What lies directly in one folder."""

    files: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


class _Files(Protocol):
    """Files by relative path; one that is not there is a FileNotFoundError, a folder that is not there is empty."""

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
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    (folders if entry.is_dir() else files).add(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return _Listing(frozenset(files), frozenset(folders))

    def close(self) -> None: ...


class _Zip:
    """The members of a zip file; threads that read wait for each other."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        try:
            self._zip = zipfile.ZipFile(file)
        except BaseException:
            file.close()
            raise
        self._members = {PurePosixPath(info.filename): info for info in self._zip.infolist() if not info.is_dir()}
        self._listings = _listings(self._members)

    def read(self, path: PurePosixPath) -> bytes:
        if path not in self._members:
            raise FileNotFoundError
        return self._content(self._members[path])

    def version(self, path: PurePosixPath) -> tuple[int, int]:
        return self._members[path].file_size, self._members[path].CRC

    def _content(self, member: zipfile.ZipInfo) -> bytes:
        return self._zip.read(member)

    def list(self, folder: PurePosixPath) -> _Listing:
        return self._listings.get(folder, _Listing())

    def close(self) -> None:
        self._zip.close()
        self._file.close()


class _RemoteZip(_Zip):
    """The members of a zip file in a bucket: each is one request, and threads do not wait for each other."""

    def __init__(self, uri: str) -> None:
        self._object = open_remote(uri)
        super().__init__(self._object)
        starts = sorted([*(member.header_offset for member in self._zip.infolist()), self._zip.start_dir])
        self._ends = dict(pairwise(starts))

    def _content(self, member: zipfile.ZipInfo) -> bytes:
        if member.flag_bits & _ENCRYPTED or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return super()._content(member)
        start = member.header_offset
        return _unpacked(member, self._object.read_at(start, self._ends[start]))


def _unpacked(member: zipfile.ZipInfo, content: bytes) -> bytes:
    """Decode one member from its bytes in the zip file: a header of 30 bytes, name, extra field, data."""
    if content[:4] != b"PK\x03\x04" or len(content) < _HEADER:
        raise zipfile.BadZipFile("no header of a file where one should be")
    name, extra = struct.unpack_from("<HH", content, _HEADER - 4)
    start = _HEADER + name + extra
    data = content[start : start + member.compress_size]
    if member.compress_type == zipfile.ZIP_DEFLATED:
        data = zlib.decompress(data, -zlib.MAX_WBITS)
    if (len(data), zlib.crc32(data)) != (member.file_size, member.CRC):
        raise zipfile.BadZipFile("wrong checksum")
    return data


class _Together:
    """Several zip files as one."""

    def __init__(self, zips: Sequence[_Zip]) -> None:
        self._zips = zips

    def _holding(self, path: PurePosixPath) -> _Zip:
        for one in self._zips:
            if path.name in one.list(path.parent).files:
                return one
        raise FileNotFoundError

    def read(self, path: PurePosixPath) -> bytes:
        return self._holding(path).read(path)

    def version(self, path: PurePosixPath) -> tuple[int, int]:
        return self._holding(path).version(path)

    def list(self, folder: PurePosixPath) -> _Listing:
        listings = [one.list(folder) for one in self._zips]
        return _Listing(
            frozenset().union(*(listing.files for listing in listings)),
            frozenset().union(*(listing.folders for listing in listings)),
        )

    def close(self) -> None:
        for one in self._zips:
            one.close()


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


def _opened(place: Path | str) -> _Files:
    """Tell a folder from a zip file; refuse what is neither."""
    name = str(place).lower()
    if isinstance(place, Path) and place.is_dir():
        return _opened_folder(place)
    if isinstance(place, Path) and not place.exists():
        raise _missing(place)
    if name.endswith(_TARS):
        raise BadData(f"{place}: tar files are not read; unpack all of the set into one folder and give that")
    if isinstance(place, str) and not name.endswith(".zip"):
        return _Prefix(place)
    return _opened_zip(place)


def _opened_folder(place: Path) -> _Files:
    folder = _Folder(place)
    try:
        files, folders = folder.list(PurePosixPath())
    except OSError as error:
        raise BadData(f"{place}: not readable ({error}); expected a folder you may read") from None
    zips = sorted(name for name in files if name.lower().endswith(".zip"))
    return _Together([_opened_zip(place / name) for name in zips]) if zips and not _visible(folders) else folder


def _opened_zip(place: Path | str) -> _Zip:
    try:
        return _RemoteZip(place) if isinstance(place, str) else _Zip(place.open("rb"))
    except (OSError, *_ZIP_ERRORS) as error:
        raise BadData(
            f"{place}: not readable as a zip file ({error}); give a whole zip or an unpacked folder"
        ) from None


def _missing(place: Path | str) -> BadData:
    return BadData(f"{place}: no such folder or zip file; give the one that holds the images and annotations")


def _visible(folders: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in folders if not name.startswith((".", "__MACOSX")))


def _leads_out(path: PurePosixPath) -> bool:
    return path.is_absolute() or ".." in path.parts


def _listings(members: Iterable[PurePosixPath]) -> dict[PurePosixPath, _Listing]:
    """Sort files into their folders."""
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
