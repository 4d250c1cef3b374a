"""Studies: reading them, their cells, the numbers that come out, and every form of the table."""

import csv
import hashlib
import html
import io
import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import yaml
from msgspec.structs import asdict

from csc.cli import main
from csc.cli import study as study_command
from csc.config import resolve
from csc.data.scores import Scores
from csc.errors import BadConfig, BadData, BadScenario
from csc.metrics import average_precision
from csc.report.columns import CALIBRATION, COLUMNS, COMPARED, EXPORTED, SUMMARY, TITLES, titles
from csc.report.paper import paper_rows
from csc.scenario import PAPER_SCENARIOS, Scenario
from csc.study import cells as cells_module
from csc.study import claims as claims_module
from csc.study import files as files_module
from csc.study.cells import DataSource, cells, distinct, results
from csc.study.claims import Resampled, claims, interval_cells, signed
from csc.study.files import log_outcome, write_files
from csc.study.intervals import Interval, _weights, difference, resampled_map
from csc.study.outcome import Outcome
from csc.study.page import study_page
from csc.study.reading import SHIPPED, read_study
from csc.study.render import csv_lines, latex, markdown, text
from csc.study.spec import Row, Study
from csc.study.summary import results_document, write_results
from csc.tracking.queries import ScenarioRun
from csc.version import code_version
from tests.tracked import fresh_database

ROOT = Path(__file__).parents[2]
SOURCES = {
    "coco": DataSource("s3://b/coco", 80, "c" * 64),
    "voc": DataSource("/data/voc", 20, "v" * 64),
    "voc8": DataSource("/data/voc8", 8, "e" * 64),  # its first classes
    "voconce0": DataSource("/data/voconce0", 20, "f" * 64),  # each image in one task
    "voconce4": DataSource("/data/voconce4", 20, "0" * 64),
    "digits": DataSource("/data/digits", 10, "d" * 64),
}
MINE = {"title": "Mine", "scenarios": ["voc-b0c4"], "methods": ["csc", "lwf"]}


@pytest.fixture
def written(tmp_path):
    """Read a study from the content of a YAML file."""

    def read(content, name="mine"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return read_study(str(path))

    return read


# Reading


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_study_can_be_run_as_it_is(name):
    study = read_study(name)
    known = {*PAPER_SCENARIOS, "digits-b0c2", "digits-b0c5", "voc8-b0c4", "voconce0-b0c4", "voconce4-b4c2"}
    assert {Scenario.parse(scenario).name for scenario in study.scenarios} <= known
    made = cells(study, SOURCES)
    assert len(made) == len(study.scenarios) * len(study.rows) * len(study.seeds)
    assert {cell.refused for cell in made} == {""}
    assert msgspec.convert(msgspec.to_builtins(study), Study) == study


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_tables_1_and_2_have_every_row_that_the_paper_prints(name):
    study = read_study(name)
    for scenario in study.scenarios:
        ours = {(row.method, row.paper.get("buffer")) for row in study.rows if row.reference(scenario).numbers}
        methods = {row.method for row in study.rows}
        printed = {(method, row.buffer) for method in methods for row in paper_rows(scenario, method)}
        assert ours == printed
    settings = {row.name: row.settings.get("memory", {}) for row in study.rows}
    for row in study.rows:
        size = row.group.removesuffix("/class")
        if row.group.endswith("/class"):
            assert settings[row.name]["per_class"] == int(size)
        elif size.isdecimal() and int(size):
            assert settings[row.name]["total"] == int(size)


@pytest.mark.parametrize(
    ("name", "row", "scenario", "column", "value"),
    [
        ("table1", "KRT-R (20/class)", "coco-b40c10", "last_OF1", 68.9),
        ("table2", "CSC", "voc-b5c3", "avg_mAP", 88.0),
        ("table3", "L2P", "coco-b0c10", "last_mAP", 68.0),
        ("table4", "(a)", "coco-b0c5", "last_CF1", 35.4),
        ("table5", "Z → S", "coco-b0c10", "last_OF1", 65.3),
        ("table6", "β (2e-3)", "coco-b0c10", "last_mAP", 73.02),
        ("figure3", "without H", "voc-b4c2", "FPR", 35),
        ("figure3", "with H", "voc-b4c2", "H", 5.36),
    ],
)
def test_the_papers_numbers_stand_next_to_their_rows(name, row, scenario, column, value):
    assert read_study(name).row_named(row).reference(scenario).numbers[column] == value


def test_rows_that_mean_the_papers_components_set_them():
    settings = {
        (name, row.name): cell.config
        for name in ("table4", "table5", "figure3", "quirks")
        for study in [read_study(name)]
        for row in study.rows
        for cell in cells(study, SOURCES)
        if cell.row == row and cell.seed == 0
    }
    assert settings["table4", "Baseline (none)"].max_entropy.beta == 0
    assert settings["table4", "(a) (max-entropy)"].head == "linear"
    assert settings["table4", "(a) (max-entropy)"].max_entropy.beta == 4e-3
    assert settings["table4", "(b) (CI-GCN)"].head == "ci_gcn"
    assert settings["table5", "Z → Z (sigmoid)"].cigcn.correlation == "Z->Z"
    assert settings["figure3", "with H"].max_entropy.beta == 4e-2
    assert set(asdict(settings["quirks", "all of them"].release_quirks).values()) == {True}
    assert sum(asdict(settings["quirks", "no_shuffle"].release_quirks).values()) == 1
    switches = set(asdict(settings["quirks", "as in the paper"].release_quirks))
    assert switches <= {row.label for row in read_study("quirks").rows}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "colour: no such key; choose one of title,"),
        ({"title": None}, "title: expected one line of text"),
        ({"methods": None}, "rows: give either rows or methods"),
        ({"methods": "csc"}, "methods=csc: expected a list"),
        ({"methods": ["csc", "cscc"]}, "rows[1].method: 'cscc' is not known; choose one of "),
        ({"rows": [{"label": "A", "method": "csc"}]}, "rows: give either rows or methods"),
        ({"scenarios": []}, "scenarios: expected a list with at least one entry"),
        ({"scenarios": [4]}, "scenarios[0]=4: expected text; put it in quotes"),
        ({"scenarios": [["voc-b0c4"]]}, "scenarios[0]=a list: expected text"),
        ({"scenarios": ["voc-b0c4", "voc"]}, "scenarios[1]: scenario 'voc': expected <data set>-b"),
        ({"seeds": [0, -1]}, "seeds[1]=-1: expected a whole number, 0 or more"),
        ({"seeds": [0, 0]}, "seeds: expected no entry twice"),
        ({"columns": ["mAP"]}, "columns[0]=mAP: expected one of last_mAP, "),
        ({"settings": {"memory": {"per_clas": 5}}}, "settings.memory.per_clas: no such setting; choose one of memory."),
        ({"settings": {"trian.lr": 1}}, "settings.trian.lr: no such setting; choose one of agcn, "),
        ({"settings": {"seed": 1}}, "settings.seed: not a setting here"),
        ({"settings": [1]}, "settings=a list: expected names with values"),
        ({"settings": {"init": date(2024, 7, 1)}}, "settings.init: expected one word or number, found datetime.date("),
        ({"settings": {"init": ["hub"]}}, "settings.init: expected one word or number, found ['hub']"),
        ({"title": ["Mine"]}, "title=a list: expected text"),
        ({"title": date(2024, 7, 1)}, "title=2024-07-01: expected text"),
        ({"groups": ["a"]}, "groups=a list: expected text"),
        ({"methods": [["csc"]]}, "methods[0]=a list: expected text"),
        ({"grid": {"init": [date(2024, 7, 1)]}}, "grid.init: expected one word or number, found datetime.date("),
        ({"grid": {"train.lr": 0.1}}, "grid.train.lr=0.1: expected a list"),
        ({"grid": {"train.rl": [0.1]}}, "grid.train.rl: no such setting"),
        ({"order": [["csc", "krt"]]}, "order[0][1]: expected the name of one row, found 'krt'"),
        ({"order": [["csc"]]}, "order[0]: expected a list of rows"),
        ({"order": ["csc"]}, "order[0]=csc: expected a list"),
    ],
    ids=str,
)
def test_a_wrong_study_is_refused_with_file_and_key(written, change, message):
    with pytest.raises(BadConfig, match=re.escape(f"mine.yaml: {message}")):
        written({**MINE, **change})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"method": "csc"}, "rows[0].label: is missing"),
        ({"label": "A", "method": "csc", "buffer": 5}, "rows[0].buffer: no such key"),
        (
            {"label": "A", "method": "csc", "paper": {"voc-b0c4": {"mAP": 1}}},
            "rows[0].paper.voc-b0c4.mAP: expected one of last_mAP",
        ),
        (
            {"label": "A", "method": "csc", "paper": {"voc-b0c4": {"H": "x"}}},
            "rows[0].paper.voc-b0c4.H=x: expected a num",
        ),
        (
            {"label": "A", "method": "csc", "by_scenario": {"voc-b0c4": {"lr": 1}}},
            "rows[0].by_scenario.voc-b0c4.lr: no",
        ),
        (
            {"label": "A", "method": "csc", "by_scenario": {"voc_b0c4": {"train.lr": 1}}},
            "rows[0].by_scenario.voc_b0c4: scenario 'voc_b0c4': expected <data set>-b",
        ),
        (
            {"label": "A", "method": "csc", "paper": {"voc-b0-c4": {"last_mAP": 1}}},
            "rows[0].paper.voc-b0-c4: scenario 'voc-b0-c4': expected <data set>-b",
        ),
        (
            {"label": "A", "method": "csc-r", "paper": {"buffer": "2/clas"}},
            "rows[0].paper.buffer: expected one of 5/class, 20/class, 1000, 2/class, found '2/clas'",
        ),
        (
            {"label": "A", "method": "l2p", "paper": {"buffer": "none"}},
            "rows[0].paper.buffer: the paper's tables 1 and 2 have no row of 'l2p'; give numbers by scenario",
        ),
        ("csc", "rows[0]: expected a group of label, "),
        ({"label": ["A"], "method": "csc"}, "rows[0].label=a list: expected text"),
        ({"label": "A", "method": ["csc"]}, "rows[0].method=a list: expected text"),
        ({"label": "A", "method": "csc", "group": 5}, 'rows[0].group=5: expected text; put it in quotes: "5"'),
        ({"label": "A", "method": "csc", "paper": {"voc-b0c4": 5}}, "rows[0].paper.voc-b0c4=5: expected names with"),
        ({"label": "A", "method": "csc", "paper": {"buffer": ["none"]}}, "rows[0].paper.buffer: expected one of none"),
    ],
    ids=str,
)
def test_a_wrong_row_is_refused_with_file_and_key(written, row, message):
    content = {key: value for key, value in MINE.items() if key != "methods"}
    with pytest.raises(BadConfig, match=re.escape(f"mine.yaml: {message}")):
        written({**content, "rows": [row]})


