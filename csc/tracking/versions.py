"""A registered version by its address: what `register` kept of it, and its card, without the weights."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from csc.artifacts import RegisteredTask
from csc.errors import BadModel
from csc.model import ModelCard, read_card
from csc.tracking.calls import connected
from csc.tracking.registry import load_registered_task, local_model

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

__all__ = ["Address", "registered_card", "registered_task_at"]

_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<number>[1-9]\d*))?")


@dataclass(frozen=True)
class Address:
    """A registered model, `models:/NAME`, with the alias or the number of a version, or neither."""

    name: str
    alias: str
    number: str

    @classmethod
    def parse(cls, uri: str) -> "Address | None":
        """Read an address; None if it is none.

        >>> Address.parse("models:/digits-b0c2-csc@final")
        Address(name='digits-b0c2-csc', alias='final', number='')
        """
        match = _ADDRESS.fullmatch(uri)
        return None if match is None else cls(**match.groupdict(default=""))

    def version(self, client: "MlflowClient") -> "ModelVersion":
        """The version with this number or alias; without both, the one with the alias `final`."""
        if self.number:
            return client.get_model_version(self.name, self.number)
        return client.get_model_version_by_alias(self.name, self.alias or "final")


def registered_task_at(uri: str) -> RegisteredTask:
    """What `register` kept of a version, which an alias or a number names; the result has its exact number."""
    address = Address.parse(uri)
    if address is None or not (address.alias or address.number):
        raise BadModel(f"{uri}: expected a registered model, models:/NAME@final or models:/NAME/3")
    unknown = BadModel(f"{uri}: no such version of a model of this project; 'csc ui' shows those there are")
    with connected() as client:
        from mlflow.exceptions import MlflowException

        try:
            found = address.version(client)
            if not found.run_id:  # somebody else made it
                raise unknown
            kept = load_registered_task(client, found.run_id)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise unknown from None
    return replace(kept, model=replace(kept.model, name=found.name, version=str(found.version)))


def registered_card(task: RegisteredTask) -> ModelCard:
    """The card of a registered task's model."""
    if (folder := local_model(task.model)) is not None:
        return read_card(folder)
    with connected(), tempfile.TemporaryDirectory(prefix="csc-card-") as aside:
        import mlflow

        file = mlflow.artifacts.download_artifacts(f"{task.model.uri}/data/model/model.json", dst_path=aside)
        return read_card(Path(file).parent)
