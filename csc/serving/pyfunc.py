"""A registered model as MLflow loads and serves it; `csc.serving.packaging` names this module as its loader.

Text is base64 of an encoded image, or the path of a file, but never a path in a server, which takes text from anyone.
MLflow's server and MLServer are recognised; your own server loads the model with `model_config={"read_files": False}`.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from PIL import Image

from csc.errors import BadData
from csc.serving.predictor import Predictor, from_base64

__all__ = ["BadRequest", "Model"]

# What MLflow's server puts into its environment: the first before it loads the model, the second before it predicts.
SERVER_VARIABLES = ("__pyfunc_model_path__", "_MLFLOW_IS_IN_SERVING_ENVIRONMENT")


class BadRequest(MlflowException):  # type: ignore[misc] # MLflow has no types
    """An image that cannot be used: status 400. MLflow's server would send all that it was sent along with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, error_code=BAD_REQUEST)
        self.reason = reason

    def serialize_as_json(self) -> str:
        """The answer of a server."""
        return json.dumps({"error_code": self.error_code, "message": self.reason})


class Model:
    """What `mlflow.pyfunc.load_model` wraps; `read_files` allows text to be a path, outside of servers."""

    def __init__(self, folder: str, read_files: bool = True) -> None:
        self.predictor = Predictor(folder)
        self.read_files = read_files

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """A data frame with one row per image and one column of confidences per class.

        The input is images, or a data frame whose first column holds them; each encoded as bytes or base64 text, a
        path, a Pillow image or an RGB array. MLflow passes `params` to every model; none are used.
        """
        import pandas as pd

        read_files = self.read_files and not _in_server()
        try:
            images = [
                _without_paths(image, number, read_files) for number, image in enumerate(_listed(model_input), start=1)
            ]
            if not images:
                raise BadData("no images; expected one or more")
            return pd.DataFrame(self.predictor.confidences(images), columns=list(self.predictor.card.classes))
        except BadData as error:
            raise BadRequest(str(error)) from None


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> Model:
    """Called by MLflow with the folder of the model's data."""
    return Model(path, read_files=bool((model_config or {}).get("read_files", True)))


def _in_server() -> bool:
    """Whether this process answers requests of others."""
    return any(os.environ.get(name) for name in SERVER_VARIABLES) or "mlserver" in sys.modules


def _listed(model_input: Any) -> list[Any]:
    """The images of an input: of a frame its first column, and one image is a list of one."""
    import pandas as pd

    if isinstance(model_input, pd.DataFrame):
        return list(model_input.iloc[:, 0]) if model_input.shape[1] else []
    single = isinstance(model_input, (str, bytes, bytearray, memoryview, Path, Image.Image))
    if single or (isinstance(model_input, np.ndarray) and model_input.ndim == 3 and model_input.shape[-1] == 3):
        return [model_input]
    return list(model_input)


def _without_paths(image: Any, number: int, read_files: bool) -> Any:
    """An image as it was given; but if files are not to be read, text is decoded as base64."""
    if isinstance(image, np.ndarray) and image.ndim == 0:  # MLflow's way to hand on {"b64": "…"}
        image = image.item()
    if isinstance(image, Mapping):
        image = image.get("b64")
    if read_files or not isinstance(image, (str, Path)):
        return image
    try:
        return from_base64(str(image))
    except BadData as error:
        raise BadData(f"image {number}: {error}") from None
