"""`dynts`: tokens that a small learned head finds important for the answer stay (Dynamic Thinking-Token Selection)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvatlas.core import KvatlasError
from kvatlas.policies.base import Cached, Selection, Signal, Step, check_made_with

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import Model

#: Name of the head's file in a model folder, where `predictor` looks when it is empty.
HEAD_FILE = "dynts.safetensors"


@dataclass(frozen=True)
class DynTS(Selection):
    """Learned importance: score(t) = head(last hidden state of t), arXiv 2601.18383, section 4.

    The head is an MLP (hidden -> 2 * hidden -> hidden / 2 -> 1, softplus) trained to predict the attention that the
    answer will pay to the token; `kvatlas.predictor` trains it. Without a local window, as one ablation has it, is
    `local_window: 1`: the newest token always stays.

    predictor: safetensors file of the head; empty for the one in the model's folder.
    """

    predictor: str = ""

    name = "dynts"
    summary = "keeps the tokens that a learned head finds important for the answer"
    paper = "Dynamic Thinking-Token Selection, arXiv 2601.18383"
    published: ClassVar[Mapping[str, str]] = {
        "kv_budget": "5000 (3000 for MATH500 and GAOKAO2023EN)",
        "local_window": "500 to 3000",
        "ratio": "0.1 to 0.5",
    }
    observes = frozenset({Signal.HIDDEN})
    columns = ("importance",)

    @cached_property
    def observer(self) -> tuple[Any, ...]:
        # The ablations see the same as DynTS itself.
        return (DynTS.name, self.predictor)

    def file(self, model: Model) -> Path:
        """Where the head is."""
        return Path(self.predictor).expanduser() if self.predictor else model.folder / HEAD_FILE

    def check(self, model: Model) -> None:
        file = self.file(model)
        if not file.is_file():
            raise KvatlasError(
                f"The policy 'dynts' needs a trained predictor for the model {model.name!r}: there is no file "
                f"{str(file)!r}; name one with the parameter predictor."
            )
        width = load_head(str(file))["0.weight"].shape[1]
        if width != model.shape.hidden:
            raise KvatlasError(
                f"The predictor {str(file)!r} is for a hidden size of {width}, the model {model.name!r} has "
                f"{model.shape.hidden}."
            )
        if not self.predictor:
            check_made_with(file, model, "predictor")

    def identity(self, model: Model) -> dict[str, Any]:
        content = hashlib.sha256(self.file(model).read_bytes()).hexdigest()
        return {**super().identity(model), "head": content}

    def observe(self, step: Step) -> None:
        assert step.hidden is not None
        step.enter(
            "importance", importance(load_head(str(self.file(step.model)), str(step.hidden.device)), step.hidden)
        )

    def score(self, cached: Cached) -> Tensor:
        return cached.columns["importance"]


@lru_cache(maxsize=8)
def load_head(file: str, device: str = "cpu") -> dict[str, Tensor]:
    """Weights of the head, named like those of an `nn.Sequential` whose linear layers are 0, 2 and 4."""
    from safetensors.torch import load_file

    try:
        head = load_file(file, device=device)
        widths = [tuple(head[f"{layer}.weight"].shape) for layer in (0, 2, 4)]
    except Exception as error:
        raise KvatlasError(f"The predictor {file!r} cannot be read as a DynTS head ({error}).") from error
    if widths[0][0] != widths[1][1] or widths[1][0] != widths[2][1] or widths[2][0] != 1:
        raise KvatlasError(f"The predictor {file!r} is no DynTS head: its layers have the shapes {widths}.")
    return head


def importance(head: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Predicted importance [...] of tokens with last hidden states `hidden` [..., hidden size]."""
    from torch.nn import functional as F

    inner = hidden.to(head["0.weight"].dtype)
    for layer in (0, 2):
        inner = F.gelu(F.linear(inner, head[f"{layer}.weight"], head[f"{layer}.bias"]))
    return F.softplus(F.linear(inner, head["4.weight"], head["4.bias"])).squeeze(-1)
