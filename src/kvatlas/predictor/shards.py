"""Hidden states on disk: written once from a sample of each trace's tokens, read by every training and evaluation.

A folder of `shard-NNNNN.safetensors` (hidden float16 [tokens, hidden size], label float32 [tokens], trace int32
[tokens]) and an `index.json` with the number of thinking tokens of each trace and the origin of the data. The index is
written last; without it the folder counts as unfinished.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas.core import KvatlasError, canonical
from kvatlas.predictor.labels import Examples

VERSION = 2
INDEX = "index.json"
#: The least number of tokens of a full shard: about 256 MiB at a hidden size of 4096.
TOKENS_PER_SHARD = 32_768
_LARGEST = torch.finfo(torch.float16).max


def sample_tokens(hidden: Tensor, label: Tensor, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `tokens` random tokens of a trace, in order, on the CPU; all tokens if `tokens` is 0 or more than all."""
    if tokens and len(label) > tokens:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(label), generator=generator)[:tokens].sort().values.to(label.device)
        hidden, label = hidden[chosen], label[chosen]
    return hidden.float().clamp(-_LARGEST, _LARGEST).half().cpu(), label.float().cpu()


def write(folder: Path, parts: Iterable[tuple[Tensor, Tensor, int]], made_from: Mapping[str, Any]) -> None:
    """Write (hidden states, labels, number of thinking tokens) of traces, with at most one shard in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / INDEX, *folder.glob("shard-*.safetensors")):
        old.unlink(missing_ok=True)
    shards: list[str] = []
    waiting: list[tuple[Tensor, Tensor, int]] = []
    thinking: list[int] = []
    tokens = 0

    def close() -> None:
        shards.append(f"shard-{len(shards):05d}.safetensors")
        hidden, label, traces = zip(*waiting, strict=True)
        numbers = [torch.full((len(part),), n, dtype=torch.int32) for part, n in zip(label, traces, strict=True)]
        table = {"hidden": torch.cat(hidden), "label": torch.cat(label), "trace": torch.cat(numbers)}
        save_file(table, folder / shards[-1])
        waiting.clear()

    for hidden, label, count in parts:
        waiting.append((hidden, label, len(thinking)))
        thinking.append(count)
        tokens += len(label)
        if sum(len(part) for _, part, _ in waiting) >= TOKENS_PER_SHARD:
            close()
    if waiting:
        close()
    index = {
        "version": VERSION,
        "traces": len(thinking),
        "thinking_tokens": thinking,
        "tokens": tokens,
        "shards": shards,
        "made_from": dict(made_from),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def is_made_from(folder: Path, made_from: Mapping[str, Any]) -> bool:
    """Return True if a folder is finished and has this origin."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        return False
    return bool(index.get("version") == VERSION and canonical(index.get("made_from")) == canonical(dict(made_from)))


def read(folder: Path) -> Examples:
    """Read all shards of a finished folder. Raises KvatlasError for an unfinished or damaged one."""
    try:
        index = json.loads((folder / INDEX).read_text())
        tables = [load_file(folder / name) for name in index["shards"]]
        thinking = torch.tensor(index["thinking_tokens"], dtype=torch.long)
    except Exception as error:
        raise KvatlasError(f"The hidden states in {str(folder)!r} cannot be read ({error}).") from error
    if not tables:
        return Examples(torch.zeros(0, 0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    hidden, label, trace = (torch.cat([table[name] for table in tables]) for name in ("hidden", "label", "trace"))
    return Examples(hidden, label, trace.long(), thinking)
