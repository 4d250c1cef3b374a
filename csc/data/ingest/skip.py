"""Leaving out images that cannot be used.

The listing decides the shard and row of every image. So all images are read once before the first shard is written,
and the data set is that of a source which never listed the broken ones.
"""

from collections.abc import Sequence

from csc.data.ingest.shards import Listed, Part, SourceImages, split_listing
from csc.data.ingest.workers import for_each_part
from csc.data.ingest.writer import WriteOptions
from csc.data.progress import Bar

__all__ = ["without_broken"]


def without_broken(
    listing: Sequence[Listed], images: SourceImages, options: WriteOptions
) -> tuple[list[Listed], list[str]]:
    """Read every image; return the listing without the broken ones, and the ids of these."""
    parts, reasons = split_listing(listing, options.shard_rows), dict[str, str]()
    bar = Bar("look for broken images", len(listing), "images", options.stream)
    for part, broken in zip(parts, for_each_part(_broken, images, parts, options.workers), strict=True):
        reasons |= broken
        bar.advance(len(part.rows))
    options.stream.write("\n" if bar.live else "")
    for reason in reasons.values():
        options.stream.write(f"left out: {reason}\n")
    return [row for row in listing if row.image_id not in reasons], list(reasons)


def _broken(images: SourceImages, part: Part) -> dict[str, str]:
    return images.broken(part.rows)
