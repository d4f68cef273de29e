"""The summary of the autopsies of a cell: the held-out test, and the kinds of the saving tokens; and one in words.

`AutopsiesOnPage` is what the app shows of it, `answer_paragraphs` are those of single answers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy import special

from kvatlas.autopsy.autopsies import Autopsy, read_autopsies, token_kind
from kvatlas.autopsy.driver import LostCell
from kvatlas.autopsy.kinds_of_death import Death, find_death
from kvatlas.autopsy.lost_answers import LostAnswer, Pieces, trace_text
from kvatlas.core import Trace, grouped, is_reference, percent
from kvatlas.report.description import say
from kvatlas.results import Key, Manifest, Store
from kvatlas.stats.estimates import pass_at_1
from kvatlas.stats.numerics.arrays import LEVEL, Difference, holm
from kvatlas.stats.numerics.bounded import mean_difference
from kvatlas.stats.run_data import short_names
from kvatlas.text import model_name

#: The fewest answers of which shares and differences are told.
FEWEST = 10
#: The sizes of causes whose shares a summary gives.
SIZES = (1, 2, 4, 8)
#: The most tokens of a cause that the main figures count.
MOST_TOKENS = 8
#: The arms of the held-out test in their order. In the last two the policy is free again from the death on.
ARMS = ("nothing", "random", "kind", "cause", "no_compression", "cause_until_death", "no_compression_until_death")
#: The differences of the held-out test, by the names of their arms.
DIFFERENCES = (
    ("cause", "random"),
    ("cause", "kind"),
    ("kind", "random"),
    ("cause", "nothing"),
    ("random", "nothing"),
    ("no_compression", "nothing"),
    ("no_compression", "cause"),
    ("cause_until_death", "no_compression_until_death"),
)

#: Kinds of death that do not say at which token an answer was lost.
_WITHOUT_A_PLACE = (Death.TRUNCATED, Death.NO_ANSWER, Death.UNEXPLAINED)

#: A share in percent or a difference in points, with its interval.
Values = dict[str, float | None]


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
    tokens = list(chain.from_iterable(item.tokens for item in found))

    by_luck = None
    if controls:
        chance = fmean(controls)
        by_luck = percent(fmean(1 - (1 - chance) ** item.spans for item in tried))
    cause_of_at_most = {}
    for most in SIZES:
        cause_of_at_most[most] = _share_or_none(tried, [0 < size <= most for size in sizes])
    return {
        "lost": len(autopsies),
        "reproduced": len(tried),
        "causes": len(found),
        "cause_of_at_most": cause_of_at_most,
        "any_cause": _share_or_none(tried, [size > 0 for size in sizes]),
        "random_sets_save": _share_or_none(controlled, controls),
        "by_luck": by_luck,
        "without_compression_until_the_death": _share_or_none(tried, [bool(item.full) for item in tried]),
        "held_out": _held_out(tried, lost_share),
        "replays": _median([item.replays for item in tried]),
        "tokens": _median([len(item.tokens) for item in found]),
        "kinds": dict(Counter(token_kind(token.text) for token in tokens).most_common()),
    }


def tested_causes(autopsies: Sequence[Autopsy]) -> list[Autopsy]:
    """Return the autopsies with a cause of at most `MOST_TOKENS` that was tested."""
    return [item for item in autopsies if item.held_out and len(item.tokens) <= MOST_TOKENS]


def _held_out(tried: Sequence[Autopsy], lost_share: float | None) -> dict[str, Any] | None:
    """Return the test under random numbers that no search used; None without a tested cause.

    `proven_alone` is the number of answers for each of which alone the cause is right more often than other tokens of
    its kinds: exact sign tests over the streams, with Holm's adjustment. `of_all_lost` counts answers without a tested
    cause as not restored. `room` is that in points of Pass@1: the share of lost answers times what the causes restore
    of them.
    """
    tested = tested_causes(tried)
    if not tested:
        return None

    right = {}
    for arm in ARMS:
        right[arm] = _share_or_none(tested, [fmean(item.held_out[arm]) for item in tested])
    rises_by_arms = {}
    for first, second in DIFFERENCES:
        rises = [_rise(item, first, second) for item in tested]
        rises_by_arms[f"{first}_over_{second}"] = _difference_in_points(tested, rises)

    by_luck = holm(list(map(luck_chance, tested)))
    tested_keys = {item.key for item in tested}
    rises = [_rise(item, "cause", "random") if item.key in tested_keys else 0.0 for item in tried]
    of_all = _difference_in_points(tried, rises)
    room = None
    if lost_share is not None:
        room = {name: round((of_all[name] or 0.0) * lost_share, 4) for name in ("value", "low", "high")}

    return {
        "streams": len(tested[0].held_out["nothing"]),
        "most_tokens": MOST_TOKENS,
        "answers": len(tested),
        "right": right,
        **rises_by_arms,
        "proven_alone": sum(p <= LEVEL for p in by_luck),
        "of_all_lost": of_all,
        "room": room,
    }


def _rise(autopsy: Autopsy, first: str, second: str) -> float:
    """Return by how much the share of right answers is higher in the first arm than in the second."""
    return fmean(autopsy.held_out[first]) - fmean(autopsy.held_out[second])


def luck_chance(autopsy: Autopsy) -> float:
    """Return the one-sided p-value that the cause is right no more often than like tokens under the same streams."""
    pairs = list(zip(autopsy.held_out["cause"], autopsy.held_out["kind"], strict=True))
    better = sum(cause and not other for cause, other in pairs)
    worse = sum(other and not cause for cause, other in pairs)
    # The chance of so many successes or more in fair tosses.
    return float(special.bdtrc(better - 1, better + worse, 0.5)) if better else 1.0


def _share_or_none(items: Sequence[Autopsy], values: Sequence[float]) -> Values | None:
    """Return the mean of a value for each item, with its interval; None without items."""
    return pass_at_1(_problem_values(items, values)).to_dict() if items else None


def _problem_values(items: Sequence[Autopsy], values: Sequence[float]) -> dict[str, list[float]]:
    """Return the values of each problem."""
    by_problem: dict[str, list[float]] = {}
    for item, value in zip(items, values, strict=True):
        by_problem.setdefault(item.problem, []).append(float(value))
    return by_problem


def _difference_in_points(items: Sequence[Autopsy], differences: Sequence[float]) -> Values:
    """Return the mean of a difference for each item in points, with its interval and the p-value of 0."""
    by_problem = _problem_values(items, differences)
    difference: Difference = mean_difference(np.array([fmean(values) for values in by_problem.values()]))
    return {**difference.in_percent(), "p": difference.p}


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


class AutopsiesOnPage:
    """The autopsies of a run as the app shows them, as they are in its folder now."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.autopsies = read_autopsies(folder)

    def sentences(self) -> list[str]:
        """Return for each cell of the run how many lost answers have a cause, and the held-out test of the causes."""
        cells = {(cell.run_key, cell.setting.id, cell.benchmark): cell for cell in self.manifest.expected}
        names = short_names(cell.setting for cell in self.manifest.expected)
        by_cell = grouped(self.autopsies.values(), lambda autopsy: autopsy.key[:3])

        sentences = []
        for key, members in sorted(by_cell.items()):
            cell = cells.get((key[0], key[1], key[2]))
            summary = summarise(members)
            if cell is not None and len(members) >= FEWEST and summary["held_out"] is not None:
                values = {
                    **summary["held_out"],
                    "lost": summary["reproduced"],
                    "model": model_name(cell.model),
                    "benchmark": cell.benchmark,
                    "setting": names[cell.setting.id],
                }
                sentences += say("autopsy", values)
        return sentences

    def death(self, trace: Trace, full: Trace, pieces: Pieces) -> dict[str, Any]:
        """Return how a trace lost the answer of the full cache's, by the rules of `describe --deaths`.

        `kind` names its cause and `words` are the sentence about it, `token` the number of the new token where it
        happened from 0, None if that is unknown. `missed` are the new tokens of each earlier statement of a value that
        was forgotten or misread, and `evicted` is True for one that is forgotten.
        """
        tags_by_model = self.manifest.provenance.get("tags", {})
        text = trace_text(trace, tags_by_model, pieces)
        death = find_death(text, trace_text(full, tags_by_model, pieces))

        missed = []
        for statement in death.missed:
            first = text.token_at(statement.start)
            last = text.token_at(statement.end - 1)
            if first is not None and last is not None:
                missed.append(list(range(first, last + 1)))
        return {
            "kind": death.kind.value,
            "words": " ".join(say("death", death)),
            "token": None if death.kind in _WITHOUT_A_PLACE else death.token,
            "missed": missed,
            "evicted": death.kind is Death.FORGOTTEN,
        }

    def trace(self, key: Key, prompt: int) -> dict[str, Any]:
        """Return what the page of a trace has besides, by names: its autopsy if there is one.

        The saving tokens are numbered from 0 for the first new one; the autopsy is None without any. `after` is the
        number of new tokens before the compression that evicted them, `right` how many answers of `streams` are right
        in each arm, `is_proven` tells whether the tokens save more streams than others of their kinds (sign test of
        this answer alone; None without a test).
        """
        autopsy = self.autopsies.get(tuple(map(str, key)))
        if autopsy is None:
            return {}
        if not autopsy.tokens:
            return {"autopsy": None}

        first = autopsy.tokens[0]
        document = {
            "tokens": [token.position - prompt for token in autopsy.tokens if token.position >= prompt],
            "of_prompt": sum(token.position < prompt for token in autopsy.tokens),
            "after": first.position + first.distance - prompt + 1,
            "streams": len(autopsy.held_out.get("nothing", ())),
            "right": {arm: sum(autopsy.held_out.get(arm, ())) for arm in ARMS},
            "is_proven": luck_chance(autopsy) <= LEVEL if autopsy.held_out else None,
        }
        return {"autopsy": document}


