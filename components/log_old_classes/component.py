"""Keep in MLflow what an extended model reaches on the classes that it knew before."""

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def log_old_classes(registered: dsl.Input[dsl.Model], metrics: dsl.Input[dsl.Metrics]):
    """Log the metrics of the old classes.

    Args:
        registered: registered.json of the task.
        metrics: metrics.json of its model on images that label the old classes.
    """
    from csc.steps.log_old_classes import log_old_classes

    log_old_classes(registered.path, metrics.path)
