"""Write what the tests compare with: compiled pipelines and the components' READMEs."""

from pathlib import Path
from typing import Any

from csc.pipelines.profile import read_profile
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.window import Window
from csc.scenario import CLASS_COUNTS, Scenario
from tests.golden.readme import readmes

GOLDEN: dict[str, dict[str, Any]] = {  # by file: settings that change the shape of a scenario's pipeline
    "digits-b0c2": {},
    "voc-b10c2-features": {"backbone": {"frozen": True}, "features": {"views": 2}},
    "coco-b0c10-nodes": {"train": {"nodes": 2}},
    "voc-b0c4-kubeflow": {},
}
PLACES = {"voc-b0c4-kubeflow": ("kubeflow", "4-")}  # those for another profile, and their tasks


def golden_path(name: str) -> Path:
    return Path(__file__).parent / f"{name}.yaml"


def scenario_of(name: str) -> Scenario:
    return Scenario.parse("-".join(name.split("-")[:2]))


def compile_to(name: str, path: Path) -> None:
    """Compile what a golden file holds."""
    scenario = scenario_of(name)
    classes = CLASS_COUNTS[scenario.dataset]
    profile, tasks = PLACES.get(name, ("local", None))
    window = Window.parse(tasks, scenario, classes)
    place = read_profile(profile)
    compile_pipeline(scenario, classes, path, GOLDEN.get(name, {}), place, window, on_cluster=profile != "local")


def main() -> None:
    for name in GOLDEN:
        compile_to(name, golden_path(name))
    for path, content in readmes():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
