import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from csc.data.ingest.source import Source
from csc.errors import BadData
from tests.builders import zipped

FILES = {f"{folder}/{number}.txt": f"{folder} {number}".encode() for folder in "ab" for number in range(20)}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(BadData) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


@pytest.fixture(params=["folder", "zip"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / name).write_bytes(content)
    return tmp_path / "raw" if request.param == "folder" else zipped(tmp_path / "raw", tmp_path / "raw.zip")


def test_files_are_listed_and_read(raw: Path):
    with Source(raw) as files:
        assert (files.names(), files.folders()) == (set(), {"a", "b"})
        assert files.names("a") == {f"{number}.txt" for number in range(20)}
        assert {name: files.read(name) for name in FILES} == FILES
        assert files.has("a/3.txt")
        assert not files.has("a")


@pytest.mark.parametrize("name", ["a/none.txt", "none/0.txt", "../raw/a/0.txt", "/etc/passwd", "a/../../raw/a/0.txt"])
def test_a_name_that_is_not_inside_is_no_file(name: str, raw: Path):
    with Source(raw) as files:
        assert not files.has(name)
        message = refusal(lambda: files.read(name))
        assert message.endswith(": no such file")
        assert message.startswith(str(raw))


def test_a_zip_may_not_lead_out_of_itself(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "raw.zip", "w") as archive:
        archive.writestr("../secret", b"x")
        archive.writestr("/secret", b"x")
    with Source(tmp_path / "raw.zip") as files:
        assert files.names("..") == set()
        assert refusal(lambda: files.read("../secret")).endswith("no such file")


def test_a_member_without_a_name_is_left_out(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "raw.zip", "w") as archive:
        archive.writestr("a", b"content")
        archive.writestr("b", b"more")
    content = (tmp_path / "raw.zip").read_bytes()
    start = content.rindex(b"PK\x01\x02")  # the list's entry of the last member, whose name is behind 46 bytes
    nameless = content[: start + 46] + b"\0" + content[start + 47 :]
    (tmp_path / "raw.zip").write_bytes(nameless)
    with Source(tmp_path / "raw.zip") as files:
        assert files.names() == {"a"}


def test_threads_may_share_a_source(raw: Path):
    with Source(raw) as files, ThreadPoolExecutor(8) as threads:
        names = [*FILES] * 20
        assert list(threads.map(files.read, names)) == [FILES[name] for name in names]


def test_a_source_goes_to_another_process_as_its_address(raw: Path):
    with Source(raw) as files:
        assert files.read("a/3.txt") == FILES["a/3.txt"]
        packed = pickle.dumps(files)
    assert len(packed) < 300
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).read('b/7.txt'))"
    worker = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    assert worker.stdout == FILES["b/7.txt"]


def test_a_name_with_a_line_end_is_reported_in_one_line(raw: Path):
    with Source(raw) as files:
        assert "a\\nb" in refusal(lambda: files.read("a\nb"))


@pytest.mark.parametrize("uri", ["gs://bucket/raw", "https://host/raw.zip"])
def test_a_source_of_an_unknown_kind_is_refused_by_name(uri: str):
    assert refusal(lambda: Source(uri)).startswith(f"{uri}: ")


@pytest.mark.parametrize("name", ["VOCtest_06-Nov-2007.tar", "set.TAR.GZ", "s3://bucket/VOCtest_06-Nov-2007.tar"])
def test_a_tar_file_is_refused_with_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    if "://" not in name:
        (tmp_path / name).write_bytes(b"anything")
    assert refusal(lambda: Source(name)) == (
        f"{name}: tar files are not read; unpack all of the set into one folder and give that"
    )


def test_a_folder_of_zips_is_what_they_hold_together(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / f"{name}.txt").write_text(name)
        (tmp_path / "zips").mkdir(exist_ok=True)
        zipped(tmp_path / name, tmp_path / "zips" / f"{name}.ZIP")
    (tmp_path / "zips" / ".hidden").mkdir()
    with Source(tmp_path / "zips") as files:
        assert files.folders() == {"deep"}
        assert files.names("deep") == {"one.txt", "two.txt"}
        assert [files.read(f"deep/{name}.txt") for name in ("one", "two")] == [b"one", b"two"]
        assert files.version("deep/one.txt") != files.version("deep/two.txt")
        assert refusal(lambda: files.read("deep/three.txt")).endswith("no such file")
    (tmp_path / "zips" / "two.ZIP").write_text("half of it")
    assert refusal(lambda: Source(tmp_path / "zips")).startswith(f"{tmp_path / 'zips' / 'two.ZIP'}: not readable as")


def test_zips_next_to_folders_are_not_looked_into_but_named(tmp_path: Path):
    (tmp_path / "train").mkdir()
    for name in ("val.zip", "test.tgz", "readme.txt"):
        (tmp_path / name).write_text("whatever")
    with Source(tmp_path) as files:
        assert files.folders() == {"train"}
        assert files.still_packed() == " (unpack test.tgz, val.zip here first)"


def test_what_is_no_source_is_refused_by_name(tmp_path: Path):
    (tmp_path / "text").write_text("text")
    assert refusal(lambda: Source(tmp_path / "none")).startswith(f"{tmp_path / 'none'}: no such folder or zip file")
    assert refusal(lambda: Source(tmp_path / "text")).startswith(f"{tmp_path / 'text'}: not readable as a zip file (")
