"""Reading a script (teacher forcing): its next tokens, and the likeness of each setting to the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvatlas.engine.rows import Row
from kvatlas.engine.sampling import sample_rows


def follow_script(logits: Tensor, rows: Sequence[Row[Any]], count: int) -> list[list[int]]:
    """Return the next tokens of each row from the script of all rows, after `count` tokens of input each.

    logits [rows * new tokens, vocabulary]. Compressed rows note their likeness to the row without compression.
    """
    first = rows[0]
    new = count
    if first.prompt_left:
        # The last chunk of a prompt is followed by the first new token, other chunks by none.
        new = 1 if first.prompt_left <= count else 0
    start = len(first.tokens)
    following = list(first.request.script[start : start + new])
    compressed = [row for row in rows if row.compressions]
    if not compressed:
        return [following for _ in rows]

    # Logits [new, vocabulary] of the full cache, and [compressed rows, new, vocabulary].
    by_row = logits.view(len(rows), new, -1)
    is_compressed = torch.tensor([row.compressions > 0 for row in rows], device=logits.device)
    full = by_row[~is_compressed][0]
    others = by_row[is_compressed]

    # The tokens that the settings would sample.
    sampled_rows: list[Row[Any]] = []
    positions: list[int] = []
    for row in compressed:
        sampled_rows.extend([row] * new)
        positions.extend(range(first.position + 1, first.position + 1 + new))
    sampled = torch.tensor(sample_rows(others.flatten(0, 1), sampled_rows, positions)).view(len(compressed), new)
    differs = (sampled != torch.tensor(following)).tolist()

    # The distance of the distributions, and the change of the script's log-likelihood.
    log_full = full.float().log_softmax(-1)
    log_others = others.float().log_softmax(-1)
    kl = (log_full.exp() * (log_full - log_others)).sum(-1).tolist()
    top1 = (full.argmax(-1) == others.argmax(-1)).tolist()
    script = torch.tensor(following, device=full.device)[:, None]
    script_others = log_others.gather(-1, script.expand(len(compressed), -1, -1)).squeeze(-1)
    change = (script_others - log_full.gather(-1, script).squeeze(-1)).tolist()

    for index, row in enumerate(compressed):
        likeness = row.likeness
        assert likeness is not None
        thinking_end, answer_start = row.split
        for step in range(new):
            token = start + step
            if differs[index][step] and likeness.departs_at is None:
                likeness.departs_at = token
            if token < thinking_end:
                likeness.thinking += 1
                likeness.kl += kl[index][step]
                likeness.top1 += top1[index][step]
            elif token >= answer_start:
                likeness.answer += 1
                likeness.answer_change += change[index][step]
    return [following for _ in rows]
