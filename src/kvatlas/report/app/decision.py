"""The part "For a decision" of the app: what a setting saves and loses, and what was not measured.

What it saves on a card is computed by the page (`web/decide.js`), where a person types the card, and for models that
were run alone. The sizes that it takes are made here; the settings and their losses are those of the answer's cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import is_reference, rounded
from kvatlas.report.description import say
from kvatlas.stats.table import select

if TYPE_CHECKING:
    from kvatlas.report.result import Result

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
        models.append(
            {
                "card": card,
                "full": cells.get((choice.model, choice.benchmark, full[0].setting.id)),
                "token_bytes": (full[0].expected.kv_bytes or (None, None))[0],
                "tokens": None if np.isnan(tokens) else rounded(tokens, 1),
                "weights": size if size is not None and size >= LARGE else None,
                "unmeasured": say("not_measured", max(prompts, default=None)),
            }
        )
    if not models:
        return None
    return {**json.loads((resources.files("kvatlas.report.app") / "cards.json").read_text("utf-8")), "models": models}
