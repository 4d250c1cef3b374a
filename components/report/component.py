"""Report the results of a scenario run: table, page and metrics of the parent run."""

from typing import NamedTuple

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def report(
    registered: dsl.Input[dsl.Model],
    page: dsl.Output[dsl.HTML],
    table: dsl.Output[dsl.Markdown],
) -> NamedTuple("Outputs", [("text", str)]):  # type: ignore[valid-type]
    """Report a finished scenario run.

    Args:
        registered: registered.json of the last task.
        page: The results as one HTML file.
        table: The results table as Markdown.

    Returns:
        text: The results table as text.
    """
    from csc.steps.report import report

    return (report(registered.path, page.path, table.path),)
