"""extend: what one more task on a registered model starts from."""

from csc.artifacts import Origin, Split
from csc.data.dataset import Dataset
from csc.errors import BadData
from csc.retry import with_retries
from csc.tracking.versions import registered_card, registered_task_at

__all__ = ["extend"]


@with_retries
def extend(origin: str, scenario: str, model: str, split_out: str, registered_out: str) -> None:
    """Write `split.json`, with the classes of a data set as the new ones, and `registered.json` of the prior model.

    `scenario` is the extended one; `model` is what is extended, as `models:/NAME/VERSION`.
    """
    dataset = Dataset.open(Origin.from_json(origin).data)
    prior = registered_task_at(model)
    card = registered_card(prior)
    if known := sorted(set(dataset.classes) & set(card.classes)):
        raise BadData(
            f"{dataset.uri}: {prior.model.uri} knows {', '.join(known)} already; a data set for csc extend has only "
            "classes that are new to the model"
        )
    task = card.task + 1
    new = dataset.classes
    Split(scenario, task, task, new, (*card.classes, *new)).write(split_out)
    prior.write(registered_out)
    print(f"task {task}/{task}: new classes {', '.join(new)}; continues {prior.model.uri}")
