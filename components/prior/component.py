"""Look up the registered model that a window of tasks starts from."""

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def prior(origin: str, scenario: str, config: str, task: int, registered: dsl.Output[dsl.Model]):
    """Find the model of the task before the window.

    Args:
        origin: From ingest.
        scenario: Name such as voc-b0c4.
        config: Settings as JSON.
        task: Number of the task whose model is looked for.
        registered: registered.json, as register wrote it.
    """
    from csc.steps.prior import prior

    prior(origin, scenario, config, task, registered.path)
