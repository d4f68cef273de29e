"""Files that are made for one model and lie in its folder: heads, statistics."""

from __future__ import annotations

from pathlib import Path

from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle


def beside(model: ModelHandle, name: str) -> Path:
    """Where a file that was made for a model's weights lies: with its adapter, else with its weights."""
    return (model.adapter.folder if model.options.adapter else model.folder) / name


def check_made_with(file: Path, model: ModelHandle, parameter: str) -> None:
    """Raise KvatlasError if a file in the model's folder says that it was made with other weights.

    One that `parameter` names may be tried on any; one that is found by itself must not mean nothing unnoticed.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        weights = (content.metadata() or {}).get("model_weights")
    if weights not in (None, model.weights_digest) and weights != model.files_digest:
        raise KvatlasError(
            f"The file {str(file)!r} was made with other weights than those of the model {model.name!r}; make it anew, "
            f"or name it with the parameter {parameter} to use it all the same."
        )
