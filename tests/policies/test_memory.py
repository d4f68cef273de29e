"""The tokens that stay after a compression by rule, beside those that the engine leaves; windows as shares."""

from pathlib import Path
from typing import Any

import pytest

from kvatlas import policies
from kvatlas.core import KvatlasError, Setting, ascending
from kvatlas.policies.budget_rule import local_window_of, stays
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec, read_spec, sweep
from tests.command_line import Call

EVERY: dict[str, Any] = {"kv_budget": 48, "every": 32, "budget_over": "thinking"}


def spec(*settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "models": ["embedded:tiny-llama"],
        "benchmarks": ["CHAIN9"],
        "problems": 2,
        "sampling": {"max_new_tokens": 300},
        "settings": list(settings),
    }


def test_the_engine_leaves_as_many_tokens_as_the_rule_says_and_a_share_is_its_tokens(tmp_path: Path) -> None:
    settings = [
        {"policy": "dynts", **EVERY, "local_window": "25%"},
        {"policy": "dynts", **EVERY, "local_window": 12},
        {"policy": "dynts", "kv_budget": 160, "local_window": "10%", "ratio": 0.2},
        {"policy": "dynts", "kv_budget": 160, "local_window": 16, "ratio": 0.2, "ratio_over": "older"},
        {"policy": "dynts", "kv_budget": 90, "local_window": 16, "every": 40, "every_from": "prompt"},
    ]
    sweep(make_plan(parse_spec(spec(*settings))), tmp_path / "run", workers=1)
    texts: dict[Setting, list[str]] = {}
    seen = 0
    with Store.open(tmp_path / "run") as store:
        for _, trace in store.traces():
            texts.setdefault(trace.setting, []).append(trace.text)
            if trace.eviction_trace is None or not trace.usage.compressions:
                continue
            policy = policies.from_setting(trace.setting)
            assert isinstance(policy, policies.CompressingPolicy)
            prompt = trace.usage.prompt_tokens
            assert prompt is not None
            total, kept, *_ = policy.budget.first_compression(prompt)
            first = min(step for step in trace.eviction_trace.evicted_at if step)
            evicted = sum(step == first for step in trace.eviction_trace.evicted_at)
            # Of the new tokens the last one is not yet cached.
            assert prompt + first - 1 == total
            assert total - evicted == kept
            seen += 1
    assert seen >= 8
    of_rule = {setting: of for setting, of in texts.items() if setting.values.get("every") == EVERY["every"]}
    by_window = {setting.values["local_window"]: of for setting, of in of_rule.items()}
    assert by_window["25%"] == by_window[12]


@pytest.mark.parametrize(("share", "tokens"), [("0%", 1), ("1%", 1), ("25%", 12), ("9%", 4), ("99.9%", 47)])
def test_a_share_of_the_budget_is_rounded_down_and_at_least_one_token(share: str, tokens: int) -> None:
    setting = Setting.from_parameters("dynts", **EVERY, local_window=share)
    policy = policies.from_setting(setting)
    assert isinstance(policy, policies.CompressingPolicy)
    assert policy.budget.window == tokens == local_window_of(policy.setting)
    assert policy.setting.values["local_window"] == share
    # A token more of window is a chosen one less.
    found = stays(policy.setting, [30])
    assert found is not None
    assert (found.tokens, found.share) == (78, 78 / 110)


def test_equal_shares_are_one_setting_and_others_are_refused() -> None:
    names = [policies.from_setting(Setting.from_parameters("dynts", **EVERY, local_window=one)).setting.id
             for one in ("25%", "25.0%", "25.00%")]  # fmt: skip
    assert len(set(names)) == 1
    for wrong in ("100%", "150%", "-5%", "25", "a%", "25 %", 0, 0.25):
        with pytest.raises(KvatlasError, match=r"local_window is .*; expected an integer >= 1, or a share of the"):
            policies.from_setting(Setting.from_parameters("dynts", **EVERY, local_window=wrong))
    assert ascending(["75%", "9%", "12.5%"]) == ("9%", "12.5%", "75%")


def test_a_share_of_a_budget_in_bytes_is_known_with_the_model() -> None:
    from kvatlas import models

    model = models.find("embedded:tiny-llama")
    setting = Setting.from_parameters(
        "window", kv_budget="256KiB", local_window="25%", ratio=0.3, kv_bits=4, residual=8
    )
    policy = policies.from_setting(setting).bind(model)
    assert isinstance(policy, policies.CompressingPolicy)
    assert policy.budget.window == policy.budget.tokens // 4 > 8
    found = stays(policy.setting, [20], model.kv_bytes(policy.storage))
    assert found is not None
    assert found.tokens == policy.budget.first_compression(20).after
    assert stays(policy.setting, [20]) is None


def test_a_share_on_the_command_line(kvatlas: Call) -> None:
    cell = ("run", "embedded:tiny-llama", "CHAIN6", "--policy", "dynts", "--kv-budget", 160, "--ratio", 0.2)
    assert "local_window=20%" in kvatlas.succeed(*cell, "--local-window", "20%", "--problems", 1, "--json")
    sentence = kvatlas.refuse(*cell, "--local-window", "100%", "--problems", 1)
    assert "expected an integer >= 1, or a share of the kv_budget below 100%" in sentence


def test_the_recipe_of_equal_memory_keeps_the_same_tokens_under_all_windows() -> None:
    recipe = read_spec(Path(__file__).parents[2] / "recipes" / "embedded" / "equal_memory.yaml")
    settings = [setting for setting, is_baseline in recipe.cells() if not is_baseline]
    windows = {setting.values["local_window"] for setting in settings}
    by_budget = {setting.values["kv_budget"]: stays(setting, [30]) for setting in settings}
    assert len(windows) == 4
    assert all(stays(setting, [30]) == by_budget[setting.values["kv_budget"]] for setting in settings)
    assert not any("cannot tell window from memory" in text for text in make_plan(recipe).warnings)
