"""A description as the JSON of `kvatlas describe --json`: percent scale, unknown values null; stable names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvatlas.core import Cell, CellCoord, Estimate, Map, Validity
from kvatlas.report.description import AdjustedComparison, Description, MapDescription, rounded_p
from kvatlas.stats.bare_maps import PooledEffect
from kvatlas.stats.choice import Choice, kv_tokens_of
from kvatlas.stats.inference import Contrast
from kvatlas.stats.losses import Loss
from kvatlas.stats.verdicts import Basis, Effect, Verdict

Json = dict[str, Any]


def to_json(description: Description) -> Json:
    """The document.

    `maps`: one object per map with model, benchmark, metric, policy, axes, cells (how many), problems, samples,
    unmeasured (the most traces of a cell of which the metric is unknown), mean, min, max, peaks, lowest, estimates
    (every cell with both intervals and standard errors), baselines, omnibus, evidence_of_difference, plateau, may_lose,
    effects, stability, samples_to_decide, problems_to_decide, method, notes.
    `samples_to_decide` (of each problem) and `problems_to_decide` tell the highest from the lowest cell. `means`: the
    same for the means over benchmarks. `across`: by model and policy, the settings on the plateau of every benchmark.
    `comparisons`: first minus second, in points, p-values adjusted over all of them. `recommendation`: the first
    model's choice, with that of every model under `all`; `vacuous` says why there is none. `findings`: what limits
    what the runs can show, the gravest first. Each map has its `validity`, each of its estimates the `audit` of its
    budget. `effects`: one joint test for each axis over all benchmarks (and models, for maps of bare Pass@1), each
    level against the mean of the others. Each entry of `recommendation.all` says what the setting loses against the
    full cache: `margin`, `loses`, `loses_low`, `loses_high`, `shown`.
    """
    choices = [_choice(choice) for choice in description.choices]
    return {
        "findings": [asdict(finding) for finding in description.findings],
        "maps": [_map(described) for described in description.maps],
        "means": [_map(described) for described in description.means],
        "across": [
            {
                "model": across.model,
                "policy": across.policy,
                "benchmarks": list(across.benchmarks),
                "with_evidence": list(across.with_evidence),
                "good_for_all": [_coord(across.axes, coord) for coord in across.good_for_all],
                "cells": across.cells,
            }
            for across in description.across
        ],
        "comparisons": [_comparison(adjusted) for adjusted in description.comparisons],
        "recommendation": {**(choices[0] if choices else _NO_SETTING), "all": choices},
        "effects": [_pooled(effect) for effect in description.effects],
        "peak_p": rounded(description.peak_p, 6),
        "notes": [note.text for note in description.notes],
    }


def percent(value: float | None) -> float | None:
    """A share in percent, to four places."""
    return None if value is None else round(100 * value, 4)


def rounded(value: float | None, digits: int) -> float | None:
    """A number to so many places."""
    return None if value is None else round(value, digits)


def estimate_json(estimate: Estimate) -> Json:
    """Value and interval in percent."""
    return {name: percent(getattr(estimate, name)) for name in ("value", "low", "high")}


def audit_json(cell: Cell) -> Json | None:
    """What the cell's budget leaves to its policy: places, and percent of problems without; None if not known."""
    audit = cell.audit
    if audit is None:
        return None
    return {**asdict(audit), "none": percent(audit.none), "no_choice": percent(audit.no_choice)}


def _map(described: MapDescription) -> Json:
    map_, verdict = described.map, described.verdict
    names = tuple(name for name, _ in map_.axes)

    def cells_at(coords: Sequence[CellCoord]) -> list[Json]:
        return [{**_coord(names, coord), **estimate_json(map_.cells[coord].estimate)} for coord in coords]

    return {
        "model": map_.model,
        "benchmark": map_.benchmark,
        "metric": map_.metric,
        "policy": map_.policy,
        "axes": {name: list(values) for name, values in map_.axes},
        "cells": len(map_.cells),
        "problems": described.problems,
        "samples": described.samples,
        "unmeasured": max((cell.unmeasured or 0 for cell in map_.cells.values()), default=0),
        "mean": percent(described.mean),
        "min": percent(min(described.values)),
        "max": percent(max(described.values)),
        "peaks": cells_at(described.peaks),
        "lowest": cells_at(described.lowest),
        "estimates": [_cell(map_, coord, verdict) for coord in map_.cells],
        "baselines": [{"setting": name, **estimate_json(cell.estimate)} for name, cell in map_.baselines.items()],
        **(_NO_VERDICT if verdict is None else _verdict(names, described, verdict)),
        "validity": None if map_.validity is None else _validity(map_.validity),
        "notes": [note.text for note in described.notes],
    }


def _validity(checked: Validity) -> Json:
    identical = [list(group) for group in checked.identical]
    return {**asdict(checked), "identical": identical, "vacuous": checked.vacuous}


def _cell(map_: Map, coord: CellCoord, verdict: Verdict | None) -> Json:
    cell = map_.cells[coord]
    estimate = cell.estimate
    return {
        **_coord([name for name, _ in map_.axes], coord),
        **estimate_json(estimate),
        "se_clustered": percent(estimate.se_clustered),
        "problems": estimate.problems,
        "samples": estimate.samples,
        "unmeasured": cell.unmeasured,
        "p_best": None if verdict is None or coord not in verdict.p_best else rounded_p(verdict.p_best[coord]),
        "may_lose": None if verdict is None else percent(verdict.may_lose.get(coord)),
        **_cell_loss(verdict, coord),
        "audit": audit_json(cell),
    }


