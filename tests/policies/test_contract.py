"""The compression contract, which tokens stay, and the audit of what settings leave to a policy's choice."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import policies
from kvatlas.core import AuditedCell, BudgetAudit, KvatlasError, Setting, no_choice_sentence
from kvatlas.models import ModelHandle
from kvatlas.policies import BudgetRule, CacheView, CompressingPolicy, select_tokens
from kvatlas.policies.audit import audit_policy, setting_facts
from tests.policies.scenes import Scene, rule

EXPLAIN = {"kv_budget": 40, "local_window": 4, "ratio": 0.3}


@dataclass(frozen=True)
class Given(CompressingPolicy):
    """Scores that a test hands in through the columns."""

    name = "given"
    columns = ("score",)

    def score(self, cached: CacheView) -> torch.Tensor:
        return cached.columns["score"]


def cached(
    scores: torch.Tensor, prompt: int, thinking_end: int | None = None, positions: torch.Tensor | None = None
) -> Scene:
    if positions is None:
        positions = torch.arange(scores.shape[-1]).expand(scores.shape)
    unused: Any = None
    columns = {"score": scores}
    return Scene(unused, positions, prompt, thinking_end, scores.shape[-1], 1, columns, *[unused] * 6)


def policy(**changes: Any) -> Given:
    return Given(budget=BudgetRule(**{**EXPLAIN, **changes}))


@given(
    st.integers(0, 60),
    st.integers(1, 60),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.1, 0.25, 0.29, 0.5, 0.7, 1.0]),
    st.sampled_from([("older", False), ("older", True), ("thinking", False)]),
    st.booleans(),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_what_stays(
    prompt: int, thinking: int, window: int, ratio: float, over: tuple[str, bool], keep_prompt: bool, answer: int,
    rng: Any,
) -> None:  # fmt: skip
    """The published rule; a strict budget keeps exactly the ratio, of prompt and answer the oldest."""
    total = prompt + thinking + answer
    if total <= window:
        return
    end = prompt + thinking if answer else None
    scores = torch.tensor([[[float(rng.random()) for _ in range(total)]]])
    item = Given(budget=BudgetRule(total + 1, window, ratio, over[0], keep_prompt, over[1]))
    kept = select_tokens(item, cached(scores, prompt, end))[0, 0].tolist()
    assert kept == rule(item, [*range(total)], scores[0, 0].tolist(), prompt, end)


def test_a_strict_budget_is_named_where_there_is_one_and_takes_any_prompt() -> None:
    values = {**EXPLAIN, "ratio": 0.25, "ratio_over": "older"}
    usual, strict = (
        policies.from_setting(Setting.from_parameters("window", **values, strict_budget=value))
        for value in (False, True)
    )
    assert usual.setting == policies.from_setting(Setting.from_parameters("window", **values)).setting
    assert "strict_budget" not in usual.setting.values
    assert strict.setting.values == {**usual.setting.values, "strict_budget": True}
    assert policies.from_setting(strict.setting) == strict
    with pytest.raises(KvatlasError, match="expected budgets above 54"):
        usual.check_prompt(50, "this prompt")
    strict.check_prompt(50, "this prompt")


def test_ties_go_to_the_older_token_and_order_is_kept() -> None:
    scores = torch.zeros(1, 1, 40)
    scores[..., 20] = 1.0
    kept = select_tokens(policy(ratio=0.25, ratio_over="thinking"), cached(scores, prompt=8))[0, 0].tolist()
    assert kept == [*range(8), 8, 9, 10, 11, 12, 13, 20, 36, 37, 38, 39]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (torch.full((1, 1, 40), float("nan")), "gave 28 scores that are not a number (NaN) among 28 that decide"),
        (torch.zeros(39), "gave scores of the shape (39,) for cached tokens of the shape (1, 1, 40)"),
        (torch.tensor(1.0), "gave scores of the shape ()"),
        (torch.zeros(2, 3, 40), "since its scope is global: return cached.each_layer(lambda layer: ...), which "),
        (torch.zeros(2, 40), "(40,), since its scope is global: "),
        (torch.zeros(2, 40), " share a choice, or declare scope = Scope.HEAD."),
        (torch.zeros(1, 1, 1, 40), "gave scores of the shape (1, 1, 1, 40)"),
        ([0.0] * 40, "scored its tokens with a list; expected a tensor of real numbers"),
        (torch.zeros(40, dtype=torch.complex64), "with a tensor of torch.complex64"),
    ],
)
def test_scores_that_are_no_numbers_or_do_not_fit_are_refused(scores: Any, words: str) -> None:
    seen = cached(torch.zeros(1, 1, 40), prompt=8)
    with pytest.raises(KvatlasError) as caught:
        select_tokens(policy(), replace(seen, columns={"score": scores}))
    assert str(caught.value).startswith("The policy 'given' ")
    assert words in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_scores_may_be_infinite_and_those_of_tokens_that_stay_anyway_mean_nothing() -> None:
    scores = torch.zeros(40)
    scores[[20, 25]], scores[[30, 31]] = float("inf"), float("-inf")
    scores[:8] = scores[36:] = float("nan")
    kept = select_tokens(policy(ratio=0.25, ratio_over="thinking"), cached(scores.view(1, 1, 40), prompt=8))
    assert kept[0, 0].tolist() == [*range(8), 8, 9, 10, 11, 12, 20, 25, *range(36, 40)]
    wide = cached(torch.zeros(2, 3, 40), prompt=8)
    for shape in ((40,), (2, 3, 40)):
        map_ = replace(wide, columns={"score": torch.arange(40, dtype=torch.int64).expand(shape)})
        assert select_tokens(policy(ratio_over="thinking"), map_).shape == (2, 3, 8 + 8 + 4)
    # Scores of one layer are not those of all.
    for shape in ((3, 40), (1, 3, 40), (2, 1, 40)):
        map_ = replace(wide, columns={"score": torch.zeros(shape)})
        with pytest.raises(KvatlasError, match=r"expected \(2, 3, 40\) or \(40,\)"):
            select_tokens(policy(ratio_over="thinking"), map_)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ratio": 1.5}, "ratio is 1.5; expected a number from 0 to 1"),
        ({"local_window": 0}, "local_window is 0; expected an integer >= 1"),
        ({"local_window": 40}, "expected windows from 1 to 39"),
        ({"ratio_over": "all"}, "expected 'thinking', 'older'"),
        ({"strict_budget": 1}, "strict_budget is 1; expected true or false"),
        ({"": False}, "has no parameter ''"),
        ({"strict_budget": True, "ratio_over": "thinking"}, "strict_budget is true and ratio_over is 'thinking'"),
        ({"sinks": 4}, "has no parameter 'sinks'; expected: kv_budget, local_window, ratio"),
        ({"kv_bits": 5}, "kv_bits is 5; expected 16, 8, 4, 3, 2"),
        ({"kv_bits": 4, "group": 24}, "group is 24; expected a multiple of 16"),
        ({"local_window": 16, "kv_bits": 4}, "residual is 32, more than the local_window 16"),
        ({"every": True, "ratio": None}, "every is True; expected an integer"),
        ({"every": 8}, "ratio is 0.3 beside every 8; leave ratio out"),
        ({"every": 8, "ratio": None, "ratio_over": "older"}, "ratio_over is 'older' beside every 8"),
        ({"every_from": "start"}, "every_from is 'start' without every"),
        ({"budget_over": "thinking", "keep_prompt": False}, "budget_over is 'thinking' and keep_prompt"),
        (
            {"every": 8, "ratio": None, "budget_over": "thinking", "strict_budget": True},
            "strict_budget is true and budget_over",
        ),
        ({"kv_budget": "12MB"}, "expected an integer >= 2, or bytes such as 12MiB"),
        ({"kv_budget": "1.5MiB"}, "expected an integer >= 2"),
        ({"kv_budget": "9" * 5000 + "MiB"}, "expected an integer >= 2"),
        ({"kv_budget": 10**5000}, "kv_budget is an integer of 16,610 bits; expected an integer >= 2"),
        ({"local_window": 10**5000}, "local_window is an integer of 16,610 bits; expected an integer"),
        ({"every": 10**5000, "ratio": None}, "every is an integer of 16,610 bits; expected an integer"),
        ({"kv_budget": "1KiB"}, "holds no two tokens of embedded:tiny-llama, which take 2,048 bytes each"),
        (
            {"kv_budget": "40KiB", "local_window": 32},
            "local_window 32 leaves nothing to select in a kv_budget of 40KiB (20 tokens)",
        ),
    ],
)
def test_wrong_parameters_are_refused_in_one_sentence(
    tiny_llama: ModelHandle, changes: dict[str, Any], words: str
) -> None:
    values = {name: value for name, value in {**EXPLAIN, **changes}.items() if value is not None}
    with pytest.raises(KvatlasError, match=re.escape(words)):
        policies.from_setting(Setting.from_parameters("window", **values)).bind(tiny_llama)


def test_a_budget_that_prompt_and_window_fill_is_refused_with_the_numbers() -> None:
    with pytest.raises(KvatlasError, match=r"prompt 36 \+ local_window 4 .* expected budgets above 40"):
        policy().check_prompt(36, "a prompt")
    policy().check_prompt(35, "a prompt")
    policy(keep_prompt=False).check_prompt(36, "a prompt")


@given(
    st.integers(1, 90),
    st.integers(1, 39),
    st.sampled_from([0.0, 0.1, 0.29, 0.5, 1.0]),
    st.sampled_from([("older", False), ("older", True), ("thinking", False)]),
    st.booleans(),
)
def test_it_counts_what_a_compression_keeps(
    prompt: int, window: int, ratio: float, over: tuple[str, bool], keep_prompt: bool
) -> None:
    policy = Given(budget=BudgetRule(40, window, ratio, over[0], keep_prompt, over[1]))
    length = max(40, prompt + 1)
    # Two policies that rank the competing tokens in opposite ways.
    scores = torch.arange(length, dtype=torch.float64).view(1, 1, -1)
    first, second = (select_tokens(policy, cached(item, prompt))[0, 0].tolist() for item in (scores, -scores))
    protected = prompt if keep_prompt else 0
    result = audit_policy(policy, [prompt])
    assert result.worst == result.median == sum(protected <= token < length - window for token in first)
    assert (result.none, result.no_choice) == (float(not result.worst), float(first == second))


def setting(**changes: Any) -> Setting:
    return Setting.from_parameters(
        "window", **{"kv_budget": 5000, "local_window": 3000, "ratio": 0.1, "ratio_over": "older", **changes}
    )


def audit_setting(one: Setting, prompts: list[int]) -> BudgetAudit | None:
    return BudgetAudit.over(setting_facts(one, prompts).compressions, prompts)


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
    assert audit_policy(policies.from_setting(Setting.from_parameters("full")), [10]) is None
    assert audit_setting(Setting.from_parameters("served"), [10]) is None
    assert audit_setting(Setting.from_parameters("gone", kv_budget=10), [10]) is None
    assert audit_setting(setting(), []) is None


def cells(*changes: dict[str, Any], prompts: list[int]) -> list[AuditedCell]:
    made = []
    for change in changes:
        item = policies.from_setting(setting(**change))
        result = audit_policy(item, prompts)
        made.append(AuditedCell("m", "AIME25", item.setting, result))
    return made


def test_one_sentence_names_the_cells_in_which_policies_cannot_differ() -> None:
    given_ = cells({}, {"ratio": 0.5}, {"local_window": 500}, {"ratio": 0.0}, prompts=[100, 100, 250, 300])
    sentence = no_choice_sentence(given_)
    assert sentence.startswith("In 1 of 4 cells all policies keep the same tokens in 50 % of problems, so choose ")
    assert "ratio, or ratio_over thinking for them: local_window 3000, ratio 0.1 on AIME25 (50 %)." in sentence
    assert no_choice_sentence(cells({"ratio": 0.5}, prompts=[100])) is None
    many = cells(*({"ratio": n / 100} for n in range(1, 10)), prompts=[300])
    assert "; and 3 more." in (no_choice_sentence(many) or "")


@pytest.mark.parametrize("bits", [16, 4])
def test_a_budget_in_bytes_is_the_tokens_that_they_hold(tiny_llama: ModelHandle, bits: int) -> None:
    """The setting keeps the text, so that the maps of several models and bits share it."""
    setting = Setting.from_parameters("window", kv_budget="600KiB", local_window=32, ratio=0.3, kv_bits=bits)
    of_bytes = policies.from_setting(setting)
    on = of_bytes.bind(tiny_llama)
    token, beside = tiny_llama.kv_bytes(of_bytes.storage)
    assert on.budget.tokens * token + beside <= 600 * 1024 < (on.budget.tokens + 1) * token + beside
    assert on.setting == of_bytes.setting
    assert on.setting.values["kv_budget"] == "600KiB"
    with pytest.raises(KvatlasError, match="expected a number of tokens where no model is known"):
        _ = of_bytes.budget.tokens


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"group": 2**31 - 16}, "group is 2147483632; expected at most 32, for the channels of a head"),
        ({"group": 48}, "group is 48; expected at most 32"),
        ({"residual": 2**31 - 1}, "residual is 2147483647; expected at most 1536, its positions"),
        ({"group": 32, "residual": 1536}, ""),
        ({"kv_bits": 16, "group": 2**31 - 16, "residual": 2**31 - 1}, ""),
    ],
)
def test_groups_and_residuals_are_limited_by_the_model(
    tiny_llama: ModelHandle, values: dict[str, int], sentence: str
) -> None:
    full = policies.from_setting(Setting.from_parameters("full", **{"kv_bits": 2, **values}))
    if not sentence:
        assert policies.fit_policy(full, tiny_llama).storage == full.storage
        return
    with pytest.raises(KvatlasError, match="does not fit the model") as caught:
        policies.fit_policy(full, tiny_llama)
    assert sentence in str(caught.value)


def test_a_wrong_value_is_named_before_what_stands_beside_it() -> None:
    with pytest.raises(KvatlasError, match="every is -1; expected an integer >= 0"):
        policies.from_setting(Setting.from_parameters("window", **EXPLAIN, every=-1))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1024KiB", "1MiB"),
        ("0512KiB", "512KiB"),
        ("1048576KiB", "1GiB"),
        ("3072MiB", "3GiB"),
        ("1536KiB", "1536KiB"),
        ("2048GiB", "2048GiB"),
    ],
)
def test_equal_budgets_in_bytes_are_one_setting(text: str, canonical: str) -> None:
    settings = [
        policies.from_setting(Setting.from_parameters("window", **{**EXPLAIN, "kv_budget": one})).setting
        for one in (text, canonical)
    ]
    assert settings[0] == settings[1]
    assert settings[0].values["kv_budget"] == canonical
