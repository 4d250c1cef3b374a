"""`csc predict`: name the classes in images with a registered model."""

import csv
import glob
import json
import os
import re
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.cli.command import Command
from csc.cli.workdir import tracked_workdir, workdir_argument
from csc.data import SUFFIXES
from csc.data.cores import cores
from csc.data.progress import Bar
from csc.errors import BadData
from csc.storage import local_path, write_bytes

if TYPE_CHECKING:
    from csc.serving.predictor import Prediction, Predictor

__all__ = ["PREDICT", "load_predictor"]

Predicted = list[tuple[str, float]]  # predicted classes with their confidences


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="models:/NAME@ALIAS, models:/NAME/VERSION or a model folder")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, folders of them, or patterns")
    parser.add_argument("--threshold", type=float, help="name classes above this confidence (default: the model's)")
    parser.add_argument("--heatmap", metavar="DIR", help="write each image with where the model looks, as PNG files")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON object per image")
    form.add_argument("--csv", action="store_true", help="print a table with the confidences of all classes")
    workdir_argument(parser)


def _run(arguments: Namespace) -> int:
    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        raise BadData(f"--threshold {arguments.threshold:g}: expected a number between 0 and 1, for instance 0.8")
    images = [image for word in arguments.images for image in _image_files(word)]
    predictor = load_predictor(arguments.model, arguments.workdir)
    from csc.serving.predictor import BATCH, above

    classes, thresholds = predictor.card.classes, predictor.thresholds
    if arguments.threshold is not None:
        thresholds = dict.fromkeys(classes, arguments.threshold)
    heatmaps = _Heatmaps(arguments.heatmap) if arguments.heatmap else None
    if arguments.csv:
        _print_csv("image", "labels", *classes)
    with _bar(len(images)) as bar:
        for start in range(0, len(images), BATCH):
            some = images[start : start + BATCH]
            predictions = list(predictor.predictions(some, maps=heatmaps is not None))
            if bar is not None:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # it is drawn again below the answers
            for image, prediction in zip(some, predictions, strict=True):
                confidences = prediction.confidences.tolist()
                predicted = above(confidences, thresholds)
                files = heatmaps.write(image, prediction, predicted, classes) if heatmaps else {}
                _print_answer(arguments, image, predicted, confidences, files)
            if bar is not None:
                sys.stdout.flush()
                bar.advance(len(some))
    if heatmaps:
        print(f"heat maps: {len(heatmaps.written)} in {heatmaps.folder}", file=sys.stderr)
    return 0


def load_predictor(model: str, workdir: str) -> "Predictor":
    """Load a model folder or, by the tracking store of a work folder, a registered model; no download stays behind."""
    if model.startswith("models:/"):
        tracked_workdir(workdir)
    import torch

    from csc.serving.predictor import Predictor
    from csc.tracking.registry import fetch_model

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(cores())  # torch counts the cores of the node, not the share of the container
    with tempfile.TemporaryDirectory(prefix="csc-model-") as folder:
        return Predictor(fetch_model(model, Path(folder)))


def _image_files(word: str) -> list[str]:
    """The files that a word of the command line means."""
    path = local_path(word)
    name = word if Path(word) == path else str(path)  # what a person typed is printed as it was typed
    if path.is_file():
        return [name]
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not found:
            raise BadData(f"{word}: no image files in this folder ({', '.join(SUFFIXES)})")
        return found
    if glob.has_magic(word):
        matching = sorted(file for file in glob.glob(name, recursive=True) if Path(file).is_file())  # noqa: PTH207
        if matching:
            return matching
        raise BadData(f"{word}: no file matches this pattern")
    raise BadData(f"{word}: no such image file")


def _bar(images: int) -> AbstractContextManager[Bar | None]:
    """How far it is, for a person who waits for several batches."""
    if sys.stderr.isatty() and images > 32:
        return Bar("predict", images, "images", sys.stderr)
    return nullcontext()


class _Heatmaps:
    """Images with where the model looks, as files of a folder: one for each predicted class."""

    def __init__(self, folder: str) -> None:
        self.folder = local_path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise BadData(f"--heatmap {folder}: not a folder")
        self.written: set[Path] = set()

    def write(
        self, image: str, prediction: "Prediction", predicted: Predicted, classes: Sequence[str]
    ) -> dict[str, str]:
        """Write an image with the map of each predicted class, of the most likely one if none is predicted."""
        from csc.report.overlay import heatmap_png

        assert prediction.image is not None
        assert prediction.maps is not None
        best = classes[int(prediction.confidences.argmax())]
        files = {}
        for name in [name for name, _ in predicted] or [best]:
            path = self._free(f"{Path(image).stem}.{name}")
            heat = (255 * prediction.maps[classes.index(name)]).round().astype("uint8")
            write_bytes(path, heatmap_png(prediction.image, heat))
            files[name] = str(path)
        return files

    def _free(self, name: str) -> Path:
        """A file that this command has not written yet: images of several folders may have one name."""
        stem = re.sub(r"[^\w.\- ]", "_", name)
        paths = (self.folder / (f"{stem}.png" if number == 1 else f"{stem}-{number}.png") for number in count(1))
        path = next(path for path in paths if path not in self.written)
        self.written.add(path)
        return path


def _print_answer(
    arguments: Namespace, image: str, predicted: Predicted, confidences: Sequence[float], files: Mapping[str, str]
) -> None:
    """Print what is found in an image: as a line for people, as JSON or as CSV."""
    if arguments.json:
        classes: list[dict[str, Any]] = []
        for name, value in predicted:
            heatmap = {"heatmap": files[name]} if name in files else {}
            classes.append({"name": name, "confidence": round(value, 6), **heatmap})
        print(json.dumps({"image": image, "classes": classes}, ensure_ascii=False))
    elif arguments.csv:
        _print_csv(image, ";".join(name for name, _ in predicted), *(f"{value:.6f}" for value in confidences))
    else:
        print(f"{image}\t" + (", ".join(f"{name} {value:.3f}" for name, value in predicted) or "(nothing)"))


def _print_csv(*cells: str) -> None:
    csv.writer(sys.stdout, lineterminator="\n").writerow(cells)


PREDICT = Command("name the classes in images with a registered model", _run, _arguments)
