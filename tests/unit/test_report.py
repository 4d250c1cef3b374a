import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from msgspec.structs import replace

from csc import metrics
from csc.artifacts import HEADLINE, Metrics, RunResults, TaskResult
from csc.errors import BadData
from csc.report import figures, page, paper, svg, table
from csc.report.columns import SUMMARY
from csc.report.findings import findings

SVG = "{http://www.w3.org/2000/svg}"
# fmt: off
VOC = [
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
]
# fmt: on


def confidence(run, width=svg.WIDTH):
    return figures.confidences({"": run.last.metrics}, width)


FIGURES = [figures.curve, figures.ap_heatmap, confidence, figures.precision_recall_bars, figures.task_matrix]
EVIL = '<b>&"x'


def make_run(scenario="voc-b0c4", method="csc", sizes=(4, 4, 4, 4, 4), classes=VOC, seed=0, first_task=1):
    """A run with real metrics of made-up scores; later tasks make earlier classes worse."""
    generator = np.random.default_rng(seed)
    targets = generator.random((300, sum(sizes))) < 0.15
    targets[0] = True
    tasks, best, seen = [], {}, 0
    for number, size in enumerate(sizes, first_task):
        before = size - size // number if number == first_task else 0  # of tasks that the run does not hold
        new, seen = tuple(classes[seen + before : seen + size]), seen + size
        shown = targets[:, :seen]
        scores = np.clip(0.35 * shown + generator.random(shown.shape) * (0.6 + 0.02 * number), 0, 1)
        result = metrics.evaluate(scores, shown, classes[:seen], best_ap=best)
        best = result["best_AP"]
        shown = Metrics(**result)
        tasks.append(TaskResult(number, new, tuple(classes[:seen]), shown, train_images=1000 + number, seconds=61.0))
    return RunResults(scenario, method, 7, "imagenet-1k", "0123456789abcdef" * 4, "0.1.0", tuple(tasks))


RUNS = {
    "voc-b0c4": make_run(),
    "uneven": make_run("voc-b10c3", "lwf", sizes=(10, 3, 3, 3, 1)),
    "one task": make_run("voc-b0c20", "joint", sizes=(20,)),
    "many tasks": make_run("coco-b0c1", sizes=(1,) * 60, classes=[f"class {index}" for index in range(60)]),
    "later tasks only": make_run("voc-b0c4", sizes=(12, 4, 4), first_task=3),
    "hostile names": make_run("digits-b0c2", sizes=(2, 2), classes=[EVIL, "a|b", "\x1b[31mred\n", "日本語" * 20]),
}
run_of_any_shape = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def texts(svg):
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{SVG}text")]


def cells(content, css):
    rows = ET.fromstring(content).findall(f".//table[@class='{css}']//tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


# ---- run


@run_of_any_shape
def test_a_run_survives_json_unless_a_terminal_would_obey_it(run):
    content = json.loads(json.dumps(run.to_plain(), allow_nan=False))
    if run is RUNS["hostile names"]:
        with pytest.raises(BadData, match="has control characters"):
            RunResults.from_plain(content, "run")
    else:
        assert RunResults.from_plain(content, "run") == run


def test_summary_is_that_of_the_metrics():
    run = RUNS["voc-b0c4"]
    assert run.summary == metrics.summary([task.metrics.to_plain() for task in run.tasks])
    assert run.summary["last_mAP"] == run.last.metrics["mAP"]


def without(content, *path):
    changed = json.loads(json.dumps(content))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return changed


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("seed",), "seed"),
        (("tasks",), "tasks"),
        (("tasks", 0, "new"), "new"),
        (("tasks", 1, "seconds"), "seconds"),
        (("tasks", 1, "metrics", "FPR"), r"missing key 'FPR' in tasks\[1\]\.metrics"),
        (("tasks", 1, "metrics", "AP", "bus"), "task 2: no AP of bus"),
        (("tasks", 1, "seen", 0), "task 2: its seen classes"),
    ],
)
def test_a_broken_run_is_refused_with_the_key_in_one_line(path, message):
    with pytest.raises(BadData, match=message) as caught:
        RunResults.from_plain(without(RUNS["voc-b0c4"].to_plain(), *path), "registered.json")
    assert str(caught.value).startswith("registered.json: ")
    assert "\n" not in str(caught.value)


def test_a_run_without_a_task_is_refused():
    with pytest.raises(BadData, match="no finished task"):
        RunResults.from_plain(RUNS["voc-b0c4"].to_plain() | {"tasks": []}, "registered.json")


# ---- paper


