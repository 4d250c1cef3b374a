"""The rules of the house: who may import what, read from the sources and from running processes."""

import ast
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from csc.data.ingest.coco import ingest_coco
from csc.steps.ingest import ingest
from csc.version import DECISIVE
from tests.builders import make_coco

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "csc").rglob("*.py"))
COMPONENTS = sorted((ROOT / "components").glob("*/component.py"))
SOURCES = [*LIBRARY, *sorted((ROOT / "components").rglob("*.py")), *sorted((ROOT / "pipelines").rglob("*.py"))]


def module_of(path: Path) -> str:
    """The importable name of a source file; components and pipelines live below csc."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "csc" else ("csc", *parts))
    return name.removesuffix(".__init__")


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module that the nodes below import, whatever the form; relative ones by their whole name."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


@functools.cache
def imported(path: Path) -> list[str]:
    return list(imports(ast.parse(path.read_text()), path))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def who_imports(package: str, paths: list[Path]) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix() for path in paths if any(within(name, package) for name in imported(path))
    }


def test_the_reader_of_imports_sees_every_form():
    code = """
import a.b, c as d
from e import f
def g():
    from . import h
    from ..i import j
    import importlib
    importlib.import_module("k.l")
    if TYPE_CHECKING:
        import m
"""
    found = set(imports(ast.parse(code), ROOT / "csc" / "data" / "some.py"))
    assert found == {"a.b", "c", "e.f", "csc.data.h", "csc.i.j", "importlib", "k.l", "m"}
    assert set(imports(ast.parse("from . import x"), ROOT / "csc" / "data" / "__init__.py")) == {"csc.data.x"}


def test_the_sources_are_found():
    assert {"csc/cli/__init__.py", "csc/steps/train.py", "csc/cli/run.py", "components/train/component.py"} <= {
        path.relative_to(ROOT).as_posix() for path in SOURCES
    }
    assert len(COMPONENTS) >= 7


@pytest.mark.parametrize("package", ["kfp", "csc.components", "csc.pipelines", "components", "pipelines"])
def test_the_library_knows_nothing_of_pipelines(package: str):
    below = [path for path in LIBRARY if path.parent.name != "cli"]  # commands may use everything
    assert who_imports(package, below) == set()


def test_only_tracking_imports_mlflow():
    elsewhere = [path for path in SOURCES if path.parent.name != "tracking"]
    assert who_imports("mlflow", elsewhere) == {"csc/serving/pyfunc.py"}


def test_only_storage_may_import_boto3():
    assert who_imports("boto3", SOURCES) | who_imports("botocore", SOURCES) <= {"csc/storage/s3.py"}


def test_only_the_train_job_and_the_view_of_a_cluster_talk_to_kubernetes():
    assert who_imports("kubernetes", SOURCES) == {"csc/distributed/cluster.py", "pipelines/cluster/kubernetes.py"}


# The rooms of the library, from bottom to top.
ROOMS = [
    *("errors", "version", "retry", "storage", "scenario", "config", "artifacts", "data", "nets", "model", "metrics"),
    *("methods", "replay", "distributed", "training", "serving", "tracking", "report", "study", "steps", "cli"),
]


def room(name: str) -> str:
    """The room of a module of the library; components, pipelines and the package itself are in none."""
    part = name.split(".")[1] if name.startswith("csc.") else ""
    return part if part in ROOMS else ""


def when_loaded(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported; those for the type checker do not."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from when_loaded(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.ClassDef | ast.With):
            handlers = [part for handler in getattr(node, "handlers", ()) for part in handler.body]
            yield from when_loaded(
                [*node.body, *handlers, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            )
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_loads_only_rooms_below_its_own(path: Path):
    own = room(module_of(path))
    loaded = imports(ast.Module(list(when_loaded(ast.parse(path.read_text()).body)), []), path)
    above = {name for name in loaded if own and ROOMS.index(room(name) or own) > ROOMS.index(own)}
    assert above == set()


def test_every_part_of_the_library_has_its_room():
    parts = {path.relative_to(ROOT / "csc").parts[0].removesuffix(".py") for path in LIBRARY}
    assert parts - {"__init__", "__main__"} == set(ROOMS)


STEPS = sorted((ROOT / "csc" / "steps").glob("*.py"))


def test_no_step_imports_another_step():
    """What two steps share is a contract in csc/artifacts.py."""
    assert len(STEPS) > 10
    assert who_imports("csc.steps", [*STEPS, ROOT / "csc" / "artifacts.py"]) == set()


def test_pipelines_import_no_step():
    """A pipeline wires components; what it shares with a step is a contract or part of the library."""
    pipelines = sorted((ROOT / "pipelines").rglob("*.py"))
    assert len(pipelines) > 20
    assert who_imports("csc.steps", pipelines) == set()


def test_only_report_and_collect_make_pages():
    assert who_imports("csc.report", STEPS) == {"csc/steps/report.py"}
    assert who_imports("csc.study", STEPS) == {"csc/steps/collect.py"}


STEP_OF = {"train_on_nodes": "train"}  # components that are another way to run a step


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.parent.name)
def test_a_component_imports_the_library_only_inside_its_body(path: Path):
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [function.name for function in functions] == [path.parent.name]
    outside = ast.Module([node for node in tree.body if node not in functions], [])
    for name in imports(outside, path):
        top = name.partition(".")[0]
        assert top in sys.stdlib_module_names or top == "kfp" or within(name, "csc.components.image"), name
    step = STEP_OF.get(path.parent.name, path.parent.name)
    assert f"csc.steps.{step}.{step}" in set(imports(functions[0], path))


def test_every_step_has_its_component():
    steps = {path.stem for path in (ROOT / "csc" / "steps").glob("*.py")} - {"__init__"}
    assert {path.parent.name for path in COMPONENTS} == steps | STEP_OF.keys()


NOT_DECISIVE = {  # what decisive code may use without being changed by it
    *("csc.errors", "csc.storage", "csc.version", "csc.retry", "csc.__version__", "csc.tracking", "csc.serving"),
    *("csc.distributed.launch", "csc.distributed.process", "csc.distributed.trainjob"),
}


def test_the_code_version_covers_all_that_decisive_code_is_made_of():
    """Whatever decisive code imports decides too, or is known not to."""
    root = ROOT / "csc"
    decisive = {file for pattern in DECISIVE for file in root.glob(pattern) if file.suffix == ".py"}
    assert len(decisive) > 40
    covered = {module_of(path) for path in decisive}
    for path in decisive:
        for name in (name for name in imported(path) if within(name, "csc")):
            known = any(within(name, package) for package in covered | NOT_DECISIVE)
            assert known or name.rpartition(".")[0] in covered, f"{path.relative_to(root)} imports {name}"


def test_an_edit_elsewhere_leaves_the_code_version_as_it_is(tmp_path: Path):
    for name in ("csc", "components", "pipelines"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))

    def version() -> str:
        code = "from csc.version import code_version; print(code_version())"
        return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True).stdout

    before = version()
    for path in (
        "report/page.py",
        "cli/run.py",
        "study/render.py",
        "tracking/runs.py",
        "data/ingest/coco.py",
        "data/cache.py",
        "data/evidence.py",
        "data/progress.py",
        "config/describe.py",
        "config/checks.py",
        "nets/activation.py",
        "training/finite.py",
        "training/inspection.py",
        "training/stopping.py",
    ):
        with (tmp_path / "csc" / path).open("a") as file:
            file.write("# another thought\n")
    described = tmp_path / "csc" / "methods" / "values" / "csc.yaml"
    described.write_text(described.read_text().replace("description: ", "description: again, ", 1))
    assert version() == before
    with (tmp_path / "csc" / "nets" / "ci_gcn.py").open("a") as file:
        file.write("# another thought\n")
    assert version() != before


def test_the_library_stays_small_enough_to_find_things_in():
    top = [path for path in (ROOT / "csc").iterdir() if path.name != "__pycache__"]
    assert len(top) <= 24
    long = {str(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > 350}
    assert not long


def test_no_file_is_named_after_nothing():
    files = [path for folder in ("csc", "components", "pipelines", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > len(SOURCES)
    names = {part for path in files for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not names & {"util", "utils", "helper", "helpers", "common", "misc"}


def modules_after(code: str, folder: Path) -> set[str]:
    """The top-level modules that a new process has loaded after running some code in a folder."""
    ending = "\nimport sys\nprint('\\n', *{name.partition('.')[0] for name in sys.modules})"
    process = subprocess.run([sys.executable, "-c", code + ending], capture_output=True, text=True, cwd=folder)
    assert process.returncode == 0, process.stderr
    return set(process.stdout.splitlines()[-1].split())


LOOK_AROUND = """
import sys
from csc.cli import main
for command in ("--help", "--version", "scenarios", "methods", "run --help", "predict --help"):
    try:
        code = main(command.split())
    except SystemExit as end:
        code = end.code
    heavy = sys.modules.keys() & {"torch", "mlflow", "kfp", "timm", "torchvision", "pandas", "kubernetes"}
    assert not code and not heavy, f"{command}: {code} {heavy}"
