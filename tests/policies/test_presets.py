"""Presets against slow readings of what the code that they are named after does, on fixed inputs.

The facts are from Robin930/DynTS at a55dc37 (inference/*.py, utils/*.py, recipes/inference/*.sh), the code of arXiv
2601.18383, and from Zefan-Cai/R-KV at 31cf555 (rkv/utils.py, rkv/compression/r1_kv.py, HuggingFace/run_math.py), the
code of arXiv 2505.24133. There k = int(ratio * tokens older than the kept window) of these are kept.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import KvatlasError, Setting
from kvatlas.models import ModelHandle
from kvatlas.policies import PRESETS, CacheView, CompressingPolicy, select_tokens
from kvatlas.sweeps import parse_spec
from tests.engine.test_loop import endless, requests, run
from tests.policies.scenes import GROUP, SCALING, SHAPE, scene

COMMON = {"kv_budget": 60, "local_window": 10, "ratio": 0.4}
#: Of 60 cached tokens 50 are older than the local window: 20 of them stay.
OLDER, ROOM = 50, 20


def make(name: str, **changes: Any) -> CompressingPolicy:
    policy = policies.of(Setting.of(name, **{**COMMON, **changes}))
    assert isinstance(policy, CompressingPolicy)
    return policy


def kept(policy: CompressingPolicy, cached: CacheView) -> list[int]:
    """Slots that stay of the 50 older ones, for a policy with one choice for all."""
    slots = select_tokens(policy, cached)
    assert slots.shape[:2] == (1, 1)
    assert slots[0, 0, -10:].tolist() == list(range(OLDER, 60))
    return slots[0, 0, :-10].tolist()


def attention(cached: CacheView, layer: int, head: int, query: int) -> list[float]:
    """Softmax over all cached tokens that a query sees, one query head."""
    vectors, keys = cached.query(layer)[head].double(), cached.key(layer)[head // GROUP].double()
    at = cached.length - len(vectors) + query
    seen = cached.positions[0, 0].tolist()
    logits = [
        float(vectors[query] @ keys[slot]) * SCALING[layer] if seen[slot] <= at else -math.inf for slot in range(60)
    ]
    top = max(logits)
    parts = [math.exp(logit - top) for logit in logits]
    return [part / sum(parts) for part in parts]


def highest(scores: list[float], room: int = ROOM) -> list[int]:
    return sorted(sorted(range(OLDER), key=lambda slot: scores[slot], reverse=True)[:room])


def test_what_the_presets_resolve_to() -> None:
    fixed = {name: (preset.policy, dict(preset.values)) for name, preset in PRESETS.items()}
    of_dynts = {"ratio_over": "older", "keep_prompt": False}
    assert fixed == {
        "dynts@dynts-paper": ("dynts", {**of_dynts, "keep_prompt": True, "strict_budget": True}),
        "window@dynts-paper": ("window", of_dynts),
        "streaming@dynts-paper": ("streaming", {**of_dynts, "sinks": 10}),
        "sepllm@dynts-paper": ("sepllm", {**of_dynts, "sinks": 0, "separators": "single", "rest": "empty"}),
        "h2o@dynts-paper": ("tova", {**of_dynts, "scope": "global"}),
        "snapkv@dynts-paper": ("snapkv", {**of_dynts, "scope": "global", "queries": 33, "kernel": 1}),
        "dynts-random@dynts-paper": ("dynts-random", of_dynts),
        "dynts-bottom@dynts-paper": ("dynts-bottom", of_dynts),
        "rkv@r-kv-paper": (
            "rkv",
            {
                "queries": 8,
                "kernel": 7,
                "mix": 0.1,
                "threshold": 0.5,
                "unlike": "first",
                "scope": "head",
                "local_window": 8,
                "ratio_over": "older",
                "keep_prompt": False,
            },
        ),
    }
    for name, (policy, values) in fixed.items():
        item = policies.of(Setting.of(name, **{**COMMON, **({"local_window": 8} if "rkv" in name else {})}))
        assert isinstance(item, policies.policies.get(policy))
        assert all(getattr(item, key) == value for key, value in values.items())
        assert item.setting.policy == name
        assert policies.of(item.setting) == item == pickle.loads(pickle.dumps(item))
        assert all(preset.source and preset.says for preset in PRESETS.values())


def test_what_a_preset_fixes_nobody_changes() -> None:
    with pytest.raises(KvatlasError, match="preset 'h2o@dynts-paper' fixes keep_prompt = False, True was asked for"):
        make("h2o@dynts-paper", keep_prompt=True)
    with pytest.raises(KvatlasError, match="fixes local_window = 8, 10 was asked for; leave it out, or take the polic"):
        make("rkv@r-kv-paper")
    assert policies.of(Setting.of("rkv@r-kv-paper", kv_budget=60, ratio=0.4)).setting.values["local_window"] == 8
    with pytest.raises(KvatlasError, match="'h2o@dynts-paper' has no parameter 'sinks'"):
        make("h2o@dynts-paper", sinks=4)
    with pytest.raises(KvatlasError, match="Unknown preset 'h2o@nobody'; valid are: dynts@dynts-paper, "):
        make("h2o@nobody")


@pytest.mark.parametrize("seed", range(3))
def test_h2o_of_dynts_has_only_the_newest_steps_attention(seed: int) -> None:
    """The running sum is overwritten at every step by the mean over layers, heads and the one query."""
    policy = make("h2o@dynts-paper")
    cached = scene(policy, seed)
    rows = [attention(cached, layer, head, 0) for layer in range(SHAPE.layers) for head in range(SHAPE.heads)]
    assert kept(policy, cached) == highest([sum(column) / len(rows) for column in zip(*rows, strict=True)])
    plain = make("tova", scope="global", keep_prompt=False)
    assert torch.equal(select_tokens(policy, cached), select_tokens(plain, cached))


@pytest.mark.parametrize("seed", range(3))
def test_snapkv_of_dynts_sums_33_queries_and_pools_nothing(seed: int) -> None:
    """Collected from ob_window = 32 steps before the compression's own step on: 33 means over layers and heads."""
    policy = make("snapkv@dynts-paper", local_window=40, ratio=0.5)
    cached = scene(policy, seed)
    total = [0.0] * 60
    for layer in range(SHAPE.layers):
        for head in range(SHAPE.heads):
            for query in range(33):
                total = [a + b for a, b in zip(total, attention(cached, layer, head, query), strict=True)]
    result = select_tokens(policy, cached)[0, 0].tolist()
    assert result == sorted(sorted(range(20), key=lambda slot: -total[slot])[:10]) + list(range(20, 60))