def test_scenarios_are_known_however_they_are_written(written):
    row = {"label": "A", "method": "csc", "paper": {"VOC-B0C4": {"H": 1}}, "by_scenario": {"VOC-B0C4": {"init": "hub"}}}
    study = written({"title": "T", "scenarios": ["VOC-B0C4"], "rows": [row]})
    assert study.subset().title == "T"
    assert study.rows[0].reference("voc-b0c4").numbers == {"H": 1}
    assert study.settings_of(study.rows[0], *study.scenarios, 0)["init"] == "hub"


def test_rows_with_the_same_name_are_refused(written):
    rows = [{"label": "A", "method": "csc"}, {"label": "A", "method": "lwf"}]
    with pytest.raises(BadConfig, match="rows: expected labels that differ"):
        written({"title": "T", "scenarios": ["voc-b0c4"], "rows": rows})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: ]", "not readable as YAML in line 1"),
        ("title: a\ntitle: b", "in line 2 .'title' is there twice"),
        ("- 1", "the file: expected a group"),
        ("", "the file: expected"),
    ],
)
def test_a_file_that_is_no_study_is_refused(written, content, message):
    with pytest.raises(BadConfig, match=message):
        written(content)


def test_a_study_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(BadConfig, match=r"study 'table7': no such file; give a YAML file or one of .*calibration, "):
        read_study("table7")


def test_a_grid_multiplies_every_row_and_names_it(written):
    study = written({**MINE, "grid": {"train.lr": [0.1, 0.2], "loss.alpha": [0.15, 0.3]}})
    assert [row.label for row in study.rows][1:3] == ["csc lr=0.1 alpha=0.3", "csc lr=0.2 alpha=0.15"]
    assert len(study.rows) == 8
    assert study.rows[-1].settings == {"train": {"lr": 0.2}, "loss": {"alpha": 0.3}}


def test_the_example_in_the_documentation_is_a_study(written):
    example = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "studies.md").read_text(), re.DOTALL)[1]
    study = written(example)
    assert [row.name for row in study.rows][-1] == "CSC-R lr=0.0001 (5/class)"
    assert study.order == (("CSC-R lr=4e-05", "CSC lr=4e-05"),)


# Narrowing and cells


