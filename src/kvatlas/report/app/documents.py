"""The app's documents of maps, cells and decisions: percent scale, as in `kvatlas describe --json`."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import chain, product
from typing import Any

import numpy as np

from kvatlas.columns import page_columns
from kvatlas.core import FULL, REFERENCE, Cell, CellCoord, Claim, Map, Outcome, Setting, is_reference, percent, rounded
from kvatlas.figures.forest import LossAxis, LossSpan
from kvatlas.figures.marks import states_of
from kvatlas.figures.setting_rows import MOST_ROWS, rows_of_choice
from kvatlas.report.description import recommendation, say
from kvatlas.report.next_steps import next_steps
from kvatlas.report.result import Result
from kvatlas.report.sentences import headline
from kvatlas.results import Expected
from kvatlas.stats.choice import Choice, with_recommended
from kvatlas.stats.maps import SettingTable, curves_of_run, mean_maps
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.pairs import differences_of_run
from kvatlas.stats.run_data import short_names, shown_policies, whole_names
from kvatlas.stats.table import CellTraces, select
from kvatlas.text import axis_label, in_words, model_name

Json = dict[str, Any]
#: The letter of each outcome of a trace in documents, and that of a trace that is not there.
LETTERS: Mapping[Outcome, str] = {
    Outcome.CORRECT: "r",
    Outcome.WRONG: "w",
    Outcome.TRUNCATED: "t",
    Outcome.NO_ANSWER: "n",
    Outcome.GRADER_TIMEOUT: "g",
    Outcome.UNKNOWN: "u",
}
RIGHT = LETTERS[Outcome.CORRECT]
TRUNCATED = LETTERS[Outcome.TRUNCATED]
MISSING = "."
#: The signs of outcomes in tables of the page; those of others are their letters.
_SIGNS = {"r": "✓", "w": "·", "t": "…", "n": "?", "g": "!", "u": "¿"}
#: The word and the sign of each letter.
MARKS = {letter: (str(outcome), _SIGNS.get(letter, letter)) for outcome, letter in LETTERS.items()}
MARKS |= {RIGHT: ("right", _SIGNS[RIGHT]), MISSING: ("missing", "")}
#: Inches of the marks of a forest on a page.
_FOREST_INCHES = 4.0


class PageCells:
    """The numbered cells of a run: the promised ones in the manifest's order, then those of means over benchmarks.

    Cells that no map shows have null in place of each number.
    """

    def __init__(self, promised: Sequence[Expected]) -> None:
        self.short = short_names(expected.setting for expected in promised)
        self.whole = whole_names(expected.setting for expected in promised)
        self.policies = shown_policies(expected.setting.policy for expected in promised)
        self.numbers: dict[tuple[str, str, str], int] = {}
        self.documents: list[Json] = []
        for expected in promised:
            self._add(expected.model, expected.benchmark, expected.setting)

    def _add(self, model: str, benchmark: str, setting: Setting) -> int:
        index = len(self.documents)
        self.numbers[model, benchmark, setting.id] = index
        document: Json = {
            "name": self.whole.get(setting.id, str(setting)),
            "policy": self.policies.get(setting.policy, setting.policy_name),
            "model": model,
            "benchmark": benchmark,
            "short": self.short.get(setting.id, str(setting)),
            **dict.fromkeys(column.page for column in page_columns()),
            "difference": None,
        }
        self.documents.append(document)
        return index

    def number(self, place: Map | SettingTable, cell: Cell, difference: Difference | None = None) -> int:
        """Return the number of a cell of a map, of one of its baselines, or of a table, and note its values."""
        index = self.numbers.get((place.model, place.benchmark, cell.setting.id))
        if index is None:
            index = self._add(place.model, place.benchmark, cell.setting)
        if self.documents[index]["value"] is None:
            self.documents[index] |= {column.page: column.page_value(cell) for column in page_columns(cell.measures)}
            self.documents[index]["difference"] = None if difference is None else _points_and_limits(difference)
        return index


def _points_and_limits(contrast: Any) -> list[float | None]:
    return [percent(contrast.value), percent(contrast.low), percent(contrast.high)]


def maps_of(result: Result, tested: bool = True) -> list[Map]:
    """Return the maps of a run, or its curves as maps of one row; `tested` maps have regions.

    Raises KvatlasError as `maps_of_run` does.
    """
    run = result.only_run
    if not run.has_maps:
        return curves_of_run(run)
    return [one.map for one in result.maps] if tested else result.untested


def run_document(result: Result, maps: Sequence[Map], tested: bool, cells: PageCells) -> Json:
    """Return maps and cells; with `tested` also tests, what to choose, and what limits the run.

    `cells` are those of the run, which are numbered and described on the way.
    """
    run = result.only_run
    compared = tested and run.has_maps
    every_map = [*([one.map for one in result.means] if compared else mean_maps(maps)), *maps]
    if tested:
        every_map = with_recommended(every_map, result.choices)

    # The baseline against which differences are shown: the first one of the maps.
    baseline = next(chain.from_iterable(map_.baselines for map_ in maps), None)
    differences = differences_of_run(run, baseline) if compared and baseline else {}
    documents = [_map_document(map_, differences.get(map_.name, {}), cells) for map_ in every_map]

    against = baseline or "the first baseline"
    document: Json = {
        "metric": axis_label(maps[0].metric if maps else run.metric),
        "reference": result.reference,
        "against": result.reference if against in (str(FULL), str(REFERENCE)) else against,
        # That of the losses against the full cache; None without one.
        "margin": percent(next((map_.margin for map_ in every_map if map_.margin is not None), None)),
        "maps": documents,
        **_UNTESTED,
    }
    if tested:
        cards = [_card(choice, result, cells) for choice in result.choices]
        document |= {
            "headline": result.headline,
            "next": [vars(step) for step in next_steps(result)],
            "tables": [_settings_document(table, cells) for table in result.tables],
            "cards": cards,
            "axis": _axis_of_cards(cards),
            "findings": [finding.text for finding in result.findings],
        }
    return {**document, "cells": cells.documents}


#: The parts of a run's document that are known once it is complete.
_UNTESTED: Json = {"headline": "", "next": [], "tables": [], "cards": [], "axis": None, "findings": []}


def _map_document(map_: Map, differences: Mapping[CellCoord, Difference], cells: PageCells) -> Json:
    (vertical, rows), (horizontal, columns) = map_.axes
    places = list(product(reversed(rows), columns))
    # Without a full cache cells have no state but that of the plateau.
    states: Mapping[CellCoord, str] = states_of(map_) or dict.fromkeys(map_.plateau or (), "tied")
    numbers: dict[CellCoord, int] = {}
    for place in places:
        if place in map_.cells:
            numbers[place] = cells.number(map_, map_.cells[place], differences.get(place))

    def in_rows(values: Mapping[CellCoord, Any]) -> list[list[Any]]:
        found = list(map(values.get, places))
        return [found[start : start + len(columns)] for start in range(0, len(found), len(columns))]

    return {
        "model": map_.model,
        "short": model_name(map_.model),
        "benchmark": map_.benchmark,
        "policy": map_.policy,
        "control": map_.is_control,
        "vertical": axis_label(vertical),
        "horizontal": axis_label(horizontal),
        "rows": [str(value) for value in reversed(rows)],
        "columns": [str(value) for value in columns],
        "cells": in_rows(numbers),
        "states": in_rows(states),
        "recommended": None if map_.recommended is None else places.index(map_.recommended),
        "recommendedFor": "" if map_.recommended_for == map_.benchmark else map_.recommended_for,
        "beside": [cells.number(map_, cell) for cell in map_.baselines.values()],
        "notes": [{"text": note.text, "warning": note.is_warning} for note in map_.notes],
        "vacuous": map_.validity.reason if map_.validity else None,
    }


def _settings_document(table: SettingTable, cells: PageCells) -> Json:
    """Return the settings of a table by their numbers, each with its loss in points, and whether that is decided."""
    rows = []
    for row in table.rows:
        loss = row.loss
        document: Json = {
            "cell": cells.number(table, row.cell),
            "values": [percent(cell.estimate.value) for cell in row.by_benchmark.values()],
            "loss": None if loss is None else _points_and_limits(loss),
            "kept": loss is not None and loss.is_kept,
            "broken": loss is not None and loss.is_broken,
        }
        rows.append(document)
    names = {"model": table.model, "short": model_name(table.model), "benchmark": table.benchmark}
    return {**names, "benchmarks": table.benchmarks, "rows": rows}


def _card(choice: Choice, result: Result, cells: PageCells) -> Json:
    """Return the chosen setting of a model (`shown`), else the one nearest to be proven, and the words about it.

    `saved` is the percent of the full cache's mean KV memory that the setting saves; `loss` is in points, with its
    95 % interval, and `limit` the upper limit that decides, None for a setting that is not tested. `compressed` of its
    `traces` were compressed. `above_random` are the points of its policy above `random` with their interval, over all
    pairs of cells. `rows` are all settings with a loss.
    """
    losses = list(choice.losses.values())
    of_model = [one for one in result.comparisons if one.model == choice.model]
    setting = None if choice.vacuous is not None else choice.offered
    cell = None if setting is None else cells.numbers.get((choice.model, choice.benchmark, setting.id))
    card: Json = {
        "model": model_name(choice.model),
        "headline": headline([choice], of_model),
        "settings": len(losses),
        "kept": sum(loss.is_kept for loss in losses),
        "broken": sum(loss.is_broken for loss in losses),
        "benchmark": choice.benchmark,
        "shown": choice.shown and choice.by_memory is not None,
        "cell": cell,
        "saved": None if choice.saving is None else rounded(100 * (1 - choice.saving.memory), 1),
        **dict.fromkeys(("loss", "limit", "compressed", "traces", "above_random")),
        "margin": percent(choice.margin),
        "words": recommendation(choice),
        "rows": _loss_rows(choice, cells),
    }
    if setting is None:
        return card

    policy = cells.policies[setting.policy]
    against_random = next((one for one in of_model if (one.first, one.second) == (policy, "random")), None)
    if against_random is not None:
        card["above_random"] = _points_and_limits(against_random.difference)
    loss = choice.losses.get(setting.id)
    if loss is not None:
        card |= {
            "loss": _points_and_limits(loss),
            "limit": None if setting.id in choice.untested else percent(loss.limit),
            "compressed": loss.compressed,
            "traces": loss.traces,
        }
    return card


def _loss_rows(choice: Choice, cells: PageCells) -> list[Json]:
    """Return the settings of a model with what they save, lose and risk, those that save most first.

    `memory` is the share of the full cache's memory, `state` that of the setting, "control" for a control. `controls`
    are the losses of controls with the same parameters; other controls have rows of their own.
    """
    names = short_names(choice.settings[id_] for id_ in choice.losses)
    settings = {row.setting.id: row for row in rows_of_choice(choice)}
    drawn = set(chain.from_iterable(row.controls for row in settings.values()))
    shown = [id_ for id_ in choice.losses if id_ not in drawn]

    rows = []
    memory = {id_: saving.memory for id_, saving in choice.savings.items()}
    for id_ in sorted(shown, key=lambda id_: memory.get(id_, math.inf)):
        loss = choice.losses[id_]
        row = settings.get(id_)
        cell = cells.numbers.get((choice.model, choice.benchmark, id_))
        if cell is None:
            continue
        of_controls = row.controls if row else {}
        controls = [[choice.settings[name].policy_name, percent(lost.value)] for name, lost in of_controls.items()]
        document: Json = {
            "cell": cell,
            "name": in_words(names[id_]),
            "memory": rounded(memory.get(id_), 4),
            "loss": _points_and_limits(loss),
            "state": str(row.state) if row else "control",
            "controls": controls,
            "claims": _claim_rows(choice, id_, loss),
            "risk": " ".join(say("risk", choice, id_)),
        }
        rows.append(document)
    return rows


def _axis_of_cards(cards: Sequence[Json]) -> Json | None:
    """Return the axis of the losses of all models; None without losses, and of more settings than a forest holds."""
    rows = list(chain.from_iterable(card["rows"] for card in cards))
    if not rows or max(len(card["rows"]) for card in cards) > MOST_ROWS:
        return None
    every_control = chain.from_iterable(row["controls"] for row in rows)
    controls = [points for _, points in every_control]
    axis = LossAxis.of([LossSpan(*row["loss"]) for row in rows], cards[0]["margin"], controls)
    return {**vars(axis), "ticks": axis.ticks(_FOREST_INCHES)}


def _claim_rows(choice: Choice, id_: str, loss: Difference) -> list[list[Any]]:
    """Return the loss of a setting by each claim: words, upper limit in points, proven to keep or to break the margin.

    A setting that a claim does not test has the limit that holds for all settings together.
    """
    rows: list[list[Any]] = []
    for name, of_claim in loss.claims.items():
        claim = Claim(name)
        is_untested = id_ in choice.family.ends_of_tests(claim)
        limit = of_claim.joint_limit if is_untested else of_claim.limit
        rows.append([claim.words, percent(limit), of_claim.is_kept, of_claim.is_broken])
    if choice.is_single and len(rows) > 1:
        # With one sample of each problem both claims have the same proof.
        rows = [["these problems and problems like these", *rows[-1][1:]]]
    return rows


def outcome_letters(cell: CellTraces, problems: Sequence[str], samples: int) -> str:
    """Return the outcomes of a cell's first samples, one letter for each problem and sample, samples side by side."""
    letters = np.full(cell.grades[:, :samples].shape, MISSING)
    for outcome, letter in LETTERS.items():
        letters[cell.numbers(outcome.name.lower())[:, :samples] == 1] = letter
    return "".join(cell.in_order(letters, problems, MISSING).ravel().tolist())


