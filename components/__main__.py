"""Run a component of the installed package, as the pod of a step does.

    python -m csc.components NAME --executor_input … --function_to_execute NAME

A pipeline that is compiled for a cluster names its components instead of carrying their source, which the cluster would
keep several times for each step. kfp's executor wants the function alone: at run time it has no decorators.
"""

import ast
import os
import sys
import tempfile
from pathlib import Path

__all__ = ["execute", "source_of"]


def source_of(name: str) -> str:
    """The source of a component's function, as kfp's executor takes it."""
    tree = ast.parse(Path(__file__).with_name(name).joinpath("component.py").read_text(encoding="utf-8"))
    (function,) = (part for part in tree.body if isinstance(part, ast.FunctionDef))
    function.decorator_list.clear()
    return f"from typing import NamedTuple\n\nfrom kfp import dsl\n\n{ast.unparse(function)}\n"


def execute(source: str, arguments: list[str]) -> None:
    """Do in this process what `python -m kfp.dsl.executor_main` does with the source of a component."""
    os.environ["_KFP_RUNTIME"] = "true"  # kfp then needs none of what a compiler needs
    with tempfile.TemporaryDirectory(prefix="csc-step-") as folder:
        module = Path(folder) / "component.py"
        module.write_text(source, encoding="utf-8")
        sys.argv = ["executor_main", "--component_module_path", str(module), *arguments]
        from kfp.dsl.executor_main import executor_main

        executor_main()


if __name__ == "__main__":
    execute(source_of(sys.argv[1]), sys.argv[2:])
