"""Reading a study from a small YAML file.

`csc/study/studies/*.yaml` are shipped: the paper's tables and figures. A study of your own has the same keys; only
`title`, `scenarios` and either `rows` or `methods` are needed.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field

from csc.config import methods, resolve
from csc.config.reading import Settings, convert, load_yaml
from csc.config.tree import flatten, merged, nested
from csc.errors import BadConfig, BadScenario
from csc.report.paper import paper_rows
from csc.scenario import PAPER_SCENARIOS, Scenario
from csc.storage import local_path
from csc.study.spec import COLUMNS, Row, Study

__all__ = ["SHIPPED", "read_study"]

_FOLDER = Path(__file__).parent / "studies"
SHIPPED = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))
Column = Annotated[str, Meta(pattern=rf"\A({'|'.join(COLUMNS)})\Z", description=f"one of {', '.join(COLUMNS)}")]


class _Row(Settings, frozen=True):
    """A row as it is written; see `Row`."""

    label: str = ""
    method: str = ""
    group: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    by_scenario: dict[str, dict[str, Any]] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)


class _File(Settings, frozen=True):
    """A study as it is written; see `Study`. `methods` are short for rows, `grid` multiplies the rows."""

    title: str = ""
    scenarios: tuple[str, ...] = ()
    seeds: tuple[Annotated[int, Meta(ge=0)], ...] = Study.seeds
    columns: tuple[Column, ...] = Study.columns
    settings: dict[str, Any] = field(default_factory=dict)
    groups: str = ""
    rows: tuple[_Row, ...] = ()
    methods: tuple[str, ...] = ()
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    order: tuple[tuple[str, ...], ...] = ()


def read_study(name: str) -> Study:
    """Read a study strictly; whatever is wrong is one line with the file and the key.

    Args:
        name: of a shipped study, or a YAML file.
    """
    path = _FOLDER / f"{name}.yaml" if name in SHIPPED else local_path(name)
    if not path.is_file():
        raise BadConfig(f"study '{name}': no such file; give a YAML file or one of {', '.join(SHIPPED)}")
    content = load_yaml(path)
    try:
        return _study(path.stem, convert(_File, content))
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from None


def _study(name: str, file: _File) -> Study:
    _check(bool(file.title), "title", "one line of text")
    if bool(file.rows) == bool(file.methods):
        raise BadConfig("rows: give either rows or methods, and only one of them")
    lists = {key: getattr(file, key) for key in ("scenarios", "seeds", "columns")}
    for key, values in (*lists.items(), *((f"grid.{key}", values) for key, values in file.grid.items())):
        _check(bool(values), key, "a list with at least one entry")
        _check(not any(item in values[:index] for index, item in enumerate(values)), key, "no entry twice")
    _settings(dict.fromkeys(file.grid, 0), "grid")
    listed = file.rows or [_Row(label=method, method=method) for method in file.methods]
    made = [_row(item, f"rows[{index}]") for index, item in enumerate(listed)]
    rows = tuple(row for item in made for row in _multiplied(item, file.grid))
    _check(len({row.name for row in rows}) == len(rows), "rows", "labels that differ, or groups that do")
    _check_order(file.order, rows)
    scenarios = tuple(_scenario(item, f"scenarios[{index}]") for index, item in enumerate(file.scenarios))
    return Study(
        name=name,
        title=file.title,
        rows=rows,
        scenarios=scenarios,
        seeds=file.seeds,
        columns=file.columns,
        settings=_settings(file.settings, "settings"),
        groups=file.groups,
        order=file.order,
    )


def _row(item: _Row, where: str) -> Row:
    for key in ("label", "method"):
        if not getattr(item, key):
            raise BadConfig(f"{where}.{key}: is missing")
    if item.method not in methods():
        raise BadConfig(f"{where}.method: '{item.method}' is not known; choose one of {', '.join(methods())}")
    return Row(
        label=item.label,
        method=item.method,
        group=item.group,
        settings=_settings(item.settings, f"{where}.settings"),
        by_scenario={
            _scenario(name, f"{where}.by_scenario.{name}"): _settings(settings, f"{where}.by_scenario.{name}")
            for name, settings in item.by_scenario.items()
        },
        paper=dict(_paper(name, value, item.method, f"{where}.paper.{name}") for name, value in item.paper.items()),
    )


def _paper(name: str, value: Any, method: str, where: str) -> tuple[str, Any]:
    """Read the paper's numbers on a scenario, or under `buffer` which row of its tables has them."""
    if name != "buffer":
        try:
            return _scenario(name, where), convert(dict[Column, float], value)
        except BadConfig as error:
            raise BadConfig(f"{where}{error}" if str(error)[0] in ".=" else str(error)) from None
    known = dict.fromkeys(row.buffer for scenario in PAPER_SCENARIOS for row in paper_rows(scenario, method))
    if not known:
        raise BadConfig(f"{where}: the paper's tables 1 and 2 have no row of '{method}'; give numbers by scenario")
    _check(value in list(known), where, f"one of {', '.join(known)}, found '{value}'")
    return name, value


def _scenario(name: str, where: str) -> str:
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


def _settings(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read overrides, nested or with dotted keys; a key that is no setting is named."""
    known = _known_settings()
    leaves = dict(flatten(content))
    for key, value in leaves.items():
        if key not in known or key in ("method", "seed"):
            raise BadConfig(f"{where}.{key}: {_no_such(key, known)}")
        _check(isinstance(value, str | int | float), f"{where}.{key}", f"one word or number, found {value!r}")
    return nested(leaves)


@cache
def _known_settings() -> frozenset[str]:
    """The settings that any method reads, each with its own head."""
    return frozenset(key for method in methods() for key in resolve("digits", {"method": method}).flat())


def _no_such(key: str, known: Iterable[str]) -> str:
    if key in ("method", "seed"):
        return "has its own place: the method in a row, seeds beside the rows"
    below = sorted(name for name in known if name.startswith(f"{key.partition('.')[0]}."))
    return f"no such setting; choose one of {', '.join(below or sorted({name.partition('.')[0] for name in known}))}"


def _check_order(order: Sequence[Sequence[str]], rows: Sequence[Row]) -> None:
    for chain_index, chain in enumerate(order):
        _check(len(chain) > 1, f"order[{chain_index}]", "a list of rows, best first")
        for index, name in enumerate(chain):
            found = [row for row in rows if name in (row.label, row.name)]
            _check(len(found) == 1, f"order[{chain_index}][{index}]", f"the name of one row, found '{name}'")


def _check(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise BadConfig(f"{where}: expected {expected}")
