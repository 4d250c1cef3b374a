"""The `csc` command: thin, and quick to start; whatever is heavy is imported by the command that needs it."""

import os
import shlex
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from csc import __version__
from csc.command import Command
from csc.config import methods
from csc.cores import cores
from csc.doctor import DOCTOR
from csc.errors import BadData, CscError
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario
from csc.serve import SERVE
from csc.storage import local_path

if TYPE_CHECKING:
    from csc.data.dataset import Dataset

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input ends in one line and exit code 2."""
    code: int = 128 + signal.SIGPIPE  # unless the work is done when the reader of our output goes away
    try:
        parsed = _parser().parse_args(arguments)
        code = parsed.command.run(parsed)
        sys.stdout.flush()
        return code
    except CscError as error:
        print("csc:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output went away, for instance `csc … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt:
        print("csc: interrupted; the same command takes up the work where it stopped", file=sys.stderr)
        return 130


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="csc", description="Multi-label class-incremental learning as a pipeline.")
    parser.add_argument("--version", action="version", version=f"csc {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in sorted(_commands().items()):
        sub = commands.add_parser(name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.set_defaults(command=command)
    return parser


def _commands() -> dict[str, Command]:
    plugins = {point.name: point.load() for point in entry_points(group="csc.commands")}
    return plugins | {
        "doctor": DOCTOR,
        "ingest": Command("turn annotations and images into a data set", _ingest_arguments, _ingest),
        "methods": Command("list the learning methods", _no_arguments, _methods),
        "predict": Command("name the classes in images with a registered model", _predict_arguments, _predict),
        "scenarios": Command("list the scenarios and how they cut their classes", _no_arguments, _scenarios),
        "serve": SERVE,
        "ui": Command("open the MLflow pages of a work folder", _ui_arguments, _ui),
    }


def _no_arguments(parser: ArgumentParser) -> None:
    del parser


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
    from csc.data.published import compare_with_published, counts_beside_published

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
    from csc.data.coco import ingest_coco, ingest_coco2014
    from csc.data.digits import ingest_digits
    from csc.data.voc import ingest_voc2007
    from csc.data.writing import Making

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


def _scenarios(arguments: Namespace) -> int:
    del arguments
    for name in ("digits-b0c2", *PAPER_SCENARIOS):
        scenario = Scenario.parse(name)
        print(scenario.announcement(CLASS_COUNTS[scenario.dataset]))
    print("and any other <data set>-b<base classes>c<classes per task>")
    return 0


def _methods(arguments: Namespace) -> int:
    del arguments
    for name, description in methods().items():
        print(f"{name:<10}{description}")
    return 0


def _predict_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="models:/NAME@ALIAS, models:/NAME/VERSION or a model folder")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    parser.add_argument("--threshold", type=float, help="print classes above this confidence (default: the model's)")
    _workdir_argument(parser)


def _predict(arguments: Namespace) -> int:
    for image in arguments.images:
        if not local_path(image).is_file():
            raise BadData(f"{image}: no such image file")
    if arguments.model.startswith("models:/"):
        _tracked_workdir(arguments.workdir)
    from csc.serving import Predictor, above
    from csc.tracking import fetch_model

    predictor = Predictor(fetch_model(arguments.model))
    threshold = arguments.threshold if arguments.threshold is not None else predictor.card.settings().threshold
    for image, scores in zip(arguments.images, predictor.confidences(arguments.images), strict=True):
        found = above(scores.tolist(), predictor.card.classes, threshold)
        print(f"{image}\t" + (", ".join(f"{name} {value:.3f}" for name, value in found) or "(nothing)"))
    return 0


def _ui_arguments(parser: ArgumentParser) -> None:
    _workdir_argument(parser)
    parser.add_argument("--port", type=int, default=5000)


def _ui(arguments: Namespace) -> int:
    uri = _tracked_workdir(arguments.workdir)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(arguments.port)]
    print(f"MLflow on http://127.0.0.1:{arguments.port} (stop with Ctrl-C)", flush=True)
    os.execv(sys.executable, [*command, "--backend-store-uri", uri])


def _workdir_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--workdir", default="work", metavar="DIR", help="folder of runs and results (default: work)")


def _tracked_workdir(workdir: str) -> str:
    """The tracking address of a work folder that has runs."""
    folder = use_workdir(workdir)
    uri = os.environ["MLFLOW_TRACKING_URI"]
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise BadData(f"{folder}: no runs there yet; make some with 'csc run digits-b0c2'")
    return uri


def use_workdir(workdir: str) -> Path:
    """Point tracking at the database of a work folder, unless the environment names a server."""
    folder = local_path(workdir).absolute()
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    return folder
