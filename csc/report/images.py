"""Images of a run: what the last model gets right and wrong in each class, and where it looks."""

import io
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from PIL import Image

from csc.data.evidence import Evidence, EvidenceImage, TaskFacts
from csc.report.overlay import data_uri, encode_png, heat_colours
from csc.report.svg import escape

__all__ = ["Pictures", "by_class", "followed", "forgotten", "memory"]

_KINDS = {
    "hit": ("Right", "present and predicted, the most confident first"),
    "false alarm": ("False alarms", "predicted, but not among the labels"),
    "miss": ("Missed", "present, but scored lowest"),
    "forgotten": ("Forgotten", "recognised by an earlier model, missed now"),
}
_NONE = {
    "hit": "No image of this class is predicted at the threshold.",
    "false alarm": "None: nothing else is taken for this class.",
    "miss": "None: every test image of this class is found.",
    "forgotten": "None of its sample images was lost.",
}
_FOLLOWED = 3

After = dict[tuple[int, str, str], EvidenceImage]  # by task, class and image: what the model after the task says
Lost = dict[str, list[tuple[EvidenceImage, float, int]]]  # by class: now, the best score before, after which task


class Pictures:
    """The thumbnails that a page shows, each stored once as a rule of its style, however often it is shown."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def shot(self, image: EvidenceImage, caption: str, tip: str, thumbnail: bytes = b"") -> str:
        """One image with its heat map over it and a caption below."""
        number = self._numbers.setdefault(thumbnail or image.thumbnail, len(self._numbers))
        heat = ""
        if image.heat:
            values = np.frombuffer(image.heat, np.uint8).reshape(-1, image.heat_width)
            heat = f'<img class="heat" alt="" src="{data_uri(encode_png(Image.fromarray(heat_colours(values))))}"/>'
        return (
            f'<figure class="shot" data-tip="{escape(tip)}"><span class="picture t{number}" role="img" '
            f'aria-label="{escape(tip)}">{heat}</span><figcaption>{caption}</figcaption></figure>'
        )

    def style(self) -> str:
        """The rules of all thumbnails that were shown."""
        rules = []
        for thumbnail, number in self._numbers.items():
            width, height = Image.open(io.BytesIO(thumbnail), formats=("JPEG",)).size
            rules.append(
                f".t{number} {{ aspect-ratio: {width}/{height}; background-image: url({data_uri(thumbnail)}); }}"
            )
        return "\n".join(rules)


def by_class(evidence: Sequence[Evidence], pictures: Pictures) -> str:
    """A fold for each class of the last model with its images of each kind."""
    last = evidence[-1]
    lost, _ = forgotten(evidence)
    shots: dict[tuple[str, str], list[EvidenceImage]] = defaultdict(list)
    for image in last.images:
        shots[image.kind, image.name].append(image)
    folds = []
    for column, name in enumerate(last.facts.classes):
        rows = [
            _row(kind, [_captioned(image, pictures) for image in shots[kind, name]])
            for kind in ("hit", "false alarm", "miss")
        ]
        if column < last.facts.old:
            gone = [entry for entry in lost.get(name, []) if entry[0].thumbnail]
            rows.append(_row("forgotten", [_captioned_forgotten(*entry, pictures) for entry in gone]))
        opened = " open=''" if column == 0 else ""
        count = f"{last.facts.present[column]:,} test images"
        folds.append(
            f'<details class="class" id="class-{column}"{opened}><summary><b>{escape(name)}</b> '
            f'<span class="muted">{count}</span></summary>{"".join(rows)}</details>'
        )
    return "\n".join(folds)


def _row(kind: str, shots: Sequence[str]) -> str:
    heading, meaning = _KINDS[kind]
    inside = f'<div class="shots">{"".join(shots)}</div>' if shots else f'<p class="note">{_NONE[kind]}</p>'
    return f'<div class="kind"><h4>{heading} <span class="muted">{meaning}</span></h4>{inside}</div>'


def _captioned(image: EvidenceImage, pictures: Pictures) -> str:
    tip = f"{image.image_id}: {image.name} {image.score:.2f}; labels {', '.join(image.labels) or 'none'}"
    return pictures.shot(image, f"{image.score:.2f}", tip)


def _captioned_forgotten(image: EvidenceImage, best: float, task: int, pictures: Pictures) -> str:
    tip = f"{image.image_id}: {image.name} {best:.2f} after task {task}, now {image.score:.2f}"
    return pictures.shot(image, f"{best:.2f} → {image.score:.2f}", tip)


def forgotten(evidence: Sequence[Evidence]) -> tuple[Lost, int]:
    """Images of the panels that an earlier model found and the last one misses, largest fall first.

    Returns:
        Those with a thumbnail and without, by class, and how many images of old classes were found before.
    """
    last = evidence[-1]
    threshold = last.facts.threshold
    best: dict[tuple[str, str], tuple[float, int]] = {}
    for earlier in evidence[:-1]:
        for image in earlier.images_of("panel"):
            key = image.name, image.image_id
            best[key] = max(best.get(key, (0.0, 0)), (image.score, earlier.facts.task))
    lost: Lost = defaultdict(list)
    known = 0
    for image in last.images_of("panel"):
        score, task = best.get((image.name, image.image_id), (0.0, 0))
        known += score > threshold
        if score > threshold >= image.score:
            lost[image.name].append((image, score, task))
    for entries in lost.values():
        entries.sort(key=lambda entry: entry[0].score - entry[1])
    return dict(lost), known


def followed(evidence: Sequence[Evidence], pictures: Pictures) -> str:
    """Some images with several classes, each class after each task: what is learned, kept and lost (figure 6)."""
    last = evidence[-1]
    by_image: dict[str, list[EvidenceImage]] = defaultdict(list)
    for image in last.images_of("panel"):
        if image.thumbnail:
            by_image[image.image_id].append(image)
    complete = [images for images in by_image.values() if len(images) == len(images[0].labels)]
    after = {
        (task.facts.task, image.name, image.image_id): image for task in evidence for image in task.images_of("panel")
    }
    appearances = Counter(image_id for _, _, image_id in after)  # an image of early classes has more to tell
    complete.sort(key=lambda images: (-appearances[images[0].image_id], images[0].image_id))
    return "\n".join(_followed(images, after, last.facts, pictures) for images in complete[:_FOLLOWED])


def _followed(images: Sequence[EvidenceImage], after: After, facts: TaskFacts, pictures: Pictures) -> str:
    """One image as it is, and a row for each class in it with what each model said."""
    tasks = sorted({task for task, _, _ in after})
    head = "".join(f"<th>after {task}</th>" for task in tasks)
    rows = []
    for image in images:
        then = {task: after.get((task, image.name, image.image_id)) for task in tasks}
        cells = [f"<td>{_after(seen, image, task, facts.threshold, pictures)}</td>" for task, seen in then.items()]
        rows.append(f'<tr><th scope="row">{escape(image.name)}</th>{"".join(cells)}</tr>')
    first = images[0]
    plain = pictures.shot(EvidenceImage("panel", "", first.image_id, 0.0, [], first.thumbnail), "", first.image_id)
    grid = f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'
    return f'<div class="followed">{plain}{grid}</div>'


def _after(then: EvidenceImage | None, image: EvidenceImage, task: int, threshold: float, pictures: Pictures) -> str:
    if then is None:
        return '<span class="not-yet">not yet</span>'
    mark = "yes" if then.score > threshold else "no"
    tip = f"{image.image_id} after task {task}: {image.name} {then.score:.2f}"
    return pictures.shot(then, f'<span class="{mark}">{then.score:.2f}</span>', tip, image.thumbnail)


def memory(evidence: Evidence, pictures: Pictures) -> str:
    """What is kept for replay, by class; empty if the method keeps nothing."""
    kept: dict[str, list[str]] = defaultdict(list)
    for image in evidence.images_of("memory"):
        tip = f"{image.image_id}: {', '.join(image.labels)}"
        kept[image.name].append(pictures.shot(image, escape(image.name), tip))
    shots = [shot for name in evidence.facts.classes for shot in kept.get(name, [])]
    return f'<div class="shots small">{"".join(shots)}</div>' if shots else ""
