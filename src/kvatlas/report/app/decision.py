"""The part "For a decision" of the app: what a setting saves and loses, and what was not measured.

What it saves on a card is computed by the page (`web/decide.js`), where a person types the card, and for models that
were run alone. The sizes that it takes are made here; the settings and their losses are those of the answer's cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import is_reference, rounded
from kvatlas.report.description import say
from kvatlas.stats.table import select

if TYPE_CHECKING:
    from kvatlas.report.result import Result
    from kvatlas.stats.choice import Choice
    from kvatlas.stats.run_data import RunData

Json = dict[str, Any]
#: Models of fewer bytes are limited by computing, so that nothing is computed for a card.
LARGE = 1_000_000_000


def decision_document(
    result: Result, cells: Mapping[tuple[str, str, str], int], weights: Mapping[str, int | None]
) -> Json | None:
    """Return what the page computes savings from; None without losses that can be seen and the memory of settings.

    Args:
        result: the result of one run.
        cells: the numbers of cells on the page, by model, benchmark and id of the setting.
        weights: the bytes of the weights of each model of the run, None where they are unknown.
    """
    models = []
    for number, choice in enumerate(result.choices):
        if choice.is_judged and choice.savings:
            document = _model_document(choice, result.only_run, cells, weights.get(choice.model))
            models.append({"card": number, **document})
    if not models:
        return None
    return {**json.loads((resources.files("kvatlas.report.app") / "cards.json").read_text("utf-8")), "models": models}


def _model_document(
    choice: Choice, run: RunData, cells: Mapping[tuple[str, str, str], int], weights: int | None
) -> Json:
    """Return the sizes of a model, None where they are unknown or too small for a card to be filled by its memory."""
    full_cells = [cell for cell in select(run.cells, model=choice.model) if is_reference(cell.setting) and cell.stored]
    full_tokens = float(np.mean([cell.cell.number("mean_kv_tokens") or np.nan for cell in full_cells]))
    token_bytes = (full_cells[0].expected.kv_bytes or (None, None))[0]
    prompts: list[int] = []
    for cell in full_cells:
        prompts += cell.prompts.values()

    document: Json = {
        "full": cells.get((choice.model, choice.benchmark, full_cells[0].setting.id)) if full_cells else None,
        "token_bytes": token_bytes,
        "tokens": None if np.isnan(full_tokens) else rounded(full_tokens, 1),
        "weights": weights if weights is not None and weights >= LARGE else None,
        "unmeasured": say("not_measured", max(prompts, default=None)),
    }
    return document
