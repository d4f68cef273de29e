"""What maps say, as data: the JSON document of `kvatlas describe --json`. Percent scale, unknown values null."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Validity
from kvatlas.figures.style import scale
from kvatlas.stats.estimates.maps import MEAN_OF, mean_maps
from kvatlas.stats.estimates.validity import Finding
from kvatlas.stats.inference.binomial_tests import model_difference, verdicts_of_maps
from kvatlas.stats.inference.choice import Choice, choices_of_maps, kv_tokens_of
from kvatlas.stats.inference.map_tests import CellCoord, Effect, Name, Verdict, name_of
from kvatlas.stats.inference.resampling import Contrast, benjamini_hochberg, holm
from kvatlas.stats.pairs.comparisons import Comparison

#: Values nearer than this are the same peak.
_TIE = 1e-9


def describe(
    maps: Sequence[Map],
    comparisons: Sequence[Comparison] = (),
    means: Sequence[Map] | None = None,
    notes: Sequence[str] = (),
    verdicts: Mapping[Name, Verdict] | None = None,
    choices: Sequence[Choice] | None = None,
    findings: Sequence[Finding] = (),
) -> dict[str, Any]:
    """The document. `verdicts` and `choices` are those of runs; maps without one get that of the binomial bound.

    `maps`: one object per map with model, benchmark, metric, policy, axes, cells (how many), problems, samples,
    unmeasured (the most traces of a cell of which the metric is unknown), mean, min, max, peaks, lowest, estimates
    (every cell with both intervals and standard errors), baselines, omnibus, evidence_of_difference, plateau, may_lose,
    effects, stability, samples_to_decide, problems_to_decide, method, notes.
    `samples_to_decide` (of each problem) and `problems_to_decide` tell the highest from the lowest cell. `means`: the
    same for the means over benchmarks, made from the maps where not given. `across`: by model and policy, the settings
    on the plateau of every benchmark. `comparisons`: first minus second, in points, p-values adjusted over all of
    them. `recommendation`: the first model's choice, with
    that of every model under `all`; `vacuous` says why there is none. `findings`: what limits what the runs can show,
    the gravest first. Each map has its `validity`, each of its estimates the `audit` of its budget. Raises KvatlasError
    for no maps.
    """
    if not maps:
        raise KvatlasError("There is no map to describe.")
    averaged, remarks = _means(maps) if means is None else (means, [])
    held = dict(verdicts_of_maps(maps)) | dict(verdicts or {})
    parts = [one for one in maps if not one.benchmark.startswith(MEAN_OF)]
    chosen = list(choices or [])
    covered = {choice.model for choice in chosen}
    alone = Counter((one.model, one.policy) for one in parts)
    sole = [one for one in parts if alone[one.model, one.policy] == 1]
    chosen += [c for c in choices_of_maps([*averaged, *sole], held) if c.model not in covered]
    documents = [_map(one, held.get(name_of(one))) for one in maps]
    mean_documents = [_map(one, held.get(name_of(one))) for one in averaged]
    _adjust_trends([*documents, *mean_documents])
    return {
        "findings": [asdict(finding) for finding in findings],
        "maps": documents,
        "means": mean_documents,
        "across": _across(parts, held),
        "comparisons": _comparisons(comparisons, _models_of_csv(parts, held)),
        "recommendation": _recommendation(chosen),
        "notes": [*notes, *remarks, *_scales(parts)],
    }


def _means(maps: Sequence[Map]) -> tuple[Sequence[Map], list[str]]:
    try:
        return mean_maps(maps), []
    except KvatlasError as error:
        return [], [f"No means over benchmarks: {error}"]


def _map(one: Map, verdict: Verdict | None) -> dict[str, Any]:
    values = [cell.estimate.value for cell in one.cells.values()]
    best, worst = max(values), min(values)
    names = [name for name, _ in one.axes]

    def cells_at(wanted: float) -> list[dict[str, Any]]:
        return [
            {**_place(names, place), **_estimate(cell.estimate)}
            for place, cell in one.cells.items()
            if abs(cell.estimate.value - wanted) <= _TIE
        ]

    return {
        "model": one.model,
        "benchmark": one.benchmark,
        "metric": one.metric,
        "policy": one.policy,
        "axes": {name: list(held) for name, held in one.axes},
        "cells": len(one.cells),
        "problems": _common([cell.estimate.problems for cell in one.cells.values()]),
        "samples": _common([cell.estimate.samples for cell in one.cells.values()]),
        "unmeasured": max((cell.unmeasured or 0 for cell in one.cells.values()), default=0),
        "mean": _percent(sum(values) / len(values)),
        "min": _percent(worst),
        "max": _percent(best),
        "peaks": cells_at(best),
        "lowest": cells_at(worst),
        "estimates": [_cell(names, place, cell, verdict) for place, cell in one.cells.items()],
        "baselines": [{"setting": name, **_estimate(cell.estimate)} for name, cell in one.baselines.items()],
        **_verdict(names, verdict),
        "validity": None if one.validity is None else _validity(one.validity),
        "notes": [*one.notes, *(verdict.notes if verdict else ())],
    }


def _validity(checked: Validity) -> dict[str, Any]:
    identical = [list(group) for group in checked.identical]
    return {**asdict(checked), "identical": identical, "vacuous": checked.vacuous}


def _cell(names: Sequence[str], place: CellCoord, cell: Cell, verdict: Verdict | None) -> dict[str, Any]:
    estimate = cell.estimate
    return {
        **_place(names, place),
        **_estimate(estimate),
        "se_clustered": _percent(estimate.se_clustered),
        "se_conditional": _percent(estimate.se_conditional),
        "given_low": _percent(estimate.given_low),
        "given_high": _percent(estimate.given_high),
        "problems": estimate.problems,
        "samples": estimate.samples,
        "unmeasured": cell.unmeasured,
        "p_best": None if verdict is None or place not in verdict.p_best else _p(verdict.p_best[place]),
        "may_lose": None if verdict is None else _percent(verdict.may_lose.get(place)),
        "audit": audit_document(cell),
    }


def audit_document(cell: Cell) -> dict[str, Any] | None:
    """What the cell's budget leaves to its policy: places, and percent of problems without; None if not known."""
    audit = cell.audit
    if audit is None:
        return None
    return {**asdict(audit), "none": _percent(audit.none), "no_choice": _percent(audit.no_choice)}


