"""The nodes of an Argo workflow, recognised in what a Kubeflow server lists of a run.

For every step there is a driver, the step itself and its executor, and each of them again as `(0)`, `(1)`, … for its
tries. A node is listed by its short name, which the steps of all tasks share, and with the ids of the nodes that come
after it. An id is the name of the workflow and a hash of the node's path, for instance of
`csc-digits-b0c2-mlsl7(0).root(0).base-task(0).train(0).executor(0)`. So the paths are found by hashing those that the
short names can make and looking for the results among the ids.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp_server_api import V2beta1PipelineTaskDetail as Detail

__all__ = ["DRIVER", "Key", "Path", "find_paths", "is_try", "key_of", "nodes_by_path", "pod_name", "tries_of"]

Path = tuple[str, ...]  # the parts of a node's path: the workflow's name, then ".name" and "(try)"
Key = tuple[str, ...]  # the names in a path, without tries: ("root", "base-task", "train")

DRIVER = "-driver"
_TRY = re.compile(r"\(\d+\)")
_LONGEST_PREFIX = 242  # of a pod's name, before the hash


def find_paths(named: "Sequence[Detail]") -> dict[str, Path]:
    """The paths of all nodes that come after another one, by their ids; empty if the server gives no ids."""
    ids = {str(child.pod_name) for detail in named for child in detail.child_tasks or () if child.pod_name}
    workflow = min(ids, default="").rpartition("-")[0]
    names = {f".{detail.display_name}" for detail in named if not re.search(r"\(\d+\)$", str(detail.display_name))}
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


def nodes_by_path(named: "Sequence[Detail]", paths: Mapping[str, Path]) -> "dict[Path, Detail]":
    """The nodes whose own path follows from those of the nodes that come after them."""
    return {path: detail for detail in named for path in itertools.islice(_own_path(detail, paths), 1)}


def _own_path(detail: "Detail", paths: Mapping[str, Path]) -> Iterator[Path]:
    name = str(detail.display_name)
    for child in detail.child_tasks or ():
        path = paths.get(str(child.pod_name), ())
        if path and _short(path[:-1]) == name:  # a try of it, or something inside it
            yield path[:-1]
        elif path and f"{path[-1]}{DRIVER}" == f".{name}":  # a driver comes before what it prepares
            yield (*path[:-1], f".{name}")


def key_of(path: Path) -> Key:
    """The names in a path."""
    return tuple(part[1:] for part in path[1:] if part[0] == ".")


def is_try(path: Path) -> bool:
    """Whether a path is that of a single try."""
    return _TRY.fullmatch(path[-1]) is not None


def tries_of(path: Path) -> list[int]:
    """The numbers of the tries in a path."""
    return [int(part[1:-1]) for part in path if _TRY.fullmatch(part)]


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
