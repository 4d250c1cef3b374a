"""The nodes of an Argo workflow, recognised in what a Kubeflow server lists of a run.

For every step there is a driver, the step itself and its executor, and each of them again as `(0)`, `(1)`, … for its
tries. A node is listed by its short name, which the steps of all tasks share, and with the ids of the nodes that come
after it. An id is the name of the workflow and a hash of the node's path, for instance of
`csc-digits-b0c2-mlsl7(0).root(0).base-task(0).train(0).executor(0)`. So the paths are found by hashing those that the
short names can make and looking for the results among the ids.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from csc.pipelines.cluster.terminal import printable

if TYPE_CHECKING:
    from kfp_server_api import V2beta1PipelineTaskDetail, V2beta1Run

__all__ = ["DRIVER", "Key", "Node", "Path", "find_paths", "is_try", "key_of", "nodes_of", "own_path", "pod_name"]
__all__ += ["seconds_between"]

Path = tuple[str, ...]  # the parts of a node's path: the workflow's name, then ".name" and "(try)"
Key = tuple[str, ...]  # the names in a path, without tries: ("root", "base-task", "train")

DRIVER = "-driver"
_TRY = re.compile(r"\(\d+\)")
_LONGEST_PREFIX = 242  # of a pod's name, before the hash


@dataclass(frozen=True)
class Node:
    """What the server lists: a node of the workflow, or an entry of its cache, which has no name."""

    name: str
    state: str
    start: datetime | None
    end: datetime | None
    error: str
    children: tuple[str, ...]  # ids of the nodes that come after it
    cached: bool  # whether there is an entry of the cache


def nodes_of(run: "V2beta1Run") -> list[Node]:
    """What the server lists of a run, the oldest first, and last what has not begun."""
    nodes = map(_node, (run.run_details.task_details or ()) if run.run_details else ())
    return sorted(nodes, key=lambda node: (node.start is None, node.start))


def _node(detail: "V2beta1PipelineTaskDetail") -> Node:
    return Node(
        detail.display_name or "",
        detail.state or "",
        _time(detail.start_time),
        _time(detail.end_time),
        printable(detail.error.message or "") if detail.error else "",
        tuple(child.pod_name for child in detail.child_tasks or () if child.pod_name),
        bool(detail.execution_id),
    )


def seconds_between(start: datetime | None, end: datetime | None) -> float:
    """Seconds between two times of the server; 0 if one of them is not set."""
    begin, finish = _time(start), _time(end)
    return max(0.0, (finish - begin).total_seconds()) if begin and finish else 0.0


def _time(time: datetime | None) -> datetime | None:
    """A time, in UTC if it has no zone; none if it is not set, which the server writes as 1970 or as the year 1."""
    if time is None or time.year <= 1970:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def find_paths(nodes: Iterable[Node]) -> dict[str, Path]:
    """The paths of all nodes that come after another one, by their ids."""
    ids = {child for node in nodes for child in node.children}
    workflow = min(ids, default="").rpartition("-")[0]
    names = {f".{node.name}" for node in nodes if not re.search(r"\(\d+\)$", node.name)}
    found: dict[str, Path] = {}
    left: list[tuple[Path, int]] = [((workflow,), _fnv(workflow))] if workflow else []
    while left:
        path, state = left.pop()
        tries = () if is_try(path) else (f"({number})" for number in itertools.count())
        for part in itertools.chain(names, tries):
            below = _fnv(part, state)
            if (identifier := f"{workflow}-{below}") in ids:
                found[identifier] = (*path, part)
                left.append((found[identifier], below))
            elif part[0] == "(":  # tries are counted without gaps
                break
    return found


def own_path(node: Node, paths: Mapping[str, Path]) -> Path:
    """The path of a node, which follows from those of the nodes that come after it; empty if there are none."""
    for child in node.children:
        path = paths.get(child, ())
        if path and _short(path[:-1]) == node.name:  # a try of it, or something inside it
            return path[:-1]
        if path and f"{path[-1]}{DRIVER}" == f".{node.name}":  # a driver comes before what it prepares
            return (*path[:-1], f".{node.name}")
    return ()


def key_of(path: Path) -> Key:
    """The names in a path."""
    return tuple(part[1:] for part in path[1:] if part[0] == ".")


def is_try(path: Path) -> bool:
    """Whether a path is that of a single try."""
    return _TRY.fullmatch(path[-1]) is not None


def pod_name(path: Path, template: str) -> str:
    """The name that Argo gives to the pod of a node."""
    return f"{path[0]}-{template}"[:_LONGEST_PREFIX] + f"-{_fnv(''.join(path))}"


def _short(path: Path) -> str:
    """The name under which a node with this path is listed."""
    if len(path) > 1 and is_try(path):
        return _short(path[:-1]) + path[-1]
    return path[-1].removeprefix(".")


def _fnv(text: str, state: int = 0x811C9DC5) -> int:
    """The hash FNV-1a in 32 bits; `state` is that of the text before."""
    for byte in text.encode():
        state = (state ^ byte) * 0x01000193 & 0xFFFFFFFF
    return state
