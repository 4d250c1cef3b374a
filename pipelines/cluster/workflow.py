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

from csc.pipelines.cluster.answers import Node

__all__ = ["DRIVER", "Key", "Path", "find_paths", "is_try", "key_of", "own_path", "pod_name"]

Path = tuple[str, ...]  # the parts of a node's path: the workflow's name, then ".name" and "(try)"
Key = tuple[str, ...]  # the names in a path, without tries: ("root", "base-task", "train")

DRIVER = "-driver"
_LONGEST_PREFIX = 242  # of a pod's name, before the hash


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
    return path[-1].startswith("(")


def pod_name(path: Path, template: str) -> str:
    """The name that Argo gives to the pod of a node."""
    return f"{path[0]}-{template}"[:_LONGEST_PREFIX] + f"-{_fnv(''.join(path))}"


def _short(path: Path) -> str:
    """The name under which a node with this path is listed."""
    if is_try(path):
        return _short(path[:-1]) + path[-1]
    return path[-1].removeprefix(".")


def _fnv(text: str, state: int = 0x811C9DC5) -> int:
    """The hash FNV-1a in 32 bits; `state` is that of the text before."""
    for byte in text.encode():
        state = (state ^ byte) * 0x01000193 & 0xFFFFFFFF
    return state
