"""What `kvatlas check` says: do maps agree, which cells conflict, which reading fits a published mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.core import Map
from kvatlas.report.description import p_text
from kvatlas.stats.pairs.agreement import Conflict, agreement, fit_to_mean, which_fits


def check_maps(given: Mapping[str, Sequence[Map]], means: Sequence[Map] | None, tolerance: float) -> dict[str, Any]:
    """The document of `kvatlas check --json` for two sets of maps by name; percent scale, unknown values null.

    `agree`, `common` cells, `conflicts` (with both values), the `largest` difference, `p` of "both measure the same";
    `mean`: by name how many cells fit, and `right`, the one that fits in all of them. Raises KvatlasError where there
    is nothing to compare.
    """
    (first, mine), (second, theirs) = given.items()
    compared = agreement(mine, theirs, tolerance)
    fits = {name: fit_to_mean(maps, means, tolerance) for name, maps in given.items()} if means is not None else {}
    return {
        "first": first,
        "second": second,
        "agree": not compared.conflicts,
        "common": compared.common,
        "conflicts": [_conflict(one, _axes(mine)) for one in compared.conflicts],
        "largest": round(100 * compared.largest, 4),
        "tolerance": round(100 * tolerance, 4),
        "p": None if compared.p is None else round(compared.p, 6),
        "mean": {
            name: {"checked": fit.checked, "fitting": fit.fitting, "largest": round(100 * fit.largest, 4)}
            for name, fit in fits.items()
        }
        or None,
        "right": which_fits(fits),
    }


def _axes(maps: Sequence[Map]) -> tuple[str, str]:
    return maps[0].axes[0][0], maps[0].axes[1][0]


def _conflict(one: Conflict, axes: tuple[str, str]) -> dict[str, Any]:
    return {
        "model": one.model,
        "benchmark": one.benchmark,
        **dict(zip(axes, one.place, strict=True)),
        "first": round(100 * one.first, 4),
        "second": round(100 * one.second, 4),
    }


def as_text(said: Mapping[str, Any]) -> str:
    """The said in sentences, with a table of the conflicting cells."""
    first, second, common = said["first"], said["second"], said["common"]
    conflicts = said["conflicts"]
    if said["agree"]:
        lines = [
            f"The maps agree: none of their {common} common cells differs by more than {said['tolerance']:g} points."
        ]
    else:
        lines = [
            f"The maps conflict in {len(conflicts)} of {common} common cells, by up to {said['largest']:.1f} points; "
            f"A is {first}, B is {second}."
        ]
    if said["p"] is not None and conflicts:
        than = "more than" if said["p"] < 0.05 else "no more than"
        lines.append(
            f"As two separate measurements they would differ by {than} sampling noise gives (p {p_text(said['p'])}, "
            "binomial bound); as two readings of one map they cannot both be right."
        )
    for name, fit in (said["mean"] or {}).items():
        lines.append(
            f"{name} fits the mean in {fit['fitting']} of {fit['checked']} cells (largest distance "
            f"{fit['largest']:.2f} points)."
        )
    if said["right"]:
        wrong = second if said["right"] == first else first
        lines.append(f"So {said['right']} is right and {wrong} is not: 1 of 2 agrees with the mean everywhere.")
    elif said["mean"]:
        lines.append(f"The mean does not tell which of the 2 is right: {_undecided(said['mean'])}.")
    if conflicts:
        lines += ["", *_table(conflicts)]
    return "\n".join(lines) + "\n"


def _undecided(fits: Mapping[str, Any]) -> str:
    whole = sum(fit["fitting"] == fit["checked"] for fit in fits.values())
    return f"{whole} of them fit it in every cell"


def _table(conflicts: Sequence[Mapping[str, Any]]) -> list[str]:
    axes = [name for name in conflicts[0] if name not in ("model", "benchmark", "first", "second")]
    rows = [
        f"| {one['model']} | {one['benchmark']} | {one[axes[0]]} | {one[axes[1]]} | {one['first']:.1f} | "
        f"{one['second']:.1f} | {one['first'] - one['second']:+.1f} |"
        for one in conflicts
    ]
    return [f"| Model | Benchmark | {axes[0]} | {axes[1]} | A | B | A - B |", "|---|---|---|---|---|---|---|", *rows]
