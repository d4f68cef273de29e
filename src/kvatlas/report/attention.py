"""Predicted importance against later attention, measured on a trace's own tokens when a report is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError, Trace
from kvatlas.report.sources import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.models import Model

#: Larger models are not loaded for a picture unless they are asked for.
BYTES_LIMIT = 1 << 30


def measured(traces: Sequence[Trace], sources: Sources, limit: int) -> list[dict[str, Any] | None]:
    """For each trace what `_measure` finds, or None: the first `limit` that can be measured are.

    A trace needs its model, with a DynTS head, its prompt, and an end of thinking. Models over 1 GiB are left alone.
    """
    found: list[dict[str, Any] | None] = []
    networks: dict[str, PreTrainedModel | None] = {}
    for trace in traces:
        model, prompt = sources.models.get(trace.model), sources.prompt(trace)
        if limit <= 0 or model is None or prompt is None:
            found.append(None)
            continue
        if trace.model not in networks:
            networks[trace.model] = _network(model)
        network = networks[trace.model]
        result = None if network is None else _measure(model, network, prompt, trace.tokens)
        limit -= result is not None
        found.append(result)
    return found


def _network(model: Model) -> PreTrainedModel | None:
    from kvatlas import policies
    from kvatlas.core import Setting

    try:
        policies.of(Setting.of("dynts", kv_budget=2, local_window=1, ratio=0.0)).check(model)
        if sum(path.stat().st_size for path in model.folder.glob("*.safetensors")) > BYTES_LIMIT:
            return None
        return model.network()
    except KvatlasError:
        return None


def _measure(
    model: Model, network: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> dict[str, Any] | None:
    """Importance that the head gives each thinking token, and the attention that the answer pays to it.

    Both on the full cache: the trace's tokens are run through the model at once. Both are scaled to a mean of 1 over
    the thinking tokens; `agreement` is Spearman's rank correlation over them.
    """
    from scipy import stats

    from kvatlas.policies.dynts import HEAD_FILE, importance, load_head
    from kvatlas.predictor.labels import answer_attention

    split = model.split(tokens)
    if split is None or split[0] < 3 or split[1] >= len(tokens):
        return None
    end, answer = len(prompt) + split[0], len(prompt) + split[1]
    attention, hidden = answer_attention(network, [*prompt, *tokens], answer)
    thinking = slice(len(prompt), end)
    paid = attention[thinking].double()
    predicted = importance(load_head(str(model.folder / HEAD_FILE)), hidden[thinking]).double()
    agreement = float(stats.spearmanr(predicted.numpy(), paid.numpy()).statistic)
    scaled = [(values / values.mean().clamp(min=1e-12)).tolist() for values in (predicted, paid)]
    return {
        "predicted": [round(value, 3) for value in scaled[0]],
        "attention": [round(value, 3) for value in scaled[1]],
        "agreement": round(agreement, 4) if agreement == agreement else None,
    }
