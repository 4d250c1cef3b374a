"""Reading a study from a small YAML file.

`csc/studies/*.yaml` are shipped: the paper's tables and figures. A study of your own has the same keys; only `title`,
`scenarios` and either `rows` or `methods` are needed.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from csc.config import methods, resolve
from csc.errors import BadConfig, BadScenario
from csc.report.paper import paper_rows
from csc.scenario import PAPER_SCENARIOS, Scenario
from csc.storage import local_path
from csc.study.spec import COLUMNS, Row, Study, dotted, merged

__all__ = ["SHIPPED", "read_study"]

_FOLDER = Path(__file__).parent / "studies"
SHIPPED = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def read_study(name: str) -> Study:
    """Read a study strictly; whatever is wrong is one line with the file and the key.

    Args:
        name: of a shipped study, or a YAML file.
    """
    path = _FOLDER / f"{name}.yaml" if name in SHIPPED else local_path(name)
    if not path.is_file():
        raise BadConfig(f"study '{name}': no such file; give a YAML file or one of {', '.join(SHIPPED)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise BadConfig(f"{path}: not readable as YAML{where} ({getattr(error, 'problem', None) or error})") from None
    try:
        return _study(path.stem, content)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from None


def _study(name: str, content: Any) -> Study:
    known = {item.name for item in fields(Study)} - {"name", "overrides"} | {"methods", "grid"}
    _check_keys(content, known, {"title", "scenarios"}, "")
    _check(isinstance(content["title"], str) and bool(content["title"]), "title", "one line of text")
    if ("rows" in content) == ("methods" in content):
        raise BadConfig("rows: give either rows or methods, and only one of them")
    listed = _list(content, "methods") or _list(content, "rows")
    if "methods" in content:
        listed = [{"label": method, "method": method} for method in listed]
    grid = _grid(content.get("grid", {}))
    rows = [row for index, item in enumerate(listed) for row in _multiplied(_row(item, f"rows[{index}]"), grid)]
    _check(len({row.name for row in rows}) == len(rows), "rows", "labels that differ, or groups that do")
    scenarios = [_scenario(item, f"scenarios[{index}]") for index, item in enumerate(_list(content, "scenarios"))]
    chosen: dict[str, Any] = {key: tuple(_list(content, key)) for key in ("seeds", "columns") if key in content}
    for index, seed in enumerate(chosen.get("seeds", ())):
        _check(type(seed) is int and seed >= 0, f"seeds[{index}]", "a whole number")
    for index, column in enumerate(chosen.get("columns", ())):
        _check(column in COLUMNS, f"columns[{index}]", f"one of {', '.join(COLUMNS)}")
    return Study(
        name=name,
        title=content["title"],
        rows=tuple(rows),
        scenarios=tuple(scenarios),
        settings=_settings(content.get("settings", {}), "settings"),
        groups=str(content.get("groups", "")),
        order=_order(content.get("order", []), rows),
        **chosen,
    )


def _row(item: Any, where: str) -> Row:
    _check_keys(item, {field.name for field in fields(Row)}, {"label", "method"}, f"{where}.")
    if item["method"] not in methods():
        raise BadConfig(f"{where}.method: '{item['method']}' is not known; choose one of {', '.join(methods())}")
    by_scenario = item.get("by_scenario", {})
    _check(isinstance(by_scenario, Mapping), f"{where}.by_scenario", "a group")
    return Row(
        label=str(item["label"]),
        method=item["method"],
        group=str(item.get("group", "")),
        settings=_settings(item.get("settings", {}), f"{where}.settings"),
        by_scenario={
            _scenario(name, f"{where}.by_scenario.{name}"): _settings(settings, f"{where}.by_scenario.{name}")
            for name, settings in by_scenario.items()
        },
        paper=_paper(item.get("paper", {}), item["method"], f"{where}.paper"),
    )


def _paper(content: Any, method: str, where: str) -> dict[str, Any]:
    """Read the paper's numbers by scenario, or which row of its tables has them."""
    _check(isinstance(content, Mapping), where, "a group")
    paper: dict[str, Any] = {}
    for name, value in content.items():
        if name == "buffer":
            paper[name] = _buffer(str(value), method, f"{where}.buffer")
            continue
        _check_keys(value, set(COLUMNS), set(), f"{where}.{name}.")
        for column, number in value.items():
            _check(type(number) in (int, float), f"{where}.{name}.{column}", "a number")
        paper[_scenario(name, f"{where}.{name}")] = dict(value)
    return paper


