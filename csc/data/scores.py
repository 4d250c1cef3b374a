"""The scores of a task: what its model says of every test image, from which every number can be computed again."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from csc.errors import BadData
from csc.storage import atomic_file, regular_file

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = ["Scores"]

_SCORE, _TARGET = "score:", "target:"  # before the name of a class, so that no name can be that of another column
_ROW_GROUP = 4096  # images


@dataclass(frozen=True)
class Scores:
    """Confidences and targets of all test images, one column of each per class."""

    confidences: "NDArray[np.float32]"  # (images, classes), between 0 and 1
    targets: "NDArray[np.bool_]"  # of the same shape
    classes: tuple[str, ...]
    image_ids: "pa.ChunkedArray"

    @classmethod
    def read(cls, path: str | Path) -> "Scores":
        """Read what `write` wrote."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        from csc.data.columns import to_numpy

        try:
            table = pq.ParquetFile(regular_file(path), page_checksum_verification=True).read()
            classes = tuple(name.removeprefix(_SCORE) for name in table.column_names if name.startswith(_SCORE))
            if table.column_names[1:] != [kind + name for kind in (_SCORE, _TARGET) for name in classes]:
                raise ValueError("not one column of scores and one of targets for each class")
            kinds = [[to_numpy(table[kind + name]) for name in classes] for kind in (_SCORE, _TARGET)]
            confidences, targets = (np.stack(columns, axis=1) for columns in kinds)
            if any(column.null_count for column in table.columns) or targets.dtype != bool:
                raise ValueError("a value is missing, or a target is not true or false")
            if not ((confidences >= 0) & (confidences <= 1)).all():
                raise ValueError("a confidence is not between 0 and 1")
        except (OSError, TypeError, ValueError, KeyError, pa.ArrowException) as error:
            raise BadData(f"{path}: not scores ({error}); make them with the evaluate step") from None
        return cls(confidences, targets, classes, table.column(0))

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from csc.data.columns import from_numpy

        names = [kind + name for kind in (_SCORE, _TARGET) for name in self.classes]
        columns = [from_numpy(column) for values in (self.confidences, self.targets) for column in values.T]
        table = pa.Table.from_arrays([self.image_ids, *columns], names=["image_id", *names])
        with atomic_file(Path(path)) as aside:
            pq.write_table(table, aside, row_group_size=_ROW_GROUP, write_page_checksum=True)
