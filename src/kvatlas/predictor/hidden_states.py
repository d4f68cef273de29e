"""Hidden states on disk: written once from a sample of each trace's tokens, read by every training and evaluation.

One safetensors file with the tensors of `Examples` (hidden states in float16) and their origin as metadata. It gets its
name once it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas.core import canonical
from kvatlas.predictor.labels import Examples

_LARGEST = torch.finfo(torch.float16).max


def sample_tokens(hidden: Tensor, label: Tensor, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `tokens` random tokens of a trace, in order, on the CPU; all tokens if `tokens` is 0 or more than all."""
    if tokens and len(label) > tokens:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(label), generator=generator)[:tokens].sort().values.to(label.device)
        hidden = hidden[chosen]
        label = label[chosen]
    return hidden.float().clamp(-_LARGEST, _LARGEST).half().cpu(), label.float().cpu()


def write(path: Path, parts: Iterable[tuple[Tensor, Tensor, int]], made_from: Mapping[str, Any]) -> None:
    """Write (hidden states, labels, number of thinking tokens) of traces."""
    # Without traces one trace without tokens.
    hidden, label, thinking = zip(*(list(parts) or [(torch.zeros(0, 0).half(), torch.zeros(0), 0)]), strict=True)
    sizes = torch.tensor([len(labels) for labels in label])
    table = {
        "hidden": torch.cat(hidden),
        "label": torch.cat(label),
        "trace": torch.arange(len(sizes)).repeat_interleave(sizes),
        "thinking": torch.tensor(thinking),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    save_file(table, unfinished, metadata={"made_from": canonical(dict(made_from))})
    unfinished.replace(path)


def is_made_from(path: Path, made_from: Mapping[str, Any]) -> bool:
    """Return True if the file is there and has this origin."""
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return bool((file.metadata() or {}).get("made_from") == canonical(dict(made_from)))


def read(path: Path) -> Examples:
    """Read the hidden states of a file."""
    return Examples(**load_file(path))
