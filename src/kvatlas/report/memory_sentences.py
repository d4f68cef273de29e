"""Sentences on local windows at equal memory, and on the levels of an axis with the tokens that stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from kvatlas.core import CellCoord, apart_sentence
from kvatlas.stats.memory_of_averages import RATIO, MemoryTrend, TokenKinds, memory_trends, token_kinds
from kvatlas.stats.windows_at_memory import ONE_TOKEN, WINDOW, EqualMemory, MemoryEstimate, MemoryPair
from kvatlas.text import model_name, p_text, percent_text

if TYPE_CHECKING:
    from kvatlas.report.result import MapResult, Result
    from kvatlas.stats.csv_tests import PooledEffect

#: Levels that a sentence names one by one.
_NAMED = 5


# -- levels of an axis -------------------------------------------------------------------------------------------------


def level_sentence(effect: PooledEffect) -> str:
    """Return the level of an axis that differs most from the others, each with the tokens that stay.

    Of bare maps it says in how many the level is below the others: a permutation of levels proves nothing of means.
    """
    rank, level, most = effect.strongest
    others = [other for other, _ in effect.levels if other != level]
    is_below = most.value < 0
    tokens = {name: stays.tokens for name, stays in effect.stays.items()}
    differ = bool(tokens) and max(tokens.values()) - min(tokens.values()) >= ONE_TOKEN / 2
    details = [] if effect.maps else [f"{percent_text(most.low)} to {percent_text(most.high)}"]
    details.append(f"p {p_text(effect.adjusted_p)}")
    level_tokens = ""
    end = ""
    if differ:
        level_tokens = f" ({tokens[level]:,.0f} tokens stay)"
        details.insert(0, f"{_several([tokens[other] for other in others])};")
        end = f"; {_keeps(tokens[level], [tokens[other] for other in others], is_below)}"
    elif tokens:
        end = f"; all keep {tokens[level]:,.0f} tokens"
    names = _and(map(str, others)) if len(others) <= _NAMED else f"the {len(others)} others"
    points = f"{percent_text(abs(most.value))} points"
    side = "below" if is_below else "above"
    if not effect.maps:
        inside = ", ".join(details).replace(";,", ";")
        return f"{effect.axis} {level}{level_tokens} is {points} {side} {names} ({inside}){end}"
    alike = effect.below[rank] if is_below else effect.maps - effect.below[rank]
    inside = ", ".join([*details[:-1], points, details[-1]]).replace(";,", ";")
    return (
        f"{effect.axis} {level}{level_tokens} is {side} {names} in {alike} of {effect.maps} maps ({inside}){end}; the "
        f"levels are not exchangeable, which proves no difference of means"
    )


def _several(tokens: Sequence[float]) -> str:
    """Return the tokens of several levels: one by one, of many the range."""
    if len(tokens) <= _NAMED:
        return ", ".join(f"{one:,.0f}" for one in tokens)
    return f"{min(tokens):,.0f} to {max(tokens):,.0f}"


def _keeps(own: float, others: Sequence[float], is_below: bool) -> str:
    """Return a clause on the memory of a level beside the others, since it may be the cause."""
    is_fewer = own < sum(others) / len(others)
    also = "also " if is_fewer == is_below else ""
    clause = f"it {also}keeps {'fewer' if is_fewer else 'more'}"
    return clause if also else f"though {clause}"


# -- one line a map ----------------------------------------------------------------------------------------------------


def memory_lines(maps: Sequence[MapResult]) -> list[str]:
    """Return what each map says of local windows at equal memory, for maps in which the question arises.

    Lines name what differs between the maps.
    """
    names = [(model_name(one.map.model), one.map.benchmark, one.map.policy) for one in maps]
    differing = [len(set(column)) > 1 for column in zip(*names, strict=True)]
    lines = []
    for one, name in zip(maps, names, strict=True):
        if one.verdict.memory is not None:
            subject = " | ".join(filter(None, compress(name, differing)))
            finding = _finding(one.verdict.memory)
            lines.append(f"{subject}: {finding}" if subject else f"{finding[0].upper()}{finding[1:]}")
    return lines


def memory_title(maps: Sequence[MapResult], singles: Sequence[MapResult]) -> str:
    """Return the title of a figure of maps by the tokens that stay: what is proven of windows at equal memory.

    `singles` are the maps of one benchmark each.
    """
    tested = [(one, one.verdict.memory) for one in maps if one.verdict.memory is not None]
    if not tested:
        return _title_of_averages(singles)
    proven = [(one, memory, memory.best) for one, memory in tested if memory.best is not None]
    if not proven:
        return "At equal memory no window is proven better"
    one, memory, pair = min(proven, key=lambda item: item[2].test.adjusted_p)
    tokens = " and ".join(dict.fromkeys(f"{tokens:,.0f}" for tokens in pair.tokens))
    subject = f"{model_name(one.map.model)}, {one.map.policy}: at" if len(tested) > 1 else "At"
    more = f"; proven in {len(proven)} of {len(tested)} panels" if len(tested) > 1 else ""
    points = percent_text(pair.test.difference.value)
    return (
        f"{subject} {tokens} tokens {place(pair.better, memory.axes)} beats {place(pair.other, memory.axes)} by "
        f"{points} points{more}"
    )


def _title_of_averages(maps: Sequence[MapResult]) -> str:
    trends = memory_trends([one.map for one in maps])
    shown = [model_name(trend.model) for trend in trends if trend.is_shown]
    if shown:
        return f"These averages rise or fall with the tokens that stay: {_and(shown)}"
    return "No trend with the tokens that stay is shown by these averages" if trends else "Averages by tokens that stay"


def _finding(memory: EqualMemory) -> str:
    if memory.best is not None:
        return _proven(memory, memory.best)
    if memory.is_blind:
        text = apart_sentence(memory.windows)
    else:
        text = f"at equal memory no window is proven better ({_pairs(memory)})"
    if memory.estimate is not None:
        text += f"; {_estimated(memory, memory.estimate)}"
    return f"{text}."


def _proven(memory: EqualMemory, pair: MemoryPair) -> str:
    difference = pair.test.difference
    better, other = (f"{tokens:,.0f}" for tokens in pair.tokens)
    kept = f"both keep {better}" if better == other else f"they keep {better} and {other}"
    return (
        f"at equal memory {place(pair.better, memory.axes)} is {percent_text(difference.value)} points above "
        f"{place(pair.other, memory.axes)} ({percent_text(difference.low)} to {percent_text(difference.high)} over "
        f"{_pairs(memory)}, adjusted p {p_text(pair.test.adjusted_p)}); {kept}{_keeps_more(pair)}."
    )


def _keeps_more(pair: MemoryPair) -> str:
    """Return a clause on the benchmarks on which the better setting keeps more tokens; empty without any."""
    if not pair.keeps_more:
        return ""
    listed = _and(f"{tokens:,.0f} more on {name}" for name, tokens in pair.keeps_more.items())
    return f" in the mean over benchmarks, the first {listed}"


def _estimated(memory: EqualMemory, estimate: MemoryEstimate) -> str:
    """Return the estimate by straight lines, which is no proof."""
    difference = estimate.difference
    low, high = (f"{tokens:,.0f}" for tokens in (estimate.low, estimate.high))
    tokens = f"at {low} tokens" if low == high else f"over {low} to {high} tokens"
    other = memory.axes[1 - memory.axes.index(WINDOW)]
    between = "ratios" if other == RATIO else f"values of {other}"
    return (
        f"{estimate.wide} minus {estimate.narrow} {tokens}: {percent_text(difference.value)} "
        f"({percent_text(difference.low)} to {percent_text(difference.high)}), estimated by straight "
        f"lines between {between}"
    )


def place(coord: CellCoord, axes: tuple[str, str]) -> str:
    """Return a cell by its window first: `window 16, ratio 0.3`."""
    values = dict(zip(axes, coord, strict=True))
    window = values.pop(WINDOW)
    return ", ".join([f"window {window}", *(f"{name} {value}" for name, value in values.items())])


def _pairs(memory: EqualMemory) -> str:
    count = len(memory.tests)
    return f"{count} pair{'' if count == 1 else 's'}"


# -- averages alone ----------------------------------------------------------------------------------------------------


def averages_sentences(result: Result) -> list[str]:
    """Return what maps of averages say of memory: one sentence a model, and one over all maps; nothing is proven."""
    maps = [one.map for one in result.single]
    trends = memory_trends(maps)
    sentences = [_trend_sentence(trend) for trend in trends]
    kinds = token_kinds(maps)
    if kinds is None or not trends:
        return sentences
    sentences.append(_kinds_sentence(kinds))
    blind = dict.fromkeys(trend.windows for trend in trends if trend.is_blind)
    return [*sentences, *(f"{apart_sentence(windows).capitalize()}." for windows in blind)]


def _trend_sentence(trend: MemoryTrend) -> str:
    slope = trend.per_thousand
    verdict = "a trend" if trend.is_shown else "no trend is shown"
    text = (
        f"{model_name(trend.model)} ({trend.low_tokens:,.0f} to {trend.high_tokens:,.0f} of "
        f"{trend.total_tokens:,.0f} tokens stay): {percent_text(slope.value, 2)} points per 1,000 tokens "
        f"({percent_text(slope.low, 2)} to {percent_text(slope.high, 2)}), {verdict}"
    )
    gap = trend.against_thriftier
    if gap is None:
        return f"{text}."
    side = "below" if gap.value < 0 else "above"
    return (
        f"{text}; {RATIO} {trend.lowest_ratio} lies {percent_text(abs(gap.value))} {side} cells of higher ratio that "
        f"keep no more ({percent_text(gap.low)} to {percent_text(gap.high)})."
    )


def _kinds_sentence(kinds: TokenKinds) -> str:
    return (
        f"1,000 chosen tokens more are worth {percent_text(kinds.chosen)} points ({kinds.chosen_alike} of {kinds.maps} "
        f"maps agree in sign), 1,000 moved to the window {percent_text(kinds.moved)} ({kinds.moved_alike} of "
        f"{kinds.maps}); the {kinds.benchmarks} benchmarks are the units, so nothing of it is proven."
    )


# -- words -------------------------------------------------------------------------------------------------------------


def _and(names: Iterable[str]) -> str:
    """Return names as a list of words: `16`, `16 and 32`, `16, 32 and 64`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
