"""The page of a run: its results, and the evidence for them."""

from collections.abc import Mapping, Sequence

from csc.artifacts import Metrics, RunResults
from csc.config import methods
from csc.data.evidence import Evidence
from csc.report import figures, sections
from csc.report.columns import SUMMARY, TITLES, titles
from csc.report.findings import findings
from csc.report.images import Pictures
from csc.report.layout import figure, html_page, html_table
from csc.report.learning import time_taken
from csc.report.paper import paper_row_for, paper_rows, why_incomparable
from csc.report.svg import escape
from csc.report.table import TASK_COLUMNS, comparison, notes, old_classes_text, provenance, task_rows

__all__ = ["run_page"]


def run_page(
    run: RunResults,
    evidence: Sequence[Evidence] = (),
    max_entropy: Mapping[str, RunResults] = {},
    old_classes: Metrics | None = None,
    model: str = "",
) -> str:
    """Return the page of a run.

    Args:
        run: its results.
        evidence: of its tasks, as far as there is any; it is used if the last one is that of the last task.
        max_entropy: the run and another that differs only in max-entropy, by name, the one without it first.
        old_classes: of an extended model, its metrics on images that label the classes it knew before.
        model: the name that its models are registered by, for the command that makes the run again.
    """
    usable = evidence if evidence and evidence[-1].facts.task == run.last.task else ()
    pictures = Pictures()
    parts = {
        "Course": _course(run, old_classes),
        "Classes": _classes(run, usable),
        "Confidence": sections.confidence(run, usable, max_entropy),
        "Images": sections.images(usable, pictures),
        "Over time": sections.over_time(usable, pictures),
        "Label graph": sections.label_graph(usable),
        "Memory": sections.memory(usable, pictures),
        "Training": sections.training(usable),
        "Make it again": sections.recipe(run, usable, model),
    }
    shown = {name: part for name, part in parts.items() if part}
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in shown)
    found_items = "".join(f'<li class="{found.tone}">{escape(found.text)}</li>' for found in findings(run, usable))
    what = escape(methods().get(run.method, ""))
    body = [
        f'<p class="what">{what}</p>' if what else "",
        _provenance(run),
        _numbers(run),
        _comparison(run),
        f'<ul class="findings">{found_items}</ul>',
    ]
    if not usable:
        body.append('<p class="note">Images, thresholds and losses are missing: this run kept no evidence of them.</p>')
    body += [f'<section id="{_anchor(name)}">{part}</section>' for name, part in shown.items()]
    return html_page(f"{run.scenario} · {run.method}", "\n".join(body), pictures.style(), links)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _provenance(run: RunResults) -> str:
    known = provenance(run) | {
        "tasks": str(len(run.tasks)),
        "classes": str(len(run.last.seen)),
        "training": time_taken(sum(task.seconds for task in run.tasks)),
    }
    return '<p class="facts">' + " ".join(f"<span>{k} <b>{escape(v)}</b></span>" for k, v in known.items()) + "</p>"


def _numbers(run: RunResults) -> str:
    """Show the few numbers to remember, the paper's in small print below ours."""
    paper = paper_row_for(run)
    numbers, star = (paper.numbers, "*" if paper.note else "") if paper else ({}, "")
    tiles = []
    for name in (*SUMMARY, "forgetting"):
        theirs = f"paper {numbers[name]:.1f}{star}" if name in numbers else ""
        tiles.append(
            f'<div><dt>{TITLES[name]}</dt><dd>{run.summary[name]:.1f}</dd><dd class="paper">{theirs}</dd></div>'
        )
    return f'<dl class="numbers">{"".join(tiles)}</dl>'


def _comparison(run: RunResults) -> str:
    """Say where the paper's numbers come from; as a table where it has several rows."""
    rows = comparison(run)
    if paper_rows(run.scenario, run.method) and (reason := why_incomparable(bool(run.held_out), run.data_note)):
        return f'<p class="note">The paper\'s numbers are left out: {escape(reason)}.</p>'
    if len(rows) == 1:
        return '<p class="note">Tables 1 and 2 of the paper have no row for this scenario and method.</p>'
    remarks = "".join(f" * {escape(note)}." for note in notes(run))
    apart = f"The paper stands on its own weights and data, this run on those named above.{remarks}"
    if len(rows) == 2:
        return f'<p class="note">In small print: {escape(rows[1][0])}. {apart}</p>'
    return f'{html_table(["", *titles(SUMMARY)], rows, "comparison")}<p class="note">{apart}</p>'


def _course(run: RunResults, old_classes: Metrics | None) -> str:
    """What happened from task to task."""
    reading = "the less a line falls, the less was forgotten"
    if paper_row_for(run) is not None:
        reading += "; the dashed line is where the mAP of the paper's model ends"
    matrix = (
        ""
        if len(run.tasks) == 1
        else f"""
<h3>Every task after every task</h3>
<p>Mean AP of the classes that a task brought. Read a column downwards: what later tasks leave of it.</p>
{figure(lambda width: figures.task_matrix(run, width))}"""
    )
    *rows, averages = task_rows(run)
    return f"""<h2>Course of the run</h2>
<p>Each point is the model after one task, tested on every class seen so far: {reading}.</p>
{figure(lambda width: figures.curve(run, width))}
<h3>Tasks</h3>
<p>Numbers are percent on the test images that show a class seen so far; forgetting is the mean AP, in points, that
earlier classes have lost since their best.</p>
{html_table(TASK_COLUMNS, rows, "tasks", averages)}{_old_classes(old_classes) if old_classes else ""}{matrix}"""


def _old_classes(metrics: Metrics) -> str:
    """What an extended model makes of the classes that it knew before, on other images than the new ones."""
    head = ["class", "AP", "before", "lost"]
    rows = [
        [name, f"{ap:.1f}", f"{metrics.best_AP[name]:.1f}", f"{metrics.best_AP[name] - ap:.1f}"]
        for name, ap in metrics.AP.items()
    ]
    return f"""<h3>Old classes</h3>
<p>{escape(old_classes_text(metrics))}. These are not the images of the table above, so the two are not averaged.</p>
{html_table(head, rows, "tasks sortable")}"""


def _classes(run: RunResults, evidence: Sequence[Evidence]) -> str:
    """What becomes of each class."""
    return f"""<h2>What becomes of each class</h2>
<p>Read a row to the right to see what later tasks do to a class: the numbers are its AP in percent, and “since best”
is what it has lost by the end.</p>
{figure(lambda width: figures.ap_heatmap(run, width))}
{sections.class_table(run, evidence)}
<h3>Precision and recall</h3>
{_precision_and_recall(run)}"""


def _precision_and_recall(run: RunResults) -> str:
    if not any(task.metrics.OP for task in run.tasks):
        nothing = f"Nothing is predicted correctly above {run.last.metrics.threshold:g} after any task"
        return f"<p>{nothing}: precision and recall are 0.</p>"
    return f"""<p>Recall above precision means that the model says yes too easily; max-entropy is there to close this
gap.</p>
{figure(lambda width: figures.precision_recall_bars(run, width))}"""
