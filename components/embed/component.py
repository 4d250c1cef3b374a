"""Compute the feature maps of a frozen backbone, once for all methods, tasks and seeds."""

from typing import NamedTuple

from kfp import dsl

from csc.components.image import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def embed(origin: str, scenario: str, config: str) -> NamedTuple("Outputs", [("features", str)]):  # type: ignore[valid-type]
    """Embed a data set.

    Args:
        origin: Origin of the data, from ingest.
        scenario: Name such as voc-b0c4.
        config: Settings as JSON; features.views says how many views of a training image.

    Returns:
        features: The URI of the maps, in the data set.
    """
    from csc.steps.embed import embed

    return (embed(origin, scenario, config),)
