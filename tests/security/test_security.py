"""Every claim of SECURITY.md has a test that fails if it is not true, or is somebody else's to keep."""

import ast
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from csc.cli import main
from csc.scenario import Scenario
from csc.serving.packaging import package_model
from tests.trained import DIGITS
from tests.unit.training.bench import SCENARIO, saved_model, settings

ROOT = Path(__file__).parents[2]
CLAIMS: dict[str, list[str] | str] = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text())
PAGE = " ".join((ROOT / "SECURITY.md").read_text().split())


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_on_the_page_and_has_its_tests(claim: str):
    assert claim in PAGE
    for name in () if CLAIMS[claim] == "administrator" else CLAIMS[claim]:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name


def test_every_part_of_the_page_makes_a_claim_that_is_listed():
    body = (ROOT / "SECURITY.md").read_text().partition("## Who can write what")[2]
    parts = [
        part for part in re.split(r"\n\n|\n(?=- )|\n(?=\|)", body) if not part.startswith(("## ", "|--", "| what"))
    ]
    for part in (" ".join(part.split()) for part in parts):
        assert not part or any(claim in part for claim in CLAIMS), part


class Hostile:
    """What leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.slow
def test_a_hostile_package_runs_nothing_where_csc_loads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """MLflow itself runs it: that the trap works is a part of the test."""
    made = saved_model(tmp_path / "model", settings(), Scenario.parse(SCENARIO).task(DIGITS, 1))
    (made / "training.json").write_text("{}")
    package_model(made, tmp_path / "package")
    trace, model = tmp_path / "trace", tmp_path / "package" / "data" / "model"
    for file in (tmp_path / "package" / "python_model.pkl", model / "model.pkl", model / "pytorch_model.bin"):
        file.write_bytes(pickle.dumps(Hostile(trace)))
    for code in (tmp_path / "package" / "code" / "trap.py", model / "__init__.py", model / "sitecustomize.py"):
        code.write_text(f"open({str(trace)!r}, 'w')\ndef _load_pyfunc(*_): return print\n")
    described = yaml.safe_load((tmp_path / "package" / "MLmodel").read_text())
    described["flavors"]["python_function"] |= {"loader_module": "trap", "predict_fn": "__call__"}
    (tmp_path / "package" / "MLmodel").write_text(yaml.safe_dump(described))
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "black.png")
    assert main(["predict", str(model), str(tmp_path / "black.png")]) == 0
    assert "black.png" in capsys.readouterr().out
    assert not trace.exists()
    (model / "model.safetensors").write_bytes(pickle.dumps(Hostile(trace)))
    assert main(["predict", str(model), str(tmp_path / "black.png")]) == 2
    assert not trace.exists()

    import mlflow

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("")  # MLflow puts the model's code in front
        mlflow.pyfunc.load_model(str(tmp_path / "package"))
    assert trace.exists()


def test_no_code_here_reads_a_pickle_or_runs_text():
    forbidden = re.compile(
        r"(pickle|dill|joblib|marshal|shelve)\.|torch\.load$|eval$|exec$|__import__$|yaml\.unsafe_load$"
    )
    for file in sorted(file for folder in ("csc", "components", "pipelines") for file in (ROOT / folder).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        assert not [name for name in (ast.unparse(call.func) for call in calls) if forbidden.match(name)], file
        pickles = [keyword for call in calls for keyword in call.keywords if keyword.arg == "allow_pickle"]
        assert all(ast.unparse(keyword.value) == "False" for keyword in pickles), file


def test_every_image_that_is_built_upon_is_an_argument():
    recipe = (ROOT / "images" / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", recipe, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+)", recipe, re.MULTILINE)) - stages <= {"${BASE}", "${WHEELHOUSE}"}
    assert {"BASE", "WHEELHOUSE"} <= set(re.findall(r"^ARG (\w+)=", recipe.partition("FROM")[0], re.MULTILINE))
