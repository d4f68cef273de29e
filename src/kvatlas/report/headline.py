"""The finding of a result in one sentence: the title of its page and the first line of its description."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvatlas.core import Claim, differing, grouped
from kvatlas.stats.choice import Choice
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.run_data import shown_policies
from kvatlas.text import fixed, margin_text, model_name, percent_text

if TYPE_CHECKING:
    from kvatlas.core import Setting
    from kvatlas.stats.losses import SettingLoss

#: The level of Holm's p at which a comparison is proven.
_LEVEL = 0.05


def headline(choices: Sequence[Choice], comparisons: Sequence[Comparison]) -> str:
    """Return what is proven of the settings and policies of one or more models, never more; empty where nothing is.

    Settings that keep the margin come first. Where there are none, a policy that is ahead of another one does.
    """
    judged = [choice for choice in choices if choice.losses and choice.vacuous is None]
    ahead = _policy_ahead(comparisons)
    if not judged:
        return _sentence(ahead)
    if any(choice.shown for choice in judged):
        # Limits stand in the comparisons; a title of two findings has no room for them.
        return _sentence(_kept(judged), ahead.partition(" (")[0])
    return _sentence(ahead, _lost(judged))


def setting_words(setting: Setting, candidates: Sequence[Setting]) -> str:
    """Return a setting by the parameters that its policy varies among the candidates.

    As in `dynts local_window 16, ratio 0.5`.
    """
    if not candidates:
        return str(setting)
    parameters = differing(candidate.values for candidate in candidates if candidate.policy == setting.policy)
    names = [f"{name} {value}" for name, value in setting.parameters if value != "" and name in parameters]
    shown = shown_policies(candidate.policy for candidate in (*candidates, setting))
    return f"{shown[setting.policy]} {', '.join(names)}".strip()


def recommended_words(choice: Choice) -> str:
    """Return the recommended setting of a model with what it saves and loses; empty without one."""
    if choice.recommended is None:
        return ""
    text = f"{model_name(choice.model)}: {setting_words(choice.recommended, list(choice.settings.values()))}"
    clauses = [price_words(choice)]
    if choice.loss is not None:
        limits = (choice.loss.low, choice.loss.high)
        if choice.loss.value < 0:
            limits = (-choice.loss.high, -choice.loss.low)
        ends = " to ".join(fixed(100 * limit) for limit in limits)
        clauses.append(f"({ends} points)".replace("-", "−"))
    return " ".join(filter(None, [text, *clauses]))


def price_words(choice: Choice) -> str:
    """Return what the recommended setting saves and loses: `saves 9 %, loses 2.5`; empty where neither is known."""
    clauses = []
    if choice.saving is not None:
        saved = fixed(100 * (1 - choice.saving.memory), 0)
        clauses.append(f"saves {saved} %" if int(saved) > 0 else "saves no memory")
    if choice.loss is not None:
        verb = "gains" if choice.loss.value < 0 else "loses"
        clauses.append(f"{verb} {fixed(100 * abs(choice.loss.value))}")
    return ", ".join(clauses)


def _sentence(*clauses: str) -> str:
    text = "; ".join(filter(None, clauses))
    # Names of policies keep their case.
    is_word = text.startswith(("a setting", "every", "no setting", "on "))
    return text[:1].upper() + text[1:] if is_word else text


def _kept(choices: Sequence[Choice]) -> str:
    """Return the cheapest settings proven to keep the margin and what they save; some model has one."""
    proven = f"proven to stay within {margin_text(choices[0].margin)} of the full cache"
    if not all(choice.loss.keeps_like for choice in choices if choice.shown and choice.loss is not None):
        proven += " on these problems"
    kept = [choice for choice in choices if choice.shown and choice.by_memory is not None]
    if not kept:
        return f"a setting is {proven}"
    if len(choices) > 1:
        # Models stand before numbers of theirs.
        return f"{_models(kept, choices)}{_policies(kept)}{_saving(kept)} is {proven}"
    (choice,) = kept
    assert choice.by_memory is not None
    name = setting_words(choice.by_memory.setting, list(choice.settings.values()))
    return f"{name}{_saving(kept)} is {proven}"


def _policies(kept: Sequence[Choice]) -> str:
    # The settings of several models differ; they stand below the title.
    cheapest = [choice.by_memory for choice in kept if choice.by_memory is not None]
    candidates = chain.from_iterable(choice.settings.values() for choice in kept)
    shown = shown_policies(setting.policy for setting in candidates)
    return " and ".join(dict.fromkeys(shown[each.setting.policy] for each in cheapest))


def _saving(kept: Sequence[Choice]) -> str:
    """Return what the cheapest settings save, unless one of them saves nothing."""
    saved = [round(100 * (1 - choice.saving.memory)) for choice in kept if choice.saving]
    if len(saved) < len(kept) or min(saved) <= 0:
        return ""
    return f" saves {' and '.join(map(str, saved))} % of the KV memory and"


def _models(kept: Sequence[Choice], choices: Sequence[Choice]) -> str:
    alone = " alone" if len(kept) < len(choices) else ""
    return f"on {' and '.join(model_name(choice.model) for choice in kept)}{alone}, "


def _lost(choices: Sequence[Choice]) -> str:
    """Return that no setting is proven to keep the margin, or that all are proven to lose more."""
    losses: list[SettingLoss] = []
    for choice in choices:
        losses += (choice.losses or {}).values()
    broken = sum(loss.is_broken for loss in losses)
    margin = margin_text(choices[0].margin)
    population = ""
    if choices[0].family is not None and choices[0].family.claim is Claim.LIKE and not choices[0].is_single:
        population = " for problems like these"
    if broken == len(losses):
        return f"every setting loses more than {margin} against the full cache{population}"
    more = f" ({broken} of {len(losses)} are proven to lose more)" if broken else ""
    return f"no setting is proven to stay within {margin} of the full cache{population}{more}"


def _policy_ahead(comparisons: Sequence[Comparison]) -> str:
    """Return which policy is ahead of which one, by how much, if that is proven for all models; the largest lead."""
    same_model = [comparison for comparison in comparisons if "," not in comparison.model]
    found: dict[float, str] = {}
    for (first, second), of_pair in grouped(same_model, lambda one: (one.first, one.second)).items():
        values = [one.difference.value for one in of_pair]
        is_proven = all(one.p_holm <= _LEVEL for one in of_pair)
        if is_proven and (min(values) > 0 or max(values) < 0):
            names = (first, second) if values[0] > 0 else (second, first)
            found[min(map(abs, values))] = _lead(of_pair, *names)
    return found[max(found)] if found else ""


def _lead(comparisons: Sequence[Comparison], ahead: str, behind: str) -> str:
    points = []
    limits = []
    for comparison in comparisons:
        difference = comparison.difference
        ends = sorted((abs(difference.low), abs(difference.high)))
        points.append(fixed(100 * abs(difference.value)))
        limits.append(f"{percent_text(ends[0])} to {percent_text(ends[1])}")
    return f"{ahead} is {' and '.join(points)} points above {behind} ({' and '.join(limits)})"
