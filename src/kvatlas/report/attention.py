"""What traces show of attention when a report is built: importance against later attention, and what a departing step
missed; both measured with the full cache on a trace's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError, Trace
from kvatlas.report.sources import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.models import ModelHandle

#: Larger models are not loaded for a picture.
BYTES_LIMIT = 1 << 30
#: Evicted tokens that are named for a departure; departures that are looked at for each trace to measure.
NAMED, DEPARTURES = 8, 16


@dataclass
class LoadedModels:
    """The models of a run, loaded when they are first asked for."""

    sources: Sources
    loaded: dict[str, PreTrainedModel | None] = field(default_factory=dict)

    def get(self, model: ModelHandle) -> PreTrainedModel | None:
        """The model's weights; None where they are gone or over 1 GiB."""
        if model.name not in self.loaded:
            self.loaded[model.name] = _load(model)
        return self.loaded[model.name]


def _load(model: ModelHandle) -> PreTrainedModel | None:
    try:
        if sum(path.stat().st_size for path in model.folder.glob("*.safetensors")) > BYTES_LIMIT:
            return None
        return model.load()
    except KvatlasError:
        return None


def measured(traces: Sequence[Trace], loaded_models: LoadedModels, limit: int) -> list[dict[str, Any] | None]:
    """For each trace what `_measure` finds, or None: the first `limit` that can be measured are.

    A trace needs its model, with a DynTS head, its prompt, and an end of thinking.
    """
    results: list[dict[str, Any] | None] = []
    for trace in traces:
        handle, prompt = loaded_models.sources.models.get(trace.model), loaded_models.sources.prompt(trace)
        result = None
        if limit > 0 and handle is not None and prompt is not None and _has_head(handle):
            model = loaded_models.get(handle)
            result = None if model is None else _measure(handle, model, prompt, trace.tokens)
        limit -= result is not None
        results.append(result)
    return results


def _has_head(model: ModelHandle) -> bool:
    from kvatlas import policies
    from kvatlas.core import Setting

    try:
        policies.of(Setting.of("dynts", kv_budget=2, local_window=1, ratio=0.0)).check(model)
    except KvatlasError:
        return False
    return True


def _measure(
    handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> dict[str, Any] | None:
    """Importance that the head gives each thinking token, and the attention that the answer pays to it.

    Both on the full cache: the trace's tokens are run through the model at once. Both are scaled to a mean of 1 over
    the thinking tokens; `agreement` is Spearman's rank correlation over them.
    """
    from scipy import stats

    from kvatlas.policies.dynts import HEAD_FILE, importance, load_head
    from kvatlas.policies.made_files import beside
    from kvatlas.predictor.labels import answer_attention

    split = handle.split(tokens)
    if split is None or split[0] < 3 or split[1] >= len(tokens):
        return None
    end, answer = len(prompt) + split[0], len(prompt) + split[1]
    attention, hidden = answer_attention(model, [*prompt, *tokens], answer)
    thinking = slice(len(prompt), end)
    paid = attention[thinking].double()
    predicted = importance(load_head(str(beside(handle, HEAD_FILE))), hidden[thinking]).double()
    agreement = float(stats.spearmanr(predicted.numpy(), paid.numpy()).statistic)
    scaled = [(values / values.mean().clamp(min=1e-12)).tolist() for values in (predicted, paid)]
    return {
        "predicted": [round(value, 3) for value in scaled[0]],
        "attention": [round(value, 3) for value in scaled[1]],
        "agreement": round(agreement, 4) if agreement == agreement else None,
    }


def departures(
    pairs: Sequence[tuple[Trace, Trace | None]], loaded_models: LoadedModels, limit: int
) -> list[dict[str, Any] | None]:
    """For each trace and the full cache's trace of the same sample what `_departure` finds, or None.

    The first `limit` that depart after an eviction are looked at.
    """
    results: list[dict[str, Any] | None] = []
    for trace, full in pairs:
        handle, prompt = loaded_models.sources.models.get(trace.model), loaded_models.sources.prompt(trace)
        result = None
        if limit > 0 and full is not None and handle is not None and prompt is not None:
            model = loaded_models.get(handle)
            result = None if model is None else _departure(model, prompt, trace, full)
        limit -= result is not None
        results.append(result)
    return results


def _departure(model: PreTrainedModel, prompt: tuple[int, ...], trace: Trace, full: Trace) -> dict[str, Any] | None:
    """Where a trace first differs from the full cache's, and which evicted tokens the full cache attends to there.

    `at` is the number of new tokens that both have in common. `share` is the part of the attention of the step that
    writes the next one, mean over layers and heads of the full cache, that lies on tokens that no layer and no head had
    any more; `missed` lists the new tokens among them with the largest parts as (number, part), `prompt` the part on
    evicted tokens of the prompt.
    """
    from kvatlas.predictor.labels import answer_attention

    pairs = enumerate(zip(trace.tokens, full.tokens, strict=False))
    at = next((index for index, (own, other) in pairs if own != other), None)
    if not at or trace.eviction_trace is None:
        return None
    query = len(prompt) + at - 1
    gone = [position for position, left in enumerate(trace.eviction_trace.left[:query]) if 0 < left <= at]
    if not gone:
        return None
    attention, _ = answer_attention(model, [*prompt, *trace.tokens[:at]], query)
    part = {position: float(attention[position]) for position in gone}
    largest = sorted((position for position in gone if position >= len(prompt)), key=lambda position: -part[position])[
        :NAMED
    ]
    return {
        "at": at,
        "share": round(sum(part.values()), 4),
        "prompt": round(sum(part[position] for position in gone if position < len(prompt)), 4),
        "missed": [[position - len(prompt), round(part[position], 4)] for position in largest],
    }
