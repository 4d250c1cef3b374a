"""One HTML file that shows a run to a person: no script, no font, no image from elsewhere."""

from collections.abc import Sequence

from csc.artifacts import Run
from csc.data.evidence import Evidence
from csc.report import figures
from csc.report.figures import escape
from csc.report.paper import NUMBERS, paper_numbers
from csc.report.table import METRICS, averages, comparison, facts, notes

__all__ = ["page_of", "render", "table_row"]

_STYLE = """
* { box-sizing: border-box; }
html { color-scheme: light dark; }
body { margin: 0; background: var(--surface); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 908px; margin: 0 auto; padding: 48px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 8px; }
h2 { font-size: 19px; line-height: 1.3; margin: 48px 0 2px; }
p { margin: 0 0 14px; max-width: 74ch; }
.facts, .note, h2 + p { color: var(--muted); }
.facts, .note { font-size: 14px; }
.facts span { display: inline-block; margin-right: 18px; }
.facts b { color: var(--ink); font-weight: 500; overflow-wrap: anywhere; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 28px 0 12px; }
.numbers div { border-top: 2px solid var(--ink); padding-top: 8px; }
.numbers dt { color: var(--muted); font-size: 14px; }
.numbers dd { margin: 0; font-size: 30px; line-height: 1.2; font-weight: 600; font-variant-numeric: tabular-nums; }
.numbers .paper { font-size: 14px; font-weight: 400; color: var(--muted); min-height: 1.4em; }
.wide { overflow-x: auto; }
.wide + .note { margin-top: 10px; }
table { border-collapse: collapse; font-size: 14px; line-height: 1.45; font-variant-numeric: tabular-nums; }
.tasks { width: 100%; }
th { font-weight: 500; color: var(--muted); text-align: right; vertical-align: bottom; }
th, td { padding: 6px 0 6px 16px; border-bottom: 1px solid var(--grid); }
td { text-align: right; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
th.text, td.text { text-align: left; width: 36%; }
thead th, tbody tr:last-child td { border-bottom-color: var(--muted); }
tfoot td { font-weight: 600; border-bottom: 0; }
.study { font-size: 13px; }
.study th, .study td { white-space: nowrap; padding-left: 8px; }
.study th:first-child, .study td:first-child { padding-left: 0; }
figure { margin: 14px 0 0; overflow-x: auto; }
svg { display: block; }
@media (max-width: 700px) { figure .csc-figure { max-width: none; } }
@media print { main { padding: 0; } h2, figure { break-inside: avoid; } h2, h2 + p { break-after: avoid; } }
"""


def page_of(title: str, body: str) -> str:
    """Return a whole page around the HTML of its body."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{figures.theme(":root")}{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


def render(run: Run, evidence: Sequence[Evidence] = ()) -> str:
    """Return the page of a run."""
    body = f"""{_facts(run)}
{_numbers(run)}
{_comparison(run)}
<h2>Course of the run</h2>
<p>Each point is the model after one task, tested on every class seen so far: {_curve_reading(run)}</p>
<figure>{figures.curve(run)}</figure>
<h2>Tasks</h2>
<p>Numbers are percent on the test images that show a class seen so far; forgetting is the mean AP, in points, that
earlier classes have lost since their best.</p>
{_tasks(run)}
<h2>What becomes of each class</h2>
<p>Read a row to the right to see what later tasks do to a class: the numbers are its AP in percent, and “since best”
is what it has lost by the end.</p>
<figure>{figures.ap_heatmap(run)}</figure>
<h2>Precision and recall</h2>
<p>Recall above precision means that the model says yes too easily; max-entropy is there to close this gap.</p>
<figure>{figures.precision_recall_bars(run)}</figure>
<h2>Confidence after the last task</h2>
<p>Absent labels to the right of the threshold are false positives: {run.last.metrics["FPR"]:.1f} % of all absent labels
here. Counts are on a logarithmic scale.</p>
<figure>{figures.confidence(run)}</figure>"""
    return page_of(f"{run.scenario} · {run.method}", body)


def _facts(run: Run) -> str:
    known = facts(run) | {
        "tasks": str(len(run.tasks)),
        "classes": str(len(run.last.seen)),
        "training": _duration(sum(task.seconds for task in run.tasks)),
    }
    return '<p class="facts">' + " ".join(f"<span>{k} <b>{escape(v)}</b></span>" for k, v in known.items()) + "</p>"


def _numbers(run: Run) -> str:
    """Show the few numbers to remember, the paper's in small print below ours."""
    paper = paper_numbers(run.scenario, run.method) or {}
    tiles = []
    for name, label in {**NUMBERS, "forgetting": "forgetting"}.items():
        beside = f"paper {paper[name]:.1f}" if name in paper else ""
        tiles.append(f'<div><dt>{label}</dt><dd>{run.summary[name]:.1f}</dd><dd class="paper">{beside}</dd></div>')
    return f'<dl class="numbers">{"".join(tiles)}</dl>'


def _comparison(run: Run) -> str:
    """Say where the paper's numbers come from; as a table where it has several rows."""
    papers = comparison(run)[1:]
    if not papers:
        return '<p class="note">Tables 1 and 2 of the paper have no row for this scenario and method.</p>'
    remarks = "".join(f" * {escape(note)}." for note in notes(run))
    apart = f"The paper stands on its own weights and data, this run on those named above.{remarks}"
    if len(papers) == 1:
        return f'<p class="note">In small print: {escape(papers[0][0])}. {apart}</p>'
    head = table_row("th", ["", *NUMBERS.values()])
    body = "".join(table_row("td", [label, *numbers]) for label, numbers in comparison(run))
    table = f'<div class="wide"><table class="beside"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    return f'{table}<p class="note">{apart}</p>'


def _tasks(run: Run) -> str:
    head = table_row("th", ["task", "new classes", "seen", "train images", "test images", *METRICS], text={1})
    body = "\n".join(
        table_row(
            "td",
            [
                str(task.task),
                ", ".join(task.new),
                str(len(task.seen)),
                f"{task.train_images:,}",
                f"{task.metrics['images']:,}",
                *(f"{task.metrics[name]:.1f}" for name in METRICS),
            ],
            text={1},
        )
        for task in run.tasks
    )
    foot = table_row("td", ["average", "", "", "", "", *(averages(run).get(name, "") for name in METRICS)])
    sections = f"<thead>{head}</thead>\n<tbody>{body}</tbody>\n<tfoot>{foot}</tfoot>"
    return f'<div class="wide"><table class="tasks">{sections}</table></div>'


def table_row(tag: str, cells: Sequence[str], text: set[int] | frozenset[int] = frozenset()) -> str:
    """Write one table row; columns in `text` are set to the left."""
    css = [' class="text"' if column in text else "" for column in range(len(cells))]
    return "<tr>" + "".join(f"<{tag}{c}>{escape(cell)}</{tag}>" for c, cell in zip(css, cells, strict=True)) + "</tr>"


def _curve_reading(run: Run) -> str:
    if paper_numbers(run.scenario, run.method) is None:
        return "the less a line falls, the less was forgotten."
    return "the less a line falls, the less was forgotten; the dashed line is where the mAP of the paper's model ends."


def _duration(seconds: float) -> str:
    """Write a time as people say it.

    >>> _duration(42.4), _duration(252), _duration(3 * 3600 + 120)
    ('42 s', '4 min 12 s', '3 h 2 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
