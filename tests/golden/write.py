"""Write what the tests compare with: compiled pipelines and the components' READMEs."""

from pathlib import Path

from csc.components.readme import readmes
from csc.pipelines.scenario import compile_pipeline
from csc.scenario import CLASS_COUNTS, Scenario

GOLDEN = ("digits-b0c2", "voc-b0c4", "coco-b40c10")


def golden_path(name: str) -> Path:
    return Path(__file__).parent / f"{name}.yaml"


def main() -> None:
    for name in GOLDEN:
        scenario = Scenario.parse(name)
        compile_pipeline(scenario, CLASS_COUNTS[scenario.dataset], golden_path(name))
    for path, content in readmes():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
