"""Collect the results of a study into the paper's table, our numbers next to the paper's."""

from typing import NamedTuple

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def collect(
    order: str,
    status: dsl.PipelineTaskFinalStatus,
    page: dsl.Output[dsl.HTML],
    table: dsl.Output[dsl.Markdown],
    files: dsl.Output[dsl.Artifact],
) -> NamedTuple("Outputs", [("text", str)]):  # type: ignore[valid-type]
    """Collect what the cells of a study have come to, also when some of them failed.

    Args:
        order: The study and the URIs of its data sets, as JSON.
        status: How the cells ended, from the pipeline.
        page: The study as one HTML file.
        table: Its tables as Markdown.
        files: Folder with the tables as text, Markdown, LaTeX, CSV and HTML.

    Returns:
        text: The tables as text.
    """
    from csc.steps.collect import collect

    return (collect(order, page.path, table.path, files.path),)
