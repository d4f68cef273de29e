"""The tokens that stay after a compression, from a setting and the lengths of prompts alone."""

from collections.abc import Sequence

from kvatlas.core import Compression, KvatlasError, Setting, Stays, mean_stays
from kvatlas.core.settings import OF_SCORES, budget_in_tokens, window_in_tokens
from kvatlas.policies.budget_rule import RULE_PARAMETERS, BudgetRule, implied_values


def compression_of(rule: BudgetRule, prompt: int) -> Compression:
    """Return the first compression of a rule during thinking, with a prompt of this length.

    Later ones keep as many tokens, except that the first one of a count from the start may come later.
    """
    total, older, protected = rule.at_first_compression(prompt)
    kept_protected, places = rule.allotted(older, protected, protected)
    return Compression(total, rule.window + kept_protected + places, older - protected, places)


def rule_of(setting: Setting, kv_bytes: tuple[int, int] | None = None) -> BudgetRule | None:
    """Return the rule of a setting, with the parameters that decide how many tokens stay; None without a budget.

    `kv_bytes` are those of a token and of a sequence, for budgets in bytes. The rule is that of all policies, so that
    code of files and unknown policies is not needed.
    """
    # Parameters of the scores do not change how many tokens stay.
    counted = [name for name in RULE_PARAMETERS if name not in OF_SCORES]
    values = {name: setting.values[name] for name in counted if name in setting.values}
    if "kv_budget" not in values:
        return None
    if isinstance(values["kv_budget"], str):
        if kv_bytes is None:
            return None
        values["kv_budget"] = budget_in_tokens(values["kv_budget"], *kv_bytes)
    try:
        values |= implied_values(values)
        if not {"local_window", "ratio"} <= values.keys():
            return None
        return BudgetRule(**values)
    except KvatlasError:
        return None


def stays(setting: Setting, prompts: Sequence[int], kv_bytes: tuple[int, int] | None = None) -> Stays | None:
    """Return what stays under a setting after prompts of these lengths; None without a budget or prompts."""
    rule = rule_of(setting, kv_bytes)
    if rule is None:
        return None
    return mean_stays({prompt: compression_of(rule, prompt) for prompt in set(prompts)}, prompts)


def local_window_of(setting: Setting) -> int | None:
    """Return the tokens of a setting's local window; None without one, and for a share of a budget in bytes."""
    window = setting.values.get("local_window")
    budget = setting.values.get("kv_budget")
    if isinstance(window, str):
        return window_in_tokens(window, budget) if isinstance(budget, int) else None
    return window
