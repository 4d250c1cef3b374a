"""What a real Kubeflow Pipelines 2.17 said of runs; `tests/kubeflow/recorded` has its answers."""

import json
from pathlib import Path
from typing import Any

import kfp_server_api

RECORDED = Path(__file__).parent / "kubeflow" / "recorded"


def recorded(name: str) -> dict[str, Any]:
    """What a real server said of a run."""
    answer: dict[str, Any] = json.loads((RECORDED / f"run-{name}.json").read_text())
    return answer


def as_run(answer: dict[str, Any]) -> kfp_server_api.V2beta1Run:
    """An answer as the client of kfp understands it."""

    class Response:
        data = json.dumps(answer)

    return kfp_server_api.ApiClient().deserialize(Response, "V2beta1Run")
