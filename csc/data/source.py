"""Where raw data lies: a folder or a zip file, read the same way and without unpacking."""

import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from csc.errors import BadData
from csc.storage import local_path

__all__ = ["Source"]

_READ_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)


class _Listing(NamedTuple):
    """What lies directly in one folder."""

    files: frozenset[str]
    folders: frozenset[str]


class Source:
    """A folder or a zip file; names inside are relative, with forward slashes, and never lead out of it."""

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self.path = local_path(uri)
        self._listings: dict[PurePosixPath, _Listing] = {}
        self._zip: zipfile.ZipFile | None = None
        self._members: dict[PurePosixPath, str] = {}
        if self.path.is_dir():
            return
        if not self.path.exists():
            raise BadData(
                f"{self.path}: no such folder or zip file; give the one that holds the images and annotations"
            )
        try:
            self._zip = zipfile.ZipFile(self.path)
        except _READ_ERRORS as error:
            raise BadData(
                f"{self.path}: not readable as a zip file ({error}); give a whole zip or an unpacked folder"
            ) from None
        self._members = {PurePosixPath(name): name for name in self._zip.namelist() if not name.endswith("/")}
        self._listings = _listings(self._members)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        if self._zip is not None:
            self._zip.close()

    def names(self, folder: str | PurePosixPath = "") -> frozenset[str]:
        """The names of the files directly in a folder; empty when there is no such folder."""
        return self._list(PurePosixPath(folder)).files

    def folders(self, folder: str | PurePosixPath = "") -> frozenset[str]:
        """The names of the folders directly in a folder, without hidden ones and what macOS adds to a zip."""
        found = self._list(PurePosixPath(folder)).folders
        return frozenset(name for name in found if not name.startswith((".", "__MACOSX")))

    def has(self, name: str | PurePosixPath) -> bool:
        """Whether there is a file of this name."""
        path = PurePosixPath(name)
        return path.name in self.names(path.parent)

    def read(self, name: str | PurePosixPath) -> bytes:
        """The content of one file."""
        path = PurePosixPath(name)
        if not self.has(path):
            raise BadData(f"{self.where(path)}: no such file")
        try:
            return (self.path / path).read_bytes() if self._zip is None else self._zip.read(self._members[path])
        except _READ_ERRORS as error:
            raise BadData(f"{self.where(path)}: not readable ({error}); copy or download it again") from None

    def where(self, name: str | PurePosixPath) -> str:
        """How an error names a file: in one line, whatever characters the name has."""
        text = f"{self.path}/{PurePosixPath(name)}"
        return text if text.isprintable() else ascii(text)

    def _list(self, folder: PurePosixPath) -> _Listing:
        if folder not in self._listings:
            self._listings[folder] = self._scan(folder)
        return self._listings[folder]

    def _scan(self, folder: PurePosixPath) -> _Listing:
        """List one folder of the file system; anything outside the source counts as empty."""
        files: set[str] = set()
        folders: set[str] = set()
        if self._zip is None and not folder.is_absolute() and ".." not in folder.parts:
            try:
                with os.scandir(self.path / folder) as entries:
                    for entry in entries:
                        (folders if entry.is_dir() else files).add(entry.name)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except (OSError, ValueError) as error:
                raise BadData(f"{self.where(folder)}: not readable ({error}); expected a folder you may read") from None
        return _Listing(frozenset(files), frozenset(folders))


def _listings(members: Iterable[PurePosixPath]) -> dict[PurePosixPath, _Listing]:
    """Sort the members of a zip into folders."""
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
