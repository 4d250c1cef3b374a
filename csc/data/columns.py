"""Arrow columns to and from numpy, by their buffers.

Arrow's own conversions look for pandas and import it when it is installed, which takes longer than a whole step here;
its casts import its library of functions, which takes as long as Arrow itself.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["LABELS", "check_positions", "from_numpy", "strings", "to_numpy"]

LABELS = pa.schema(
    [
        ("image_id", pa.string()),
        ("split", pa.string()),
        ("shard", pa.int32()),
        ("row", pa.int32()),
        ("labels", pa.list_(pa.string())),
        ("difficult", pa.list_(pa.string())),
    ]
)


Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def to_numpy(column: pa.Array | pa.ChunkedArray) -> Array:
    """A column of fixed-width numbers or booleans without nulls, as numpy.

    >>> to_numpy(from_numpy(np.array([1, 2, 3], np.int16)))
    array([1, 2, 3], dtype=int16)
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_boolean(array.type):
        if len(array) == 0:
            return np.empty(0, bool)
        bits = np.unpackbits(np.frombuffer(array.buffers()[1], np.uint8), bitorder="little")
        return bits[array.offset : array.offset + len(array)].view(bool)
    dtype = np.dtype(str(array.type).replace("float", "f4").replace("double", "f8"))
    if len(array) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def from_numpy(values: Array) -> pa.Array:
    """Numbers as a column, without a copy; booleans are packed to bits."""
    if values.dtype == bool:
        packed = pa.py_buffer(np.packbits(values, bitorder="little"))
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, packed])
    contiguous = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(contiguous)])


def strings(values: Sequence[str]) -> pa.Array:
    """Text as a column.

    >>> strings(["tie", "persön"]).to_pylist()
    ['tie', 'persön']
    """
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def check_positions(table: pa.Table) -> None:
    """Raise ValueError for rows whose position in the shards is missing or impossible."""
    lists = [column.combine_chunks().values for column in table.columns if pa.types.is_list(column.type)]
    if any(column.null_count for column in (*table.columns, *lists)):
        raise ValueError("a value is missing")
    for name in ("shard", "row"):
        numbers = to_numpy(table[name])
        if numbers.size and numbers.min() < 0:
            raise ValueError(f"a negative {name}")
