"""Every command that a document says to type is one: its words, its options, and the settings that it sets."""

import re
import shlex
from pathlib import Path

import pytest

from csc.cli import _parser
from csc.config import methods, resolve

ROOT = Path(__file__).parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def commands(page: str) -> list[str]:
    """What follows `csc` in each line of a code block, without what stands for several words."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [match[1] for line in lines if (match := re.match(r"(?:\$ )?csc (\w.*)", line))]
    return [command for command in found if "…" not in command]


def test_the_commands_are_found():
    assert len([command for page in PAGES for command in commands(page)]) > 60


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_of_a_document_is_one(page: str):
    known = {key for method in methods() for key in resolve("voc", {"method": method}).flat()}
    for command in commands(page):
        words = shlex.split(command, comments=True)
        arguments = vars(_parser().parse_args(words[: words.index(">")] if ">" in words else words))
        for setting in arguments.get("overrides", ()):
            assert setting.partition("=")[0] in known, command
