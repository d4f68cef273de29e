"""The finding of a result in one sentence: the title of its page and the first line of its description."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvatlas.core import Claim, grouped
from kvatlas.stats.choice import Choice
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.run_data import setting_words, short_names, shown_policies
from kvatlas.text import fixed, in_words, margin_text, model_name, percent_text

if TYPE_CHECKING:
    from kvatlas.stats.numerics.arrays import Difference


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
    losses: list[Difference] = []
    for choice in choices:
        losses += [loss for loss in choice.losses.values() if not loss.is_control]
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

    As in `tiny-llama: dynts, ratio 0.5 saves 9 %, loses 2.5 (0.1 to 4.9 points)`.
    """
    if choice.recommended is None:
        return ""
    names = short_names(choice.settings.values())
    name = names.get(choice.recommended.id, str(choice.recommended))
    text = f"{model_name(choice.model)}: {in_words(name)}"

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
