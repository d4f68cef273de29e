"""The labels of the DynTS head: the attention that the answer of a trace pays to its thinking tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvatlas.answers.reading import read_tokens
from kvatlas.core import Trace
from kvatlas.engine.whole_texts import answer_attention
from kvatlas.models import ModelHandle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Reasons to exclude traces: thinking without an end; no readable answer; a wrong answer; no thinking token.
REASONS = ("no_closing_tag", "no_answer", "wrong", "no_thinking")
_LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Examples:
    """Thinking tokens of many traces: `hidden` [tokens, hidden size], `label` [tokens], `trace` number [tokens]."""

    hidden: Tensor
    label: Tensor
    trace: Tensor

    @classmethod
    def joined(cls, traces: Sequence[tuple[Tensor, Tensor]]) -> Examples:
        """Return the hidden states and labels of traces, one after the other."""
        hidden, label = map(torch.cat, zip(*traces, strict=True))
        sizes = torch.tensor([len(of_trace) for _, of_trace in traces])
        return cls(hidden, label, torch.arange(len(sizes)).repeat_interleave(sizes))


def why_left_out(model: ModelHandle, trace: Trace) -> str:
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


def sample_tokens(hidden: Tensor, label: Tensor, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return hidden states and labels of `tokens` random tokens of a trace, in the order of the trace, on the CPU.

    All tokens are returned if `tokens` is 0 or more than there are.
    """
    if tokens and len(label) > tokens:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(label), generator=generator)[:tokens]
        in_order = chosen.sort().values.to(label.device)
        hidden = hidden[in_order]
        label = label[in_order]

    # In float16 larger values would be infinite.
    storable = hidden.float().clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
    return storable.cpu(), label.float().cpu()
