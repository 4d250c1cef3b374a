"""One more task on a registered model: its next version, learned from nothing but the new labels."""

import pytest

from csc.artifacts import Split
from csc.cli import main
from csc.data.dataset import Dataset
from csc.data.views import View
from csc.model import read_card
from tests.builders import part_of
from tests.integration.conftest import csc, inside, last_results
from tests.tracked import fresh_database

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]

NAME = "digits-b0c5-csc"


@pytest.fixture(scope="module")
def data(scenes, tmp_path_factory):
    """The digits of three owners, who do not know of each other's."""
    folder, whole = tmp_path_factory.mktemp("parts"), Dataset.open(scenes)
    parts = {"old": ("digits", "01234"), "new": ("letters", "567"), "newest": ("more-letters", "89")}
    return {key: part_of(whole, folder / key, name, classes).path for key, (name, classes) in parts.items()}


@pytest.fixture(scope="module")
def work(data, tmp_path_factory):
    """A work folder with a model of five digits, extended twice; and what the extensions printed."""
    workdir = tmp_path_factory.mktemp("extended")
    fresh_database(workdir)
    done = csc("run", "digits-b0c5", "--data", data["old"], "--workdir", workdir)
    assert done.returncode == 0, done.stdout + done.stderr
    said = []
    for words in (("--data", data["new"]), ("--data", data["newest"], "--test", data["old"], "--seed", "1")):
        if "--test" in words:  # the model knows more by now than the old data label
            done = inside("extend", f"models:/{NAME}@final", "--workdir", workdir, *words)
            assert done.returncode == 2
            assert "has no labels of 5, 6, 7, which the model knows" in done.stderr
            words = (*words[:2], *words[4:])
        done = csc("extend", f"models:/{NAME}@final", "--workdir", workdir, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    return workdir, said


@pytest.fixture(scope="module")
def client(work):
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{work[0]}/mlflow.db")


def test_an_extension_is_the_next_version_with_the_next_alias_and_the_old_classes_first(work, client):
    versions = {alias: client.get_model_version_by_alias(NAME, alias).version for alias in ("task-01", "task-02")}
    assert {alias: int(version) for alias, version in versions.items()} == {"task-01": 1, "task-02": 2}
    assert int(client.get_model_version_by_alias(NAME, "final").version) == 3
    cards = {card.task: card for card in map(read_card, {path.parent for path in work[0].rglob("model.json")})}
    assert [cards[task].scenario for task in (1, 2, 3)] == ["digits-b0c5", "digits-b0c5+3", "digits-b0c5+3+2"]
    assert cards[3].classes == tuple("0123456789")
    assert cards[3].task_sizes == (5, 3, 2)
    assert (cards[2].config["seed"], cards[3].config["seed"]) == (0, 1)
    assert cards[2].config["train"] == cards[1].config["train"]  # the settings are those of the model


def test_the_increment_sees_only_labels_of_its_own_classes(work):
    splits = [Split.read(path) for path in sorted(work[0].rglob("extend/split"))]
    assert sorted(split.new for split in splits) == [("5", "6", "7"), ("8", "9")]
    for path in work[0].rglob("train_view"):
        view = View.read(path)
        if len(view.classes) == 8:
            assert set(view.targets().any(axis=0).nonzero()[0]) == {5, 6, 7}


def test_only_the_classes_that_the_test_images_label_are_judged(work):
    assert "3 classes; they have no labels of the other 5" in work[1][0]
    assert "old classes have no labels in the new data and are not judged" in work[1][0]
    (metrics,) = last_results(work[0])
    assert set(metrics["AP"]) == {"8", "9"}
    assert metrics["forgetting"] == 0


def test_an_extension_is_a_run_of_its_own_that_names_the_model_before(work, client):
    found = client.search_runs([client.get_experiment_by_name("csc-digits").experiment_id])
    parents = [run for run in found if run.data.tags["csc.role"] == "scenario"]
    assert {run.info.run_name.split()[0] for run in parents} == {"digits-b0c5", "digits-b0c5+3", "digits-b0c5+3+2"}
    assert {run.info.status for run in found} == {"FINISHED"}


def test_the_old_classes_are_judged_with_data_that_label_them(work, data, client):
    done = csc("extend", f"models:/{NAME}/1", "--data", data["newest"], "--test", data["old"], "--workdir", work[0])
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "5 classes; they have no labels of the other 2" in line]
    assert "forgetting" in line
    assert "task 2 · evaluate-2" in done.stdout
    result = next(text for text in done.stdout.splitlines() if text.startswith("The 5 old classes on"))
    assert result in csc("show", "digits-b0c5+2", "--workdir", work[0]).stdout
    (page,) = work[0].glob("digits-b0c5+2-csc-*.html")
    assert result in page.read_text(encoding="utf-8")
    experiment = client.get_experiment_by_name("csc-digits").experiment_id
    found = client.search_runs([experiment], "tags.`csc.scenario` = 'digits-b0c5+2'")
    assert {run.data.tags["csc.role"]: f"mAP {run.data.metrics['old_classes/mAP']:.1f}" in result for run in found} == {
        "scenario": True,
        "task": True,
    }


