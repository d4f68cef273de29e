"""The budget rule, which every policy that compresses takes: when a compression fires, and how many tokens stay.

The author of a policy need not read this file: a rule counts tokens, and never looks at scores. Source of the published
rule: Dynamic Thinking-Token Selection, arXiv 2601.18383.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from kvatlas.core import Compression, KvatlasError, Setting, Stays, Storage, mean_stays
from kvatlas.core.settings import BYTE_UNITS, OF_SCORES, budget_in_tokens, floor_ratio, window_in_tokens
from kvatlas.policies.parameter_types import check_parameters, choice_param, float_param, int_param, tokens_param

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle

#: A budget in bytes.
_BYTES = rf"[0-9]{{1,12}}[{BYTE_UNITS}]iB"
#: A local window as a share of the KV budget, below 100 %.
_WINDOW_SHARE = r"[0-9]{1,2}(\.[0-9]{1,6})?%"
#: New tokens between two compressions that an advised budget leaves room for, a multiple of so many tokens.
ROOM = 64


@dataclass(frozen=True)
class BudgetRule:
    """The rule that says when a compression fires and how many tokens stay.

    kv_budget: cache length (tokens per sequence, prompt included) at which a compression fires; with `every` the length
        after a compression. Bytes such as `12MiB` stand for the tokens that they hold, in the type in which the model
        runs and the policy's bits.
    local_window: newest tokens that always stay, at least 1. A share such as `25%` stands for max(1, floor(share *
        kv_budget)) tokens.
    ratio: share in [0, 1] of the older tokens that stay.
    ratio_over: `thinking` (of the older thinking tokens alone, the prompt stays besides) or `older` (the published
        rule: of all older tokens, prompt included).
    keep_prompt: prompt tokens have an infinite score; if false they compete with the others.
    strict_budget: exactly floor(ratio * older) older tokens stay even if prompt and answer are more: the youngest of
        these are then dropped. By default they all stay, above the ratio.
    budget_over: the contents of `kv_budget`, the whole `cache` or, the prompt staying beside, the tokens after it
        (`thinking`).
    every: tokens between two compressions, as in serving engines; 0 for one whenever the budget is reached.
    every_from: the start of that count. `budget`: a compression at kv_budget + every tokens; `start`: with each first
        token after a multiple of `every` in the sequence, `prompt`: with each multiple after the prompt, once there are
        more than kv_budget.
    plan_prefix: first thinking tokens (the plan) that take the places of the kept share before all others.
    """

    kv_budget: int | str = tokens_param(2, _BYTES, "bytes such as 12MiB (KiB, MiB or GiB)")
    local_window: int | str = tokens_param(1, _WINDOW_SHARE, "a share of the kv_budget below 100%, such as 25%")
    ratio: float = float_param(least=0, most=1)
    ratio_over: str = choice_param("thinking", "older")
    keep_prompt: bool = True
    strict_budget: bool = False
    budget_over: str = choice_param("cache", "thinking")
    every: int = int_param(0)
    every_from: str = choice_param("budget", "start", "prompt")
    plan_prefix: int = int_param(0)
    #: The tokens that a budget in bytes holds in a model; 0 before the model is known. No parameter.
    tokens_held: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.every_from != "budget" and not self.every:
            raise KvatlasError(f"every_from is {self.every_from!r} without every; give every, the tokens between two.")

        # A strict budget counts the prompt, so budget and ratio have to count it, too; with `every` no ratio matters.
        required = {"budget_over": "cache"} if self.every else {"ratio_over": "older", "budget_over": "cache"}
        for name, expected in required.items():
            if self.strict_budget and getattr(self, name) != expected:
                raise KvatlasError(
                    f"strict_budget is true and {name} is {getattr(self, name)!r}; expected {expected!r}, the rule "
                    "that counts the prompt."
                )

        if self.every and self.ratio_over != "thinking":
            raise KvatlasError(f"ratio_over is {self.ratio_over!r} beside every {self.every}; leave it out, as ratio.")
        if self.budget_over == "thinking" and not self.keep_prompt:
            raise KvatlasError("budget_over is 'thinking' and keep_prompt is false; expected true.")

        if self.has_tokens and self.window >= self.tokens:
            raise KvatlasError(
                f"local_window {self.window} leaves nothing to select in a kv_budget of {self}; expected windows from "
                f"1 to {self.tokens - 1}."
            )

    def __str__(self) -> str:
        """Return the budget as it was given, with its tokens if it is in bytes."""
        return str(self.kv_budget) if self.tokens == self.kv_budget else f"{self.kv_budget} ({self.tokens} tokens)"

    def canonical(self) -> Self:
        """Return the rule with parameters that can be written in several ways in their canonical form."""
        budget = self.kv_budget
        window = self.local_window
        return replace(
            self,
            kv_budget=_in_largest_unit(budget) if isinstance(budget, str) else budget,
            # Without needless zeros, as in 25.0%.
            local_window=f"{Decimal(window[:-1]).normalize():f}%" if isinstance(window, str) else window,
            ratio=float(self.ratio),
        )

    # Tokens, which a budget in bytes has only in a model.

    @property
    def has_tokens(self) -> bool:
        """False for a budget in bytes before the model is known."""
        return isinstance(self.kv_budget, int) or self.tokens_held > 0

    @cached_property
    def tokens(self) -> int:
        """The KV budget in tokens. Raises KvatlasError for a budget in bytes before the model is known."""
        if isinstance(self.kv_budget, int):
            return self.kv_budget
        if not self.tokens_held:
            raise KvatlasError(f"kv_budget is {self.kv_budget}; expected a number of tokens where no model is known.")
        return self.tokens_held

    @cached_property
    def window(self) -> int:
        """The local window in tokens."""
        if isinstance(self.local_window, int):
            return self.local_window
        return window_in_tokens(self.local_window, self.tokens)

    # The lengths at which compressions fire.

    def tokens_with(self, prompt: int) -> int:
        """Return the budget with the tokens of a prompt, if these stay beside it."""
        return self.tokens + (prompt if self.budget_over == "thinking" else 0)

    def most(self, prompt: int) -> int:
        """Return the greatest length of the cache before a compression, for prompts below the budget."""
        return self.tokens_with(prompt) + self.every

    def first(self, prompt: int) -> int:
        """Return the cache length at the first compression."""
        return self.most(prompt) if self.every_from == "budget" else self._turn(prompt, prompt, prompt)

    def next(self, prompt: int, cached: int, position: int) -> int:
        """Return the cache length at the next compression, after one that left `cached` of `position` tokens.

        Tokens kept above the budget (prompt and answer) delay it.
        """
        limit = self.tokens_with(prompt)
        if not self.every:
            return limit
        if self.every_from == "budget":
            return self.every + max(limit, cached)
        return self._turn(prompt, cached, position)

    def _turn(self, prompt: int, cached: int, position: int) -> int:
        """Return the cache length at the first position with a turn and more than the budget in the cache."""
        turn = 1 if self.every_from == "start" else prompt
        earliest = position + max(1, self.tokens_with(prompt) + 1 - cached)
        return cached + earliest + (turn - earliest) % self.every - position

    # The tokens that stay.

    def allotted(self, older: int, protected: int, prompt: int) -> tuple[int, int]:
        """Return how many protected tokens stay, and how many of the others.

        `protected` of the `older` tokens are protected, `prompt` of these belong to the prompt.
        """
        if self.every:
            room = self.tokens - self.window
            counted = protected - prompt if self.budget_over == "thinking" else protected
            kept_protected = min(protected, room) if self.strict_budget else protected
            return kept_protected, min(older - protected, max(0, room - counted))

        if self.ratio_over == "thinking":
            return protected, floor_ratio(self.ratio, older - protected)

        kept = floor_ratio(self.ratio, older)
        kept_protected = min(protected, kept) if self.strict_budget else protected
        return kept_protected, max(0, kept - protected)

    def first_compression(self, prompt: int) -> Compression:
        """Return the first compression during thinking, with a prompt of this length.

        Later ones keep as many tokens, except that the first one of a count from the start may come later.
        """
        # The cache has the length of the budget, unless the prompt alone is longer.
        total = max(self.first(prompt), prompt + 1)
        older = total - self.window
        protected = min(prompt, older) if self.keep_prompt else 0
        kept_protected, places = self.allotted(older, protected, protected)
        return Compression(total, self.window + kept_protected + places, older - protected, places)

    # Models, policies and prompts that a rule does not fit.

    def in_model(self, model: ModelHandle, storage: Storage) -> Self:
        """Return the rule for a model that stores keys and values so, in which a budget in bytes holds some tokens."""
        if isinstance(self.kv_budget, int):
            return self
        token_bytes, sequence_bytes = model.kv_bytes(storage)
        tokens = budget_in_tokens(self.kv_budget, token_bytes, sequence_bytes)
        if tokens < 2:
            unpacked = f" and {sequence_bytes:,} for the newest, unpacked ones" if sequence_bytes else ""
            raise KvatlasError(
                f"kv_budget {self.kv_budget} holds no two tokens of {model.name}, which take {token_bytes:,} bytes "
                f"each{unpacked}."
            )
        return replace(self, tokens_held=tokens)

    def check_prompt(self, prompt: int, where: str) -> None:
        """Raise KvatlasError if no compression can get below the budget with a prompt of so many tokens.

        A strict budget drops the excess of the prompt, so any prompt is possible.
        """
        counted = self.keep_prompt and not self.strict_budget and self.budget_over == "cache"
        least = prompt + self.window
        if counted and least >= self.tokens:
            raise KvatlasError(
                f"kv_budget {self} is too small for {where}: prompt {prompt} + local_window {self.window} tokens can "
                f"never be compressed below it; expected budgets above {least}{self.advice(prompt)}."
            )

    def new_between(self, prompt: int) -> int:
        """Return the new tokens between two compressions while a sequence with such a prompt thinks."""
        if self.every:
            return self.every
        older = max(0, self.first(prompt) - self.window)
        protected = min(prompt, older) if self.keep_prompt else 0
        return older - sum(self.allotted(older, protected, protected))

    def advice(self, prompt: int) -> str:
        """Return a clause on a budget that leaves room for new tokens between two compressions, or ""."""
        if self.every:
            return ""
        least = prompt + self.window
        for tokens in range(least - least % ROOM + ROOM, least + ROOM * ROOM, ROOM):
            new = replace(self, kv_budget=tokens, local_window=self.window, tokens_held=0).new_between(prompt)
            if new >= ROOM:
                return f"; a kv_budget of {tokens} leaves {new} new tokens between two compressions"
        return ""


#: The parameters of a rule, in their order.
RULE_PARAMETERS = tuple(item.name for item in fields(BudgetRule) if item.name != "tokens_held")


def implied_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a rule that follow from the others. Raises KvatlasError for a ratio beside `every`."""
    every = values.get("every")
    if every:
        # A wrong value of `every` is named by its own check.
        if "ratio" in values and isinstance(every, int) and every > 0:
            raise KvatlasError(
                f"ratio is {values['ratio']!r} beside every {every!r}; leave ratio out: with every the "
                "kv_budget is what stays."
            )
        return {"ratio": values.get("ratio", 1.0)}
    if values.get("strict_budget") is True and "ratio_over" not in values:
        return {"ratio_over": "older"}
    return {}


