"""Local windows at equal memory as data: the form of `kvatlas describe --json`."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.core import CellCoord, Map, percent
from kvatlas.report.as_data import Json, contrast_document, rounded_p
from kvatlas.stats.memory_of_averages import memory_trends, token_kinds
from kvatlas.stats.windows_at_memory import EqualMemory, MemoryPair


def memory_document(memory: EqualMemory) -> Json:
    """Return local windows at equal memory as data."""
    estimate = memory.estimate
    return {
        "pairs": len(memory.tests),
        "proven": [_pair_document(memory, pair) for pair in memory.proven],
        "strongest": _pair_document(memory, memory.best) if memory.best else None,
        "estimate": None
        if estimate is None
        else {
            "wide": estimate.wide,
            "narrow": estimate.narrow,
            "low_tokens": round(estimate.low, 3),
            "high_tokens": round(estimate.high, 3),
            **contrast_document(estimate.difference, "difference"),
        },
        "nothing_in_common": [list(pair) for pair in memory.apart],
        "front": {
            "observed": [_coord(memory, coord) for coord in memory.front],
            "proven_off": [_coord(memory, coord) for coord in memory.proven_off],
        },
    }


def _coord(memory: EqualMemory, coord: CellCoord) -> Json:
    return dict(zip(memory.axes, coord, strict=True))


def _pair_document(memory: EqualMemory, pair: MemoryPair) -> Json:
    difference = pair.test.difference
    return {
        "better": {**_coord(memory, pair.better), "stays_tokens": round(pair.tokens[0], 3)},
        "other": {**_coord(memory, pair.other), "stays_tokens": round(pair.tokens[1], 3)},
        "better_keeps_more_on": {name: round(tokens, 3) for name, tokens in pair.keeps_more.items()},
        "difference": percent(difference.value),
        "low": percent(difference.low),
        "high": percent(difference.high),
        "p": rounded_p(difference.p),
        "adjusted_p": rounded_p(pair.test.adjusted_p),
    }


def averages_document(maps: Sequence[Map]) -> Json | None:
    """Return what maps of averages, of one benchmark each, say of memory, in points; None without such maps."""
    trends = memory_trends(maps)
    kinds = token_kinds(maps)
    if kinds is None or not trends:
        return None

    documents = []
    for trend in trends:
        gap = trend.against_thriftier
        documents.append(
            {
                "model": trend.model,
                "low_tokens": trend.low_tokens,
                "high_tokens": trend.high_tokens,
                "total_tokens": trend.total_tokens,
                "per_thousand_tokens": contrast_document(trend.per_thousand),
                "lowest_ratio": trend.lowest_ratio,
                "lowest_ratio_against_cells_that_keep_no_more": None if gap is None else contrast_document(gap),
            }
        )

    return {
        "trends": documents,
        "per_thousand_chosen_tokens": {"value": percent(kinds.chosen), "maps_of_that_sign": kinds.chosen_alike},
        "per_thousand_moved_to_the_window": {"value": percent(kinds.moved), "maps_of_that_sign": kinds.moved_alike},
        "maps": kinds.maps,
        "benchmarks": kinds.benchmarks,
    }
