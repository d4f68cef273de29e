"""The order in which the settings of a run are tested: fixed by its spec alone, before any data.

**Chains.** The settings of a policy are tested in chains, one for each local window, each from the setting that keeps
most KV bytes by its own numbers down to the first that is not proven. One order for all windows would be ended by a
wide window of a small ratio, which may lose more than a narrow one that keeps fewer tokens. Without a window as an axis
a chain goes along the parameter that moves the bytes most, one chain for each value of the others. Parameters of the
policy itself, such as the number of queries that it observes, move no bytes: settings that differ in them stand in
chains of their own. So do settings of different caps on thinking, since one that keeps fewer tokens and one that writes
fewer have no order that data do not decide.

Chains share the level of 5 %, so each of many proves less where problems are few. Where not even "nothing lost" could
be proven in so many chains there is one for each policy and cap. Numbers of problems and samples decide that, so the
two claims, whose units differ, may have different chains.

**Each.** Settings without numbers of their own, such as commands of servers, have no order: each is a chain by itself,
and the order of a list decides nothing. `tests: in_order` in a spec says that it names them from gentle to harsh: then
they are one chain, with two axes one for each value of the first. Where the spec declares the KV bytes of all of them
those go from most to fewest.

**Controls** are in no chain. Nothing is claimed of them but that they lose more than the margin.

How the chains share the level, and why no more than 5 % of runs make a false claim: `numerics.against_reference`.
"""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from kvatlas.core import Claim, Setting, budget_in_tokens, differing, floor_ratio, grouped, window_in_tokens
from kvatlas.core.settings import CAP, OF_SCORES, UNNAMED
from kvatlas.stats.numerics.planning import provable_margin

#: Parameters of the budget rule and of the precision, which move the bytes that a setting keeps.
_MOVE_BYTES = {"kv_budget", "local_window", "ratio", *UNNAMED} - {CAP, *OF_SCORES}
_WINDOW = "local_window"
#: The value of `tests` for settings that a spec names from gentle to harsh.
IN_ORDER = "in_order"


class TestedSetting(NamedTuple):
    """A setting that is no control, and the KV bytes of a token and of each sequence; None where they are unknown."""

    setting: Setting
    kv_bytes: tuple[int, int] | None

    @property
    def bytes(self) -> float:
        """The bytes that it keeps by its own numbers."""
        return nominal_bytes(self.setting, self.kv_bytes)


#: Ids of settings in the orders in which they are tested.
Orders = list[list[str]]


def orders_of_claims(
    settings: Sequence[TestedSetting],
    problems: Sequence[int],
    units: Sequence[int],
    samples: int,
    margin: float,
    tests: str = "each",
    axes: Sequence[str] = (),
) -> dict[Claim, Orders]:
    """Return the chains of ids in which these settings of a model are tested at 5 % in all, by claim.

    Benchmarks have so many `problems` with `samples` each; `units` are those of problems like these: problems, or
    clusters of them. `tests` and the `axes` with several values are those of the spec, for settings without numbers of
    their own.
    """
    by_order = grouped(settings, lambda one: CAP in one.setting.values or one.bytes > -math.inf)
    numbered = by_order.get(True, [])
    others = by_order.get(False, [])
    unnumbered = _declared_order(others, axes) if tests == IN_ORDER else [[one] for one in others]
    by_window = [*_chains_of_windows(numbered), *unnumbered]
    by_policy = [*map(_from_most, grouped(numbered, _policy_and_cap).values()), *unnumbered]

    orders = {}
    for claim, sizes in ((Claim.THESE, [samples * count for count in problems]), (Claim.LIKE, units)):
        # One for each policy and cap where not even "nothing lost" could be proven in so many.
        is_too_many = bool(settings) and provable_margin(sizes, len(by_window)) > margin
        chains = by_policy if is_too_many else by_window
        orders[claim] = [list(map(attrgetter("setting.id"), of_chain)) for of_chain in chains]
    return orders


def _policy_and_cap(one: TestedSetting) -> tuple[object, ...]:
    # Without a KV budget the cap itself orders the settings.
    return one.setting.policy, one.setting.values.get(CAP) if "kv_budget" in one.setting.values else None


