"""Parts of a result as data: the form of `kvatlas describe --json`, in percent, unknown values None."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvatlas.columns import cell_document
from kvatlas.core import Cell, Claim, Setting, Stays, percent, rounded
from kvatlas.stats.choice import Choice, Saving, kv_tokens_of
from kvatlas.stats.controls import Changes
from kvatlas.stats.losses import LossFamily, Required
from kvatlas.stats.map_tests import Effect, EqualMemory, MapTests
from kvatlas.stats.maps import SettingTable
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.numerics.equal_memory import Pair
from kvatlas.stats.numerics.looks import ONE_LOOK
from kvatlas.stats.pairs import Comparison

Json = dict[str, Any]


def omnibus_document(tests: MapTests) -> Json:
    """Return the test of "all settings behave alike"; unknown values where it was not made."""
    if tests.omnibus is None or tests.basis is None:
        return {"statistic": None, "p": None, "method": None}
    test = tests.omnibus
    return {"statistic": rounded(test.statistic, 4), "p": rounded_p(test.p), "method": tests.basis.method}


def rounded_p(p: float | None) -> float | None:
    """Return a p-value with four digits: a small one is never 0."""
    return None if p is None or math.isnan(p) else float(f"{p:.4g}")


def contrast_document(contrast: Difference, name: str = "value") -> Json:
    """Return a difference under its name with its limits and its p-value."""
    return {**contrast.in_percent(name), "p": rounded_p(contrast.p)}


def stays_document(stays: Stays | None) -> Json:
    """Return the tokens that stay after a compression, and their share in percent."""
    if stays is None:
        return {"stays_tokens": None, "stays_share": None}
    return {
        "stays_tokens": rounded(stays.tokens, 3),
        "stays_share": percent(None if math.isnan(stays.share) else stays.share),
    }


def loss_values(loss: Difference | None) -> Json:
    """Return a loss with its interval and the limit that decides."""
    names = {"loses": "value", "loses_low": "low", "loses_high": "high", "loses_limit": "limit"}
    values = {key: percent(getattr(loss, name)) if loss else None for key, name in names.items()}
    return {**values, "loses_limit": None} if loss and loss.is_control else values


def setting_loss_document(setting: Setting, loss: Difference, family: LossFamily) -> Json:
    """Return what a setting loses against the full cache, and what it loses where it compressed."""
    among = family.among_compressed(setting.id)
    return {
        "setting": str(setting),
        "policy": setting.policy,
        **loss_values(loss),
        "p": rounded_p(loss.p),
        "shown": loss.is_kept,
        "broken": loss.is_broken,
        "joint_limit": None if loss.is_control else percent(loss.joint_limit),
        "control": loss.is_control,
        "claim": family.claim.value,
        "unit": family.claim.unit,
        "units": loss.units or None,
        "pairs": loss.pairs or None,
        "missing": loss.missing,
        # A run that is read once, after all its declared samples, has no look.
        "look": None if family.look == ONE_LOOK else {"share": family.look.share, "extensions": family.look.extensions},
        "limits": limits_document(loss, family.refused),
        "by_benchmark": {name: percent(lost) for name, lost in loss.by_benchmark.items()},
        "traces": loss.traces,
        "compressed": loss.compressed,
        "loses_where_compressed": contrast_document(among, "loses") if among else None,
    }


def limits_document(loss: Difference, refused: str = "") -> Json:
    """Return the limits of a loss by each claim, or why a claim cannot be made."""
    found: Json = {}
    for claim in Claim:
        of_claim = loss.claims.get(claim)
        if of_claim is None:
            found[claim.value] = {"refused": refused}
        else:
            found[claim.value] = {
                "low": percent(of_claim.low),
                "high": percent(of_claim.high),
                "limit": None if loss.is_control else percent(of_claim.limit),
                "joint_limit": None if loss.is_control else percent(of_claim.joint_limit),
                "p": rounded_p(of_claim.p),
                "kept": of_claim.is_kept,
                "broken": of_claim.is_broken,
            }
    return found


def required_document(required: Required) -> Json:
    """Return how many problems, and samples of these, would prove the margin."""
    return {
        "setting": str(required.setting),
        "policy": required.setting.policy,
        "problems": required.problems_now,
        "needed": required.problems,
        "samples": required.samples_now,
        "samples_needed": required.samples,
    }


def comparison_document(comparison: Comparison) -> Json:
    """Return a paired comparison: first minus second, in points."""
    names = ("model", "benchmark", "metric", "first", "second", "cells")
    return {
        **{name: getattr(comparison, name) for name in names},
        **contrast_document(comparison.difference, "difference"),
        "limits": {
            str(claim): contrast_document(contrast, "difference")
            for claim, contrast in comparison.difference.claims.items()
        },
        "problems": comparison.difference.problems,
        "pairs": comparison.difference.pairs or None,
        "note": comparison.note or None,
        "p_holm": rounded_p(comparison.difference.p_holm),
    }


#: The form of a choice without a setting.
NO_SETTING: Mapping[str, Any] = dict.fromkeys(("setting", "value", "low", "high", "kept_tokens_mean"))


def choice_document(choice: Choice) -> Json:
    """Return the recommendation for a model."""
    return {
        **chosen_document(choice.by_memory),
        "model": choice.model,
        "benchmark": choice.benchmark,
        "candidates": choice.candidates,
        "by_time": chosen_document(choice.by_time) if choice.by_time else None,
        "proven_cheapest": str(choice.by_memory.setting) if choice.by_memory else None,
        "deployable": str(choice.deployable.setting) if choice.deployable else None,
        "claim": choice.family.claim.value,
        "control": control_document(*choice.control) if choice.control else None,
        "vacuous": choice.vacuous,
        "withheld": choice.withheld or None,
        "proven": [str(setting) for setting, _ in choice.proven],
        "last_in_order": choice.is_last,
        "changes": [changes_document(one) for one in choice.changes],
        "margin": percent(choice.margin),
        **loss_values(choice.loss),
        "shown": choice.shown,
        "losses": [
            setting_loss_document(choice.settings[id_], loss, choice.family) for id_, loss in choice.losses.items()
        ],
        "provable": choice.provable.to_dict() if choice.provable else None,
        "required": required_document(choice.required) if choice.required and not choice.shown else None,
        "saving": saving_document(choice.saving),
        **ways_document(choice),
    }


def control_document(setting: Setting, loss: Difference) -> Json:
    """Return the control of a run, and whether it is proven to lose."""
    return {"setting": str(setting), **contrast_document(loss, "loses"), "seen": loss.low > 0}


def changes_document(changes: Changes) -> Json:
    """Return the changed answers of a setting to the first sample of each problem, beside the reference's."""
    return {**vars(changes), "setting": str(changes.setting), "p": rounded_p(changes.p)}


