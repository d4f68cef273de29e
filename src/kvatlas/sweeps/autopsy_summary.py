"""The summary of the autopsies of a cell: shares with intervals, and the kinds and places of the saving tokens."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from kvatlas.core import percent
from kvatlas.stats.estimates import pass_at_1
from kvatlas.sweeps.autopsies import Autopsy, token_kind

#: The sizes of causes whose shares a summary gives.
SIZES = (1, 2, 4, 8)


def summarise(autopsies: Sequence[Autopsy]) -> dict[str, Any]:
    """Return what the autopsies of a cell show, shares in percent with intervals by problem.

    `cause_of_at_most` are shares of all reproduced answers, `random_sets_save` is one of random sets, of as many tokens
    as the causes. `by_luck` is the share of causes to expect if every span saved as often as a random set does.
    """
    tried = [item for item in autopsies if item.reproduced]
    sizes = [len(item.tokens) for item in tried]
    found = [item for item in tried if item.tokens]
    tokens = list(chain.from_iterable(item.tokens for item in found))
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
        "tokens": _median([len(item.tokens) for item in found]),
        "replays": _median([item.replays for item in tried]),
        "distance": _median([token.distance for token in tokens]),
        # 0 is the first token that the policy evicted, 100 the last one.
        "rank_among_evicted": _median([100 * (token.rank - token.slots) / token.evicted for token in tokens]),
        "kinds": dict(Counter(token_kind(token.text) for token in tokens).most_common()),
    }


def _luck(tried: Sequence[Autopsy], controls: Sequence[bool]) -> float | None:
    """Return the percentage of causes to expect if each span saved as often as a random set; None without these."""
    if not controls:
        return None
    chance = statistics.fmean(controls)
    return percent(statistics.fmean(1 - (1 - chance) ** item.spans for item in tried))


def _share_of_size(items: Sequence[Autopsy], sizes: Sequence[int], most: int) -> dict[str, float | None] | None:
    return _share(items, [0 < size <= most for size in sizes])


def _share(items: Sequence[Autopsy], values: Sequence[float]) -> dict[str, float | None] | None:
    """Return the mean of a value for each item, with its interval; None without items."""
    by_problem: dict[str, list[float]] = {}
    for item, value in zip(items, values, strict=True):
        by_problem.setdefault(item.key[3], []).append(float(value))
    return pass_at_1(by_problem).to_dict() if by_problem else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None

