"""Findings in sentences: the headline, effects of axes, and local windows at equal memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING

from kvatlas.core import CellCoord, Claim, apart_sentence, grouped
from kvatlas.stats.choice import Choice
from kvatlas.stats.map_tests import ONE_TOKEN, RATIO, WINDOW, Effect, EqualMemory
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.run_data import setting_words, short_names, shown_policies
from kvatlas.text import fixed, limit_text, margin_text, model_name, p_text, percent_text

if TYPE_CHECKING:
    from kvatlas.report.evidence import MapResult


# -- the headline ------------------------------------------------------------------------------------------------------


def headline(choices: Sequence[Choice], comparisons: Sequence[Comparison]) -> str:
    """Return what is proven of the settings and policies of one or more models, never more; empty where nothing is.

    Settings that keep the margin come first. Where there are none, a policy that is ahead of another one does.
    """
    judged = [choice for choice in choices if choice.is_judged]
    ahead = _policy_ahead(comparisons)
    if not judged:
        clauses = [ahead]
    elif any(choice.shown for choice in judged):
        # Limits stand in the comparisons; a title of two findings has no room for them.
        clauses = [_settings_that_keep(judged), ahead.partition(" (")[0]]
    else:
        clauses = [ahead, _nothing_kept(judged)]

    text = "; ".join(filter(None, clauses))
    # Names of policies keep their case.
    is_word = text.startswith(("a setting", "every", "no setting", "on "))
    return text[:1].upper() + text[1:] if is_word else text


def short_headline(choices: Sequence[Choice], comparisons: Sequence[Comparison]) -> str:
    """Return the finding as the title of a figure: 16 words at most, numbers of each model stand in its row."""
    judged = [choice for choice in choices if choice.is_judged]
    keeping = [choice for choice in judged if choice.shown and choice.by_memory is not None]
    if not judged or (not keeping and any(choice.shown for choice in judged)):
        return headline(choices, comparisons).partition(" (")[0]
    if not keeping:
        text = _nothing_kept(judged).partition(" (")[0]
        if any(one.required is not None and one.required.problems is not None for one in judged):
            text = f"{text}: too few problems"
        return text[:1].upper() + text[1:]

    candidates = chain.from_iterable(choice.settings.values() for choice in keeping)
    shown = shown_policies(setting.policy for setting in candidates)
    policies = dict.fromkeys(shown[choice.by_memory.setting.policy] for choice in keeping if choice.by_memory)
    subject = " and ".join(policies)
    proven = f"proven to lose at most {margin_text(judged[0].margin)}"
    if not all(choice.loss.keeps_like for choice in keeping if choice.loss is not None):
        proven = f"proven within {margin_text(judged[0].margin)} on these problems"
    is_or_are = "is" if len(policies) == 1 else "are"
    if len(keeping) < len(judged):
        models = f"{model_name(keeping[0].model)} alone"
        if len(keeping) > 1:
            models = f"{len(keeping)} of {len(judged)} models"
        return f"On {models}, {subject} {is_or_are} {proven}"

    saved = sorted(_saved(keeping))
    if not saved:
        return f"{subject} {is_or_are} {proven}"
    verb = "saves" if len(policies) == 1 else "save"
    ends = dict.fromkeys(map(str, (saved[0], saved[-1])))
    return f"{subject} {verb} {' to '.join(ends)} % of KV memory, {proven}"


def _settings_that_keep(choices: Sequence[Choice]) -> str:
    """Return the cheapest settings proven to keep the margin and what they save; some model has one."""
    proven = f"proven to stay within {margin_text(choices[0].margin)} of {choices[0].family.reference}"
    if not all(choice.loss.keeps_like for choice in choices if choice.shown and choice.loss is not None):
        proven += " on these problems"
    keeping = [choice for choice in choices if choice.shown and choice.by_memory is not None]
    if not keeping:
        return f"a setting is {proven}"

    saved = _saved(keeping)
    saving = f" saves {' and '.join(map(str, saved))} % of the KV memory and" if saved else ""

    cheapest = [choice.by_memory.setting for choice in keeping if choice.by_memory is not None]
    if len(choices) == 1:
        return f"{setting_words(cheapest[0], list(choices[0].settings.values()))}{saving} is {proven}"

    # The settings of several models differ; they stand below the title. Models stand before numbers of theirs.
    models = " and ".join(model_name(choice.model) for choice in keeping)
    alone = " alone" if len(keeping) < len(choices) else ""
    candidates = chain.from_iterable(choice.settings.values() for choice in keeping)
    shown = shown_policies(setting.policy for setting in candidates)
    policies = " and ".join(dict.fromkeys(shown[setting.policy] for setting in cheapest))
    return f"on {models}{alone}, {policies}{saving} is {proven}"


def _saved(keeping: Sequence[Choice]) -> list[int]:
    """Return what the settings of some models save, in percent; nothing where one of them saves nothing."""
    saved = [round(100 * (1 - choice.saving.memory)) for choice in keeping if choice.saving]
    return saved if len(saved) == len(keeping) and min(saved) > 0 else []


def _nothing_kept(choices: Sequence[Choice]) -> str:
    """Return that no setting is proven to keep the margin, or that all are proven to lose more."""
    every_loss = chain.from_iterable(choice.losses.values() for choice in choices)
    losses = [loss for loss in every_loss if not loss.is_control]
    broken = sum(loss.is_broken for loss in losses)

    margin = margin_text(choices[0].margin)
    population = ""
    if choices[0].family.claim is Claim.LIKE and not choices[0].is_single:
        population = " for problems like these"
    if not losses:
        return ""
    if broken == len(losses):
        return f"every setting loses more than {margin} against {choices[0].family.reference}{population}"
    more = f" ({broken} of {len(losses)} are proven to lose more)" if broken else ""
    return f"no setting is proven to stay within {margin} of {choices[0].family.reference}{population}{more}"


def _policy_ahead(comparisons: Sequence[Comparison]) -> str:
    """Return which policy is ahead of which one, by how much, if that is proven for all models; the largest lead."""
    same_model = [comparison for comparison in comparisons if "," not in comparison.model]
    leads: dict[float, str] = {}
    for (first, second), of_pair in grouped(same_model, lambda one: (one.first, one.second)).items():
        values = [one.difference.value for one in of_pair]
        is_proven = all(one.difference.is_proven for one in of_pair)
        if not is_proven or min(values) <= 0 <= max(values):
            continue
        ahead, behind = (first, second) if values[0] > 0 else (second, first)

        points = []
        limits = []
        for one in of_pair:
            low, high = sorted((abs(one.difference.low), abs(one.difference.high)))
            points.append(fixed(100 * abs(one.difference.value)))
            limits.append(f"{percent_text(low)} to {percent_text(high)}")
        text = f"{ahead} is {' and '.join(points)} points above {behind} ({' and '.join(limits)})"
        leads[min(map(abs, values))] = text
    return leads[max(leads)] if leads else ""


def recommended_words(choice: Choice) -> str:
    """Return the recommended setting of a model with what it saves and loses; empty without one.

    As in `tiny-llama: dynts(ratio=0.5) saves 9 %, loses 2.5 (0.1 to 4.9 points)`.
    """
    if choice.recommended is None:
        return ""
    names = short_names(choice.settings.values())
    name = names.get(choice.recommended.id, str(choice.recommended))
    text = f"{model_name(choice.model)}: {name}"

    price = []
    if choice.saving is not None:
        saved = fixed(100 * (1 - choice.saving.memory), 0)
        price.append(f"saves {saved} %" if int(saved) > 0 else "saves no memory")

    interval = ""
    if choice.loss is not None:
        verb = "loses"
        limits = (choice.loss.low, choice.loss.high)
        if choice.loss.value < 0:
            verb = "gains"
            limits = (-choice.loss.high, -choice.loss.low)
        price.append(f"{verb} {fixed(100 * abs(choice.loss.value))}")
        ends = " to ".join(fixed(100 * limit) for limit in limits)
        interval = f"({ends} points)".replace("-", "−")
    return " ".join(filter(None, [text, ", ".join(price), interval]))


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
