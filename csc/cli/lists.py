"""The commands of `csc` that list what there is: methods, scenarios and settings."""

from argparse import ArgumentParser, Namespace

from csc.cli.command import Command
from csc.config import methods
from csc.config.describe import Setting, settings
from csc.config.tree import setting_text
from csc.errors import BadConfig
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario

__all__ = ["METHODS", "SCENARIOS", "SETTINGS"]


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


def _settings_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="", help="part of a key or of its meaning, for instance lr")


def _settings(arguments: Namespace) -> int:
    pattern = arguments.pattern.lower()
    matching = [one for one in settings() if pattern in one.key.lower() or pattern in one.meaning.lower()]
    if not matching:
        raise BadConfig(f"csc settings {arguments.pattern}: no setting has this in its key or meaning")
    for setting in matching:
        default = f"{setting.key} = {setting_text(setting.default, short=True)}"
        print(f"{default:<48}{setting.values} · {_readers(setting)}")
        print(f"    {setting.meaning}")
    print("these are the defaults of the paper; data sets and methods have their own, which 'csc run --dry-run' shows")
    return 0


def _readers(setting: Setting) -> str:
    others = [name for name in methods() if name not in setting.readers]
    if not others:
        return "all methods"
    if len(others) < len(setting.readers):
        return f"all methods but {', '.join(others)}"
    return ", ".join(setting.readers)


METHODS = Command("list the learning methods", _methods)
SCENARIOS = Command("list the scenarios and how they split their classes", _scenarios)
SETTINGS = Command("list what --set can change, with defaults and meanings", _settings, _settings_arguments)
