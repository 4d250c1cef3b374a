"""`csc ingest` as a process: what its exit code says when nobody reads what it prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import make_coco


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_reader_that_goes_away_before_the_work_is_done_is_reported_by_the_exit_code(workers: str, tmp_path: Path):
    make_coco(tmp_path / "raw")
    command = [sys.executable, "-m", "csc", "ingest", "coco", "--source", "raw", "--out", "set", "--workers", workers]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert (process.returncode, process.stderr) == (141, b"")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment, text=True)
    assert again.returncode == 0
    assert again.stdout.startswith("an earlier attempt has finished 1 of 1 shards")
