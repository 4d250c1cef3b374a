"""The door to files, local or in an object store: every output appears whole or not at all.

A place is a local path or `s3://bucket/prefix`. Credentials, region and endpoint of an object store come from where
boto3 looks for them: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, profiles, web identity. Without an endpoint of AWS's own
naming, MLFLOW_S3_ENDPOINT_URL counts, so that a cluster set up for MLflow needs no second setting.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from csc.errors import BadData, StoreUnavailable

__all__ = [
    "RemoteFile",
    "absolute",
    "atomic_file",
    "atomic_folder",
    "atomic_place",
    "delete",
    "download",
    "exists",
    "is_remote",
    "join",
    "list_below",
    "local_path",
    "open_remote",
    "parent_of",
    "read_bytes",
    "read_json",
    "sha256_file",
    "upload",
    "version_of",
    "versions_below",
    "writable",
    "write_bytes",
    "write_json",
]

_ATTEMPTS = 5
_READ_AHEAD = 256 << 10  # of a file in a bucket
_LONGEST_READ = 16 << 20  # of one request, so that a long read does not hold its bytes twice

# What a store answers, and what it means for the person who reads it.
_REFUSALS = {
    ("NoSuchKey",): "no such object; check the name",
    ("NoSuchBucket",): "no such bucket; check its name and the endpoint (AWS_ENDPOINT_URL_S3)",
    ("AccessDenied", "Forbidden", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"): (
        "access denied; check the keys (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or the profile) "
        "and what they may do in this bucket"
    ),
    ("ExpiredToken", "InvalidToken"): "the session token is no longer valid; get a new one",
    ("RequestTimeTooSkewed",): "the clock of this machine differs from that of the store; set it right",
    ("PreconditionFailed", "412"): "changed while it was read; start again when nobody writes there",
    ("PermanentRedirect", "AuthorizationHeaderMalformed", "301", "400"): (
        "the store expects another region or endpoint; check AWS_DEFAULT_REGION and AWS_ENDPOINT_URL_S3"
    ),
}


class _NoSuchFile(BadData):
    """A place that can be reached and has no such file."""


def is_remote(uri: str | os.PathLike[str]) -> bool:
    """Whether a place is in an object store; an address of an unknown kind is refused by name."""
    text = os.fspath(uri)
    scheme, separator, _ = text.partition("://")
    if separator and scheme not in ("file", "s3"):
        raise BadData(
            f"{text}: '{scheme}://' is not a place this version can read or write; "
            "use a local or mounted path or s3://bucket/prefix"
        )
    return bool(separator) and scheme == "s3"


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Turn a path or `file://` address into a local path; other places are refused by name."""
    text = os.fspath(uri)
    if is_remote(uri):
        raise BadData(f"{text}: 's3://' is not a place for this; use a local or mounted path")
    try:
        path = Path(text.removeprefix("file://")).expanduser()
        path.exists()  # a name that no file can have
    except (RuntimeError, OSError) as error:
        raise BadData(f"{text}: not a usable path ({getattr(error, 'strerror', None) or error})") from None
    return path


def absolute(place: str | os.PathLike[str]) -> str:
    """The same place, whatever folder a step runs in."""
    return os.fspath(place).rstrip("/") if is_remote(place) else str(local_path(place).absolute())


def join(place: str | os.PathLike[str], *names: str) -> str:
    """The address of something below a place."""
    if is_remote(place):
        return "/".join([os.fspath(place).rstrip("/"), *names])
    return str(local_path(place).joinpath(*names))


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill beside `target`; rename it to `target` when the block ends well, drop it otherwise."""
    with writable(target):
        target = target.resolve()  # links stand for the folder they lead to
        if target == Path.cwd():
            raise BadData("cannot write the folder this command runs in; name it from outside")
    with parent_of(target):
        with writable(target):
            if target.exists() and not target.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is in its place")
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        old = aside.with_name(f"{aside.name}.old")
        try:
            yield aside
            aside.chmod(0o755)
            with writable(target):
                if target.is_dir():
                    target.replace(old)
                aside.replace(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Give a file name to write beside `target`; rename it to `target` when the block ends well, drop it otherwise."""
    with parent_of(target):
        with writable(target):
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
def atomic_place(place: str) -> Iterator[Path]:
    """Give a file name to write; what was written appears at `place`, local or remote, when the block ends well."""
    if not is_remote(place):
        with atomic_file(local_path(place)) as aside:
            yield aside
        return
    with tempfile.TemporaryDirectory(prefix="csc-upload-") as folder:
        aside = Path(folder) / "file"
        yield aside
        upload(aside, place)


