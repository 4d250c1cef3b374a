"""Write what the tests compare with: compiled pipelines and the components' READMEs."""

from pathlib import Path
from typing import Any

from csc.components.readme import readmes
from csc.pipelines.scenario import compile_pipeline
from csc.scenario import CLASS_COUNTS, Scenario

GOLDEN: dict[str, dict[str, Any]] = {  # by file: a scenario, and settings that change the shape of its pipeline
    "digits-b0c2": {},
    "voc-b0c4": {},
    "coco-b40c10": {},
    "voc-b10c2-features": {"backbone": {"frozen": True}, "features": {"views": 2}},
    "coco-b0c10-nodes": {"train": {"nodes": 2}},
}


def golden_path(name: str) -> Path:
    return Path(__file__).parent / f"{name}.yaml"


def scenario_of(name: str) -> Scenario:
    return Scenario.parse("-".join(name.split("-")[:2]))


def main() -> None:
    for name, settings in GOLDEN.items():
        scenario = scenario_of(name)
        compile_pipeline(scenario, CLASS_COUNTS[scenario.dataset], golden_path(name), settings)
    for path, content in readmes():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
