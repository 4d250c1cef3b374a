"""Joint training and data in COCO format go through the same pipeline; other methods do in other files."""

import pytest

from tests.builders import make_coco
from tests.integration.conftest import SMALL, csc, last_results
from tests.tracked import fresh_database

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("methods and sets")]


def test_joint_training_runs_through_the_same_pipeline(scenes, tmp_path):
    fresh_database(tmp_path)
    read = [item for item in SMALL if not item.startswith("cigcn.")]  # a linear head has no graph
    done = csc("run", "digits-b0c5", "--method", "joint", "--data", scenes, "--workdir", tmp_path, settings=read)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(last_results(tmp_path)) == 2


def test_coco_format_set_runs_through_the_same_pipeline(tmp_path):
    source, data = make_coco(tmp_path / "source"), tmp_path / "data"
    assert csc("ingest", "coco", "--source", source, "--out", data, "--name", "pets").returncode == 0
    settings = (*SMALL, "init=scratch", "train.batch_size=2")
    fresh_database(tmp_path / "work")
    done = csc("run", "pets-b0c2", "--data", data, "--workdir", tmp_path / "work", settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(last_results(tmp_path / "work")) == 2


def test_bad_input_found_by_a_step_ends_in_one_line_and_exit_code_2(scenes, tmp_path):
    done = csc("run", "voc-b0c4", "--data", scenes, "--workdir", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "holds the data set 'digits', 'voc-b0c4' asks for 'voc'" in done.stderr
    unknown = ("backbone.name=no_such_net",)
    broken = csc("run", "digits-b0c5", "--data", scenes, "--workdir", tmp_path, settings=unknown)
    assert broken.returncode == 2
    assert len(broken.stderr.strip().splitlines()) == 1
    assert "backbone.name=no_such_net" in broken.stderr
