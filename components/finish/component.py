"""Close the MLflow runs of a scenario that ended early, as the pipeline's exit handler."""

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def finish(scenario: str, data: str, config: str, status: dsl.PipelineTaskFinalStatus, extended: str = ""):
    """Mark what is still open of a run as failed or killed.

    Args:
        scenario: Name such as voc-b0c4.
        data: Folder of the data set.
        config: Settings as JSON.
        status: How the steps ended, from the pipeline.
        extended: Fingerprint of the model that the run extends, if it does.
    """
    from csc.steps.finish import finish

    finish(scenario, data, config, status.state, extended)
