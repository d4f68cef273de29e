"""Departures of traces from the full cache's, and the evicted tokens that the full cache attends to there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError, Trace, first_difference
from kvatlas.report.materials import RunMaterials

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Bytes of a model whose attention is measured, at most.
BYTES_LIMIT = 1 << 30
#: Evicted tokens that are named for a departure.
NAMED = 8


def measure_departures(
    pairs: Sequence[tuple[Trace, Trace | None]], materials: RunMaterials, limit: int
) -> list[dict[str, Any] | None]:
    """Return what the departing step missed, for the first `limit` traces that depart from the full cache's.

    Each pair is a trace and the full cache's trace of the same sample. None for a trace whose model or question is
    gone, and for models larger than `BYTES_LIMIT`.
    """
    weights: dict[str, PreTrainedModel | None] = {}
    results: list[dict[str, Any] | None] = []

    for trace, full in pairs:
        result = None
        prompt = materials.prompt(trace) if full is not None and limit > 0 else None
        if full is not None and prompt is not None:
            if trace.model not in weights:
                handle = materials.models[trace.model]
                try:
                    size = sum(path.stat().st_size for path in handle.folder.glob("*.safetensors"))
                    weights[trace.model] = handle.load() if size <= BYTES_LIMIT else None
                except KvatlasError:
                    weights[trace.model] = None
            model = weights[trace.model]
            if model is not None:
                result = _missed_at_departure(model, prompt, trace, full)

        if result is not None:
            limit -= 1
        results.append(result)
    return results


def _missed_at_departure(
    model: PreTrainedModel, prompt: tuple[int, ...], trace: Trace, full: Trace
) -> dict[str, Any] | None:
    """Return the first difference from the full cache's trace, and the evicted tokens that the full cache attends to.

    `at` is the number of new tokens that both have in common. `share` is the part of the attention of the step that
    writes the next one, mean over layers and heads of the full cache, on tokens that no layer and no head had any more;
    `missed` lists the new tokens among them with the largest parts as (number, part), `prompt` the part on evicted
    tokens of the prompt.
    """
    from kvatlas.engine.whole_texts import answer_attention

    at = first_difference(trace.tokens, full.tokens)
    # A trace that is the beginning of the other one does not depart from it.
    if not at or at == min(len(trace.tokens), len(full.tokens)) or trace.eviction_trace is None:
        return None
    query = len(prompt) + at - 1
    evicted = [position for position, step in enumerate(trace.eviction_trace.evicted_at[:query]) if 0 < step <= at]
    if not evicted:
        return None

    attention, _ = answer_attention(model, [*prompt, *trace.tokens[:at]], query)
    shares = {position: float(attention[position]) for position in evicted}
    on_prompt = [share for position, share in shares.items() if position < len(prompt)]
    new_tokens = [position for position in evicted if position >= len(prompt)]
    largest = sorted(new_tokens, key=lambda position: -shares[position])[:NAMED]
    return {
        "at": at,
        "share": round(sum(shares.values()), 4),
        "prompt": round(sum(on_prompt), 4),
        "missed": [[position - len(prompt), round(shares[position], 4)] for position in largest],
    }
