import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from csc.errors import BadData
from csc.storage import atomic_file, atomic_folder, local_path, read_json, sha256_file, write_json
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
def test_a_place_below_a_file_is_refused_in_one_line(atomic: Writer, tmp_path: Path):
    (tmp_path / "file").write_text("the only copy")
    before = contents(tmp_path)
    message = refusal(lambda: write(atomic, tmp_path / "file" / "target"))
    assert message.startswith(f"cannot write {tmp_path / 'file' / 'target'}: ")
    assert "choose a folder you may write to" in message
    assert contents(tmp_path) == before


@BOTH
@pytest.mark.parametrize(
    "place", [("x" * 300,), ("new", "x" * 300), ("x" * 300, "target")], ids=["name", "deep", "above"]
)
def test_a_name_that_is_too_long_is_refused_in_one_line(atomic: Writer, place: tuple[str, ...], tmp_path: Path):
    assert "xxx" in refusal(lambda: write(atomic, tmp_path.joinpath(*place)))
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


def test_the_present_folder_is_filled_or_refused_but_never_spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


@pytest.mark.parametrize("uri", ["s3://bucket/set", "gs://bucket/set", "https://host/set.zip", "S3://bucket"])
def test_a_place_that_is_not_local_is_refused_by_name(uri: str):
    message = refusal(lambda: local_path(uri))
    assert message.startswith(f"{uri}: '{uri.partition('://')[0]}://' is not a place")
    assert "local" in message


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
