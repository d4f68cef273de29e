"""The tables of docs/findings/error-rates.md: the worst design of each claim, from the documents that measured it.

    python bench/error_rates.py      # prints the rows; `bench/audit.py` looks for them in the page

Of calibration.json the worst of a part's designs, of blind_designs.json the worst of the designs that judge a claim. In
simulations `±` is one standard error; of many designs the worst is partly chance.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PAGES = ("docs/findings/error-rates.md",)
Json = dict[str, Any]

#: Claims of calibration.json: what is claimed and promised, group and part, the measure, and words for its designs.
CALIBRATED = (
    ("limit of a loss, right and wrong answers", "5 %", "final", "exact", "highest error", "exact sums"),
    ("the same, traces of one problem as units, all alike", "5 %", "final", "traces", "highest error", "exact sums"),
    ("the same, with gains and losses", "5 %", "final", "traces_of_three_values", "highest error", ""),
    ("the same, spreads that were searched for the worst", "5 %", "final", "scan", "highest error", ""),
    ("recommended setting breaks the margin", "5 %", "final", "recommendation", "highest error", "exact sums"),
    ("the same, simulated", "5 %", "final", "sequences", "highest kept_but_breaks", ""),
    ("the worst of these, drawn again", "5 %", "again", "sequences", "highest kept_but_breaks", ""),
    ("interval of Pass@1 holds the truth", "95 %", "final", "pass_at_1", "lowest coverage", ""),
    ("interval of pass@k", "95 %", "final", "pass_at_k", "lowest coverage", ""),
    ("interval of a mean over benchmarks", "95 %", "final", "means_over_benchmarks", "lowest coverage", ""),
    ("interval of a difference of two settings", "95 %", "final", "two_settings", "lowest coverage", ""),
    ("interval of a difference of two policies", "95 %", "final", "policies", "lowest coverage", ""),
    ("L0 of a decay with depth", "95 %", "final", "depths", "lowest coverage", ""),
    ("settings are not exchangeable, where they are", "5 %", "final", "maps", "highest false_alarm_exchangeable", ""),
    ("the same, with a shared trunk", "5 %", "final", "maps", "highest false_alarm_trunk", ""),
    ("the same, over several maps", "5 %", "final", "permutation", "highest false_alarm_exchangeable", ""),
    ("the same, where only means are equal", "none", "final", "maps", "highest false_alarm_unlike", ""),
)
#: Claims of blind_designs.json: what is claimed and promised, the name of the error, and how the designs' names begin.
BLIND = (
    ("`*` of any setting, these problems", "5 %", "* any setting", ""),
    ("`**` of any setting, problems like these", "5 %", "** any setting", ""),
    ("the same with declared looks", "5 %", "* any setting", "looks_"),
    ("`!` of any setting, these problems", "5 %", "! any setting", ""),
    ("`!!` of any setting, problems like these", "5 %", "!! any setting", ""),
    ("joint limits, these problems", "5 %", "TP joint limit", ""),
    ("joint limits, problems like these", "5 %", "PLT joint limit", ""),
    ("recommended setting, these problems", "5 %", "proven_cheapest (TP)", ""),
    ("recommended setting, problems like these", "5 %", "deployable (PLT)", ""),
    ("any of many pairs after Holm", "5 %", "TP pairs, any adjusted p", ""),
    ("any level of an axis", "5 %", "TP levels of an axis", ""),
    ("any line on windows at equal memory", "5 %", "TP equal memory, any line of a map", ""),
)

#: Claims of chain_designs.json: what is claimed and promised, the name of the error, and the designs that are meant; of
#: none all but those of another row, which read a run several times or have two chances to be wrong.
ALONE = ("looks", "extensions", "two_models")
CHAINS = (
    ("`*` of any setting, these problems", "5 %", "* any setting", ()),
    ("the same with declared looks", "5 %", "* any setting", ("looks",)),
    ("the same, extended twice without them", "10 %", "* any setting", ("extensions",)),
    ("`**` of any setting, problems like these", "5 %", "** any setting", ()),
    ("`!` of any setting, these problems", "5 %", "! any setting", ()),
    ("`!!` of any setting, problems like these", "5 %", "!! any setting", ()),
    ("recommended setting, these problems", "5 %", "proven_cheapest (TP)", ()),
    ("recommended setting, problems like these", "5 %", "deployable (PLT)", ()),
    ("of two models one wrong `**`", "5 % each", "** any setting", ("two_models",)),
    ("the gate keeps what loses more", "5 %", "keeps", ()),
    ("the gate says of less that it loses", "5 %", "loses", ()),
)
#: Designs that broke a promise and were mended: their first draws are not those of today's methods.
MENDED = ("copies_10", "copies_48", "gate:copies_10", "gate:copies_48", "gate:duplicates")


def read(name: str) -> Json:
    document: Json = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return document


def lines() -> list[str]:
    """Return the rows of the table."""
    calibration = read("calibration")
    groups = {**calibration, "again": read("calibration_again")["final"]}
    rows = []
    for claim, promised, group, part, measure, kind in CALIBRATED:
        found = groups[group][part]
        worst = found["worst"][measure]
        percent = 100 * worst["value"]
        # Of a part's designs some judge other claims.
        judged = [row for row in found["rows"] if row.get(measure.split(maxsplit=1)[1]) is not None]
        count = "the design" if len(judged) == 1 else f"{len(judged)} designs"
        error = ""
        if not kind:
            kind = f"{found['rounds']:,} rounds each"
            error = f" ± {100 * math.sqrt(worst['value'] * (1 - worst['value']) / found['rounds']):.1f}"
        rows.append(f"| {claim} | {promised} | {percent:.1f}{error} % | {worst['design']} | {count}, {kind} |")

    rows += _of_full_samples()
    designs = read("blind_designs")["designs"]
    for claim, promised, name, start in BLIND:
        judged = {
            design: found["errors"][name]
            for design, found in designs.items()
            if name in found["errors"] and design.startswith(start)
        }
        worst_design = max(judged, key=lambda design: judged[design]["percent"])
        worst = judged[worst_design]
        # An error that never came is given with a rule of thumb for its own, not with 0.
        error = f" ± {worst['error']:.1f}" if worst["percent"] else ""
        rows.append(
            f"| {claim} | {promised} | {worst['percent']:.1f}{error} % | {worst_design} "
            f"| {len(judged)} blind designs, {worst['rounds']} rounds of this one |"
        )
    return rows


def chain_lines() -> list[str]:
    """Return the rows of the table of chains; both draws of a design count, unless it was mended between them."""
    document = read("chain_designs")
    draws: dict[str, list[Json]] = {}
    for part in ("designs", "again"):
        for name, found in document[part].items():
            if part == "again" or name not in MENDED:
                draws.setdefault(name, []).append(found["errors"])

    rows = []
    for claim, promised, error, names in CHAINS:
        judged = {}
        for name, found in draws.items():
            counts = [of_draw[error] for of_draw in found if error in of_draw]
            if counts and (name in names if names else name not in ALONE):
                rounds = sum(count["rounds"] for count in counts)
                wrong = sum(round(count["percent"] * count["rounds"] / 100) for count in counts)
                judged[name] = (wrong / rounds, rounds)
        worst = max(judged, key=lambda name: judged[name][0])
        share, rounds = judged[worst]
        deviation = f" ± {100 * math.sqrt(share * (1 - share) / rounds):.1f}" if share else ""
        count = "the design" if names else f"{len(judged)} designs"
        design = worst.removeprefix("gate:")
        rows.append(f"| {claim} | {promised} | {100 * share:.1f}{deviation} % | {design} | {count}, {rounds} rounds |")
    return rows


def _of_full_samples() -> list[str]:
    """Return the rows of limits where the full cache is sampled more often than the settings."""
    document = read("full_samples")
    worst = max(document["exact"], key=lambda row: row["error"])
    claim = "limit of a loss, a trace against the mean of two of the full cache"
    kind = f"{len(document['exact'])} designs, exact sums"
    found = [f"| {claim} | 5 % | {100 * worst['error']:.1f} % | {worst['design']} | {kind} |"]
    judged = [row for row in document["simulated"] if row["times"] > 1]
    worst = max(judged, key=lambda row: row["error"])
    percent = f"{100 * worst['error']:.1f} ± {100 * worst['standard_error']:.1f} %"
    kind = f"{len(judged)} designs, {document['rounds']:,} rounds each"
    return [*found, f"| the same, of two, four, or one and a half | 5 % | {percent} | {worst['design']} | {kind} |"]


def every_line() -> list[str]:
    """Return the rows of all tables of the page that documents measured."""
    return [*lines(), *chain_lines()]


if __name__ == "__main__":
    print("\n".join(every_line()))
