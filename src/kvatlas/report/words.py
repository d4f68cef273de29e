"""What maps say, as data (`describe --json`) and as Markdown. Numbers only, all in percent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvatlas.core import Cell, Estimate, KvatlasError, Map
from kvatlas.figures.style import label
from kvatlas.stats.comparisons import Comparison
from kvatlas.stats.maps import mean_maps

#: Values nearer than this are the same peak.
_TIE = 1e-9


def describe(
    maps: Sequence[Map],
    comparisons: Sequence[Comparison] = (),
    means: Sequence[Map] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The JSON document of `kvatlas describe --json`; percent scale, unknown values null.

    `maps`: one object per map with model, benchmark, metric, policy, axes, cells (how many), problems, samples, mean,
    min, max, peaks, baselines, omnibus, evidence_of_difference, plateau, samples_to_decide, notes. `means`: the same
    for the means over benchmarks, made from the maps where not given. `comparisons`: first minus second, in points.
    Tests of whole maps and the recommendation are null: they are not computed. Where the maps can have no means, a
    note says why. Raises KvatlasError for no maps.
    """
    if not maps:
        raise KvatlasError("There is no map to describe.")
    averaged, remarks = _means(maps) if means is None else (means, [])
    return {
        "maps": [_map(one) for one in maps],
        "means": [_map(one) for one in averaged],
        "comparisons": [_comparison(one) for one in comparisons],
        "recommendation": {"setting": None, "value": None, "low": None, "high": None, "kept_tokens_mean": None},
        "notes": [*notes, *remarks],
    }


def _means(maps: Sequence[Map]) -> tuple[Sequence[Map], list[str]]:
    try:
        return mean_maps(maps), []
    except KvatlasError as error:
        return [], [f"No means over benchmarks: {error}"]


def _map(one: Map) -> dict[str, Any]:
    values = [cell.estimate.value for cell in one.cells.values()]
    best = max(values)
    names = [name for name, _ in one.axes]
    return {
        "model": one.model,
        "benchmark": one.benchmark,
        "metric": one.metric,
        "policy": one.policy,
        "axes": {name: list(held) for name, held in one.axes},
        "cells": len(one.cells),
        "problems": _common([cell.estimate.problems for cell in one.cells.values()]),
        "samples": _common([cell.estimate.samples for cell in one.cells.values()]),
        "mean": _percent(sum(values) / len(values)),
        "min": _percent(min(values)),
        "max": _percent(best),
        "peaks": [
            {**dict(zip(names, place, strict=True)), **_estimate(cell.estimate)}
            for place, cell in one.cells.items()
            if cell.estimate.value >= best - _TIE
        ],
        "baselines": [{"setting": name, **_estimate(cell.estimate)} for name, cell in one.baselines.items()],
        "omnibus": {"statistic": None, "p": None, "method": None},
        "evidence_of_difference": None,
        "plateau": None,
        "samples_to_decide": None,
        "notes": list(one.notes),
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    difference = one.difference
    return {
        "model": one.model,
        "benchmark": one.benchmark,
        "metric": one.metric,
        "first": one.first,
        "second": one.second,
        "cells": one.cells,
        "difference": _percent(difference.value),
        "low": _percent(difference.low),
        "high": _percent(difference.high),
        "p": difference.p,
        "problems": difference.problems,
        "pairs": difference.pairs,
        "note": one.note or None,
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": _percent(estimate.value), "low": _percent(estimate.low), "high": _percent(estimate.high)}


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 4)


def _common(values: Sequence[int | None]) -> int | None:
    return values[0] if len(set(values)) == 1 else None


def as_text(description: dict[str, Any]) -> str:
    """A description as Markdown: an overview table, the baselines, the paired comparisons, the notes."""
    parts = ["# Overview", "", *_overview(description["maps"])]
    if description["means"]:
        parts += ["", "# Means over benchmarks", "", *_overview(description["means"])]
    if description["comparisons"]:
        parts += ["", "# Paired comparisons", "", *_comparisons(description["comparisons"])]
    notes = [*description["notes"], *_map_notes([*description["maps"], *description["means"]])]
    if notes:
        parts += ["", "# Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(parts) + "\n"


def _map_notes(maps: Sequence[dict[str, Any]]) -> list[str]:
    """The notes of all maps, each once, with the maps that have it where not all do."""
    named: dict[str, list[str]] = {}
    for one in maps:
        for note in one["notes"]:
            named.setdefault(note, []).append(" | ".join(filter(None, (one["model"], one["benchmark"], one["policy"]))))
    return [note if len(names) == len(maps) else f"{note} ({'; '.join(names)})" for note, names in named.items()]


def _overview(maps: Sequence[dict[str, Any]]) -> list[str]:
    header = ["Model", "Benchmark", "Policy", "Metric", "Problems", "Samples", "Cells", "Mean", "Min", "Max"]
    rows = [
        [
            one["model"], one["benchmark"], one["policy"] or "–", label(one["metric"]),
            _or_dash(one["problems"]), _or_dash(one["samples"]), str(one["cells"]),
            f"{one['mean']:.1f}", f"{one['min']:.1f}", f"{one['max']:.1f}",
            "; ".join(_peak(peak) for peak in one["peaks"]),
            "; ".join(f"{base['setting']} {_with_interval(base)}" for base in one["baselines"]) or "–",
        ]
        for one in maps
    ]  # fmt: skip
    return _table([*header, "Highest cells", "Baselines"], rows)


def _comparisons(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [
            one["model"], one["benchmark"], one["first"], one["second"], str(one["cells"]), str(one["problems"]),
            f"{one['difference']:+.1f}", f"{one['low']:+.1f} to {one['high']:+.1f}", p_text(one["p"]),
            one["note"] or "",
        ]
        for one in comparisons
    ]  # fmt: skip
    header = ["Model", "Benchmark", "First", "Second", "Cells", "Problems", "First - second (points)", "95 % interval"]
    return _table([*header, "p", "Note"], rows)


def _peak(peak: dict[str, Any]) -> str:
    place = ", ".join(f"{name} {value}" for name, value in peak.items() if name not in ("value", "low", "high"))
    return f"{_with_interval(peak)} at {place}"


def _with_interval(estimate: dict[str, Any]) -> str:
    text = f"{estimate['value']:.1f}"
    return text if estimate["low"] is None else f"{text} ({estimate['low']:.1f}–{estimate['high']:.1f})"


def p_text(p: float) -> str:
    """A p-value to three places; below that, a bound."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(fields: Sequence[str]) -> str:
        return "| " + " | ".join(field.replace("|", r"\|").replace("\n", " ") for field in fields) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]


def cost(cell: Cell) -> list[str]:
    """What a cell rests on and costs, as short texts: problems, samples, kept tokens, answer length, truncated."""
    estimate = cell.estimate
    return [
        text
        for known, text in (
            (estimate.problems, f"{estimate.problems} problems"),
            (estimate.samples, "1 sample each" if estimate.samples == 1 else f"{estimate.samples} samples each"),
            (cell.kept_tokens_mean, f"{cell.kept_tokens_mean or 0:,.0f} tokens kept on average"),
            (cell.peak_kv_tokens, f"{cell.peak_kv_tokens:,} at the peak" if cell.peak_kv_tokens else ""),
            (cell.output_tokens_mean, f"{cell.output_tokens_mean or 0:,.0f} tokens per answer"),
            (cell.truncated, f"{cell.truncated} truncated"),
        )
        if known is not None and text
    ]
