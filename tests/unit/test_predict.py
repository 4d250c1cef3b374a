"""`csc predict` and `csc sample`: which images are looked at, in what form the answer comes, where the model looks."""

import csv
import io
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from csc.cli import main
from tests.unit.test_cli import cwd, model, printed, refused, shelf  # noqa: F401


@pytest.fixture
def folder(cwd: Path) -> Path:  # noqa: F811
    """Images in a folder and below it, and a file that is none."""
    below = cwd / "pictures" / "more"
    below.mkdir(parents=True)
    for path in (below.parent / "b.png", below / "c.jpg"):
        Image.effect_noise((40, 30), 90).convert("RGB").save(path)
    (below / "notes.txt").write_text("no image")
    return below.parent


def test_a_folder_stands_for_all_images_below_it(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    lines = printed(["predict", str(model), "a.jpg", "pictures"], capsys)
    assert [line.split("\t")[0] for line in lines] == ["a.jpg", "pictures/b.png", "pictures/more/c.jpg"]


def test_a_pattern_stands_for_what_matches_it(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    lines = printed(["predict", str(model), "pictures/**/*.jpg"], capsys)
    assert [line.split("\t")[0] for line in lines] == ["pictures/more/c.jpg"]


def test_a_file_address_and_a_home_folder_are_followed(
    model: Path,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("HOME", str(folder))
    given = [f"file://{folder}/b.png", "~/b.png", "~/*.png", "./a.jpg"]
    lines = printed(["predict", str(model), *given], capsys)
    assert [line.split("\t")[0] for line in lines] == [f"{folder}/b.png"] * 3 + ["./a.jpg"]


def test_a_model_that_was_downloaded_does_not_stay_behind(
    model: Path,  # noqa: F811
    cwd: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fetch(uri: str, folder: Path | None = None) -> Path:  # as MLflow does from a server
        return shutil.copytree(model, (folder or Path(tempfile.mkdtemp())) / "model")

    temporary = cwd / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("csc.tracking.registry.fetch_model", fetch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert len(printed(["predict", "models:/digits-b0c2-lwf@final", "a.jpg"], capsys)) == 1
    assert not list(temporary.iterdir())


def test_more_images_than_a_batch_come_in_their_order(
    model: Path,  # noqa: F811
    folder: Path,
    capsys: pytest.CaptureFixture[str],
):
    for number in range(40):
        shutil.copy("a.jpg", folder / f"{number:02d}.jpg")
    lines = printed(["predict", str(model), "pictures", "--threshold", "0"], capsys)
    assert len(lines) == 42
    assert [line.split("\t")[0] for line in lines] == sorted(line.split("\t")[0] for line in lines)
    assert len({line.split("\t")[1] for line in lines[:40]}) == 1


def test_json_is_an_object_per_image_and_csv_a_row(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    given = ["predict", str(model), "pictures", "--threshold", "0"]
    images = [json.loads(line) for line in printed([*given, "--json"], capsys)]
    assert [image["image"] for image in images] == ["pictures/b.png", "pictures/more/c.jpg"]
    assert {entry["name"] for entry in images[0]["classes"]} == {"0", "1"}
    rows = list(csv.DictReader(io.StringIO("\n".join(printed([*given, "--csv"], capsys)))))
    assert list(rows[0]) == ["image", "labels", "0", "1"]
    for image, row in zip(images, rows, strict=True):
        assert row["labels"] == ";".join(entry["name"] for entry in image["classes"])
        for entry in image["classes"]:
            assert float(row[entry["name"]]) == pytest.approx(entry["confidence"], abs=1e-6)


def test_a_heat_map_is_written_for_each_predicted_class(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    shutil.copy("a.jpg", folder / "a.jpg")  # of the same name as another
    arguments = ["predict", str(model), "a.jpg", "pictures/a.jpg", "--threshold", "0", "--heatmap", "heat", "--json"]
    images = [json.loads(line) for line in printed(arguments, capsys, "heat maps: 4 in heat\n")]
    files = [entry["heatmap"] for image in images for entry in image["classes"]]
    assert len(set(files)) == 4
    assert {Path(file) for file in files} == {path.relative_to(Path.cwd()) for path in Path.cwd().glob("heat/*.png")}
    plain = np.asarray(Image.open("a.jpg").convert("RGB"))
    with Image.open(files[0]) as overlay:
        assert overlay.size == Image.open("a.jpg").size or max(overlay.size) == 480
        assert np.asarray(overlay.resize(plain.shape[1::-1])).mean() < plain.mean()  # dark where it does not look


def test_an_image_without_a_prediction_shows_where_its_likeliest_class_was_looked_for(
    model: Path,  # noqa: F811
    cwd: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
):
    printed(["predict", str(model), "a.jpg", "--threshold", "1", "--heatmap", "heat"], capsys, "heat maps: 1 in heat\n")
    assert len(list((cwd / "heat").iterdir())) == 1


def test_the_thresholds_of_the_model_are_its_own_for_each_class(
    model: Path,  # noqa: F811
    cwd: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
):
    shutil.copytree(model, "mine")
    card = json.loads(Path("mine/model.json").read_text())
    Path("mine/model.json").write_text(json.dumps(card | {"calibration": {"thresholds": {"0": 0.0, "1": 1.0}}}))
    (line,) = printed(["predict", "mine", "a.jpg"], capsys)
    assert line.split("\t")[1].split()[0] == "0"
    assert "," not in line


def test_a_folder_for_heat_maps_must_be_one(model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    assert "not a folder" in refused(["predict", str(model), "a.jpg", "--heatmap", "file"], cwd, capsys)


def test_samples_are_images_that_predict_takes(model: Path, cwd: Path, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    assert main(["sample", "digits", "-n", "3", "--out", "samples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("samples/scene-00.jpg\tshows ")
    assert lines[-1] == "next: csc predict models:/digits-b0c2-csc@final samples"
    assert len(printed(["predict", str(model), "samples"], capsys)) == 3
