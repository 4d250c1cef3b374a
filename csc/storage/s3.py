"""Objects of an S3 store.

Credentials, region and endpoint come from boto3's own settings: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, profiles, web
identity. Without an AWS endpoint setting, MLFLOW_S3_ENDPOINT_URL is used, so that a cluster set up for MLflow needs no
second setting.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from csc.errors import BadData, StoreUnavailable
from csc.storage.local import atomic_file, too_long_error
from csc.storage.uris import NoSuchFile, bucket_and_key

__all__ = ["delete", "download", "read", "upload", "version_of", "versions_below", "write"]

_ATTEMPTS = 5

# Error codes of a store, and what to tell the user.
_REFUSALS = {
    ("NoSuchKey",): "no such object; check the name",
    ("NoSuchBucket",): "no such bucket; check its name and the endpoint (AWS_ENDPOINT_URL_S3)",
    ("AccessDenied", "Forbidden", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"): (
        "access denied; check the keys (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or the profile) "
        "and what they may do in this bucket"
    ),
    ("ExpiredToken", "InvalidToken"): "the session token is no longer valid; get a new one",
    ("RequestTimeTooSkewed",): "the clock of this machine differs from that of the store; set it right",
    ("PermanentRedirect", "AuthorizationHeaderMalformed", "301", "400"): (
        "the store expects another region or endpoint; check AWS_DEFAULT_REGION and AWS_ENDPOINT_URL_S3"
    ),
}


def read(uri: str, limit: int | None = None) -> bytes:
    """The content of an object; requested again if the connection breaks in the middle of it."""
    with _store(uri) as (client, bucket, key):
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        for attempt in range(_ATTEMPTS):
            answer = client.get_object(Bucket=bucket, Key=key)
            if limit is not None and answer["ContentLength"] > limit:
                raise BadData(f"{uri}: {too_long_error(answer['ContentLength'], limit)}")
            try:
                return bytes(answer["Body"].read())
            except (HTTPClientError, IncompleteReadError):
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")


def write(uri: str, content: bytes) -> None:
    """Write a small object."""
    with _store(uri) as (client, bucket, key):
        client.put_object(Bucket=bucket, Key=key, Body=content)


def upload(path: Path, uri: str) -> None:
    """Copy a local file to an object, in parts if it is long; the object appears complete or not at all."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: not readable ({error.strerror or error})") from None
    with file, _store(uri) as (client, bucket, key):
        client.upload_fileobj(file, bucket, key)


def download(uri: str, path: Path) -> None:
    """Copy an object to a local file, in parts if it is long; the file appears complete or not at all."""
    with atomic_file(path) as temporary, _store(uri) as (client, bucket, key):
        client.download_file(bucket, key, str(temporary))


def versions_below(uri: str) -> Iterator[tuple[str, int, str]]:
    """Name (relative), size and ETag of every object below a prefix, sorted; the ETag changes with the content."""
    with _store(uri) as (client, bucket, key):
        prefix = f"{key.rstrip('/')}/" if key else ""
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):  # consoles make such objects to show an empty folder
                    yield item["Key"].removeprefix(prefix), item["Size"], item["ETag"]


def version_of(uri: str) -> tuple[int, str]:
    """Size and ETag of one object."""
    with _store(uri) as (client, bucket, key):
        head = client.head_object(Bucket=bucket, Key=key)
    return int(head["ContentLength"]), str(head["ETag"])


def delete(uri: str) -> None:
    """Remove an object; one that does not exist is no error."""
    with _store(uri) as (client, bucket, key):
        client.delete_object(Bucket=bucket, Key=key)


@functools.cache
def _client(process: int) -> Any:
    """The S3 client of a process: shared by its threads, created again after a fork."""
    import boto3
    from botocore.config import Config

    has_endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = None if has_endpoint else os.environ.get("MLFLOW_S3_ENDPOINT_URL") or None
    config = Config(
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=32,
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)


@contextlib.contextmanager
def _store(uri: str) -> Iterator[tuple[Any, str, str]]:
    """Yield the client of this process, bucket and key; turn errors of boto3 into one line that names the address."""
    bucket, key = bucket_and_key(uri)
    where = uri if uri.isprintable() else ascii(uri)
    try:
        from boto3.exceptions import RetriesExceededError
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise BadData(f"{where}: boto3 is not installed, though csc requires it; run: pip install boto3") from None
    try:
        client = _client(os.getpid())
    except BotoCoreError as error:
        raise BadData(f"{where}: the AWS settings of this machine are not usable ({error})") from None
    except ValueError:  # its text may contain a password
        raise BadData(f"{where}: the endpoint is no address; AWS_ENDPOINT_URL_S3 must look like http://host") from None
    try:
        yield client, bucket, key
    except ClientError as error:
        kind, reason = _refusal(client, error, bucket)
        raise kind(f"{where}: {reason}") from None
    except (BotoCoreError, RetriesExceededError) as error:
        kind, reason = _failure(client, getattr(error, "last_exception", error))
        raise kind(f"{where}: {reason}") from None


def _refusal(client: Any, error: Any, bucket: str) -> tuple[type[BadData], str]:
    """Error class and text for an error response of the store."""
    code = str(error.response.get("Error", {}).get("Code"))
    if code == "404":  # the response to a HEAD request does not say what is missing
        code = "NoSuchKey" if _has_bucket(client, bucket) else "NoSuchBucket"
    known = (reason for codes, reason in _REFUSALS.items() if code in codes)
    unknown = f"the object store at {_endpoint(client)} refused ({code}); try again later"
    if _is_temporary(error, code):
        return StoreUnavailable, unknown
    return NoSuchFile if code == "NoSuchKey" else BadData, next(known, unknown)


def _is_temporary(error: Any, code: str) -> bool:
    """Whether a response says that the store is overloaded or broken; 501 means that it lacks a feature."""
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
    """Error class and text for a request without a response; boto3's text only where it cannot contain a secret."""
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
        return BadData, f"the request was not possible ({error})"
    return StoreUnavailable, (
        f"the object store at {_endpoint(client)} does not answer; "
        "check the endpoint (AWS_ENDPOINT_URL_S3) and the network"
    )


def _endpoint(client: Any) -> str:
    parts = urlsplit(client.meta.endpoint_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
