"""ingest: make sure that the data set is there, and say exactly which one it is."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from csc.data.dataset import Dataset
from csc.errors import BadData
from csc.retry import with_retries
from csc.scenario import Scenario
from csc.storage import absolute, exists, join, write_json
from csc.tracking.retry import tracking_uri, without_secrets
from csc.version import code_version

__all__ = ["Origin", "describe", "ingest"]


@dataclass(frozen=True)
class Origin:
    """What everything after this step is made from: the data, by place and content, and the code; and who tracks it.

    It travels as a parameter, so that the pipeline's cache never serves results of other data or other code, nor
    those that only another tracking server knows.
    """

    data: str
    fingerprint: str
    code: str
    tracking: str = ""

    @classmethod
    def from_json(cls, text: str) -> "Origin":
        """Read back what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """The origin as a pipeline parameter."""
        return json.dumps(asdict(self), sort_keys=True)


@with_retries
def ingest(scenario: str, data: str) -> Origin:
    """Open the data set of a scenario; the embedded digits are made on the spot if they are not there yet.

    Args:
        scenario: name, for instance `voc-b0c4`.
        data: folder or `s3://` prefix that holds, or for digits will hold, the data set.
    """
    wanted = Scenario.parse(scenario)
    if wanted.dataset == "digits" and not exists(join(data, "dataset.json")):
        from csc.data.ingest.digits import ingest_digits

        ingest_digits(data)
    dataset = Dataset.open(data)
    if dataset.name != wanted.dataset:
        raise BadData(f"{data}: holds the data set '{dataset.name}', scenario '{scenario}' asks for '{wanted.dataset}'")
    counts = " · ".join(f"{split} {count['images']:,}" for split, count in dataset.splits.items())
    print(wanted.announcement(len(dataset.classes)))
    print(f"data: {counts} images · fingerprint {dataset.fingerprint[:12]}")
    return Origin(absolute(data), dataset.fingerprint, code_version(), without_secrets(tracking_uri()))


def describe(origin: Origin, out: str) -> dict[str, str | int]:
    """Write what a data set is and where into a file, the first artifact of a run; return the same.

    Args:
        origin: from `ingest`.
        out: file to write.
    """
    dataset = Dataset.open(origin.data)
    facts: dict[str, str | int] = {
        "display_name": dataset.name,
        "uri": origin.data,
        "fingerprint": dataset.fingerprint,
        "classes": len(dataset.classes),
        **{f"{split}_images": int(count["images"]) for split, count in dataset.splits.items()},
    }
    write_json(Path(out), facts)
    return facts
