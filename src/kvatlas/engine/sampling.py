"""Drawing the next token: temperature, then top-k, then top-p, then the Gumbel maximum with shared noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvatlas.noise import gumbel

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.core import Sampling


def draw(logits: Tensor, sampling: Sampling, streams: Tensor, positions: Tensor) -> Tensor:
    """Next tokens [rows] from logits [rows, vocabulary].

    The noise of a token depends on its row's `streams` entry, on the position [rows] that it will have and on its id
    alone, so that rows with equal logits and streams draw equal tokens (common random numbers). The Gumbel maximum
    draws from the softmax exactly: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scaled = logits.double() / sampling.temperature
    size = scaled.shape[-1]
    cutting = 0 < sampling.top_k < size or sampling.top_p < 1
    top = min(sampling.top_k, size) if sampling.top_k > 0 else size
    if cutting:
        scaled, tokens = scaled.topk(top, dim=-1)
    else:
        tokens = torch.arange(size, device=logits.device).expand_as(scaled)
    if sampling.top_p < 1:
        shares = scaled.softmax(-1)
        # A token stays while the likelier ones before it have not yet reached top_p; the likeliest always stays.
        scaled = scaled.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, float("-inf"))
    noise = gumbel(streams[:, None], positions[:, None], tokens)
    best = (scaled + noise).argmax(-1, keepdim=True)
    return tokens.gather(-1, best).squeeze(-1)
