import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from csc import storage
from csc.errors import BadData
from csc.storage import (
    atomic_file,
    atomic_folder,
    download,
    exists,
    is_remote,
    join,
    local_path,
    locked,
    read_bytes,
    read_json,
    sha256_file,
    upload,
    versions_below,
    write_bytes,
    write_json,
)
from tests.builders import contents

Writer = Callable[[Path], AbstractContextManager[Path]]
BOTH = pytest.mark.parametrize("atomic", [atomic_file, atomic_folder])


def fill(aside: Path, text: str) -> None:
    """Write a file, or two files into a folder."""
    if aside.is_dir():
        (aside / f"{text}-1").write_text(text)
        (aside / "images").mkdir()
        (aside / "images" / f"{text}-2").write_text(text)
    else:
        aside.write_text(text)


def content(target: Path) -> dict[str, bytes | None] | bytes | None:
    if target.is_dir():
        return contents(target)
    return target.read_bytes() if target.exists() else None


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(BadData) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def write(atomic: Writer, target: Path, text: str = "new") -> None:
    with atomic(target) as aside:
        fill(aside, text)


def write_and_fail(atomic: Writer, target: Path, error: type[BaseException]) -> None:
    with atomic(target) as aside:
        fill(aside, "new")
        raise error


@BOTH
def test_what_was_written_appears_under_its_name_and_nothing_else(atomic: Writer, tmp_path: Path):
    write(atomic, tmp_path / "deep" / "down" / "target")
    assert [path.name for path in (tmp_path / "deep" / "down").iterdir()] == ["target"]
    made = content(tmp_path / "deep" / "down" / "target")
    assert made in (b"new", {"new-1": b"new", "images": None, "images/new-2": b"new"})


@BOTH
def test_the_target_is_not_there_before_the_block_has_ended(atomic: Writer, tmp_path: Path):
    with atomic(tmp_path / "target") as aside:
        fill(aside, "new")
        assert not (tmp_path / "target").exists()
        assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        assert not list(tmp_path.glob("target*"))
    assert (tmp_path / "target").exists()


