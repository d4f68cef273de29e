"""The rotation of a model's queries and keys by their positions (RoPE), for code that turns them anew."""

import json
from functools import lru_cache
from typing import Any

from torch import Tensor

from kvatlas.core import KvatlasError
from kvatlas.models.files import STEADY
from kvatlas.models.handle import ModelHandle


def frequencies(model: ModelHandle, device: str = "cpu") -> Tensor:
    """Return the angles [head size / 2] by which a step of one position turns the planes of a head.

    A plane has the channels i and i + head size / 2. Raises KvatlasError for models whose rotation depends on the
    length, differs between layers or covers only a part of each head.
    """
    found = _frequencies(json.dumps(model.config), device)
    if found is None or 2 * len(found) != model.shape.head_dim:
        raise KvatlasError(
            f"The rotation of positions in {model.name!r} is not the same for all lengths, layers and channels; "
            "expected such a model."
        )
    return found


def turn_back(key: Tensor, places: Tensor, frequency: Tensor) -> Tensor:
    """Return keys [KV heads, tokens, size] at positions [KV heads or 1, tokens] without their rotation."""
    import torch

    angle = -places[..., None] * frequency
    planes = torch.complex(*key.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([planes.real, planes.imag], -1).float()


@lru_cache(maxsize=8)
def _frequencies(config_text: str, device: str) -> Tensor | None:
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = json.loads(config_text)
    config: Any = AutoConfig.for_model(**values).get_text_config(decoder=True)
    rotation = getattr(config, "rope_parameters", None) or {}
    kind = rotation.get("rope_type")
    if kind not in STEADY:
        return None
    if kind in ROPE_INIT_FUNCTIONS:
        frequency: Tensor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
        return frequency.double().to(device)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(size * rotation.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, turned, 2, dtype=torch.float64) / turned
    frequency = rotation["rope_theta"] ** -exponents
    return frequency.to(device)
