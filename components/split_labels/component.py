"""Cut the classes of a scenario: which are new in a task, which are seen."""

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def split_labels(origin: str, scenario: str, task: int, tasks: int, split: dsl.Output[dsl.Artifact]):
    """Write the split of one task.

    Args:
        origin: From ingest.
        scenario: Name such as voc-b0c4.
        task: Number of the task, from 1.
        tasks: How many tasks the pipeline has.
        split: split.json {scenario, task, tasks, new, seen}.
    """
    from csc.steps.split_labels import split_labels

    split_labels(origin, scenario, task, tasks, out=split.path)