def test_the_command_line_narrows_and_overrides(written):
    study = written({**MINE, "settings": {"train": {"epochs": 3, "lr": 0.1}}, "order": [["csc", "lwf"]]})
    narrow = study.subset(["digits-b0c2"], ["csc"], [7], {"train": {"epochs": "1"}})
    assert (narrow.scenarios, narrow.seeds, [row.label for row in narrow.rows]) == (("digits-b0c2",), (7,), ["csc"])
    assert narrow.order == ()
    assert (narrow.title, study.subset(["voc-b0c4"]).title) == ("Mine; its rows on digits-b0c2", "Mine")
    settings = narrow.settings_of(narrow.rows[0], "digits-b0c2", 7)
    assert settings == {"train": {"epochs": "1", "lr": 0.1}, "method": "csc", "seed": 7}
    with pytest.raises(BadConfig, match="--methods krt: study 'mine' has no such row; its methods are csc, lwf"):
        study.subset(methods=["krt"])
    with pytest.raises(BadScenario):
        study.subset(["voc-b0c0"])
    with pytest.raises(BadConfig, match="--seeds: chooses nothing"):
        study.subset(seeds=[])
    assert study.subset(["voc-b0c4", "voc-b4c2", "VOC-b0c4"]).scenarios == ("voc-b0c4", "voc-b4c2")


def test_settings_of_a_scenario_win_over_those_of_the_row():
    study = read_study("table1")
    row = study.row_named("KRT")
    assert "krt" not in study.settings_of(row, "coco-b0c10", 0)
    assert study.settings_of(row, "coco-b40c10", 0)["krt"] == {"tokens": 300}


def test_cells_that_cannot_be_run_say_why_and_leave_the_others_alone(written):
    study = written({**MINE, "methods": ["csc", "l2p"], "scenarios": ["voc-b0c4", "coco-b0c10"]})
    study = study.subset(overrides={"backbone": {"frozen": "true"}}, seeds=[0])
    made = cells(study, {"voc": SOURCES["voc"]})
    reasons = {cell.name: cell.refused for cell in made}
    assert reasons["voc-b0c4 · csc · seed 0"] == ""
    assert "method 'l2p' works by changing the backbone" in reasons["voc-b0c4 · l2p · seed 0"]
    assert reasons["coco-b0c10 · csc · seed 0"] == "no data set 'coco' at hand; give its uri with --data"
    assert made[0].config == resolve("voc", {"method": "csc", "seed": 0, "backbone": {"frozen": True}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"epochs": "0"}}, "study 'mine': no cell can be run: train.epochs=0: expected"),
        ({"train": {"epoch": 1}}, "train.epoch: no row of study 'mine' reads such a setting"),
    ],
)
def test_a_setting_that_suits_no_cell_is_an_error(written, change, message):
    with pytest.raises(BadConfig, match=message):
        cells(written(MINE).subset(overrides=change), SOURCES)


def test_a_scenario_that_does_not_fit_its_data_set_is_an_error(written):
    with pytest.raises(BadScenario, match="asks for 30 classes"):
        cells(written({**MINE, "scenarios": ["voc-b30c2"]}), SOURCES)


# Results


class Server:
    """Finished runs, as tracking would tell of them."""

    def __init__(self):
        self.runs, self.curves = [], {}
        self.calibration = {}  # what the runs that finish next have of it

    def finish(self, cell, last, curve=None, **tags):
        """Pretend that a cell was run."""
        run_id = f"run{len(self.runs)}"
        facts = {
            "csc.run_key": cell.key,
            "csc.initialisation": "scratch",
            "csc.data": cell.source.fingerprint,
            "csc.code_version": code_version(),
        }
        self.curves[run_id] = curve or tuple(last + 5 * left for left in reversed(range(cell.tasks)))
        average = sum(self.curves[run_id]) / len(self.curves[run_id])
        metrics = {"last_mAP": last, "last_CF1": last / 2, "last_OF1": last / 4, "avg_mAP": average}
        params = {key: str(value) for key, value in cell.config.flat().items()}
        more = {"H": 1.234, "FPR": 20.0, "CR": 60.0, "CP": 40.0} | self.calibration
        self.runs.append(ScenarioRun(run_id, facts | tags, params, metrics | more))


@pytest.fixture
def server(monkeypatch):
    known = Server()
    monkeypatch.setattr(cells_module, "finished_runs", lambda scenario: known.runs)
    monkeypatch.setattr(cells_module, "map_after_tasks", lambda run_id: known.curves[run_id])
    monkeypatch.setattr(claims_module, "resampled", lambda run_id, task: None)
    return known


def test_finished_cells_are_found_by_their_key(written, server):
    asked = cells(written({**MINE, "seeds": [0, 1]}), SOURCES)
    server.finish(asked[1], 70.0)
    found = results(asked)
    assert [result.missing for result in found] == ["not run", "", "not run", "not run"]
    assert found[1].metrics["last_mAP"] == 70.0
    assert found[1].run_id == "run0"
    assert found[1].provenance == {"initialisation": "scratch", "data": "v" * 64, "code": code_version()}


def test_a_row_without_anything_random_is_run_once_and_counts_for_every_seed(written, server):
    once = {"label": "once", "method": "ridge", "settings": {"init": "weights.safetensors"}}
    rows = [once, {**once, "label": "random", "settings": {**once["settings"], "ridge.hidden": 8}}]
    asked = cells(written({"title": "Mine", "scenarios": ["voc-b0c4"], "rows": rows}), SOURCES)
    assert [cell.seed for cell in asked] == [0, 1, 2, 0, 1, 2]
    assert len({cell.key for cell in asked[:3]}) == 1
    assert len({cell.key for cell in asked[3:]}) == 3
    assert len(distinct(asked)) == 4
    server.finish(asked[0], 83.0)
    assert [result.missing for result in results(asked)] == [""] * 3 + ["not run"] * 3


def test_your_own_data_are_judged_by_training_images_that_were_held_out():
    study = read_study("own-data").subset(["pets-b0c2"])
    made = cells(study, {"pets": DataSource("/data/pets", 6, "p" * 64)})
    assert {(cell.refused, cell.config.held_out) for cell in made} == {("", 5)}
    tested = cells(study.subset(overrides={"held_out": 0}), {"pets": DataSource("/data/pets", 6, "p" * 64)})
    assert {cell.config.held_out for cell in tested} == {0}


def test_a_run_that_stopped_half_way_is_not_finished(written, server):
    asked = cells(written({**MINE, "seeds": [0]}), SOURCES)
    server.finish(asked[0], 70.0, curve=(90.0, 80.0))
    tried = {asked[0].name}
    assert [result.missing for result in results(asked, tried=tried)] == ["failed", "not run"]
    reasons = {asked[0].key: "out of memory"}
    assert results(asked, tried=tried, failed=reasons)[0].reason == "out of memory"


