"""Sentences on local windows at equal memory, and on the levels of an axis with the tokens that stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from kvatlas.core import CellCoord, apart_sentence
from kvatlas.stats.windows_at_memory import ONE_TOKEN, RATIO, WINDOW, EqualMemory
from kvatlas.text import limit_text, model_name, p_text, percent_text

if TYPE_CHECKING:
    from kvatlas.report.evidence import MapResult
    from kvatlas.stats.map_tests import Effect

#: Levels that a sentence names one by one.
_NAMED = 5


# -- levels of an axis -------------------------------------------------------------------------------------------------


def level_sentence(effect: Effect) -> str:
    """Return the level of an axis that differs most from the others, each with the tokens that stay.

    Of bare maps it says in how many the level is below the others: a permutation of levels proves nothing of means.
    """
    rank, level, most = effect.strongest
    others = [other for other, _ in effect.levels if other != level]
    is_below = most.value < 0
    tokens = {name: stays.tokens for name, stays in effect.stays.items()}
    differ = bool(tokens) and max(tokens.values()) - min(tokens.values()) >= ONE_TOKEN / 2

    details = [] if effect.maps else [f"{limit_text(most.low)} to {limit_text(most.high)}"]
    details.append(f"p {p_text(effect.adjusted_p)}")
    level_tokens = ""
    end = ""
    if differ:
        level_tokens = f" ({tokens[level]:,.0f} tokens stay)"
        others_tokens = [tokens[other] for other in others]
        # The tokens of several levels one by one, of many the range.
        listed = ", ".join(f"{one:,.0f}" for one in others_tokens)
        if len(others_tokens) > _NAMED:
            listed = f"{min(others_tokens):,.0f} to {max(others_tokens):,.0f}"
        details.insert(0, f"{listed};")
        # The memory of the level beside the others, since it may be the cause.
        is_fewer = tokens[level] < sum(others_tokens) / len(others_tokens)
        keeps = f"keeps {'fewer' if is_fewer else 'more'}"
        end = f"; it also {keeps}" if is_fewer == is_below else f"; though it {keeps}"
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


def effect_title(effects: Sequence[Effect]) -> str:
    """Return the surest effect of an axis that is found, as a title of 16 words at most; empty without one.

    As in `Ratio 0.1 is 1.5 points below the rest in 8 of 8 maps (p 0.016)`. Of equally sure ones it is the largest: the
    p-values of permutations have a least value, which several effects reach.
    """
    found = [effect for effect in effects if effect.is_found]
    if not found:
        return ""
    surest = min(found, key=lambda effect: (round(effect.adjusted_p, 6), -abs(effect.strongest[2].value)))
    rank, level, most = surest.strongest
    is_below = most.value < 0
    # The name of a parameter stays as it is.
    axis = surest.axis if "_" in surest.axis else surest.axis.capitalize()
    side = f"points {'below' if is_below else 'above'} the rest"
    if surest.maps:
        alike = surest.below[rank] if is_below else surest.maps - surest.below[rank]
        p_value = f"p {p_text(surest.adjusted_p)}"
        return f"{axis} {level} is {percent_text(abs(most.value))} {side} in {alike} of {surest.maps} maps ({p_value})"

    # The means of all policies and models in which the same level differs to the same side.
    points = []
    for effect in found:
        _, other_level, contrast = effect.strongest
        is_alike = (effect.axis, other_level) == (surest.axis, level) and (contrast.value < 0) == is_below
        if is_alike and not effect.maps:
            points.append(abs(contrast.value))
    tested = sum(effect.axis == surest.axis and not effect.maps for effect in effects)
    ends = " to ".join(dict.fromkeys(map(percent_text, (min(points), max(points)))))
    count = f" in {len(points)} of {tested} maps" if tested > 1 else ""
    return f"{axis} {level} is {ends} {side}, proven{count}"


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
            text = _memory_sentence(one.verdict.memory)
            lines.append(f"{subject}: {text}" if subject else f"{text[0].upper()}{text[1:]}")
    return lines


def _memory_sentence(memory: EqualMemory) -> str:
    """Return what is proven of windows at equal memory, else the estimate by straight lines, which is no proof."""
    count = len(memory.tests)
    pairs = f"{count} pair{'' if count == 1 else 's'}"
    best = memory.best
    if best is not None:
        difference = memory.tests[best]
        better, other = (f"{memory.tokens[index]:,.0f}" for index in best)
        kept = f"both keep {better}" if better == other else f"they keep {better} and {other}"
        if keeps_more := memory.keeps_more(best):
            # The benchmarks on which the better setting keeps more tokens.
            more = _and(f"{tokens:,.0f} more on {name}" for name, tokens in keeps_more.items())
            kept += f" in the mean over benchmarks, the first {more}"
        better_place, other_place = (cell_place(memory.coords[index], memory.axes) for index in best)
        return (
            f"at equal memory {better_place} is {percent_text(difference.value)} points above {other_place} "
            f"({limit_text(difference.low)} to {limit_text(difference.high)} over {pairs}, adjusted p "
            f"{p_text(difference.p_holm)}); {kept}."
        )

    text = f"at equal memory no window is proven better ({pairs})"
    if memory.is_blind:
        text = apart_sentence(memory.windows)
    estimate = memory.estimate
    if estimate is None:
        return f"{text}."
    low = f"{estimate.low:,.0f}"
    high = f"{estimate.high:,.0f}"
    difference = estimate.difference
    tokens = f"at {low} tokens" if low == high else f"over {low} to {high} tokens"
    other_axis = memory.axes[1 - memory.axes.index(WINDOW)]
    between = "ratios" if other_axis == RATIO else f"values of {other_axis}"
    sentence = (
        f"{text}; {memory.windows[estimate.wide]} minus {memory.windows[estimate.narrow]} {tokens}: "
        f"{percent_text(difference.value)} ({limit_text(difference.low)} to {limit_text(difference.high)}), estimated "
        f"by straight lines between {between}"
    )
    if difference.excludes_zero:
        sentence += ", which are no measurements, so that this is no proof"
    return f"{sentence}."


def cell_place(coord: CellCoord, axes: tuple[str, str]) -> str:
    """Return a cell by its window first: `window 16, ratio 0.3`."""
    values = dict(zip(axes, coord, strict=True))
    window = values.pop(WINDOW)
    return ", ".join([f"window {window}", *(f"{name} {value}" for name, value in values.items())])


# -- words -------------------------------------------------------------------------------------------------------------


def _and(names: Iterable[str]) -> str:
    """Return names as a list of words: `16`, `16 and 32`, `16, 32 and 64`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
