"""Every command and snippet of the README, the tutorial and the library page that needs no cluster really runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from csc.data.ingest.digits import VERSION, ingest_digits
from tests.builders import make_coco, make_voc, zipped
from tests.faults.starter import finished
from tests.integration.conftest import environment
from tests.tracked import fresh_database

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ELSEWHERE = ("make", "source", "cp", "csc submit", "csc status", "csc logs", "csc ui", "csc serve", "pip")
TWO_TASKS = ("digits-b0c2", "digits-b0c5")  # two are as good as five here
SHORT = {  # added to a command: it is known to work, what is tested is that the page says it right
    "run": [
        word
        for item in ("train.epochs=1", "backbone.name=test_byobnet", "init=scratch", "input.size=32")
        for word in ("--set", item)
    ],
    "study": ["--dry-run"],
}


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of code, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The words of each `csc` command of a block that can run here."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if re.match(r"(\$ )?csc ", line)]
    return [words for words in found if not " ".join(words).startswith(ELSEWHERE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the pages speak of; digits are few, so that a run takes seconds."""
    ingest_digits(tmp_path / "work" / "data" / f"digits-{VERSION}", train=120, test=40, size=32)
    make_coco(tmp_path / "pets", train="instances_train.json", test="instances_val.json")
    zipped(make_voc(tmp_path / "voc").parents[1], tmp_path / "VOCtrainval+test.zip")
    for work in ("work", "by-hand"):  # to make a database takes as long as a run; that it is made is tested elsewhere
        fresh_database(tmp_path / work)
    return tmp_path


def succeeded(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, f"{shlex.join(done.args)}\n{done.stdout}{done.stderr}"


def execute(words: list[str], folder: Path) -> None:
    """Run what follows `python` in a folder."""
    succeeded(finished([sys.executable, *words], environment(), str(folder)))


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "docs/library.md"])
def test_what_a_page_says_to_type_works_in_its_order(page: str, folder: Path):
    ran = 0
    if page == "README.md":  # `make run` is this command
        execute(["-m", "csc", "run", TWO_TASKS[1], *SHORT["run"]], folder)
    for language, written in blocks(page):
        text = written.replace(*TWO_TASKS)
        if language == "python":
            (folder / "snippet.py").write_text(text, encoding="utf-8")
            execute(["snippet.py"], folder)
            ran += 1
        elif not language:
            for _, *words in commands(text):
                execute(["-m", "csc", *words, *SHORT.get(words[0], [])], folder)
                ran += 1
    assert ran