def _verdict(names: Sequence[str], verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {
            "omnibus": {"statistic": None, "p": None, "method": None},
            "evidence_of_difference": None,
            "plateau": None,
            "may_lose": None,
            "effects": [],
            "stability": {"spread": None, "noise": None, "peak_share": None},
            "samples_to_decide": None,
            "problems_to_decide": None,
            "method": None,
        }
    test = verdict.omnibus
    return {
        "omnibus": {"statistic": round(test.statistic, 4), "p": _p(test.p), "method": test.method},
        "evidence_of_difference": verdict.evidence,
        "plateau": [_place(names, place) for place in verdict.plateau],
        "may_lose": _percent(max((verdict.may_lose.get(place, 0.0) for place in verdict.plateau), default=None)),
        "effects": [_effect(effect) for effect in verdict.effects],
        "stability": {
            "spread": _percent(verdict.spread),
            "noise": _percent(verdict.noise),
            "peak_share": None if verdict.peak_share is None else round(verdict.peak_share, 4),
        },
        "samples_to_decide": verdict.need.samples,
        "problems_to_decide": verdict.need.problems,
        "method": verdict.method,
    }


def _place(names: Sequence[str], place: CellCoord) -> dict[str, Any]:
    return dict(zip(names, place, strict=True))


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "axis": effect.axis,
        "levels": [{"level": level, **_contrast(measured)} for level, measured in effect.levels],
        "trend": None if effect.trend is None else _contrast(effect.trend),
    }


def _contrast(one: Contrast) -> dict[str, Any]:
    return {"value": _percent(one.value), "low": _percent(one.low), "high": _percent(one.high), "p": _p(one.p)}


def _adjust_trends(documents: Sequence[dict[str, Any]]) -> None:
    """Add Holm's p-value, over all trends of the document, to each trend, and whether it is supported."""
    trends = [effect["trend"] for one in documents for effect in one["effects"] if effect["trend"] is not None]
    for trend, p in zip(trends, holm([trend["p"] for trend in trends]), strict=True):
        trend["p_holm"] = _p(p)
        trend["supported"] = p < 0.05


def _across(maps: Sequence[Map], verdicts: Mapping[Name, Verdict]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[tuple[Map, Verdict]]] = {}
    for one in maps:
        verdict = verdicts.get(name_of(one))
        if verdict is not None:
            groups.setdefault((one.model, one.policy), []).append((one, verdict))
    found = []
    for (model, policy), group in groups.items():
        if len(group) < 2:
            continue
        names = [name for name, _ in group[0][0].axes]
        good = [place for place in group[0][1].plateau if all(place in verdict.plateau for _, verdict in group)]
        found.append(
            {
                "model": model,
                "policy": policy,
                "benchmarks": [one.benchmark for one, _ in group],
                "with_evidence": [one.benchmark for one, verdict in group if verdict.evidence],
                "good_for_all": [_place(names, place) for place in good],
                "cells": len(group[0][0].cells),
            }
        )
    return found


def _comparisons(comparisons: Sequence[Comparison], bounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [_comparison(one) for one in comparisons] + bounds
    holms, rates = holm([row["p"] for row in rows]), benjamini_hochberg([row["p"] for row in rows])
    for row, strict, rate in zip(rows, holms, rates, strict=True):
        row |= {"p_holm": _p(strict), "p_bh": _p(rate)}
    return rows


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
        "p": _p(difference.p),
        "problems": difference.problems,
        "pairs": difference.pairs,
        "note": one.note or None,
    }


