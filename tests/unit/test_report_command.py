"""`csc report`: the page of a run from the tracking store alone."""

from pathlib import Path

import pytest

from csc.cli import main
from csc.steps.report import report
from tests.tracked import fresh_database
from tests.trained import SCENARIO, trained


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work folder with one task of a run, and nothing of what its steps wrote."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path / "work"))
    task = trained(tmp_path / "steps", 1)
    task.register()
    report(str(task.registered), str(tmp_path / "page.html"), str(tmp_path / "table.md"))
    task.registered.unlink()
    return tmp_path / "work"


def test_the_page_is_the_one_that_the_run_made(workdir: Path, capsys: pytest.CaptureFixture[str]):
    for words in ("", SCENARIO, f"models:/{SCENARIO}-csc@task-01"):
        assert main(["report", words, "--workdir", str(workdir)]) == 0
        (page,) = workdir.glob(f"{SCENARIO}-csc-seed0-*.html")  # its settings have a key: the epochs are changed
        assert page.read_bytes() == (workdir.parent / "page.html").read_bytes()
        assert f"report    {page}" in capsys.readouterr().out
        page.unlink()
    assert main(["report", "voc-b0c4", "--workdir", str(workdir)]) == 2
    assert "no run 'voc-b0c4' in the tracking store" in capsys.readouterr().err


def test_a_page_sets_a_run_without_max_entropy_next_to_the_same_run_with_it(tmp_path: Path, workdir: Path):
    page, both = tmp_path / "other.html", ("without max-entropy", "with max-entropy, β = 0.04")
    for seed in (0, 1):  # the run of the work folder has the first
        task = trained(tmp_path / "without", 1, seed, settings={"max_entropy": {"beta": 0.0}})
        task.register()
        report(str(task.registered), str(page), str(tmp_path / "table.md"))
        assert [name in page.read_text() for name in both] == [seed == 0] * 2
    assert main(["report", f"models:/{SCENARIO}-csc/1", "--workdir", str(workdir), "-o", str(page)]) == 0
    assert [name in page.read_text() for name in both] == [True] * 2  # there is another run by now