def _buffer(buffer: str, method: str, where: str) -> str:
    known = dict.fromkeys(row.buffer for scenario in PAPER_SCENARIOS for row in paper_rows(scenario, method))
    if not known:
        raise BadConfig(f"{where}: the paper's tables 1 and 2 have no row of '{method}'; give numbers by scenario")
    _check(buffer in known, where, f"one of {', '.join(known)}, found '{buffer}'")
    return buffer


def _scenario(name: Any, where: str) -> str:
    _check(isinstance(name, str), where, "the name of a scenario such as voc-b0c4")
    try:
        return Scenario.parse(name).name
    except BadScenario as error:
        raise BadConfig(f"{where}: {error}") from None


def _multiplied(row: Row, grid: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """The row once for each combination of the grid's values."""
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        words = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
        settings = merged(row.settings, _settings(chosen, "grid"))
        yield replace(row, label=" ".join([row.label, *words]), settings=settings)


def _grid(content: Any) -> dict[str, list[Any]]:
    _check(isinstance(content, Mapping), "grid", "settings with lists of values")
    _settings(dict.fromkeys(content, 0), "grid")
    return {str(key): _list(content, key, "grid.") for key in content}


def _settings(content: Any, where: str) -> dict[str, Any]:
    """Read overrides, nested or with dotted keys; a key that is no setting is named."""
    _check(isinstance(content, Mapping), where, "a group of settings")
    known = resolve("digits").flat()
    tree: dict[str, Any] = {}
    for key, value in dotted(content):
        if key not in known or key in ("method", "seed"):
            raise BadConfig(f"{where}.{key}: {_no_such(key, known)}")
        leaf: Any = value
        for part in reversed(key.split(".")):
            leaf = {part: leaf}
        tree = merged(tree, leaf)
    return tree


def _no_such(key: str, known: Iterable[str]) -> str:
    if key in ("method", "seed"):
        return "has its own place: the method in a row, seeds beside the rows"
    below = sorted(name for name in known if name.startswith(f"{key.partition('.')[0]}."))
    return f"no such setting; choose one of {', '.join(below or sorted({name.partition('.')[0] for name in known}))}"


def _order(content: Any, rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    _check(isinstance(content, list), "order", "a list of rankings")
    for chain_index, chain in enumerate(content):
        _check(isinstance(chain, list) and len(chain) > 1, f"order[{chain_index}]", "a list of rows, best first")
        for index, name in enumerate(chain):
            found = [row for row in rows if str(name) in (row.label, row.name)]
            _check(len(found) == 1, f"order[{chain_index}][{index}]", f"the name of one row, found '{name}'")
    return tuple(tuple(map(str, chain)) for chain in content)


def _list(content: Mapping[str, Any], key: str, path: str = "") -> list[Any]:
    """A list that is not empty and names nothing twice; an empty one if the key is not there."""
    if key not in content:
        return []
    value = content[key]
    _check(isinstance(value, list) and bool(value), f"{path}{key}", "a list with at least one entry")
    _check(not any(item in value[:index] for index, item in enumerate(value)), f"{path}{key}", "no entry twice")
    return list(value)


def _check_keys(content: Any, known: set[str], needed: set[str], path: str) -> None:
    _check(isinstance(content, Mapping), path.rstrip(".") or "the file", f"a group of {', '.join(sorted(known))}")
    for key in content:
        if key not in known:
            raise BadConfig(f"{path}{key}: no such key; choose one of {', '.join(sorted(known))}")
    for key in sorted(needed):
        if key not in content:
            raise BadConfig(f"{path}{key}: is missing")


def _check(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise BadConfig(f"{where}: expected {expected}")
