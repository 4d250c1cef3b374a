"""Addresses and folders that cannot be used, and what servers say: one line, and nothing that moves a cursor."""

import pytest

from csc.cli import main
from csc.errors import CscError

COMMANDS = [
    ["run", "digits-b0c2"],
    ["extend", "models:/a@final", "--data", "nowhere"],
    ["show", "models:/a@final"],
    ["ui"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("letter", "?%#")
def test_a_work_folder_that_no_database_address_can_name_is_one_line(words, letter, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--workdir", f"wo{letter}rk"]) == 2
    said = capsys.readouterr().err
    wanted = f"csc: --workdir wo{letter}rk: '{letter}' cannot be part of the address of a database; name another\n"
    assert said == wanted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", ["http://[::1", "http://mlflow:port", "http://mlflow:99999"])
@pytest.mark.parametrize("words", COMMANDS[:2], ids=lambda words: words[0])
def test_a_tracking_address_that_is_none_is_one_line(words, uri, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--workdir", "work"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("csc: MLFLOW_TRACKING_URI is no address; ")
    assert len(said.splitlines()) == 1


def test_control_characters_of_an_error_never_reach_the_terminal(monkeypatch, capsys):
    from csc.cli import lists

    def refuse(*_):
        raise CscError("the server says \x1b]0;owned\x07 \x1b[2Jno\r\n\u202eagain\x9b31m")

    monkeypatch.setattr(lists, "SCENARIOS", lists.SCENARIOS.__class__("x", lambda parser: None, refuse))
    assert main(["scenarios"]) == 2
    said = capsys.readouterr().err.removesuffix("\n")
    assert said.isprintable()
    assert said.startswith("csc: the server says ")
