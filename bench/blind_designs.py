"""Judge the promises of `kvatlas describe` on hostile designs with known truth, without knowledge of its methods.

A design says what problems are like, how often the full cache and each setting solve them, and what else happens to
the traces. Each round draws outcomes, puts them into a run, and compares the verdicts with the truth of both claims:
the problems that were run (TP), and the population from which the problems come (PLT). A row of the document is the
share of rounds in which a verdict is wrong (`error`) or right and useful (`power`).

    python bench/blind_designs.py --rounds 300 --out bench/results/blind_designs.json
    python bench/blind_designs.py --only rare_kind small_benchmark_loses --rounds 2000
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from common import arguments, keep
from kvatlas.core import Claim, Setting
from kvatlas.report.result import Result, analyse
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import LossFamily
from kvatlas.stats.table import TraceNumbers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.stored import store_outcomes

MARGIN = 0.03
BUDGET = 96
#: The prompt tokens of a stored trace.
PROMPT = 50
FULL = Setting.from_parameters("full")
CLAIMS = {"TP": Claim.THESE, "PLT": Claim.LIKE}
#: Two losses that differ by less are equal: a setting exactly at the margin makes both verdicts wrong.
EXACT = 1e-9


@dataclass(frozen=True)
class Grid:
    """The settings of a run: every policy with every window and ratio."""

    policies: tuple[str, ...] = ("random",)
    windows: tuple[int, ...] = (8,)
    ratios: tuple[float, ...] = (0.5,)

    @property
    def cells(self) -> list[tuple[str, int, float]]:
        return list(product(self.policies, self.windows, self.ratios))

    @property
    def settings(self) -> list[Setting]:
        return [
            Setting.from_parameters(policy, kv_budget=BUDGET, local_window=window, ratio=ratio)
            for policy, window, ratio in self.cells
        ]

    @property
    def kept_tokens(self) -> np.ndarray:
        """The tokens after a compression by the rule that orders the tests."""
        return np.array([window + int(ratio * (BUDGET - window) + EXACT) for _, window, ratio in self.cells])

    @property
    def stays_tokens(self) -> np.ndarray:
        """The tokens after a compression of a stored trace: its prompt, the window, and a share of the rest."""
        sizes = [PROMPT + window + int(ratio * (BUDGET - PROMPT - window) + EXACT) for _, window, ratio in self.cells]
        return np.array(sizes)


#: Chances to be right [1 + settings, problems] by benchmark; the first row is the full cache.
Chances = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Problems:
    """The problems of a round and the population that they come from: [1 + settings] mean chances by benchmark."""

    chances: Chances
    population: Chances | None = None


@dataclass(frozen=True)
class Design:
    """A way to draw runs. `draw` makes the problems of a round, `spoil` changes their outcomes (NaN: missing)."""

    about: str
    sizes: Mapping[str, int]
    samples: int
    grid: Grid
    draw: Callable[[np.random.Generator], Problems]
    coupling: str = "independent"
    spoil: Callable[[np.random.Generator, np.ndarray], np.ndarray] | None = None
    #: The samples at each reading of the run, if it is read more than once: declared looks, or else extensions.
    stages: tuple[int, ...] = ()
    are_looks: bool = True
    #: The number of the first sample that wrote the same text as each sample.
    copied_from: tuple[int, ...] = ()
    compressions: int = 2
    #: The rows to read: losses always, and pairs of policies, levels of axes, windows at equal memory.
    rows: tuple[str, ...] = ()
    #: Anything that is proven is an error.
    is_void: bool = False
    is_benign: bool = False

    @property
    def effort(self) -> int:
        """The factor by which this design has fewer rounds, because each takes longer."""
        if len(self.grid.cells) == 1:
            return 2 if self.stages else 1
        return 4


# -- outcomes ----------------------------------------------------------------------------------------------------------


def sample_outcomes(rng: np.random.Generator, chances: np.ndarray, design: Design, samples: int) -> np.ndarray:
    """Return grades [1 + settings, problems, samples] of 0 and 1."""
    rows, problems = chances.shape
    if design.coupling == "independent":
        uniform = rng.random((rows, problems, samples))
    else:
        # The full cache and the settings share their random numbers, or have opposite ones.
        uniform = np.repeat(rng.random((1, problems, samples)), rows, axis=0)
        if design.coupling == "opposite":
            uniform[0] = 1 - uniform[0]
    if design.copied_from:
        uniform = uniform[..., list(design.copied_from)]
    grades = (uniform < chances[..., None]).astype(float)
    return grades if design.spoil is None else design.spoil(rng, grades)


class StoredRun:
    """A stored run whose outcomes are replaced in memory, so that a round needs no new store."""

    def __init__(self, folder: Path, design: Design, samples: int, claim: str, extensions: int = 0) -> None:
        self.design, self.samples, self.claim = design, samples, claim
        self.spec = {"looks": list(design.stages)} if design.stages and design.are_looks else {}
        self.extensions = extensions
        shape = {name: np.ones((1 + len(design.grid.cells), size, samples)) for name, size in design.sizes.items()}
        self.template = self.store(folder, shape)

    def store(self, folder: Path, grades: Mapping[str, np.ndarray]) -> Result:
        """Store grades as a run, and open it."""
        outcomes = {
            setting: {name: rows[number] for name, rows in grades.items()}
            for number, setting in enumerate([FULL, *self.design.grid.settings])
        }
        store_outcomes(
            folder,
            outcomes,
            compressions=dict.fromkeys(self.design.grid.settings, self.design.compressions),
            copies=bool(self.design.copied_from) and len(set(self.design.copied_from)) == 1,
            extensions=self.extensions,
            claim=CLAIMS[self.claim].value,
            lose_at_most=100 * MARGIN,
            **self.spec,
        )
        return analyse([folder], partial=True)

    def read(self, grades: Mapping[str, np.ndarray]) -> Result:
        """Return the result of a run with these grades."""
        table = self.template.opened_runs[0].traces
        parts = [grades[cell.benchmark][self._row(cell.setting)] for cell in table.manifest.expected]
        digests = None
        if len(set(self.design.copied_from)) > 1:
            digests = [
                table.records["token_digest"][span].reshape(shape)[:, list(self.design.copied_from)].reshape(-1)
                for span, shape in zip(table.spans, table.shapes, strict=True)
            ]
        return with_outcomes(self.template, parts, digests)

    def _row(self, setting: Setting) -> int:
        return [FULL, *self.design.grid.settings].index(setting)


def with_outcomes(template: Result, parts: Sequence[np.ndarray], digests: Sequence[np.ndarray] | None = None) -> Result:
    """Return the result of a stored run with other grades of its cells (NaN: missing), and digests of their texts."""
    data = template.opened_runs[0]
    values = np.concatenate([part.reshape(-1) for part in parts])
    is_missing = np.isnan(values)
    table = copy.copy(data.traces)
    table.records = data.traces.records.copy()
    table.numbers = TraceNumbers(table.records, {})
    table.records["correct"] = np.where(is_missing, 0, values)
    table.records["progress"] = values
    for name, (kind, _) in table.records.dtype.fields.items():
        table.records[name][is_missing] = np.nan if kind.kind == "f" else np.zeros((), kind)
    if digests is not None:
        table.records["token_digest"] = np.concatenate(digests)
    return replace(template, sources=(replace(data, traces=table),))


# -- truth and verdicts ------------------------------------------------------------------------------------------------


def benchmark_mean(chances: Chances) -> np.ndarray:
    """Return the mean chance of each row: over problems, then over benchmarks."""
    return np.mean([rows.mean(axis=-1) for rows in chances.values()], axis=0)


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


def judge_pairs(result: Result, design: Design, truths: Mapping[str, np.ndarray], note: Counts) -> None:
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


def judge_levels(result: Result, design: Design, truths: Mapping[str, np.ndarray], note: Counts, claim: str) -> None:
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


def judge_memory(result: Result, design: Design, truths: Mapping[str, np.ndarray], note: Counts, claim: str) -> None:
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


def judge_t_pairs(
    grades: Mapping[str, np.ndarray], design: Design, truths: Mapping[str, np.ndarray], note: Counts
) -> None:
    """Compare the first two policies by t-tests of problems, and of traces."""
    policies = np.array([policy for policy, _, _ in design.grid.cells])
    first, second = (policies == policy for policy in design.grid.policies[:2])
    for claim_name, truth in truths.items():
        means, variances = [], []
        for rows in grades.values():
            difference = np.nanmean(rows[1:][first], axis=0) - np.nanmean(rows[1:][second], axis=0)
            units = difference.reshape(-1) if claim_name == "TP" else np.nanmean(difference, axis=1)
            means.append(units.mean())
            variances.append(units.var(ddof=1) / len(units))
        value, error = np.mean(means), np.sqrt(np.sum(variances)) / len(grades)
        true = truth[1:][first].mean() - truth[1:][second].mean()
        note.error(f"t-test, {claim_name} pairs", abs(value - true) > 1.96 * error)
        if abs(true) > EXACT:
            note.power(f"t-test, {claim_name} pairs", abs(value) > 1.96 * error)


def judge_t_tests(
    grades: Mapping[str, np.ndarray], design: Design, truths: Mapping[str, np.ndarray], note: Counts
) -> None:
    """Do the same by t-tests, for the power and the errors beside: of traces (TP) and of problems (PLT)."""
    for claim_name, truth in truths.items():
        losses = truth[0] - truth[1:]
        values, variances = np.zeros(len(losses)), np.zeros(len(losses))
        for rows in grades.values():
            lost = rows[:1] - rows[1:]
            units = lost.reshape(len(lost), -1) if claim_name == "TP" else np.nanmean(lost, axis=2)
            values += np.nanmean(units, axis=1) / len(grades)
            variances += np.nanvar(units, axis=1, ddof=min(1, units.shape[1] - 1)) / units.shape[1] / len(grades) ** 2
        freedom = sum(size * (design.samples if claim_name == "TP" else 1) - 1 for size in design.sizes.values())
        level = 0.05 / len(design.grid.policies)
        kept = values + stats.t.ppf(1 - level, freedom) * np.sqrt(variances) <= MARGIN
        broken = values - stats.t.ppf(0.95, freedom) * np.sqrt(variances) > MARGIN
        too_much, within = losses > MARGIN - EXACT, losses < MARGIN + EXACT
        if too_much.any():
            note.error(f"t-test, {claim_name} kept", (kept & too_much).any())
        if within.any():
            note.error(f"t-test, {claim_name} broken", (broken & within).any())
        if (losses < MARGIN - EXACT).any():
            note.power(f"t-test, {claim_name} kept", kept[losses < MARGIN - EXACT].mean())
        if (losses > MARGIN + EXACT).any():
            note.power(f"t-test, {claim_name} broken", broken[losses > MARGIN + EXACT].mean())


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


# -- one design --------------------------------------------------------------------------------------------------------


def judge(name: str, design: Design, rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """Draw a design's rounds and return the shares of wrong and right verdicts."""
    note = Counts()
    rounds = -(-rounds // design.effort)
    began = time.perf_counter()
    stages = design.stages or (design.samples,)
    extensions = [0] * len(stages) if design.are_looks else range(len(stages))
    ids = [setting.id for setting in design.grid.settings]
    claims = ("TP", "PLT") if set(design.rows) & {"levels", "memory"} or "choice" in design.rows else ("TP",)
    runs = {
        (claim, stage): StoredRun(folder / f"{name} {claim} {stage}", design, stage, claim, extension)
        for claim in claims
        for stage, extension in zip(stages, extensions, strict=True)
    }
    for number in range(rounds):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
        problems = design.draw(rng)
        truths = {"TP": benchmark_mean(problems.chances)}
        if problems.population is not None:
            truths["PLT"] = benchmark_mean({name: mean[:, None] for name, mean in problems.population.items()})
        grades = {
            benchmark: sample_outcomes(rng, chances, design, design.samples)
            for benchmark, chances in problems.chances.items()
        }
        for (claim, stage), run in runs.items():
            seen = {benchmark: rows[..., :stage] for benchmark, rows in grades.items()}
            result = run.read(seen)
            if number == 0:
                check_stored(run, folder / f"{name} {claim} {stage} check", seen, result)
            if claim == "TP":
                (family,) = (one for (_, names), one in result.losses[0].items() if names == frozenset(design.sizes))
                judge_losses(family, ids, truths, note, is_void=design.is_void)
                if "pairs" in design.rows:
                    judge_pairs(result, design, truths, note)
            if claim in truths:
                if "choice" in design.rows:
                    judge_choice(next(iter(result.choices), None), ids, truths, note, claim, is_void=design.is_void)
                if "levels" in design.rows:
                    judge_levels(result, design, truths, note, claim)
                if "memory" in design.rows:
                    judge_memory(result, design, truths, note, claim)
        judge_t_tests(grades, design, truths, note)
        if "pairs" in design.rows and design.spoil is None:
            judge_t_pairs(grades, design, truths, note)
        note.end_round()
    return {
        "about": design.about,
        "benign": design.is_benign,
        "problems": dict(design.sizes),
        "samples": list(design.stages) or design.samples,
        "settings": len(design.grid.cells),
        **note.document(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def check_stored(run: StoredRun, folder: Path, grades: Mapping[str, np.ndarray], result: Result) -> None:
    """Raise AssertionError unless a run that is stored with these grades has the verdicts of the run in memory."""
    if len(set(run.design.copied_from)) > 1:
        return
    stored = run.store(folder, grades)
    for asked in ("recommendation", "comparisons", "effects"):
        ours, theirs = result.to_dict()[asked], stored.to_dict()[asked]
        assert str(ours) == str(theirs), (asked, ours, theirs)


# -- the designs -------------------------------------------------------------------------------------------------------

#: The share of a kind of problems, the chance of the full cache, and that of the settings (one for all, or each).
Kind = tuple[float, float, Any]


def mixture(sizes: Mapping[str, int], grid: Grid, kinds: Mapping[str, list[Kind]], *, fixed: bool = False) -> Any:
    """Return a `draw`: each problem is of a random kind; with `fixed` each kind has its share of the problems."""

    def draw(rng: np.random.Generator) -> Problems:
        chances, population = {}, {}
        for name, size in sizes.items():
            shares = np.array([share for share, _, _ in kinds[name]])
            table = np.array(
                [[full, *np.broadcast_to(settings, len(grid.cells))] for _, full, settings in kinds[name]], dtype=float
            )
            if fixed:
                kind = np.repeat(np.arange(len(shares)), np.rint(shares * size).astype(int))
            else:
                kind = rng.choice(len(shares), size, p=shares)
            chances[name] = table[kind].T
            population[name] = shares @ table
        return Problems(chances, None if fixed else population)

    return draw


def plain(
    about: str, sizes: Any, samples: int, kinds: Any, grid: Grid = Grid(), *, fixed: bool = False, **more: Any
) -> Design:
    """Return a design of kinds of problems; kinds without benchmarks are those of each."""
    by_benchmark = kinds if isinstance(kinds, dict) else dict.fromkeys(sizes, kinds)
    return Design(about, sizes, samples, grid, mixture(sizes, grid, by_benchmark, fixed=fixed), **more)


def lost_goes_missing(rng: np.random.Generator, grades: np.ndarray) -> np.ndarray:
    """A trace of a setting that is wrong where the full cache is right is missing."""
    is_lost = (grades[:1] == 1) & (grades == 0)
    return np.where(is_lost, np.nan, grades)


def gained_goes_missing(rng: np.random.Generator, grades: np.ndarray) -> np.ndarray:
    """A trace of a setting that is right where the full cache is wrong is missing."""
    is_gained = (grades[:1] == 0) & (grades == 1)
    return np.where(is_gained, np.nan, grades)


def full_goes_missing(rng: np.random.Generator, grades: np.ndarray) -> np.ndarray:
    """A trace of the full cache is missing where it is right and the first setting is wrong."""
    spoiled = grades.copy()
    spoiled[0][(grades[0] == 1) & (grades[1] == 0)] = np.nan
    return spoiled


def first_policy_goes_missing(rng: np.random.Generator, grades: np.ndarray) -> np.ndarray:
    """Wrong traces of the first half of the settings are missing."""
    spoiled = grades.copy()
    half = 1 + (len(grades) - 1) // 2
    spoiled[1:half][grades[1:half] == 0] = np.nan
    return spoiled


ONE = Grid()
UNEQUAL = {"A": 8, "B": 198}
FEW = {"A": 8, "B": 40}
SIX = Grid(("random", "h2o", "window", "dynts", "snapkv", "knorm"))
SIXTEEN = Grid(("random", "h2o"), (8, 32), (0.1, 0.3, 0.5, 0.7))
PAIRS = Grid(("random", "h2o"), (8, 32), (0.1, 0.5))
TRIPLE = Grid(("random", "h2o", "dynts"), (8, 32), (0.1, 0.5))
TABLE = Grid(("random", "h2o", "dynts"), (8,), (0.1, 0.5))
LEVELS = Grid(("random",), (8, 16, 32), (0.1, 0.5))
MEMORY = Grid(("random",), (8, 24, 40), (0.1, 0.4, 0.7))
LOOKS = (1, 2, 4, 8, 16)


def by_policy(grid: Grid, *chances: float) -> list[float]:
    return [chances[grid.policies.index(policy)] for policy, _, _ in grid.cells]


def by_window(grid: Grid, *chances: float) -> list[float]:
    return [chances[grid.windows.index(window)] for _, window, _ in grid.cells]


def by_order(grid: Grid, *chances: float) -> list[float]:
    """Return chances of the settings from the one that keeps most to the one that keeps least; the last is repeated."""
    order = np.argsort(np.argsort(-grid.kept_tokens, kind="stable"), kind="stable")
    return [chances[min(place, len(chances) - 1)] for place in order]


def memory_kinds(chance: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> list[Kind]:
    """Return hard and easy problems, whose chance under a setting is scaled by a function of kept tokens and window."""
    windows = np.array([window for _, window, _ in MEMORY.cells])
    scale = chance(MEMORY.stays_tokens, windows)
    return [(0.3, 0.5, 0.5 * scale), (0.7, 0.95, 0.95 * scale)]


def designs() -> dict[str, Design]:
    """Return the designs by name."""
    mixed = [(0.2, 0.4, 0.4), (0.3, 0.8, 0.8), (0.5, 1.0, 1.0)]
    alike, middle = [(1.0, 1.0, 0.97)], [(1.0, 0.5, 0.47)]
    collapse = [(0.03, 1.0, 0.0), (0.97, 1.0, 1.0)]
    rare_gain = [(0.05, 0.0, 1.0), (0.95, 1.0, 1 - 0.08 / 0.95)]
    both = [(0.5, 1.0, 0.5), (0.5, 0.5, 0.94)]
    skewed = {
        "A": [(1.0, 1.0, by_policy(PAIRS, 0.94, 1.0))],
        "B": [(1.0, 1.0, by_policy(PAIRS, 1.0, 0.94))],
    }
    skewed_kinds = [(0.04, 1.0, by_policy(PAIRS, 0.0, 0.96)), (0.96, 1.0, by_policy(PAIRS, 1.0, 0.96))]
    skewed_levels = {
        "A": [(1.0, 1.0, by_window(LEVELS, 0.94, 1.0, 1.0))],
        "B": [(1.0, 1.0, by_window(LEVELS, 1.0, 0.94, 0.94))],
    }
    level_kinds = [
        (0.04, 1.0, by_window(LEVELS, 0.0, 0.96, 0.96)),
        (0.96, 1.0, by_window(LEVELS, 1.0, 0.96, 0.96)),
    ]
    skewed_memory = {
        "A": [(1.0, 1.0, by_window(MEMORY, 0.94, 1.0, 0.94))],
        "B": [(1.0, 1.0, by_window(MEMORY, 1.0, 0.94, 1.0))],
    }
    choice, pairs, levels, memory = ("choice",), ("pairs",), ("levels",), ("memory",)
    return {
        # Marks of one setting that loses exactly the margin.
        "alike": plain("every trace is lost with 3 %", {"A": 98}, 1, alike),
        "alike_samples": plain("every trace is lost with 3 %", {"A": 25}, 4, alike),
        "alike_few_problems": plain("every trace is lost with 3 %", {"A": 4}, 32, alike),
        "middle": plain("full at 50 %, each trace apart", {"A": 60}, 8, middle),
        "middle_common": plain("full at 50 %, shared random numbers", {"A": 60}, 8, middle, coupling="common"),
        "middle_opposite": plain("full at 50 %, opposite random numbers", {"A": 60}, 8, middle, coupling="opposite"),
        "small_benchmark_loses": plain(
            "all of the loss is on 8 of 206 problems", UNEQUAL, 4, {"A": [(1.0, 1.0, 0.94)], "B": [(1.0, 1.0, 1.0)]}
        ),
        "small_loses_large_gains": plain(
            "8 problems lose 12 points, 198 gain 6", UNEQUAL, 4, {"A": [(1.0, 1.0, 0.88)], "B": [(1.0, 0.9, 0.96)]}
        ),
        "large_benchmark_loses": plain(
            "all of the loss is on 198 of 206 problems", UNEQUAL, 4, {"A": [(1.0, 1.0, 1.0)], "B": [(1.0, 1.0, 0.94)]}
        ),
        "small_benchmark_gains": plain(
            "8 problems gain 6 points, 198 lose 12", UNEQUAL, 4, {"A": [(1.0, 0.94, 1.0)], "B": [(1.0, 1.0, 0.88)]}
        ),
        "rare_kind": plain("3 % of problems collapse", {"A": 98}, 4, collapse),
        "rare_kind_30": plain("3 % of problems collapse, few problems", {"A": 30}, 4, collapse),
        "rare_kind_small": plain(
            "6 % of the small benchmark collapse",
            UNEQUAL,
            4,
            {"A": [(0.06, 1.0, 0.0), (0.94, 1.0, 1.0)], "B": [(1.0, 1.0, 1.0)]},
        ),
        "rare_kind_fixed": plain(
            "2 of 40 problems lose 60 points, on these problems",
            {"A": 40},
            4,
            [(0.05, 1.0, 0.4), (0.95, 1.0, 1.0)],
            fixed=True,
        ),
        "rare_gain": plain("5 % of problems are gained, the rest lose", {"A": 40}, 4, rare_gain),
        "gains_beside_losses": plain("half lose 50 points, half gain 44", {"A": 40}, 4, both),
        "small": plain("three problems, two samples", {"A": 3}, 2, collapse),
        "single": plain("one problem, 128 samples", {"A": 1}, 128, alike),
        # Many settings at the margin.
        "many_alike": plain("16 settings at the margin, all alike", {"A": 25}, 4, alike, SIXTEEN, rows=choice),
        "many_middle": plain("16 settings at the margin, full at 50 %", {"A": 60}, 4, middle, SIXTEEN, rows=choice),
        "many_policies": plain("one setting of six policies at the margin", {"A": 40}, 4, alike, SIX, rows=choice),
        "many_kinds": plain("16 settings at the margin by rare kinds", {"A": 100}, 2, collapse, SIXTEEN, rows=choice),
        "gate_open": plain(
            "the settings that keep most lose nothing, all others the margin",
            {"A": 25},
            8,
            [(1.0, 1.0, by_order(SIXTEEN, 1.0, 1.0, 1.0, 1.0, 0.97))],
            SIXTEEN,
            rows=choice,
        ),
        # Missing traces.
        "lost_missing": plain("lost traces are missing, at the margin", {"A": 50}, 4, alike, spoil=lost_goes_missing),
        "lost_missing_much": plain(
            "lost traces are missing, 10 points lost", {"A": 50}, 8, [(1.0, 1.0, 0.9)], spoil=lost_goes_missing
        ),
        "full_missing": plain(
            "traces of the full cache are missing where it won",
            {"A": 60},
            8,
            [(1.0, 0.9, 0.87)],
            spoil=full_goes_missing,
        ),
        "gained_missing": plain(
            "gained traces are missing", {"A": 60}, 8, [(1.0, 0.5, 0.47)], spoil=gained_goes_missing
        ),
        "policy_missing": plain(
            "wrong traces of the first policy are missing",
            {"A": 60},
            4,
            mixed,
            PAIRS,
            spoil=first_policy_goes_missing,
            rows=(*pairs, *levels),
        ),
        # Copies.
        "copies": plain("16 samples of one text", {"A": 20}, 16, alike, copied_from=(0,) * 16),
        "half_copies": plain("16 samples of two texts", {"A": 20}, 16, alike, copied_from=(0,) * 8 + (8,) * 8),
        # Looks, and stopping when something is proven.
        "looks_alike": plain("looks, every trace is lost with 3 %", {"A": 25}, 16, alike, stages=LOOKS),
        "looks_middle": plain("looks, full at 50 %", {"A": 40}, 16, middle, stages=LOOKS),
        "looks_kinds": plain("looks, 3 % of problems collapse", {"A": 98}, 16, collapse, stages=LOOKS),
        "looks_pairs": plain(
            "looks, policies and levels are equal",
            {"A": 20},
            8,
            mixed,
            PAIRS,
            stages=(1, 2, 4, 8),
            rows=(*choice, *pairs, *levels),
        ),
        "extended_alike": plain("extended until proven", {"A": 25}, 16, alike, stages=LOOKS, are_looks=False),
        "extended_middle": plain(
            "extended until proven, full at 50 %", {"A": 40}, 16, middle, stages=LOOKS, are_looks=False
        ),
        # Nothing to prove.
        "floor": plain("full at 2 %, settings at 0", {"A": 100}, 8, [(1.0, 0.02, 0.0)], rows=choice, is_void=True),
        "floor_equal": plain("full and settings at 2 %", {"A": 200}, 8, [(1.0, 0.02, 0.02)], rows=choice, is_void=True),
        "nothing": plain("full at 0", {"A": 200}, 8, [(1.0, 0.0, 0.0)], rows=choice, is_void=True),
        "not_compressed": plain(
            "no trace was compressed", {"A": 200}, 8, [(1.0, 0.9, 0.9)], rows=choice, is_void=True, compressions=0
        ),
        # Pairs of policies and levels of axes that are equal.
        "pairs_equal": plain("policies are equal", {"A": 30}, 4, mixed, TRIPLE, rows=pairs),
        "pairs_table": plain("settings of a table are equal", {"A": 30}, 4, mixed, TABLE, rows=pairs),
        "pairs_skewed": plain("policies fail on different benchmarks", FEW, 4, skewed, PAIRS, rows=pairs),
        "pairs_kinds": plain("one policy collapses on a kind", {"A": 60}, 4, skewed_kinds, PAIRS, rows=pairs),
        "levels_equal": plain("levels are equal", {"A": 30}, 4, mixed, LEVELS, rows=levels),
        "levels_skewed": plain("levels fail on different benchmarks", FEW, 2, skewed_levels, LEVELS, rows=levels),
        "levels_kinds": plain("one level collapses on a kind", {"A": 60}, 2, level_kinds, LEVELS, rows=levels),
        # Windows at equal memory.
        "memory_flat": plain("all settings are equal", {"A": 60}, 2, mixed, MEMORY, rows=memory),
        "memory_skewed": plain("windows fail on different benchmarks", FEW, 2, skewed_memory, MEMORY, rows=memory),
        "memory_only": plain(
            "only memory matters",
            {"A": 100},
            2,
            memory_kinds(lambda kept, _: 0.5 + 0.5 * (kept - 60) / 36),
            MEMORY,
            rows=memory,
        ),
        "memory_cliff": plain(
            "a cliff of memory",
            {"A": 100},
            2,
            memory_kinds(lambda kept, _: np.where(kept < 80, 0.5, 1.0)),
            MEMORY,
            rows=memory,
        ),
        "memory_window": plain(
            "only the window matters",
            {"A": 100},
            2,
            memory_kinds(lambda _, window: 1.0 - 0.008 * window),
            MEMORY,
            rows=memory,
        ),
        "memory_both": plain(
            "memory helps, windows hurt",
            {"A": 100},
            2,
            memory_kinds(lambda kept, window: 0.6 + 0.4 * (kept - 60) / 36 - 0.006 * window),
            MEMORY,
            rows=memory,
        ),
        # Benign: what is found where it is there.
        "benign_kept": plain("no setting loses", {"A": 200}, 8, mixed, PAIRS, rows=choice, is_benign=True),
        "benign_kept_common": plain(
            "no setting loses, shared random numbers, one point lost",
            {"A": 200},
            8,
            [(0.5, 0.8, 0.79), (0.5, 1.0, 0.99)],
            ONE,
            coupling="common",
            is_benign=True,
        ),
        "benign_broken": plain(
            "every setting loses 10 points", {"A": 60}, 4, [(0.4, 0.6, 0.5), (0.6, 1.0, 0.9)], PAIRS, is_benign=True
        ),
        "benign_differ": plain(
            "policies and levels differ by 5 points",
            {"A": 100},
            4,
            [
                (0.4, 0.6, [0.55, 0.55, 0.6, 0.6, 0.5, 0.5, 0.55, 0.55]),
                (0.6, 0.95, [0.9, 0.9, 0.95, 0.95, 0.85, 0.85, 0.9, 0.9]),
            ],
            PAIRS,
            rows=(*pairs, *levels),
            is_benign=True,
        ),
    }


def main() -> None:
    """Judge the designs that the options name, all of them by default."""
    options = arguments(__doc__, rounds=300, seed=0, only=[""])
    judged = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, design in designs().items():
            if not any(options.only) or name in options.only:
                judged[name] = judge(name, design, options.rounds, options.seed, Path(folder))
                print(name, judged[name], file=sys.stderr, flush=True)
    keep(options, designs=judged)


if __name__ == "__main__":
    main()