def test_window_and_streaming_of_dynts_drop_the_prompt() -> None:
    assert kept(make("window@dynts-paper"), scene(make("window"), 0)) == list(range(OLDER - ROOM, OLDER))
    # A ratio whose share is the 10 sinks leaves what is left there: 10 sinks and the kept window.
    streaming = make("streaming@dynts-paper", ratio=0.2)
    first = replace(scene(streaming, 0), positions=torch.arange(60)[None, None], length=60, prompt_length=20)
    assert kept(streaming, first) == list(range(10))


@pytest.mark.parametrize("ratio", [0.08, 0.4, 1.0])
def test_sepllm_of_dynts_keeps_the_newest_single_separators_and_nothing_else(
    tiny_llama: ModelHandle, ratio: float
) -> None:
    """min(number of separators, int(ratio * older)) of them, from the right, the prompt's among them; alone in a batch
    nothing is filled up."""
    policy = make("sepllm@dynts-paper", ratio=ratio)
    cached = scene(policy, 1, model=tiny_llama)
    tokens = cached.tokens().clone()
    dot = next(token for token in range(1000) if tiny_llama.tokenizer.decode([token]) == ".")
    tokens[::4] = dot
    cached = replace(cached, tokens=lambda: tokens)
    texts = [tiny_llama.tokenizer.decode([token]) for token in tokens.tolist()]
    at = cached.positions[0, 0].tolist()
    separators = [slot for slot in range(OLDER) if texts[at[slot]] in (".", ",", "?", "!", ";", ":", "\n", " ")]
    assert 4 < len(separators) < 50
    most = min(len(separators), int(ratio * OLDER + 1e-9))
    assert kept(policy, cached) == separators[len(separators) - most :]
    assert len(kept(make("sepllm", keep_prompt=False, ratio=ratio), cached)) == int(ratio * OLDER + 1e-9)


def test_the_token_that_begins_a_sequence_is_a_separator_there(tiny_llama: ModelHandle) -> None:
    """get_separator lists it; a tab and tokens that join several are missing from the list."""
    from kvatlas.policies.sepllm import is_single_separator

    class Tokenizer:
        bos_token_id = 7

        def decode(self, tokens: list[int]) -> str:
            return {7: "<begin>", 8: ".", 9: "..", 10: "\t", 11: "\n"}[tokens[0]]

    model: Any = type("Known", (), {"tokenizer": Tokenizer()})()
    assert [is_single_separator(model, token) for token in (7, 8, 9, 10, 11)] == [True, True, False, False, True]


