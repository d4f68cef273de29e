"""The part "For a decision" of the app: what a setting saves and loses, and what was not measured.

What it saves on a card is computed by the page (`web/decide.js`), where a person types the card. The numbers that it
takes are made here: the share of the memory that the settings keep, and the sizes of models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Claim, Shape, is_reference, percent, rounded
from kvatlas.report.description import say
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.table import select
from kvatlas.text import model_name

if TYPE_CHECKING:
    from kvatlas.report.result import Result
    from kvatlas.stats.choice import Choice
    from kvatlas.stats.run_data import RunData

Json = dict[str, Any]
#: Models of fewer bytes are limited by computing, so that the sizes of a larger one are shown first.
LARGE = 1_000_000_000
#: Bytes of a number of the published models: bfloat16.
_BFLOAT16 = 2


def decision_document(
    result: Result, cells: Mapping[tuple[str, str, str], int], weights: Mapping[str, int | None]
) -> Json | None:
    """Return what the page computes savings from, and what each setting loses; None without losses that can be seen.

    Args:
        result: the result of one run.
        cells: the numbers of cells on the page, by model, benchmark and id of the setting.
        weights: the bytes of the weights of each model of the run, None where they are unknown.
    """
    judged = [choice for choice in result.choices if choice.is_judged and choice.savings]
    models = [_model_document(choice, result.only_run, cells, weights.get(choice.model)) for choice in judged]
    models = [model for model in models if model["settings"]]
    if not models:
        return None

    cards = json.loads((resources.files("kvatlas.report.app") / "cards.json").read_text("utf-8"))
    return {**cards, "models": models, "sizes": [_sizes_of_published(entry) for entry in cards["models"]]}


def _sizes_of_published(entry: Mapping[str, Any]) -> Json:
    """Return the bytes of a cached token and of the weights of a published model, and the tokens of a long trace."""
    fields = ("layers", "heads", "kv_heads", "head_dim", "hidden")
    shape = Shape(**{name: entry[name] for name in fields})
    return {
        "name": entry["name"],
        "token_bytes": shape.kv_bytes_per_token(_BFLOAT16),
        "weights": _BFLOAT16 * entry["parameters"],
        "tokens": entry["tokens"],
    }


def _model_document(
    choice: Choice, run: RunData, cells: Mapping[tuple[str, str, str], int], weights: int | None
) -> Json:
    """Return a model's own sizes, and its settings: the offered one, then the proven ones, the cheapest first."""
    full_cells = [cell for cell in select(run.cells, model=choice.model) if is_reference(cell.setting) and cell.stored]
    full_tokens = float(np.mean([cell.cell.number("mean_kv_tokens") or np.nan for cell in full_cells]))
    token_bytes = (full_cells[0].expected.kv_bytes or (None, None))[0]
    own_sizes = None
    if weights is not None and token_bytes is not None and not np.isnan(full_tokens):
        own_sizes = {
            "name": model_name(choice.model),
            "token_bytes": token_bytes,
            "weights": weights,
            "tokens": rounded(full_tokens, 1),
        }
    prompts: list[int] = []
    for cell in full_cells:
        prompts += cell.prompts.values()

    losses = choice.losses or {}

    def rank(id_: str) -> tuple[bool, bool, float]:
        is_offered = choice.offered is not None and id_ == choice.offered.id
        is_kept = id_ in losses and losses[id_].is_kept
        return not is_offered, not is_kept, choice.savings[id_].memory

    settings = []
    for id_ in sorted(choice.savings, key=rank):
        cell_number = cells.get((choice.model, choice.benchmark, id_))
        loss = losses.get(id_)
        if cell_number is not None and loss is not None:
            settings.append(_setting_document(choice, id_, cell_number, loss))
    return {
        "model": choice.model,
        "short": model_name(choice.model),
        "benchmark": choice.benchmark,
        "full": cells.get((choice.model, choice.benchmark, full_cells[0].setting.id)) if full_cells else None,
        "own": own_sizes,
        "is_large": weights is not None and weights >= LARGE,
        "margin": percent(choice.margin),
        "shown": bool(choice.shown),
        "settings": settings,
        "unmeasured": say("not_measured", max(prompts, default=None)),
    }


def _setting_document(choice: Choice, id_: str, cell_number: int, loss: Difference) -> Json:
    """Return the share of the full cache's memory that a setting keeps, its loss by each claim, and its risk."""
    claims = []
    for claim in Claim:
        of_claim = loss.claims.get(claim)
        if of_claim is not None:
            # A setting that is not proven has the limit that holds for all settings together.
            limit = of_claim.limit if of_claim.is_kept else of_claim.joint_limit
            claims.append([claim.words, percent(limit), of_claim.is_kept, of_claim.is_broken])
    if choice.is_single and len(claims) > 1:
        # With one sample of each problem both claims have the same proof.
        claims = [["these problems and problems like these", *claims[-1][1:]]]
    return {
        "cell": cell_number,
        "memory": rounded(choice.savings[id_].memory, 4),
        "loss": [percent(loss.value), percent(loss.low), percent(loss.high)],
        "claims": claims,
        "untested": id_ in choice.untested,
        "risk": " ".join(say("risk", choice, id_)),
    }
