"""Make sure that the data set of a scenario is there, and say exactly which one it is."""

from typing import NamedTuple

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def ingest(scenario: str, data: str, dataset: dsl.Output[dsl.Dataset]) -> NamedTuple("Outputs", [("origin", str)]):  # type: ignore[valid-type]
    """Open the data set; the embedded digits are made on the spot.

    Args:
        scenario: Name such as voc-b0c4.
        data: Folder of the data set.
        dataset: What the data set is: where, its fingerprint, its counts.

    Returns:
        origin: The origin of everything that follows (data, fingerprint, code version, tracking server) as JSON.
    """
    from csc.steps.ingest import ingest, write_dataset_facts

    origin = ingest(scenario, data)
    dataset.metadata.update(write_dataset_facts(origin, dataset.path))
    return (origin.to_json(),)
