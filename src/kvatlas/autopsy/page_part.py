"""The autopsies of a run as the app shows them: a sentence for each cell, and the saving tokens of a trace."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from kvatlas.autopsy.autopsies import Autopsy
from kvatlas.autopsy.summary import ARMS, summarise
from kvatlas.report.description import say
from kvatlas.results import Manifest
from kvatlas.stats.run_data import short_names
from kvatlas.text import model_name


def autopsy_sentences(autopsies: Iterable[Autopsy], manifest: Manifest) -> list[str]:
    """Return for each cell of a run how many lost answers have a cause, and the held-out test of the causes."""
    cells = {(cell.run_key, cell.setting.id, cell.benchmark): cell for cell in manifest.expected}
    names = short_names(cell.setting for cell in manifest.expected)

    def cell_of(autopsy: Autopsy) -> tuple[str, ...]:
        return autopsy.key[:3]

    sentences = []
    for key, group in groupby(sorted(autopsies, key=cell_of), cell_of):
        cell = cells.get((key[0], key[1], key[2]))
        summary = summarise(list(group))
        if cell is not None and summary["held_out"] is not None:
            about = {
                **summary["held_out"],
                "lost": summary["reproduced"],
                "model": model_name(cell.model),
                "benchmark": cell.benchmark,
                "setting": names[cell.setting.id],
            }
            sentences += say("autopsy", about)
    return sentences


def autopsy_document(autopsy: Autopsy, prompt: int) -> dict[str, Any] | None:
    """Return the saving tokens of a trace, from 0 for the first new one, and its held-out test; None without any.

    `after` is the number of new tokens before the compression that evicted them, `right` how many answers of `streams`
    are right in each arm.
    """
    if not autopsy.tokens:
        return None
    first = autopsy.tokens[0]
    return {
        "tokens": [token.position - prompt for token in autopsy.tokens if token.position >= prompt],
        "of_prompt": sum(token.position < prompt for token in autopsy.tokens),
        "after": first.position + first.distance - prompt + 1,
        "streams": len(autopsy.held_out.get("nothing", ())),
        "right": {arm: sum(autopsy.held_out.get(arm, ())) for arm in ARMS},
    }
