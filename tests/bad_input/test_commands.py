"""Commands that cannot be right, typed as a person types them: one line, exit code 2, and no file changed.

`commands.yaml` has settings, class names, work folders and the arguments of every command; `profiles.yaml` and
`studies.yaml` have files that a command is given.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csc import cli
from csc.config import methods
from csc.pipelines.profile import SHIPPED
from csc.study.reading import SHIPPED as STUDIES
from tests.bad_input.recipes import check_line, follow, parameters, recipes
from tests.builders import contents

KINDS = {name: recipes(name) for name in ("commands", "profiles", "studies")}
ALL = [recipe for kind in KINDS.values() for recipe in kind]


def typed_line(recipe: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Type what a recipe says in a folder; return the line that says why it was refused."""
    words = shlex.split(recipe["type"])
    before = contents(folder)
    try:
        code = cli.main(words)
    except SystemExit as error:  # the usage, in some lines, and then the reason
        code = error.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert contents(folder) == before
    line = said.splitlines()[-1]
    if not line.startswith(f"csc {words[0]}: error: ") and not line.startswith("csc: error: "):
        assert said == f"{line}\n"
        assert line.startswith("csc: ")
    known = {", ".join(STUDIES): "{studies}", ", ".join(methods()): "{methods}"}  # there will be more of them
    for text, short in {str(folder): "{folder}", str(SHIPPED["local"].parent): "{profiles}", **known}.items():
        line = line.replace(text, short)
    return line


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder as the present one; what commands set in the environment is undone."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = dict(os.environ)
    for name in ("MLFLOW_TRACKING_URI", "KF_PIPELINES_SA_TOKEN_PATH", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        os.environ.pop(name, None)
    yield tmp_path / "here"
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("recipe", parameters(ALL))
def test_a_command_that_cannot_be_right_gives_the_one_line_of_its_recipe(
    recipe: dict[str, Any], cwd: Path, capsys: pytest.CaptureFixture[str]
):
    follow(recipe, cwd)
    os.environ.update(recipe.get("env", {}))
    check_line(recipe, typed_line(recipe, cwd, capsys))


def test_every_command_has_a_recipe():
    known = set(re.findall(r"^    (\w+) ", cli._parser().format_help(), re.MULTILINE))
    assert known - {recipe["type"].split()[0] for recipe in KINDS["commands"]} == set()
