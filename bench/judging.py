"""Verdicts on losses, choices, pairs, levels of axes and lines at equal memory, compared with a known truth.

`chain_errors.py` judges the runs of its designs with them, and counts the errors. A `design` has a `grid` with `cells`
(policy, local window, ratio); truths are the true chances [1 + cells] of the full cache and each cell, by claim.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import stats

from kvatlas.core import Claim
from kvatlas.report.result import Result
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import LossFamily

MARGIN = 0.03
CLAIMS = {"TP": Claim.THESE, "PLT": Claim.LIKE}
#: Two losses that differ by less are equal.
EXACT = 1e-9


def with_outcomes(template: Result, parts: Sequence[np.ndarray], digests: Sequence[np.ndarray] | None = None) -> Result:
    """Return the result of a stored run with other grades of its cells (NaN: missing), and digests of their texts."""
    data = template.opened_runs[0]
    values = np.concatenate([part.reshape(-1) for part in parts])
    is_missing = np.isnan(values)
    table = copy.copy(data.traces)
    table.records = data.traces.records.copy()
    table.measured = {}
    table.records["correct"] = np.where(is_missing, 0, values)
    table.records["progress"] = values
    for name, (kind, _) in table.records.dtype.fields.items():
        table.records[name][is_missing] = np.nan if kind.kind == "f" else np.zeros((), kind)
    if digests is not None:
        table.records["token_digest"] = np.concatenate(digests)
    return replace(template, sources=(replace(data, traces=table),))


def judge_losses(
    family: LossFamily,
    ids: Sequence[str],
    truths: Mapping[str, np.ndarray],
    note: Counts,
    margin: float = MARGIN,
    is_void: bool = False,
) -> None:
    """Compare marks and limits of the settings with these ids with the true losses, at the order of the truths."""
    for claim_name, claim in CLAIMS.items():
        if claim_name not in truths:
            continue
        losses = truths[claim_name][0] - truths[claim_name][1:]
        found = [family.by_setting[id_].claims.get(claim) if id_ in family.by_setting else None for id_ in ids]
        kept = np.array([one is not None and one.is_kept for one in found])
        broken = np.array([one is not None and one.is_broken for one in found])
        too_much = losses > margin - EXACT
        within = losses < margin + EXACT
        name = "*" if claim_name == "TP" else "**"
        if is_void:
            note.error(f"{name} where there is nothing to prove", kept.any())
        if too_much.any():
            note.error(f"{name} any setting", (kept & too_much).any())
        if within.any():
            note.error(f"{name.replace('*', '!')} any setting", (broken & within).any())
            note.each(f"{name.replace('*', '!')} one setting", broken & within)
        # Of a control no limit is told; its own is 1, which no loss exceeds.
        for word in ("limit", "joint_limit", "low"):
            values = np.array([np.nan if one is None else getattr(one, word) for one in found])
            missed = losses < values - EXACT if word == "low" else losses > values + EXACT
            if word == "joint_limit":
                note.error(f"{claim_name} joint limit", missed.any())
            else:
                note.each(f"{claim_name} {word}", missed)
        if (losses < margin - EXACT).any():
            note.power(name, kept[losses < margin - EXACT].mean())
        if (losses > margin + EXACT).any():
            note.power(name.replace("*", "!"), broken[losses > margin + EXACT].mean())


def judge_choice(
    choice: Choice | None,
    ids: Sequence[str],
    truths: Mapping[str, np.ndarray],
    note: Counts,
    claim: str,
    margin: float = MARGIN,
    is_void: bool = False,
) -> None:
    """Compare the recommended settings with the true losses: of the claim, and deployable of problems like these."""
    chosen = {"proven_cheapest": (choice.by_memory if choice and choice.losses else None, claim)}
    if "PLT" in truths:
        chosen["deployable"] = (choice.deployable if choice else None, "PLT")
    for name, (cell, about) in chosen.items():
        if about not in truths:
            continue
        losses = truths[about][0] - truths[about][1:]
        wrong = cell is not None and is_void
        if cell is not None:
            place = ids.index(cell.setting.id)
            wrong |= losses[place] > margin - EXACT
            of_setting = choice.losses[cell.setting.id]
            note.error("a control is recommended", of_setting.is_control)
            limit = of_setting.claims[CLAIMS[about]].limit
            note.error(f"{about} limit of the recommended", losses[place] > limit + EXACT)
        note.error(f"{name} ({about})", wrong)
        if (losses < margin - EXACT).any():
            note.power(f"{name} ({about})", cell is not None and not wrong)


def judge_pairs(result: Result, design: Any, truths: Mapping[str, np.ndarray], note: Counts) -> None:
    """Compare the pairs with the true differences: of policies over their cells, or of the settings of a table."""
    cells = design.grid.cells

    def value(truth: np.ndarray, name: str) -> float:
        """Return the true mean of what a pair names."""
        if name == "full":
            return truth[0]
        chosen = [name in (policy, f"{policy}(ratio={ratio:g})") for policy, _, ratio in cells]
        assert any(chosen), name
        return truth[1:][chosen].mean()

    for claim_name, truth in truths.items():
        missed, proven, differs, wrong_tests = [], [], [], []
        for one in result.comparisons:
            difference = value(truth, one.first) - value(truth, one.second)
            contrast = one.difference.claims.get(CLAIMS[claim_name])
            if contrast is None:
                continue
            missed.append(not contrast.low - EXACT <= difference <= contrast.high + EXACT)
            differs.append(abs(difference) > EXACT)
            proven.append((contrast.low > 0 or contrast.high < 0) and not missed[-1])
            # The adjusted p-values are of the claim of the run.
            is_wrong = abs(difference) <= EXACT or difference * one.difference.value < 0
            wrong_tests.append(is_wrong and one.difference.p_holm <= 0.05)
        if missed:
            note.error(f"{claim_name} pairs, any interval", any(missed))
            note.each(f"{claim_name} pairs, one interval", np.array(missed))
            if claim_name == "TP":
                note.error(f"{claim_name} pairs, any adjusted p", any(wrong_tests))
        if any(differs):
            note.power(f"{claim_name} pairs", np.mean(np.array(proven)[differs]))


def judge_levels(result: Result, design: Any, truths: Mapping[str, np.ndarray], note: Counts, claim: str) -> None:
    """Compare the levels of axes with the true differences from the mean of the others."""
    truth = truths[claim]
    wrong_axes, wrong_tests, rejected = [], [], []
    for effect in result.effects:
        policy = effect.over.rsplit(" | ", 1)[-1]
        place = 1 if effect.axis == "local_window" else 2
        means = {}
        for level, _ in effect.levels:
            chosen = [cell[0] == policy and cell[place] == level for cell in design.grid.cells]
            means[level] = truth[1:][chosen].mean()
        missed = []
        for level, contrast in effect.levels:
            others = np.mean([mean for name, mean in means.items() if name != level])
            missed.append(not contrast.low - EXACT <= means[level] - others <= contrast.high + EXACT)
        wrong_axes.append(any(missed))
        is_null = np.ptp(list(means.values())) < EXACT
        if is_null:
            wrong_tests.append(effect.adjusted_p <= 0.05)
        else:
            rejected.append(effect.adjusted_p <= 0.05)
    if wrong_axes:
        note.each(f"{claim} levels of an axis", np.array(wrong_axes))
    if wrong_tests:
        note.error(f"{claim} axes, any adjusted p", any(wrong_tests))
    if rejected:
        note.power(f"{claim} axes", np.mean(rejected))


def judge_memory(result: Result, design: Any, truths: Mapping[str, np.ndarray], note: Counts, claim: str) -> None:
    """Compare lines at equal memory: the setting that is proven better must be better, and keep no more tokens."""
    by_cell = dict(zip(design.grid.cells, truths[claim][1:], strict=True))
    for one in result.grids:
        memory = one.to_dict()["equal_memory"]
        if memory is None:
            continue
        wrong, right = False, False
        for line in memory["proven"]:
            better, other = (
                by_cell[one.map.policy, line[side]["local_window"], line[side]["ratio"]] for side in ("better", "other")
            )
            wrong |= better <= other + EXACT or line["better"]["stays_tokens"] > line["other"]["stays_tokens"] + 1e-3
            right |= better > other + EXACT
        note.error(f"{claim} equal memory, any line of a map", wrong)
        note.power(f"{claim} equal memory, a right line", right)


class Counts:
    """Shares of rounds by verdict. Verdicts of one round are joined over its looks: wrong once is wrong."""

    def __init__(self) -> None:
        self.errors: dict[str, list[np.ndarray]] = defaultdict(list)
        self.powers: dict[str, list[float]] = defaultdict(list)
        self.round: tuple[dict[str, np.ndarray], dict[str, float]] = ({}, {})

    def error(self, name: str, is_wrong: bool) -> None:
        self.each(name, np.array([bool(is_wrong)]))

    def each(self, name: str, are_wrong: np.ndarray) -> None:
        errors, _ = self.round
        errors[name] = errors[name] | are_wrong if name in errors else are_wrong

    def power(self, name: str, share: float) -> None:
        _, powers = self.round
        powers[name] = max(powers.get(name, 0.0), float(share))

    def end_round(self) -> None:
        errors, powers = self.round
        for name, flags in errors.items():
            self.errors[name].append(flags)
        for name, share in powers.items():
            self.powers[name].append(share)
        self.round = ({}, {})

    def document(self) -> dict[str, Any]:
        """Return the worst share of rounds in percent, its standard error, and its exact lower limit at 99 %."""
        errors = {}
        for name, flags in self.errors.items():
            wrong, rounds = int(np.sum(flags, axis=0).max()), len(flags)
            share = wrong / rounds
            # The worst of several verdicts is compared with a lower limit that allows for all of them.
            low = stats.beta.ppf(0.01 / len(flags[0]), wrong, rounds - wrong + 1) if wrong else 0.0
            errors[name] = {
                "percent": round(100 * share, 2),
                "error": round(100 * float(np.sqrt(max(share, 1 / rounds) * (1 - share) / rounds)), 2),
                "at_least": round(100 * float(low), 2),
                "rounds": rounds,
            }
        return {"errors": errors, "power": {name: round(100 * float(np.mean(x)), 1) for name, x in self.powers.items()}}
