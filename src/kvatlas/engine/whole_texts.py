"""Passes of a model over whole texts: the attention that an answer pays to each earlier token, and its like.

A text goes through the model once, with an attention function that computes every layer in blocks of queries and calls
an observer with its queries and keys. The matrix of all tokens by all tokens never exists, so that memory grows with
the length of a text and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.engine.cache import Layer
from kvatlas.forward import attention_function, own_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Queries in a block of attention.
BLOCK = 256
#: Tokens whose weights are in memory at a time.
ROWS = 32

#: Gets a layer, its queries [heads, tokens, size], keys and values [KV heads, tokens, size].
Observer = Callable[[Layer, Tensor, Tensor, Tensor], None]


def run_whole_text(model: PreTrainedModel, tokens: Sequence[int], observe: Observer) -> Tensor:
    """Run the model over a text and return its last hidden states [tokens, hidden size]."""
    device = model.device
    with own_attention(model), attention_function(partial(_attend_in_blocks, observe=observe)):
        output = model.get_decoder()(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=torch.arange(len(tokens), device=device)[None],
            use_cache=False,
        )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def _attend_in_blocks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    scaling: float,
    observe: Observer,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    _, heads, length, size = query.shape
    kv_heads = key.shape[1]
    width = value.shape[3]
    groups = heads // kv_heads
    window = sliding_window or length
    layer = Layer(module.layer_idx, scaling, window, softcap, s_aux)
    # The query heads of a KV head stand one after another, so that keys need no copies.
    grouped = query.view(kv_heads, groups, length, size)
    positions = torch.arange(length, device=query.device)
    out = query.new_empty(kv_heads, groups, length, width)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        back = positions[start:stop, None] - positions[:stop]
        visible = (back >= 0) & (back < window)
        if softcap is None and s_aux is None:
            block = F.scaled_dot_product_attention(
                grouped[:, :, start:stop].reshape(1, kv_heads, -1, size),
                key[:, :, :stop],
                value[:, :, :stop],
                attn_mask=visible.repeat(groups, 1),
                scale=scaling,
            ).view(kv_heads, groups, stop - start, width)
        else:
            scores = grouped[:, :, start:stop] @ key[0, :, None, :stop].transpose(-1, -2) * scaling
            block = layer.weights(scores, visible) @ value[0, :, None, :stop]
        out[:, :, start:stop] = block
    observe(layer, query[0], key[0], value[0])
    return out.view(1, heads, length, width).transpose(1, 2), None


def attention_of(layer: Layer, query: Tensor, key: Tensor, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the weights of the tokens from `first` on, some tokens at a time, in float32.

    Query [heads, tokens, size], key [KV heads, tokens, size]. Weights [KV heads, query heads of each, some, tokens]
    come after the distances back to each token [some, tokens].
    """
    heads, length, size = query.shape
    grouped = query.view(len(key), heads // len(key), length, size)
    keys = key.float().transpose(-1, -2)
    positions = torch.arange(length, device=query.device)
    for start in range(first, length, ROWS):
        rows = slice(start, start + ROWS)
        back = positions[rows, None] - positions
        visible = (back >= 0) & (back < (layer.window or length))
        scores = grouped[:, :, rows].float().reshape(len(key), -1, size) @ keys * layer.scaling
        yield back, layer.weights(scores.view(*grouped.shape[:2], -1, length), visible)


@torch.inference_mode()
def answer_attention(model: PreTrainedModel, tokens: list[int], answer_start: int) -> tuple[Tensor, Tensor]:
    """Return the mean attention [answer_start] of the tokens from `answer_start` on to each earlier one, and the last
    hidden states [answer_start, hidden size] of these.

    The mean is over layers, heads and answer tokens (arXiv 2601.18383, section 3), in float32.
    """
    total = torch.zeros(answer_start, device=model.device)
    layers = 0

    def observe(layer: Layer, query: Tensor, key: Tensor, _value: Tensor) -> None:
        nonlocal layers
        share = 1.0 / (len(query) * (len(tokens) - answer_start))
        for _, weights in attention_of(layer, query, key, answer_start):
            total.add_(weights[..., :answer_start].sum((0, 1, 2)) * share)
        layers += 1

    states = run_whole_text(model, tokens, observe)
    return total / layers, states[:answer_start]
