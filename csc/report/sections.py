"""The parts of a run's page that show its evidence; each is empty where there is nothing to show."""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from csc.artifacts import Metrics, RunResults
from csc.data.evidence import THRESHOLDS, Evidence, TaskFacts
from csc.report import figures, graph, learning, reliability
from csc.report import images as pictures_of
from csc.report.images import Pictures
from csc.report.layout import figure, html_table
from csc.report.recipe import command, compared_settings
from csc.report.reliability import at_threshold, nearest_threshold
from csc.report.svg import escape

__all__ = ["class_table", "confidence", "images", "label_graph", "memory", "over_time", "recipe", "training"]


def class_table(run: RunResults, evidence: Sequence[Evidence]) -> str:
    """All numbers of each class after the last task; a click on a head sorts them."""
    if not evidence:
        return ""
    facts, last = evidence[-1].facts, run.last.metrics
    index = nearest_threshold(last.threshold)
    arrival = {name: task.task for task in reversed(run.tasks) for name in task.seen}
    rows = []
    for column, name in enumerate(facts.classes):
        hit, called, there = facts.found[column][index], facts.predicted[column][index], facts.present[column]
        lost = last.best_AP[name] - last.AP[name]
        rates = [_rate(hit, called), _rate(hit, there), _rate(2 * hit, called + there)]
        ap = [f"{last.AP[name]:.1f}", f"−{lost:.1f}" if lost >= 0.05 else "0.0"]
        rows.append([name, str(arrival[name]), *ap, *rates, f"{there:,}"])
        if facts.thresholds:
            rows[-1].append(f"{facts.thresholds[column]:.2f}")
    head = ["class", "task", "AP", "since best", "precision", "recall", "F1", "images"]
    head += ["own threshold"] if facts.thresholds else []
    return f"""<h3>Every class after the last task</h3>
<p>Precision, recall and F1 at the threshold {last.threshold:g}, in percent.</p>
{html_table(head, rows, "tasks sortable classes")}"""


def _rate(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}"


def confidence(run: RunResults, evidence: Sequence[Evidence], max_entropy: Mapping[str, RunResults]) -> str:
    """How far the last model's confidence can be trusted, and what other thresholds would make of it."""
    last = run.last.metrics
    models = {name: one.last.metrics for name, one in (max_entropy or {"": run}).items()}
    histogram = f"""<h3>Confidences</h3>
<p>Absent labels to the right of the threshold are false positives: {last.FPR:.1f} % of all absent labels here. Counts
are on a logarithmic scale.{_effect(*models.values()) if max_entropy else ""}</p>
{figure(lambda width: figures.confidences(models, width))}"""
    if not evidence:
        return f"<h2>Confidence after the last task</h2>{histogram}"
    facts = evidence[-1].facts
    groups = facts.reliability
    return f"""<h2>Can its confidence be trusted?</h2>
<p>A label scored 0.7 should be present in 70 % of all cases: bars should reach the dashed line. Orange is where the
model is over-confident, green where it is under-confident; the line below a bar says how many labels it has. The
calibration error (ECE) over all classes is {last.ECE:.1f} %.</p>
{figure(lambda width: reliability.reliability_diagram(groups, width))}
{_threshold(facts, last)}
{histogram}"""


def _effect(without: Metrics, with_it: Metrics) -> str:
    """What max-entropy changed, from two runs that differ in nothing else (figure 3 of the paper)."""
    numbers = {"H": ("H", 2, ""), "the false positive rate": ("FPR", 1, " %"), "the ECE": ("ECE", 1, " %")}
    moves = [
        f"{word} from {without[name]:.{digits}f} to {with_it[name]:.{digits}f}{unit}"
        for word, (name, digits, unit) in numbers.items()
    ]
    changes = f"{', '.join(moves[:-1])} and {moves[-1]}"
    return f" Another run differs from this one in max-entropy alone, which takes {changes}."


def _threshold(facts: TaskFacts, last: Metrics) -> str:
    """Numbers against the threshold: a figure, a slider for those with a script, and a table for all."""
    marked = nearest_threshold(last.threshold)
    now = at_threshold(facts, marked)
    names = ("CF1", "OF1", "CP", "CR", "OP", "OR")
    tiles = "".join(f'<div><dt>{name}</dt><dd id="live-{name}">{now[name]:.1f}</dd></div>' for name in names)
    rows = []
    for index in range(0, len(THRESHOLDS), 10):
        there = at_threshold(facts, index)
        rows.append([f"{THRESHOLDS[index]:.1f}", *(f"{there[name]:.1f}" for name in names)])
    counts = {
        "classes": facts.classes,
        "present": facts.present,
        "predicted": facts.predicted,
        "found": facts.found,
        "threshold": THRESHOLDS[marked],
        "own": facts.thresholds,
    }
    own = ""
    if facts.thresholds:
        numbers = f"CF1 is {last.CF1_own:.1f} and OF1 {last.OF1_own:.1f}"
        own = f" With a threshold for each class, fitted on training images, {numbers}."
    return f"""<h3>The threshold</h3>
<p>A label is predicted when its confidence is above {last.threshold:g}; mAP does not depend on it. These are test
images: a threshold to work with is chosen on others.{own}</p>
<div class="controls" id="try-threshold" hidden="">
<label>threshold <input type="range" id="threshold" min="0" max="99" step="1" value="{marked}"/>
<output id="threshold-value">{THRESHOLDS[marked]:.2f}</output></label>
<label>class <select id="class"><option value="">all classes</option></select></label>
<span id="own" class="muted"></span>
</div>
<dl class="numbers live">{tiles}</dl>
{figure(lambda width: reliability.threshold_curves(facts, marked, width))}
<details><summary class="note">the same as a table</summary>{html_table(["threshold", *names], rows, "tasks")}</details>
<script type="application/json" id="counts">{_json(counts)}</script>"""


