"""`csc predict`: name the classes in images with a registered model."""

from argparse import ArgumentParser, Namespace

from csc.cli.command import Command
from csc.cli.workdir import tracked_workdir, workdir_argument
from csc.errors import BadData
from csc.storage import local_path

__all__ = ["PREDICT"]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="models:/NAME@ALIAS, models:/NAME/VERSION or a model folder")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    parser.add_argument("--threshold", type=float, help="print classes above this confidence (default: the model's)")
    workdir_argument(parser)


def _run(arguments: Namespace) -> int:
    for image in arguments.images:
        if not local_path(image).is_file():
            raise BadData(f"{image}: no such image file")
    if arguments.model.startswith("models:/"):
        tracked_workdir(arguments.workdir)
    from csc.serving.predictor import Predictor, above
    from csc.tracking.registry import fetch_model

    predictor = Predictor(fetch_model(arguments.model))
    threshold = arguments.threshold if arguments.threshold is not None else predictor.card.settings().threshold
    for image, scores in zip(arguments.images, predictor.confidences(arguments.images), strict=True):
        found = above(scores.tolist(), predictor.card.classes, threshold)
        print(f"{image}\t" + (", ".join(f"{name} {value:.3f}" for name, value in found) or "(nothing)"))
    return 0


PREDICT = Command("name the classes in images with a registered model", _arguments, _run)
