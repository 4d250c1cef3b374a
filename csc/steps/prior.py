"""prior: find the registered prior model, so that a pipeline can begin in the middle of a scenario."""

from csc.artifacts import Origin
from csc.config import resolve
from csc.errors import BadModel
from csc.retry import with_retries
from csc.scenario import Scenario
from csc.tracking.names import model_name
from csc.tracking.registry import find_registered_task

__all__ = ["prior"]


@with_retries
def prior(origin: str, scenario: str, config_json: str, task: int, out: str) -> None:
    """Write `registered.json` of an earlier task of the same run, as `register` wrote it.

    The same run means the same settings and seed, data and code: a window continues a run, it never mixes two. `task`
    is the one whose model is looked for.
    """
    source = Origin.from_json(origin)
    config = resolve(Scenario.parse(scenario).dataset, config_json)
    name = model_name(scenario, config.method)
    registered = find_registered_task(name, task, config.run_key(scenario, source.fingerprint, source.code))
    if registered is None:
        raise BadModel(
            f"no registered model '{name}' of task {task} with seed {config.seed}, these settings, data "
            f"{source.fingerprint[:12]} and code {source.code}; run the tasks up to it with the same arguments first"
        )
    registered.write(out)
    print(f"task {task}: continues {registered.model.uri}")
