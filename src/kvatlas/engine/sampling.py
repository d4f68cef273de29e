"""Drawing the next token: temperature, then top-k, then top-p, then the Gumbel maximum with shared noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvatlas.noise import gumbel

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.core import Sampling
    from kvatlas.engine.rows import Row

#: Draws count as near ties if they differ by less than so many roundings of the largest logit.
TIE = 4


def draw(logits: Tensor, sampling: Sampling, streams: Tensor, positions: Tensor) -> Tensor:
    """Next tokens [rows] from logits [rows, vocabulary].

    The noise of a token depends on its row's `streams` entry, on the position [rows] that it will have and on its id
    alone, so that rows with equal logits and streams draw equal tokens (common random numbers). The Gumbel maximum
    draws from the softmax exactly: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores, tokens = _scores(logits, sampling, streams, positions)
    best = scores.argmax(-1, keepdim=True)
    return tokens.gather(-1, best).squeeze(-1)


def draw_rows(logits: Tensor, rows: Sequence[Row[Any]], positions: Sequence[int]) -> list[int]:
    """The next token of each row from its logits [rows, vocabulary], adjusted as its request says, by its sampling."""
    for index, row in enumerate(rows):
        if row.request.adjust is not None:
            logits[index] = row.request.adjust([*row.request.prompt, *row.tokens], logits[index])
    return each(draw, logits, rows, positions)


def each(ask: Callable[..., Tensor], logits: Tensor, rows: Sequence[Row[Any]], positions: Sequence[int]) -> list[int]:
    """What `draw` or `near_ties` say of each row, by its own sampling."""
    numbers = [0] * len(rows)
    for sampling in dict.fromkeys(row.sampling for row in rows):
        own = [index for index, row in enumerate(rows) if row.sampling == sampling]
        keys = [(rows[index].request.stream, positions[index]) for index in own]
        streams, places = torch.tensor(keys, device=logits.device).unbind(1)
        found = ask(logits if len(own) == len(rows) else logits[own], sampling, streams, places)
        for index, number in zip(own, found.tolist(), strict=True):
            numbers[index] = int(number)
    return numbers


def near_ties(logits: Tensor, sampling: Sampling, streams: Tensor, positions: Tensor) -> Tensor:
    """Which of these draws [rows] other roundings of the logits might turn: the runner-up is nearer than `TIE`."""
    scores = logits.double() if sampling.temperature == 0 else _scores(logits, sampling, streams, positions)[0]
    largest = logits.double().abs().amax(-1) / (sampling.temperature or 1)
    if scores.shape[-1] < 2:
        return torch.zeros_like(positions, dtype=torch.bool)
    first, second = scores.topk(2, dim=-1).values.unbind(-1)
    return first - second < TIE * torch.finfo(logits.dtype).eps * largest


def _scores(logits: Tensor, sampling: Sampling, streams: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled logits with noise [rows, candidates], -inf for those that were cut, and the candidates' token ids."""
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
    return scaled + noise, tokens
