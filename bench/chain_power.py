"""The power of chains, one for each window, beside one order a policy with the control beside it: what is proven.

    python bench/chain_power.py --rounds 20 --out bench/results/chain_power.json

Of a surface of losses over 4 windows and 5 ratios the mean number of proven settings, and the mean tokens of the
cheapest proven one (the whole budget where none is). Of the demo, and of fresh problems, the settings that get a frame.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import arguments, keep
from kvatlas.core import Claim, Setting
from kvatlas.report.result import analyse
from kvatlas.stats.losses import LossFamily
from kvatlas.stats.numerics.against_reference import losses, losses_of_units
from kvatlas.stats.orders import Orders, TestedSetting, chains_of_settings, kept_by_rule
from outcomes import write_run

RESULTS = Path(__file__).with_name("results")
BUDGET = 96
WINDOWS = (8, 16, 32, 64)
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: The studied settings, and one of the control, which loses so much that its order ends there.
SETTINGS = {
    "dynts": [
        Setting.from_parameters("dynts", kv_budget=BUDGET, local_window=window, ratio=ratio)
        for window in WINDOWS
        for ratio in RATIOS
    ],
    "random": [Setting.from_parameters("random", kv_budget=BUDGET, local_window=64, ratio=0.9)],
}
#: Units of the claim, and the margin.
RUNS = {"100, 5 points": (100, 0.05), "240, 3 points": (240, 0.03), "400, 3 points": (400, 0.03)}
#: Share of the units whose outcome changes by chance, lost as often as gained.
CHANGED = 0.03
#: The loss by window, ratio and kept tokens.
SURFACES: dict[str, Callable[[int, float, float], float]] = {
    "tokens decide, a cliff": lambda window, ratio, tokens: 0.2 if tokens < 50 else 0.0,
    "half a point, then steep": lambda window, ratio, tokens: 0.005 if tokens > 60 else 0.005 + (60 - tokens) / 200,
    "wide windows lose": lambda window, ratio, tokens: 0.3 * window / 64 * (1 - ratio),
    "the ratio alone decides": lambda window, ratio, tokens: 0.25 if ratio < 0.3 else 0.0,
    "narrow windows lose": lambda window, ratio, tokens: 0.04 if window < 16 else 0.0,
    "a slope by tokens": lambda window, ratio, tokens: 0.06 * (1 - tokens / BUDGET),
    "the dearest setting loses": lambda window, ratio, tokens: 0.05 if tokens > 90 else 0.0,
}


def orders(policies: Sequence[str], units: int, margin: float, *, are_chains: bool) -> Orders:
    """Return the chains of the studied policy, or one order for each policy, as where units are too few for more."""
    tested = [TestedSetting(one, None) for policy in policies for one in SETTINGS[policy]]
    return chains_of_settings(tested, [units if are_chains else 1], margin)


def draw(rng: np.random.Generator, units: int, lost: np.ndarray) -> np.ndarray:
    """Return differences [settings, units] to the full cache; half of the random numbers are common to all settings."""
    own = rng.random((len(lost), units))
    uniform = np.where(rng.random(units) < 0.5, rng.random(units), own)
    return np.where(uniform < lost[:, None] + CHANGED / 2, -1.0, np.where(uniform > 1 - CHANGED / 2, 1.0, 0.0))


def power(name: str, run: str, rounds: int) -> dict[str, Any]:
    """Return the mean of proven settings and of the tokens of the cheapest one, before chains and with them."""
    units, margin = RUNS[run]
    studied = SETTINGS["dynts"]
    tokens = np.array([kept_by_rule(one) for one in studied], float)
    lost = [
        SURFACES[name](one.values["local_window"], one.values["ratio"], kept)
        for one, kept in zip(studied, tokens, strict=True)
    ]
    everywhere = np.array([*lost, 1 / 3])
    ids = [one.id for of_policy in SETTINGS.values() for one in of_policy]
    found = {}
    for way, policies in (("before", ("dynts", "random")), ("chains", ("dynts",))):
        rows = [
            list(map(ids.index, of_chain)) for of_chain in orders(policies, units, margin, are_chains=way == "chains")
        ]
        counts, cheapest = [], []
        for number in range(rounds):
            rng = np.random.default_rng([zlib.crc32(f"{name} {run}".encode()), number])
            differences = draw(rng, units, everywhere)[: max(map(max, rows)) + 1]
            of_round = losses(differences, np.zeros(units, int), margin, rows)
            kept = np.array([one is not None and one.is_kept for one in of_round[: len(studied)]])
            counts.append(kept.sum())
            cheapest.append(tokens[kept].min() if kept.any() else BUDGET)
        found[way] = {"proven": round(float(np.mean(counts)), 1), "tokens": round(float(np.mean(cheapest)), 1)}
    return found


def framed(family: LossFamily, margin: float, *, are_chains: bool) -> list[str]:
    """Return the settings of `dynts` that are proven, for problems like these, with the tokens that they keep."""
    assert family.paired is not None
    ids = list(family.settings)
    chains = family.orders[Claim.LIKE]
    if not are_chains:
        tested = [TestedSetting(one, None) for one in family.settings.values()]
        chains = chains_of_settings(tested, [1], margin)
    rows = [[ids.index(id_) for id_ in of_chain] for of_chain in chains]
    found = losses_of_units(family.paired.units(Claim.LIKE).negated(), margin, rows)
    kept = [one for id_, one in family.settings.items() if (of_id := found[ids.index(id_)]) and of_id.is_kept]
    kept.sort(key=lambda one: kept_by_rule(one) or 0)
    return [f"{one.values['local_window']}/{one.values['ratio']:g}" for one in kept if one.policy == "dynts"]


def demo(margin: float = 0.05) -> dict[str, Any]:
    """Return the framed settings, window/ratio, of the demo's models on its problems and on fresh ones."""
    outcomes = json.loads((RESULTS / "fresh_problems.json").read_text())["outcomes"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("demo", "fresh"):
            write_run(outcomes[name][0], Path(folder) / name, *outcomes[name][1:])
            result = analyse([Path(folder) / name], lose_at_most=100 * margin)
            for choice in result.choices:
                assert choice.family is not None
                ways = {"before": False, "chains": True}
                found[f"{choice.model.removeprefix('embedded:')}, {name}"] = {
                    way: framed(choice.family, margin, are_chains=are_chains) for way, are_chains in ways.items()
                }
    return found


def lines(document: dict[str, Any]) -> list[str]:
    """Return the rows of the page."""
    rows = []
    for name, of_runs in document["surfaces"].items():
        cells = []
        for of_ways in of_runs.values():
            before, chains = of_ways["before"], of_ways["chains"]
            cells.append(f"{before['proven']}, {before['tokens']:.0f} → {chains['proven']}, {chains['tokens']:.0f}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    for name, of_ways in document["demo"].items():
        before, chains = (", ".join(of_ways[way]) or "none" for way in ("before", "chains"))
        rows.append(f"| {name} | {before} | {chains} |")
    return rows


def main() -> None:
    """Measure all surfaces, and the demo."""
    options = arguments(__doc__, rounds=20)
    surfaces = {name: {run: power(name, run, options.rounds) for run in RUNS} for name in SURFACES}
    keep(options, surfaces=surfaces, demo=demo())


if __name__ == "__main__":
    main()
