"""A model wrapped for MLflow: what MLflow itself would write, and all the code it takes, no more."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from csc.serving.packaging import EXAMPLE, package_model
from tests.trained import Trained, trained
from tests.unit.test_house import ROOT, imports


@pytest.fixture
def task(tmp_path: Path) -> Trained:
    made = trained(tmp_path, 2)
    training = made.folder / "model" / "training.json"
    training.write_text(json.dumps(json.loads(training.read_text()) | {"packages": {"torch": "1.2.3"}}))
    return made


@pytest.fixture
def package(tmp_path: Path, task: Trained) -> Path:
    package_model(task.folder / "model", tmp_path / "package")
    return tmp_path / "package"


def test_mlflow_reads_it_as_if_it_had_written_it(package: Path, task: Trained):
    import mlflow
    from mlflow.models import Model

    files = {"data": "data/model", "code": "code", "conda_env": "conda.yaml", "python_env": "python_env.yaml"}
    own = Model()
    mlflow.pyfunc.add_to_model(own, loader_module="csc.serving.pyfunc", model_config={"read_files": True}, **files)
    read = Model.load(str(package))
    assert read.flavors == own.flavors
    assert read.mlflow_version == own.mlflow_version
    assert read.model_size_bytes == sum(
        path.stat().st_size for path in package.rglob("*") if path.is_file() and path.name != "MLmodel"
    )
    needed = (package / "requirements.txt").read_text().splitlines()
    assert {f"mlflow=={mlflow.__version__}", "torch==1.2.3"} <= set(needed)  # torch as it was where it was trained
    card = package / "data/model/model.json"
    assert card.read_bytes() == (task.folder / "model/model.json").read_bytes()


def test_it_says_what_goes_in_and_what_comes_out_in_mlflow_s_words(package: Path, task: Trained, tmp_path: Path):
    from mlflow.models import Model, ModelSignature
    from mlflow.models.utils import _save_example
    from mlflow.types import ColSpec, DataType, Schema

    outputs = [ColSpec(DataType.float, name) for name in task.card.classes]
    read = Model.load(str(package))
    assert read.signature == ModelSignature(Schema([ColSpec(DataType.string)]), Schema(outputs))
    own = Model()
    _save_example(own, [EXAMPLE], str(tmp_path))
    assert read.saved_input_example_info == own.saved_input_example_info
    assert read.load_input_example(str(package)) == [EXAMPLE]
    assert json.loads(read.get_serving_input(str(package))) == {"inputs": [EXAMPLE]}
    for name in ("input_example.json", "serving_input_example.json"):
        assert json.loads((package / name).read_text()) == json.loads((tmp_path / name).read_text())


def imported_at_run_time(path: Path) -> list[str]:
    """What a file imports, without what only its annotations need."""
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return list(imports(ast.Module(body, []), path))


def test_it_holds_all_the_code_that_loading_imports(package: Path):
    code = package / "code"
    held = {path.relative_to(code).as_posix() for path in code.rglob("*.py")}
    methods = [f"csc.methods.{path.stem}" for path in (ROOT / "csc" / "methods").glob("*.py")]  # found by looking
    wanted, todo = set(), ["csc.serving.pyfunc", *methods]
    while todo:
        stem = todo.pop().replace(".", "/")
        found = [path for path in (f"{stem}.py", f"{stem}/__init__.py") if (ROOT / path).is_file()]
        for path in set(found) - wanted:
            wanted.add(path)
            names = [name for name in imported_at_run_time(ROOT / path) if name.startswith("csc.")]
            todo += [name.rpartition(".")[0] for name in [stem.replace("/", "."), *names]] + names
    assert "csc/nets/network.py" in wanted
    assert wanted <= held
    assert len(held) < len(wanted) + 5  # files travel one by one


@pytest.mark.slow
def test_its_code_works_without_the_library_it_came_from(package: Path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import csc.serving.pyfunc, csc.config; assert csc.__file__.startswith(sys.argv[1]), csc.__file__\n"
        "assert csc.config.resolve('voc', {'method': 'lwf'}).method == 'lwf'\n"
    )
    subprocess.run([sys.executable, "-c", program, str(package / "code")], check=True, cwd=package)
