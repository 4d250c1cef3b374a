"""What the driver of Kubeflow Pipelines 2.17 sets for the pod of a step, as far as a step is told of it.

Made from its source, not from recordings: `dsl.TaskConfig` of a component that passes its pod's settings on, and how an
argument of the run becomes an amount of a resource.
"""

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["resources", "task_config"]

_REFERENCE = re.compile(r"\$\.inputs\.parameters\['(.+?)'\]")
_AMOUNTS = {
    "resourceCpuRequest": ("requests", "cpu"),
    "resourceMemoryRequest": ("requests", "memory"),
    "resourceCpuLimit": ("limits", "cpu"),
    "resourceMemoryLimit": ("limits", "memory"),
}


def resources(container: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Requests and limits of a step's container; an accelerator whose number comes to nothing is left out, silently."""
    declared = container.get("resources", {})
    amounts: dict[str, dict[str, str]] = {"limits": {}, "requests": {}}
    for key, (group, resource) in _AMOUNTS.items():
        if key in declared:
            amounts[group][resource] = _amount(declared[key], parameters)
    accelerator = declared.get("accelerator", {})
    kind, count = (_amount(accelerator.get(key, ""), parameters) for key in ("resourceType", "resourceCount"))
    if kind and count:
        amounts["limits"][kind] = count
    return {group: found for group, found in amounts.items() if found}


def _amount(text: str, parameters: Mapping[str, Any]) -> str:
    """A constant, or the argument that it refers to; the driver reads that as text, and finds none in a number."""
    if not (reference := _REFERENCE.search(text)):
        return text
    value = parameters[reference[1]]
    return value if isinstance(value, str) else ""


def task_config(
    component: Mapping[str, Any],
    container: Mapping[str, Any],
    settings: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings that a component passes on; volumes that a pod has for itself are never among them."""
    passed = {item["field"] for item in component.get("taskConfigPassthroughs", ())}
    secrets = [
        {
            "name": key["envVar"],
            "valueFrom": {"secretKeyRef": {"name": secret["secretName"], "key": key["secretKey"]}},
        }
        for secret in settings.get("secretAsEnv", ())
        for key in secret["keyToEnv"]
    ]
    claims = {mount["pvcNameParameter"]["runtimeValue"]["constant"]: mount for mount in settings.get("pvcMount", ())}
    found = {
        "RESOURCES": {"resources": resources(container, parameters)},
        "ENV": {"env": [*container.get("env", ()), *secrets]},
        "KUBERNETES_VOLUMES": {
            "volumes": [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims],
            "volumeMounts": [{"name": name, "mountPath": mount["mountPath"]} for name, mount in claims.items()],
        },
        "KUBERNETES_NODE_SELECTOR": {"nodeSelector": settings.get("nodeSelector", {}).get("labels")},
        "KUBERNETES_TOLERATIONS": {"tolerations": settings.get("tolerations")},
    }
    return {key: value for field, group in found.items() if field in passed for key, value in group.items() if value}
