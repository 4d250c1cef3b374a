"""`csc ingest`: turn annotations and images into a data set."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from csc.cli.command import Command
from csc.data.cores import cores
from csc.errors import BadData
from csc.scenario import PAPER_SCENARIOS, Scenario

if TYPE_CHECKING:
    from csc.data.dataset import Dataset

__all__ = ["INGEST"]

# What the source is, and the name of the data set; `--name` may choose another one where none is fixed.
_KINDS = {
    "voc2007": "voc",
    "voc2012": "voc2012",
    "voc": "custom",
    "coco2014": "coco",
    "coco": "custom",
    "csv": "custom",
    "folder": "custom",
    "digits": "digits",
}
_FIXED_NAME = ("voc2007", "coco2014", "digits")
# Options that 'csc ingest digits' refuses, and why.
_NOT_FOR_DIGITS = {
    "source": "digits come with scikit-learn and need no source",
    "short_side": "scenes of digits are made in their size",
    "skip_bad": "scenes of digits are never broken",
}


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kind", choices=list(_KINDS), help="what the source is (docs/data.md shows each layout)")
    parser.add_argument(
        "--source", metavar="URI", help="folder, zip or s3:// address with annotations and images (not for digits)"
    )
    parser.add_argument("--out", metavar="URI", required=True, help="folder or s3:// prefix of the data set to make")
    parser.add_argument("--name", help="name of the data set, as scenarios use it (default: custom, or voc2012)")
    parser.add_argument(
        "--class-order", metavar="FILE", help="text file with one class per line: the order in which classes arrive"
    )
    parser.add_argument(
        "--short-side", type=int, metavar="N", help="scale images down to N pixels on their short side (not for digits)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that read images (default: all cores)")
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out broken images, and of VOC those with unusable annotations, and say so (not for digits)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="of coco and coco2014: read the annotations again with pycocotools, compare",
    )


def _run(arguments: Namespace) -> int:
    from csc.data.published import counts, differences

    dataset = _ingest(arguments)
    for line in counts(dataset):
        print(line)
    for line in (*_notes(dataset), *differences(dataset)):
        print(f"note: {line}")
    if arguments.verify:
        from csc.data.ingest.verify import verify_coco

        print(verify_coco(dataset, arguments.source))
    given = f" (from {arguments.class_order})" if arguments.class_order else ""
    print(f"class order{given}: {_some(dataset.classes, 10)}")
    print(f"{len(dataset.classes)} classes · fingerprint {dataset.fingerprint[:12]} · {dataset.uri}")
    scenario = _suggested(dataset.name, len(dataset.classes))
    print(f"next: csc run {scenario} --data {shlex.quote(arguments.out)}")
    return 0


def _suggested(name: str, classes: int) -> str:
    """A scenario to begin with: one of the paper's, else about five tasks of two classes or more.

    A task of one class has no image without it, so there would be nothing to tell apart.

    >>> [_suggested("pets", classes) for classes in (3, 4, 5, 20, 23)]
    ['pets-b2c1', 'pets-b0c2', 'pets-b3c2', 'pets-b0c4', 'pets-b7c4']
    """
    known = [scenario for scenario in PAPER_SCENARIOS if Scenario.parse(scenario).dataset == name]
    if known:
        return known[0]
    each = max(2, classes // 5) if classes > 3 else 1
    first = max(each + classes % each, min(2, classes - 1))
    return f"{name}-b{first if first > each else 0}c{each}"


def _notes(dataset: "Dataset") -> list[str]:
    """What was decided on the way, from the record of the source."""
    notes = []
    if skipped := dataset.source.get("skipped"):
        notes.append(f"left out {len(skipped)} images that cannot be used: {_some(skipped, 5)}")
    if left_out := dataset.source.get("left_out"):
        notes.append(f"left out the split {', '.join(left_out)}: a data set has train and test")
    if split := dataset.source.get("split"):
        notes.append(f"the source has no splits; split {split}")
    return notes


def _some(names: "list[str] | tuple[str, ...]", count: int) -> str:
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


def _ingest(arguments: Namespace) -> "Dataset":
    from csc.data.ingest.class_folders import ingest_folder
    from csc.data.ingest.classes import read_class_order
    from csc.data.ingest.coco import ingest_coco, ingest_coco2014
    from csc.data.ingest.csv_table import ingest_csv
    from csc.data.ingest.digits import ingest_digits
    from csc.data.ingest.voc import ingest_voc
    from csc.data.ingest.writer import WriteOptions

    _check(arguments)
    kind, source, out = arguments.kind, arguments.source, arguments.out
    name = arguments.name or _KINDS[kind]
    options = WriteOptions(
        workers=arguments.workers or cores(),
        progress=sys.stdout,
        skip_bad=arguments.skip_bad,
        short_side=arguments.short_side,
        class_order=read_class_order(arguments.class_order) if arguments.class_order else None,
    )
    if kind == "digits":
        return ingest_digits(out, options=options)
    if kind.startswith("voc"):
        return ingest_voc(source, out, name, kind.removeprefix("voc") or None, options)
    if kind == "coco2014":
        return ingest_coco2014(source, out, options)
    return {"coco": ingest_coco, "csv": ingest_csv, "folder": ingest_folder}[kind](source, out, name, options)


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
    if name is not None and kind in _FIXED_NAME:
        raise BadData(f"csc ingest {kind}: --name is not possible; the data set is always named '{_KINDS[kind]}'")
    if name is not None and Scenario.parse(f"{name}-b0c1").dataset != name:  # no scenario could name the set
        raise BadData(f"--name {name}: expected lower-case letters")
    if arguments.verify and not kind.startswith("coco"):
        raise BadData(f"csc ingest {kind}: --verify is only for coco and coco2014, which pycocotools reads")


INGEST = Command("turn annotations and images into a data set", _run, _arguments)
