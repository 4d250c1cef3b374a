"""extend: what one more task on a registered model starts from."""

from csc.artifacts import Origin, Split
from csc.data.dataset import Dataset
from csc.errors import BadData
from csc.retry import with_retries
from csc.tracking.versions import find_version, version_card

__all__ = ["extend"]


@with_retries
def extend(origin: str, scenario: str, model: str, split_out: str, registered_out: str) -> None:
    """Write `split.json`, with the classes of a data set as the new ones, and `registered.json` of the model before.

    `scenario` is the extended one; `model` is what is extended, as `models:/NAME/VERSION`.
    """
    dataset = Dataset.open(Origin.from_json(origin).data)
    version = find_version(model)
    card = version_card(version)
    if known := sorted(set(dataset.classes) & set(card.classes)):
        raise BadData(
            f"{dataset.uri}: {version.model.uri} knows {', '.join(known)} already; a data set for csc extend has only "
            "classes that are new to the model"
        )
    task = card.task + 1
    new = dataset.classes
    Split(scenario, task, task, new, (*card.classes, *new)).write(split_out)
    version.write(registered_out)
    print(f"task {task}/{task}: new classes {', '.join(new)}; continues {version.model.uri}")
