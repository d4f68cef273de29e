"""The next tokens: sampled (temperature, then top-k, then top-p, then the Gumbel maximum with shared noise), or those
of a script (teacher forcing), in comparison with the samples of each setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvatlas.core import Sampling
from kvatlas.engine.rows import Row
from kvatlas.noise import gumbel


def sample(logits: Tensor, sampling: Sampling, streams: Tensor, positions: Tensor) -> Tensor:
    """Return the next tokens [rows] from logits [rows, vocabulary].

    The noise of a token depends on its row's entry in `streams`, its future position [rows] and its id alone, so that
    rows with equal logits and streams sample equal tokens (common random numbers). The Gumbel maximum samples from the
    softmax exactly: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    size = logits.shape[-1]
    top = min(sampling.top_k, size) if sampling.top_k > 0 else size
    if top < size or sampling.top_p < 1:
        # Before the division, which keeps the order: a whole vocabulary in float64 takes longer than a small model.
        logits, tokens = logits.topk(top, dim=-1)
    else:
        tokens = torch.arange(size, device=logits.device).expand_as(logits)
    scaled = logits.double() / sampling.temperature
    if sampling.top_p < 1:
        shares = scaled.softmax(-1)
        # A token stays if the likelier ones before it do not reach top_p; the likeliest always stays.
        scaled = scaled.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, float("-inf"))
    noise = gumbel(streams[:, None], positions[:, None], tokens)
    best = (scaled + noise).argmax(-1, keepdim=True)
    return tokens.gather(-1, best).squeeze(-1)


def sample_rows(logits: Tensor, rows: Sequence[Row[Any]], positions: Sequence[int]) -> list[int]:
    """Return the next token of each row from its logits [rows, vocabulary], by its request's processor and sampling."""
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


def follow_script(logits: Tensor, rows: Sequence[Row[Any]], count: int) -> list[list[int]]:
    """Return the next tokens of each row from the script of all rows, after `count` tokens of input each.

    logits [rows * new tokens, vocabulary]. Compressed rows note their likeness to the row without compression.
    """
    first = rows[0]
    new = int(first.prompt_left <= count) if first.prompt_left else count
    written = len(first.tokens)
    following = list(first.request.script[written : written + new])
    compressed = [index for index, row in enumerate(rows) if row.compressions]
    if compressed:
        full = next(index for index, row in enumerate(rows) if not row.compressions)
        by_row = logits.view(len(rows), new, -1)
        _compare(by_row[full], by_row[compressed], [rows[index] for index in compressed], following)
    return [following for _ in rows]


def _compare(full: Tensor, own: Tensor, rows: Sequence[Row[Any]], following: list[int]) -> None:
    """Note the likeness of rows [rows, new, vocabulary] to the full cache [new, vocabulary]."""
    first, count = rows[0], len(following)
    start = len(first.tokens)
    positions = [first.position + 1 + number for number in range(count)] * len(rows)
    owners = [row for row in rows for _ in following]
    sampled = torch.tensor(sample_rows(own.flatten(0, 1), owners, positions)).view(len(rows), count)
    likely, likely_own = full.float().log_softmax(-1), own.float().log_softmax(-1)
    kl = (likely.exp() * (likely - likely_own)).sum(-1).tolist()
    top1 = (full.argmax(-1) == own.argmax(-1)).tolist()
    script = torch.tensor(following, device=full.device)[:, None]
    likely_script = likely_own.gather(-1, script.expand(len(rows), -1, -1)).squeeze(-1)
    change = (likely_script - likely.gather(-1, script).squeeze(-1)).tolist()
    differs = (sampled != torch.tensor(following)).tolist()
    for number, row in enumerate(rows):
        likeness, (thinking, answer) = row.likeness, row.split
        assert likeness is not None
        for index in range(count):
            if differs[number][index] and likeness.departs_at is None:
                likeness.departs_at = start + index
            if start + index < thinking:
                likeness.thinking += 1
                likeness.kl += kl[number][index]
                likeness.top1 += top1[number][index]
            elif start + index >= answer:
                likeness.answer += 1
                likeness.answer_change += change[number][index]