def test_the_same_command_again_has_nothing_to_do(work, data):
    done = inside("extend", f"models:/{NAME}/3", "--data", data["newest"], "--workdir", work[0])
    assert done.returncode == 0
    assert done.stdout == f"models:/{NAME}/3 has learned this data set already: 8, 9; nothing to do\n"


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (f"models:/{NAME}/2", ["--data", "old"], "knows 0, 1, 2, 3, 4 already; expected new classes only"),
        (f"models:/{NAME}/2", ["--data", "newest", "--method", "csc-r"], "method 'csc-r' replays images of earlier"),
        (f"models:/{NAME}/2", ["--data", "newest", "--method", "joint"], "method 'joint' begins from nothing"),
        (f"models:/{NAME}/2", ["--data", "newest", "--method", "krt"], "method 'krt' would need test_byobnet with"),
        (f"models:/{NAME}/2", ["--data", "newest", "--test", "new"], "has no labels of 0, 1, 2, 3, 4, which the model"),
        (f"models:/{NAME}/9", ["--data", "newest"], f"models:/{NAME}/9: no such version"),
        ("models:/nobody@final", ["--data", "newest"], "models:/nobody@final: no such version"),
        (NAME, ["--data", "newest"], f"{NAME}: expected a registered model, models:/NAME@final"),
    ],
)
def test_what_cannot_be_extended_is_one_line(work, data, model, words, said, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work[0]}/mlflow.db")
    known = {key: str(path) for key, path in data.items()}
    assert main(["extend", model, "--workdir", str(work[0]), *(known.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_scenario_in_the_middle_goes_on_with_its_own_tasks(undisturbed, data):
    done = inside("extend", "models:/digits-b0c4-csc@task-01", "--data", data["newest"], "--workdir", undisturbed[0])
    assert done.returncode == 2
    assert "task 1 of 3; the next one is that of digits-b0c4: csc run digits-b0c4 --tasks 2-" in done.stderr


def test_an_extended_model_predicts_all_its_classes(work, data, tmp_path):
    (tmp_path / "digit.jpg").write_bytes(_first_image(data["newest"]))
    done = inside("predict", f"models:/{NAME}/3", tmp_path / "digit.jpg", "--workdir", work[0], "--csv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "image,labels,0,1,2,3,4,5,6,7,8,9"


def _first_image(path):
    import pyarrow as pa

    shard = sorted((path / "images").glob("*.arrow"))[0]
    with pa.memory_map(str(shard)) as source:
        return pa.ipc.open_file(source).get_batch(0).column("jpeg")[0].as_py()
