"""What the DynTS head learns from: how much the answer attends to each thinking token of a correct full-cache trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvatlas.core import Trace
from kvatlas.models import Model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Examples:
    """Thinking tokens of many traces: `hidden` [tokens, hidden size], `label` [tokens], `trace` number [tokens]."""

    hidden: Tensor
    label: Tensor
    trace: Tensor


@torch.inference_mode()
def answer_attention(network: PreTrainedModel, tokens: list[int], answer_start: int) -> tuple[Tensor, Tensor]:
    """Mean attention [answer_start] that the tokens from `answer_start` on pay to each earlier one, and the last hidden
    states [answer_start, hidden size] of those.

    Mean over layers, heads and answer tokens (arXiv 2601.18383, section 3). Only the answer's rows of the attention
    matrix are ever computed: the text before it goes through the model with a kernel that keeps none.
    """
    from transformers import DynamicCache

    device = network.device
    cache = DynamicCache(config=network.config)
    positions = torch.arange(len(tokens), device=device)[None]
    ids = torch.tensor([tokens], device=device)
    network.set_attn_implementation("sdpa")
    before = network.get_decoder()(
        input_ids=ids[:, :answer_start], position_ids=positions[:, :answer_start], past_key_values=cache, use_cache=True
    )
    network.set_attn_implementation("eager")
    after = network.get_decoder()(
        input_ids=ids[:, answer_start:],
        position_ids=positions[:, answer_start:],
        past_key_values=cache,
        use_cache=True,
        output_attentions=True,
    )
    total = torch.stack([layer[0].mean(dim=(0, 1)) for layer in after.attentions]).mean(0)
    return total[:answer_start], before.last_hidden_state[0]


def examples(model: Model, network: PreTrainedModel, traces: Iterable[tuple[tuple[int, ...], Trace]]) -> Examples:
    """Labels and hidden states of the thinking tokens of correct full-cache traces, each given with its prompt's ids.

    The label is attention times the number of thinking tokens, so that traces of unlike length share one scale.
    """
    hidden, labels, numbers = [], [], []
    for number, (prompt, trace) in enumerate(traces):
        tokens = list(prompt + trace.tokens)
        split = model.split(tokens)
        assert split is not None
        close, _ = split
        attention, states = answer_attention(network, tokens, close + 1)
        thinking = slice(len(prompt), close)
        labels.append(attention[thinking] * (close - len(prompt)))
        hidden.append(states[thinking])
        numbers.append(torch.full((close - len(prompt),), number))
    return Examples(torch.cat(hidden), torch.cat(labels), torch.cat(numbers))
