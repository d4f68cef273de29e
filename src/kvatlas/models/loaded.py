"""A model that a program has loaded already, as the engine sees it: nothing is read or loaded a second time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError
from kvatlas.models.folder import ModelHandle
from kvatlas.models.options import Options
from kvatlas.models.weights import check_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Loaded(ModelHandle):
    weights: PreTrainedModel | None = None

    def load(self) -> PreTrainedModel:
        assert self.weights is not None
        return self.weights


def loaded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, stops: frozenset[int], **options: Any
) -> ModelHandle:
    """The model whose weights `model` holds, `stops` being the tokens that end a trace.

    Without `tokenizer` it is read from where the weights came from. KvatlasError where that is no folder and no
    repository in the cache (a policy has to know how thinking ends), and for weights on several devices.
    """
    name = str(model.config.name_or_path)
    check_whole(name, model)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        folder = _cached(name) or folder
    handle = _Loaded(name, folder, Options.of({**options, "device": str(model.device)}), weights=model)
    known = {"config": model.config.get_text_config().to_dict(), "stops": stops, "dtype": _name(model.dtype)}
    if tokenizer is not None:
        known["tokenizer"] = tokenizer
    elif not (folder / "tokenizer_config.json").is_file():
        raise KvatlasError(f"The model {name!r} was not loaded from a folder: its tokenizer has to be given.")
    vars(handle).update(known)
    handle.check_type()
    return handle


def _cached(name: str) -> Path | None:
    """The folder of a hub repository in the cache, from which transformers has loaded it."""
    from kvatlas.hub import Repository, is_id

    return Repository(name).cached() if is_id(name) else None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
