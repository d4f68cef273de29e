"""Keep K tokens, compress every B: the kept sets are those of the loops that serving engines and papers run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request, scheduler
from kvatlas.engine.cache import KVCache
from kvatlas.engine.rows import Row, compress
from kvatlas.models import ModelHandle
from kvatlas.noise import uniform
from kvatlas.policies import CompressingPolicy
from kvatlas.policies.audit import audit_policy
from kvatlas.sweeps import make_plan, parse_spec
from tests.decoding import endless, prompts

K, B, WINDOW, NEW = 70, 16, 8, 130
#: Tokens cached after the prompt when a compression may fire: not the last one, with which a trace ends.
PASSES = NEW - 2
#: (tokens so far, kept true positions) of each compression.
Kept = list[tuple[int, list[int]]]
Score = Callable[[int, int], float]


def rkv_loop(prompt: int, score: Score) -> Kept:
    """R-KV (HuggingFace/rkv: `CausalLM_forward`, `update_kv`): after a pass a flag says whether the length is a
    multiple of `divide_length`; the next pass puts its token into the cache and then, from the budget on, keeps the
    best budget - window of the others and the last window."""
    results: Kept = []
    cached, length = list(range(prompt)), prompt
    flag = length % B == 0
    for _ in range(PASSES):
        cached.append(length)
        length += 1
        if flag and len(cached) > K:
            past = cached[:-WINDOW]
            best = sorted(past, key=lambda token: -score(length, token))[: K - WINDOW]
            cached = sorted(best) + cached[-WINDOW:]
            results.append((length, cached.copy()))
        flag = length % B == 0
    return results


def triattention_loop(prompt: int, score: Score, count_prompt: bool) -> Kept:
    """TriAttention (`use_slack_trigger`; in its vLLM runner the threshold is kv_budget + divide_length, and the
    prefill where that does not count): the prompt is pinned, and the last window of the others stays."""
    results: Kept = []
    cached, position = list(range(prompt)), prompt
    for _ in range(PASSES):
        cached.append(position)
        position += 1
        size = len(cached) if count_prompt else len(cached) - prompt
        if size >= K + B:
            room = K - prompt if count_prompt else K
            decoded = cached[prompt:]
            best = sorted(decoded[:-WINDOW], key=lambda token: -score(position, token))[: room - WINDOW]
            cached = [*range(prompt), *sorted(best), *decoded[-WINDOW:]]
            results.append((position, cached.copy()))
    return results


def periodic_loop(prompt: int, score: Score) -> Kept:
    """TensorRT-LLM (`beta`) and kvpress (`compression_interval`): with each multiple of B new tokens, once there are
    more than K, here of those after the prompt."""
    results: Kept = []
    new: list[int] = []
    for step in range(1, PASSES + 1):
        new.append(prompt + step - 1)
        if step % B == 0 and len(new) > K:
            best = sorted(new[:-WINDOW], key=lambda token: -score(prompt + step, token))[: K - WINDOW]
            new = sorted(best) + new[-WINDOW:]
            results.append((prompt + step, [*range(prompt), *new]))
    return results


@pytest.mark.parametrize(
    ("values", "loop"),
    [
        ({"every_from": "start", "keep_prompt": False}, rkv_loop),
        ({}, lambda prompt, score: triattention_loop(prompt, score, count_prompt=True)),
        ({"budget_over": "thinking"}, lambda prompt, score: triattention_loop(prompt, score, count_prompt=False)),
        ({"budget_over": "thinking", "every_from": "prompt"}, periodic_loop),
    ],
    ids=["r-kv", "triattention", "triattention, prompt beside", "tensorrt-llm"],
)
def test_kept_sets_are_those_of_the_references(
    random_models: dict[str, ModelHandle],
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    loop: Callable[[int, Score], Kept],
) -> None:
    """Kept positions of the first choice of every compression."""
    seen: dict[int, Kept] = {}

    def watched(model: ModelHandle, cache: KVCache, row: Row[Any]) -> int:
        evicted = compress(model, cache, row)
        seen.setdefault(row.request.key, []).append((row.position, row.kept[0, 0].tolist()))
        return evicted

    monkeypatch.setattr(scheduler, "compress", watched)
    model = endless(random_models["llama"])
    policy = policies.from_setting(
        Setting.from_parameters("random", kv_budget=K, local_window=WINDOW, every=B, scope="global", **values)
    )
    asked = [Request(i, prompt, 100 + i, (policy,)) for i, prompt in enumerate(prompts(model, 3))]
    engine = Engine(model, model.load(), [policy], Sampling(0.9, 20, 0.95, NEW), 3)
    generations = {item.key: item for item in engine.run(asked)}

    for request in asked:

        def score(length: int, token: int, stream: int = request.stream) -> float:
            item = torch.tensor([stream])
            return float(uniform(item, length, torch.tensor([token]), torch.ones_like(item)))

        expected = loop(len(request.prompt), score)
        assert len(expected) > 2
        assert seen[request.key] == expected
        peak = generations[request.key].usage.peak_kv_tokens
        assert peak <= policy.budget.most(len(request.prompt))


def test_a_setting_names_them_where_they_are_not_the_published_rule() -> None:
    published = policies.from_setting(Setting.from_parameters("window", kv_budget=64, local_window=4, ratio=0.3))
    assert published.setting.id == (
        '{"keep_prompt":true,"kv_budget":64,"local_window":4,"policy":"window","ratio":0.3,"ratio_over":"thinking"}'
    )
    engines = Setting.from_parameters("window", kv_budget=64, local_window=4, every=16, budget_over="thinking")
    result = policies.from_setting(engines)
    assert result.setting == Setting.from_parameters("window", **{**engines.values, "keep_prompt": True})
    assert policies.from_setting(result.setting) == result
    phased = policies.from_setting(
        Setting.from_parameters("window", kv_budget=64, local_window=4, every=16, every_from="start")
    )
    assert phased.setting.values["every_from"] == "start"


def test_the_audit_and_the_plan_reckon_in_these_terms(spec_data: Callable[..., dict[str, Any]]) -> None:
    def of(**values: Any) -> CompressingPolicy:
        return policies.from_setting(
            Setting.from_parameters("window", kv_budget=64, local_window=4, every=16, **values)
        )

    # 64 tokens stay: of the cache with a prompt of 50 ten places, beside the prompt sixty.
    beside, counted = audit_policy(of(budget_over="thinking"), [50]), audit_policy(of(), [50])
    assert (counted.median, beside.median) == (10.0, 60.0)
    with pytest.raises(KvatlasError, match="expected budgets above 74"):
        of().check_prompt(70, "this prompt")
    of(budget_over="thinking").check_prompt(70, "this prompt")

    settings = {"policy": "window", "local_window": 4, "budget_over": "thinking"}
    plan = make_plan(parse_spec(spec_data(settings=settings, axes={"kv_budget": [20, 30], "every": [8, 16]})))
    usual = make_plan(parse_spec(spec_data()))
    assert set(plan.manifest().axes) == {("kv_budget", (20, 30)), ("every", (8, 16))}
    longest = max(max(lengths) for lengths in plan.prompts.values())
    (model,) = plan.models
    assert plan.estimate()["kv_bytes_per_sequence"] == (longest + 30 + 16) * model.kv_bytes_per_token
    # What a run is stored under does not change with them: they are part of the setting.
    keys = plan.compute_keys()
    (key,) = {keys[name] for name in keys if name[2].policy == "window" and name[1] == "CHAIN4"}
    assert key in usual.compute_keys().values()
