"""The method that CONTRIBUTING.md adds really runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import environment, last_results
from tests.tracked import fresh_database

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_the_example_of_a_new_method_runs_from_the_page(tmp_path: Path, scenes: Path):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (values,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for name in ("csc", "components", "pipelines"):
        target = tmp_path / "csc" / name if name != "csc" else tmp_path / "csc"
        shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (tmp_path / "csc" / "methods" / "smooth.py").write_text(code, encoding="utf-8")
    (tmp_path / "csc" / "methods" / "values" / "smooth.yaml").write_text(values, encoding="utf-8")
    fresh_database(tmp_path / "work")
    words = ["run", "digits-b0c5", "--method", "smooth", "--data", str(scenes), "--workdir", str(tmp_path / "work")]
    sets = ("train.epochs=1", "input.size=32", "backbone.name=test_byobnet", "smooth.by=0.2")
    done = subprocess.run(
        [sys.executable, "-m", "csc", *words, *(word for item in sets for word in ("--set", item))],
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(last_results(tmp_path / "work")) == 2
    assert "models:/digits-b0c5-smooth@final" in done.stdout
