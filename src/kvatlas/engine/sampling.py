"""Sampling the next tokens: temperature, then top-k, then top-p, then the Gumbel maximum with shared noise."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvatlas.core import Sampling
from kvatlas.cpu.native import MOST_SAMPLED, load
from kvatlas.engine.rows import Row
from kvatlas.machine import compiled, compiles
from kvatlas.noise import gumbel, gumbel_in_torch

#: The places beside top_k that a step of fixed shapes has for equal logits.
TIES = 64
#: The sample of a row with more of them.
UNSAMPLED = -1
_compiled = cache(compiled)


def sample(
    logits: Tensor, sampling: Sampling, streams: Tensor, positions: Tensor, fixed_shapes: bool = False
) -> Tensor:
    """Return the next tokens [rows] from logits [rows, vocabulary].

    All logits that equal the last of the top_k stay, as in transformers. With `fixed_shapes`, for captured steps, a row
    in which more than `TIES` do is `UNSAMPLED`.

    The noise of a token depends on its row's entry in `streams`, its future position [rows] and its id alone, so that
    rows with equal logits and streams sample equal tokens (common random numbers). The Gumbel maximum samples from the
    softmax exactly: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)

    top_k = sampling.top_k
    kernels = load() if logits.is_cpu and logits.dtype is torch.float32 and logits.stride(-1) == 1 else None
    if kernels is not None and 0 < top_k <= MOST_SAMPLED and top_k < logits.shape[-1]:
        sampled = kernels.sample(logits, top_k, sampling.temperature, sampling.top_p, streams, positions)
        if sampled is not None:
            return sampled

    # Before the division, which keeps the order: a whole vocabulary in float64 takes longer than a small model.
    logits, tokens, unsampled = _top_candidates(logits, sampling, fixed_shapes)
    scaled = logits.double() / sampling.temperature
    if sampling.top_p < 1:
        shares = scaled.softmax(-1)
        # A token stays if the likelier ones before it do not reach top_p; the likeliest always stays.
        scaled = scaled.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, float("-inf"))

    # On a GPU one kernel instead of 190, and none of their tables of 64-bit numbers.
    noise_of = _compiled(gumbel_in_torch, dynamic=True) if tokens.is_cuda and compiles(tokens.device) else gumbel
    noise = noise_of(streams[:, None], positions[:, None], tokens)
    best = (scaled + noise).argmax(-1, keepdim=True)
    sampled = tokens.gather(-1, best).squeeze(-1)
    return sampled if unsampled is None else sampled.masked_fill(unsampled, UNSAMPLED)


def _top_candidates(logits: Tensor, sampling: Sampling, fixed_shapes: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logits and tokens [rows, candidates] that top_k leaves, in order if top_p is to cut them.

    The last item is a mask of the rows without room for all of them, or None.
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        return _likeliest(logits, sampling.top_k, fixed_shapes)
    if sampling.top_p < 1:
        return *logits.sort(dim=-1, descending=True, stable=True), None
    return logits, torch.arange(logits.shape[-1], device=logits.device).expand_as(logits), None


def _likeliest(logits: Tensor, top: int, fixed_shapes: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logits and tokens [rows, candidates] of the `top` likeliest and of all that equal the last of them.

    The likeliest come first, and of equal ones the lower token; other candidates have the logit -inf. With
    `fixed_shapes` also a mask of the rows without room for all equals.
    """
    ties = TIES
    if not fixed_shapes:
        # The usual case: the largest logits are all different.
        values, tokens = logits.topk(top + 1, dim=-1)
        if not (values[:, 1:] == values[:, :-1]).any():
            return values[:, :top], tokens[:, :top], None
        last = values[:, top - 1 : top]
        ties = int(_equal_to(last, logits).sum(-1).max())

    values, tokens = logits.topk(min(top + ties, logits.shape[-1]), dim=-1)
    last = values[:, top - 1 : top]
    # torch.topk leaves the order of equals open.
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    crowded = _equal_to(last, values[:, -1:]).any(-1) if values.shape[-1] < logits.shape[-1] else None
    return values.masked_fill(values < last, float("-inf")), tokens.gather(-1, order), crowded


def _equal_to(last: Tensor, logits: Tensor) -> Tensor:
    # Forbidden tokens have the logit -inf: they tie, and are never drawn.
    return (logits == last) & last.isfinite()


def sample_rows(logits: Tensor, rows: Sequence[Row[Any]], positions: Sequence[int]) -> list[int]:
    """Return the next token of each row from its logits [rows, vocabulary], by its request's processor and sampling."""
    for index, row in enumerate(rows):
        processor = row.request.logits_processor
        if processor is not None:
            # Its numbers are not rounded to a shorter type.
            logits = logits.float()
            logits[index] = processor([*row.request.prompt, *row.tokens], logits[index])

    # Streams and positions in one tensor: one copy to the device.
    keys = torch.tensor([[row.request.stream for row in rows], list(positions)], device=logits.device)
    samplings = {id(row.sampling): row.sampling for row in rows}
    if len(samplings) == 1:
        return sample(logits, rows[0].sampling, keys[0], keys[1]).tolist()

    sampled: dict[int, int] = {}
    for sampling in samplings.values():
        members = [index for index, row in enumerate(rows) if row.sampling is sampling]
        tokens = sample(logits[members], sampling, keys[0, members], keys[1, members]).tolist()
        sampled.update(zip(members, tokens, strict=True))
    return [sampled[index] for index in range(len(rows))]