"""


def test_looking_around_loads_nothing_heavy(tmp_path: Path):
    assert "csc" in modules_after(LOOK_AROUND, tmp_path)
    assert not list(tmp_path.iterdir())


def test_steps_that_do_not_compute_load_no_torch(tmp_path: Path):
    steps = ("split_labels", "build_dataset", "register", "ingest", "report")
    loaded = modules_after("\n".join(f"import csc.steps.{step}" for step in steps), tmp_path)
    assert "csc" in loaded
    assert not loaded & {"torch", "timm", "torchvision", "kfp", "mlflow"}


def test_splitting_labels_and_building_views_loads_no_torch_and_no_mlflow(tmp_path: Path):
    data = ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "set", "animals").path
    origin = ingest("animals-b0c2", str(data)).to_json()
    code = f"""
from csc.steps.build_dataset import build_dataset
from csc.steps.split_labels import split_labels
split_labels({origin!r}, "animals-b0c2", 2, 2, "split.json")
build_dataset({origin!r}, "split.json", "{{}}", "train.parquet", "test.parquet")
"""
    loaded = modules_after(code, tmp_path)
    assert json.loads((tmp_path / "split.json").read_text())["new"] == ["dog", "zebra"]
    assert (tmp_path / "train.parquet").is_file()
    assert not loaded & {"torch", "mlflow", "timm", "kfp", "torchvision"}


def test_the_tests_of_a_file_share_a_process(request):
    if request.config.getoption("loadgroup", default=False) is False:
        pytest.skip("tests run in one process")
    assert request.node.nodeid.endswith("@test_house")
