"""Wrap a model folder so that MLflow can use it on its own: weights, card, and our code.

MLmodel             what it is, takes and gives, and how to load it: `csc.serving.pyfunc`, from `code/`
data/model/         the model folder
code/csc/           as much of this library as it takes to load and predict
requirements.txt    what it needs, at the versions it was trained with; conda.yaml and python_env.yaml say the same
input_example.json  an image as base64; serving_input_example.json is a whole request to `mlflow models serve`

`mlflow.pyfunc.save_model` writes the same files in half a second, but it needs pandas. The image of this step does not
have it: there is only MLflow's client.
"""

import datetime
import json
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from csc.model import TRAINING_LOG, ModelCard, read_card
from csc.storage import read_json
from csc.version import installed_version

__all__ = ["installed", "package_model"]

# Every file is a request of its own on its way through a tracking server, so nothing comes along that is not used.
CODE = (
    *(f"{name}.py" for name in ("__init__", "errors", "model", "scenario")),
    "storage/*.py",
    "data/__init__.py",
    *(f"serving/{name}.py" for name in ("__init__", "predictor", "pyfunc")),
    "config/*.py",
    "config/presets/*.yaml",
    "nets/*.py",
    *(f"replay/{name}.py" for name in ("__init__", "statistics")),  # which methods read
    "methods/*.py",
    "methods/values/*.yaml",
)
# A grey PNG of 8 × 8 pixels.
EXAMPLE = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAEElEQVR42mNsYIAAJgaKGAAmCACQtTEKkQAAAABJRU5ErkJggg=="
REQUIREMENTS = ("torch", "torchvision", "timm", "safetensors", "pyarrow", "pyyaml", "msgspec", "pillow", "pandas")


def installed() -> dict[str, str]:
    """The versions in this environment of what a model needs; training notes them, as packaging may have no torch."""
    return {name: number for name in REQUIREMENTS if (number := installed_version(name))}


def package_model(model: Path, package: Path) -> None:
    """Make a folder that `mlflow.pyfunc.load_model` can load from a model folder."""
    python = platform.python_version()
    mlflow = installed_version("mlflow") or installed_version("mlflow-skinny")  # images of steps have only the client
    versions = installed() | read_json(model / TRAINING_LOG).get("packages", {})
    pinned = {"mlflow": mlflow} | {name: versions.get(name, "") for name in REQUIREMENTS}
    requirements = [f"{name}=={number}" if number else name for name, number in pinned.items()]
    conda = ["python=" + python, "pip", {"pip": requirements}]
    environment = {"python": python, "build_dependencies": ["pip", "setuptools", "wheel"]}
    shutil.copytree(model, package / "data" / "model")
    library = Path(__file__).parents[1]
    for path in (path for pattern in CODE for path in library.glob(pattern)):
        target = package / "code" / "csc" / path.relative_to(library)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    _write(package / "conda.yaml", {"name": "mlflow-env", "channels": ["conda-forge"], "dependencies": conda})
    _write(package / "python_env.yaml", environment | {"dependencies": ["-r requirements.txt"]})
    (package / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    (package / "input_example.json").write_text(json.dumps([EXAMPLE]), encoding="utf-8")
    (package / "serving_input_example.json").write_text(json.dumps({"inputs": [EXAMPLE]}), encoding="utf-8")
    function = {
        "code": "code",
        "config": {"read_files": True},
        "data": "data/model",
        "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
        "loader_module": "csc.serving.pyfunc",
        "python_version": python,
    }
    described = {
        "flavors": {"python_function": function},
        "saved_input_example_info": {
            "artifact_path": "input_example.json",
            "serving_input_path": "serving_input_example.json",
            "type": "json_object",
        },
        "signature": _signature(read_card(model)),
        "mlflow_version": mlflow,
        "model_size_bytes": sum(path.stat().st_size for path in package.rglob("*") if path.is_file()),
        "utc_time_created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
    }
    _write(package / "MLmodel", described)


def _signature(card: ModelCard) -> dict[str, str | None]:
    """Text in, a confidence per class out, as MLflow writes it.

    The column that comes in has no name: with one, MLflow would refuse a plain list of images.
    """
    columns = [{"type": "float", "name": name, "required": True} for name in card.classes]
    image = {"type": "string", "required": True}
    return {"inputs": json.dumps([image]), "outputs": json.dumps(columns), "params": None}


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
