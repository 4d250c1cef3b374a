"""`csc scenarios`: list the scenarios of the paper."""

from argparse import Namespace

from csc.cli.command import Command, no_arguments
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario

__all__ = ["SCENARIOS"]


def _run(arguments: Namespace) -> int:
    del arguments
    for name in ("digits-b0c2", *PAPER_SCENARIOS):
        scenario = Scenario.parse(name)
        print(scenario.announcement(CLASS_COUNTS[scenario.dataset]))
    print("and any other <data set>-b<base classes>c<classes per task>")
    return 0


SCENARIOS = Command("list the scenarios and how they split their classes", no_arguments, _run)
