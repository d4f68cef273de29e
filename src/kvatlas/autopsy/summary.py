"""The summary of the autopsies of a cell: the held-out test, the controls, and the kinds of the saving tokens."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from scipy import special

from kvatlas.autopsy.autopsies import Autopsy, token_kind
from kvatlas.core import Estimate, percent
from kvatlas.stats.estimates import pass_at_1
from kvatlas.stats.numerics.arrays import LEVEL, Contrast
from kvatlas.stats.numerics.bounded import mean_difference
from kvatlas.stats.numerics.multiple import holm

#: The sizes of causes whose shares a summary gives.
SIZES = (1, 2, 4, 8)
#: The most tokens of a cause that the main figures count.
MOST_TOKENS = 8
#: The arms of the held-out test in their order.
ARMS = ("nothing", "random", "cause", "no_compression")

#: A share in percent or a difference in points, with its interval.
Values = dict[str, float | None]


@dataclass(frozen=True)
class SizeGroup:
    """The held-out test of causes with `low` to `high` tokens: the share of right answers of each arm."""

    low: int
    high: int
    answers: int
    arms: Mapping[str, Estimate]

    @property
    def name(self) -> str:
        """The sizes as a text."""
        return f"{self.low}" if self.low == self.high else f"{self.low}–{self.high}"


def summarise(autopsies: Sequence[Autopsy], lost_share: float | None = None) -> dict[str, Any]:
    """Return what the autopsies of a cell show, shares in percent and differences in points, with intervals by problem.

    `lost_share` is the share of lost answers among all of the cell, None if it is unknown. `cause_of_at_most` are
    shares of all reproduced answers, `random_sets_save` is one of random sets, of as many tokens as the causes.
    `by_luck` is the share of causes to expect if every span saved as often as a random set does.
    """
    tried = [item for item in autopsies if item.reproduced]
    sizes = [len(item.tokens) for item in tried]
    found = [item for item in tried if item.tokens]
    controlled = list(chain.from_iterable([item] * len(item.random) for item in found))
    controls = list(chain.from_iterable(item.random for item in found))
    return {
        "lost": len(autopsies),
        "reproduced": len(tried),
        "causes": len(found),
        "cause_of_at_most": {most: _share_of_size(tried, sizes, most) for most in SIZES},
        "any_cause": _share(tried, [size > 0 for size in sizes]),
        "random_sets_save": _share(controlled, controls),
        "by_luck": _luck(tried, controls),
        "without_compression_until_the_death": _share(tried, [bool(item.full) for item in tried]),
        "held_out": _held_out(tried, lost_share),
        "in_right_answers": _harm(found),
        "kept_by_others": _kept_by_others(found),
        "replays": _median([item.replays for item in tried]),
        "control_replays": _median([item.control_replays for item in tried]),
        **_about_tokens(found),
    }


def _about_tokens(found: Sequence[Autopsy]) -> dict[str, Any]:
    """Return the number, the distances, the ranks and the kinds of the saving tokens."""
    tokens = list(chain.from_iterable(item.tokens for item in found))
    return {
        "tokens": _median([len(item.tokens) for item in found]),
        "distance": _median([token.distance for token in tokens]),
        # 0 is the first token that the policy evicted, 100 the last one.
        "rank_among_evicted": _median([100 * (token.rank - token.slots) / token.evicted for token in tokens]),
        "kinds": dict(Counter(token_kind(token.text) for token in tokens).most_common()),
    }


def tested_causes(autopsies: Sequence[Autopsy]) -> list[Autopsy]:
    """Return the autopsies with a cause of at most `MOST_TOKENS` that was tested."""
    return [item for item in autopsies if item.held_out and len(item.tokens) <= MOST_TOKENS]


def by_size(autopsies: Sequence[Autopsy]) -> list[SizeGroup]:
    """Return the held-out test by the size of causes: up to 1, 2, 4 and 8 tokens, without empty groups."""
    tested = tested_causes(autopsies)
    groups = []
    for low, high in zip((1, *(size + 1 for size in SIZES)), SIZES, strict=False):
        members = [item for item in tested if low <= len(item.tokens) <= high]
        if members:
            groups.append(_size_group(low, high, members))
    return groups


def whole_group(autopsies: Sequence[Autopsy]) -> SizeGroup:
    """Return the group of all tested causes, of which there is one at least."""
    return _size_group(1, MOST_TOKENS, tested_causes(autopsies))


def _size_group(low: int, high: int, members: Sequence[Autopsy]) -> SizeGroup:
    arms = {}
    for arm in ARMS:
        arms[arm] = _estimate(members, [_mean(item.held_out[arm]) for item in members])
    return SizeGroup(low, high, len(members), arms)


def _held_out(tried: Sequence[Autopsy], lost_share: float | None) -> dict[str, Any] | None:
    """Return the test under random numbers that no search used; None without a tested cause.

    `proven_alone` is the number of answers for each of which alone the cause is right more often than random sets:
    exact sign tests over the streams, with Holm's adjustment. `of_all_lost` counts answers without a tested cause as
    not restored. `room` is that in points of Pass@1: the share of lost answers times what the causes restore of them.
    """
    tested = tested_causes(tried)
    if not tested:
        return None

    def rise(first: str, second: str) -> Values:
        return _difference(tested, [_mean(item.held_out[first]) - _mean(item.held_out[second]) for item in tested])

    tested_keys = {item.key for item in tested}

    def rise_of_all(item: Autopsy) -> float:
        return _mean(item.held_out["cause"]) - _mean(item.held_out["random"]) if item.key in tested_keys else 0.0

    of_all = _difference(tried, list(map(rise_of_all, tried)))
    return {
        "streams": len(tested[0].held_out["nothing"]),
        "most_tokens": MOST_TOKENS,
        "answers": len(tested),
        "right": _arms_of(whole_group(tried)),
        "cause_over_random": rise("cause", "random"),
        "cause_over_nothing": rise("cause", "nothing"),
        "random_over_nothing": rise("random", "nothing"),
        "no_compression_over_nothing": rise("no_compression", "nothing"),
        "proven_alone": sum(p <= LEVEL for p in holm(list(map(_sign_test, tested)))),
        "of_all_lost": of_all,
        "room": None if lost_share is None else _room(of_all, lost_share),
        "by_size": {group.name: {"answers": group.answers, **_arms_of(group)} for group in by_size(tried)},
    }


def _sign_test(autopsy: Autopsy) -> float:
    """Return the one-sided p-value that the cause is right no more often than random sets under the same streams."""
    pairs = list(zip(autopsy.held_out["cause"], autopsy.held_out["random"], strict=True))
    better = sum(cause and not other for cause, other in pairs)
    worse = sum(other and not cause for cause, other in pairs)
    # The chance of so many successes or more in fair tosses.
    return float(special.bdtrc(better - 1, better + worse, 0.5)) if better else 1.0


def _arms_of(group: SizeGroup) -> dict[str, Values]:
    """Return the share of right answers of each arm."""
    return {arm: estimate.to_dict() for arm, estimate in group.arms.items()}


def _harm(found: Sequence[Autopsy]) -> dict[str, Any] | None:
    """Return what like tokens do in right answers; None without one."""
    tested = [item for item in found if item.control]
    if not tested:
        return None
    right = {}
    for arm in ("nothing", "like"):
        right[arm] = [_mean(item.control[arm]) for item in tested]
    changes = [like - nothing for like, nothing in zip(right["like"], right["nothing"], strict=True)]
    return {
        "answers": len(tested),
        "right": {arm: _share(tested, shares) for arm, shares in right.items()},
        "like_over_nothing": _difference(tested, changes),
    }


def _kept_by_others(found: Sequence[Autopsy]) -> dict[str, Any]:
    """Return for each other setting the share of the saving and of the random tokens that it keeps."""
    names = dict.fromkeys(chain.from_iterable(item.kept_by_others for item in found))
    table = {}
    for name in names:
        members = [item for item in found if name in item.kept_by_others]
        saving = [item.kept_by_others[name][0] for item in members]
        others = [item.kept_by_others[name][1] for item in members]
        table[name] = {
            "answers": len(members),
            "saving": _share(members, saving),
            "random": _share(members, others),
            "difference": _difference(members, [one - other for one, other in zip(saving, others, strict=True)]),
        }
    return table


def _luck(tried: Sequence[Autopsy], controls: Sequence[bool]) -> float | None:
    """Return the percentage of causes to expect if each span saved as often as a random set; None without these."""
    if not controls:
        return None
    chance = statistics.fmean(controls)
    return percent(statistics.fmean(1 - (1 - chance) ** item.spans for item in tried))


def _share_of_size(items: Sequence[Autopsy], sizes: Sequence[int], most: int) -> Values | None:
    return _share(items, [0 < size <= most for size in sizes])


def _share(items: Sequence[Autopsy], values: Sequence[float]) -> Values | None:
    """Return the mean of a value for each item, with its interval; None without items."""
    return _estimate(items, values).to_dict() if items else None


def _by_problem(items: Sequence[Autopsy], values: Sequence[float]) -> dict[str, list[float]]:
    """Return the values of each problem."""
    grouped: dict[str, list[float]] = {}
    for item, value in zip(items, values, strict=True):
        grouped.setdefault(item.problem, []).append(float(value))
    return grouped


def _estimate(items: Sequence[Autopsy], values: Sequence[float]) -> Estimate:
    return pass_at_1(_by_problem(items, values))


def _difference(items: Sequence[Autopsy], differences: Sequence[float]) -> Values:
    """Return the mean of a difference for each item in points, with its interval and the p-value of 0."""
    grouped = _by_problem(items, differences)
    contrast: Contrast = mean_difference(np.array([_mean(values) for values in grouped.values()]))
    return {
        "value": percent(contrast.value),
        "low": percent(contrast.low),
        "high": percent(contrast.high),
        "p": contrast.p,
    }


def _room(of_all_lost: Values, lost: float) -> Values:
    """Return the points of all answers from those of the lost ones, which are the share `lost` of all."""
    return {name: round((of_all_lost[name] or 0.0) * lost, 4) for name in ("value", "low", "high")}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
