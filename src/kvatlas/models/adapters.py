"""LoRA adapters, added to the weights of a model once it is loaded: a folder as peft writes it.

`adapter_config.json` and `adapter_model.safetensors`; a `chat_template.jinja` beside them takes the place of the
model's own. W + s B A with s = lora_alpha / r (Hu et al. 2021, arXiv 2106.09685, section 4.1), or lora_alpha / sqrt(r)
with `use_rslora` (arXiv 2312.03732).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError
from kvatlas.models.weights import check_finite, sha256, tensors_digest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FILES = ("adapter_config.json", "adapter_model.safetensors")
TEMPLATE = "chat_template.jinja"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(\.default)?\.weight")
#: What changes what an adapter computes, with the values that the formula above covers.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
}


@dataclass(frozen=True)
class Adapter:
    """The adapter in a folder, or none for ""."""

    address: str

    @property
    def folder(self) -> Path:
        return Path(self.address).expanduser()

    def digests(self) -> dict[str, str]:
        """SHA-256 of its files by name."""
        return {name: sha256(self.folder / name) for name in FILES} if self.address else {}

    def content(self) -> list[Any]:
        """What it adds: scale and tensors, whatever else its files say."""
        return [*self._terms(), tensors_digest([self.folder / FILES[1]])] if self.address else []

    @property
    def templates(self) -> dict[str, Path]:
        """Its chat template by the file's name, if it has one."""
        path = self.folder / TEMPLATE
        return {TEMPLATE: path} if self.address and path.is_file() else {}

    def scale(self) -> float:
        """The factor s."""
        return self._terms()[1]

    def _terms(self) -> tuple[int, float]:
        """Rank and factor; KvatlasError says what is missing, or what of it is more than the formula."""
        missing = [name for name in FILES if not (self.folder / name).is_file()]
        if missing:
            raise KvatlasError(f"The adapter {self.address!r} lacks {missing[0]}; valid are folders of LoRA adapters.")
        try:
            config: dict[str, Any] = dict(json.loads((self.folder / FILES[0]).read_text()).items())
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise KvatlasError(f"The adapter {self.address!r} has no readable {FILES[0]} ({error}).") from error
        for name, valid in _PLAIN.items():
            if config.get(name, valid[0]) not in valid:
                raise KvatlasError(f"The adapter {self.address!r} has {name} {config[name]!r}; valid is {valid[0]!r}.")
        if rank < 1:
            raise KvatlasError(f"The adapter {self.address!r} has r {rank}; valid are ranks from 1.")
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def check(self) -> None:
        """Raise KvatlasError for all that can be known to fail before the weights are read."""
        if self.address:
            self._terms()

    def merge(self, name: str, model: PreTrainedModel) -> None:
        """Add it to the weights of the model `name`; KvatlasError where it is one of another model."""
        if not self.address:
            return
        (rank, factor), weights = self._terms(), model.state_dict()
        for layer, a, b in self._pairs():
            weight = weights.get(f"{layer}.weight")
            if weight is None or tuple(b.shape) != (weight.shape[0], rank) or tuple(a.shape) != (rank, weight.shape[1]):
                sizes = f"{tuple(b.shape)} and {tuple(a.shape)} with r {rank}"
                raise KvatlasError(f"The adapter {self.address!r} does not fit the model {name!r}: {layer!r}, {sizes}.")
            weight.copy_(weight.float() + factor * (b @ a).to(weight.device))
        check_finite(name, model)

    def _pairs(self) -> list[tuple[str, Tensor, Tensor]]:
        """(layer, A, B), in single precision."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(self.folder / FILES[1])
        except (OSError, SafetensorError) as error:
            raise KvatlasError(f"The adapter {self.address!r} has no readable {FILES[1]} ({error}).") from error
        pairs: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            matched = _KEY.fullmatch(key)
            if matched is None:
                raise KvatlasError(f"The adapter {self.address!r} holds {key!r}; valid are pairs of lora_A and lora_B.")
            pairs.setdefault(matched[1], {})[matched[2]] = tensor.float()
        whole = [(layer, pair["A"], pair["B"]) for layer, pair in pairs.items() if len(pair) == 2]
        if not whole or len(whole) < len(pairs):
            raise KvatlasError(f"The adapter {self.address!r} has no pairs of lora_A and lora_B, or half ones.")
        return whole
