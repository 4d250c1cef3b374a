"""The published sizes of the benchmarks, to tell a whole set from a part of it."""

from csc.data.dataset import Dataset

__all__ = ["compare_with_published", "counts_beside_published", "published_counts"]

_COUNTS = {
    "voc2007": {"train": {"images": 5_011}, "test": {"images": 4_952}},
    "coco2014": {
        "train": {"images": 82_783, "labelled": 82_081},
        "test": {"images": 40_504, "labelled": 40_137},
    },
}
_WORDS = {"images": "images", "labelled": "labelled images"}


def published_counts(kind: str) -> dict[str, dict[str, int]]:
    """Return the published counts per split of a kind of source; empty when none are published.

    >>> published_counts("voc2007")
    {'train': {'images': 5011}, 'test': {'images': 4952}}
    >>> published_counts("coco")
    {}
    """
    return {split: dict(counts) for split, counts in _COUNTS.get(kind, {}).items()}


def counts_beside_published(dataset: Dataset) -> list[str]:
    """Return one readable line for each split: how many images, and how many a whole benchmark has."""
    published = published_counts(str(dataset.source.get("kind")))
    lines = []
    for split, counts in dataset.splits.items():
        parts = [
            f"{counts[key]:>{width},} {words}" + (f" (published: {known:,})" if known is not None else "")
            for key, words, width in (("images", "images", 8), ("labelled", "with a label", 0))
            for known in [published.get(split, {}).get(key)]
        ]
        lines.append(f"{split:<6}" + ", ".join(parts))
    return lines


def compare_with_published(dataset: Dataset) -> list[str]:
    """Return one readable line for each count that differs from the published one; empty for a whole benchmark."""
    return [
        f"{split}: {dataset.splits[split][key]:,} {_WORDS[key]} (published: {published:,})"
        for split, counts in published_counts(str(dataset.source.get("kind"))).items()
        for key, published in counts.items()
        if dataset.splits[split][key] != published
    ]
