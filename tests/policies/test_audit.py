"""The budget audit says what compressions really leave to a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import policies
from kvatlas.core import BudgetAudit, Setting
from kvatlas.policies import CompressingPolicy, select_tokens
from kvatlas.policies.audit import AuditedCell, audit, audit_setting, no_choice_sentence
from tests.policies.test_contract import Given, cached


@given(
    st.integers(1, 90),
    st.integers(1, 39),
    st.sampled_from([0.0, 0.1, 0.29, 0.5, 1.0]),
    st.sampled_from([("older", False), ("older", True), ("thinking", False)]),
    st.booleans(),
)
def test_it_counts_what_a_compression_keeps(
    prompt: int, window: int, ratio: float, rule: tuple[str, bool], keep_prompt: bool
) -> None:
    over, strict = rule
    policy = Given(40, window, ratio, over, keep_prompt, strict_budget=strict)
    length = max(40, prompt + 1)
    # Two policies that rank the competing tokens in opposite ways.
    scores = torch.arange(length, dtype=torch.float64).view(1, 1, -1)
    first, second = (select_tokens(policy, cached(item, prompt))[0, 0].tolist() for item in (scores, -scores))
    protected = prompt if keep_prompt else 0
    result = audit(policy, [prompt])
    assert result is not None
    assert result.worst == result.median == sum(protected <= token < length - window for token in first)
    assert (result.none, result.no_choice) == (float(not result.worst), float(first == second))


def setting(**changes: Any) -> Setting:
    return Setting.of("window", **{"kv_budget": 5000, "local_window": 3000, "ratio": 0.1, **changes})


def test_a_prompt_fills_the_places_of_the_published_rule() -> None:
    # 200 places of 2,000 older tokens, for prompts of 100, 199, 200 and 300 tokens.
    assert audit_setting(setting(), [100, 199, 200, 300]) == BudgetAudit(4, 0.5, 0, 0.5, 0.5)
    # A strict budget changes what stays of the prompt, not what is left to thinking.
    assert audit_setting(setting(strict_budget=True), [100, 199, 200, 300]) == BudgetAudit(4, 0.5, 0, 0.5, 0.5)
    assert audit_setting(setting(ratio_over="thinking"), [100, 300]) == BudgetAudit(2, 180.0, 170, 0.0, 0.0)
    assert audit_setting(setting(keep_prompt=False), [100]) == BudgetAudit(1, 200.0, 200, 0.0, 0.0)
    # Everything stays: there are places, and still nothing to choose.
    assert audit_setting(setting(ratio=1.0), [100]) == BudgetAudit(1, 1900.0, 1900, 0.0, 1.0)


def test_what_never_compresses_and_what_is_unknown_has_none() -> None:
    assert audit(policies.of(Setting.of("full")), [10]) is None
    assert audit_setting(Setting.of("served"), [10]) is None
    assert audit_setting(Setting.of("gone", kv_budget=10), [10]) is None
    assert audit_setting(setting(), []) is None


def cells(*changes: dict[str, Any], prompts: list[int]) -> list[AuditedCell]:
    made = []
    for change in changes:
        item = policies.of(setting(**change))
        assert isinstance(item, CompressingPolicy)
        result = audit(item, prompts)
        assert result is not None
        made.append(AuditedCell("m", "AIME25", item.setting, result))
    return made


def test_one_sentence_names_the_cells_in_which_policies_cannot_differ() -> None:
    given_ = cells({}, {"ratio": 0.5}, {"local_window": 500}, {"ratio": 0.0}, prompts=[100, 100, 250, 300])
    sentence = no_choice_sentence(given_)
    assert sentence is not None
    assert sentence.startswith("In 1 of 4 cells all policies keep the same tokens in 50 % of problems: ")
    assert "local_window 3000, ratio 0.1 on AIME25 (50 %). They can differ" in sentence
    assert sentence.endswith("or with ratio_over thinking.")
    assert no_choice_sentence(cells({"ratio": 0.5}, prompts=[100])) is None
    strict = no_choice_sentence(cells({"strict_budget": True}, prompts=[300]))
    assert strict is not None
    assert strict.endswith("another kv_budget, local_window or ratio.")
    many = cells(*({"ratio": n / 100} for n in range(1, 10)), prompts=[300])
    assert "; and 3 more." in (no_choice_sentence(many) or "")


@pytest.mark.parametrize("policy", ["window", "random", "vase"])
def test_policies_share_a_rule_whatever_their_scores(policy: str) -> None:
    item = policies.of(Setting.of(policy, kv_budget=50, local_window=5, ratio=0.2, ratio_over="thinking"))
    result = audit(item, [10])
    assert result is not None
    assert AuditedCell("m", "B", item.setting, result).rule == (
        ("kv_budget", 50), ("local_window", 5), ("ratio", 0.2), ("ratio_over", "thinking"),
    )  # fmt: skip