def _json(content: object) -> str:
    """JSON that is safe inside a page, whether it is read as HTML or as XML."""
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def images(evidence: Sequence[Evidence], pictures: Pictures) -> str:
    """What the last model gets right and wrong in each class."""
    if not evidence:
        return ""
    return f"""<h2>What the model sees</h2>
<p>Test images of each class with the confidence of the last model. The glow is where it looks for the class; move over
an image, or clear the box, to see it as it is.</p>
<p class="controls"><label><input type="checkbox" id="looks" checked=""/> show where it looks</label></p>
<div class="chips" id="chips" hidden=""></div>
{pictures_of.by_class(evidence, pictures)}"""


def over_time(evidence: Sequence[Evidence], pictures: Pictures) -> str:
    """The same images after each task."""
    tables = pictures_of.followed(evidence, pictures) if len(evidence) > 1 else ""
    if not tables:
        return ""
    return f"""<h2>The same images after each task</h2>
<p>What one model after the other says of the classes in an image, and where it looks for them. Green is above the
threshold, orange is not.</p>
{tables}"""


def label_graph(evidence: Sequence[Evidence]) -> str:
    """The matrix that relates the classes, as it grew."""
    tasks = [task.facts for task in evidence if task.facts.correlation]
    if not tasks or len(tasks[-1].classes) < 2:
        return ""
    learned = tasks[-1].correlation_name == "A_g"
    what = "The general correlation matrix A_g, learned" if learned else "The correlation matrix Z, counted in labels"
    if not np.any(tasks[-1].correlation):
        return f"<h2>The label graph</h2><p>{what}. It is zero everywhere: no class takes anything from another.</p>"
    strongest = graph.pairs_across_tasks(tasks)
    named = "".join(f"<li>{escape(to)} ← {escape(source)} {_signed(value)}</li>" for to, source, value in strongest)
    pairs = f'<h3>Strongest across tasks</h3><ul class="pairs">{named}</ul>' if named else ""
    return f"""<h2>The label graph</h2>
<p>{what}: row by row what each class takes from the others, orange for more, blue for less. Lines part the tasks; the
darker one parts new classes from old.</p>
{figure(lambda width: graph.growth(tasks, width))}
{pairs}"""


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def memory(evidence: Sequence[Evidence], pictures: Pictures) -> str:
    """What the method keeps of earlier tasks."""
    shots = pictures_of.memory(evidence[-1], pictures) if evidence else ""
    if not shots:
        return ""
    return f"""<h2>What is kept for replay</h2>
<p>{evidence[-1].facts.exemplars:,} training images are kept; these are the first of each class.</p>
{shots}"""


def training(evidence: Sequence[Evidence]) -> str:
    """Losses and times."""
    tasks = [task.facts for task in evidence]
    if not tasks:
        return ""
    head, rows = learning.times(tasks)
    if any(learning.terms(tasks)):
        entropy = " That of max-entropy is −β H, which is below zero." if "H" in learning.terms(tasks) else ""
        shown = f"<p>The terms of the loss, epoch by epoch.{entropy}</p>"
        shown += figure(lambda width: learning.losses(tasks, width))
    else:
        shown = f"<p>No {'loss' if any(task.epochs for task in tasks) else 'epoch'} was logged.</p>"
    return f"<h2>Training</h2>{shown}<h3>Time</h3>{html_table(head, rows, 'tasks')}"


def recipe(run: RunResults, evidence: Sequence[Evidence], model: str) -> str:
    """The command, the settings and the versions; `model` is the name that the run's models are registered by."""
    if not evidence:
        return ""
    facts = evidence[-1].facts
    changed = compared_settings(run, facts)
    settings = (
        html_table(["setting", "this run", f"default of {run.method}"], changed, "settings")
        if changed
        else f'<p class="note">All settings are the defaults of {escape(run.method)} on this data set.</p>'
    )
    versions = " ".join(f"<span>{escape(k)} <b>{escape(v)}</b></span>" for k, v in facts.packages.items() if v)
    return f"""<h2>Make it again</h2>
<p>The same data and code give the same numbers, whatever machine of the same kind runs them.</p>
<div class="copy"><pre>{escape(command(run, facts, model))}</pre></div>
<h3>Settings that differ</h3>
{settings}
<h3>Versions</h3>
<p class="facts"><span>csc <b>{escape(run.code_version)}</b></span> {versions}</p>"""
