"""Parts of a result as data: the form of `kvatlas describe --json`, in percent, unknown values None."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.columns import cell_document
from kvatlas.core import Cell, Claim, Setting, Stays, percent, rounded
from kvatlas.stats.choice import Choice, Saving, kv_tokens_of
from kvatlas.stats.losses import LossFamily, Required
from kvatlas.stats.map_tests import Effect
from kvatlas.stats.maps import SettingTable
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.numerics.looks import ONE_LOOK
from kvatlas.stats.pairs import Comparison

Json = dict[str, Any]


def rounded_p(p: float | None) -> float | None:
    """Return a p-value with four digits: a small one is never 0."""
    return None if p is None or math.isnan(p) else float(f"{p:.4g}")


def contrast_document(contrast: Difference, name: str = "value") -> Json:
    """Return a difference under its name with its limits and its p-value."""
    return {**contrast.in_percent(name), "p": rounded_p(contrast.p)}


def stays_document(stays: Stays | None) -> Json:
    """Return the tokens that stay after a compression, and their share in percent."""
    tokens = None if stays is None else round(stays.tokens, 3)
    share = None if stays is None or math.isnan(stays.share) else percent(stays.share)
    return {"stays_tokens": tokens, "stays_share": share}


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
    found: Json = {claim.value: {"refused": refused} for claim in Claim}
    for claim, of_claim in loss.claims.items():
        found[claim] = {
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
    difference = comparison.difference
    return {
        **{name: getattr(comparison, name) for name in names},
        **contrast_document(difference, "difference"),
        "limits": {str(claim): contrast_document(one, "difference") for claim, one in difference.claims.items()},
        "problems": difference.problems,
        "pairs": difference.pairs or None,
        "note": comparison.note or None,
        "p_holm": rounded_p(difference.p_holm),
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
        "changes": [{**vars(one), "setting": str(one.setting), "p": rounded_p(one.p)} for one in choice.changes],
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


def recommendation_document(choices: Sequence[Choice]) -> Json:
    """Return the recommendation for the first model, unknown values without one, and that of every model."""
    documents = [choice_document(choice) for choice in choices]
    return {**(documents[0] if documents else NO_SETTING), "all": documents}


def control_document(setting: Setting, loss: Difference) -> Json:
    """Return the control of a run, and whether it is proven to lose."""
    return {"setting": str(setting), **contrast_document(loss, "loses"), "seen": loss.low > 0}


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
        loss = row.loss
        decided = {"shown": loss.is_kept if loss else None, "broken": loss.is_broken if loss else None}
        values = {**cell_document(row.cell), **loss_values(loss), **decided}
        by_benchmark = {name: cell.estimate.to_dict() for name, cell in row.by_benchmark.items()}
        settings.append({"name": row.name, **values, "benchmarks": by_benchmark})
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
            {"level": level, **contrast_document(contrast, "difference"), **stays_document(effect.stays.get(level))}
            for level, contrast in effect.levels
        ],
        "maps": effect.maps or None,
        "below": list(effect.below) or None,
    }
