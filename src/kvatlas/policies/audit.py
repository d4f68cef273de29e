"""The budget audit: the choice that settings leave to their policies, from the lengths of prompts alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from kvatlas.core import BudgetAudit, KvatlasError, Setting, differing
from kvatlas.policies import from_setting, policy_file
from kvatlas.policies.budget_rule import OF_SCORES, USUAL_RULE
from kvatlas.policies.contract import Policy
from kvatlas.policies.precision import USUAL_PRECISION

#: The most cells that a sentence names.
_NAMED = 6
#: Fewer new tokens between two compressions are warned of.
_LITTLE_ROOM = 8


@dataclass(frozen=True)
class AuditedCell:
    """One setting on one benchmark, with its audit."""

    model: str
    benchmark: str
    setting: Setting
    audit: BudgetAudit

    @property
    def rule(self) -> tuple[tuple[str, object], ...]:
        """The parameters that decide the audit: equal for policies that differ only in their scores."""
        values = self.setting.values
        usual = {"ratio_over": "thinking", "keep_prompt": True, **USUAL_RULE, **USUAL_PRECISION}
        counted = [name for name in usual if name not in OF_SCORES]
        names = [name for name in counted if values.get(name, usual[name]) != usual[name]]
        return tuple((name, values[name]) for name in ("kv_budget", "local_window", "ratio", *names) if name in values)


def audit_policy(policy: Policy, prompts: Iterable[int]) -> BudgetAudit | None:
    """Return the audit of a setting for prompts of these lengths in tokens; None without compressions or prompts.

    It is that of the first compression, during thinking: later ones have the same number of older tokens and the same
    prompt.
    """
    lengths = list(prompts)
    if policy.budget is None or not lengths:
        return None
    chosen: list[int] = []
    without_choice = 0
    for prompt in lengths:
        _, older, protected = policy.budget.at_first_compression(prompt)
        chosen.append(policy.budget.allotted(older, protected, protected)[1])
        without_choice += not 0 < chosen[-1] < older - protected
    count = len(lengths)
    return BudgetAudit(count, float(median(chosen)), min(chosen), chosen.count(0) / count, without_choice / count)


def audit_setting(setting: Setting, prompts: Iterable[int]) -> BudgetAudit | None:
    """Return the audit of a setting; None also for unknown policies (a remote model's, a plug-in's)."""
    # Reading a run does not run code of a file.
    if "kv_budget" not in setting.values or policy_file(setting.policy) is not None:
        return None
    try:
        return audit_policy(from_setting(setting), prompts)
    except KvatlasError:
        return None


def uncompressed_sentence(policies: Iterable[Policy], model: str, benchmark: str, prompt: int, longest: int) -> str:
    """Return a sentence on settings whose budget no trace reaches, or "".

    The longest prompt has `prompt` tokens, the longest trace `longest` with it.
    """
    budgets = [policy.budget.first(prompt) for policy in policies if policy.budget]
    # The last token never enters the cache.
    beyond = [budget for budget in budgets if budget >= longest]
    if not beyond:
        return ""
    return (
        f"{len(beyond)} of {len(budgets)} settings with a KV budget compress nothing on {benchmark} with {model} if "
        f"its traces are as long as expected, at most {longest:,} tokens with their prompts: the least of these "
        f"budgets is {min(beyond):,}."
    )


def narrow_sentence(policies: Iterable[Policy], model: str, benchmark: str, prompt: int) -> str:
    """Return a sentence on settings that compress again after a few tokens behind a prompt of this length, or ""."""
    rules = [policy.budget for policy in policies if policy.budget is not None]
    # A setting that frees nothing is named by the audit.
    narrow = [rule for rule in rules if 0 < rule.new_between(prompt) < _LITTLE_ROOM]
    if not narrow:
        return ""

    worst = min(narrow, key=lambda rule: rule.new_between(prompt))
    return (
        f"{len(narrow)} of {len(rules)} settings with a KV budget compress again after fewer than {_LITTLE_ROOM} "
        f"tokens on {benchmark} with {model}, whose longest prompt has {prompt:,}: kv_budget {worst.kv_budget}, "
        f"local_window {worst.window} and ratio {worst.ratio:g} after {worst.new_between(prompt)}"
        f"{worst.advice(prompt)}."
    )


def no_choice_sentence(cells: Sequence[AuditedCell]) -> str | None:
    """Return a sentence that names the cells in which all policies keep the same tokens, or None."""
    rows = {(cell.model, cell.benchmark, cell.rule): cell for cell in cells}
    # A ratio of 0 or 1 leaves no choice by definition.
    blocked = [cell for cell in rows.values() if cell.audit.no_choice and 0 < cell.setting.values.get("ratio", 0.5) < 1]
    if not blocked:
        return None
    blocked.sort(key=lambda cell: -cell.audit.no_choice)
    percent = [f"{100 * cell.audit.no_choice:.0f}" for cell in blocked]
    names = differing(dict(cell.rule) for cell in cells) or ["kv_budget", "local_window", "ratio"]
    with_model = len({cell.model for cell in cells}) > 1
    listed = []
    for cell, of_cell in zip(blocked[:_NAMED], percent, strict=False):
        rule = ", ".join(f"{name} {value}" for name, value in cell.rule if name in names)
        model = f" with {cell.model}" if with_model else ""
        listed.append(f"{rule} on {cell.benchmark}{model} ({of_cell} %)")

    # A ratio that counts the prompt may count thinking alone, unless the budget is strict.
    rules = [dict(cell.rule) for cell in blocked]
    can_exclude = any("ratio_over" in rule and "strict_budget" not in rule for rule in rules)
    over = ", or ratio_over thinking" if can_exclude else ""
    more = f"; and {len(blocked) - _NAMED} more" if len(blocked) > _NAMED else ""
    range_text = percent[0] if percent[0] == percent[-1] else f"{percent[-1]} to {percent[0]}"
    return (
        f"In {len(blocked)} of {len(rows)} cells all policies keep the same tokens in {range_text} % of problems, so "
        f"choose another kv_budget, local_window or ratio{over} for them: {'; '.join(listed)}{more}."
    )


def check_choice(cells: Sequence[AuditedCell]) -> None:
    """Raise KvatlasError if a setting keeps the same tokens under every policy, on all problems of all benchmarks."""
    if cells and all(cell.audit.no_choice == 1 and 0 < cell.setting.values.get("ratio", 0.5) < 1 for cell in cells):
        names = ", ".join(dict.fromkeys(cell.benchmark for cell in cells))
        older = cells[0].setting.values.get("ratio_over") == "older"
        raise KvatlasError(
            f"{cells[0].setting} keeps the same tokens under every policy on all problems of {names}; choose another "
            f"kv_budget, local_window or ratio{', or ratio_over thinking' if older else ''}."
        )
