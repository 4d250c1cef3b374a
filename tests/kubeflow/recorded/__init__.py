"""Recordings of a real Kubeflow Pipelines 2.17, as files next to this one."""

import json
from pathlib import Path
from typing import Any

__all__ = ["RECORDED"]

# By component, those of several with a number: what the launcher handed to its executor.
RECORDED: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "executor-inputs").glob("*.json"))
}
