"""Work in several processes: results in order, and an interrupt that nobody has to wait for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from csc.data.ingest.shard_writer import Part
from csc.data.ingest.workers import for_each_part

PARTS = [Part(number, ()) for number in range(6)]


def squared(given: int, part: Part) -> int:
    time.sleep(0.05 * (part.number % 2 == 0))  # later parts are done first
    return given * part.number**2


@pytest.mark.slow
def test_results_come_in_the_order_of_the_parts():
    expected = [3 * number**2 for number in range(6)]
    for workers, parts in ((1, 6), (2, 6), (8, 3)):
        assert list(for_each_part(squared, 3, PARTS[:parts], workers)) == expected[:parts]


def failing(given: int, part: Part) -> int:
    if part.number in (2, 3):
        time.sleep(0.3 * (part.number == 2))
        raise ValueError(f"part {part.number}")
    return given + part.number


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_part_in_order_that_fails_is_reported(workers: int):
    results = for_each_part(failing, 0, PARTS, workers)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="part 2"):
        next(results)


def slow(given: Path, part: Part) -> None:
    (given / f"begun {part.number} {os.getpid()}").touch()
    try:
        time.sleep(600 if part.number else 0)
    finally:
        (given / f"put away {part.number}").touch()


INTERRUPTED = """
import signal, sys
from pathlib import Path
from tests.unit.test_workers import PARTS, for_each_part, slow
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were told to ignore
    try:
        list(for_each_part(slow, Path(sys.argv[1]), PARTS, 2))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_an_interrupt_ends_at_once_in_silence_and_begins_nothing_more(tmp_path: Path):
    script, work = tmp_path / "script.py", tmp_path / "work"
    script.write_text(INTERRUPTED)
    work.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(work)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, start_new_session=True) as process:
        while len(list(work.glob("begun *"))) < 3:  # one is done, two sleep
            assert process.poll() is None
            time.sleep(0.05)
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 130
    assert time.monotonic() - started < 4
    assert {path.name for path in work.glob("put away *")} == {"put away 0", "put away 1", "put away 2"}
    assert len(list(work.glob("begun *"))) == 3