def test_ablations_of_dynts_let_the_prompt_go() -> None:
    importance = torch.rand(1, 1, 60, generator=torch.Generator().manual_seed(1))
    bottom = make("dynts-bottom@dynts-paper")
    cached = scene(bottom, 2, {"importance": importance})
    scores = [math.inf if slot < 9 else float(importance[0, 0, slot]) for slot in range(OLDER)]
    assert kept(bottom, cached) == highest([-score for score in scores])
    random = make("dynts-random@dynts-paper")
    gone = [set(range(9)) - set(kept(random, replace(cached, stream=stream))) for stream in range(20)]
    assert all(gone)
    assert all(len(kept(random, replace(cached, stream=stream))) == ROOM for stream in range(20))


@pytest.mark.parametrize("seed", range(3))
def test_rkv_of_its_paper_protects_nothing_but_the_8_newest(seed: int) -> None:
    """Where no other key is similar, argmax over an all-zero row points at the first token, which is then spared."""
    policy = policies.of(Setting.of("rkv@r-kv-paper", kv_budget=60, ratio=0.4))
    assert isinstance(policy, CompressingPolicy)
    cached = scene(policy, seed)
    noise = 0.4 * torch.randn(SHAPE.layers, SHAPE.kv_heads, 60, 8, generator=torch.Generator().manual_seed(seed))
    noise[..., 0] += 1.0
    # Keys that are like no other.
    noise[:, :, 20], noise[:, :, 33] = -noise[:, :, 0], 9 * torch.eye(8)[7]
    cached = replace(cached, key=lambda layer: noise[layer])
    lonely = 0
    result = select_tokens(policy, cached)
    for layer in range(SHAPE.layers):
        for head in range(SHAPE.kv_heads):
            keys = noise[layer, head].double()
            importance = [0.0] * 52
            for query in range(8):
                vectors = [cached.query(layer)[head * GROUP + g][query].double() for g in range(GROUP)]
                logits = [max(float(v @ keys[slot]) for v in vectors) * SCALING[layer] for slot in range(52)]
                parts = [math.exp(logit) for logit in logits]
                importance = [a + part / sum(parts) / 8 for a, part in zip(importance, parts, strict=True)]
            unit = keys / keys.norm(dim=-1, keepdim=True)
            columns = [0.0] * 60
            for i in range(60):
                row = [0.0 if i == j else float(unit[i] @ unit[j]) for j in range(60)]
                similar = [j for j in range(60) if row[j] > 0.5]
                lonely += not similar
                row[max(similar, default=0)] = 0.0
                columns = [a + b / 60 for a, b in zip(columns, row, strict=True)]
            parts = [math.exp(column) for column in columns]
            scores = [
                0.1 * max(importance[max(0, slot - 3) : slot + 4]) - 0.9 * parts[slot] / sum(parts)
                for slot in range(52)
            ]
            wanted = sorted(sorted(range(52), key=lambda slot: -scores[slot])[:20])
            assert result[layer, head].tolist() == wanted + list(range(52, 60))
    assert lonely > 0


def test_a_preset_is_named_wherever_a_policy_is(random_models: dict[str, ModelHandle]) -> None:
    """In a spec, and in the loop, where it writes what the policy with its values writes."""
    spec = parse_spec(
        {
            "models": ["embedded:tiny-llama"],
            "benchmarks": ["CHAIN4"],
            "settings": [{"policy": "h2o@dynts-paper", "kv_budget": 96}, {"policy": "tova", "kv_budget": 96}],
            "axes": {"local_window": [8, 16], "ratio": [0.2, 0.4]},
        }
    )
    assert sum(setting.policy == "h2o@dynts-paper" for setting, _ in spec.cells()) == 4
    values = {"kv_budget": 96, "local_window": 8, "ratio": 0.3}
    preset = policies.of(Setting.of("h2o@dynts-paper", **values))
    plain = policies.of(Setting.of("tova", scope="global", keep_prompt=False, **values))
    model = endless(random_models["llama"])
    _, generations = run(model, requests(model, [preset, plain], 2), 4)
    tokens = {(item.key, item.policy.name): item.tokens for item in generations}
    assert all(tokens[key, "h2o@dynts-paper"] == tokens[key, "tova"] for key in range(2))
    assert all(item.usage.compressions for item in generations)
    assert preset.identity(model)["name"] == "h2o@dynts-paper"