def _cell_loss(verdict: Verdict | None, coord: CellCoord) -> Json:
    loss = verdict.losses.get(coord) if verdict and verdict.losses else None
    return {**_loss(loss, "loses"), "shown": None if loss is None else loss.shown}


_NO_VERDICT: Mapping[str, Any] = {
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


def _verdict(names: Sequence[str], described: MapDescription, verdict: Verdict) -> Json:
    test = verdict.omnibus
    return {
        "omnibus": {"statistic": round(test.statistic, 4), "p": rounded_p(test.p), "method": test.method.value},
        "evidence_of_difference": None if verdict.basis is Basis.GROUP_SEQUENTIAL else verdict.evidence,
        "plateau": [_coord(names, coord) for coord in verdict.plateau],
        "may_lose": percent(verdict.most_lost),
        "effects": [_effect(described, effect) for effect in verdict.effects],
        "stability": {
            "spread": percent(verdict.spread),
            "noise": percent(verdict.noise),
            "peak_share": rounded(verdict.peak_share, 4),
        },
        "samples_to_decide": verdict.need.samples,
        "problems_to_decide": verdict.need.problems,
        "method": verdict.basis.value,
    }


def _coord(names: Sequence[str], coord: CellCoord) -> Json:
    return dict(zip(names, coord, strict=True))


def _effect(described: MapDescription, effect: Effect) -> Json:
    trend: Json | None = None
    if effect.trend is not None:
        adjusted = {"p_holm": rounded_p(described.holm[effect.axis]), "supported": described.supports(effect)}
        trend = {**_contrast(effect.trend), **adjusted}
    levels = [{"level": level, **_contrast(contrast)} for level, contrast in effect.levels]
    return {"axis": effect.axis, "levels": levels, "trend": trend}


def _contrast(contrast: Contrast) -> Json:
    return {
        "value": percent(contrast.value),
        "low": percent(contrast.low),
        "high": percent(contrast.high),
        "p": rounded_p(contrast.p),
    }


def _comparison(adjusted: AdjustedComparison) -> Json:
    comparison, difference = adjusted.comparison, adjusted.comparison.difference
    return {
        "model": comparison.model,
        "benchmark": comparison.benchmark,
        "metric": comparison.metric,
        "first": comparison.first,
        "second": comparison.second,
        "cells": comparison.cells,
        "difference": percent(difference.value),
        "low": percent(difference.low),
        "high": percent(difference.high),
        "p": rounded_p(difference.p),
        "problems": difference.problems,
        "pairs": difference.pairs or None,
        "note": comparison.note or None,
        "p_holm": rounded_p(adjusted.p_holm),
        "p_bh": rounded_p(adjusted.p_bh),
    }


_NO_SETTING: Mapping[str, Any] = dict.fromkeys(("setting", "value", "low", "high", "kept_tokens_mean"))


def _choice(choice: Choice) -> Json:
    return {
        **_chosen(choice.by_memory, choice),
        "model": choice.model,
        "benchmark": choice.benchmark,
        "candidates": choice.candidates,
        "plateau": choice.members,
        "by_time": {**_chosen(choice.by_time, choice), "tied": choice.tied_by_time} if choice.by_time else None,
        "vacuous": choice.vacuous,
        "margin": percent(choice.margin),
        **_loss(choice.loss, "loses"),
        "shown": choice.shown,
        "tied": choice.tied,
        "losses": [
            {
                "setting": str(choice.settings[setting]),
                **_loss(loss, "loses"),
                "shown": loss.shown,
                "broken": loss.broken,
            }
            for setting, loss in (choice.losses or {}).items()
        ],
        "nearest": _nearest(choice),
    }


def _loss(loss: Loss | None, name: str) -> Json:
    if loss is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: percent(loss.value), f"{name}_low": percent(loss.low), f"{name}_high": percent(loss.high)}


def _nearest(choice: Choice) -> Json | None:
    """The setting that the fewest problems more would show, and how many."""
    if choice.nearest is None or choice.shown:
        return None
    setting, more = choice.nearest
    return {"setting": str(setting), "more_problems": more}


def _pooled(effect: PooledEffect) -> Json:
    levels = [
        {"level": level, "difference": percent(contrast.value), "low": _limit(contrast.low),
         "high": _limit(contrast.high), "p": rounded_p(contrast.p)}
        for level, contrast in effect.levels
    ]  # fmt: skip
    pooled = {
        "axis": effect.axis,
        "over": effect.over,
        "p": rounded_p(effect.p),
        "adjusted_p": rounded_p(effect.adjusted_p),
    }
    return {**pooled, "levels": levels, "maps": effect.maps or None, "below": list(effect.below) or None}


def _limit(value: float) -> float | None:
    return percent(value) if math.isfinite(value) else None


def _chosen(cell: Cell | None, choice: Choice) -> Json:
    if cell is None:
        return dict(_NO_SETTING)
    against = choice.against.get(cell.setting.id, {})
    return {
        "setting": str(cell.setting),
        **estimate_json(cell.estimate),
        "may_lose": percent(choice.may_lose.get(cell.setting.id)),
        "kept_tokens_mean": rounded(kv_tokens_of(cell), 3),
        "kept_tokens_measured": cell.mean_kv_tokens is not None,
        "seconds_mean": rounded(cell.seconds_mean, 4),
        "beside": [{"setting": str(baseline), **_contrast(contrast)} for baseline, contrast in against.items()],
    }