def test_runs_of_another_version_are_found_only_if_asked_for_and_after_those_of_this_one(written, server):
    asked, other = cells(written({**MINE, "seeds": [0]}), SOURCES)
    server.finish(asked, 60.0, **{"csc.code_version": "0.0.9+old", "csc.run_key": "of another version"})
    del server.runs[0].params["train.epochs"]  # a setting that it did not know yet
    assert results([asked])[0].missing == "not run"
    found, missing = results([asked, other], any_code=True)
    assert (found.metrics["last_mAP"], found.provenance["code"]) == (60.0, "0.0.9+old")
    assert missing.missing == "not run"
    changed = written({**MINE, "seeds": [0], "settings": {"train.epochs": 1}})
    assert results(cells(changed, SOURCES), any_code=True)[0].missing == "not run"
    server.finish(asked, 70.0)
    assert results([asked], any_code=True)[0].metrics["last_mAP"] == 70.0


def test_weights_are_known_by_their_name_and_digest_not_by_their_folder(tmp_path, written, server):
    here, elsewhere = tmp_path / "w.safetensors", "/elsewhere/w.safetensors"
    here.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()[:12]

    def found(init, recorded):
        server.runs.clear()
        base = {**MINE, "seeds": [0], "methods": ["csc"]}
        (made,) = cells(written({**base, "settings": {"init": elsewhere}}), SOURCES)
        server.finish(made, 60.0, **{"csc.run_key": "of another version", "csc.initialisation": recorded})
        return not results(cells(written({**base, "settings": {"init": init}}), SOURCES), any_code=True)[0].missing

    assert found(str(here), f"file w.safetensors, sha256 {digest}")
    assert found(str(here), f"file w.safetensors, sha256 {digest}, COCO LABELS LEAKED")
    assert not found(str(here), "file w.safetensors, sha256 0123456789ab")
    assert found("/not/here/w.safetensors", "file w.safetensors, sha256 0123456789ab")  # nothing to compare it with
    assert not found("/not/here/v.safetensors", "file w.safetensors, sha256 0123456789ab")
    assert found(elsewhere, "")
    for other in ("hub", "scratch", str(here)):
        assert not found(other, "")


def test_who_did_the_work_is_no_difference(server):
    study = Study("mine", "Mine", (Row("A", "csc", settings={"train": {"workers": 8}}),), ("voc-b0c4",), seeds=(0,))
    (asked,) = cells(study, SOURCES)
    server.finish(*cells(study.subset(overrides={"train": {"workers": 2}}), SOURCES), 70.0)
    assert results([asked])[0].missing == ""


@pytest.fixture
def outcome(server):
    """Table 2 of the paper, cut down: two seeds, one of them missing for a row, one row not run at all."""
    study = read_study("table2").subset(["voc-b0c4"], ["finetune", "agcn", "csc", "er", "krt-r"], [0, 1])
    asked = cells(study, SOURCES)
    numbers = {"Fine-Tuning": (60.0, 62.0), "AGCN (0)": (74.0,), "CSC (0)": (86.0, 85.0), "ER (2/class)": (70.0, 70.5)}
    for cell in asked:
        if cell.seed < len(numbers.get(cell.row.name, ())):
            server.finish(cell, numbers[cell.row.name][cell.seed])
    tried = {cell.name for cell in asked if cell.row.label == "AGCN"}
    failed = {cell.key: "CUDA out of memory" for cell in asked if cell.row.label == "AGCN" and cell.seed == 1}
    return Outcome(study, tuple(results(asked, tried=tried, failed=failed)))


def test_numbers_are_means_over_seeds_with_the_sample_deviation(outcome):
    entries = {entry.row.label: entry for entry in outcome.table("voc-b0c4")}
    number = entries["CSC"].number("last_mAP")
    assert (number.mean, number.n) == (85.5, 2)
    assert number.std == pytest.approx(0.7071, abs=1e-4)
    assert entries["CSC"].difference("last_mAP") == pytest.approx(0.4)
    assert entries["AGCN"].number("last_mAP").std is None
    assert entries["KRT-R"].number("last_mAP") is None
    assert entries["KRT-R"].difference("last_mAP") is None
    assert entries["KRT-R"].missing == "not run"
    assert entries["CSC"].number("CR-CP").mean == 20.0
    assert entries["CSC"].number("ECE") is None
    assert entries["CSC"].curve == pytest.approx((105.5, 100.5, 95.5, 90.5, 85.5))


def test_the_terminal_table_is_aligned_and_complete(outcome):
    assert text(outcome) == EXPECTED.replace("CODE", code_version())


EXPECTED = """\
 Table 2: PASCAL VOC 2007

 voc-b0c4
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
              buffer     last mAP  paper  diff  average mAP  paper   diff
──────────────────────────────────────────────────────────────────────────
 Fine-Tuning             61.0±1.4   62.9  −1.9     71.0±1.4   82.1  −11.1
──────────────────────────────────────────────────────────────────────────
 AGCN         0        74.0 (n=1)   73.4  +0.6   84.0 (n=1)   84.3   −0.3
 CSC          0          85.5±0.7   85.1  +0.4     95.5±0.7   90.4   +5.1
──────────────────────────────────────────────────────────────────────────
 ER           2/class    70.2±0.4   67.7  +2.5     80.2±0.4   82.6   −2.3
 KRT-R        2/class     not run  83.4*                  –  90.7*
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━

 claims by last mAP
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
                     scenario  difference  95 % interval  seeds  images  paper  verdict
────────────────────────────────────────────────────────────────────────────────────────
 CSC > AGCN          voc-b0c4       +12.0              –      1       –  +11.7     open
 AGCN > Fine-Tuning  voc-b0c4       +14.0              –      1       –  +10.5     open
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
 ± is the sample standard deviation over seeds; n is given where seeds are missing
 * as reported by the KRT paper: KRT-R (2/class)
 failed (1 of 10 cells): AGCN (0), seed 1: CUDA out of memory
 not run (2 of 10 cells): KRT-R (2/class): not started or not finished
 claims by last mAP: 2 open; one holds if its whole interval is above zero, level if zero is in it
 intervals are paired over seeds, and over test images by bootstrap where their scores are kept
 open: one seed says nothing of how the methods do with others
 seeds 0, 1 · data voc vvvvvvvvvvvv
 initialisation scratch
 code CODE"""


def scores_like(last, images=400, seed=0, noise=0.3):
    """Scores of two classes, better the smaller the noise; the same images for all."""
    generator = np.random.default_rng(1)
    targets = generator.random((images, 2)) < 0.3
    draws = np.random.default_rng([seed, int(last)]).random((images, 2))
    confidences = np.clip((1 - noise) * targets + noise * draws, 0, 1).astype(np.float32)
    return Scores(confidences, targets, ("a", "b"), pa.chunked_array([list(map(str, range(images)))]))


def verdicts(outcome):
    return {(claim.higher, claim.lower): claim.verdict for claim in claims(outcome)}


