"""The evidence of a task: what a page shows of its model besides the metrics, small enough to keep with every run.

One Parquet file: a row for each `EvidenceImage` (image, class, what the model says and where it looks), and `TaskFacts`
as JSON in the file's metadata. Scores are in it as counts, so its size does not grow with the test images.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from csc.errors import BadData, explained
from csc.storage import atomic_file, regular_file

__all__ = ["NO_TERMS", "THRESHOLDS", "Evidence", "EvidenceImage", "Reliability", "TaskFacts"]

NO_TERMS = ("loss", "images_per_second", "waiting")  # of an epoch: the sum of its terms, and what else is logged
THRESHOLDS = tuple(step / 100 for step in range(100))
_METADATA_KEY = b"csc"
_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("image_id", pa.string()),
        ("score", pa.float32()),
        ("labels", pa.list_(pa.string())),
        ("thumbnail", pa.binary()),
        ("heat", pa.binary()),
        ("heat_width", pa.int16()),
    ]
)


class EvidenceImage(msgspec.Struct, frozen=True):
    """An image as evidence of what the model knows of a class.

    Attributes:
        kind: hit, false alarm, miss, panel or memory. A panel is a fixed choice of images of a class, the same after
            every task; memory is what is kept for replay.
        name: of the class.
        image_id: in the data set.
        score: the model's confidence that the class is in the image.
        labels: classes that the image shows.
        thumbnail: JPEG; empty if it is not meant to be shown.
        heat: where the model looks for the class, a byte for each cell, row by row; empty if that is not known.
        heat_width: cells in a row.
    """

    kind: str
    name: str
    image_id: str
    score: float
    labels: list[str]
    thumbnail: bytes = b""
    heat: bytes = b""
    heat_width: int = 0


class Reliability(msgspec.Struct, frozen=True):
    """For each bin of confidence: how many labels it has, the sum of their confidences, how many are present."""

    count: list[int]
    confidence: list[float]
    present: list[int]


class TaskFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"exemplars": "memory"}):
    """What a page says of a task's model.

    Attributes:
        task: number, from 1.
        classes: seen so far, those of earlier tasks first.
        old: how many are of earlier tasks.
        threshold: a label is predicted when its confidence is above.
        thresholds: of each class, fitted on training images; empty if that was not done.
        settings: that differ from the method's defaults, as JSON.
        data: uri of the data set.
        packages: versions of what the model needs.
        epochs: losses of each.
        train_seconds: of training, and `test_seconds` of scoring the test images.
        present: test images of each class.
        predicted: of each class, images above each of `THRESHOLDS`.
        found: the same, only images that show the class.
        reliability: of `old` and of `new` classes, if there are any.
        correlation: the matrix that relates the classes in the model's head; empty if it has none.
        correlation_name: how the paper calls it.
        exemplars: how many images are kept for replay.
    """

    task: int
    classes: list[str]
    old: int
    threshold: float
    thresholds: list[float]
    settings: str
    data: str
    packages: dict[str, str]
    epochs: list[dict[str, float]]
    train_images: int
    train_seconds: float
    test_images: int
    test_seconds: float
    present: list[int]
    predicted: list[list[int]]
    found: list[list[int]]
    reliability: dict[str, Reliability]
    correlation: list[list[float]]
    correlation_name: str
    exemplars: int


@dataclass(frozen=True)
class Evidence:
    """What a page says and shows of a task's model."""

    facts: TaskFacts
    images: tuple[EvidenceImage, ...]

    def images_of(self, kind: str, name: str = "") -> list[EvidenceImage]:
        """The images of a kind, of one class or of all."""
        return [image for image in self.images if image.kind == kind and name in ("", image.name)]

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        rows = [msgspec.structs.asdict(image) for image in self.images]
        table = pa.Table.from_pylist(rows, _SCHEMA).replace_schema_metadata(
            {_METADATA_KEY: msgspec.json.encode(self.facts)}
        )
        with atomic_file(Path(path)) as aside:  # an image that several classes show is stored once, in the dictionary
            pq.write_table(
                table, aside, compression="zstd", dictionary_pagesize_limit=16 << 20, write_page_checksum=True
            )

    @classmethod
    def read(cls, path: str | Path) -> "Evidence":
        """Read what `write` wrote."""
        try:
            table = pq.ParquetFile(regular_file(path), page_checksum_verification=True).read()
            facts = msgspec.json.decode(table.schema.metadata[_METADATA_KEY], type=TaskFacts)
            if not table.schema.equals(_SCHEMA):
                raise ValueError(f"columns {', '.join(table.column_names)}")
            return cls(facts, tuple(EvidenceImage(**row) for row in table.to_pylist()))
        except (OSError, pa.ArrowException, LookupError, TypeError, ValueError) as error:
            reason = f"not the evidence of a task ({explained(error)})"
            raise BadData(f"{path}: {reason}; make it with the evaluate step") from None
