"""Hidden states on disk: written once from sampled tokens of each trace, read by every training and evaluation.

A folder of `shard-NNNNN.safetensors` (hidden float16 [tokens, hidden size], label float32 [tokens], trace int32
[tokens]) and an `index.json` that is written last and says how many thinking tokens each trace has and what all was
made from; without it the folder counts as unfinished.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from kvatlas.core import KvatlasError, canonical
from kvatlas.predictor.labels import Examples

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
INDEX = "index.json"
#: Tokens after which a shard is closed: about 256 MiB at a hidden size of 4096.
TOKENS_PER_SHARD = 32_768
_LARGEST = torch.finfo(torch.float16).max


def sampled(hidden: Tensor, label: Tensor, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """`tokens` tokens of a trace drawn without replacement, in order, on the CPU; all for 0 or too few."""
    if tokens and len(label) > tokens:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(label), generator=generator)[:tokens].sort().values.to(label.device)
        hidden, label = hidden[chosen], label[chosen]
    return hidden.float().clamp(-_LARGEST, _LARGEST).half().cpu(), label.float().cpu()


def write(folder: Path, parts: Iterable[tuple[Tensor, Tensor, int]], made_from: Mapping[str, Any]) -> None:
    """Write (hidden states, labels, number of thinking tokens) of traces as they come; no more than one shard is held
    in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / INDEX, *folder.glob("shard-*.safetensors")):
        old.unlink(missing_ok=True)
    shards: list[str] = []
    waiting: list[tuple[Tensor, Tensor, int]] = []
    thinking: list[int] = []
    tokens = 0

    def close() -> None:
        name = f"shard-{len(shards):05d}.safetensors"
        table = {
            "hidden": torch.cat([hidden for hidden, _, _ in waiting]),
            "label": torch.cat([label for _, label, _ in waiting]),
            "trace": torch.cat([torch.full((len(label),), n, dtype=torch.int32) for _, label, n in waiting]),
        }
        save_file(table, folder / name)
        shards.append(name)
        waiting.clear()

    for hidden, label, thought in parts:
        waiting.append((hidden, label, len(thinking)))
        thinking.append(thought)
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
    """Whether a folder is finished and was made from just this."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        return False
    return bool(index.get("version") == VERSION and canonical(index.get("made_from")) == canonical(dict(made_from)))


def read(folder: Path) -> Examples:
    """All shards of a finished folder; KvatlasError for any other."""
    try:
        index = json.loads((folder / INDEX).read_text())
        tables = [load_file(folder / name) for name in index["shards"]]
        thinking = torch.tensor(index["thinking_tokens"], dtype=torch.long)
    except Exception as error:
        raise KvatlasError(f"The hidden states in {str(folder)!r} cannot be read ({error}).") from error
    if not tables:
        return Examples(torch.zeros(0, 0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    return Examples(
        torch.cat([table["hidden"] for table in tables]),
        torch.cat([table["label"] for table in tables]),
        torch.cat([table["trace"] for table in tables]).long(),
        thinking,
    )
