"""The published sizes of the benchmarks, to tell a complete set from a part of it."""

from csc.data.dataset import Dataset

__all__ = ["benchmark_note", "counts", "differences", "from_elsewhere", "published_counts"]

_COUNTS = {
    "voc2007": {"train": {"images": 5_011}, "test": {"images": 4_952}},
    "voc2012": {"train": {"images": 5_717}, "test": {"images": 5_823}},
    "coco2014": {
        "train": {"images": 82_783, "labelled": 82_081},
        "test": {"images": 40_504, "labelled": 40_137},
    },
}

_BENCHMARKS = {"voc": ("voc2007", "VOC 2007"), "coco": ("coco2014", "COCO 2014")}  # by the names that scenarios use
_ELSEWHERE = "is made from"  # only in the note on data of another source, not in that on a part of the benchmark


def benchmark_note(dataset: Dataset) -> str:
    """How a data set differs from the benchmark of its name; empty if it does not, or if there is no such benchmark."""
    kind, title = _BENCHMARKS.get(dataset.name, ("", ""))
    source_kind = str(dataset.source.get("kind"))
    if not kind:
        return ""
    if source_kind != kind:
        return f"this '{dataset.name}' {_ELSEWHERE} '{source_kind}', not from {title}"
    parts = differences(dataset)
    if size := dataset.source.get("short_side"):
        parts.append(f"images scaled down to {size} px")
    return f"not {title} as published: {'; '.join(parts)}" if parts else ""


def from_elsewhere(note: str) -> bool:
    """Whether a `benchmark_note` says that the data come from another source; runs keep nothing but the note.

    >>> from_elsewhere("this 'voc' is made from 'voc2012', not from VOC 2007")
    True
    """
    return _ELSEWHERE in note


def published_counts(kind: str) -> dict[str, dict[str, int]]:
    """Return the published counts per split; empty when none are published for this kind of source."""
    return _COUNTS.get(kind, {})


def counts(dataset: Dataset) -> list[str]:
    """Return one readable line per split: how many images, and the published number."""
    published = published_counts(str(dataset.source.get("kind")))
    known = {(split, key): f" (published: {number:,})" for split, of in published.items() for key, number in of.items()}
    return [
        f"{split:<6}{found['images']:>8,} images{known.get((split, 'images'), '')}, "
        f"{found['labelled']:,} with a label{known.get((split, 'labelled'), '')}"
        for split, found in dataset.splits.items()
    ]


def differences(dataset: Dataset) -> list[str]:
    """Return one readable line for each count that differs from the published one; empty for a complete benchmark."""
    words = {"images": "images", "labelled": "labelled images"}
    return [
        f"{split}: {dataset.splits[split][key]:,} {words[key]} (published: {number:,})"
        for split, numbers in published_counts(str(dataset.source.get("kind"))).items()
        for key, number in numbers.items()
        if dataset.splits[split][key] != number
    ]
