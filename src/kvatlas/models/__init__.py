"""Models by name: `embedded:NAME` ships with the package, `smollm2-135m` comes with another one (and thinks with the
adapter that ships with this one: `smollm2-135m-think`), `hf:FOLDER` is a folder, `hf:FILE.gguf` a file, `hf:OWNER/NAME`
is on the hub."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.hub import Repository, is_id
from kvatlas.models import gguf
from kvatlas.models.handle import SMALL_FILES, ModelHandle, Shape
from kvatlas.models.options import Options

#: Where the models of the package are, and its adapters, by the name of the model with them.
EMBEDDED = Path(str(files("kvatlas.models") / "embedded"))
ADAPTERS = EMBEDDED.with_name("thinking_adapters")


def embedded() -> list[str]:
    """Names of the models that ship with the package, with their prefix."""
    return [f"embedded:{path.parent.name}" for path in sorted(EMBEDDED.glob("*/config.json"))]


def find(model: str, name: str = "", **options: Any) -> ModelHandle:
    """The model of that address, called `name` (else like its address), its weights not yet loaded.

    `options` are those of `Options`. A local folder goes before a hub id of the same text; of a model on the hub the
    small files are fetched unless they are cached. KvatlasError says what would be valid.
    """
    chosen = Options.of(options)
    kind, _, rest = model.partition(":")
    if kind == "embedded" and model in embedded():
        # Its default is the CPU everywhere: it is small, and its published figures were made there.
        chosen = chosen if chosen.device != "auto" else replace(chosen, device="cpu")
        return ModelHandle(name or model, EMBEDDED / rest, chosen)
    if model in gguf.PACKAGED:
        if (ADAPTERS / model).is_dir():
            chosen = replace(chosen, adapter=chosen.adapter or str(ADAPTERS / model))
        return ModelHandle(name or model, gguf.converted(gguf.packaged(model), chosen.cache), chosen)
    if kind == "hf" and rest:
        folder = Path(rest).expanduser()
        if rest.endswith(".gguf"):
            return ModelHandle(name or model, gguf.converted(folder, chosen.cache), chosen)
        if (folder / "config.json").is_file():
            return ModelHandle(name or model, folder, chosen)
        if not folder.exists() and is_id(rest):
            return _on_hub(Repository(rest, revision=chosen.revision, cache=chosen.cache), name or model, chosen)
        raise KvatlasError(f"The model {model!r} is not there: {rest!r} is no folder with a config.json.")
    named = ", ".join((*embedded(), *gguf.PACKAGED))
    raise KvatlasError(f"Unknown model {model!r}; expected {named}, hf:FOLDER, hf:FILE.gguf and hf:OWNER/NAME.")


def _on_hub(repository: Repository, name: str, options: Options) -> ModelHandle:
    folder = repository.cached()
    if folder is None or not all((folder / file).is_file() for file in ("config.json", "tokenizer_config.json")):
        folder = repository.folder(SMALL_FILES)
    if not (folder / "config.json").is_file():
        raise KvatlasError(f"The {repository} holds no config.json.")
    return ModelHandle(name, folder, options, repository)


__all__ = ["EMBEDDED", "ModelHandle", "Options", "Shape", "embedded", "find"]
