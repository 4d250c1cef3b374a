"""Faults for real, as a table: every one of them must leave what a run leaves that nothing has disturbed.

`make test-faults` tries each with all its seeds and prints the table; here, in `make test`, some are tried with one.
A lost try names its seed, and `make test-faults FAULT=… SEED=…` repeats it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from tests.faults import clock, damage, kills, services
from tests.faults.commands import removed_at_the_end
from tests.faults.lab import Lab

pytest_plugins = ["tests.s3", "tests.mlflow_server"]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    """What happens, with how many seeds it is tried, and whether one of them belongs to `make test`."""

    happens: Callable[[Lab, Random], None]
    seeds: int
    always: bool = False


FAULTS = {
    "kill-run": Fault(kills.kill_run, 7),
    "kill-ingest": Fault(kills.kill_ingest, 3),
    "kill-study": Fault(kills.kill_study, 2),
    "terminate": Fault(kills.terminate_run, 4),
    "disk-full": Fault(damage.fill_disk, 1),
    "bits": Fault(damage.flip_bits, 1),
    "bits-checkpoint": Fault(damage.flip_checkpoint, 1),
    "bits-maps": Fault(damage.flip_maps, 1),
    "services": Fault(services.disturb_services, 1),
    "two-runs": Fault(services.two_runs, 1),
    "clock": Fault(clock.jump, 1),
}


def _tries() -> list[object]:
    """All tries, or those that FAULT and SEED name; without FAULTS=all, one seed of some."""
    everything, wanted = os.environ.get("FAULTS") == "all", os.environ.get("SEED")
    tries = []
    for name, fault in FAULTS.items():
        if os.environ.get("FAULT") not in (None, "", name):
            continue
        seeds = [int(wanted)] if wanted else list(range(fault.seeds if everything else fault.always))
        group = "servers" if name in ("services", "two-runs") else f"faults {name} {{}}"
        marks = [pytest.mark.xdist_group(group.format(seed)) for seed in seeds]
        tries += [
            pytest.param(name, seed, id=f"{name}-{seed}", marks=mark) for seed, mark in zip(seeds, marks, strict=True)
        ]
    return tries


@pytest.mark.parametrize(("name", "seed"), _tries())
def test_a_run_survives(name: str, seed: int, lab: Lab):
    lab.forked = seed > 0 or not name.startswith(("kill", "terminate"))  # some start as a person starts them
    with removed_at_the_end(lab.folder):
        FAULTS[name].happens(lab, Random(f"{name} {seed}"))
