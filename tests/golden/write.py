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
# One is whole; of the others the first or the last two tasks have every form of step. By file: profile and tasks.
PARTS = {
    "voc-b10c2-features": ("local", "-2"),
    "coco-b0c10-nodes": ("local", "-2"),
    "voc-b0c4-kubeflow": ("kubeflow", "4-"),
}


def golden_path(name: str) -> Path:
    return Path(__file__).parent / f"{name}.yaml"


def scenario_of(name: str) -> Scenario:
    return Scenario.parse("-".join(name.split("-")[:2]))


def tasks_of(name: str) -> Window:
    """The tasks that a golden file, or a whole scenario, holds."""
    scenario = scenario_of(name)
    return Window.parse(PARTS.get(name, ("", None))[1], scenario, CLASS_COUNTS[scenario.dataset])


def compile_to(name: str, path: Path) -> None:
    """Compile what a golden file holds."""
    scenario, profile = scenario_of(name), PARTS.get(name, ("local",))[0]
    classes, on_cluster = CLASS_COUNTS[scenario.dataset], profile != "local"
    settings = GOLDEN.get(name, {})
    compile_pipeline(scenario, classes, path, settings, read_profile(profile), tasks_of(name), on_cluster=on_cluster)


def main() -> None:
    for name in GOLDEN:
        compile_to(name, golden_path(name))
    for path, content in readmes():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
