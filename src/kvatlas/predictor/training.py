"""The DynTS head: its labels, the attention of the answer to thinking tokens, its training and its evaluation.

It learns from stored hidden states; the language model is not changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

from kvatlas.answers.reading import read_tokens
from kvatlas.core import KvatlasError, Trace
from kvatlas.engine.whole_texts import answer_attention
from kvatlas.models import ModelHandle
from kvatlas.policies.dynts import importance

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: The hidden states [tokens, hidden size] and the labels [tokens] of the thinking tokens of each trace.
Examples = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Quality:
    """The quality of the predicted ranks of tokens: means over `traces`.

    `spearman` is the rank correlation with the label, `overlap` the share of the true top 20 % in the predicted top
    20 %. Traces with one label for all tokens, as those of one token, have no ranks: they are left out, and counted in
    `one_label`.
    """

    traces: int
    spearman: float
    overlap: float
    one_label: int = 0


def new_head(hidden: int) -> nn.Sequential:
    """Return the MLP of arXiv 2601.18383: hidden -> 2 * hidden -> hidden / 2 -> 1; the policy applies its softplus."""
    return nn.Sequential(
        nn.Linear(hidden, 2 * hidden),
        nn.GELU(),
        nn.Linear(2 * hidden, hidden // 2),
        nn.GELU(),
        nn.Linear(hidden // 2, 1),
    )


def joined(traces: Examples) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states and labels of all tokens, and the number of tokens of each trace."""
    hidden, labels = map(torch.cat, zip(*traces, strict=True))
    return hidden, labels, torch.tensor([len(of_trace) for _, of_trace in traces])


def train_head(
    hidden: Tensor,
    label: Tensor,
    lengths: Tensor,
    *,
    steps: int = 3000,
    batch: int = 4096,
    seed: int = 0,
    device: str = "cpu",
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Tensor]:
    """Return the weights of a head trained with AdamW and a cosine schedule, on the CPU.

    The target is log(1 + a n), from the answer's mean attention a to a token of a trace of n thinking tokens. The loss
    is the mean squared error plus logistic ranking of random pairs of tokens of one trace (weights 1 and 1). `on_step`
    is called after each step with the steps that are done, and all. Hidden states may be float16 and stay on their
    device; batches of random tokens of all traces go to `device`.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head = new_head(hidden.shape[1]).to(device)
    target = torch.log1p(label)
    starts = lengths.cumsum(0) - lengths
    trace_of = torch.arange(len(lengths)).repeat_interleave(lengths)

    def error() -> Tensor:
        index = torch.randint(len(target), (batch,), generator=generator)
        trace = trace_of[index]
        partner = starts[trace] + (torch.rand(batch, generator=generator) * lengths[trace]).long()
        index = torch.cat([index, partner])

        scores = F.softplus(head(hidden[index].to(device, torch.float32))).squeeze(-1)
        labels = target[index].to(device)

        # The second half of the tokens are the partners of the first.
        first, second = scores.chunk(2)
        first_label, second_label = labels.chunk(2)
        order = torch.sign(first_label - second_label)
        return F.mse_loss(scores, labels) + F.softplus(-order * (first - second)).mean()

    minimize(error, head.parameters(), 1e-3, steps, on_step)
    return {name: value.detach().cpu().clone() for name, value in head.state_dict().items()}


def minimize(
    error: Callable[[], Tensor], weights: Iterable[Tensor], rate: float, steps: int, on_step: Callable[[int, int], None]
) -> None:
    """Minimize the error of random batches by AdamW with a cosine schedule; see `train_head` for `on_step`."""
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        of_batch = error()
        optimizer.zero_grad()
        of_batch.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_step(step + 1, steps)


@torch.inference_mode()
def judge_head(head: dict[str, Tensor], traces: Examples) -> Quality:
    """Return the quality of a head on held-out traces. Raises KvatlasError without traces that have ranks."""
    hidden = torch.cat([states for states, _ in traces])
    predicted = torch.cat([importance(head, chunk) for chunk in torch.split(hidden, 65_536)])
    by_trace = torch.split(predicted, [len(labels) for _, labels in traces])
    return mean_quality([(scores, labels) for scores, (_, labels) in zip(by_trace, traces, strict=True)])


def mean_quality(ranked: Sequence[tuple[Tensor, Tensor]]) -> Quality:
    """Return the mean quality of pairs of scores and labels [tokens]. Raises KvatlasError if no labels differ."""
    correlations = []
    overlaps = []
    for scores, labels in ranked:
        if not bool((labels != labels[:1]).any()):
            continue

        # Equal scores tell nothing, and have no rank correlation.
        scores_differ = bool((scores != scores[:1]).any())
        correlations.append(float(spearmanr(scores, labels).statistic) if scores_differ else 0.0)

        top = max(1, len(labels) // 5)
        hits = set(scores.topk(top).indices.tolist()) & set(labels.topk(top).indices.tolist())
        overlaps.append(len(hits) / top)

    count = len(overlaps)
    if not count:
        raise KvatlasError(
            f"The predictor has nothing to be judged on: the tokens of each of {len(ranked)} held-out traces have one "
            "label; expected two labels or more in a trace."
        )
    return Quality(count, sum(correlations) / count, sum(overlaps) / count, len(ranked) - count)


def save_head(path: Path, head: dict[str, Tensor], provenance: Mapping[str, Any]) -> None:
    """Write a safetensors file of heads, with the weights and their provenance as metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in provenance.items()}
    save_file(head, path, metadata=texts)


#: Reasons to exclude traces, in words.
REASONS = {
    "no_closing_tag": "without a closing think tag",
    "no_answer": "without an answer",
    "wrong": "wrong",
    "no_thinking": "without thinking",
}
_LARGEST_HALF = torch.finfo(torch.float16).max


def why_left_out(model: ModelHandle, trace: Trace) -> str:
    """Return the reason to exclude a full-cache trace from learning, one of `REASONS`; empty for a suitable one."""
    span = read_tokens(model, trace.tokens).span
    if span is None and model.thinking.close:
        return "no_closing_tag"
    has_answer = span is None or span[1] < len(trace.tokens)
    if not has_answer or not trace.grade.status.answered:
        return "no_answer"
    if not trace.grade.correct:
        return "wrong"
    has_thinking = span is not None and span[0] > 0
    return "" if has_thinking else "no_thinking"


def label_trace(
    handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return hidden states and labels of the thinking tokens of a trace that is not left out.

    The label is attention times the number of thinking tokens, so that traces of all lengths share one scale.
    """
    span = read_tokens(handle, tokens).span
    assert span is not None, "a trace without thinking is left out"
    end, start = span
    attention, states = answer_attention(model, [*prompt, *tokens], len(prompt) + start)
    thinking = slice(len(prompt), len(prompt) + end)
    return states[thinking], attention[thinking] * end


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