def _from_most(settings: Iterable[TestedSetting]) -> list[TestedSetting]:
    """Return settings from most bytes down, of equal bytes from the largest cap on thinking down, else as they come."""
    return sorted(settings, key=lambda one: (-one.bytes, -one.setting.values.get(CAP, math.inf)))


def _chains_of_windows(settings: Sequence[TestedSetting]) -> list[list[TestedSetting]]:
    """Return the chains of each policy, cap, local window, and value of what moves no bytes."""

    def group_of(one: TestedSetting) -> tuple[object, ...]:
        other_values = [(name, value) for name, value in one.setting.parameters if name not in _MOVE_BYTES | {CAP}]
        return (*_policy_and_cap(one), *other_values)

    chains = []
    for group in grouped(settings, group_of).values():
        values = [one.setting.values for one in group]
        varied = [name for name in differing(values) if name != CAP]
        apart = [_WINDOW] if _WINDOW in varied else _other_axes(group, varied)
        chains += [_from_most(of_value) for of_value in _by_values(group, apart)]
    return chains


def _other_axes(settings: Sequence[TestedSetting], varied: Sequence[str]) -> list[str]:
    """Return the varied parameters without the one that moves most bytes; none where each moves them with others."""
    moved = {}
    for name in varied:
        others = [other for other in varied if other != name]
        ranges = []
        for alike in _by_values(settings, others):
            sizes = [one.bytes for one in alike]
            ranges.append(max(sizes) - min(sizes))
        moved[name] = max(ranges)
    most = max(moved, key=lambda name: moved[name], default="")
    return [name for name in varied if name != most] if moved and moved[most] > 0 else []


def _by_values(settings: Sequence[TestedSetting], names: Sequence[str]) -> list[list[TestedSetting]]:
    """Return the settings in groups that have equal values of these parameters."""
    return list(grouped(settings, lambda one: repr([one.setting.values.get(name) for name in names])).values())


def _declared_order(settings: Sequence[TestedSetting], axes: Sequence[str]) -> list[list[TestedSetting]]:
    """Return the settings as the spec names them, with two axes for each value of the first.

    Those of which all KV bytes are declared go from most to fewest.
    """
    first = axes[0] if len(axes) > 1 else ""
    chains = list(grouped(settings, lambda one: one.setting.values.get(first)).values())
    if all(one.kv_bytes is not None for one in settings):
        chains = [sorted(of_chain, key=lambda one: -(one.kv_bytes or (0, 0))[0]) for of_chain in chains]
    return chains


def nominal_bytes(setting: Setting, kv_bytes: tuple[int, int] | None) -> float:
    """Return the KV bytes that a setting keeps by its own numbers, before any data; -infinity where it does not say.

    `kv_bytes` are those of a token, and for each sequence; without them the result are tokens. For a full cache of some
    bits, the bytes of one token.
    """
    token_bytes, tail_bytes = kv_bytes or (1, 0)
    if setting.policy == "full":
        return float(token_bytes)
    kept = kept_by_rule(setting, token_bytes, tail_bytes)
    budget = setting.values.get("kv_budget")
    if kept is None and setting.values.get("every") and isinstance(budget, int):
        # The prompt stays beside the budget, under every setting.
        kept = float(budget)
    return -math.inf if kept is None else kept * token_bytes + tail_bytes


def kept_by_rule(setting: Setting, token_bytes: int = 0, tail_bytes: int = 0) -> float | None:
    """Return the KV tokens that a compression leaves by the setting's own numbers; None where they do not say.

    That is local_window + floor(ratio * (kv_budget - local_window)) (arXiv 2601.18383), or the budget with `every`. A
    budget in bytes holds tokens of `token_bytes` each, and `tail_bytes` for each sequence.
    """
    values = setting.values
    budget = values.get("kv_budget")
    window = values.get("local_window")
    ratio = values.get("ratio")
    if isinstance(budget, str) and token_bytes > 1:
        budget = budget_in_tokens(budget, token_bytes, tail_bytes)
    if not isinstance(budget, int | float):
        return None

    if values.get("every") and values.get("budget_over") != "thinking":
        return float(budget)
    if window is None or ratio is None:
        return None
    window = window_in_tokens(window, int(budget))
    return float(window + floor_ratio(ratio, budget - window))
