"""What to choose, for each model: the setting, what it saves and what it loses, as a page shows it first."""

from __future__ import annotations

from typing import Any

from kvatlas.core import Cell, Map, percent, rounded
from kvatlas.figures import style
from kvatlas.report.page_json import Cells
from kvatlas.report.text import recommendation
from kvatlas.stats.choice import Choice
from kvatlas.stats.run_analysis import RunAnalysis


def cards(analysis: RunAnalysis, cells: Cells) -> list[dict[str, Any]]:
    """A card for each model: a cell by its number in `cells` or None, and the sentence that says why.

    It is the chosen one if there is one (`shown`), else that of the least loss. `saved` is the percent of the full
    cache's mean KV tokens that the setting does without; `loss` the points that it loses with their interval.
    """
    shown = [*analysis.means, *analysis.maps]
    return [_card(choice, [map_ for map_ in shown if _about(map_, choice)], cells) for choice in analysis.choices]


def _about(map_: Map, choice: Choice) -> bool:
    return (map_.model, map_.benchmark) == (choice.model, choice.benchmark)


def _card(choice: Choice, maps: list[Map], cells: Cells) -> dict[str, Any]:
    chosen = choice.by_memory if choice.shown is not False else None
    cell = chosen or _least(choice, maps)
    loss = choice.losses.get(cell.setting.id) if cell is not None and choice.losses else None
    full = next((map_.full for map_ in maps if map_.full), None)
    return {
        "model": style.model(choice.model),
        "benchmark": choice.benchmark,
        "shown": chosen is not None,
        "cell": None if cell is None else cells.numbers.get((choice.model, choice.benchmark, cell.setting.id)),
        "saved": _saved(cell, full),
        "loss": None if loss is None else [percent(loss.value), percent(loss.low), percent(loss.high)],
        "margin": percent(choice.margin),
        "words": recommendation(choice),
    }


def _least(choice: Choice, maps: list[Map]) -> Cell | None:
    """Where no setting may be chosen, the one with the least loss."""
    if choice.least is None or choice.vacuous is not None:
        return None
    least, _ = choice.least
    return next((cell for map_ in maps for cell in map_.cells.values() if cell.setting == least), None)


def _saved(cell: Cell | None, full: Cell | None) -> float | None:
    if cell is None or full is None or not cell.mean_kv_tokens or not full.mean_kv_tokens:
        return None
    return rounded(100 * (1 - cell.mean_kv_tokens / full.mean_kv_tokens), 1)