def _models_of_csv(maps: Sequence[Map], verdicts: Mapping[Name, Verdict]) -> list[dict[str, Any]]:
    """Comparisons between the models of maps without traces, by the binomial bound, over the benchmarks of both."""
    groups: dict[tuple[str, str], dict[str, Map]] = {}
    for one in maps:
        verdict = verdicts.get(name_of(one))
        if verdict is not None and "bound" in verdict.method:
            groups.setdefault((one.model, one.policy), {})[one.benchmark] = one
    names = list(groups)
    rows = []
    for index, (model, policy) in enumerate(names):
        for other, theirs in names[index + 1 :]:
            shared = [name for name in groups[model, policy] if name in groups[other, theirs]]
            if model == other or policy != theirs or not shared:
                continue
            mine = [groups[model, policy][name] for name in shared]
            found = model_difference(mine, [groups[other, theirs][name] for name in shared])
            if found is not None:
                rows.append(
                    {
                        "model": f"{model}, {other}",
                        "benchmark": shared[0] if len(shared) == 1 else f"{len(shared)} benchmarks",
                        "metric": mine[0].metric,
                        "first": model,
                        "second": other,
                        "cells": sum(len(one.cells) for one in mine),
                        "difference": _percent(found.value),
                        "low": _percent(found.low),
                        "high": _percent(found.high),
                        "p": _p(found.p),
                        "problems": sum(next(iter(one.cells.values())).estimate.problems or 0 for one in mine),
                        "pairs": None,
                        "note": f"by the binomial bound, policy {policy}" if policy else "by the binomial bound",
                    }
                )
    return rows


def _recommendation(choices: Sequence[Choice]) -> dict[str, Any]:
    each = [_choice(choice) for choice in choices]
    nothing = {"setting": None, "value": None, "low": None, "high": None, "kept_tokens_mean": None}
    return {**(each[0] if each else nothing), "all": each}


def _choice(choice: Choice) -> dict[str, Any]:
    first = _chosen(choice.by_memory, choice)
    return {
        **first,
        "model": choice.model,
        "benchmark": choice.benchmark,
        "candidates": choice.candidates,
        "plateau": choice.members,
        "by_time": _chosen(choice.by_time, choice) if choice.by_time else None,
        "vacuous": choice.vacuous,
    }


def _chosen(cell: Cell | None, choice: Choice) -> dict[str, Any]:
    if cell is None:
        return {"setting": None, "value": None, "low": None, "high": None, "kept_tokens_mean": None}
    kept = kv_tokens_of(cell)
    return {
        "setting": str(cell.setting),
        **_estimate(cell.estimate),
        "may_lose": _percent(choice.may_lose.get(cell.setting.id)),
        "kept_tokens_mean": None if kept is None else round(kept, 3),
        "kept_tokens_measured": cell.mean_kv_tokens is not None,
        "seconds_mean": None if cell.seconds_mean is None else round(cell.seconds_mean, 4),
        "beside": [
            {"setting": name, **_contrast(found)} for name, found in choice.beside.get(cell.setting.id, {}).items()
        ],
    }


def _scales(maps: Sequence[Map]) -> list[str]:
    """A warning where panels drawn each on its own colour scale would show one value in several colours."""
    scales = {(one.model, one.benchmark, one.policy): scale([one]) for one in maps}
    if len({tuple(round(end, 1) for end in each) for each in scales.values()}) < 2:
        return []
    low, *_, high = sorted(scales.items(), key=lambda item: sum(item[1]))
    return [
        f"Panels have unlike colour scales, from {low[1][0]:.1f} to {low[1][1]:.1f} ({low[0][1]}) up to "
        f"{high[1][0]:.1f} to {high[1][1]:.1f} ({high[0][1]}): equal colours are unequal values; "
        "`kvatlas map --shared` draws one scale"
    ]


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {
        "value": _percent(estimate.value),
        "low": _percent(estimate.low),
        "high": _percent(estimate.high),
    }


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 4)


def _p(value: float) -> float:
    return round(value, 6)


def _common(values: Sequence[int | None]) -> int | None:
    return values[0] if len(set(values)) == 1 else None


def p_text(p: float) -> str:
    """A p-value to three places; below that, a bound."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def cost(cell: Cell) -> list[str]:
    """What a cell rests on and costs, as short texts: problems, samples, kept tokens, answer length, truncated."""
    estimate = cell.estimate
    return [
        text
        for known, text in (
            (estimate.problems, f"{estimate.problems} problems"),
            (estimate.samples, "1 sample each" if estimate.samples == 1 else f"{estimate.samples} samples each"),
            (cell.mean_kv_tokens, f"{cell.mean_kv_tokens or 0:,.0f} tokens kept on average"),
            (cell.peak_kv_tokens, f"{cell.peak_kv_tokens:,} at the peak" if cell.peak_kv_tokens else ""),
            (cell.output_tokens_mean, f"{cell.output_tokens_mean or 0:,.0f} tokens per answer"),
            (cell.truncated, f"{cell.truncated} truncated"),
        )
        if known is not None and text
    ]
