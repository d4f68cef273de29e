"""The heads of the policy `learned`: examples from full-cache traces, training, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.engine.cache import Layer
from kvatlas.engine.whole_texts import attention_of, run_whole_text
from kvatlas.models import ModelHandle
from kvatlas.models.rotation import frequencies, turn_back
from kvatlas.policies.learned import predict
from kvatlas.predictor.training import Quality, mean_quality, minimize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Numbers between the two layers of a head.
INNER = 32
#: The last tokens of a text are no examples: few later ones attend to them.
LAST = 32
#: Added to attention before its logarithm.
LEAST = 1e-6


class HeadExamples(NamedTuple):
    """Tokens of a trace: `keys` without their rotation and `values` [layers, KV heads, tokens, size], and `target`
    [layers, KV heads, tokens], the logarithm of the mean attention of later tokens."""

    keys: Tensor
    values: Tensor
    target: Tensor


@torch.inference_mode()
def examples_of(handle: ModelHandle, model: PreTrainedModel, tokens: Sequence[int]) -> HeadExamples | None:
    """Return the examples of a text, of the layers in their order; None for a text of few tokens."""
    count = len(tokens) - LAST
    if count < 2:
        return None
    frequency = frequencies(handle, str(model.device))
    positions = torch.arange(len(tokens), device=model.device)
    by_layer: dict[int, HeadExamples] = {}

    def observe(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> None:
        # The attention of all later tokens, mean over the query heads of a KV head, added up.
        mass = query.new_zeros(key.shape[:2], dtype=torch.float32)
        for back, weights in attention_of(layer, query, key):
            mass += weights.mean(1).masked_fill(back == 0, 0.0).sum(1)
        later = len(tokens) - 1 - positions[:count]
        keys = turn_back(key, positions[None], frequency)[:, :count]
        target = (mass[:, :count] / later + LEAST).log()
        # The memory of the values is that of the next layer, too.
        values = value[:, :count].clone()
        by_layer[handle.shape.place[layer.place]] = HeadExamples(keys.cpu(), values.cpu(), target.cpu())

    run_whole_text(model, tokens, observe)
    ordered = [by_layer[place] for place in sorted(by_layer)]
    return HeadExamples(*map(torch.stack, zip(*ordered, strict=True)))


def train_heads(
    examples: Sequence[HeadExamples],
    *,
    steps: int,
    seed: int,
    batch: int = 512,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Tensor]:
    """Return the tensors of the policy's file, trained by mean squared error with AdamW and a cosine schedule.

    `on_step` is called after each step with the steps that are done, and all.
    """
    keys, values, target = (torch.cat(parts, 2) for parts in zip(*examples, strict=True))
    inputs = torch.cat([keys, values], -1)
    middle = inputs.mean(2, keepdim=True)
    spread = inputs.std(2, keepdim=True).clamp_min(1e-6)
    target_middle = target.mean(-1, keepdim=True)
    target_spread = target.std(-1, keepdim=True).clamp_min(1e-6)

    # Two layers for each layer and KV head of the model.
    generator = torch.Generator().manual_seed(seed)
    layers, heads, tokens, size = inputs.shape
    first = (torch.randn(layers, heads, size, INNER, generator=generator) * size**-0.5).requires_grad_()
    second = (torch.randn(layers, heads, INNER, generator=generator) * INNER**-0.5).requires_grad_()
    first_bias = torch.zeros(layers, heads, INNER, requires_grad=True)
    second_bias = torch.zeros(layers, heads, requires_grad=True)
    weights = {"first": first, "first_bias": first_bias, "second": second, "second_bias": second_bias}

    def error() -> Tensor:
        index = torch.randint(tokens, (batch,), generator=generator)
        # Rows are copied whole, several times faster than by an index.
        standard = (inputs.index_select(2, index) - middle) / spread
        predicted = predict(weights, standard[..., : keys.shape[-1]], standard[..., keys.shape[-1] :])
        return F.mse_loss(predicted, (target[..., index] - target_middle) / target_spread)

    minimize(error, weights.values(), 3e-3, steps, on_step)
    with torch.no_grad():
        # The heads take numbers as they are cached, and give logarithms of attention, alike in all heads.
        scaled = first / spread.transpose(-1, -2)
        shifted = first_bias - (middle @ scaled).squeeze(-2)
        bias = second_bias * target_spread.squeeze(-1) + target_middle.squeeze(-1)
        tensors = {"first": scaled, "first_bias": shifted, "second": second * target_spread, "second_bias": bias}
        return {name: numbers.contiguous() for name, numbers in tensors.items()}


@torch.inference_mode()
def evaluate_heads(scorer: dict[str, Tensor], examples: Sequence[HeadExamples]) -> Quality:
    """Return how well the heads rank the tokens of held-out traces, mean over traces, layers and KV heads."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for keys, values, target in examples:
        predicted = predict(scorer, keys, values)
        pairs += zip(predicted.flatten(0, 1), target.flatten(0, 1), strict=True)
    return replace(mean_quality(pairs), traces=len(examples))
