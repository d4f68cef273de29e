"""After any number of compressions the logits equal those of a full cache that a mask hides the evicted tokens of."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvatlas.core import Sampling
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, Policy, Scope
from tests.conftest import ARCHITECTURES, WINDOW
from tests.decoding import endless, prompts

BUDGET, NEW = 64, 90


@dataclass(frozen=True)
class Recorded(CompressingPolicy):
    """Scores by a hash of position, layer and head; writes down what was cached whenever it is asked."""

    name = "recorded"

    def score(self, cached: CacheView) -> torch.Tensor:
        LOG.append(cached.positions.clone())
        layers, heads, _ = cached.positions.shape
        salt = torch.arange(1, layers * heads + 1).view(layers, heads, 1)
        return (cached.positions * 7919 + salt * 104_729) % 10_007


LOG: list[torch.Tensor] = []


def _policy(scope: Scope) -> Policy:
    kind = type("Scoped", (Recorded,), {"scope": scope})
    return kind(kv_budget=BUDGET, local_window=6, ratio=0.3, ratio_over="thinking")


@pytest.mark.parametrize(
    ("kind", "scope"),
    [*((kind, Scope.HEAD) for kind in ARCHITECTURES), ("llama", Scope.GLOBAL), ("gemma3", Scope.LAYER)],
)
def test_logits_equal_those_of_a_masked_full_cache(
    random_models: dict[str, ModelHandle], kind: str, scope: Scope
) -> None:
    handle = endless(random_models[kind])
    LOG.clear()
    prompt = prompts(handle, 1)[0][:30]
    model = handle.load()
    seen: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, output: seen.append(output[0, -1].clone()))
    policy = _policy(scope)
    engine = Engine(handle, model, [policy], Sampling(temperature=0.7, max_new_tokens=NEW), 8)
    (generation,) = engine.run([Request(0, prompt, 3, (policy,))])
    assert generation.usage.compressions == len(LOG) >= 2

    tokens = prompt + generation.tokens[:-1]
    visible = _visible(handle, len(prompt), len(tokens), generation.usage.compressions, policy)
    wanted = _masked(handle, tokens, visible)[len(prompt) - 1 :]
    assert len(seen) == len(wanted)
    # Linear attention reads a whole text by another formula than token by token.
    atol = 1e-3 if kind == "qwen3_next" else 1e-4
    torch.testing.assert_close(torch.stack(seen), wanted, atol=atol, rtol=1e-4)


def _visible(model: ModelHandle, prompt: int, total: int, compressions: int, policy: Policy) -> torch.Tensor:
    """[layers, KV heads, total, total]: which token sees which, from what was cached at each compression."""
    shape = model.shape
    visible = torch.ones(total, total, dtype=torch.bool).tril().expand(shape.layers, shape.kv_heads, -1, -1).clone()
    for number, cached in enumerate(LOG):
        fired = int(cached.max())
        later = LOG[number + 1] if number + 1 < len(LOG) else None
        for layer in range(shape.layers):
            for head in range(shape.kv_heads):
                row = cached[min(layer, cached.shape[0] - 1), min(head, cached.shape[1] - 1)]
                if later is None:
                    kept = _reference_choice(model, row, prompt, layer, head, policy)
                else:
                    after = later[min(layer, later.shape[0] - 1), min(head, later.shape[1] - 1)]
                    kept = after[after <= fired]
                    assert torch.equal(kept, _reference_choice(model, row, prompt, layer, head, policy))
                gone = torch.ones(total, dtype=torch.bool)
                gone[kept] = False
                gone[fired + 1 :] = False
                visible[layer, head, fired + 1 :, gone] = False
    return visible


def _reference_choice(
    model: ModelHandle, row: torch.Tensor, prompt: int, layer: int, head: int, policy: Policy
) -> torch.Tensor:
    """The contract once more, one token at a time, in plain Python."""
    assert isinstance(policy, CompressingPolicy)
    positions = row.tolist()
    older, window = positions[: -policy.local_window], positions[-policy.local_window :]
    layers_apart = policy.scope is not Scope.GLOBAL
    heads = model.shape.kv_heads if policy.scope is Scope.HEAD else 1
    salt = (layer * heads + (head if policy.scope is Scope.HEAD else 0) if layers_apart else 0) + 1

    def score(position: int) -> int:
        return (position * 7919 + salt * 104_729) % 10_007

    thinking = sorted((p for p in older if p >= prompt), key=score, reverse=True)
    chosen = thinking[: int(0.3 * len(thinking) + 1e-9)]
    return torch.tensor(sorted([p for p in older if p < prompt] + chosen) + window)


def _masked(handle: ModelHandle, tokens: tuple[int, ...], visible: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one ordinary forward pass in which evicted tokens are hidden by a mask."""
    from transformers import AttentionInterface

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **more: Any
    ) -> tuple[torch.Tensor, None]:
        softcap, s_aux = more.get("softcap"), more.get("s_aux")
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        weights = query @ key.transpose(-1, -2) * scaling
        if softcap:
            weights = (weights / softcap).tanh() * softcap
        hidden = ~visible[handle.shape.place[module.layer_idx]].repeat_interleave(groups, 0)
        kinds = getattr(module.config, "layer_types", None)
        windowed = module.config.model_type == "mistral" if kinds is None else "sliding" in kinds[module.layer_idx]
        if windowed:
            places = torch.arange(len(tokens))
            hidden = hidden | (places[:, None] - places >= WINDOW)
        weights = weights.masked_fill(hidden, float("-inf"))
        if s_aux is not None:
            sinks = s_aux[None, :, None, None].expand(*weights.shape[:3], 1)
            weights = torch.cat([weights, sinks], -1)
        return (weights.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None

    AttentionInterface.register("masked_reference", attention)
    model = handle.load()
    model.set_attn_implementation("masked_reference")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
