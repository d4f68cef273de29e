"""Tokens that a request puts back: they stay within the budget, and nothing changes for requests without."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvatlas import models, policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Checkpoint, Engine, Generation, Request
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy
from kvatlas.policies.selection import PutBack
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


def test_tokens_that_are_released_compete_again(model: ModelHandle) -> None:
    policy = policy_named("window")
    plain = decode(model, policy, None)
    first, second = sorted({step for step in plain.eviction_trace.evicted_at if step})[:2]
    evicted = [place for place, step in enumerate(plain.eviction_trace.evicted_at) if step == first][:3]
    prompt = plain.usage.prompt_tokens
    # A compression has one new token more than have been through the model.
    kept = decode(model, policy, PutBack(evicted, released_at=prompt + second))
    released = decode(model, policy, PutBack(evicted, released_at=prompt + second - 1))
    assert not any(kept.eviction_trace.evicted_at[place] == second for place in evicted)
    assert all(released.eviction_trace.evicted_at[place] == second for place in evicted)
    assert decode(model, policy, PutBack(evicted, released_at=0)).tokens == plain.tokens


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


# -- checkpoints -------------------------------------------------------------------------------------------------------


def fork_all(
    model: ModelHandle, policy: Policy, put_backs: list[PutBack], stream: int | None = None
) -> tuple[Engine, list[Generation[int]]]:
    """Decode a request that leaves checkpoints, then start one for each set of tokens.

    They start at the last checkpoint, or with a random `stream` of their own at the first.
    """
    (request,) = requests(model, [policy], 1)
    checkpoints: dict[int, Checkpoint] = {}
    generations: dict[int, Generation[int]] = {}

    def work() -> Iterator[Request[int] | None]:
        yield replace(request, key=-1, put_back=PutBack(), checkpoints=checkpoints)
        while not generations:
            yield None
        forked = request
        start = checkpoints[max(checkpoints)]
        if stream is not None:
            forked = replace(request, stream=stream)
            start = checkpoints[min(checkpoints)]
        for key, put_back in enumerate(put_backs):
            yield replace(forked, key=key, put_back=put_back, start=start)

    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.95, max_new_tokens=LIMIT)
    engine = Engine(model, model.load(), [policy], sampling, 3)
    for generation in engine.run(work()):
        generations[generation.key] = generation
    for checkpoint in checkpoints.values():
        checkpoint.drop()
    return engine, [generations[key] for key in sorted(generations)]


@pytest.mark.parametrize("name", ["window", "random", "h2o", "snapkv", "rkv", "lazyeviction"])
def test_what_starts_at_a_checkpoint_equals_what_is_decoded_from_the_start(model: ModelHandle, name: str) -> None:
    policy = policy_named(name)
    plain = decode(model, policy, None)
    last = max(plain.eviction_trace.evicted_at)
    evicted = [place for place, step in enumerate(plain.eviction_trace.evicted_at) if step == last]
    engine, (trunk, *forks) = fork_all(model, policy, [PutBack(), PutBack(evicted[:3]), PutBack()])
    assert outcome([replace(trunk, key=0)]) == outcome([plain])
    assert outcome([replace(forks[0], key=0)]) == outcome([replace(forks[2], key=0)]) == outcome([plain])
    assert 0 < forks[0].decoded < plain.decoded == trunk.decoded
    if plain.eviction_trace.holders == 1:
        whole = decode(model, policy, PutBack(evicted[:3]))
        assert outcome([replace(forks[1], key=0)]) == outcome([whole])
    # Nothing is held at the end but the page of no sequence.
    assert sum(engine.cache.holders) == 1


def test_other_random_numbers_begin_at_the_checkpoint(model: ModelHandle) -> None:
    policy = policy_named("window")
    plain = decode(model, policy, None)
    _, (_, fork, late) = fork_all(model, policy, [PutBack(), PutBack(until=LIMIT - 5)], stream=4)
    first = min(step for step in plain.eviction_trace.evicted_at if step)
    for generation in (fork, late):
        assert generation.tokens[:first] == plain.tokens[:first]
        assert generation.tokens[first:] != plain.tokens[first:]
    assert fork.usage.compressions == plain.usage.compressions
    assert late.usage.compressions == 1
    assert late.usage.peak_kv_tokens > plain.usage.peak_kv_tokens


def test_a_checkpoint_of_another_cache_is_refused(model: ModelHandle) -> None:
    policy = policy_named("window")
    (request,) = requests(model, [policy], 1)
    checkpoints: dict[int, Checkpoint] = {}
    run(model, [replace(request, put_back=PutBack(), checkpoints=checkpoints)], 1, max_new_tokens=LIMIT)
    start = checkpoints[min(checkpoints)]
    with pytest.raises(KvatlasError, match="checkpoints"):
        run(model, [replace(request, start=start)], 1, max_new_tokens=LIMIT)