@contextlib.contextmanager
def parent_of(target: Path) -> Iterator[None]:
    """Make the folders above `target`, where the final rename stays inside one file system; drop unused ones again."""
    with writable(target):
        missing = [folder for folder in target.absolute().parents if not folder.exists()]
    try:
        with writable(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(target.parent, os.W_OK):
                raise PermissionError(errno.EACCES, "permission denied")
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # not empty: in use
                folder.rmdir()


@contextlib.contextmanager
def writable(target: Path) -> Iterator[None]:
    """Say in one line why a place cannot be written."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room or choose another disk" if full else "choose a folder you may write to"
        raise BadData(f"cannot write {target}: {error.strerror or error}; {remedy}") from None


def write_json(target: Path, content: Any) -> None:
    """Write `content` as readable JSON, whole or not at all; a number that is not finite is an error."""
    with writable(target), atomic_file(target) as aside:
        aside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(place: str | os.PathLike[str]) -> Any:
    """Read JSON; a missing or broken file is reported by its name."""
    try:
        return json.loads(read_bytes(place).decode("utf-8"))
    except ValueError as error:
        raise BadData(f"{place}: not readable as JSON ({error})") from None


def read_bytes(place: str | os.PathLike[str]) -> bytes:
    """The content of a file; one that is missing or not readable is reported by its name."""
    if is_remote(place):
        return _get(os.fspath(place))
    path = local_path(place)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _NoSuchFile(f"{path}: no such file") from None
    except OSError as error:
        raise BadData(f"{path}: not readable ({error.strerror or error})") from None


def write_bytes(place: str | os.PathLike[str], content: bytes) -> None:
    """Write a small file, whole or not at all."""
    if is_remote(place):
        bucket, key = _bucket_and_key(place)
        with _store(place) as client:
            client.put_object(Bucket=bucket, Key=key, Body=content)
        return
    path = local_path(place)
    with writable(path), atomic_file(path) as aside:
        aside.write_bytes(content)


def exists(place: str | os.PathLike[str]) -> bool:
    """Whether there is a file of this name; a bucket that is missing or closed to us is an error."""
    if not is_remote(place):
        path = local_path(place)
        try:
            return path.is_file()
        except OSError as error:  # for instance in a folder that is closed to us
            raise BadData(f"{path}: not readable ({error.strerror or error})") from None
    try:
        _head(place)
    except _NoSuchFile:
        return False
    return True


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def upload(path: Path, uri: str) -> None:
    """Copy a local file into a bucket, in parts if it is long; the object appears whole or not at all."""
    bucket, key = _bucket_and_key(uri)
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: not readable ({error.strerror or error})") from None
    with file, _store(uri) as client:
        client.upload_fileobj(file, bucket, key)


def download(uri: str, path: Path) -> None:
    """Copy an object to a local file, in parts if it is long; the file appears whole or not at all."""
    bucket, key = _bucket_and_key(uri)
    with writable(path), atomic_file(path) as aside, _store(uri) as client:
        client.download_file(bucket, key, str(aside))


def list_below(uri: str) -> Iterator[tuple[str, int]]:
    """Name, relative to the prefix, and size of every object below it, in the order of the names."""
    return ((name, size) for name, size, _ in versions_below(uri))


def versions_below(uri: str) -> Iterator[tuple[str, int, str]]:
    """What `list_below` tells, and the ETag of every object, which changes with its content."""
    bucket, key = _bucket_and_key(uri)
    prefix = f"{key.rstrip('/')}/" if key else ""
    with _store(uri) as client:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):  # what consoles make to show an empty folder
                    yield item["Key"].removeprefix(prefix), item["Size"], item["ETag"]


def version_of(uri: str) -> tuple[int, str]:
    """Size and ETag of one object."""
    head = _head(uri)
    return int(head["ContentLength"]), str(head["ETag"])


def delete(uri: str) -> None:
    """Remove an object; one that is not there is no error."""
    bucket, key = _bucket_and_key(uri)
    with _store(uri) as client:
        client.delete_object(Bucket=bucket, Key=key)


def open_remote(uri: str) -> "RemoteFile":
    """Open an object as a file that can be read from any position, without downloading all of it."""
    return RemoteFile(uri)


class RemoteFile(io.BufferedReader):
    """An object in a bucket as a file to read; if it is replaced while it is open, reading is an error."""

    def __init__(self, uri: str) -> None:
        self._object = _RangedObject(uri)
        super().__init__(self._object, _READ_AHEAD)

    def read_at(self, start: int, end: int) -> bytes:
        """The bytes of a range in one request; threads need not wait for each other."""
        return self._object.range(start, end)


class _RangedObject(io.RawIOBase):
    """An object as a raw file: each read is a request for a range of the version that was opened."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._size, self._version = version_of(uri)
        self._position = 0

    def range(self, start: int, end: int) -> bytes:
        """The bytes from one position to another, as far as there are any."""
        end = min(end, self._size)
        return _get(self._uri, Range=f"bytes={start}-{end - 1}", IfMatch=self._version) if start < end else b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, "negative position")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        content = self._next(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self._next(_LONGEST_READ), b""))

    def _next(self, size: int) -> bytes:
        content = self.range(self._position, self._position + min(size, _LONGEST_READ))
        self._position += len(content)
        return content