# -- one answer --------------------------------------------------------------------------------------------------------


#: The characters of a long line that are shown before and after a token.
_BESIDE = 50


def answer_paragraphs(folder: Path, cell: LostCell, autopsies: Sequence[Autopsy]) -> Iterator[str]:
    """Yield a paragraph for each of the first lost answers of a cell, which have these autopsies."""
    with Store.open(folder) as store:
        manifest = store.manifest()
        for answer, autopsy in zip(cell.lost, autopsies, strict=False):
            trace = answer.trace
            prompt = trace.usage.prompt_tokens or 0
            positions = [token.position for token in autopsy.tokens]
            values = {
                "name": trace.problem if trace.sample == 0 else f"{trace.problem}, sample {trace.sample}",
                "death": " ".join(say("death", answer.death)),
                "places": {},
                "kept_by": [],
                "streams": {arm: sum(outcomes) for arm, outcomes in autopsy.held_out.items()},
                "count": len(autopsy.held_out.get("nothing", ())),
                "chance": luck_chance(autopsy) if autopsy.held_out else 1.0,
            }
            if positions:
                every_token = (*(cell.materials.prompt(trace) or ()), *trace.tokens)
                texts = cell.materials.pieces(trace.model, every_token)
                if texts is not None:
                    values["places"] = _tokens_by_line(texts, positions, prompt)
                # All tokens of a cause were evicted by one compression.
                values["after"] = positions[0] + autopsy.tokens[0].distance - prompt + 1
                values["kept_by"] = _kept_by(store, manifest, answer, positions)
            yield " ".join(say("one_autopsy", autopsy, values))


