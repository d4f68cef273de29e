"""Training and evaluating the DynTS head on stored hidden states; the language model itself stays as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from kvatlas.core import KvatlasError
from kvatlas.policies.dynts import importance
from kvatlas.predictor.labels import Examples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Quality:
    """How well predicted importance ranks the tokens of a trace: means over traces.

    `spearman` is the rank correlation with the label, `overlap` the share of the truly top 20 % found in the predicted
    top 20 %.
    """

    traces: int
    spearman: float
    overlap: float


def new_head(hidden: int) -> nn.Sequential:
    """The MLP of arXiv 2601.18383: hidden -> 2 * hidden -> hidden / 2 -> 1; its softplus is applied by the policy."""
    return nn.Sequential(
        nn.Linear(hidden, 2 * hidden),
        nn.GELU(),
        nn.Linear(2 * hidden, hidden // 2),
        nn.GELU(),
        nn.Linear(hidden // 2, 1),
    )


def train(
    data: Examples, *, steps: int = 3000, batch: int = 4096, rate: float = 1e-3, seed: int = 0, device: str = "cpu"
) -> dict[str, Tensor]:
    """Weights of a head fitted to log(1 + label) by mean squared error plus pairwise ranking (weights 1 and 1).

    The ranking loss is logistic over random pairs of tokens of the same trace. AdamW, cosine schedule. Hidden states
    may be float16 and stay where they are; batches of them go to `device`. The weights come back on the CPU.
    """
    if data.label.numel() == 0:
        raise KvatlasError("The predictor has nothing to learn from: no correct trace with thinking tokens was given.")
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head = new_head(data.hidden.shape[1]).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    target = torch.log1p(data.label)
    starts, lengths = _spans(data.trace)
    for _ in range(steps):
        first = torch.randint(len(target), (batch,), generator=generator)
        trace = data.trace[first]
        second = starts[trace] + (torch.rand(batch, generator=generator) * lengths[trace]).long()
        both = torch.cat([first, second])
        scores = F.softplus(head(data.hidden[both].to(device, torch.float32))).squeeze(-1)
        wanted = target[both].to(device)
        sign = torch.sign(wanted[:batch] - wanted[batch:])
        ranking = F.softplus(-sign * (scores[:batch] - scores[batch:])).mean()
        loss = F.mse_loss(scores, wanted) + ranking
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return {name: value.detach().cpu().clone() for name, value in head.state_dict().items()}


@torch.inference_mode()
def evaluate(head: dict[str, Tensor], data: Examples) -> Quality:
    """How the head ranks the tokens of traces that it was not trained on; KvatlasError if there are none."""
    from scipy.stats import spearmanr

    if data.label.numel() == 0:
        raise KvatlasError("The predictor has nothing to be judged on: no correct held-out trace with thinking tokens.")
    if head["0.weight"].shape[1] != data.hidden.shape[1]:
        raise KvatlasError(
            f"The predictor is for a hidden size of {head['0.weight'].shape[1]}, the model has {data.hidden.shape[1]}."
        )
    predicted = torch.cat([importance(head, part) for part in torch.split(data.hidden, 65_536)])
    correlations, overlaps = [], []
    starts, lengths = _spans(data.trace)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        part = slice(start, start + length)
        correlations.append(float(spearmanr(predicted[part], data.label[part]).statistic))
        top = max(1, length // 5)
        found = set(predicted[part].topk(top).indices.tolist()) & set(data.label[part].topk(top).indices.tolist())
        overlaps.append(len(found) / top)
    return Quality(len(overlaps), sum(correlations) / len(correlations), sum(overlaps) / len(overlaps))


def _spans(trace: Tensor) -> tuple[Tensor, Tensor]:
    lengths = torch.bincount(trace)
    return lengths.cumsum(0) - lengths, lengths


def save_head(path: Path, head: dict[str, Tensor], provenance: Mapping[str, Any]) -> None:
    """One safetensors file with the weights and, as metadata, what they were made from; `dynts` loads it."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in provenance.items()}
    save_file(head, path, metadata=texts)


def provenance_of(path: Path) -> dict[str, Any]:
    """What a head's file says that it was made from."""
    from safetensors import safe_open

    def plain(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    with safe_open(path, "pt") as file:
        return {name: plain(text) for name, text in (file.metadata() or {}).items()}
