"""The numbers of a setting: its budget and window in tokens, what stays after a compression, and the choice it leaves.

Policies compute them, plans store them for every cell, and statistics and figures read them without any policy.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from kvatlas.core.basics import differing, percent
from kvatlas.core.traces import Setting

#: The parameter of a cap on thinking, and its value without one.
CAP = "thinking_tokens"
UNLIMITED = "unlimited"
#: The column of the cap in exports, where `thinking_tokens` are those that a trace has.
CAP_COLUMN = "thinking_cap"
#: Parameters that a setting names only if they have another value.
UNNAMED: Mapping[str, Any] = {
    "strict_budget": False,
    "budget_over": "cache",
    "every": 0,
    "every_from": "budget",
    "plan_prefix": 0,
    "kv_bits": 16,
    "key_bits": 0,
    "value_bits": 0,
    "group": 32,
    "residual": 32,
    CAP: UNLIMITED,
}
#: Those of them that change which tokens stay, never how many.
OF_SCORES = ("plan_prefix",)
#: Parameters of earlier versions, with the values that changed nothing.
FORMER: Mapping[str, Any] = {"refresh": 1, "carry": 0.0, "budgets": "equal"}
#: The parameters of the bits of keys and of values.
BITS = ("key_bits", "value_bits")
#: Policies without any judgement of tokens, which are controls beside another policy.
CONTROLS = ("random", "window")
#: The units of a budget in bytes, each 1024 of the one before.
BYTE_UNITS = "KMG"
#: A local window as a share of the KV budget.
WINDOW_SHARE = re.compile(r"\d+(\.\d+)?%")
#: Numbers of tokens that differ by less are equal.
_TINY = 1e-9
#: The most cells that a sentence names.
_NAMED = 6


def columns_of(setting: Setting) -> dict[str, Any]:
    """Return the parameters of a setting by their columns in exports."""
    return {CAP_COLUMN if name == CAP else name: value for name, value in setting.parameters}


def usual_controls(policies: Iterable[str]) -> frozenset[str]:
    """Return the controls beside the policies of a grid whose spec names none: `random` and `window` beside another."""
    return frozenset(CONTROLS) if set(policies).difference(CONTROLS) else frozenset()


@dataclass(frozen=True)
class SettingFacts:
    """Facts of a setting that come from its policy, so that a reader of its traces needs no policy.

    values: all parameters, those included that the setting does not name.
    shared: the names that the setting gives to parameters of every policy that compresses.
    compressions: the first compression during thinking by the length of the prompt; None without a KV budget.
    """

    values: Mapping[str, Any]
    shared: tuple[str, ...] = ()
    compressions: Mapping[int, Compression] | None = None

    def to_json(self) -> list[Any]:
        """Return plain data for the manifest."""
        rows = None
        if self.compressions is not None:
            rows = [[prompt, *compression] for prompt, compression in self.compressions.items()]
        return [dict(self.values), list(self.shared), rows]

    @classmethod
    def from_json(cls, entry: Sequence[Any]) -> SettingFacts:
        """Return the facts that `to_json` gave."""
        stored, shared, rows = entry
        values = {name: value for name, value in stored.items() if name not in FORMER or value != FORMER[name]}
        compressions = None if rows is None else {prompt: Compression(*numbers) for prompt, *numbers in rows}
        # Plans of earlier versions knew no cap on thinking.
        return cls({CAP: UNLIMITED, **values}, tuple(shared), compressions)


class Compression(NamedTuple):
    """The first compression of a setting during thinking, after a prompt of some length.

    `before` and `after` count cached tokens. Of the `candidates`, the older tokens that compete, `places` stay. Numbers
    are None where the rule, or the policy, of the setting is not known.
    """

    before: int | None
    after: int | None
    candidates: int | None
    places: int | None


class Stays(NamedTuple):
    """The tokens after a compression in the mean over problems, and their share of the tokens before it."""

    tokens: float
    share: float


def mean_stays(compressions: Mapping[int, Compression] | None, prompts: Iterable[int]) -> Stays | None:
    """Return what stays in the mean over problems with prompts of these lengths; None if it is not known."""
    lengths = Counter(prompts)
    if compressions is None or not lengths:
        return None

    tokens = 0.0
    share = 0.0
    for prompt, problems in lengths.items():
        before, after, *_ = compressions[prompt]
        if before is None or after is None:
            return None
        tokens += problems * after
        share += problems * after / before

    return Stays(tokens / lengths.total(), share / lengths.total())


@dataclass(frozen=True)
class BudgetAudit:
    """The number of older tokens that a policy may keep at the first compression of a setting, over `problems`.

    `median` and `worst` (the minimum) count these places; only thinking tokens compete for them while the prompt is
    kept. `none` is the share of problems without any place. `no_choice`, which includes `none`, is the share in which
    all competing tokens are kept or all are evicted, so that every policy keeps the same tokens.
    """

    problems: int
    median: float
    worst: int
    none: float
    no_choice: float

    @classmethod
    def over(cls, compressions: Mapping[int, Compression] | None, prompts: Iterable[int]) -> BudgetAudit | None:
        """Return the audit over problems with prompts of these lengths; None without any, and for unknown policies."""
        places: list[int] = []
        without_choice = 0
        if compressions is None:
            return None
        for prompt in prompts:
            *_, candidates, chosen = compressions[prompt]
            if candidates is None or chosen is None:
                return None
            places.append(chosen)
            without_choice += not 0 < chosen < candidates

        if not places:
            return None
        count = len(places)
        return cls(count, float(median(places)), min(places), places.count(0) / count, without_choice / count)

    def to_dict(self) -> dict[str, float | None]:
        """Return the fields with shares in percent."""
        return {**asdict(self), "none": percent(self.none), "no_choice": percent(self.no_choice)}


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
        usual = {"ratio_over": "thinking", "keep_prompt": True, **UNNAMED}
        counted = [name for name in usual if name not in OF_SCORES]
        names = [name for name in counted if values.get(name, usual[name]) != usual[name]]
        return tuple((name, values[name]) for name in ("kv_budget", "local_window", "ratio", *names) if name in values)


def no_choice_sentence(cells: Sequence[AuditedCell]) -> str | None:
    """Return a sentence that names the cells in which all policies keep the same tokens, or None."""
    rows = {(cell.model, cell.benchmark, cell.rule): cell for cell in cells}
    # A ratio of 0 or 1 leaves no choice by definition.
    blocked = [cell for cell in rows.values() if cell.audit.no_choice and 0 < cell.setting.values.get("ratio", 0.5) < 1]
    if not blocked:
        return None
    blocked.sort(key=lambda cell: -cell.audit.no_choice)

    # Each cell with the parameters in which the cells differ, its benchmark, and its model if there are several.
    names = differing(dict(cell.rule) for cell in cells) or ["kv_budget", "local_window", "ratio"]
    has_models = len({cell.model for cell in cells}) > 1
    listed = []
    for cell in blocked[:_NAMED]:
        rule = ", ".join(f"{name} {value}" for name, value in cell.rule if name in names)
        model = f" with {cell.model}" if has_models else ""
        listed.append(f"{rule} on {cell.benchmark}{model} ({100 * cell.audit.no_choice:.0f} %)")
    more = f"; and {len(blocked) - _NAMED} more" if len(blocked) > _NAMED else ""

    # Another `ratio_over` helps where the ratio counts the prompt and need not.
    over = ""
    if any("ratio_over" in dict(cell.rule) and "strict_budget" not in dict(cell.rule) for cell in blocked):
        over = ", or ratio_over thinking"
    least = f"{100 * blocked[-1].audit.no_choice:.0f}"
    most = f"{100 * blocked[0].audit.no_choice:.0f}"
    range_text = most if least == most else f"{least} to {most}"
    return (
        f"In {len(blocked)} of {len(rows)} cells all policies keep the same tokens in {range_text} % of problems, so "
        f"choose another kv_budget, local_window or ratio{over} for them: {'; '.join(listed)}{more}."
    )


@lru_cache(maxsize=4096)
def floor_ratio(ratio: float, tokens: int) -> int:
    """Return floor(ratio * tokens), exact for the decimal text of the ratio (0.3 of 10 is 3, never 2)."""
    return math.floor(Fraction(str(ratio)) * tokens)


def budget_in_tokens(text: str, token_bytes: int, sequence_bytes: int) -> int:
    """Return how many tokens a budget such as 12MiB holds, less `sequence_bytes` for each sequence."""
    unit = BYTE_UNITS.index(text[-3])
    budget_bytes = int(text[:-3]) * 1024 ** (unit + 1)
    return int((budget_bytes - sequence_bytes) // token_bytes)


def window_in_tokens(local_window: int | str, budget: int) -> int:
    """Return the tokens of a local window; a share such as `25%` is one of a budget in tokens, at least 1 token."""
    if isinstance(local_window, int):
        return local_window
    return max(1, math.floor(Fraction(local_window[:-1]) / 100 * budget))


def ascending(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the distinct values of a parameter in ascending order, shares such as `25%` too.

    The word for no limit comes last. Words, and values that cannot be compared, keep the order of the spec.
    """
    distinct = list(dict.fromkeys(values))
    if UNLIMITED in distinct:
        return (*ascending(value for value in distinct if value != UNLIMITED), UNLIMITED)
    if distinct and all(isinstance(value, str) and WINDOW_SHARE.fullmatch(value) for value in distinct):
        return tuple(sorted(distinct, key=lambda share: float(share[:-1])))
    if any(isinstance(value, str) for value in distinct):
        return tuple(distinct)
    try:
        return tuple(sorted(distinct))
    except TypeError:
        return tuple(distinct)


def windows_apart(by_window: Mapping[Any, Sequence[float]]) -> list[tuple[Any, Any]]:
    """Return the pairs of local windows that keep no number of tokens in common, from what their settings keep."""
    ranges = {window: (min(tokens), max(tokens)) for window, tokens in by_window.items()}
    pairs = []
    for first, second in combinations(ranges, 2):
        lowest = max(ranges[first][0], ranges[second][0])
        highest = min(ranges[first][1], ranges[second][1])
        if lowest > highest + _TINY:
            pairs.append((first, second))
    return pairs


def apart_sentence(windows: Sequence[Any]) -> str:
    """Return what a grid cannot tell whose narrowest and widest window keep no number of tokens in common."""
    return f"windows {windows[0]} and {windows[-1]} have no memory in common: this grid cannot tell window from memory"