def _tokens_by_line(texts: Sequence[str], positions: Sequence[int], prompt: int) -> Mapping[str, list[str]]:
    """Return the texts of tokens by the line that they stand in, a long line cut around them."""
    lines: dict[str, list[str]] = {}
    for position in positions:
        text = texts[position]
        before = "".join(texts[:position]).rpartition("\n")[2]
        # A token that ends its line belongs to it.
        rest = "" if text.endswith("\n") else "".join(texts[position + 1 :]).partition("\n")[0]
        start = f"... {before[-_BESIDE:]}" if len(before) > _BESIDE else before
        end = f"{rest[:_BESIDE]} ..." if len(rest) > _BESIDE else rest
        line = f"{start}{text}{end}".strip()
        where = "the question's line" if position < prompt else "the line"
        lines.setdefault(f'{where} "{line}"', []).append(repr(text.strip() or text))
    return lines


def _kept_by(store: Store, manifest: Manifest, answer: LostAnswer, positions: Sequence[int]) -> list[str]:
    """Return the other settings under which the tokens were written alike, and in the cache until the death."""
    trace = answer.trace
    until = len(trace.tokens) if answer.death.token is None else answer.death.token
    prompt = trace.usage.prompt_tokens or 0
    written = max(0, max(positions) - prompt + 1)
    names = short_names(cell.setting for cell in manifest.expected)

    kept = []
    for cell in manifest.expected:
        is_other = cell.setting != trace.setting and not is_reference(cell.setting)
        if not is_other or (cell.model, cell.benchmark) != (trace.model, trace.benchmark):
            continue
        try:
            other: Trace = store.trace((cell.run_key, cell.setting.id, trace.benchmark, trace.problem, trace.sample))
        except KeyError:
            continue
        evictions = other.eviction_trace
        if evictions is None or other.tokens[:written] != trace.tokens[:written]:
            continue
        # 0 is a token that stayed to the end, which a short trace may not have reached.
        steps = [evictions.evicted_at[place] for place in positions if place < len(evictions.evicted_at)]
        if len(steps) == len(positions) and all(step == 0 or step > until for step in steps):
            kept.append(f"{names[cell.setting.id]} ({'right' if other.grade.correct else 'wrong'})")
    return kept
