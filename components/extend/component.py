"""Begin one more task on a registered model, with the classes of a data set that it does not know."""

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def extend(origin: str, scenario: str, model: str, split: dsl.Output[dsl.Artifact], registered: dsl.Output[dsl.Model]):
    """Find the model, and take the classes of the data set as the new ones.

    Args:
        origin: From ingest.
        scenario: Name of the extended scenario, such as voc-b0c4+3.
        model: Registered model that is extended, models:/NAME/VERSION.
        split: split.json {scenario, task, tasks, new, seen}.
        registered: registered.json of the model, as register wrote it.
    """
    from csc.steps.extend import extend

    extend(origin, scenario, model, split.path, registered.path)
