"""ingest: make sure that the data set is there, and say exactly which one it is."""

from csc.artifacts import DatasetFacts, Origin
from csc.config import preset_for
from csc.data.dataset import Dataset
from csc.data.published import benchmark_note
from csc.errors import BadData
from csc.retry import with_retries
from csc.scenario import Scenario
from csc.storage import absolute
from csc.tracking.server import tracking_uri, without_secrets
from csc.version import code_version

__all__ = ["ingest", "write_dataset_facts"]


@with_retries
def ingest(scenario: str, data: str) -> Origin:
    """Open the data set of a scenario; the embedded digits are made if they are not there yet.

    `data` is a folder or an `s3://` prefix that holds, or for digits will hold, the data set.
    """
    tracking = without_secrets(tracking_uri())  # an address that cannot be used is refused before any work
    parsed = Scenario.parse(scenario)
    if parsed.dataset == "digits" and not Dataset.exists(data):
        from csc.data.ingest.digits import ingest_digits

        ingest_digits(data)
    dataset = Dataset.open(data)
    if dataset.name != parsed.dataset and not parsed.added:
        raise BadData(f"{data}: holds the data set '{dataset.name}', scenario '{scenario}' asks for '{parsed.dataset}'")
    counts = " · ".join(f"{split} {count['images']:,}" for split, count in dataset.splits.items())
    if not parsed.added:
        print(parsed.announcement(len(dataset.classes)))
    print(f"data: {counts} images · fingerprint {dataset.fingerprint[:12]}")
    for line in _notes(dataset, extends=bool(parsed.added)):
        print(f"note: {line}")
    return Origin(absolute(data), dataset.fingerprint, code_version(), tracking)


def _notes(dataset: Dataset, *, extends: bool) -> list[str]:
    """What a reader of the results must know: other data than the benchmark's, settings of another data set.

    A model that is extended brings its own settings. No value is named: what the run sets itself is not known here.
    """
    notes = [note] if (note := benchmark_note(dataset)) else []
    preset = preset_for(dataset.name)
    if preset != dataset.name and not extends:
        notes.append(
            f"no preset is named '{dataset.name}': settings are those of '{preset}'; choose your own with held_out=5"
        )
    return notes


def write_dataset_facts(origin: Origin, out: str) -> dict[str, str | int]:
    """Write what a data set is and where into a file, the first artifact of a run; return the same."""
    dataset = Dataset.open(origin.data)
    images = [int(dataset.splits[split]["images"]) for split in ("train", "test")]
    facts = DatasetFacts(dataset.name, origin.data, dataset.fingerprint, len(dataset.classes), *images)
    facts.write(out)
    return facts.to_plain()
