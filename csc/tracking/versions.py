"""A registered version by its address: what `register` kept of it, and its card, without the weights."""

import re
import tempfile
from pathlib import Path

from msgspec.structs import replace

from csc.artifacts import RegisteredTask
from csc.errors import BadModel
from csc.model import ModelCard, read_card
from csc.tracking.calls import translate_errors
from csc.tracking.registry import RECORD, local_model
from csc.tracking.server import connect

__all__ = ["find_version", "version_card"]

_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>[1-9]\d*))")


def find_version(uri: str) -> RegisteredTask:
    """What `register` kept of a version, which an alias or a number names; the result has its exact number."""
    address = _ADDRESS.fullmatch(uri)
    if address is None:
        raise BadModel(f"{uri}: expected a registered model, models:/NAME@final or models:/NAME/3")
    with translate_errors():
        client = connect()
        import mlflow
        from mlflow.exceptions import MlflowException

        try:
            if address["alias"]:
                found = client.get_model_version_by_alias(address["name"], address["alias"])
            else:
                found = client.get_model_version(address["name"], address["version"])
            record = mlflow.artifacts.load_dict(f"runs:/{found.run_id}/{RECORD}")
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise BadModel(
                f"{uri}: no such version of a model of this project; 'csc ui' shows those there are"
            ) from None
    kept = RegisteredTask.from_plain(record, uri)
    return replace(kept, model=replace(kept.model, name=found.name, version=str(found.version)))


def version_card(version: RegisteredTask) -> ModelCard:
    """The card of a version."""
    if (folder := local_model(version.model)) is not None:
        return read_card(folder)
    with translate_errors(), tempfile.TemporaryDirectory(prefix="csc-card-") as aside:
        connect()
        import mlflow

        file = mlflow.artifacts.download_artifacts(f"{version.model.uri}/data/model/model.json", dst_path=aside)
        return read_card(Path(file).parent)
