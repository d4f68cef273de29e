"""What the DynTS head learns from: how much the answer attends to each thinking token of a correct full-cache trace.

A trace goes through the model once, with an attention function that computes what every layer needs in blocks of
queries and, for the queries of the answer alone, adds up the weights. The matrix of all tokens by all tokens never
exists, so that memory grows with the length of a trace and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from kvatlas.core import Trace
from kvatlas.engine.attention import refuse_unsupported
from kvatlas.models import ModelHandle
from kvatlas.models.attention import attention_function, own_attention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

#: Why traces are left out: thinking never ended; no answer that could be read; a wrong one; no thinking token.
REASONS = ("no_closing_tag", "no_answer", "wrong", "no_thinking")
#: Queries whose attention is computed together, and answer tokens whose weights are held at a time.
BLOCK, ROWS = 256, 32


@dataclass(frozen=True)
class Examples:
    """Thinking tokens of many traces: `hidden` [tokens, hidden size], `label` [tokens], `trace` number [tokens].

    `thinking` [traces] is how many thinking tokens each trace has; None where all of them are here.
    """

    hidden: Tensor
    label: Tensor
    trace: Tensor
    thinking: Tensor | None = None

    @property
    def attention(self) -> Tensor:
        """The mean attention that the answer pays to each token [tokens]: the label without its scale."""
        thinking = torch.bincount(self.trace) if self.thinking is None else self.thinking
        return self.label / thinking[self.trace]


@dataclass
class _Watch:
    """Collects the attention that tokens from `start` on pay to those before, summed over layers [start]."""

    start: int
    total: Tensor
    layers: int = 0


@torch.inference_mode()
def answer_attention(model: PreTrainedModel, tokens: list[int], answer_start: int) -> tuple[Tensor, Tensor]:
    """Mean attention [answer_start] that the tokens from `answer_start` on pay to each earlier one, and the last hidden
    states [answer_start, hidden size] of those.

    Mean over layers, heads and answer tokens (arXiv 2601.18383, section 3), in float32.
    """
    device = model.device
    watch = _Watch(answer_start, torch.zeros(answer_start, device=device))
    with own_attention(model), attention_function(partial(_attend, watch=watch)):
        output = model.get_decoder()(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.arange(len(tokens), device=device)[None],
            use_cache=False,
        )
    return watch.total / watch.layers, output.last_hidden_state[0, :answer_start]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    watch: _Watch,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    refuse_unsupported(others)
    _, heads, length, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    # The query heads that share a KV head stand one after another: keys are never copied for each of them.
    grouped = query.view(kv_heads, groups, length, size)
    positions = torch.arange(length, device=query.device)
    out = torch.empty_like(grouped)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        back = positions[start:stop, None] - positions[:stop]
        near = (back >= 0) & (back < (sliding_window or length))
        block = F.scaled_dot_product_attention(
            grouped[:, :, start:stop].reshape(1, kv_heads, -1, size),
            key[:, :, :stop],
            value[:, :, :stop],
            attn_mask=near.repeat(groups, 1),
            scale=scaling,
        )
        out[:, :, start:stop] = block.view(kv_heads, groups, stop - start, size)
    _watch(watch, grouped, key[0], scaling, sliding_window or length)
    return out.view(1, heads, length, size).transpose(1, 2), None


def _watch(watch: _Watch, query: Tensor, key: Tensor, scaling: float, window: int) -> None:
    """Add this layer's weights. query [KV heads, groups, tokens, size], key [KV heads, tokens, size]."""
    kv_heads, groups, length, _ = query.shape
    keys = key.float().transpose(-1, -2)
    positions = torch.arange(length, device=query.device)
    share = 1.0 / (kv_heads * groups * (length - watch.start))
    for first in range(watch.start, length, ROWS):
        rows = slice(first, min(first + ROWS, length))
        part = query[:, :, rows].float().reshape(kv_heads, -1, query.shape[-1])
        back = positions[rows, None] - positions
        hidden = ((back < 0) | (back >= window)).repeat(groups, 1)
        weights = (part @ keys * scaling).masked_fill_(hidden, float("-inf")).softmax(-1)
        watch.total += weights[..., : watch.start].sum((0, 1)) * share
    watch.layers += 1


def left_out(model: ModelHandle, trace: Trace) -> str:
    """Why a predictor does not learn from a full-cache trace, one of `REASONS`; empty where it does."""
    split = model.split(trace.tokens)
    if split is None:
        return "no_closing_tag"
    end, start = split
    if start == len(trace.tokens) or not trace.grade.status.answered:
        return "no_answer"
    if not trace.grade.correct:
        return "wrong"
    return "" if end else "no_thinking"


def label_trace(
    handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> tuple[Tensor, Tensor] | None:
    """Hidden states and labels of a trace's thinking tokens; None where it has no thinking or no answer.

    The label is attention times the number of thinking tokens, so that traces of unlike length share one scale.
    """
    split = handle.split(tokens)
    if split is None or split[0] == 0 or split[1] == len(tokens):
        return None
    end, start = split
    attention, states = answer_attention(model, [*prompt, *tokens], len(prompt) + start)
    thinking = slice(len(prompt), len(prompt) + end)
    return states[thinking], attention[thinking] * end


def examples(handle: ModelHandle, model: PreTrainedModel, traces: Iterable[tuple[tuple[int, ...], Trace]]) -> Examples:
    """Labels and hidden states of all thinking tokens of correct full-cache traces, each with its prompt's ids."""
    labelled = [label_trace(handle, model, prompt, trace.tokens) for prompt, trace in traces]
    return join([part for part in labelled if part is not None])


def join(parts: list[tuple[Tensor, Tensor]]) -> Examples:
    """The tokens of traces, one after another, as (hidden states, labels) of each."""
    if not parts:
        return Examples(torch.zeros(0, 0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    numbers = [torch.full((len(label),), number) for number, (_, label) in enumerate(parts)]
    return Examples(
        torch.cat([hidden for hidden, _ in parts]), torch.cat([label for _, label in parts]), torch.cat(numbers)
    )
