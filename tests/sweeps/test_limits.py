"""Limits of a model are said when a plan is made, and what a plan lets pass runs."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from kvatlas import models, policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy, parameters
from kvatlas.sweeps import make_plan, parse_spec
from tests.decoding import prompts

#: Plain, few KV heads, sliding windows, soft caps and sinks, latent attention, recurrent states, layers of two sizes.
MODELS = (
    *("llama", "qwen2", "mistral", "gemma3", "phi3", "gemma2", "gpt_oss"),
    *("deepseek_v3", "qwen3_next", "gemma4_text"),
)
#: Features of settings by the parameter that a refusal names.
FEATURES: Mapping[str, Sequence[dict[str, Any]]] = {
    "bits": [
        {"kv_bits": 8, "residual": 8},
        {"kv_bits": 4, "group": 16, "residual": 0},
        {"key_bits": 2, "residual": 0},
        {"value_bits": 3, "residual": 4},
    ],
    "scope": [{"scope": "kv_head"}, {"scope": "layer"}, {"scope": "global"}, {"scope": "head"}],
    "plan_prefix": [{"plan_prefix": 9}],
    "keep_prompt": [{"keep_prompt": False}, {"keep_prompt": False, "kv_budget": 24, "ratio": 0.1}],
    "every": [{"every": 1}, {"every": 4}, {"every": 8, "every_from": "start"}],
    "queries": [{"queries": 40}, {"queries": 1}],
    "sinks": [{"sinks": 200}],
    "strict_budget": [{"strict_budget": True}],
    "local_window": [{"local_window": 1}],
    "ratio": [{"ratio": 0.0}, {"ratio": 1.0}],
    "kv_budget": [{"kv_budget": "64KiB"}, {"kv_budget": "1KiB"}],
}
#: Policies without a file of their own.
NAMES = tuple(
    name
    for name in policies.policies.names()
    if name not in ("full", "learned", "triattention") and "dynts" not in name
)


def drawn(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each feature with a policy that is drawn for it, alone and with another feature."""
    rng = random.Random(model)
    for feature in itertools.chain.from_iterable(FEATURES.values()):
        for other in ({}, rng.choice(rng.choice(list(FEATURES.values())))):
            values = {"kv_budget": 64, "local_window": 8, "ratio": 0.3, **other, **feature}
            if "every" in values:
                del values["ratio"]
            able = [
                name for name in NAMES if set(values) <= {item.name for item in parameters(policies.policies.get(name))}
            ]
            if able:
                yield rng.choice(able), values


def run_all(model: ModelHandle, chosen: Sequence[Policy]) -> None:
    """Decode a trace that all of them compress."""
    prompt = prompts(model, 1, (30, 31))[0]
    bound = tuple(policy.bind(model) for policy in chosen)
    engine = Engine(model, model.load(), bound, Sampling(temperature=0.8, max_new_tokens=60), 16)
    generations = list(engine.run([Request(0, prompt, 5, bound)]))
    assert len(generations) == len(bound)


def find_late(model: ModelHandle, chosen: Sequence[Policy]) -> list[str]:
    """The settings that a plan let pass and that are refused while they decode."""
    try:
        run_all(model, chosen)
    except KvatlasError:
        late = []
        for policy in chosen:
            try:
                run_all(model, [policy])
            except KvatlasError as error:
                late.append(f"{policy.setting}: {error}")
        return late
    return []


#: A model, its options, and of how many settings that a plan lets pass one is decoded. Of 460 pairs, half of which are
#: left to the deep ones, 52 are refused.
CASES = [
    *((kind, {}, 3) for kind in MODELS),
    *(pytest.param(kind, {}, 1, marks=pytest.mark.deep) for kind in MODELS),
    *(
        pytest.param(kind, options, 1, marks=pytest.mark.deep)
        for kind in ("llama", "gpt_oss")
        for options in ({"weights": "bfloat16"}, {"weights": "int8"}, {"dtype": "bfloat16"})
    ),
]


@pytest.mark.newest
@pytest.mark.parametrize(("kind", "options", "step"), CASES, ids=str)
def test_each_refusal_comes_from_planning(
    random_models: dict[str, ModelHandle], kind: str, options: dict[str, str], step: int, record_property: Any
) -> None:
    model = models.find(random_models[kind].name, **options)
    pairs = refusals = 0
    accepted = []
    turn = MODELS.index(kind)
    for name, values in list(drawn(kind))[turn % 2 :: 2] if step > 1 else drawn(kind):
        pairs += 1
        spec = {
            "models": [{"model": model.name, **options}],
            "benchmarks": ["CHAIN4"],
            "problems": 1,
            "baseline": [],
            "settings": [{"policy": name, **values}],
            "sampling": {"max_new_tokens": 60},
        }
        try:
            plan = make_plan(parse_spec(spec))
            plan.estimate()
        except KvatlasError as error:
            refusals += 1
            said = str(error)
            assert name in said
            assert any(parameter in said for parameter in values) or "rotation" in said, said
            if "does not fit" in said:
                assert repr(model.name) in said
            continue
        accepted.append(plan.policies[0][0])
    record_property("pairs", pairs)
    record_property("refusals", refusals)
    assert 0 < refusals < pairs
    decoded = accepted[turn % step :: step]
    assert find_late(dataclasses.replace(model, overrides=models.ENDLESS), decoded) == []


@pytest.mark.newest
@pytest.mark.parametrize("kind", MODELS)
def test_a_plan_knows_the_sizes_of_the_cache(random_models: dict[str, ModelHandle], kind: str) -> None:
    """Before weights are loaded, what the layers then turn out to be."""
    model = models.find(random_models[kind].name)
    planned = model.shape
    full = policies.from_setting(Setting.from_parameters("full"))
    engine = Engine(model, model.load(), [full], Sampling(max_new_tokens=2), 1)
    list(engine.run([Request(0, tuple(range(5, 12)), 5, (full,))]))
    if kind != "gemma4_text":
        assert planned.by_layer == model.shape.by_layer
        assert (planned.heads, planned.kv_heads) == (model.shape.heads, model.shape.kv_heads)
