"""The tokens that stay after a compression, from a setting and the lengths of prompts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from kvatlas.core import KvatlasError, Setting
from kvatlas.policies.budget_rule import (
    OF_SCORES,
    RULE_PARAMETERS,
    BudgetRule,
    budget_in_tokens,
    implied_values,
    window_in_tokens,
)

#: Numbers of tokens that differ by less are equal.
_TINY = 1e-9


class Stays(NamedTuple):
    """The tokens after a compression in the mean over problems, and their share of the tokens before it."""

    tokens: float
    share: float


def kept_and_total(rule: BudgetRule, prompt: int) -> tuple[int, int]:
    """Return the tokens after and before a compression during thinking, both with a prompt of this length.

    All compressions keep the same number, except that the first one of a count from the start may come later.
    """
    total, older, protected = rule.at_first_compression(prompt)
    return rule.window + sum(rule.allotted(older, protected, protected)), total


def stays(setting: Setting, prompts: Iterable[int], kv_bytes: tuple[int, int] | None = None) -> Stays | None:
    """Return what stays under a setting after prompts of these lengths; None without a budget or prompts.

    `kv_bytes` are those of a token and of a sequence, for budgets in bytes. The rule is that of all policies, so that
    code of files and unknown policies is not needed.
    """
    lengths = Counter(prompts)
    # Parameters of the scores do not change how many tokens stay.
    values = {
        name: value for name, value in setting.values.items() if name in RULE_PARAMETERS and name not in OF_SCORES
    }
    if not lengths or "kv_budget" not in values:
        return None
    if isinstance(values["kv_budget"], str):
        if kv_bytes is None:
            return None
        values["kv_budget"] = budget_in_tokens(values["kv_budget"], *kv_bytes)
    try:
        values |= implied_values(values)
        if not {"local_window", "ratio"} <= values.keys():
            return None
        rule = BudgetRule(**values)
    except KvatlasError:
        return None

    tokens = 0.0
    share = 0.0
    for prompt, problems in lengths.items():
        kept, total = kept_and_total(rule, prompt)
        tokens += problems * kept
        share += problems * kept / total
    return Stays(tokens / lengths.total(), share / lengths.total())


def local_window_of(setting: Setting) -> int | None:
    """Return the tokens of a setting's local window; None without one, and for a share of a budget in bytes."""
    window = setting.values.get("local_window")
    budget = setting.values.get("kv_budget")
    if isinstance(window, str):
        return window_in_tokens(window, budget) if isinstance(budget, int) else None
    return window


def windows_apart(by_window: Mapping[Any, Sequence[float]]) -> list[tuple[Any, Any]]:
    """Return the pairs of local windows that keep no number of tokens in common, from what their settings keep."""
    ranges = {window: (min(tokens), max(tokens)) for window, tokens in by_window.items()}
    apart = []
    for first, second in combinations(ranges, 2):
        lowest = max(ranges[first][0], ranges[second][0])
        highest = min(ranges[first][1], ranges[second][1])
        if lowest > highest + _TINY:
            apart.append((first, second))
    return apart


def apart_sentence(windows: Sequence[Any]) -> str:
    """Return what a grid cannot tell whose narrowest and widest window keep no number of tokens in common."""
    return f"windows {windows[0]} and {windows[-1]} have no memory in common: this grid cannot tell window from memory"
