"""The commands of `csc` that list what there is: methods and scenarios."""

from argparse import Namespace

from csc.cli.command import Command
from csc.config import methods
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario

__all__ = ["METHODS", "SCENARIOS"]


def _methods(arguments: Namespace) -> int:
    for name, description in methods().items():
        print(f"{name:<10}{description}")
    return 0


def _scenarios(arguments: Namespace) -> int:
    for name in ("digits-b0c2", *PAPER_SCENARIOS):
        scenario = Scenario.parse(name)
        print(scenario.announcement(CLASS_COUNTS[scenario.dataset]))
    print("and any other <data set>-b<base classes>c<classes per task>")
    return 0


METHODS = Command("list the learning methods", run=_methods)
SCENARIOS = Command("list the scenarios and how they split their classes", run=_scenarios)
