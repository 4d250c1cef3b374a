"""Every step works with exactly the packages of its image: what a lock lacks is found here, not on a cluster."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from csc.components.image import CPU_IMAGE
from csc.config import resolve
from csc.data.ingest.coco import ingest_coco
from csc.data.ingest.digits import ingest_digits
from csc.pipelines.extension import compile_extension
from csc.pipelines.package import write_package
from csc.pipelines.profile import Profile
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.study import build_study
from csc.pipelines.window import Window
from csc.scenario import Scenario
from csc.study.cells import DataSource, cells
from csc.study.spec import Row, Study
from tests.builders import make_coco
from tests.golden.readme import NAMES
from tests.image_environment import image_python
from tests.kubeflow.driver import Driver, Output, Step, read_package
from tests.kubeflow.pod import Pods, started
from tests.kubeflow.values import invented
from tests.tracked import fresh_database

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("images")]

DIGITS, CLASSES = Scenario.parse("digits-b0c5"), 10
ON_MAPS: dict[str, Any] = {
    "train": {"epochs": 1, "batch_size": 16},
    "backbone": {"name": "test_byobnet", "frozen": True},
    "features": {"views": 1},
    "cigcn": {"width": 8},
    "input": {"size": 32},
}


@dataclass
class ImagePods(Pods):
    """Pods whose Python has the packages of the step's image, and no others."""

    def command(self, step: Step, pod: Path) -> list[str]:
        """The container's command, with the Python of its image first."""
        python = image_python("cpu" if step.container["image"] == CPU_IMAGE else "train")
        return ["env", f"PATH={python.parent}:{os.environ['PATH']}", *super().command(step, pod)]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> ImagePods:
    folder = tmp_path_factory.mktemp("images")
    environment = {
        "MLFLOW_TRACKING_URI": fresh_database(folder),
        "CSC_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return ImagePods(folder / "store", started, environment)


def test_all_steps_of_a_scenario_a_window_an_extension_and_a_study_run_with_the_packages_of_their_images(
    pods: ImagePods, tmp_path: Path
):
    data, run = str(tmp_path / "digits"), set()

    def compiled(tasks: str) -> Path:
        out = tmp_path / f"tasks-{tasks}.yaml"
        window = Window.parse(tasks, DIGITS, CLASSES)
        compile_pipeline(DIGITS, CLASSES, out, ON_MAPS, Profile(), window, on_cluster=True)
        return out

    def launch(step: Step) -> Output:
        run.add(step.name)
        return pods(step)

    ingest_digits(data, train=60, test=30, size=32)
    for tasks in ("1", "2"):
        driver = Driver(read_package(compiled(tasks)), launch)
        driver.run(data=data)
        assert not driver.failed, "\n".join(driver.failed.values())
    animals = ingest_coco(make_coco(tmp_path / "coco"), tmp_path / "animals", "animals")
    later, out = DIGITS.extended(len(animals.classes)), tmp_path / "extension.yaml"
    config = resolve("digits", {**ON_MAPS, "features": {"views": 0}})
    compile_extension(later, 3, config, "", out, tests_old=True, on_cluster=True)
    driver = Driver(read_package(out), launch)
    driver.run(data=animals.uri, model=f"models:/{DIGITS.name}-csc/2", test=data)
    assert not driver.failed, "\n".join(driver.failed.values())
    asked = Study("small", "Small", (Row("CSC", "csc", settings=ON_MAPS),), (DIGITS.name,), seeds=(0,))
    sources = {"digits": DataSource(data, CLASSES)}
    out = tmp_path / "study.yaml"
    write_package(build_study(asked, cells(asked, sources), sources), out, on_cluster=True)

    def only_the_tables(step: Step) -> Output:
        if step.name == "collect":
            return launch(step)
        specs = step.component.get("outputDefinitions", {}).get("parameters", {})
        return {"parameterValues": {name: invented(spec) for name, spec in specs.items()}}

    driver = Driver(read_package(out), only_the_tables)
    driver.run()
    assert not driver.failed, "\n".join(driver.failed.values())
    assert run == set(NAMES) - {"train_on_nodes"}  # which needs a cluster


def test_digits_are_made_with_the_packages_of_the_light_image(tmp_path: Path):
    """From scikit-learn's file, without the code of scikit-learn, which is not whole there."""
    code, lines = started(
        [str(image_python("cpu")), "-m", "csc", "ingest", "digits", "--out", str(tmp_path / "digits")], {}
    )
    assert code == 0, lines
    assert "10 classes" in lines
