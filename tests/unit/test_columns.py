import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from csc.data.columns import from_numpy, to_numpy

KINDS = [np.bool_, np.int16, np.int32, np.int64, np.float32, np.float64]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_a_column_comes_back_whole_and_in_parts(kind: type, count: int):
    values = np.random.default_rng(count).integers(0, 2, count).astype(kind)
    column = from_numpy(values)
    assert column.to_pylist() == values.tolist()
    for part in (slice(0, count), slice(3, count), slice(5, 6), slice(count, count)):
        back = to_numpy(column[part])
        assert back.dtype == kind
        assert np.array_equal(back, values[part])


def test_a_column_in_chunks_comes_back_in_order():
    one, two = np.array([True, False, True]), np.array([False, False, True, True])
    chunks = pa.chunked_array([from_numpy(one), from_numpy(two)[1:]])
    assert to_numpy(chunks).tolist() == [True, False, True, False, True, True]


def test_reading_views_and_scores_loads_no_library_of_functions(tmp_path):
    code = f"""
import sys
import numpy as np
import pyarrow as pa
from pathlib import Path
from csc.data.columns import from_numpy, strings
from csc.data.views import View
from csc.data.scores import Scores
offsets, labels = np.array([0, 1, 3], np.int32), np.array([0, 0, 1], np.int16)
lists = pa.ListArray.from_arrays(from_numpy(offsets), from_numpy(labels))
positions = from_numpy(np.array([0, 1], np.int32))
table = pa.Table.from_arrays(
    [strings(["a", "b"]), positions, positions, lists], names=["image_id", "shard", "row", "labels"]
)
View(table, ("cat", "dog"), "images", "").write(Path({str(tmp_path / "view.parquet")!r}))
view = View.read({str(tmp_path / "view.parquet")!r})
assert view.targets().tolist() == [[True, False], [True, True]]
scores = Path({str(tmp_path / "scores.parquet")!r})
Scores(np.zeros((2, 2), np.float32), view.targets(), view.classes, view.table["image_id"]).write(scores)
assert np.array_equal(Scores.read(scores).targets, view.targets())
print("pyarrow.parquet" in sys.modules, "pyarrow.compute" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["True", "False"], result.stderr