def test_claims_are_checked_on_what_is_there(outcome):
    found = claims(outcome)  # of KRT-R > ER only one is there
    assert [(claim.higher, claim.lower) for claim in found] == [("CSC", "AGCN"), ("AGCN", "Fine-Tuning")]
    assert found[0].interval.mean == pytest.approx(12.0)  # seed 0 alone is in both
    assert found[0].paper == pytest.approx(85.1 - 73.4)
    assert verdicts(outcome) == {("CSC", "AGCN"): "open", ("AGCN", "Fine-Tuning"): "open"}


@pytest.fixture
def two_rows(written, server):
    """A study of two rows with the last mAP of each seed."""

    def make(first, second):
        study = written({**MINE, "order": [["csc", "lwf"], ["csc", "lwf"]], "seeds": list(range(len(first)))})
        for cell in (asked := cells(study, SOURCES)):
            server.finish(cell, (first if cell.row.label == "csc" else second)[cell.seed])
        return Outcome(study, tuple(results(asked)))

    return make


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ((72.7, 72.7, 72.7), (72.5, 72.9, 72.1), "level"),  # a positive difference of means is no claim
        ((80.1, 80.3, 80.2), (70.2, 70.1, 70.4), "holds"),
        ((70.2, 70.1, 70.4), (80.1, 80.3, 80.2), "does not hold"),
        ((80.0, 60.0, 70.0), (79.0, 59.1, 68.9), "holds"),  # seeds vary more than the methods differ, but both alike
        ((80.0,), (70.0,), "open"),
    ],
    ids=str,
)
def test_a_claim_stands_on_the_differences_of_paired_seeds(two_rows, first, second, verdict):
    assert verdicts(two_rows(first, second)) == {("csc", "lwf"): verdict}


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("last_mAP", 0.06, "+0.1"),
        ("last_mAP", 0.04, "+0.04"),
        ("last_mAP", -0.004, "−0.004"),
        ("last_mAP", 0.0003, "+0.0003"),
        ("last_mAP", 0.0, "0.0"),
        ("last_mAP", 1e-13, "0.0"),  # what is left of two equal numbers
        ("H", -0.004, "−0.004"),
        ("H", 0.0, "0.00"),
    ],
)
def test_a_difference_that_is_not_zero_is_not_told_as_zero(column, value, told):
    assert signed(column, value) == told


def test_the_low_end_of_an_interval_that_holds_is_above_zero_in_print():
    interval = Interval(mean=0.66, low=0.003, high=1.32, seeds=3, images=3337)
    assert interval.verdict == "above"
    assert interval_cells("last_mAP", interval) == ["+0.7", "+0.003 to +1.3", "3", "3,337"]


def test_test_images_widen_the_interval_and_are_drawn_alike_for_both_runs(two_rows, monkeypatch):
    noises = {"run0": 0.9, "run1": 0.9, "run2": 0.5, "run3": 0.5}
    kept = {run: scores_like(0, noise=noise) for run, noise in noises.items()}

    def resampled(run_id, task):
        assert task == 5
        return Resampled(resampled_map(kept[run_id]), 400, "same")

    monkeypatch.setattr(claims_module, "resampled", resampled)
    level = two_rows((60.4, 60.6), (60.3, 60.5))
    (claim,) = claims(level)
    assert (claim.interval.seeds, claim.interval.images) == (2, 400)
    assert claim.verdict == "level"
    assert claim.interval.high - claim.interval.low > 1
    monkeypatch.setattr(claims_module, "resampled", lambda run_id, task: Resampled(np.zeros(200), 400, run_id))
    (claim,) = claims(level)  # not the same test images
    assert claim.interval.images == 0


def test_resampled_average_precision_is_that_of_the_images_drawn():
    scores = scores_like(0, images=60)
    scores = replace(scores, confidences=np.round(scores.confidences, 1))  # with ties
    draws, weights = resampled_map(scores), _weights(60, 1000)
    for draw in range(0, 1000, 97):
        rows = np.repeat(np.arange(60), weights[:, draw].astype(int))
        expected = 100 * average_precision(scores.confidences[rows], scores.targets[rows]).mean()
        assert draws[draw] == pytest.approx(expected, abs=1e-4)


def test_an_interval_covers_the_true_difference_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        seeds = generator.normal(1.0, 0.5, 3)
        of_images = generator.normal(0, 0.8)
        draws = seeds.mean() + of_images + generator.normal(0, 0.8, 300)
        found = difference([(value + of_images, 0.0) for value in seeds], [(draws, np.zeros(300))] * 3, 100)
        covered += found.low <= 1.0 <= found.high
    assert 0.93 <= covered / 200 <= 1.0


