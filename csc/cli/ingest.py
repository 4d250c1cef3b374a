"""`csc ingest`: turn annotations and images into a data set."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from csc.cli.command import Command
from csc.data.cores import cores
from csc.errors import BadData
from csc.scenario import Scenario

if TYPE_CHECKING:
    from csc.data.dataset import Dataset

__all__ = ["INGEST"]


def _ingest_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kind", choices=["voc2007", "coco2014", "coco", "digits"], help="what the source is")
    parser.add_argument(
        "--source", metavar="PLACE", help="folder, zip or s3:// place with annotations and images (not for digits)"
    )
    parser.add_argument("--out", metavar="PLACE", required=True, help="folder or s3:// prefix of the data set to make")
    parser.add_argument("--name", default="custom", help="name of a 'coco' data set, as scenarios use it")
    parser.add_argument(
        "--short-side", type=int, metavar="N", help="scale images down to N pixels on their short side (not for digits)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that read images (default: all cores)")
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out broken images, and of voc2007 those with unusable annotations, and say so (not for digits)",
    )


def _ingest(arguments: Namespace) -> int:
    from csc.data.ingest.published import compare_with_published, counts_beside_published

    dataset = _ingested(arguments)
    for line in counts_beside_published(dataset):
        print(line)
    if skipped := dataset.source.get("skipped"):
        names = ", ".join(skipped[:5]) + (" …" if len(skipped) > 5 else "")
        print(f"note: left out {len(skipped)} images that cannot be used: {names}")
    for line in compare_with_published(dataset):
        print(f"note: {line}")
    print(f"{len(dataset.classes)} classes · fingerprint {dataset.fingerprint[:12]} · {dataset.place}")
    next_scenario = f"{dataset.name}-b0c{max(1, len(dataset.classes) // 5)}"
    print(f"next: csc run {next_scenario} --data {shlex.quote(arguments.out)}")
    return 0


def _ingested(arguments: Namespace) -> "Dataset":
    """Make the data set that the arguments ask for."""
    from csc.data.ingest.coco import ingest_coco, ingest_coco2014
    from csc.data.ingest.digits import ingest_digits
    from csc.data.ingest.voc import ingest_voc2007
    from csc.data.ingest.writer import Making

    kind, source, out, short_side = arguments.kind, arguments.source, arguments.out, arguments.short_side
    for flag, value in (("--workers", arguments.workers), ("--short-side", short_side)):
        if value is not None and value < 1:
            raise BadData(f"{flag} {value}: expected 1 or more")
    making = Making(workers=arguments.workers or cores(), progress=sys.stdout)
    if kind == "digits":
        if short_side is not None:
            raise BadData("csc ingest digits: --short-side is for photographs; scenes of digits are made in their size")
        if arguments.skip_bad:
            raise BadData("csc ingest digits: --skip-bad is for photographs; scenes of digits are never broken")
        return ingest_digits(out, making=making)
    if source is None:
        raise BadData(f"csc ingest {kind}: --source is missing; give the folder or zip with annotations and images")
    skip_bad = arguments.skip_bad
    if kind == "voc2007":
        return ingest_voc2007(source, out, skip_bad=skip_bad, short_side=short_side, making=making)
    if kind == "coco2014":
        return ingest_coco2014(source, out, skip_bad=skip_bad, short_side=short_side, making=making)
    if Scenario.parse(f"{arguments.name}-b0c1").dataset != arguments.name:  # no scenario could name the set
        raise BadData(f"--name {arguments.name}: expected small letters")
    return ingest_coco(source, out, arguments.name, skip_bad=skip_bad, short_side=short_side, making=making)


INGEST = Command("turn annotations and images into a data set", _ingest_arguments, _ingest)
