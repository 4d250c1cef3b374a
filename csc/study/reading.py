"""Reading a study from a small YAML file.

`csc/study/studies/*.yaml` are shipped: the paper's tables and figures. A study of your own has the same keys; only
`title`, `scenarios` and either `rows` or `methods` are needed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from csc.config import methods, resolve
from csc.config.reading import convert, load_yaml
from csc.config.tree import flatten, merged, nested
from csc.errors import BadConfig, BadScenario
from csc.report.columns import COLUMNS, SUMMARY
from csc.report.paper import paper_rows
from csc.scenario import PAPER_SCENARIOS, Scenario
from csc.storage import local_path
from csc.study.spec import Row, Study

__all__ = ["SHIPPED", "read_study"]

_FOLDER = Path(__file__).parent / "studies"
SHIPPED = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))
Column = Annotated[str, Meta(pattern=rf"\A({'|'.join(COLUMNS)})\Z", description=f"one of {', '.join(COLUMNS)}")]


class _File(Struct, frozen=True):
    """A study as it is written; see `Study`. `methods` are short for rows, `grid` multiplies the rows."""

    title: str = ""
    scenarios: tuple[str, ...] = ()
    seeds: tuple[Annotated[int, Meta(ge=0)], ...] = (0, 1, 2)
    columns: tuple[Column, ...] = SUMMARY
    settings: dict[str, Any] = {}
    groups: str = ""
    rows: tuple[Row, ...] = ()
    methods: tuple[str, ...] = ()
    grid: dict[str, tuple[Any, ...]] = {}
    order: tuple[tuple[str, ...], ...] = ()


def read_study(name: str) -> Study:
    """Read a shipped study by its name, or a YAML file; what is wrong is one line with the file and the key."""
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
    listed = file.rows or [Row(method, method) for method in file.methods]
    checked = [_row(row, f"rows[{index}]") for index, row in enumerate(listed)]
    rows = tuple(made for row in checked for made in _multiplied(row, file.grid))
    _check(len({row.name for row in rows}) == len(rows), "rows", "labels that differ, or groups that do")
    _check_order(file.order, rows)
    return Study(
        name=name,
        title=file.title,
        rows=rows,
        scenarios=tuple(_scenario(item, f"scenarios[{index}]") for index, item in enumerate(file.scenarios)),
        seeds=file.seeds,
        columns=file.columns,
        settings=_settings(file.settings, "settings"),
        groups=file.groups,
        order=file.order,
    )


def _row(row: Row, where: str) -> Row:
    """Check what a row says, and write scenarios and settings in the one form that all else reads."""
    for key in ("label", "method"):
        if not getattr(row, key):
            raise BadConfig(f"{where}.{key}: is missing")
    if row.method not in methods():
        raise BadConfig(f"{where}.method: '{row.method}' is not known; choose one of {', '.join(methods())}")
    return replace(
        row,
        settings=_settings(row.settings, f"{where}.settings"),
        by_scenario={
            _scenario(name, f"{where}.by_scenario.{name}"): _settings(settings, f"{where}.by_scenario.{name}")
            for name, settings in row.by_scenario.items()
        },
        paper=dict(_paper(name, value, row.method, f"{where}.paper.{name}") for name, value in row.paper.items()),
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
    leaves = list(flatten(content))
    names = [key for key, _ in leaves]
    for key, value in leaves:
        if key in ("method", "seed"):
            raise BadConfig(f"{where}.{key}: not a setting here; the method stands in a row, seeds have their own list")
        if key not in known:
            below = sorted(name for name in known if name.startswith(f"{key.partition('.')[0]}."))
            choices = below or sorted({name.partition(".")[0] for name in known})
            raise BadConfig(f"{where}.{key}: no such setting; choose one of {', '.join(choices)}")
        _check(isinstance(value, str | int | float), f"{where}.{key}", f"one word or number, found {value!r}")
        _check(names.count(key) == 1, f"{where}.{key}", "one value, found two")
    return nested(dict(leaves))


@cache
def _known_settings() -> frozenset[str]:
    """The settings that any method reads, each with its own head."""
    return frozenset(key for method in methods() for key in resolve("digits", {"method": method}).flat())


def _check_order(order: Sequence[Sequence[str]], rows: Sequence[Row]) -> None:
    for chain_index, chain in enumerate(order):
        _check(len(chain) > 1, f"order[{chain_index}]", "a list of rows, best first")
        for index, name in enumerate(chain):
            found = [row for row in rows if name in (row.label, row.name)]
            _check(len(found) == 1, f"order[{chain_index}][{index}]", f"the name of one row, found '{name}'")


def _check(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise BadConfig(f"{where}: expected {expected}")
