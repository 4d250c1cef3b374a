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

# Options that 'csc ingest digits' refuses, and why.
_NOT_FOR_DIGITS = {
    "source": "digits come with scikit-learn and need no source",
    "name": "the data set is always named 'digits'",
    "short_side": "scenes of digits are made in their size",
    "skip_bad": "scenes of digits are never broken",
}


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kind", choices=["voc2007", "coco2014", "coco", "digits"], help="what the source is")
    parser.add_argument(
        "--source", metavar="URI", help="folder, zip or s3:// address with annotations and images (not for digits)"
    )
    parser.add_argument("--out", metavar="URI", required=True, help="folder or s3:// prefix of the data set to make")
    parser.add_argument("--name", help="name of a 'coco' data set, as scenarios use it (default: custom)")
    parser.add_argument(
        "--short-side", type=int, metavar="N", help="scale images down to N pixels on their short side (not for digits)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that read images (default: all cores)")
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out broken images, and of voc2007 those with unusable annotations, and say so (not for digits)",
    )


def _run(arguments: Namespace) -> int:
    from csc.data.ingest.published import counts, differences

    dataset = _ingest(arguments)
    for line in counts(dataset):
        print(line)
    if skipped := dataset.source.get("skipped"):
        names = ", ".join(skipped[:5]) + (" …" if len(skipped) > 5 else "")
        print(f"note: left out {len(skipped)} images that cannot be used: {names}")
    for line in differences(dataset):
        print(f"note: {line}")
    print(f"{len(dataset.classes)} classes · fingerprint {dataset.fingerprint[:12]} · {dataset.uri}")
    next_scenario = f"{dataset.name}-b0c{max(1, len(dataset.classes) // 5)}"
    print(f"next: csc run {next_scenario} --data {shlex.quote(arguments.out)}")
    return 0


def _ingest(arguments: Namespace) -> "Dataset":
    """Make the data set that the arguments ask for."""
    from csc.data.ingest.coco import ingest_coco, ingest_coco2014
    from csc.data.ingest.digits import ingest_digits
    from csc.data.ingest.voc import ingest_voc2007
    from csc.data.ingest.writer import WriteOptions

    kind, out = arguments.kind, arguments.out
    _check(arguments)
    options = WriteOptions(
        workers=arguments.workers or cores(),
        progress=sys.stdout,
        skip_bad=arguments.skip_bad,
        short_side=arguments.short_side,
    )
    if kind == "digits":
        return ingest_digits(out, options=options)
    if kind == "coco":
        return ingest_coco(arguments.source, out, arguments.name or "custom", options)
    return {"voc2007": ingest_voc2007, "coco2014": ingest_coco2014}[kind](arguments.source, out, options)


def _check(arguments: Namespace) -> None:
    """Refuse options that are out of range, or not for this kind of data set."""
    kind, name = arguments.kind, arguments.name
    for flag, value in (("--workers", arguments.workers), ("--short-side", arguments.short_side)):
        if value is not None and value < 1:
            raise BadData(f"{flag} {value}: expected 1 or more")
    if kind == "digits":
        for option, reason in _NOT_FOR_DIGITS.items():
            if getattr(arguments, option) not in (None, False):
                raise BadData(f"csc ingest digits: --{option.replace('_', '-')} is not possible; {reason}")
    elif arguments.source is None:
        raise BadData(f"csc ingest {kind}: --source is missing; give the folder or zip with annotations and images")
    elif name is not None and kind != "coco":
        raise BadData(f"csc ingest {kind}: --name is only for 'csc ingest coco'; this data set has a fixed name")
    elif name is not None and Scenario.parse(f"{name}-b0c1").dataset != name:  # no scenario could name the set
        raise BadData(f"--name {name}: expected lower-case letters")


INGEST = Command("turn annotations and images into a data set", _arguments, _run)
