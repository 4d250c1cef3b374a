"""What a run shows, in sentences that are computed from its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from csc.artifacts import RunResults
from csc.data.evidence import Evidence, Reliability, TaskFacts
from csc.report.columns import calibration
from csc.report.images import forgotten
from csc.report.paper import paper_row_for
from csc.report.reliability import ece, nearest_threshold
from csc.report.table import shortened

__all__ = ["Finding", "findings"]

_NOTABLE = 10  # points or percent, from which a difference is worth a sentence
_ENOUGH = 20  # labels, from which the frequency of a bin says something


@dataclass(frozen=True)
class Finding:
    """One sentence, and whether it is good news: `good`, `bad` or `plain`."""

    tone: str
    text: str


def findings(run: RunResults, evidence: Sequence[Evidence] = ()) -> list[Finding]:
    """What a reader should know first."""
    found = [_result(run), *_paper(run), *_forgetting(run)]
    if evidence:
        facts = evidence[-1].facts
        found += [*_never_predicted(run, facts), *_balance(run), *_confidence(facts), *_calibration(run)]
        found += _lost_images(evidence)
    else:
        found += [*_nothing_found(run), *_balance(run), *_calibration(run)]
    return found


def _result(run: RunResults) -> Finding:
    last, classes, tasks = run.last.metrics, len(run.last.seen), run.last.task
    best, worst = (pick(last.AP, key=lambda name: last.AP[name]) for pick in (max, min))
    after = "one task" if tasks == 1 else f"{tasks} tasks"
    text = f"The model knows {classes} classes after {after}, with a mAP of {last.mAP:.1f} %."
    if tasks > 1 and run.last.new == run.last.seen:  # of an extended model
        only = f"only those of task {tasks} are judged, with a mAP of {last.mAP:.1f} %"
        text = f"Of the classes that the model knows, {only}: the test images have no labels of the others."
    if classes > 1:
        text += f" It is best at class {best} (AP {last.AP[best]:.1f}) and weakest at {worst} ({last.AP[worst]:.1f})."
    return Finding("plain", text)


def _paper(run: RunResults) -> list[Finding]:
    paper = paper_row_for(run)
    if paper is None:
        return []
    theirs, note = paper.numbers["last_mAP"], f"; {paper.note}" if paper.note else ""
    apart = run.last.metrics.mAP - theirs
    if abs(apart) < 1:
        return [Finding("good", f"Its last mAP is that of the paper ({theirs:.1f} %), within a point{note}.")]
    side = "above" if apart > 0 else "below"
    text = f"Its last mAP is {abs(apart):.1f} points {side} the paper's {theirs:.1f} %{note}."
    return [Finding("good" if apart > 0 else "bad", text)]


def _forgetting(run: RunResults) -> list[Finding]:
    """Which class lost most of its AP, and when it was at its best."""
    if len(run.tasks) == 1:
        return []
    last = run.last.metrics
    lost = {name: last.best_AP[name] - last.AP[name] for name in run.last.seen}
    most = max(lost, key=lambda name: lost[name])
    if lost[most] < 1:
        return [Finding("good", "Nothing was forgotten: no class lost a point of AP since its best.")]
    best = next((task.task for task in run.tasks if task.metrics.AP.get(most) == last.best_AP[most]), None)
    when = f" after task {best}" if best else " at its best"
    before, now = f"its AP was {last.best_AP[most]:.1f}{when}", f"now {last.AP[most]:.1f}"
    text = f"Class {most} lost {lost[most]:.1f} points: {before}, {now}."
    many = [name for name in lost if lost[name] >= _NOTABLE]
    if len(many) > 1:
        text += f" {len(many)} of {len(lost)} classes lost {_NOTABLE} points or more."
    return [Finding("bad" if lost[most] >= _NOTABLE else "plain", text)]


def _never_predicted(run: RunResults, facts: TaskFacts) -> list[Finding]:
    threshold = run.last.metrics.threshold
    above = [counts[nearest_threshold(threshold)] for counts in facts.predicted]
    silent = [name for name, count in zip(facts.classes, above, strict=True) if count == 0]
    if len(silent) == len(facts.classes):
        text = f"No score exceeds {threshold:g}, so nothing is predicted: CF1 and OF1 are 0.{_at_own(run)}"
        return [Finding("bad", text)]
    if silent:
        are = "class is" if len(silent) == 1 else "classes are"
        why = f"never predicted, as no score of theirs exceeds {threshold:g}"
        return [Finding("bad", f"{len(silent)} {are} {why}: {shortened(silent, 60)}.")]
    return []


def _nothing_found(run: RunResults) -> list[Finding]:
    threshold = run.last.metrics.threshold
    text = f"Nothing is predicted correctly above {threshold:g}: CF1 and OF1 are 0.{_at_own(run)}"
    return [] if run.last.metrics.OF1 else [Finding("bad", text)]


def _at_own(run: RunResults) -> str:
    """The CF1 at the thresholds that `csc predict` uses."""
    own = run.last.metrics.CF1_own
    return f" At the model's own thresholds, from its training images, CF1 is {own:.1f}." if own else ""


def _balance(run: RunResults) -> list[Finding]:
    """Whether recall is far from precision."""
    last = run.last.metrics
    gap = last.CR - last.CP
    if abs(gap) < _NOTABLE or not last.CR:
        return []
    meaning = "it says yes too easily" if gap > 0 else "it says yes too rarely"
    high, low = ("Recall", "precision") if gap > 0 else ("Precision", "recall")
    text = f"{high} is {abs(gap):.1f} points above {low} at the threshold {last.threshold:g}: {meaning}."
    return [Finding("bad", text)]


def _confidence(facts: TaskFacts) -> list[Finding]:
    """Which groups of classes are over- or under-confident, with the bin that shows it best."""
    found = []
    for name, bins in facts.reliability.items():
        if (worst := _worst_bin(bins)) is None:
            continue
        confidence, share = worst
        over = confidence > share
        kind, only = ("over-confident", "only ") if over else ("under-confident", "")
        part = f"{only}{100 * share:.0f} % are" if share >= 0.005 else "none is"
        example = f"of labels scored about {confidence:.2f}, {part} present"
        found.append(Finding("bad", f"{name.capitalize()} classes are {kind}: {example}."))
    if not found:
        most = max(ece(bins) for bins in facts.reliability.values())
        found.append(Finding("good", f"Confidence can be trusted: the ECE is {most:.1f} % or less."))
    return found


def _calibration(run: RunResults) -> list[Finding]:
    """The ECE of old and new classes, also after scaling."""
    found = calibration(run.last)
    groups = [group for group in ("old", "new") if f"ECE_{group}" in found]
    if not groups:
        return []
    before = [f"{found[f'ECE_{group}']:.1f} % on {group}" for group in groups]
    text = f"The calibration error (ECE) is {before[0]} classes{''.join(f' and {more} ones' for more in before[1:])}"
    if found["temperature"] != 1:
        after = [f"{found[f'ECE_{group}_T']:.1f} %" for group in groups]
        text += f"; after scaling by the temperature {found['temperature']:.2f}, {' and '.join(after)}"
    return [Finding("plain", f"{text}.")]


def _worst_bin(bins: Reliability) -> tuple[float, float] | None:
    """Mean confidence and frequency of the bin in which they differ most; none if they hardly do."""
    pairs = [
        (confidence / count, present / count)
        for count, confidence, present in zip(bins.count, bins.confidence, bins.present, strict=True)
        if count >= _ENOUGH
    ]
    worst = max(pairs, key=lambda pair: abs(pair[0] - pair[1]), default=None)
    return worst if worst is not None and 100 * abs(worst[0] - worst[1]) >= _NOTABLE else None


def _lost_images(evidence: Sequence[Evidence]) -> list[Finding]:
    lost, known = forgotten(evidence)
    if not known:
        return []
    count = sum(len(pairs) for pairs in lost.values())
    text = f"Of {known:,} sample images of old classes that an earlier model recognised, {count:,} are missed now."
    return [Finding("good" if not count else "plain", text)]