def test_the_paper_is_looked_up_by_scenario_and_method():
    def numbers(scenario, method):
        found = paper.paper_row_for(make_run(scenario, method))
        return None if found is None else found.numbers

    assert numbers("voc-b0c4", "csc") == {"last_mAP": 85.1, "avg_mAP": 90.4}
    coco = {"last_mAP": 72.8, "last_CF1": 64.9, "last_OF1": 66.8, "avg_mAP": 78.0}
    assert numbers("coco-b0c10", "csc") == coco
    assert numbers("voc-b0c4", "joint") == {"last_mAP": 93.6}
    assert numbers("voc-b5c3", "krt-r") is None
    assert numbers("digits-b0c2", "csc") is None


def test_a_replay_buffer_is_never_guessed():
    run = make_run("coco-b0c10", "csc-r")
    assert paper.paper_row_for(run) is None
    assert {row.buffer: row.numbers["last_mAP"] for row in paper.paper_for(run)}["20/class"] == 74.8
    assert paper.paper_row_for(make_run("voc-b0c4", "csc-r")).numbers["last_mAP"] == 87.9
    assert "buffer 2/class" in paper.paper_rows("voc-b0c4", "csc-r")[0].label


OUTPUTS = {
    "findings": lambda run: "\n".join(found.text for found in findings(run)),
    "page": lambda run: html.unescape(page.run_page(run)),
    "figure": lambda run: html.unescape(figures.curve(run)),
    "text": lambda run: " ".join(table.text_table(run).split()),
    "markdown": table.markdown_table,
}
shown_anywhere = pytest.mark.parametrize("shown", OUTPUTS.values(), ids=OUTPUTS)
PART = "not VOC 2007 as published: train: 3,366 images (published: 5,011)"
ELSEWHERE = "this 'voc' is made from 'voc2012', not from VOC 2007"


@shown_anywhere
@pytest.mark.parametrize("change", [{"held_out": 5}, {"data_note": ELSEWHERE}], ids=str)
def test_the_paper_never_stands_next_to_numbers_of_other_images(shown, change):
    assert "85.1" in shown(RUNS["voc-b0c4"])
    text = shown(replace(RUNS["voc-b0c4"], **change))
    assert "85.1" not in text
    assert "90.4" not in text
    assert "paper mAP" not in text
    assert "TResNet-M" not in text


@shown_anywhere
def test_the_paper_stands_next_to_a_part_of_its_data_only_with_a_note(shown):
    run = replace(RUNS["voc-b0c4"], data_note=PART)
    assert "85.1" in shown(run)
    assert f"this run's data are {PART}" in shown(run)
    assert "this run's data" not in shown(RUNS["voc-b0c4"])


def test_a_page_says_why_the_paper_is_left_out():
    left_out = "The paper's numbers are left out: "
    pages = [
        html.unescape(page.run_page(replace(RUNS["voc-b0c4"], **change)))
        for change in ({"held_out": 5}, {"data_note": ELSEWHERE})
    ]
    assert f"{left_out}tested on held-out training images." in pages[0]
    assert f"{left_out}{ELSEWHERE}." in pages[1]
    assert left_out not in page.run_page(replace(RUNS["uneven"], held_out=5))


def test_a_long_note_on_the_paper_is_wrapped():
    note = f"{PART}; test: 3,337 images (published: 4,952)"
    lines = table.text_table(replace(RUNS["voc-b0c4"], data_note=note)).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(" * "))
    assert all(len(line) <= 100 for line in lines[first : first + 2])
    assert lines[first + 1].startswith("   ")


def test_every_paper_row_has_known_keys_and_plausible_numbers():
    for scenario, methods in paper._results()["results"].items():
        for method, rows in methods.items():
            assert len({row["buffer"] for row in rows}) == len(rows)
            for row in rows:
                assert set(row) <= {*SUMMARY, "buffer", "note"}, (scenario, method)
                assert all(0 < row[name] < 100 for name in SUMMARY if name in row)
                assert "last_mAP" in row


# ---- tables


