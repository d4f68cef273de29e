"""Sampling the next token: temperature, then top-k, then top-p, then the Gumbel maximum with shared noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvatlas.engine.rows import Row
from kvatlas.noise import gumbel

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.core import Sampling


def sample(logits: Tensor, sampling: Sampling, streams: Tensor, positions: Tensor) -> Tensor:
    """Next tokens [rows] from logits [rows, vocabulary].

    The noise of a token depends on its row's `streams` entry, on the position [rows] that it will have and on its id
    alone, so that rows with equal logits and streams sample equal tokens (common random numbers). The Gumbel maximum
    samples from the softmax exactly: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    size = logits.shape[-1]
    top = min(sampling.top_k, size) if sampling.top_k > 0 else size
    if top < size or sampling.top_p < 1:
        # Before the division, which changes no order: a whole vocabulary in float64 takes longer than a small model.
        logits, tokens = logits.topk(top, dim=-1)
    else:
        tokens = torch.arange(size, device=logits.device).expand_as(logits)
    scaled = logits.double() / sampling.temperature
    if sampling.top_p < 1:
        shares = scaled.softmax(-1)
        # A token stays while the likelier ones before it have not yet reached top_p; the likeliest always stays.
        scaled = scaled.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, float("-inf"))
    noise = gumbel(streams[:, None], positions[:, None], tokens)
    best = (scaled + noise).argmax(-1, keepdim=True)
    return tokens.gather(-1, best).squeeze(-1)


def sample_rows(logits: Tensor, rows: Sequence[Row[Any]], positions: Sequence[int]) -> list[int]:
    """The next token of each row from its logits [rows, vocabulary], adjusted as its request says, by its sampling."""
    for index, row in enumerate(rows):
        if row.request.logits_processor is not None:
            logits[index] = row.request.logits_processor([*row.request.prompt, *row.tokens], logits[index])
    keys = torch.tensor([[row.request.stream for row in rows], list(positions)], device=logits.device)
    sampled = [0] * len(rows)
    for sampling in {id(row.sampling): row.sampling for row in rows}.values():
        own = [index for index, row in enumerate(rows) if row.sampling is sampling]
        whole = len(own) == len(rows)
        streams, places = keys if whole else keys[:, own]
        for index, token in zip(
            own, sample(logits if whole else logits[own], sampling, streams, places).tolist(), strict=True
        ):
            sampled[index] = token
    return sampled
