"""What `kvatlas check` says: do maps agree, which cells conflict, which reading fits a published mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import Map
from kvatlas.figures.style import difference, percent
from kvatlas.report import description_json as numbers
from kvatlas.report.description import p_text, rounded_p
from kvatlas.stats.estimates.pass_at_1 import LEVEL
from kvatlas.stats.pairs.agreement import Agreement, MeanCheck, agreement, fit_to_mean, which_fits


@dataclass(frozen=True)
class Check:
    """Two sets of maps by name, how they agree, and how each fits a mean; `right` is the one that alone fits it."""

    first: str
    second: str
    axes: tuple[str, str]
    tolerance: float
    agreement: Agreement
    fits: Mapping[str, MeanCheck]
    right: str | None


def check_maps(given: Mapping[str, Sequence[Map]], means: Sequence[Map] | None, tolerance: float) -> Check:
    """Compare two sets of maps by name, and each with mean maps; KvatlasError where there is nothing to compare."""
    (first, mine), (second, theirs) = given.items()
    fits = {name: fit_to_mean(maps, means, tolerance) for name, maps in given.items()} if means is not None else {}
    axes = mine[0].axes[0][0], mine[0].axes[1][0]
    return Check(first, second, axes, tolerance, agreement(mine, theirs, tolerance), fits, which_fits(fits))


def to_json(check: Check) -> dict[str, Any]:
    """The document of `kvatlas check --json`; percent scale, unknown values null.

    `agree`, `common` cells, `conflicts` (with both values), the `largest` difference, `p` of "both measure the same";
    `mean`: by name how many cells fit, and `right`, the one that fits in all of them.
    """
    compared = check.agreement
    fits = {
        name: {"checked": fit.checked, "fitting": fit.fitting, "largest": numbers.percent(fit.largest)}
        for name, fit in check.fits.items()
    }
    return {
        "first": check.first,
        "second": check.second,
        "agree": not compared.conflicts,
        "common": compared.common,
        "conflicts": [
            {
                "model": conflict.model,
                "benchmark": conflict.benchmark,
                **dict(zip(check.axes, conflict.coord, strict=True)),
                "first": numbers.percent(conflict.first),
                "second": numbers.percent(conflict.second),
            }
            for conflict in compared.conflicts
        ],
        "largest": numbers.percent(compared.largest),
        "tolerance": numbers.percent(check.tolerance),
        "p": None if compared.p is None else rounded_p(compared.p),
        "mean": fits or None,
        "right": check.right,
    }


def as_text(check: Check) -> str:
    """The check as sentences, with a table of the conflicting cells."""
    compared, conflicts = check.agreement, check.agreement.conflicts
    if conflicts:
        lines = [
            f"The maps conflict in {len(conflicts)} of {compared.common} common cells, by up to "
            f"{percent(compared.largest)} points; A is {check.first}, B is {check.second}."
        ]
    else:
        points = f"{numbers.percent(check.tolerance):g} points"
        lines = [f"The maps agree: none of their {compared.common} common cells differs by more than {points}."]
    if compared.p is not None and conflicts:
        than = "more than" if compared.p < LEVEL else "no more than"
        lines.append(
            f"As two separate measurements they would differ by {than} sampling noise gives (p {p_text(compared.p)}, "
            "binomial bound); as two readings of one map they cannot both be right."
        )
    for name, fit in check.fits.items():
        distance = f"largest distance {percent(fit.largest, 2)} points"
        lines.append(f"{name} fits the mean in {fit.fitting} of {fit.checked} cells ({distance}).")
    if check.right:
        wrong = check.second if check.right == check.first else check.first
        lines.append(f"So {check.right} is right and {wrong} is not: 1 of 2 agrees with the mean everywhere.")
    elif check.fits:
        whole = sum(fit.fitting == fit.checked for fit in check.fits.values())
        lines.append(f"The mean does not tell which of the 2 is right: {whole} of them fit it in every cell.")
    return "\n".join([*lines, *(["", *_table(check)] if conflicts else [])]) + "\n"


def _table(check: Check) -> list[str]:
    rows = [
        f"| {conflict.model} | {conflict.benchmark} | {conflict.coord[0]} | {conflict.coord[1]} | "
        f"{percent(conflict.first)} | {percent(conflict.second)} | {difference(conflict.first - conflict.second)} |"
        for conflict in check.agreement.conflicts
    ]
    return [
        f"| Model | Benchmark | {check.axes[0]} | {check.axes[1]} | A | B | A - B |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
