"""Leaving out images that cannot be used.

Which image lies in which shard follows from the listing alone. So all images are read once before the first shard is
made, and the data set is that of a source which never listed the broken ones.
"""

from collections.abc import Sequence

from csc.data.ingest.shards import Listed, Part, SourceImages, in_parts
from csc.data.ingest.workers import for_each_part
from csc.data.ingest.writer import Making
from csc.data.progress import Bar

__all__ = ["without_broken"]


def without_broken(listing: Sequence[Listed], images: SourceImages, making: Making) -> tuple[list[Listed], list[str]]:
    """Read every image; return the listing without the broken ones, and the ids of these."""
    parts, reasons = in_parts(listing, making.shard_rows), dict[str, str]()
    bar = Bar("look for broken images", len(listing), "images", making.stream)
    for part, broken in zip(parts, for_each_part(_broken, images, parts, making.workers), strict=True):
        reasons |= broken
        bar.advance(len(part.rows))
    making.stream.write("\n" if bar.live else "")
    for reason in reasons.values():
        making.stream.write(f"left out: {reason}\n")
    return [row for row in listing if row.image_id not in reasons], list(reasons)


def _broken(images: SourceImages, part: Part) -> dict[str, str]:
    return images.broken(part.rows)
