"""What the images are made of: bills of materials, licences, and what to say when nobody can be asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from images import packages


def test_a_bill_of_materials_has_every_package_with_its_hashes_and_licence(tmp_path: Path):
    assert packages.write_boms(tmp_path) == 0
    for image in packages.IMAGES:
        content = json.loads((tmp_path / f"csc-{image}.cdx.json").read_text())
        assert (content["bomFormat"], content["specVersion"]) == ("CycloneDX", "1.6")
        names = {part["name"] for part in content["components"]}
        assert {"kfp", "mlflow-skinny", "msgspec"} <= names
        assert ("torch" in names) == (image == "train")
        for part in content["components"]:
            assert part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}"
            assert all(len(one["content"]) == 64 for one in part["hashes"])
            assert part["hashes"]
            assert part["licenses"]


def test_the_licences_in_the_images_are_allowed(capsys: pytest.CaptureFixture[str]):
    assert packages.check_licences() == 0
    assert "Apache-2.0" in capsys.readouterr().out


@pytest.mark.parametrize("licence", ["GPL-3.0-only", "", "MIT AND AGPL-3.0-or-later"])
def test_a_licence_that_nobody_has_allowed_fails(
    licence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(packages, "packages", lambda image: [packages.Package("some", "1", (), licence)])
    assert packages.check_licences() == 1
    assert "make licences: some: " in capsys.readouterr().err


def test_of_alternatives_one_allowed_licence_is_enough():
    assert packages.refused("GPL-2.0-only OR (MIT AND Zlib)") == []


class Database(BaseHTTPRequestHandler):
    answer: object = None

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        bad = [{"vulns": [{"id": "GHSA-1"}]} if one["package"]["name"] == "torch" else {} for one in queries]
        body = json.dumps({"results": bad} if self.answer is None else self.answer).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Database]]:
    class Mine(Database):
        pass

    with HTTPServer(("127.0.0.1", 0), Mine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OSV_URL", f"http://127.0.0.1:{server.server_port}")
        yield Mine
        server.shutdown()


def test_a_known_vulnerability_fails(database: type[Database], capsys: pytest.CaptureFixture[str]):
    assert packages.audit() == 1
    said = capsys.readouterr().out
    assert "torch " in said
    assert "GHSA-1" in said
    assert ", 1 with known vulnerabilities" in said


@pytest.mark.parametrize("answer", [[], {"results": []}, {"results": [None]}])
def test_an_answer_that_cannot_be_understood_is_not_taken_for_good_news(
    database: type[Database], answer: object, capsys: pytest.CaptureFixture[str]
):
    database.answer = answer
    assert packages.audit() == 3
    assert "NOTHING WAS CHECKED" in capsys.readouterr().err


def test_a_database_that_is_away_is_not_taken_for_good_news(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OSV_URL", "http://127.0.0.1:9")
    assert packages.audit() == 3
    assert "make audit: NOTHING WAS CHECKED: http://127.0.0.1:9 could not be asked" in capsys.readouterr().err
