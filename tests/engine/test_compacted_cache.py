"""After any number of compressions the logits equal those of a full cache that a mask hides the evicted tokens of."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvatlas.core import Sampling
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.policies import BudgetRule, CacheView, CompressingPolicy, Scope
from tests.conftest import ARCHITECTURES
from tests.decoding import endless, prompts
from tests.models.every_model import WINDOW
from tests.policies.scenes import rule

BUDGET, NEW = 64, 76


@dataclass(frozen=True)
class Recorded(CompressingPolicy):
    """Scores by a hash of position, layer and head; writes down what was cached at each compression."""

    name = "recorded"

    def score(self, cached: CacheView) -> torch.Tensor:
        # The first compression asks twice.
        if not LOG or cached.positions.max() > LOG[-1].max():
            LOG.append(cached.positions.clone())
        return _scores(cached.positions)


LOG: list[torch.Tensor] = []


def _scores(positions: torch.Tensor) -> torch.Tensor:
    layers, heads, _ = positions.shape
    salt = torch.arange(1, layers * heads + 1).view(layers, heads, 1)
    return (positions * 7919 + salt * 104_729) % 10_007


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
    kind_of_policy = type("Scoped", (Recorded,), {"scope": scope})
    policy = kind_of_policy(budget=BudgetRule(BUDGET, 6, 0.3))
    engine = Engine(handle, model, [policy], Sampling(temperature=0.7, max_new_tokens=NEW), 8)
    (generation,) = engine.run([Request(0, prompt, 3, (policy,))])
    assert generation.usage.compressions == len(LOG) >= 2

    tokens = prompt + generation.tokens[:-1]
    visible = _visible(handle, len(prompt), len(tokens), policy)
    wanted = _masked(handle, tokens, visible)[len(prompt) - 1 :]
    assert len(seen) == len(wanted)
    # Linear attention reads a whole text by another formula than token by token.
    atol = 1e-3 if kind == "qwen3_next" else 1e-4
    torch.testing.assert_close(torch.stack(seen), wanted, atol=atol, rtol=1e-4)


def _visible(model: ModelHandle, prompt: int, total: int, policy: CompressingPolicy) -> torch.Tensor:
    """[layers, KV heads, total, total]: which token sees which, from what was cached at each compression."""
    shape = model.shape
    visible = torch.ones(total, total, dtype=torch.bool).tril().expand(shape.layers, shape.kv_heads, -1, -1).clone()
    for number, cached in enumerate(LOG):
        fired, scores = int(cached.max()), _scores(cached).tolist()
        for layer in range(shape.layers):
            for head in range(shape.kv_heads):
                choice = min(layer, cached.shape[0] - 1), min(head, cached.shape[1] - 1)
                row = cached[choice]
                kept = row[rule(policy, row.tolist(), scores[choice[0]][choice[1]], prompt)]
                if number + 1 < len(LOG):
                    after = LOG[number + 1][choice]
                    assert torch.equal(after[after <= fired], kept)
                gone = torch.ones(total, dtype=torch.bool)
                gone[kept] = False
                gone[fired + 1 :] = False
                visible[layer, head, fired + 1 :, gone] = False
    return visible


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
