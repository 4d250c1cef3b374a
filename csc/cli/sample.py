"""`csc sample`: write example images of a data set, for instance to try a model on."""

import shlex
from argparse import ArgumentParser, Namespace

from csc.cli.command import Command
from csc.errors import BadData
from csc.storage import local_path, write_bytes

__all__ = ["SAMPLE"]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("dataset", choices=["digits"], help="the data set that makes itself")
    parser.add_argument("-n", type=int, default=8, metavar="N", dest="count", help="how many (default: 8)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write them to")


def _run(arguments: Namespace) -> int:
    from csc.data.ingest.digits import JPEG_QUALITY, SCENES_AT_MOST, compose_scene
    from csc.data.ingest.images import as_jpeg

    if not 1 <= arguments.count <= SCENES_AT_MOST:
        raise BadData(f"-n {arguments.count}: expected 1 to {SCENES_AT_MOST:,}")
    folder = local_path(arguments.out)
    if folder.exists() and not folder.is_dir():
        raise BadData(f"--out {arguments.out}: not a folder")
    for index in range(arguments.count):
        image, classes = compose_scene("test", index)  # which no model was trained on
        path = folder / f"scene-{index:02d}.jpg"
        write_bytes(path, as_jpeg(image, JPEG_QUALITY))
        print(f"{path}\tshows {', '.join(classes)}")
    print(f"next: csc predict models:/digits-b0c2-csc@final {shlex.quote(arguments.out)}")
    return 0


SAMPLE = Command("write example images, to try a model on", _run, _arguments)
