"""Hidden states on disk: written once from a sample of each trace's tokens, read by every training and evaluation.

One safetensors file with the tensors of `Examples` (hidden states in float16) and their origin as metadata. It gets its
name once it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas.core import canonical
from kvatlas.predictor.labels import Examples

_LARGEST_HALF = torch.finfo(torch.float16).max


class LabelledTrace(NamedTuple):
    """Sampled tokens of a trace: `hidden` [tokens, hidden size], `label` [tokens]; its number of thinking tokens."""

    hidden: Tensor
    label: Tensor
    thinking_tokens: int


def sample_tokens(hidden: Tensor, label: Tensor, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return hidden states and labels of `tokens` random tokens of a trace, in the order of the trace, on the CPU.

    All tokens are returned if `tokens` is 0 or more than there are.
    """
    if tokens and len(label) > tokens:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(label), generator=generator)[:tokens]
        in_order = chosen.sort().values.to(label.device)
        hidden = hidden[in_order]
        label = label[in_order]
    # In float16 larger values would be infinite.
    storable = hidden.float().clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
    return storable.cpu(), label.float().cpu()


def write(path: Path, traces: Iterable[LabelledTrace], origin: Mapping[str, Any]) -> None:
    """Write traces with their origin to a file."""
    stored = list(traces)
    if not stored:
        # Tensors cannot be joined without one: a trace without tokens stands for none.
        stored = [LabelledTrace(torch.zeros(0, 0).half(), torch.zeros(0), 0)]
    sizes = torch.tensor([len(trace.label) for trace in stored])
    table = {
        "hidden": torch.cat([trace.hidden for trace in stored]),
        "label": torch.cat([trace.label for trace in stored]),
        # The number of each token's trace.
        "trace": torch.arange(len(sizes)).repeat_interleave(sizes),
        "thinking": torch.tensor([trace.thinking_tokens for trace in stored]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    save_file(table, unfinished, metadata={"made_from": canonical(dict(origin))})
    unfinished.replace(path)


def has_origin(path: Path, origin: Mapping[str, Any]) -> bool:
    """Return True if the file exists and has this origin."""
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return bool((file.metadata() or {}).get("made_from") == canonical(dict(origin)))


def read(path: Path) -> Examples:
    """Return the labelled hidden states of a file."""
    return Examples(**load_file(path))
