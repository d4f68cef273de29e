"""The biases of a model's keys: known numbers, which packed keys need not hold.

The keys of the Qwen2 family have biases that are far larger than the rest of a key. A bias is rotated with the position
of its token, so it is known for each position: packed keys are stored without it (`storage.PackedRows`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvatlas.forward import attention_function, own_attention
from kvatlas.machine import out_of_memory

#: The table of angles grows by so many positions.
STEP = 1024
#: Positions at which the keys of a model are compared with rotated biases, and their largest relative distance.
PROBED = (0, 1, 37, 1000)
ROUNDING = 1e-3


class KeyBiases:
    """The key biases [KV heads, size] of each cached layer, and their rotation.

    `rotary` is the model's module that gives cosines and sines of positions.
    """

    def __init__(self, layers: Sequence[Tensor], rotary: Any) -> None:
        self.layers = layers
        self.rotary = rotary
        self._angles = layers[0].new_empty(0, layers[0].shape[1])

    def angles(self, positions: int) -> Tensor:
        """Return the angles of at least so many positions: cosines of the first half of the channels, then sines."""
        if positions > len(self._angles):
            device = self._angles.device
            rows = -(-positions // STEP) * STEP
            cos, sin = self.rotary(self._angles, position_ids=torch.arange(rows, device=device)[None])
            half = self._angles.shape[1] // 2
            self._angles = torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).float().contiguous()
        return self._angles

    def rotated(self, layer: int, positions: Tensor) -> Tensor:
        """Return the biases [KV heads, ..., size] of a layer at these positions [KV heads or 1, ...]."""
        # Slots without a token hold any position.
        angles = self._angles[positions.long().clamp(0, len(self._angles) - 1)]
        biases = self.layers[layer].view(len(self.layers[layer]), *[1] * (positions.dim() - 1), -1)
        cos, sin = angles.chunk(2, -1)
        low, high = biases.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@torch.inference_mode()
def find_key_biases(model: PreTrainedModel, layers: Sequence[int]) -> KeyBiases | None:
    """Return the key biases of the layers with these numbers; None without biases, or for an unknown rotation."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    projecting = (module for module in model.modules() if hasattr(module, "k_proj"))
    attentions = {getattr(module, "layer_idx", None): module for module in projecting}
    if rotary is None or not all(layer in attentions for layer in layers):
        return None

    try:
        found = [_keys_of_nothing(model, attentions[layer], rotary) for layer in layers]
        biases = KeyBiases([keys[:, 0].contiguous() for keys in found], rotary)
        biases.angles(max(PROBED) + 1)
        positions = torch.tensor([PROBED], device=found[0].device)
        expected = [biases.rotated(place, positions) for place in range(len(layers))]
    except Exception as error:
        # The engine halves its batch when memory runs out.
        if out_of_memory(error):
            raise
        # Another interface of attention or of the rotation.
        return None
    same = all(torch.dist(keys, theirs) <= ROUNDING * keys.norm() for keys, theirs in zip(found, expected, strict=True))
    return biases if same and any(keys.any() for keys in found) else None


def _keys_of_nothing(model: PreTrainedModel, attention: Any, rotary: Any) -> Tensor:
    """Return the keys [KV heads, positions, size] of a layer of attention at `PROBED` for an input of zeros."""
    keys: list[Tensor] = []

    def record(_module: object, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        keys.append(key[0].float())
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    weight = next(model.parameters())
    hidden = model.config.get_text_config().hidden_size
    nothing = torch.zeros(1, len(PROBED), hidden, device=weight.device, dtype=weight.dtype)
    positions = torch.tensor([PROBED], device=weight.device)
    with own_attention(model), attention_function(record):
        attention(hidden_states=nothing, position_embeddings=rotary(nothing, positions), attention_mask=None)
    (found,) = keys
    return found