@run_of_any_shape
def test_text_table_is_aligned_and_fits_100_columns(run):
    lines = table.text_table(run).splitlines()
    rules = {len(line) for line in lines if set(line) <= set("━─")}
    assert len(rules) == 1
    assert rules.pop() <= 100
    assert all(table.width_of(line) <= 100 for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert all(line.isprintable() for line in lines)
    header = next(index for index, line in enumerate(lines) if line.split()[:1] == ["task"])
    rows = lines[header + 2 : header + 2 + len(run.tasks)]
    for row, task in zip(rows, run.tasks, strict=True):
        assert row.split()[0] == str(task.task)
        assert row.split()[-5:] == [f"{task.metrics[name]:.1f}" for name in HEADLINE]
        assert table.width_of(row) == table.width_of(rows[0])


def test_text_table_shows_averages_and_the_paper_apart_from_ours():
    run = RUNS["voc-b0c4"]
    lines = table.text_table(run).splitlines()
    average = next(line for line in lines if line.startswith(" average")).split()
    assert average[1] == f"{run.summary['avg_mAP']:.1f}"
    ours = next(line for line in lines if line.startswith(" this run")).split()
    assert ours[2:] == [f"{run.summary[name]:.1f}" for name in ("last_mAP", "last_CF1", "last_OF1", "avg_mAP")]
    theirs = next(line for line in lines if line.startswith(" paper (TResNet-M, full VOC 2007)"))
    assert theirs.split()[-4:] == ["85.1", "–", "–", "90.4"]
    assert "initialisation imagenet-1k" in lines[-2]
    assert lines[-1] == " seed 7 · data 0123456789ab · code 0.1.0"


def test_text_table_of_an_unknown_scenario_has_no_paper_line_and_repeats_no_number_for_it():
    text = table.text_table(RUNS["uneven"])
    assert "paper" not in text
    assert "this run" not in text


def test_numbers_that_the_paper_copied_are_marked():
    lines = table.text_table(make_run("voc-b0c4", "krt-r")).splitlines()
    assert any("buffer 2/class) *" in line for line in lines)
    assert " * as reported by the KRT paper" in lines


@pytest.mark.parametrize(
    ("names", "width", "shown"),
    [
        (["a", "b"], 10, "a, b"),
        (["aeroplane", "bicycle", "bird"], 13, "aeroplane, +2"),
        (["aeroplane", "bicycle", "bird"], 10, "aerop…, +2"),
        (["aeroplane"], 5, "aero…"),
        ([], 5, ""),
    ],
)
def test_long_class_lists_say_how_many_are_left_out(names, width, shown):
    assert table.shortened(names, width) == shown


@run_of_any_shape
def test_markdown_rows_have_the_same_number_of_cells(run):
    blocks = [block.splitlines() for block in table.markdown_table(run).split("\n\n") if block.startswith("|")]
    assert [len(block) for block in blocks] == [len(run.tasks) + 3, 2 + len(table.comparison(run))]
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block}) == 1


def test_markdown_escapes_class_names():
    text = table.markdown_table(RUNS["hostile names"])
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "a\\|b" in text


# ---- figures


@run_of_any_shape
@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("width", [svg.WIDTH, svg.PHONE])
def test_figures_are_well_formed_and_stay_inside_their_frame(run, figure, width):
    svg = ET.fromstring(figure(run, width))
    width, height = (float(svg.get(name)) for name in ("width", "height"))
    assert svg.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
    assert svg.get("aria-label")
    for node in svg.iter():
        for x, y, w, h in (("x", "y", "width", "height"), ("cx", "cy", "", "")):
            if node is not svg and node.get(x) is not None:
                assert 0 <= float(node.get(x)) <= float(node.get(x)) + float(node.get(w) or 0) <= width + 0.1
                assert 0 <= float(node.get(y)) <= float(node.get(y)) + float(node.get(h) or 0) <= height + 0.1
    assert "nan" not in " ".join(value for node in svg.iter() for value in node.attrib.values())


def test_curve_has_a_point_per_task_and_metric_and_the_paper_as_a_dashed_line():
    svg = figures.curve(RUNS["voc-b0c4"])
    root = ET.fromstring(svg)
    assert len(root.findall(f"{SVG}circle")) == 3 * 5
    assert len(root.findall(f"{SVG}path[@class='dashed']")) == 1
    assert "paper mAP 85.1" in texts(svg)
    assert not ET.fromstring(figures.curve(RUNS["uneven"])).findall(f"{SVG}path[@class='dashed']")


def test_curve_places_uneven_tasks_by_the_classes_seen():
    root = ET.fromstring(figures.curve(RUNS["uneven"]))
    xs = sorted({float(circle.get("cx")) for circle in root.findall(f"{SVG}circle")})
    steps = np.diff(xs)
    np.testing.assert_allclose(steps / steps[-1], [3, 3, 3, 1], rtol=0.01)


def test_labels_at_the_end_of_the_lines_never_overlap():
    moved = svg.spread([10, 11, 200, 12, 199], gap=15, lowest=200)
    assert min(np.diff(sorted(moved))) >= 15
    assert max(moved) <= 200


