"""Write a data set from a listing of its images: shards, the label table and `dataset.json`.

The listing is checked before the first image is read. The shards are then written by any number of workers, and
resumed where an earlier attempt stopped; the result depends on neither.
"""

import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import PIL
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from csc.data.columns import LABELS
from csc.data.dataset import SPLITS, Dataset, card_digest
from csc.data.ingest.classes import check_class_names, in_order
from csc.data.ingest.images import ListedImage, ReadImages, SourceImages
from csc.data.ingest.output import refuse_foreign, resume
from csc.data.ingest.repair import beyond_repair, repair
from csc.data.ingest.shard_writer import Part, Shard, split_listing
from csc.data.ingest.source import Source
from csc.data.ingest.workers import for_each_part
from csc.data.progress import Bar
from csc.errors import BadData, Unavailable
from csc.storage import join, json_digest, sha256_file, write_json

__all__ = ["DEFAULTS", "SourceListing", "WriteOptions", "label_table", "write_dataset", "write_source"]

SHARD_ROWS = 1024


@dataclass(frozen=True)
class WriteOptions:
    """How a data set is written; only the last three change its content.

    Attributes:
        workers: processes that write shards.
        progress: where to print progress; nowhere if not given.
        shard_rows: images in a shard.
        skip_bad: leave out broken images instead of stopping at the first; the record of the source names them.
        short_side: scale images down to this short side; the record of the source says so.
        class_order: in which order classes arrive; that of their names if not given.
    """

    workers: int = 1
    progress: TextIO | None = None
    shard_rows: int = SHARD_ROWS
    skip_bad: bool = False
    short_side: int | None = None
    class_order: Sequence[str] | None = None

    @property
    def stream(self) -> TextIO:
        """Where to print."""
        return self.progress or io.StringIO()


DEFAULTS = WriteOptions()


@dataclass(frozen=True)
class SourceListing:
    """What a reader of annotations found in a source: all that a data set is made from but the bytes of its images."""

    classes: Iterable[str]  # all class names, in any order
    listing: Iterable[ListedImage]  # all images, in any order
    record: dict[str, Any]  # the kind of source and the digests of its annotation files; how it was read
    difficult_is_member: bool = False  # whether a class in `difficult` makes an image part of that class's task
    skipped: Sequence[str] = ()  # ids of images that were left out because of their annotations


def write_source(
    out: str | os.PathLike[str], name: str, files: Source, source_listing: SourceListing, options: WriteOptions
) -> Dataset:
    """Write the annotated images of a source as a data set."""
    images = SourceImages(files, options.short_side)
    listing, skipped = list(source_listing.listing), source_listing.skipped
    if options.skip_bad:
        broken = _broken(listing, images, options)
        listing = [row for row in listing if row.image_id not in broken]
        skipped = sorted({*skipped, *broken})
    record = {**source_listing.record, **({"skipped": skipped} if skipped else {}), **images.record}
    usable = replace(source_listing, listing=listing, record=record)
    return write_dataset(out, name, usable, images, state=images.state, options=options)


def _broken(listing: Sequence[ListedImage], images: SourceImages, options: WriteOptions) -> set[str]:
    """Read every image; return the ids of those that cannot be used.

    The listing decides the shard and row of every image. So all are read before the first shard is written, and the
    data set is that of a source which never listed the broken ones.
    """
    parts, reasons = split_listing(listing, options.shard_rows), dict[str, str]()
    with Bar("look for broken images", len(listing), "images", options.stream) as bar:
        for part, broken in zip(parts, for_each_part(_broken_of, images, parts, options.workers), strict=True):
            reasons |= broken
            bar.advance(len(part.rows))
    for reason in reasons.values():
        options.stream.write(f"left out: {reason}\n")
    return set(reasons)


def _broken_of(images: SourceImages, part: Part) -> dict[str, str]:
    return images.broken(part.rows)