# -- the part "For a decision" -----------------------------------------------------------------------------------------

#: Models of fewer bytes are limited by computing, so that nothing is computed for a card.
LARGE = 1_000_000_000


def decision_document(
    result: Result, cells: Mapping[tuple[str, str, str], int], weights: Mapping[str, int | None]
) -> Json | None:
    """Return what the page computes savings from; None without losses that can be seen and the memory of settings.

    What a setting saves on a card is computed by the page (`web/decide.js`), where a person types the card, and for
    models that were run alone. The settings and their losses are those of the cards of the answer.

    Args:
        result: the result of one run.
        cells: the numbers of cells on the page, by model, benchmark and id of the setting.
        weights: the bytes of the weights of each model of the run, None where they are unknown. Of models that are too
            small for a card to be filled by its memory they are left out.
    """
    run = result.only_run
    models: list[Json] = []
    for card, choice in enumerate(result.choices):
        if not (choice.is_judged and choice.savings):
            continue
        full = [cell for cell in select(run.cells, model=choice.model) if is_reference(cell.setting) and cell.stored]
        tokens = float(np.mean([cell.cell.number("mean_kv_tokens") or np.nan for cell in full]))
        prompts = list(chain.from_iterable(cell.prompts.values() for cell in full))
        size = weights.get(choice.model)
        document: Json = {
            "card": card,
            "full": cells.get((choice.model, choice.benchmark, full[0].setting.id)),
            "token_bytes": (full[0].expected.kv_bytes or (None, None))[0],
            "tokens": None if np.isnan(tokens) else rounded(tokens, 1),
            "weights": size if size is not None and size >= LARGE else None,
            "unmeasured": say("not_measured", max(prompts, default=None)),
        }
        models.append(document)
    if not models:
        return None
    return {**json.loads((resources.files("kvatlas.report.app") / "cards.json").read_text("utf-8")), "models": models}
