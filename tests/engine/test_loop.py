"""Traces are the same however they are decoded, and the recorded evictions equal what the cache really holds."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from kvatlas import models, policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request, scheduler
from kvatlas.engine.cache import KVCache
from kvatlas.engine.rows import Row, compress
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy
from tests.conftest import ARCHITECTURES
from tests.decoding import BUDGET, endless, grid, outcome, requests, run


@pytest.mark.newest
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_full_cache_equals_generate(random_models: dict[str, ModelHandle], kind: str) -> None:
    handle = random_models[kind]
    work = requests(handle, [policies.from_setting(Setting.from_parameters("full"))], 3)
    _, generations = run(handle, work, 2, temperature=0.0, max_new_tokens=12)
    model = handle.load()
    for generation in generations:
        prompt = torch.tensor([work[generation.key].prompt])
        wanted = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, use_cache=True
        )
        assert generation.tokens == tuple(wanted[0, prompt.shape[1] :].tolist())


def packed() -> list[Policy]:
    """Settings that store keys and values in fewer bits, and the same in 16."""
    bits: list[dict[str, Any]] = [{}, {"kv_bits": 8}, {"kv_bits": 4, "residual": 8}, {"key_bits": 4, "value_bits": 2}]
    results = [Setting.from_parameters("full", **own) for own in bits]
    for name in ("random", "rkv"):
        results += [Setting.from_parameters(name, kv_budget=80, local_window=32, ratio=0.3, **own) for own in bits[::2]]
    return [policies.from_setting(setting) for setting in results]


@pytest.mark.parametrize(
    ("kind", "settings", "count"),
    [("llama", grid, 3), ("gemma3", lambda: grid()[::3], 2), ("llama", packed, 1)],
    ids=["grid", "windows", "packed"],
)
def test_traces_do_not_depend_on_batch_size_order_or_sharing(
    random_models: dict[str, ModelHandle], kind: str, settings: Callable[[], list[Policy]], count: int
) -> None:
    model = random_models[kind]
    work = requests(model, settings(), count, (44, 60))
    alone, wanted = run(model, work, 1, max_new_tokens=84)
    expected = outcome(wanted)
    assert len(expected) == len(work) * len(settings())
    assert any(g.usage.compressions > 1 for g in wanted)
    assert outcome(run(model, work[::-1], 3, max_new_tokens=84)[1]) == expected
    separate = [Request(r.key, r.prompt, r.stream, (policy,)) for r in work for policy in r.policies]
    apart, result = run(model, separate, 64, max_new_tokens=84)
    assert outcome(result) == expected
    assert alone.decoded_tokens < apart.decoded_tokens
    # Again, on slots that other sequences left behind.
    assert outcome(apart.run(separate[::-5])).items() <= expected.items()
    full = {g.key: g.tokens for g in wanted if g.policy == policies.from_setting(Setting.from_parameters("full"))}
    for generation in wanted:
        # Before its first compression every setting of 16 bits writes what the full cache writes.
        if generation.policy.budget and not generation.policy.storage.packed:
            shared = generation.policy.budget.tokens - generation.usage.prompt_tokens + 1
            assert generation.tokens[:shared] == full[generation.key][:shared]
        assert generation.policy.budget or set(generation.eviction_trace.evicted_at) == {0}
    if settings is packed:
        # Fewer bits change the traces of the full cache, too.
        assert len({g.tokens for g in wanted if g.key == 0 and g.policy.budget is None}) > 2


def test_without_a_full_setting_the_trunk_ends_at_its_last_fork(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    work = requests(model, grid()[1:], 2, (44, 60))
    engine, generations = run(model, work, 16, max_new_tokens=84)
    separate = [Request(r.key, r.prompt, r.stream, (policy,)) for r in work for policy in r.policies]
    assert outcome(generations) == outcome(run(model, separate, 16, max_new_tokens=84)[1])
    assert sum(generation.decoded for generation in generations) == engine.decoded_tokens


def test_requests_are_whole_in_about_the_order_in_which_they_started(random_models: dict[str, ModelHandle]) -> None:
    """A run that is stopped has whole problems, and no problem waits for the end of all others."""
    model = endless(random_models["llama"])
    count = 10
    _, generations = run(model, requests(model, grid()[1:5], count), batch_size=4)
    order = [generation.key for generation in generations]
    last_ends = {key: place for place, key in enumerate(order)}
    for key in range(count - 3):
        assert last_ends[key] < order.index(key + 3)


def test_a_trace_cut_at_the_limit_is_not_finished(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    _, generations = run(
        model, requests(model, [policies.from_setting(Setting.from_parameters("full"))], 6), 8, max_new_tokens=1
    )
    assert all(len(g.tokens) == 1 and g.usage.mean_kv_tokens == g.usage.prompt_tokens for g in generations)
    assert all(g.finished == (g.tokens[-1] in model.stops) for g in generations)


def test_half_precision_decodes_under_observing_policies(r1_model: Callable[..., ModelHandle]) -> None:
    """The types of a GPU run, on a CPU: weights, cache and masks in bfloat16, scores and random numbers in more."""
    model = models.find(r1_model().name, dtype="bfloat16", think_close="")
    common = {"kv_budget": BUDGET, "local_window": 16, "ratio": 0.3, "ratio_over": "thinking"}
    settings = [
        policies.from_setting(Setting.from_parameters(name, **common)) for name in ("dynts", "h2o", "snapkv", "random")
    ]
    engine, generations = run(
        model, requests(model, [policies.from_setting(Setting.from_parameters("full")), *settings], 1), 8
    )
    assert engine.cache.dtype is torch.bfloat16
    assert {generation.policy.name for generation in generations} == {"full", "dynts", "h2o", "snapkv", "random"}
    assert any(generation.usage.compressions for generation in generations)
    assert all(g.usage.peak_kv_tokens <= BUDGET for g in generations if g.policy.name != "full")


def selections(model: ModelHandle) -> list[Policy]:
    """Every policy that this model can run without files."""
    results = []
    for name in policies.policies.names():
        with suppress(KvatlasError):
            policy = policies.from_setting(
                Setting.from_parameters(name, kv_budget=BUDGET, local_window=8, ratio=0.3, ratio_over="thinking")
            )
            policy.check(model)
            results.append(policy)
    return results


def checked(model: ModelHandle, cache: KVCache, row: Row[Any]) -> int:
    """Compress, and compare the log with the positions that are held."""
    before = row.position
    evicted = compress(model, cache, row)
    stored = [set(head.tolist()) for layer in row.kept for head in layer]
    assert row.cached.length == len(stored[0])
    eviction_trace = row.eviction_trace()
    assert before == row.position == len(eviction_trace.evicted_at)
    for position in range(row.position):
        holding = sum(position in positions for positions in stored)
        assert eviction_trace.kept_by[position] == holding
        assert (eviction_trace.evicted_at[position] == 0) == (holding > 0)
        assert eviction_trace.evicted_at[position] <= len(row.tokens)
    return evicted


def test_the_log_equals_what_the_cache_holds_at_every_compression(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "compress", checked)
    model = endless(random_models["qwen3"])
    chosen = selections(model)
    assert {"window", "random"} <= {policy.name for policy in chosen}
    engine = Engine(model, model.load(), chosen, Sampling(0.9, 20, 0.95, 160), 16)
    generations = list(engine.run(requests(model, chosen, 2)))
    assert len(generations) == 2 * len(chosen)
    for generation in generations:
        eviction_trace = generation.eviction_trace
        cached = generation.usage.prompt_tokens + len(generation.tokens) - 1
        assert len(eviction_trace.evicted_at) == len(eviction_trace.kept_by) == cached
        assert set(eviction_trace.evicted_at) > {0}
        # Steps at which tokens left are compressions: no more of them than were counted.
        assert len(set(eviction_trace.evicted_at) - {0}) <= generation.usage.compressions
        if generation.policy.budget.keep_prompt:
            assert set(eviction_trace.kept_by[: generation.usage.prompt_tokens]) == {eviction_trace.holders}
        layers, heads = generation.policy.scope.width(model.shape)
        assert eviction_trace.holders == layers * heads


def test_engines_of_one_model_decode_in_turns(tiny_llama: ModelHandle) -> None:
    """The first to finish leaves the model to the other."""
    handle = endless(tiny_llama)
    model = handle.load()
    (policy, *_) = grid()
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=20)

    def work(stream: int) -> list[Request[int]]:
        return [Request(row, tuple(range(5, 12 + row)), stream + row, (policy,)) for row in range(4)]

    def engine() -> Engine:
        return Engine(handle, model, [policy], sampling, 2)

    before = model.config._attn_implementation
    alone = [outcome(engine().run(work(stream))) for stream in (0, 100)]
    runs = [engine().run(work(stream)) for stream in (0, 100)]
    firsts = [next(run) for run in runs]
    in_turns = [outcome([first, *run]) for first, run in zip(firsts, runs, strict=True)]
    assert in_turns == alone
    assert model.config._attn_implementation == before
