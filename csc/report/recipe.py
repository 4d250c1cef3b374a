"""How a run is made again: its command, the settings that differ from the method's own, the versions it ran with."""

import json
import shlex
from dataclasses import replace

from csc.artifacts import RunResults
from csc.config import resolve
from csc.config.tree import flatten, setting_text
from csc.data.evidence import TaskFacts
from csc.errors import BadConfig
from csc.scenario import Scenario

__all__ = ["command", "compared_settings"]


def compared_settings(run: RunResults, facts: TaskFacts) -> list[tuple[str, str, str]]:
    """The settings of the run that differ from those of its method: key, value, and the method's value."""
    dataset = Scenario.parse(run.scenario).dataset
    try:
        default = resolve(dataset, {"method": run.method}).flat()
    except BadConfig:  # some methods have to be told facts of an unknown data set
        default = {}
    return [
        (key, setting_text(value), setting_text(default.get(key, "–")))
        for key, value in flatten(json.loads(facts.settings))
        if key not in ("method", "seed") and value != default.get(key)
    ]


def command(run: RunResults, facts: TaskFacts, model: str = "") -> str:
    """The command that makes the run again, from the same data with the same code.

    `model` is the name that its models are registered by: an extended one keeps that of the model it was made from.
    """
    scenario = Scenario.parse(run.scenario)
    words = ["csc", "run", run.scenario]
    if scenario.added:
        model = model or f"{replace(scenario, added=()).name}-{run.method}"
        words = ["csc", "extend", f"models:/{model}@task-{run.last.task - 1:02d}"]
    words += ["--method", run.method, "--seed", str(run.seed)]
    if scenario.added or scenario.dataset != "digits":  # which make themselves
        words += ["--data", facts.data]
    for key, value, _ in compared_settings(run, facts):
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)
