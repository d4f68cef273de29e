"""Passes over whole texts: the labels of the DynTS head, and the query statistics of `triattention`.

A text goes through the model once, with an attention function that computes every layer in blocks of queries and calls
an observer with its queries and keys. The matrix of all tokens by all tokens never exists, so that memory grows with
the length of a text and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.answers.reading import read_tokens
from kvatlas.core import KvatlasError, Trace
from kvatlas.engine.cache import Layer
from kvatlas.forward import attention_function, own_attention
from kvatlas.models import ModelHandle
from kvatlas.models.files import STEADY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Reasons to exclude traces: thinking without an end; no readable answer; a wrong answer; no thinking token.
REASONS = ("no_closing_tag", "no_answer", "wrong", "no_thinking")
#: Queries in a block of attention.
BLOCK = 256
#: Answer tokens whose weights are in memory at a time.
ROWS = 32


@dataclass(frozen=True)
class Examples:
    """Thinking tokens of many traces: `hidden` [tokens, hidden size], `label` [tokens], `trace` number [tokens].

    `thinking` [traces] is the number of thinking tokens of each trace; None if `hidden` holds all of them.
    """

    hidden: Tensor
    label: Tensor
    trace: Tensor
    thinking: Tensor | None = None

    @property
    def attention(self) -> Tensor:
        """The mean attention of the answer to each token [tokens]: the label without its scale."""
        thinking = torch.bincount(self.trace) if self.thinking is None else self.thinking
        return self.label / thinking[self.trace]


#: Gets a layer, its queries [heads, tokens, size], keys and values [KV heads, tokens, size].
Observer = Callable[[Layer, Tensor, Tensor, Tensor], None]


def read_text(model: PreTrainedModel, tokens: Sequence[int], observe: Observer) -> Tensor:
    """Read a text and return its last hidden states [tokens, hidden size]."""
    device = model.device
    with own_attention(model), attention_function(partial(_attend, observe=observe)):
        output = model.get_decoder()(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=torch.arange(len(tokens), device=device)[None],
            use_cache=False,
        )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def _attend(
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
        heads, length, size = query.shape
        groups = heads // len(key)
        query = query.view(len(key), groups, length, size)
        keys = key.float().transpose(-1, -2)
        positions = torch.arange(length, device=query.device)
        share = 1.0 / (heads * (length - answer_start))
        for first in range(answer_start, length, ROWS):
            rows = slice(first, min(first + ROWS, length))
            chunk = query[:, :, rows].float().reshape(len(key), -1, size)
            back = positions[rows, None] - positions
            visible = (back >= 0) & (back < (layer.window or length))
            scores = (chunk @ keys * layer.scaling).view(len(key), groups, -1, length)
            total.add_(layer.weights(scores, visible)[..., :answer_start].sum((0, 1, 2)) * share)
        layers += 1

    states = read_text(model, tokens, observe)
    return total / layers, states[:answer_start]


@torch.inference_mode()
def query_statistics(
    handle: ModelHandle, model: PreTrainedModel, texts: Iterable[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return center (complex, by parts) and norm [layers, heads, planes] of the queries before rotation, as means over
    all tokens of `texts` (token ids), and the rotation's frequency [planes].

    Source: TriAttention, arXiv 2604.04921, section 4 and the authors' calibration. Raises KvatlasError for models whose
    rotation depends on the length or covers only a part of each head.
    """
    rotary: Any = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", None) not in STEADY:
        raise KvatlasError(f"The model {handle.name!r} cannot be calibrated: its rotation of positions is not steady.")
    frequency = rotary.inv_freq.double()
    shape = handle.shape
    planes = len(frequency)
    if 2 * planes != shape.head_dim:
        raise KvatlasError(
            f"The model {handle.name!r} cannot be calibrated: it rotates {2 * planes} of {shape.head_dim}."
        )
    center = torch.zeros(shape.layers, shape.heads, planes, dtype=torch.complex128, device=model.device)
    norm = center.real.clone()

    def observe(layer: Layer, query: Tensor, *_: Any) -> None:
        place = shape.place[layer.place]
        angles = torch.arange(query.shape[1], device=query.device)[:, None] * frequency
        pairs = torch.complex(query[..., :planes].double(), query[..., planes:].double())
        pairs = pairs * torch.polar(torch.full_like(angles, 1 / rotary.attention_scaling), -angles)
        center[place] += pairs.sum(1)
        norm[place] += pairs.abs().sum(1)

    tokens = 0
    for text in texts:
        read_text(model, text, observe)
        tokens += len(text)
    if tokens == 0:
        raise KvatlasError("There is no text to calibrate on.")
    center = center / tokens
    norm = norm / tokens
    statistics = {"center_real": center.real, "center_imag": center.imag, "norm": norm, "frequency": frequency}
    return {name: value.float().contiguous().cpu() for name, value in statistics.items()}


def left_out(model: ModelHandle, trace: Trace) -> str:
    """Return the reason to exclude a full-cache trace from learning, one of `REASONS`; empty for a suitable one."""
    span = read_tokens(model, trace.tokens).span
    if span is None and model.thinking.close:
        return "no_closing_tag"
    has_answer = span is None or span[1] < len(trace.tokens)
    if not has_answer or not trace.grade.status.answered:
        return "no_answer"
    if not trace.grade.correct:
        return "wrong"
    has_thinking = span is not None and span[0] > 0
    return "" if has_thinking else "no_thinking"


def label_trace(
    handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> tuple[Tensor, Tensor] | None:
    """Return hidden states and labels of a trace's thinking tokens; None without thinking or answer.

    The label is attention times the number of thinking tokens, so that traces of all lengths share one scale.
    """
    span = read_tokens(handle, tokens).span
    if span is None or span[0] == 0 or span[1] == len(tokens):
        return None
    end, start = span
    attention, states = answer_attention(model, [*prompt, *tokens], len(prompt) + start)
    thinking = slice(len(prompt), len(prompt) + end)
    return states[thinking], attention[thinking] * end
