"""Named tensors in safetensors files: read without unpickling anything."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from csc.errors import BadModel
from csc.storage.local import explain_write_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["load_tensors", "save_tensors"]


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write named tensors as safetensors; a full disk is reported in one line, as for any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        save_file(stored, path, metadata)
        path.chmod(0o644)  # like the other files of the folder
    except SafetensorError as error:
        if not (cause := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        with explain_write_errors(path):
            raise OSError(int(cause[1]), os.strerror(int(cause[1]))) from None


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """Read named tensors; none if there is no such file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        return {}
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{path}: not readable as safetensors ({error})") from None
