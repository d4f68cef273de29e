from pathlib import Path

import pytest
import torch

from kvatlas import models, policies
from kvatlas.core import Setting
from kvatlas.engine import Request
from kvatlas.engine.cache import GROWTH, PAGE, pages_for
from kvatlas.models import ModelHandle
from tests.conftest import ARCHITECTURES
from tests.decoding import BUDGET, endless, grid, outcome, requests, run
from tests.r1 import save_model


@pytest.mark.newest
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_full_cache_equals_generate(random_models: dict[str, ModelHandle], kind: str) -> None:
    handle = random_models[kind]
    work = requests(handle, [policies.of(Setting.of("full"))], 3)
    _, generations = run(handle, work, 2, temperature=0.0, max_new_tokens=24)
    model = handle.load()
    for generation in generations:
        prompt = torch.tensor([work[generation.key].prompt])
        wanted = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, use_cache=True
        )
        assert generation.tokens == tuple(wanted[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize(("kind", "count"), [("llama", 4), ("gemma3", 2)])
def test_traces_do_not_depend_on_batch_size_order_or_sharing(
    random_models: dict[str, ModelHandle], kind: str, count: int
) -> None:
    model = random_models[kind]
    work = requests(model, grid(), count)
    alone, wanted = run(model, work, 1)
    expected = outcome(wanted)
    assert len(expected) == len(work) * len(grid())
    assert any(g.usage.compressions > 1 for g in wanted)
    assert outcome(run(model, work[::-1], 3)[1]) == expected
    separate = [Request(r.key, r.prompt, r.stream, (policy,)) for r in work for policy in r.policies]
    apart, result = run(model, separate, 64)
    assert outcome(result) == expected
    assert alone.decoded_tokens < apart.decoded_tokens


def test_without_a_full_setting_the_trunk_ends_at_its_last_fork(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    work = requests(model, grid()[1:], 3)
    engine, generations = run(model, work, 16)
    separate = [Request(r.key, r.prompt, r.stream, (policy,)) for r in work for policy in r.policies]
    assert outcome(generations) == outcome(run(model, separate, 16)[1])
    assert sum(generation.decoded for generation in generations) == engine.decoded_tokens


def test_compression_obeys_the_budget_and_memory_stays_constant(random_models: dict[str, ModelHandle]) -> None:
    model = endless(random_models["llama"])
    long = policies.of(Setting.of("window", kv_budget=BUDGET, local_window=8, ratio=0.2, ratio_over="thinking"))
    work = requests(model, [long], 6)
    engine, generations = run(model, work, 8, max_new_tokens=400)
    assert all(len(generation.tokens) == 400 for generation in generations)
    assert all(generation.usage.peak_kv_tokens == BUDGET for generation in generations)
    # 96 tokens fit into two pages, however long the traces are; beside them is the page of no sequence.
    pages = 1 + 6 * pages_for(BUDGET)
    least = pages * PAGE * model.shape.kv_bytes_per_token()
    assert least <= engine.cache.bytes <= least * (1 + 1 / GROWTH)


def test_two_runs_of_one_engine_do_not_influence_each_other(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    work = requests(model, grid(), 4)
    engine, _ = run(model, work[:2], 16)
    again = outcome(engine.run(work[2:]))
    assert again == outcome(run(model, work[2:], 16)[1])


def test_a_trace_cut_at_the_limit_is_not_finished(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    _, generations = run(model, requests(model, [policies.of(Setting.of("full"))], 6), 8, max_new_tokens=1)
    assert all(len(g.tokens) == 1 and g.usage.mean_kv_tokens == g.usage.prompt_tokens for g in generations)
    assert all(g.finished == (g.tokens[-1] in model.stops) for g in generations)


def test_settings_share_their_random_numbers(random_models: dict[str, ModelHandle]) -> None:
    """Before its first compression every setting writes what the full cache writes."""
    model = random_models["llama"]
    _, generations = run(model, requests(model, grid(), 4), 16)
    full = {g.key: g.tokens for g in generations if g.policy.name == "full"}
    for generation in generations:
        shared = BUDGET - generation.usage.prompt_tokens + 1
        assert generation.tokens[:shared] == full[generation.key][:shared]
    assert any(generation.tokens != full[generation.key] for generation in generations)


def test_half_precision_decodes_under_observing_policies(tmp_path: Path) -> None:
    """The types of a GPU run, on a CPU: weights, cache and masks in bfloat16, scores and random numbers in more."""
    model = models.find(save_model("llama", tmp_path / "m").name, dtype="bfloat16", think_close="")
    common = {"kv_budget": BUDGET, "local_window": 16, "ratio": 0.3, "ratio_over": "thinking"}
    settings = [policies.of(Setting.of(name, **common)) for name in ("dynts", "h2o", "snapkv", "random")]
    engine, generations = run(model, requests(model, [policies.of(Setting.of("full")), *settings], 1), 8)
    assert engine.cache.dtype is torch.bfloat16
    assert {generation.policy.name for generation in generations} == {"full", "dynts", "h2o", "snapkv", "random"}
    assert any(generation.usage.compressions for generation in generations)
    assert all(g.usage.peak_kv_tokens <= BUDGET for g in generations if g.policy.name != "full")
