"""Tokens that a request puts back: they stay within the budget, and nothing changes for requests without."""

from dataclasses import replace

import pytest

from kvatlas import models, policies
from kvatlas.core import Setting
from kvatlas.engine import Generation
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy
from kvatlas.policies.put_back import PutBack
from tests.decoding import endless, outcome, requests, run

LIMIT = 130


@pytest.fixture(scope="module")
def model() -> ModelHandle:
    return endless(models.find("embedded:tiny-llama"))


def policy_named(name: str) -> Policy:
    return policies.from_setting(Setting.from_parameters(name, kv_budget=96, local_window=8, ratio=0.25))


def decode(model: ModelHandle, policy: Policy, put_back: PutBack | None) -> Generation[int]:
    work = [replace(request, put_back=put_back) for request in requests(model, [policy], 1)]
    _, (generation,) = run(model, work, 1, max_new_tokens=LIMIT)
    return generation


@pytest.mark.parametrize("name", ["window", "random", "h2o"])
def test_an_empty_set_changes_nothing(model: ModelHandle, name: str) -> None:
    policy = policy_named(name)
    assert outcome([decode(model, policy, PutBack())]) == outcome([decode(model, policy, None)])


@pytest.mark.parametrize("name", ["window", "random", "h2o"])
def test_tokens_stay_and_others_leave(model: ModelHandle, name: str) -> None:
    policy = policy_named(name)
    plain = decode(model, policy, None)
    first = min(step for step in plain.eviction_trace.evicted_at if step)
    evicted = [place for place, step in enumerate(plain.eviction_trace.evicted_at) if step == first][:3]
    put_back = PutBack(evicted)
    changed = decode(model, policy, put_back)
    # The trunk is the same, and so is the number of tokens at each step.
    assert changed.tokens[:first] == plain.tokens[:first]
    assert (changed.usage.peak_kv_tokens, changed.usage.compressions) == (
        plain.usage.peak_kv_tokens,
        plain.usage.compressions,
    )
    assert changed.usage.mean_kv_tokens == plain.usage.mean_kv_tokens
    holders = changed.eviction_trace.holders
    assert [changed.eviction_trace.kept_by[place] for place in evicted] == [holders] * len(evicted)


def test_those_with_the_lowest_scores_leave(model: ModelHandle) -> None:
    policy = policy_named("window")
    plain = decode(model, policy, None)
    first = min(step for step in plain.eviction_trace.evicted_at if step)
    evicted = [place for place, step in enumerate(plain.eviction_trace.evicted_at) if step == first]
    put_back = PutBack(evicted[:2])
    decode(model, policy, put_back)
    choice = put_back.choices[min(put_back.choices)]
    ranks = [float(choice.ranks[place]) for place in evicted]
    # All that left had ranks from the number of slots on, each once.
    assert sorted(ranks) == list(range(choice.slots, choice.slots + len(evicted)))


def test_no_compression_takes_place_before_a_number_of_new_tokens(model: ModelHandle) -> None:
    policy = policy_named("window")
    full = policies.from_setting(Setting.from_parameters("full"))
    late = decode(model, policy, PutBack(until=LIMIT - 10))
    expected = decode(model, full, None)
    assert late.tokens[: LIMIT - 10] == expected.tokens[: LIMIT - 10]
    assert late.usage.compressions == 1
