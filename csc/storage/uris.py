"""Addresses of files: a local path, `file://path` or `s3://bucket/key`."""

import os
from pathlib import Path

from csc.errors import BadData

__all__ = ["NoSuchFile", "absolute", "bucket_and_key", "is_remote", "join", "local_path"]


class NoSuchFile(BadData):
    """A folder or bucket that can be read has no such file."""


def is_remote(uri: str | os.PathLike[str]) -> bool:
    """Whether an address is in an object store; one of an unknown kind is refused."""
    text = os.fspath(uri)
    scheme, separator, rest = text.partition("://")
    _, at, host = rest.partition("/")[0].rpartition("@")
    if separator and at and scheme != "file":
        raise BadData(
            f"{scheme}://{host}: an address must not contain a name or a password; "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        )
    if separator and scheme not in ("file", "s3"):
        raise BadData(
            f"{text}: '{scheme}://' cannot be read or written by this version; "
            "use a local or mounted path or s3://bucket/prefix"
        )
    return bool(separator) and scheme == "s3"


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Turn a path or `file://` address into a local path; `s3://` is refused."""
    text = os.fspath(uri)
    if is_remote(uri):
        raise BadData(f"{text}: 's3://' is not possible here; use a local or mounted path")
    try:
        path = Path(text.removeprefix("file://")).expanduser()
        path.exists()  # raises for a name that no file can have
    except (RuntimeError, OSError) as error:
        raise BadData(f"{text}: not a usable path ({getattr(error, 'strerror', None) or error})") from None
    return path


def absolute(uri: str | os.PathLike[str]) -> str:
    """The same address, independent of the working directory."""
    return os.fspath(uri).rstrip("/") if is_remote(uri) else str(local_path(uri).absolute())


def join(uri: str | os.PathLike[str], *names: str) -> str:
    """The address of a file below a folder or prefix."""
    if is_remote(uri):
        return "/".join([os.fspath(uri).rstrip("/"), *names])
    return str(local_path(uri).joinpath(*names))


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Bucket and key of an `s3://` address."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not is_remote(uri) or not bucket:
        raise BadData(f"{uri}: not an address in an object store; expected s3://bucket/name")
    return bucket, key
