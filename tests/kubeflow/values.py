"""Values on their way through Kubeflow Pipelines 2.17: what its driver, launcher and metadata store make of them."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["Refused", "as_text", "completed", "invented", "is_of_type", "plain", "stored"]

TYPES: dict[str, type | tuple[type, ...]] = {
    "STRING": str,
    "NUMBER_INTEGER": (int, float),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": bool,
    "LIST": list,
    "STRUCT": dict,
    "TASK_FINAL_STATUS": dict,
    "TASK_CONFIG": dict,
}
EXAMPLES = {"STRING": "text", "NUMBER_INTEGER": 1, "NUMBER_DOUBLE": 0.5, "BOOLEAN": True, "LIST": [], "STRUCT": {}}


class Refused(Exception):
    """The driver cannot make the input of a task, or the store cannot keep an output; on a cluster the run fails."""


def completed(component: Mapping[str, Any], given: Mapping[str, Any], path: str, without: str = "") -> dict[str, Any]:
    """The parameters of a component: what is given, else the defaults, each of the declared type.

    Args:
        component: the compiled component.
        given: values by name; more than the component declares are kept as they are.
        path: of the task, for messages.
        without: a parameter that is not wanted.
    """
    values = dict(given)
    for name, spec in component.get("inputDefinitions", {}).get("parameters", {}).items():
        if name == without:
            continue
        if name not in values and "defaultValue" in spec:
            values[name] = spec["defaultValue"]
        if name in values:
            values[name] = _typed(values[name], spec["parameterType"], f"{path}: input parameter {name}")
        elif not spec.get("isOptional"):
            raise Refused(f"{path}: neither value nor default value provided for non-optional parameter {name}")
    return values


def _typed(value: Any, kind: str, what: str) -> Any:
    """A value of the declared type; anything can become text, nothing else is converted."""
    if kind == "STRING":
        return as_text(value)
    if not is_of_type(value, kind):
        raise Refused(f"{what} type mismatch: expect {kind}, got {type(value).__name__}")
    return value


def is_of_type(value: Any, kind: str) -> bool:
    """Whether a value is of a declared type."""
    return isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "BOOLEAN")


def as_text(value: Any) -> str:
    """A parameter where text is wanted."""
    return value if isinstance(value, str) else json.dumps(plain(value), separators=(",", ":"))


def stored(value: Any, what: str) -> Any:
    """A value of an artifact's metadata as the store gives it back; it knows texts, numbers and wrapped structures."""
    if value is None:
        raise Refused(f"{what}: null cannot be stored")
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list):
        return {"list": value}
    return {"struct": value} if isinstance(value, dict) else value


def plain(value: Any) -> Any:
    """A value as Go writes it as JSON: a whole number has no decimal point."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def invented(spec: Mapping[str, Any]) -> Any:
    """Some value of the declared type of a parameter."""
    return EXAMPLES[spec["parameterType"]]
