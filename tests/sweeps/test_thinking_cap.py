"""Sweeps over a cap on thinking: the same traces however they are decoded, keys as before, and costs of both kinds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import Claim, Sampling, Setting, Trace
from kvatlas.models import ModelHandle
from kvatlas.report.description import one_page, say
from kvatlas.report.result import analyse
from kvatlas.report.sources import ReadOptions
from kvatlas.serve.service import GenerationRequest, Service, find_policy, stream_of
from kvatlas.stats.losses import losses_of
from kvatlas.stats.orders import TestedSetting, orders_of_claims
from kvatlas.stats.run_data import RunData
from kvatlas.stats.validity import count_compressed
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.decoding import prompts
from tests.stats.synthetic import manifest
from tests.stored import store_run
from tests.sweeps.conftest import Build, contents

CAPS = [0, 9, 400, "unlimited"]
SAMPLING = Sampling(max_new_tokens=12)
RULE: dict[str, Any] = {"kv_budget": 63, "local_window": 6, "ratio": 0.3}


@pytest.fixture(scope="module")
def build(random_models: dict[str, ModelHandle]) -> Build:
    def spec(**changes: Any) -> dict[str, Any]:
        return {
            "models": [random_models["qwen2"].name],
            "benchmarks": ["CHAIN5"],
            "problems": 3,
            "seed": 11,
            "sampling": {"temperature": 0.8, "max_new_tokens": 52},
            "settings": [{"policy": "full"}, {"policy": "random", **RULE}],
            "baseline": {"policy": "window", **RULE},
            "axes": {"thinking_tokens": CAPS},
            **changes,
        }

    return spec


def test_sharing_and_resuming_change_nothing(build: Build, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    for cap in CAPS:
        axes = {"thinking_tokens": [cap]}
        sweep(make_plan(parse_spec(build(axes=axes))), apart, workers=1, batch_size=1)
    expected = contents(apart)
    assert len(expected) == 3 * (2 * len(CAPS) + 1)

    whole = tmp_path / "whole"
    sweep(make_plan(parse_spec(build())), whole, workers=1)
    assert contents(whole) == expected

    # A run that goes on: with other caps, and more problems.
    resumed = tmp_path / "resumed"
    sweep(make_plan(parse_spec(build(problems=1, axes={"thinking_tokens": [9]}))), resumed, workers=1)
    sweep(make_plan(parse_spec(build())), resumed, workers=1, batch_size=2)
    assert contents(resumed) == expected


def test_a_cap_that_no_trace_reaches_is_noted(build: Build) -> None:
    note = "Nothing is cut at thinking_tokens 400: a trace ends at max_new_tokens, 52."
    assert note in make_plan(parse_spec(build())).notes
    assert not any("Nothing is cut" in one for one in make_plan(parse_spec(build(axes={"thinking_tokens": [9]}))).notes)


def test_the_key_of_a_setting_without_a_cap_is_that_of_earlier_versions(build: Build) -> None:
    plan = make_plan(parse_spec(build()))
    plain = make_plan(parse_spec(build(axes={})))
    keys = plan.compute_keys()
    assert plain.compute_keys().items() <= keys.items()
    assert {str(setting) for _, _, setting in plain.compute_keys()} == {
        "full",
        "random(keep_prompt=True, kv_budget=63, local_window=6, ratio=0.3, ratio_over=thinking)",
        "window(keep_prompt=True, kv_budget=63, local_window=6, ratio=0.3, ratio_over=thinking)",
    }
    # Two policies with four caps each: all caps of a budget have an order of their own, those of `full` share one.
    tested = [
        TestedSetting(cell.setting, cell.kv_bytes)
        for cell in plan.expected()
        if cell.benchmark == plan.benchmarks[0].name and not cell.baseline
    ]
    assert len(orders_of_claims(tested, [4000], [4000], 1, 0.03)[Claim.LIKE]) == 1 + len(CAPS)


def test_a_server_ends_thinking(tiny_llama: ModelHandle) -> None:
    service = Service(tiny_llama, find_policy(tiny_llama, "full", {"thinking_tokens": "5"}), SAMPLING, 4, 6).start()
    try:
        prompt = prompts(tiny_llama, 1)[0][:40]
        request = GenerationRequest(prompt, SAMPLING, stream_of(5, prompt, 0))
        tokens = service.ask([request])[0].generation.result(60).tokens
    finally:
        service.close()
    assert tokens[5] == tiny_llama.think_close


# -- statistics --------------------------------------------------------------------------------------------------------

AXES = (("kv_budget", (64, 1024)), ("thinking_tokens", (40, 80, "unlimited")))


def capped(kept: int, cap: int | str) -> Setting:
    values = {"kv_budget": kept, "local_window": 8, "ratio": 0.5}
    return Setting.from_parameters("rkv", **values, **({} if cap == "unlimited" else {"thinking_tokens": cap}))


SETTINGS = [capped(kept, cap) for kept in AXES[0][1] for cap in AXES[1][1]]


def with_costs(trace: Trace) -> Trace:
    """Thinking of 100 tokens, or up to the cap; 30 tokens in the cache or half of what is written."""
    values = trace.setting.values
    thinking = min(100, values.get("thinking_tokens", 100))
    is_compressed = values.get("kv_budget") == 64
    usage = replace(
        trace.usage,
        thinking_tokens=thinking,
        output_tokens=thinking + 10,
        mean_kv_tokens=30.0 if is_compressed else thinking / 2,
        compressions=2 * is_compressed,
    )
    return replace(trace, usage=usage)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., RunData]:
    def store(chance: Callable[[Setting], float]) -> RunData:
        plan = manifest(SETTINGS, problems=150, samples=1, axes=AXES)
        return RunData.open(store_run(tmp_path / "run", plan, chance, with_costs), lose_at_most=5)

    return store


def test_the_cheapest_setting_costs_memory_times_written_tokens(stored: Callable[..., RunData]) -> None:
    run = stored(lambda setting: 1.0)
    (choice,) = analyse([run], ReadOptions(lose_at_most=5)).choices
    # By memory alone a cap of 40 without compressions, of 20 tokens, is the cheapest: 30 tokens are kept elsewhere.
    assert choice.by_memory is not None
    assert choice.by_memory.setting == capped(1024, 40)
    ways = {way.kind: way for way in choice.ways}
    assert {kind: way.cell.setting for kind, way in ways.items() if way.cell} == {
        "kept": capped(64, "unlimited"),
        "written": capped(1024, 40),
        "both": capped(64, 40),
    }
    full = 50.0 * 110
    assert ways["kept"].saving.work == pytest.approx(30 * 110 / full)
    assert ways["written"].saving.work == pytest.approx(20 * 50 / full)
    assert ways["both"].saving.work == pytest.approx(30 * 50 / full)
    assert ways["both"].saving.written == pytest.approx(50 / 110)

    text = " ".join(one_page(analyse([run], ReadOptions(lose_at_most=5))).split())
    assert "writes 45 % of its tokens: 18 % of memory times written tokens" in text
    assert "60 % where fewer tokens stay (rkv kv_budget 64)" in text
    document = analyse([run], ReadOptions(lose_at_most=5)).to_dict()["recommendation"]
    assert document["ways"]["written"]["saving"] == {"memory": 60.0, "work": 81.8182, "written": 54.5455}


def test_where_a_cap_loses_answers_fewer_tokens_are_chosen(stored: Callable[..., RunData]) -> None:
    run = stored(lambda setting: 1.0 if "thinking_tokens" not in setting.values else 0.5)
    (choice,) = analyse([run], ReadOptions(lose_at_most=5)).choices
    assert choice.by_memory is not None
    assert choice.by_memory.setting == capped(64, "unlimited")
    assert {way.kind: way.cell is not None for way in choice.ways} == {"kept": True, "written": False, "both": False}
    (sentence,) = say("ways", choice)
    assert "not known where thinking is capped, since none of 2 settings is proven" in sentence


def test_a_cut_trace_may_lose_and_each_cap_has_an_order_of_its_own(stored: Callable[..., RunData]) -> None:
    run = stored(lambda setting: 1.0)
    cells = {cell.setting: cell for cell in run.cells if cell.benchmark == "CHAIN6"}
    assert count_compressed([cells[capped(1024, 40)]]) == (150, 150)
    assert count_compressed([cells[capped(1024, "unlimited")]]) == (150, 0)
    family = next(iter(losses_of(run).values()))
    assert [list(map(family.settings.__getitem__, order)) for order in family.chains] == [
        [capped(1024, cap), capped(64, cap)] for cap in (40, 80, "unlimited")
    ]
    # Without a compressed or cut trace nothing is proven.
    assert family.is_silent(family.by_setting[capped(1024, "unlimited").id])
    assert not family.is_silent(family.by_setting[capped(1024, 40).id])
