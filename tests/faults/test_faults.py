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
    """What happens, with how many seeds it is tried, and in which phases it is tried once in `make test`."""

    happens: Callable[[Lab, Random], None]
    seeds: int
    always: tuple[str, ...] = ()


FAULTS = {
    "kill-run": Fault(kills.kill_run, 7, always=("checkpoint", "register")),
    "kill-ingest": Fault(kills.kill_ingest, 3),
    "kill-study": Fault(kills.kill_study, 2),
    "terminate": Fault(kills.terminate_run, 6),
    "disk-full": Fault(damage.fill_disk, 1),
    "bits": Fault(damage.flip_bits, 1),
    "bits-checkpoint": Fault(damage.flip_checkpoint, 1),
    "bits-maps": Fault(damage.flip_maps, 1),
    "services": Fault(services.disturb_services, 1),
    "two-runs": Fault(services.two_runs, 1),
    "clock": Fault(clock.jump, 1),
}


EVERYTHING = os.environ.get("FAULTS") == "all"


def _tries() -> list[object]:
    """All tries, or those that FAULT and SEED name; without FAULTS=all, one seed of some."""
    only, wanted = os.environ.get("FAULT"), os.environ.get("SEED")
    tries = []
    for name, fault in FAULTS.items():
        if (only and name != only) or not (EVERYTHING or fault.always):
            continue
        for seed in [int(wanted)] if wanted else range(fault.seeds) if EVERYTHING else [1]:
            group = "servers" if name in ("services", "two-runs") else f"{name} {seed}"
            tries.append(pytest.param(name, seed, id=f"{name}-{seed}", marks=pytest.mark.xdist_group(group)))
    return tries


@pytest.mark.parametrize(("name", "seed"), _tries())
def test_a_run_survives(name: str, seed: int, lab: Lab):
    lab.forked = seed > 0 or not name.startswith(("kill", "terminate"))  # some start as a person starts them
    lab.phases = () if EVERYTHING else FAULTS[name].always
    with removed_at_the_end(lab.folder):
        FAULTS[name].happens(lab, Random(f"{name} {seed}"))
        lab.survived()