def write_dataset(
    out: str | os.PathLike[str],
    name: str,
    source_listing: SourceListing,
    read_images: ReadImages,
    *,
    state: Callable[[Sequence[ListedImage]], str] | None = None,
    options: WriteOptions = DEFAULTS,
) -> Dataset:
    """Write a data set and open it; an existing one is compared with the source, image by image, and repaired.

    The fingerprint covers classes, labels and image bytes, so equal fingerprints mean equal data.

    Args:
        out: folder or `s3://` prefix; another data set there is never overwritten.
        name: of the data set, as scenarios use it.
        source_listing: classes and images.
        read_images: yields the images of some rows of the listing; goes to worker processes.
        state: hash of what `read_images` yields for some rows: a shard of an earlier attempt is kept only if it is the
            same. By default the record of the source decides.
        options: how it is written.
    """
    order = in_order(source_listing.classes, options.class_order)
    check_class_names(order)
    listing = _checked(source_listing.listing, order)
    plan = _Plan(name, order, source_listing.difficult_is_member, source_listing.record, listing, state, options)
    refuse_foreign(out)
    if not Dataset.exists(out):
        with resume(out, plan.parts, plan.key, options.stream) as (output, finished):
            if not Dataset.exists(out):  # else another process has written it while this one waited
                shards = _make(plan, output.make, read_images, finished)
                output.finish(functools.partial(plan.complete, shards=shards))
                return Dataset.open(out)
            output.drop()
    return _compared(Dataset.open(out), plan, read_images)


@dataclass(frozen=True)
class _Plan:
    """What is known of a data set before its images are read."""

    name: str
    classes: tuple[str, ...]
    difficult_is_member: bool
    source: dict[str, Any]
    listing: tuple[ListedImage, ...]
    state: Callable[[Sequence[ListedImage]], str] | None
    options: WriteOptions

    @functools.cached_property
    def labels(self) -> pa.Table:
        """The label table."""
        return label_table(self.listing, self.options.shard_rows)

    @functools.cached_property
    def parts(self) -> list[Part]:
        """What each shard is made from."""
        return split_listing(self.listing, self.options.shard_rows, self._shard_key)

    def _shard_key(self, rows: Sequence[ListedImage]) -> str:
        state = self.source if self.state is None else self.state(rows)
        return json_digest([[[row.image_id, row.file] for row in rows], state, pa.__version__, PIL.__version__])

    @functools.cached_property
    def key(self) -> str:
        """Hash of all that the data set is made from."""
        keys = [part.key for part in self.parts]
        return json_digest([self.name, self.classes, self.difficult_is_member, self.source, self.listing, keys])

    def fingerprint(self, contents: Iterable[str]) -> str:
        """The fingerprint, given the SHA-256 of every image in the order of the listing."""
        digest = hashlib.sha256()
        for row, content in zip(self.listing, contents, strict=True):
            digest.update(json.dumps([*row[:4], content]).encode())
        digest.update(json.dumps([self.name, self.classes, self.difficult_is_member]).encode())
        return digest.hexdigest()

    def complete(self, folder: Path, shards: Sequence[Shard]) -> None:
        """Write the files next to the shards; the card of the data set comes last."""
        index = [{"rows": shard.rows, "bytes": shard.bytes, "sha256": shard.sha256} for shard in shards]
        write_json(folder / "images" / "index.json", index)
        labels = folder / "labels.parquet"
        pq.write_table(self.labels, labels)
        info = {
            "name": self.name,
            "classes": list(self.classes),
            "splits": {split: _counts(self.labels, split) for split in SPLITS},
            "fingerprint": self.fingerprint(content for shard in shards for content in shard.contents),
            "source": self.source,
            "difficult_is_member": self.difficult_is_member,
            "labels_sha256": sha256_file(labels),
        }
        write_json(folder / "dataset.json", info | {"digest": card_digest(info)})


def _make(
    plan: _Plan, work: Callable[[ReadImages, Part], Shard], read_images: ReadImages, finished: dict[int, Shard]
) -> list[Shard]:
    """Write the shards that are not finished yet; return all of them in order."""
    stream = plan.options.stream
    if finished:
        stream.write(f"an earlier attempt has finished {len(finished)} of {len(plan.parts)} shards; resuming\n")
    missing = [part for part in plan.parts if part.number not in finished]
    done = sum(shard.rows for shard in finished.values())
    with Bar("ingest", len(plan.listing), "images", stream, done) as bar:
        for part, shard in zip(missing, for_each_part(work, read_images, missing, plan.options.workers), strict=True):
            finished[part.number] = shard
            bar.advance(shard.rows)
    return [finished[part.number] for part in plan.parts]