def test_markdown_has_the_same_cells(outcome):
    page = markdown(outcome)
    assert "| CSC | 0 | 85.5 ± 0.7 | 85.1 | +0.4 | 95.5 ± 0.7 | 90.4 | +5.1 |" in page
    assert "| KRT-R | 2/class | not run | 83.4\\* |  | – | 90.7\\* |  |" in page
    assert "| AGCN | 0 | 74.0 (n=1) | 73.4 | +0.6 |" in page
    widths = {line.count(" | ") for line in page.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_latex_has_the_same_cells_and_escapes_what_is_not_text(outcome, written, server):
    page = latex(outcome)
    assert r"CSC & 0 & 85.5 $\pm$ 0.7 & 85.1 & +0.4 & 95.5 $\pm$ 0.7 & 90.4 & +5.1 \\" in page
    assert page.count(r"\begin{tabular}{llrrrrrr}") == 2  # and the claims
    for environment in ("table", "tabular"):
        assert page.count(f"\\begin{{{environment}}}") == page.count(f"\\end{{{environment}}}")
    row = {"label": r"50% & \more_{x}", "method": "csc"}
    study = written({"title": "T_1", "scenarios": ["voc-b0c4"], "rows": [row]})
    strange = latex(Outcome(study, tuple(results(cells(study, SOURCES)))))
    assert r"50\% \& \textbackslash{}more\_\{x\} & 85.5 $\pm$ 0.7 (n=2) &" in strange
    assert r"\caption{T\_1, voc-b0c4}" in strange


def test_csv_has_a_line_for_each_cell_and_metric_with_all_facts(outcome):
    records = list(csv.DictReader(io.StringIO(csv_lines(outcome))))
    assert len(records) == len(outcome.results) * (len(outcome.study.columns) + len(EXPORTED))
    first = next(record for record in records if record["row"] == "CSC")
    assert (first["metric"], float(first["value"]), float(first["paper"])) == ("last_mAP", 86.0, 85.1)
    assert (first["initialisation"], first["code"], first["seed"]) == ("scratch", code_version(), "0")
    missing = [record for record in records if record["row"] == "KRT-R"]
    assert {(record["status"], record["value"]) for record in missing} == {("not run", "")}
    failed = [record for record in records if record["status"] == "failed"]
    assert {record["reason"] for record in failed} == {"CUDA out of memory"}


class Tags(HTMLParser):
    """Collects the open tags and the text of a page; fails on a tag that is closed out of turn."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br", "rect", "circle", "path", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag in ("rect", "circle", "path", "polyline"):
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_draws_a_line_for_each_finished_row(outcome):
    page = study_page(outcome)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert page.count("<polyline") == 8  # in two widths
    words = " ".join(tags.text)
    for word in ("85.5±0.7", "not run", "CUDA out of memory", "7 of 10 cells finished"):
        assert word in words
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count('aria-label="Differences with their intervals"') == 2


def test_facts_that_differ_are_told_apart(outcome, server):
    server.runs[0].tags["csc.initialisation"] = "ImageNet-1k"
    found = results([result.cell for result in outcome.results])
    facts = Outcome(outcome.study, tuple(found)).provenance()
    assert "initialisation differs: ImageNet-1k (Fine-Tuning)" in facts
    assert any(line.startswith("initialisation differs: scratch (Fine-Tuning, AGCN (0)") for line in facts)
    assert facts[0] == "seeds 0, 1 · data voc vvvvvvvvvvvv"
    assert facts[-1] == f"code {code_version()}"


FORMS = [text, markdown, latex, study_page]


def calibrated(written, server, scenario="voc-b0c4", **content):
    """What came of a study whose first row knows all of its calibration, the second nothing."""
    study = written({**MINE, "scenarios": [scenario], "seeds": [0, 1]} | content)
    for cell in (asked := cells(study, SOURCES)):
        server.calibration = {}
        if cell.row == study.rows[0]:
            server.calibration = {name: 10.0 + index + cell.seed for index, name in enumerate(EXPORTED)}
        server.finish(cell, 70.0)
    return Outcome(study, tuple(results(asked)))


def test_every_study_has_the_calibration_of_each_scenario_below_its_table(written, server):
    outcome = calibrated(written, server)
    lines = text(outcome).partition(" voc-b0c4, calibration\n")[2].splitlines()
    assert lines[1].split() == " ".join(titles(CALIBRATION)).split()
    assert lines[3].split()[:3] == ["csc", "10.5±0.7", "11.5±0.7"]
    assert lines[4].startswith("━")  # a row that knows nothing of it is left out
    assert f"| csc | {' | '.join(f'{10.5 + index:.1f} ± 0.7' for index in range(8))} | 18.50 ± 0.71 | " in markdown(
        outcome
    )
    assert markdown(outcome).index("\n## voc-b0c4\n") < markdown(outcome).index("\n## voc-b0c4, calibration\n")
    assert "<h2>voc-b0c4, calibration</h2>" in study_page(outcome)
    assert r"\caption{Mine, voc-b0c4, calibration}" in latex(outcome)
    assert " calibration: ECE and AECE (adaptive) in percent; /T: logits divided by" in text(outcome)


def test_calibration_is_not_shown_twice(written, server):
    outcome = calibrated(written, server, columns=["last_mAP", "ECE_old", "CF1_own"])
    lines = text(outcome).partition(" voc-b0c4, calibration\n")[2].splitlines()
    assert lines[1].split() == " ".join(titles(n for n in CALIBRATION if n not in ("ECE_old", "CF1_own"))).split()
    alone = calibrated(written, server, columns=["last_mAP", *CALIBRATION])
    assert "calibration" not in text(alone)


def test_old_classes_that_do_not_exist_have_no_calibration(written, server):
    outcome = calibrated(written, server, "voc-b0c20")
    calibration = text(outcome).partition(" voc-b0c20, calibration\n")[2].splitlines()
    assert calibration[1].split() == " ".join(titles(name for name in CALIBRATION if "_old" not in name)).split()
    shown = calibrated(written, server, "voc-b0c20", columns=["last_mAP", "ECE_old"])
    assert "| csc | 70.0 ± 0.0 | – |" in markdown(shown)
    lines = csv.DictReader(io.StringIO(csv_lines(shown)))
    assert {line["value"] for line in lines if line["metric"] == "AECE_old_T"} == {""}


def test_files_and_mlflow_have_all_of_calibration_whatever_the_table_shows(written, server, monkeypatch):
    outcome = calibrated(written, server)
    lines = list(csv.DictReader(io.StringIO(csv_lines(outcome))))
    found = {line["metric"]: line["value"] for line in lines if line["row"] == "csc" and line["seed"] == "0"}
    assert [*found] == [*SUMMARY, *EXPORTED]
    assert {name: float(found[name]) for name in EXPORTED} == {name: 10.0 + i for i, name in enumerate(EXPORTED)}
    logged = {}
    monkeypatch.setattr(files_module, "log_study", lambda name, means, table, page: logged.update(means))
    log_outcome(outcome)
    assert logged["voc-b0c4/csc/AECE_new_T"][0] == 17.5
    assert "voc-b0c4/lwf/AECE_new_T" not in logged


def rendered(form, outcome):
    """What a form says, without its escapes."""
    return html.unescape(form(outcome)).replace("\\", "")


@pytest.mark.parametrize("form", FORMS)
def test_settings_for_all_rows_are_listed_those_of_the_command_line_first(form, written, server):
    rows = [{"label": "A", "method": "csc", "settings": {"train.lr": 0.003}}, {"label": "B", "method": "lwf"}]
    common = {"train": {"epochs": 8, "lr": 0.001}, "backbone.frozen": True}
    study = written({"title": "T", "scenarios": ["voc-b0c4"], "rows": rows, "settings": common})
    study = study.subset(overrides={"init": "/my/w.safetensors", "loss": {"alpha": "0.3"}, "train": {"epochs": "2"}})
    output = rendered(form, Outcome(study, tuple(results(cells(study, SOURCES)))))
    expected = "train.epochs=2, init=w.safetensors, loss.alpha=0.3, train.lr=0.003 or 0.001, backbone.frozen=true"
    assert f"settings {expected}" in output


@pytest.mark.parametrize("form", FORMS)
def test_thresholds_that_rows_do_not_share_are_listed_by_row(form, written, server):
    rows = [{"label": "A", "method": "lwf"}, {"label": "B", "method": "ridge"}, {"label": "C", "method": "csc"}]
    content = {"title": "T", "scenarios": ["voc-b0c4", "digits-b0c2"], "rows": rows}

    def output_with(**changes):
        study = written(content | changes)
        return rendered(form, Outcome(study, tuple(results(cells(study, SOURCES)))))

    alike = {**rows[1], "by_scenario": {"digits-b0c2": {"threshold": 0.8}}}
    assert "the threshold of last CF1, last OF1 differs: 0.8 (A, C), 0.3 (B)" in output_with()
    some = output_with(rows=[rows[0], alike], columns=["last_mAP", "OP"])
    assert "the threshold of OP differs on voc-b0c4: 0.8 (A), 0.3 (B)" in some
    assert "the threshold of" not in output_with(columns=["last_mAP", "CF1_own"])
    assert "the threshold of" not in output_with(rows=rows[::2])
    assert "the threshold of" not in output_with(settings={"threshold": 0.4})


@pytest.mark.parametrize("form", FORMS)
def test_a_data_set_without_a_preset_says_whose_settings_it_has(form, server):
    source = DataSource("/data/pets", 6, "p" * 64)
    study = read_study("own-data").subset(["pets-b0c2"])
    pets = rendered(form, Outcome(study, tuple(results(cells(study, {"pets": source})))))
    assert "data set 'pets' has no preset of its own: settings are those of 'coco'" in pets
    study = study.subset(["voc-b0c4"])
    assert "preset" not in rendered(form, Outcome(study, tuple(results(cells(study, SOURCES)))))


def test_a_long_list_of_settings_is_cut(written, server):
    study = written({**MINE, "settings": {"train.epochs": 8}}).subset(overrides={"init": "x" * 300})
    facts = Outcome(study, tuple(results(cells(study, SOURCES)))).provenance()
    (line,) = (line for line in facts if line.startswith("settings init=xxx"))
    assert line.endswith("x…, +1")
    assert len(line) <= 250


@pytest.mark.parametrize("form", FORMS)
def test_held_out_images_are_never_shown_as_a_table_of_the_paper(form, server):
    study = read_study("table2").subset(["voc-b0c4"], ["csc", "krt-r"], [0], {"held_out": "5"})
    outcome = Outcome(study, tuple(results(cells(study, SOURCES))))
    server.finish(outcome.results[0].cell, 86.0)
    output = rendered(form, Outcome(study, tuple(results(cells(study, SOURCES)))))
    assert "Table 2: PASCAL VOC 2007; NOT on the test images" in output
    assert "NOT the test images: tested on 1 of 5 training images" in output
    assert "settings held_out=5" in output
    for word in ("diff", "85.1", "as reported by the KRT paper"):
        assert word not in output
    assert {record["paper"] for record in csv.DictReader(io.StringIO(csv_lines(outcome)))} == {""}


@pytest.mark.parametrize("form", FORMS)
def test_data_that_are_not_the_benchmark_are_named_next_to_the_paper(form, server):
    study = read_study("table2").subset(["voc-b0c4"], ["csc"], [0])
    part = {"voc": replace(SOURCES["voc"], note="not VOC 2007 as published: train: 6 images")}
    output = rendered(form, Outcome(study, tuple(results(cells(study, part)))))
    assert "not VOC 2007 as published: train: 6 images; the paper's numbers are of the whole" in output


@pytest.mark.parametrize("form", FORMS)
def test_data_of_another_source_are_never_next_to_the_paper(form, server):
    study = read_study("table2").subset(["voc-b0c4"], ["csc", "agcn"], [0])
    note = "this 'voc' is made from 'voc2012', not from VOC 2007"
    asked = cells(study, {"voc": replace(SOURCES["voc"], note=note)})
    for cell in asked:
        server.finish(cell, 86.0)
    outcome = Outcome(study, tuple(results(asked)))
    output = rendered(form, outcome)
    assert f"{note}; the paper's numbers are left out" in output
    assert "diff " not in output
    assert "85.1" not in output
    assert [claim.paper for claim in claims(outcome)] == [None]
    assert {record["paper"] for record in csv.DictReader(io.StringIO(csv_lines(outcome)))} == {""}


def test_rows_that_alone_are_held_out_are_named(written, server):
    rows = [{"label": "A", "method": "csc", "settings": {"held_out": 5}}, {"label": "B", "method": "lwf"}]
    study = written({"title": "T", "scenarios": ["voc-b0c4"], "rows": rows})
    output = text(Outcome(study, tuple(results(cells(study, SOURCES)))))
    assert "NOT the test images: tested on 1 of 5 training images (A)" in output
    assert "settings" not in output


def test_a_study_of_nothing_finished_still_has_its_tables(written, server):
    study = written(MINE).subset(["digits-b0c2"])
    outcome = Outcome(study, tuple(results(cells(study, {"digits": DataSource("/d", 10)}))))
    assert "not run (6 of 6 cells): all rows: not started or not finished" in text(outcome)
    assert "paper" not in text(outcome).split("±")[0]
    assert "<polyline" not in study_page(outcome)
    assert claims(outcome) == []


def test_a_document_has_the_claims_of_all_studies_before_their_tables(two_rows, written, server):
    sure = two_rows((80.1, 80.3, 80.2), (70.2, 70.1, 70.4))
    empty = Outcome(read_study("figure3"), ())
    document = results_document([sure, empty])
    assert "**Mine**, by last mAP: 1 holds." in document
    assert re.search(r"\| csc &gt; lwf \| holds \+10\.0 \(9\.\d…10\.\d\) \|", document)
    assert "max-entropy**, by H: nothing to compare yet." in document
    assert document.index("nothing to compare yet") < document.index("# Mine")


def test_the_summary_of_claims_is_grouped_by_verdict_with_the_papers_differences(written, server):
    rows = [{"label": label, "method": "lwf", "settings": {"train.epochs": n}} for n, label in enumerate("ABCD", 1)]
    rows[0]["paper"] = {"voc-b0c4": {"last_mAP": 90.0}}
    rows[1]["paper"] = {"voc-b0c4": {"last_mAP": 84.3}}
    scenarios, order = ["voc-b0c4", "voc-b4c2"], [["D", "A"], ["A", "B"], ["C", "B"]]
    study = written({"title": "T", "scenarios": scenarios, "seeds": [0, 1], "rows": rows, "order": order})
    last = {"A": (80.1, 80.3), "B": (70.2, 70.3), "C": (70.1, 70.5), "D": (60.1, 60.2)}
    for cell in (asked := cells(study, SOURCES)):
        if cell.scenario.name == "voc-b0c4":
            server.finish(cell, last[cell.row.label][cell.seed])
    head, _, _, _, *found = results_document([Outcome(study, tuple(results(asked)))]).splitlines()[2:9]
    assert head == "**T**, by last mAP: 1 holds, 1 level, **1 does not hold**."
    assert [line.split(" | ")[0] for line in found] == ["| A &gt; B", "| C &gt; B", "| D &gt; A"]
    assert re.fullmatch(r"\| A &gt; B \| holds \+9\.9 \(9\.\d…10\.\d; paper \+5\.7\) \|", found[0])
    assert re.fullmatch(r"\| C &gt; B \| level \+0\.05 \(−1\.\d…1\.\d\) \|", found[1])
    assert re.fullmatch(r"\| D &gt; A \| \*\*does not hold −20\.0 \(−20\.\d…−19\.\d\)\*\* \|", found[2])


def test_a_document_keeps_what_stands_around_the_results_of_a_study(two_rows, tmp_path):
    outcome = two_rows((80.1, 80.3, 80.2), (70.2, 70.1, 70.4))
    path, name = tmp_path / "RESULTS.md", outcome.study.name
    other = "<!-- results other: begin -->\nkept\n<!-- results other: end -->\n"
    path.write_text(f"before\n<!-- results {name}: begin -->\nold\n<!-- results {name}: end -->\n{other}")
    for _ in range(2):
        write_results(path, [outcome])
        before, content, after = re.split(rf"<!-- results {name}: (?:begin|end) -->", path.read_text())
        assert (before, after) == ("before\n", f"\n{other}")
        assert content.startswith("\n\n### Mine\n")
    path.write_text("no marks")
    for document in (path, tmp_path / "missing.md"):
        with pytest.raises(BadData, match="expected a document with the lines"):
            write_results(document, [outcome])
    assert path.read_text() == "no marks"


def test_a_document_is_never_filled_with_nothing(two_rows, written, tmp_path):
    outcome = two_rows((80.1, 80.3, 80.2), (70.2, 70.1, 70.4))
    other = written({**MINE, "scenarios": ["voc-b4c2"]}, "other")
    empty = Outcome(other, tuple(results(cells(other, SOURCES))))
    marks = "".join(
        f"<!-- results {name}: begin -->\nfilled\n<!-- results {name}: end -->\n" for name in ("mine", "other")
    )
    path = tmp_path / "RESULTS.md"
    path.write_text(marks)
    refusal = f"study 'other': none of its 6 cells is finished in this tracking store, so {path} stays as it is; "
    with pytest.raises(BadData, match=re.escape(refusal)):
        write_results(path, [outcome, empty])
    assert path.read_text() == marks


def test_a_line_says_how_many_cells_a_document_misses(written, server, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(study_command, "_local_sources", lambda *given, **options: SOURCES)
    asked = cells(written({**MINE, "seeds": [0, 1]}), SOURCES)
    path = tmp_path / "RESULTS.md"
    path.write_text("<!-- results mine: begin -->\n<!-- results mine: end -->\n")
    words = ["study", str(tmp_path / "mine.yaml"), "--markdown", str(path), "--workdir", str(tmp_path / "work")]
    server.finish(asked[0], 70.0)
    assert main(words) == 0
    assert capsys.readouterr().out == f"study 'mine': 3 of 4 cells are missing, and told as 'not run' in {path}\n"
    assert "| csc | 70.0 (n=1) |" in path.read_text()
    for cell in asked[1:]:
        server.finish(cell, 70.0)
    assert main(words) == 0
    assert capsys.readouterr().out == ""


def test_a_document_knows_its_studies_and_the_words_that_belong_to_each(server, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(study_command, "_local_sources", lambda *given, **options: SOURCES)
    chosen = read_study("figure3").subset(seeds=[1], overrides={"train": {"epochs": 3}})
    for cell in cells(chosen, SOURCES):
        server.finish(cell, 70.0)
    path, begin = tmp_path / "RESULTS.md", "<!-- results figure3 --seeds 1 --set train.epochs=3: begin -->"
    path.write_text(f"{begin}\n<!-- results figure3: end -->\n")
    words = ["study", "--markdown", str(path), "--workdir", str(tmp_path / "work")]
    for named in ([], ["figure3"]):
        assert main([*words, *named, "--set", "train.epochs=5"]) == 0
        assert capsys.readouterr().out == ""
        assert path.read_text().startswith(f"{begin}\n\n### Figure 3")
        assert "| with H | " in path.read_text()


def test_claims_have_a_part_of_their_own_in_a_document_that_marks_one(two_rows, tmp_path):
    outcome = two_rows((80.1, 80.3, 80.2), (70.2, 70.1, 70.4))
    path, name = tmp_path / "RESULTS.md", outcome.study.name
    parts = [f"<!-- {part} {name}: begin -->\nearlier\n<!-- {part} {name}: end -->\n" for part in ("claims", "results")]
    path.write_text("# Summary\n" + "between\n".join(parts))
    write_results(path, [outcome])
    summary, tables = path.read_text().split("between")
    assert "csc &gt; lwf | holds" in summary
    assert "### Mine" in tables
    assert "earlier" not in summary + tables
    path.write_text(path.read_text().replace(f"claims {name}: end", ""))
    with pytest.raises(BadData, match=f"'<!-- claims {name}: end -->'"):
        write_results(path, [outcome])


def test_all_files_are_written_under_the_name_of_the_study(outcome, tmp_path):
    files = write_files(outcome, tmp_path / "tables")
    assert [file.name for file in files] == [f"table2.{ending}" for ending in ("txt", "md", "tex", "csv", "html")]
    assert sorted(tmp_path.joinpath("tables").iterdir()) == sorted(files)
    assert files[0].read_text() == text(outcome) + "\n"


def test_means_and_deviations_are_one_run_of_mlflow_however_often_they_are_logged(outcome, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    uri = fresh_database(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for _ in range(2):
        log_outcome(outcome)
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("csc-studies").experiment_id])
    assert (run.info.run_name, run.info.status) == ("table2", "FINISHED")
    assert run.data.metrics["voc-b0c4/Fine-Tuning/last_mAP"] == 61.0
    assert run.data.metrics["voc-b0c4/Fine-Tuning/last_mAP_std"] == pytest.approx(2**0.5)
    other = "voc-b0c4/AGCN _x28_0_x29_/last_mAP"
    assert f"{other}_std" not in run.data.metrics  # one seed has no deviation
    assert len(client.get_metric_history(run.info.run_id, other)) == 1
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"study.html", "table.md"}


def test_every_column_has_a_title_that_no_other_has_and_that_is_made_in_one_place():
    assert all(TITLES.values())
    assert len({*TITLES.values()}) == len(TITLES)
    assert {*COLUMNS, *COMPARED, *SUMMARY} == {*TITLES}
    for title in ("average mAP", "ECE old/T", "CR−CP"):
        written = [path for path in (ROOT / "csc").rglob("*.py") if f'"{title}"' in path.read_text()]
        assert written == []


def test_a_stored_run_is_known_again_where_its_method_has_to_know_the_data_set():
    study = read_study("batch-norm").subset(methods=["krt"], seeds=[0])
    cell = cells(study, SOURCES)[0]
    params = {key: str(value) for key, value in cell.config.flat().items()}
    run = ScenarioRun("r", {"csc.data": cell.source.fingerprint}, params, {})
    assert cell.describes(run)
    assert not cell.describes(ScenarioRun("r", run.tags, params | {"train.batch_norm": "frozen"}, {}))
