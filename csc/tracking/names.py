"""What runs, models, files and metrics are called, so that each name says which run it belongs to.

Two runs of one scenario, method and seed may differ in their settings, so names carry the settings that the user
changed. A run with the method's own settings has the short name.
"""

import hashlib
import json
import re
from typing import Any

from csc.config import differences
from csc.config.layers import method_class
from csc.config.schema import EXECUTION_ONLY, Config
from csc.config.tree import flatten, setting_text
from csc.scenario import Scenario
from csc.storage import json_digest

__all__ = ["changed_settings", "class_metric", "model_name", "page_name", "path_metric", "run_title", "settings_text"]

_SHOWN, _LONGEST_SHOWN = 4, 48  # settings in a title, and characters of each: Kubeflow keeps 255 of a name
_LONGEST_KEY = 250  # characters that MLflow takes


def model_name(scenario: str, method: str) -> str:
    """The registered model that holds the tasks of a scenario learned by a method."""
    return f"{scenario}-{method}"


def changed_settings(scenario: str, config: Config) -> dict[str, Any]:
    """The settings that differ from those of the method, by dotted key.

    Seed, facts of the data set and what changes no result are left out.

    >>> from csc.config import resolve
    >>> changed_settings("voc-b0c4", resolve("voc", {"seed": 1, "train": {"epochs": 3, "workers": 2}}))
    {'train.epochs': 3}
    """
    changed = flatten(json.loads(differences(Scenario.parse(scenario).dataset, config)))
    left_out = ("method", "seed", *method_class(config.method).required_settings, *EXECUTION_ONLY)
    return {key: value for key, value in changed if key not in left_out}


def settings_text(settings: dict[str, Any]) -> list[str]:
    """Settings as a person types them.

    >>> settings_text({"init": "hub", "backbone.frozen": True, "max_entropy.beta": 0.0})
    ['init=hub', 'backbone.frozen=true', 'max_entropy.beta=0']
    """
    return [f"{key}={setting_text(value, short=True)}" for key, value in settings.items()]


def run_title(scenario: str, config: Config) -> str:
    """The name of a scenario run, for people.

    >>> from csc.config import resolve
    >>> run_title("voc-b0c4", resolve("voc", {"max_entropy": {"beta": 0}}))
    'voc-b0c4 · csc · max_entropy.beta=0 · seed 0'
    """
    changed = settings_text(changed_settings(scenario, config))
    changed = [item if len(item) <= _LONGEST_SHOWN else f"{item[: _LONGEST_SHOWN - 1]}…" for item in changed]
    more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return " · ".join([scenario, config.method, *changed[:_SHOWN], *more, f"seed {config.seed}"])


def page_name(scenario: str, config: Config) -> str:
    """The file name of a run's page, without its ending; changed settings add a short key.

    >>> from csc.config import resolve
    >>> page_name("voc-b0c4", resolve("voc"))
    'voc-b0c4-csc-seed0'
    """
    name = f"{scenario}-{config.method}-seed{config.seed}"
    changed = changed_settings(scenario, config)
    return f"{name}-{json_digest(changed)[:6]}" if changed else name


def class_metric(metric: str, name: str) -> str:
    """The key of a metric of one class; different names have different keys, whatever characters they are made of.

    MLflow allows letters, digits, `_`, `-`, `.` and spaces, and `/` where a path could have it. All else is written as
    `_x` code point `_`, and so is the `_` of a name that has `_x` itself. A key that is too long ends in a digest.

    >>> class_metric("AP", "person (sitting)")
    'AP/person _x28_sitting_x29_'
    """
    return _shortened(f"{metric}/{_escaped(name)}", name)


def path_metric(path: str) -> str:
    """The key of a metric with a path, whose parts are written as `class_metric` writes names.

    >>> path_metric("voc-b0c4/CSC (0)/last_mAP")
    'voc-b0c4/CSC _x28_0_x29_/last_mAP'
    """
    return _shortened("/".join(map(_escaped, path.split("/"))), path)


def _escaped(name: str) -> str:
    return re.sub(r"[^\w.\- ]|_(?=x)|^\.(?=\.?$)", lambda found: f"_x{ord(found[0]):X}_", name)


def _shortened(key: str, whole: str) -> str:
    """A key that MLflow takes; one that is too long ends in a digest of what it stands for."""
    if len(key) <= _LONGEST_KEY:
        return key
    digest = hashlib.sha256(whole.encode()).hexdigest()
    return f"{key[: _LONGEST_KEY - len(digest) - 1]}/{digest}"