def _compared(present: Dataset, plan: _Plan, read_images: ReadImages) -> Dataset:
    """Return the existing data set if it is the planned one, repaired if it is damaged."""
    known = (present.name, present.classes, present.difficult_is_member)
    equal = known == (plan.name, plan.classes, plan.difficult_is_member) and _same_labels(present, plan)
    if not equal or plan.fingerprint(_contents(plan, read_images)) != present.fingerprint:
        raise BadData(f"{present.uri}: already contains another data set; choose another --out or remove it")
    for file in repair(present, plan.parts, read_images, plan.options.workers):
        plan.options.stream.write(f"was missing or damaged, written again: {file}\n")
    return present


def _same_labels(present: Dataset, plan: _Plan) -> bool:
    columns = ["image_id", "split", "labels", "difficult"]  # other rows per shard make no difference
    try:
        return bool(present.labels().select(columns).equals(plan.labels.select(columns)))
    except Unavailable:
        raise
    except BadData:
        raise beyond_repair(present, join(present.uri, "labels.parquet")) from None


def _contents(plan: _Plan, read_images: ReadImages) -> list[str]:
    """The SHA-256 of every image of the source."""
    contents: list[str] = []
    with Bar("compare with what is there", len(plan.listing), "images", plan.options.stream) as bar:
        for some in for_each_part(_contents_of, read_images, plan.parts, plan.options.workers):
            contents += some
            bar.advance(len(some))
    return contents


def _contents_of(read_images: ReadImages, part: Part) -> list[str]:
    return [hashlib.sha256(image.jpeg).hexdigest() for image in read_images(part.rows)]


def label_table(listing: Sequence[ListedImage], shard_rows: int = SHARD_ROWS) -> pa.Table:
    """The label table of a listing: the labels of each image, and its shard and row."""
    columns = [
        [row.image_id for row in listing],
        [row.split for row in listing],
        [number // shard_rows for number in range(len(listing))],
        [number % shard_rows for number in range(len(listing))],
        [row.labels for row in listing],
        [row.difficult for row in listing],
    ]
    return pa.table(columns, schema=LABELS)


def _checked(listing: Iterable[ListedImage], classes: Sequence[str]) -> tuple[ListedImage, ...]:
    """Return a listing by split and id, with sorted labels, each once; refuse one with an unusable class."""
    known, seen, rows = set(classes), set[str](), list[ListedImage]()
    for row in sorted(listing, key=lambda row: (SPLITS.index(row.split), row.image_id)):
        if not row.image_id.isprintable():
            raise BadData(f"image {row.image_id!a}: its name cannot be written in one line; rename the file")
        if row.image_id in seen:
            raise BadData(f"image {row.image_id}: id appears twice; every image needs an id of its own")
        unknown = {*row.labels, *row.difficult} - known
        if unknown:
            raise BadData(f"image {row.image_id}: unknown class '{min(unknown)}'; known are {', '.join(classes)}")
        labels = tuple(sorted(set(row.labels)))
        difficult = tuple(sorted(set(row.difficult) - set(labels)))
        rows.append(row._replace(labels=labels, difficult=difficult))
        seen.add(row.image_id)
    _check_classes(rows, classes)
    return tuple(rows)


def _check_classes(rows: Sequence[ListedImage], classes: Sequence[str]) -> None:
    """Refuse a class without training images, and a data set without a test split."""
    if not rows:
        raise BadData("the source has no images; expected at least one training image")
    trained = {label for row in rows if row.split == "train" for label in row.labels}
    for name in classes:
        if name not in trained:
            raise BadData(f"class '{name}' has no training image; remove the class or add images of it")
    if rows[-1].split != "test":
        raise BadData("the source has no test images; expected at least one")


def _counts(labels: pa.Table, split: str) -> dict[str, int]:
    rows = labels.filter(pc.equal(labels["split"], split))
    lengths = pc.list_value_length(rows["labels"])
    return {"images": rows.num_rows, "labelled": pc.sum(pc.greater(lengths, 0)).as_py() or 0}