def _in_largest_unit(text: str) -> str:
    """Return a budget in bytes in the largest unit without a fraction: equal budgets are one setting."""
    size = int(text[:-3])
    unit = BYTE_UNITS.index(text[-3])
    while size and size % 1024 == 0 and unit + 1 < len(BYTE_UNITS):
        size //= 1024
        unit += 1
    return f"{size}{BYTE_UNITS[unit]}iB"


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
    with suppress(KvatlasError):
        values |= implied_values(values)
        if {"local_window", "ratio"} <= values.keys():
            return BudgetRule(**values)
    return None


def stays(setting: Setting, prompts: Sequence[int], kv_bytes: tuple[int, int] | None = None) -> Stays | None:
    """Return what stays under a setting after prompts of these lengths; None without a budget or prompts."""
    rule = rule_of(setting, kv_bytes)
    if rule is None:
        return None
    return mean_stays({prompt: rule.first_compression(prompt) for prompt in set(prompts)}, prompts)


def local_window_of(setting: Setting) -> int | None:
    """Return the tokens of a setting's local window; None without one, and for a share of a budget in bytes."""
    window = setting.values.get("local_window")
    budget = setting.values.get("kv_budget")
    if isinstance(window, str):
        return window_in_tokens(window, budget) if isinstance(budget, int) else None
    return window