def _bucket_and_key(uri: str | os.PathLike[str]) -> tuple[str, str]:
    text = os.fspath(uri)
    bucket, _, key = text.removeprefix("s3://").partition("/")
    if not is_remote(text) or not bucket:
        raise BadData(f"{text}: not an address in an object store; expected s3://bucket/name")
    return bucket, key


def _head(uri: str | os.PathLike[str]) -> Any:
    bucket, key = _bucket_and_key(uri)
    with _store(uri) as client:
        return client.head_object(Bucket=bucket, Key=key)


def _get(uri: str, **options: str) -> bytes:
    """The content of an object; asked for again when the connection breaks after the answer has begun."""
    bucket, key = _bucket_and_key(uri)
    with _store(uri) as client:
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        for _ in range(_ATTEMPTS - 1):
            answer = client.get_object(Bucket=bucket, Key=key, **options)
            with contextlib.suppress(HTTPClientError, IncompleteReadError):
                return bytes(answer["Body"].read())
        return bytes(client.get_object(Bucket=bucket, Key=key, **options)["Body"].read())


@functools.cache
def _client(process: int) -> Any:
    """The S3 client of a process: shared by its threads, made anew after a fork."""
    import boto3
    from botocore.config import Config

    own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=32,
    )
    endpoint = None if own else os.environ.get("MLFLOW_S3_ENDPOINT_URL") or None
    return boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)


@contextlib.contextmanager
def _store(uri: str | os.PathLike[str]) -> Iterator[Any]:
    """Give the client of this process; say in one line why the store refused or did not answer."""
    text = os.fspath(uri)
    where = text if text.isprintable() else ascii(text)
    try:
        from boto3.exceptions import RetriesExceededError
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise BadData(f"{where}: an object store needs boto3; install 'csc[data]' or use a local path") from None
    try:
        client = _client(os.getpid())
    except BotoCoreError as error:
        raise BadData(f"{where}: the AWS settings of this machine are not usable ({_line(error)})") from None
    except ValueError:  # its words may hold a password
        raise BadData(f"{where}: the endpoint is no address; AWS_ENDPOINT_URL_S3 must look like http://host") from None
    try:
        yield client
    except ClientError as error:
        kind, reason = _refusal(client, error, _bucket_and_key(uri)[0])
        raise kind(f"{where}: {reason}") from None
    except (BotoCoreError, RetriesExceededError) as error:
        kind, reason = _failure(client, getattr(error, "last_exception", error))
        raise kind(f"{where}: {reason}") from None


def _refusal(client: Any, error: Any, bucket: str) -> tuple[type[BadData], str]:
    """What an answer of the store that is an error means, and what to check."""
    code = str(error.response.get("Error", {}).get("Code"))
    if code == "404":  # the answer to a HEAD does not tell what is missing
        code = "NoSuchKey" if _has_bucket(client, bucket) else "NoSuchBucket"
    known = (reason for codes, reason in _REFUSALS.items() if code in codes)
    unknown = f"the object store at {_endpoint(client)} refused ({code}); try again later"
    if _may_pass(error, code):
        return StoreUnavailable, unknown
    return _NoSuchFile if code == "NoSuchKey" else BadData, next(known, unknown)


def _may_pass(error: Any, code: str) -> bool:
    """Whether an answer says that the store is overloaded or ill, not that it refuses; 501 is what it cannot do."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status in (408, 429) or (status >= 500 and status != 501) or code == "RequestTimeout"


def _has_bucket(client: Any, bucket: str) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    with contextlib.suppress(BotoCoreError):
        try:
            client.head_bucket(Bucket=bucket)
        except ClientError as error:
            return str(error.response.get("Error", {}).get("Code")) != "404"
    return True


def _failure(client: Any, error: Exception) -> tuple[type[BadData], str]:
    """What it means that there was no answer; the library's own words only where they can hold no key and no header."""
    from botocore import exceptions

    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return BadData, "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile (AWS_PROFILE)"
    if isinstance(error, exceptions.CredentialRetrievalError):
        return BadData, "the credentials could not be fetched; check the profile or the service account"
    if isinstance(error, exceptions.SSLError):
        where = _endpoint(client)
        return BadData, f"no safe connection to {where}; check the endpoint and the certificates (AWS_CA_BUNDLE)"
    if type(error) is exceptions.HTTPClientError:
        return BadData, "the request could not be sent; check the keys for blanks and line ends, and the endpoint"
    if isinstance(error, exceptions.BotoCoreError) and not isinstance(
        error, exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError
    ):
        return BadData, f"the request was not possible ({_line(error)})"
    return StoreUnavailable, (
        f"the object store at {_endpoint(client)} does not answer; "
        "check the endpoint (AWS_ENDPOINT_URL_S3) and the network"
    )


def _endpoint(client: Any) -> str:
    parts = urlsplit(client.meta.endpoint_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
