"""Models by name: `embedded:NAME` ships with the package, `hf:FOLDER` is a local Hugging Face folder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvatlas.core import KvatlasError
from kvatlas.models.folder import Model, Shape

_EMBEDDED = Path(str(files("kvatlas.models") / "embedded"))


def embedded() -> list[str]:
    """Names of the models that ship with the package, with their prefix."""
    return [f"embedded:{path.parent.name}" for path in sorted(_EMBEDDED.glob("*/config.json"))]


def find(name: str) -> Model:
    """The model of that name, its weights not yet loaded; KvatlasError says what would be valid."""
    kind, _, rest = name.partition(":")
    if kind == "embedded" and name in embedded():
        return Model(name, _EMBEDDED / rest)
    if kind == "hf" and rest:
        folder = Path(rest).expanduser()
        if not (folder / "config.json").is_file():
            raise KvatlasError(f"The model {name!r} is not there: {rest!r} is no folder with a config.json.")
        return Model(name, folder)
    raise KvatlasError(f"Unknown model {name!r}; valid are {', '.join(embedded())} and hf:FOLDER.")


__all__ = ["Model", "Shape", "embedded", "find"]