@BOTH
@pytest.mark.parametrize("error", [ValueError, BadData, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", ["nothing", "an older version"])
def test_an_error_leaves_everything_as_it_was(atomic: Writer, error: type[BaseException], before: str, tmp_path: Path):
    target = tmp_path / "target"
    if before != "nothing":
        write(atomic, target, "old")
    untouched = contents(tmp_path)
    with pytest.raises(error):
        write_and_fail(atomic, target, error)
    assert contents(tmp_path) == untouched


@BOTH
def test_an_error_leaves_no_folder_that_was_made_for_the_target(atomic: Writer, tmp_path: Path):
    (tmp_path / "deep").mkdir()
    with pytest.raises(ValueError):  # noqa: PT011
        write_and_fail(atomic, tmp_path / "deep" / "down" / "below" / "target", ValueError)
    assert contents(tmp_path) == {"deep": None}


@BOTH
def test_a_new_version_replaces_the_old_one_as_a_whole(atomic: Writer, tmp_path: Path):
    target = tmp_path / "target"
    write(atomic, target, "old")
    write(atomic, target, "new")
    assert content(target) in (b"new", {"new-1": b"new", "images": None, "images/new-2": b"new"})
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@BOTH
def test_at_every_moment_the_target_is_the_old_the_new_or_nothing(
    atomic: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process may be killed at any time; look at the target around each change of a name in the file system."""
    target = tmp_path / "target"
    write(atomic, target, "old")
    moments = [content(target)]

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = change(*arguments, **options)
            moments.append(content(target))
            return result

        return call

    with atomic(target) as aside:
        fill(aside, "new")
        for name in ("unlink", "remove", "rmdir", "rename", "replace"):
            monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.undo()
    assert len(moments) > 1
    assert all(moment in (moments[0], content(target), None) for moment in moments)


def test_an_interrupt_between_the_two_renames_of_a_folder_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "target"
    write(atomic_folder, target, "old")
    before, replace = content(target), Path.replace

    def interrupted(path: Path, to: Path) -> Path:
        if to == target and not path.name.endswith(".old"):
            raise KeyboardInterrupt
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(atomic_folder, target, "new")
    assert content(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@BOTH
def test_what_a_killed_process_left_behind_disturbs_nobody(atomic: Writer, tmp_path: Path):
    killed = atomic(tmp_path / "target")
    left = killed.__enter__()  # the block is never left
    fill(left, "half")
    write(atomic, tmp_path / "target")
    assert content(tmp_path / "target") in (b"new", {"new-1": b"new", "images": None, "images/new-2": b"new"})
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["target"]
    assert left.name.startswith(".")


@BOTH
def test_of_two_writers_at_once_the_later_one_stays_whole(atomic: Writer, tmp_path: Path):
    target = tmp_path / "target"
    with atomic(target) as one:
        with atomic(target) as other:
            assert one != other
            fill(one, "one")
            fill(other, "other")
        assert content(target) in (b"other", {"other-1": b"other", "images": None, "images/other-2": b"other"})
    assert content(target) in (b"one", {"one-1": b"one", "images": None, "images/one-2": b"one"})
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_others_may_read_what_was_written(tmp_path: Path):
    write(atomic_file, tmp_path / "file")
    write(atomic_folder, tmp_path / "folder")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o755


@BOTH
def test_a_path_below_a_file_is_refused_in_one_line(atomic: Writer, tmp_path: Path):
    (tmp_path / "file").write_text("the only copy")
    before = contents(tmp_path)
    message = refusal(lambda: write(atomic, tmp_path / "file" / "target"))
    assert message.startswith(f"cannot write {tmp_path / 'file' / 'target'}: ")
    assert "choose a folder you may write to" in message
    assert contents(tmp_path) == before


@BOTH
@pytest.mark.parametrize(
    "parts", [("x" * 300,), ("new", "x" * 300), ("x" * 300, "target")], ids=["name", "deep", "above"]
)
def test_a_name_that_is_too_long_is_refused_in_one_line(atomic: Writer, parts: tuple[str, ...], tmp_path: Path):
    assert "xxx" in refusal(lambda: write(atomic, tmp_path.joinpath(*parts)))
    assert contents(tmp_path) == {}


def test_a_folder_where_a_file_should_go_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "thesis.txt").write_text("the only copy")
    before = contents(tmp_path)
    assert str(tmp_path / "target") in refusal(lambda: write(atomic_file, tmp_path / "target"))
    assert contents(tmp_path) == before


def test_a_file_where_a_folder_should_go_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "target").write_text("the only copy")
    before = contents(tmp_path)
    assert str(tmp_path / "target") in refusal(lambda: write(atomic_folder, tmp_path / "target"))
    assert contents(tmp_path) == before


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "target").symlink_to(tmp_path / "disk")
    write(atomic_folder, tmp_path / "target")
    assert (tmp_path / "target" / "new-1").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} <= {"disk", "target"}


def test_the_present_folder_is_filled_or_refused_but_never_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "old").write_text("the only copy")
    monkeypatch.chdir(tmp_path / "here")
    before = contents(tmp_path)
    try:
        write(atomic_folder, Path())
    except BadData:
        assert contents(tmp_path) == before
    else:
        assert contents(tmp_path / "here") == {"new-1": b"new", "images": None, "images/new-2": b"new"}
        assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_json_is_written_readable_and_read_back(tmp_path: Path):
    value = {"b": [1, 2.5, None, "ü"], "a": {"x": True}}
    write_json(tmp_path / "some.json", value)
    assert read_json(tmp_path / "some.json") == value
    assert (tmp_path / "some.json").read_text().endswith("}\n")
    assert len((tmp_path / "some.json").read_text().splitlines()) > 5


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_number_that_is_not_finite_is_never_written(number: float, tmp_path: Path):
    write_json(tmp_path / "some.json", {"mAP": 1.0})
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "some.json", {"mAP": [{"deep": number}]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "other.json", number)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("made", [b"", b"{", b"\xff\xfe\x00", b"{'a': 1}"], ids=str)
def test_a_broken_json_file_is_refused_by_its_name(made: bytes, tmp_path: Path):
    (tmp_path / "some.json").write_bytes(made)
    message = refusal(lambda: read_json(tmp_path / "some.json"))
    assert message.startswith(f"{tmp_path / 'some.json'}: not readable as JSON (")


def test_a_json_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path):
    assert refusal(lambda: read_json(tmp_path / "some.json")) == f"{tmp_path / 'some.json'}: no such file"
    assert str(tmp_path) in refusal(lambda: read_json(tmp_path))


@pytest.mark.parametrize("uri", ["gs://bucket/set", "https://host/set.zip", "S3://bucket", "hdfs://x"])
def test_an_address_of_an_unknown_kind_is_refused_by_name(uri: str):
    for action in (is_remote, local_path, exists, read_bytes, lambda uri: join(uri, "images")):
        message = refusal(lambda: action(uri))  # noqa: B023
        assert message.startswith(f"{uri}: '{uri.partition('://')[0]}://' cannot be read or written")
        assert "local" in message
        assert "s3://" in message


@pytest.mark.parametrize("uri", ["s3://KEY:hunter2@bucket/set", "https://me:hunter2@host/set.zip"])
def test_an_address_with_a_password_is_refused_without_showing_it(uri: str):
    for action in (is_remote, local_path, exists, read_bytes, lambda uri: list(versions_below(uri))):
        message = refusal(lambda: action(uri))  # noqa: B023
        assert "must not contain a name or a password" in message
        assert "hunter2" not in message
        assert "KEY:" not in message


def test_what_needs_a_local_path_refuses_a_bucket_by_name():
    message = refusal(lambda: local_path("s3://bucket/set"))
    assert message.startswith("s3://bucket/set: 's3://' is not possible here")
    assert "local" in message


@pytest.mark.parametrize("uri", ["s3://", "s3:///key", "some/path", "/some/path"])
def test_what_needs_a_bucket_refuses_anything_else(uri: str, tmp_path: Path):
    assert "expected s3://bucket/name" in refusal(lambda: download(uri, tmp_path / "copy"))
    assert "expected s3://bucket/name" in refusal(lambda: list(versions_below(uri)))


def test_an_address_is_remote_or_local():
    assert is_remote("s3://bucket/set")
    assert not any(map(is_remote, ["set", "/data/set", "file:///data/set", Path("s3/set"), ""]))


def test_names_are_joined_to_an_address_of_either_kind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    for address in ("s3://b/p", "s3://b/p/"):
        assert join(address, "images") == "s3://b/p/images"
        assert join(address, "images", "00000.arrow") == "s3://b/p/images/00000.arrow"
    assert join("s3://b", "set") == "s3://b/set"
    for address in ("/data", Path("/data"), "/data/", "file:///data"):
        assert join(address, "images", "x") == "/data/images/x"
    assert join("~/set", "images") == "/home/me/set/images"


def test_small_local_files_are_written_whole_and_read(tmp_path: Path):
    file = join(tmp_path, "deep", "file.json")
    assert not exists(file)
    assert refusal(lambda: read_bytes(file)) == f"{file}: no such file"
    write_bytes(file, b"[1]")
    assert exists(file)
    assert not exists(tmp_path / "deep")
    assert (read_bytes(file), read_json(file), read_json(Path(file))) == (b"[1]", [1], [1])
    assert contents(tmp_path) == {"deep": None, "deep/file.json": b"[1]"}
    assert refusal(lambda: read_bytes(tmp_path)).startswith(f"{tmp_path}: not readable (")
    assert refusal(lambda: write_bytes(join(file, "below"), b"")).startswith(f"cannot write {file}/below: ")


def test_a_local_path_may_be_spelled_in_several_ways(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    spelled = ("/home/me/set", "file:///home/me/set", "~/set", Path("/home/me/set"))
    assert {local_path(uri) for uri in spelled} == {Path("/home/me/set")}
    assert local_path("s3/set") == Path("s3/set")


def test_the_home_of_nobody_is_refused_in_one_line():
    assert "~no-such-user" in refusal(lambda: local_path("~no-such-user/set"))


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path):
    made = json.dumps(list(range(1000))).encode()
    (tmp_path / "file").write_bytes(made)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(made).hexdigest()


Answer = tuple[int, bytes, int]  # status, body, length that the header promises


class Wire(ThreadingHTTPServer):
    """A server that gives prepared answers, the last one again and again, and notes what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer] = []
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Wire

    def answer(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answers = self.server.answers
        status, body, length = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"version"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def error_answer(status: int, code: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>words of the store</Message></Error>".encode()
    return status, body, len(body)


def only_keys(patch: pytest.MonkeyPatch) -> None:
    """Let this process know keys and no other setting of this machine."""
    for name in [name for name in os.environ if name.startswith("AWS_") or name == "MLFLOW_S3_ENDPOINT_URL"]:
        patch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        patch.setenv(name, os.devnull)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_ACCESS_KEY_ID", "the-key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    patch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    only_keys(monkeypatch)
    storage.s3._client.cache_clear()
    yield
    storage.s3._client.cache_clear()


@pytest.fixture(scope="module")
def wired() -> Iterator[tuple[Wire, Any]]:
    """A server and a client of it."""
    server = Wire()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        only_keys(patch)
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://user:password@127.0.0.1:{server.server_port}")
        yield server, storage.s3._client.__wrapped__(os.getpid())
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def wire(wired: tuple[Wire, Any], monkeypatch: pytest.MonkeyPatch) -> Wire:
    server, client = wired
    server.asked.clear()
    monkeypatch.setattr(storage.s3, "_client", lambda _: client)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    return server


REFUSALS = {
    "NoSuchBucket": (404, ("no such bucket", "AWS_ENDPOINT_URL_S3")),
    "NoSuchKey": (404, ("no such object",)),
    "AccessDenied": (403, ("access denied", "AWS_ACCESS_KEY_ID")),
    "InvalidAccessKeyId": (403, ("access denied", "AWS_ACCESS_KEY_ID")),
    "SignatureDoesNotMatch": (403, ("access denied", "AWS_SECRET_ACCESS_KEY")),
    "ExpiredToken": (400, ("session token",)),
    "RequestTimeTooSkewed": (403, ("clock",)),
    "AuthorizationHeaderMalformed": (400, ("another region", "AWS_DEFAULT_REGION")),
    "SlowDown": (503, ("refused (SlowDown)", "try again")),
    "UnknownCode": (418, ("refused (UnknownCode)", "http://127.0.0.1:")),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_what_a_store_refuses_is_reported_in_one_line(code: str, wire: Wire):
    status, words = REFUSALS[code]
    wire.answers = [error_answer(status, code)]
    message = refusal(lambda: read_bytes("s3://bucket/some file"))
    assert message.startswith("s3://bucket/some file: ")
    for word in words:
        assert word in message
    assert not any(secret in message for secret in ("the-key", "the-secret", "password", "Signature="))


def test_a_store_that_is_busy_is_asked_again(wire: Wire):
    wire.answers = [error_answer(503, "SlowDown"), error_answer(500, "InternalError"), (200, b"whole", 5)]
    assert read_bytes("s3://bucket/file") == b"whole"
    assert wire.asked == ["GET /bucket/file"] * 3


def test_an_answer_that_breaks_off_is_asked_for_again(wire: Wire):
    wire.answers = [(200, b"", 5), (200, b"wh", 5), (200, b"who", 5), (200, b"whole", 5)]
    assert read_bytes("s3://bucket/file") == b"whole"
    assert len(wire.asked) == 4


def test_an_object_that_grows_beyond_the_limit_is_refused_at_the_last_attempt_too(wire: Wire):
    wire.answers = [(200, b"who", 5)] * 4 + [(200, b"whole but too long", 18)]
    assert "it has 18 bytes, at most 10 are read" in refusal(lambda: read_bytes("s3://bucket/file", 10))


def test_an_answer_that_always_breaks_off_is_reported(wire: Wire, tmp_path: Path):
    wire.answers = [(200, b"who", 5)]
    for action in (lambda: read_bytes("s3://bucket/file"), lambda: download("s3://bucket/file", tmp_path / "copy")):
        message = refusal(action)
        assert message.startswith("s3://bucket/file: the object store at http://127.0.0.1:")
        assert "does not answer" in message
        assert "password" not in message
    assert contents(tmp_path) == {}


def test_a_name_with_a_line_end_is_reported_in_one_line(wire: Wire):
    wire.answers = [error_answer(404, "NoSuchKey")]
    assert "a\\nb" in refusal(lambda: read_bytes("s3://bucket/a\nb"))


def test_without_credentials_the_remedy_is_reported(keys: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    message = refusal(lambda: read_bytes("s3://bucket/file"))
    assert message.startswith("s3://bucket/file: no credentials; set AWS_ACCESS_KEY_ID")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("AWS_ENDPOINT_URL_S3", "user:password@localhost", "http://host"),
        ("AWS_PROFILE", "no-such-profile", "no-such-profile"),
        ("AWS_DEFAULT_REGION", "no region", "region"),
    ],
)
def test_settings_that_cannot_be_used_are_reported(
    name: str, value: str, word: str, keys: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    message = refusal(lambda: read_bytes("s3://bucket/file"))
    assert message.startswith("s3://bucket/file: ")
    assert word in message
    assert "password" not in message


def test_a_bucket_name_that_none_can_have_is_reported(keys: None):
    assert "bucket name" in refusal(lambda: read_bytes("s3://no bucket/file"))


def test_without_boto3_the_remedy_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "boto3.exceptions", None)
    message = refusal(lambda: read_bytes("s3://bucket/file"))
    assert message.startswith("s3://bucket/file: boto3 is not installed")
    assert "pip install boto3" in message
    assert "csc[" not in message  # it is no extra


def test_a_file_that_is_not_there_is_not_uploaded(tmp_path: Path):
    assert refusal(lambda: upload(tmp_path / "none", "s3://bucket/file")).startswith(f"{tmp_path / 'none'}: ")


def test_a_disk_that_is_full_is_reported(wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.s3._client(os.getpid()), "download_file", full)
    message = refusal(lambda: download("s3://bucket/file", tmp_path / "copy"))
    assert message == f"cannot write {tmp_path / 'copy'}: No space left on device; make room or choose another disk"
    assert contents(tmp_path) == {}


def test_a_disk_that_fills_up_while_a_file_is_written_is_reported_in_one_line(tmp_path: Path):
    def fill_up() -> None:
        with atomic_file(tmp_path / "file"):
            raise OSError(28, "No space left on device")

    message = refusal(fill_up)
    assert message == f"cannot write {tmp_path / 'file'}: No space left on device; make room or choose another disk"
    assert contents(tmp_path) == {}


def test_looking_into_a_closed_folder_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", closed)
    with pytest.raises(BadData, match=r"dataset\.json: not readable \(Permission denied\)"):
        storage.exists(tmp_path / "dataset.json")


def test_who_waits_for_a_lock_waits_only_as_long_as_it_wants(tmp_path: Path):
    lock = tmp_path / "lock"
    with locked(lock):
        for seconds in (0, 0.2):
            with pytest.raises(BlockingIOError), locked(lock, seconds=seconds):
                pass
    with locked(lock, seconds=0), pytest.raises(BlockingIOError), locked(lock, seconds=0):
        pass


@pytest.mark.parametrize("seconds", [30, math.inf])
def test_a_lock_that_was_removed_while_one_waited_for_it_is_none(seconds: float, tmp_path: Path):
    lock, errors, waiting = tmp_path / "lock", [], threading.Event()

    def second() -> None:
        try:
            waiting.set()
            with locked(lock, seconds=seconds):
                pass
        except FileNotFoundError as error:
            errors.append(str(error))

    thread = threading.Thread(target=second)
    with locked(lock):
        thread.start()
        assert waiting.wait(10)
        time.sleep(0.3)  # it opens the file and waits
        lock.unlink()
    thread.join()
    assert errors == [f"{lock} was removed"]