def saving_document(saving: Saving | None) -> Json | None:
    """Return what a setting saves of the full cache's memory, and of memory times written tokens, in percent."""
    if saving is None:
        return None
    document = {"memory": percent(1 - saving.memory), "work": None if saving.work is None else percent(1 - saving.work)}
    if saving.written is not None:
        document["written"] = percent(1 - saving.written)
    return document


def ways_document(choice: Choice) -> Json:
    """Return the cheapest proven setting of each way to save, where thinking is capped."""
    ways = {}
    for way in choice.ways:
        setting = None if way.cell is None else str(way.cell.setting)
        ways[way.kind] = {"candidates": way.candidates, "setting": setting, "saving": saving_document(way.saving)}
    return {"ways": ways} if ways else {}


def chosen_document(cell: Cell | None) -> Json:
    """Return a recommended cell; unknown values without one."""
    if cell is None:
        return dict(NO_SETTING)
    return {
        **cell_document(cell),
        "kept_tokens_mean": rounded(kv_tokens_of(cell), 3),
        "kept_tokens_measured": cell.number("mean_kv_tokens") is not None,
    }


def table_document(table: SettingTable) -> Json:
    """Return a table of settings: each with its value, costs and loss, and its value on each benchmark."""
    settings = []
    for row in table.rows:
        by_benchmark = {name: cell.estimate.to_dict() for name, cell in row.by_benchmark.items()}
        decided: Json = {"shown": None, "broken": None}
        if row.loss is not None:
            decided = {"shown": row.loss.is_kept, "broken": row.loss.is_broken}
        settings.append(
            {
                "name": row.name,
                **cell_document(row.cell),
                **loss_values(row.loss),
                **decided,
                "benchmarks": by_benchmark,
            }
        )
    return {
        "model": table.model,
        "benchmark": table.benchmark,
        "metric": table.metric,
        "settings": settings,
        "notes": [note.text for note in table.notes],
    }


def pooled_document(effect: Effect) -> Json:
    """Return the effect of an axis over all benchmarks."""
    return {
        "axis": effect.axis,
        "over": effect.over,
        "p": rounded_p(effect.p),
        "adjusted_p": rounded_p(effect.adjusted_p),
        "levels": [
            {
                "level": level,
                **contrast_document(contrast, "difference"),
                **stays_document(effect.stays.get(level)),
            }
            for level, contrast in effect.levels
        ],
        "maps": effect.maps or None,
        "below": list(effect.below) or None,
    }


def memory_document(memory: EqualMemory) -> Json:
    """Return local windows at equal memory as data."""
    estimate = memory.estimate
    return {
        "pairs": len(memory.tests),
        "proven": [_pair_document(memory, pair) for pair in memory.proven],
        "strongest": _pair_document(memory, memory.best) if memory.best else None,
        "estimate": None
        if estimate is None
        else {
            "wide": memory.windows[estimate.wide],
            "narrow": memory.windows[estimate.narrow],
            "low_tokens": round(estimate.low, 3),
            "high_tokens": round(estimate.high, 3),
            **contrast_document(estimate.difference, "difference"),
        },
        "nothing_in_common": [list(pair) for pair in memory.apart],
    }


def _pair_document(memory: EqualMemory, pair: Pair) -> Json:
    difference = memory.tests[pair]
    sides = {}
    for name, index in zip(("better", "other"), pair, strict=True):
        place = dict(zip(memory.axes, memory.coords[index], strict=True))
        sides[name] = {**place, "stays_tokens": round(float(memory.tokens[index]), 3)}
    return {
        **sides,
        "better_keeps_more_on": {name: round(tokens, 3) for name, tokens in memory.keeps_more(pair).items()},
        **contrast_document(difference, "difference"),
        "adjusted_p": rounded_p(difference.p_holm),
    }
