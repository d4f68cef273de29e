"""Models by name: `hf:OWNER/NAME` is on the hub, `hf:FOLDER` a folder, `hf:FILE.gguf` a file, `embedded:NAME` ships
with the package, `smollm2-135m` comes in a package of the index (`smollm2-135m-think` adds our thinking adapter)."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, refuse_problem_file
from kvatlas.hub import Repository, is_id
from kvatlas.models import gguf
from kvatlas.models.files import ENDLESS, Overrides
from kvatlas.models.handle import SMALL_FILES, ModelHandle
from kvatlas.models.load_options import Options
from kvatlas.text import did_you_mean

#: The folder of the package's models, and that of its adapters, by the names of the models with them.
EMBEDDED = Path(str(resources.files("kvatlas.models") / "embedded"))
ADAPTERS = EMBEDDED.with_name("thinking_adapters")


def embedded() -> list[str]:
    """Return the names of the models that ship with the package, with their prefix."""
    return [f"embedded:{path.parent.name}" for path in sorted(EMBEDDED.glob("*/config.json"))]


def find(model: str, name: str = "", **options: Any) -> ModelHandle:
    """Return the model of an address, with the `name` (default: the address); its weights are not yet loaded.

    `options` are those of `Options`. A local folder comes before a hub id of the same text; the small files of a model
    on the hub are fetched unless they are cached. Raises KvatlasError for an unknown model.
    """
    chosen = Options.from_values(options)
    repository = None
    kind, _, address = model.partition(":")
    # A folder and a file need no prefix.
    if kind != "hf" and (model.endswith(".gguf") or Path(model).expanduser().is_dir()):
        kind = "hf"
        address = model

    if model in gguf.PACKAGED:
        adapter = ADAPTERS / model
        if adapter.is_dir() and not chosen.adapter:
            chosen = replace(chosen, adapter=str(adapter))
        folder = gguf.packaged_folder(model, chosen.cache, _reads_rows(chosen))
    elif kind == "hf" and address:
        folder, repository = _found_at(model, address, chosen)
    elif model in embedded():
        # Small models run on the CPU by default, as for their published figures.
        if chosen.device == "auto":
            chosen = replace(chosen, device="cpu")
        folder = EMBEDDED / address
    else:
        names = (*embedded(), *gguf.PACKAGED)
        refuse_problem_file(model, "a model", f"The model comes first, as in `kvatlas run {names[0]} {model}`.")
        if model.startswith((".", "/", "~")):
            raise KvatlasError(f"There is no folder {model!r}; expected a folder with a config.json, as models have.")
        # An address of the hub names a repository by its first two parts.
        repository_id = "/".join(re.sub("^(https?://)?(www[.])?(huggingface[.]co|hf[.]co)/", "", model).split("/")[:2])
        guess = f" Did you mean 'hf:{repository_id}'?" if is_id(repository_id) else did_you_mean(model, names)
        raise KvatlasError(
            f"Unknown model {model!r}; expected {', '.join(names)}, a folder, FILE.gguf or hf:OWNER/NAME (as "
            f"hf:Qwen/Qwen3-0.6B).{guess}"
        )

    if chosen.revision and repository is None:
        raise KvatlasError(
            f"The model option revision is {chosen.revision!r}, and {model!r} is in {str(folder)!r}; expected it for "
            "models of the hub alone."
        )
    return ModelHandle(name or model, folder, chosen, repository)


def _found_at(model: str, address: str, chosen: Options) -> tuple[Path, Repository | None]:
    """Return the folder of a GGUF file, of a folder, or else of a repository of the hub, with that repository."""
    folder = Path(address).expanduser()
    if address.endswith(".gguf"):
        return gguf.convert_gguf(folder, chosen.cache, _reads_rows(chosen)), None
    if (folder / "config.json").is_file():
        return folder, None
    if (folder / "adapter_config.json").is_file():
        raise KvatlasError(
            f"The model {model!r} is an adapter without its model; expected the model that it was trained for, with "
            f"--model-option adapter={address} (in a spec, {{model: NAME, adapter: {address}}})."
        )
    if (folder / "run.sqlite").is_file():
        raise KvatlasError(f"{address!r} is a run and no model; `kvatlas describe {address}` reads it.")
    if folder.exists() or not is_id(address):
        raise KvatlasError(
            f"The model {model!r} is not there: {address!r} is no folder with a config.json, as `hf download` makes, "
            "and no OWNER/NAME of the hub."
        )

    # Of a model on the hub the small files, which are fetched unless they are cached.
    repository = Repository(address, revision=chosen.revision, cache=chosen.cache)
    cached = repository.cached()
    if cached is None or not all((cached / file).is_file() for file in ("config.json", "tokenizer_config.json")):
        cached = repository.folder(SMALL_FILES)
    if not (cached / "config.json").is_file():
        raise KvatlasError(f"The {repository} holds no config.json.")
    return cached, repository


def _reads_rows(chosen: Options) -> bool:
    """Return True if a GGUF is read into int8 without its weights in float32, to which an adapter is added."""
    return chosen.weights == "int8" and not chosen.adapter


def available(entries: Iterable[str | Mapping[str, Any]]) -> dict[str, ModelHandle]:
    """Return the models of a spec's entries by name, without those that cannot be found here."""
    by_name = {}
    for entry in entries:
        with suppress(KvatlasError):
            model = find(entry) if isinstance(entry, str) else find(**entry)
            by_name[model.name] = model
    return by_name
