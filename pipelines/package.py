"""The compiled file of a pipeline, and its smallest form for a cluster.

A cluster keeps the text of a pipeline many times over in one object of limited size, and kfp writes more of it than a
run needs. For a cluster three things are left out, none of which a step can see:

- repeated components: kfp copies a sub-pipeline with all its steps for each task that calls it; equal ones come once;
- the source of the steps, which is in their images: `python -m csc.components NAME` runs it;
- descriptions of the inputs of steps, which are in the README of each component. Those of the run's arguments stay.

On this machine kfp.local runs the file as kfp writes it: it names the folder of a step's outputs after the component,
so every task needs components of its own.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler
from kfp.dsl.base_component import BaseComponent

from csc.errors import BadScenario
from csc.storage import write_bytes

__all__ = ["STEPS", "STEPS_LIMIT", "checked_steps", "compact", "write_package"]

# Argo keeps a workflow and the state of all its steps in one object of at most 1 MiB. tests/kubeflow/argo.py computes
# its size from a compiled file, in agreement with what was measured on Kubeflow Pipelines 2.17: a step takes about
# 4.9 KB, the pipeline 60 KB, and each scenario in it another 30 KB. So this many steps of several scenarios fill two
# thirds of the object, which leaves room for steps that are tried again; at the limit one scenario fills four fifths.
STEPS = 110
STEPS_LIMIT = 140


def checked_steps(scenario: str, tasks: int, others: int) -> int:
    """How many steps a run has: five in each task, and others before and after all tasks.

    One is refused that would end in an error after hours, because no workflow can hold the state of so many steps.
    """
    steps = 5 * tasks + others
    if steps > STEPS_LIMIT:
        raise BadScenario(
            f"scenario '{scenario}': a run has {steps} steps, and a workflow holds the state of about {STEPS_LIMIT}; "
            f"submit its tasks in windows, the first with csc submit {scenario} --tasks 1-10"
        )
    return steps


def write_package(
    pipeline: BaseComponent, out: Path, parameters: dict[str, Any] | None = None, on_cluster: bool = False
) -> None:
    """Compile a pipeline to YAML, with these defaults of its arguments; for a cluster in the smallest form."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(package), pipeline_parameters=parameters)
        text = package.read_text(encoding="utf-8")
    if on_cluster:
        documents = list(yaml.load_all(text, yaml.CSafeLoader))
        compact(documents)
        head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
        text = head + yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=True)
    write_bytes(out, text.encode())


def compact(documents: list[dict[str, Any]]) -> None:
    """Leave out of a pipeline, and of its platform's document if there is one, what a run does not need."""
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        words = executor["container"].get("args", [])
        if "--function_to_execute" in words:
            name = words[words.index("--function_to_execute") + 1]
            executor["container"]["command"] = ["python3", "-m", "csc.components", name]
    for component in documents[0]["components"].values():
        for side in ("inputDefinitions", "outputDefinitions"):
            for slots in component.get(side, {}).values():
                for slot in slots.values():
                    slot.pop("description", None)
    while _merge_equal(*documents):
        pass  # sub-pipelines become equal once their steps are the same


def _merge_equal(spec: dict[str, Any], platform: dict[str, Any] | None = None) -> bool:
    """Let the first of equal components stand for the others; return whether there were any."""
    components, executors = spec["components"], spec["deploymentSpec"]["executors"]
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if platform else {}
    first: dict[str, str] = {}
    same: dict[str, str] = {}
    for name in sorted(components, key=lambda name: (len(name), name)):
        content = {key: value for key, value in components[name].items() if key != "executorLabel"}
        label = components[name].get("executorLabel")
        text = json.dumps([content, executors.get(label), pods.get(label)], sort_keys=True)
        if first.setdefault(text, name) != name:
            same[name] = first[text]
    for name in same:
        del components[name]
    left = {component.get("executorLabel") for component in components.values()}
    for label in executors.keys() - left:
        del executors[label]
        pods.pop(label, None)
    for component in (spec["root"], *components.values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            called = task["componentRef"]
            called["name"] = same.get(called["name"], called["name"])
    return bool(same)