def test_heatmap_has_a_cell_for_each_class_from_its_arrival_on():
    for name in ("voc-b0c4", "uneven", "later tasks only"):
        run = RUNS[name]
        cells_drawn = ET.fromstring(figures.ap_heatmap(run)).findall(f"{SVG}rect[@class='heat']")
        assert len(cells_drawn) == sum(len(task.seen) for task in run.tasks)
        tips = {cell.find(f"{SVG}title").text for cell in cells_drawn}
        last = run.last
        assert f"bird after task {last.task}: AP {last.metrics['AP']['bird']:.1f}" in tips
    assert "task 1–3" in texts(figures.ap_heatmap(RUNS["later tasks only"]))


def test_heatmap_names_the_task_alone_where_only_its_classes_were_judged():
    first = RUNS["voc-b0c4"].tasks[0]
    extended = replace(RUNS["voc-b0c4"], tasks=(replace(first, task=6),))
    assert "task 6" in texts(figures.ap_heatmap(extended))


def test_confidence_has_a_bar_for_each_bin_that_is_not_empty():
    run = RUNS["voc-b0c4"]
    counts = run.last.metrics["confidence"]
    bars = [rect for rect in ET.fromstring(confidence(run)).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) == sum(count > 0 for kind in ("positives", "negatives") for count in counts[kind])
    assert "threshold 0.8" in texts(confidence(run))


def test_precision_recall_bars_state_the_gap():
    run = RUNS["voc-b0c4"]
    svg = figures.precision_recall_bars(run)
    assert (
        len([rect for rect in ET.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]) == 4 * 5
    )
    gap = f"{run.last.metrics['CR'] - run.last.metrics['CP']:+.1f}".replace("-", "−")
    assert f"CR − CP at the end: {gap}" in texts(svg)


# ---- page


@run_of_any_shape
def test_page_is_well_formed_and_has_a_row_per_task(run):
    rows = cells(page.run_page(run), "tasks")
    assert [row[0] for row in rows] == ["task", *(str(task.task) for task in run.tasks), "average"]
    assert len({len(row) for row in rows}) == 1
    for row, task in zip(rows[1:-1], run.tasks, strict=True):
        assert row[2:5] == [str(len(task.seen)), f"{task.train_images:,}", f"{task.metrics['images']:,}"]
        assert row[5] == f"{task.metrics['mAP']:.1f}"


def test_page_needs_nothing_from_elsewhere():
    html = page.run_page(RUNS["voc-b0c4"])
    assert set(re.findall(r"https?://[^\"' <]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|iframe)|@import|@font-face|\bfetch\(|XMLHttpRequest", html)
    addresses = re.findall(r"\b(?:src|href)=[\"'](.*?)[\"']|url\((.*?)\)", html)
    assert addresses
    assert all((one + other).startswith(("#", "data:")) for one, other in addresses)


def test_page_states_where_the_result_comes_from():
    text = "".join(ET.fromstring(page.run_page(RUNS["voc-b0c4"])).find(".//p[@class='facts']").itertext())
    for fact in ("initialisation imagenet-1k", "seed 7", "data 0123456789ab", "code 0.1.0", "training 5 min 5 s"):
        assert fact in text


def test_page_shows_the_paper_next_to_ours():
    run = RUNS["voc-b0c4"]
    html = page.run_page(run)
    tiles = ["".join(tile.itertext()) for tile in ET.fromstring(html).findall(".//dl/div")]
    assert f"last mAP{run.summary['last_mAP']:.1f}paper 85.1" in tiles
    assert f"average mAP{run.summary['avg_mAP']:.1f}paper 90.4" in tiles
    assert f"last CF1{run.summary['last_CF1']:.1f}" in tiles
    assert "paper (TResNet-M, full VOC 2007)" in html


def test_page_lists_every_buffer_of_the_paper():
    rows = cells(page.run_page(make_run("coco-b0c10", "csc-r")), "comparison")
    assert [row[0] for row in rows[1:]] == [
        "this run",
        *(f"paper (TResNet-M, full MS-COCO 2014, buffer {buffer})" for buffer in ("5/class", "20/class", "1000")),
    ]


def test_page_of_an_unknown_scenario_says_so():
    assert "have no row for this scenario" in page.run_page(RUNS["uneven"])


def test_page_escapes_class_names():
    html = page.run_page(RUNS["hostile names"])
    assert EVIL not in html
    assert "<b>&" not in html
    assert cells(html, "tasks")[1][1] == f"{EVIL}, a|b"
    assert "\x1b" not in html


def test_reports_load_neither_torch_nor_mlflow_nor_matplotlib():
    code = (
        "import sys, csc.report.page, csc.report.table; "
        "print(sorted({'torch', 'mlflow', 'matplotlib', 'kfp', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
