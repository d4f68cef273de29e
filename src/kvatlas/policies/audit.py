"""The budget audit: the choice that settings leave to their policies, from the lengths of prompts alone."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvatlas.class_files import class_file
from kvatlas.core import AuditedCell, BudgetAudit, Compression, KvatlasError, Setting, SettingFacts
from kvatlas.policies import all_values, from_setting, parameters
from kvatlas.policies.budget_rule import BudgetRule, rule_of
from kvatlas.policies.contract import CompressingPolicy, Policy

#: Fewer new tokens between two compressions are warned of.
_LITTLE_ROOM = 8


#: The parameters of every policy that compresses.
_SHARED = frozenset(item.name for item in parameters(CompressingPolicy))


def audit_policy(policy: Policy, prompts: Sequence[int]) -> BudgetAudit | None:
    """Return the audit of a setting for prompts of these lengths in tokens; None without compressions or prompts."""
    rule = policy.budget
    if rule is None:
        return None
    return BudgetAudit.over({prompt: rule.first_compression(prompt) for prompt in set(prompts)}, prompts)


def setting_facts(setting: Setting, prompts: Iterable[int], kv_bytes: tuple[int, int] | None = None) -> SettingFacts:
    """Return what readers of a run need to know of a setting's policy, for prompts of these lengths.

    `kv_bytes` are those of a token and of a sequence, for budgets in bytes. A policy that is not known (a remote
    model's, a plug-in's) has no audit. Code of a file, which reading a run does not execute, has that of its rule.
    """
    shared = tuple(name for name in setting.values if name in _SHARED)
    if "kv_budget" not in setting.values:
        return SettingFacts(all_values(setting), shared)
    # What stays follows from the rule of all policies; the audit needs the policy, and a budget in tokens.
    rule = rule_of(setting, kv_bytes)
    audited: BudgetRule | None = None
    if class_file(setting.policy) is not None and isinstance(setting.values["kv_budget"], int):
        audited = rule
    elif class_file(setting.policy) is None:
        with suppress(KvatlasError):
            budget = from_setting(setting).budget
            audited = budget if budget is not None and budget.has_tokens else None

    unknown = Compression(None, None, None, None)
    compressions = {}
    for prompt in sorted(set(prompts)):
        by_rule = unknown if rule is None else rule.first_compression(prompt)
        by_policy = unknown if audited is None else audited.first_compression(prompt)
        compressions[prompt] = Compression(by_rule.before, by_rule.after, by_policy.candidates, by_policy.places)
    return SettingFacts(all_values(setting), shared, compressions)


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
        f"budgets is {min(beyond):,}. Take budgets below {longest:,}, or longer traces (sampling: max_new_tokens)."
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


def check_choice(cells: Sequence[AuditedCell]) -> None:
    """Raise KvatlasError if a setting keeps the same tokens under every policy, on all problems of all benchmarks."""
    if cells and all(cell.audit.no_choice == 1 and 0 < cell.setting.values.get("ratio", 0.5) < 1 for cell in cells):
        names = ", ".join(dict.fromkeys(cell.benchmark for cell in cells))
        older = cells[0].setting.values.get("ratio_over") == "older"
        raise KvatlasError(
            f"{cells[0].setting} keeps the same tokens under every policy on all problems of {names}; choose another "
            f"kv_budget, local_window or ratio{', or ratio_over thinking' if older else ''}."
        )
