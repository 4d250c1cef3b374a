"""What a real Kubeflow Pipelines 2.17 said of runs; `tests/kubeflow/recorded` has its answers."""

import json
from pathlib import Path
from typing import Any

import msgspec

from csc.pipelines.cluster.answers import Run, Spec

RECORDED = Path(__file__).parent / "kubeflow" / "recorded"


def recorded(name: str) -> dict[str, Any]:
    """What a real server said of a run."""
    answer: dict[str, Any] = json.loads((RECORDED / f"run-{name}.json").read_text())
    return answer


def as_run(answer: dict[str, Any]) -> Run:
    """An answer as it is understood."""
    return msgspec.convert(answer, Run)


def as_spec(documents: dict[str, Any]) -> Spec:
    """A compiled pipeline as it is understood."""
    return msgspec.convert(documents, Spec)
