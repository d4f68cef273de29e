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
    written = len(first.tokens)
    following = list(first.request.script[written : written + new])
    compressed = [index for index, row in enumerate(rows) if row.compressions]
    if compressed:
        full = next(index for index, row in enumerate(rows) if not row.compressions)
        by_row = logits.view(len(rows), new, -1)
        _compare(by_row[full], by_row[compressed], [rows[index] for index in compressed], following)
    return [following for _ in rows]


def _compare(full: Tensor, compressed: Tensor, rows: Sequence[Row[Any]], following: list[int]) -> None:
    """Note the likeness of rows [rows, new, vocabulary] to the full cache [new, vocabulary]."""
    count = len(following)
    first_position = rows[0].position + 1
    sampled_rows: list[Row[Any]] = []
    positions: list[int] = []
    for row in rows:
        sampled_rows.extend([row] * count)
        positions.extend(range(first_position, first_position + count))
    sampled = torch.tensor(sample_rows(compressed.flatten(0, 1), sampled_rows, positions)).view(len(rows), count)
    log_full = full.float().log_softmax(-1)
    log_compressed = compressed.float().log_softmax(-1)
    kl = (log_full.exp() * (log_full - log_compressed)).sum(-1).tolist()
    top1 = (full.argmax(-1) == compressed.argmax(-1)).tolist()
    script = torch.tensor(following, device=full.device)[:, None]
    script_compressed = log_compressed.gather(-1, script.expand(len(rows), -1, -1)).squeeze(-1)
    change = (script_compressed - log_full.gather(-1, script).squeeze(-1)).tolist()
    differs = (sampled != torch.tensor(following)).tolist()
    start = len(rows[0].tokens)
    for index, row in enumerate(rows):
        likeness = row.likeness
        assert likeness is not None
        thinking_end, answer_start = row.split
        for step in range(count):
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
