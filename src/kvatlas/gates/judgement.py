"""The verdict on pairs of answers: keeps, loses, or cannot tell.

The loss of a pair is the score before minus the score after, in [-1, 1]. Two claims (docs/statistics.md):

- these problems: on the problems that were asked, however often they are sampled. The unit is a pair of answers.
- problems like these: on the population that they are drawn from. The unit is a problem, the mean of its pairs.

Both use the bounded limits of `stats/numerics/bounded.py`, each one-sided at 5 %. Tasks weigh equally. A missing pair
counts as a loss of 1 in the upper limit and as a gain of 1 in the lower one.

The limits of several tasks hold together (Bonferroni); their verdicts follow Holm, which proves a little more.

"keeps": the upper limit of the mean loss is within the margin. "loses": the lower limit of the mean loss is above the
margin, or that of a task is, by Holm over the tasks; with several tasks each of these two has half of the 5 %. Both
verdicts together are wrong in at most 5 % of comparisons: a true loss is either within the margin or above it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import special

from kvatlas.core import Claim, KvatlasError, Status
from kvatlas.gates.outcomes import Side
from kvatlas.gates.pairing import AnswerGrid, PairedAnswers, TaskPairs
from kvatlas.stats.numerics.arrays import (
    LEVEL,
    Difference,
    holm,
    mean_of_known,
    means_of_clusters,
    normal_quantile,
    standard_error,
    strata_of_sizes,
    weights,
)
from kvatlas.stats.numerics.bounded import lower_limit, mean_difference
from kvatlas.stats.numerics.planning import MOST_PROBLEMS, MOST_TIMES, POWER_QUANTILE, provable_sizes
from kvatlas.stats.numerics.units import Group, joined_units, units_of_traces
from kvatlas.stats.run_data import GREEDY, LONG_TEXT, MOST_COPIED, MOST_MISSING, copied_share, copies_clause


class Verdict(StrEnum):
    """The answer of the gate."""

    KEEPS = "keeps"
    LOSES = "loses"
    CANNOT_TELL = "cannot tell"


#: The exit code of each verdict; 2 stays for errors.
EXIT_CODES = {Verdict.KEEPS: 0, Verdict.LOSES: 1, Verdict.CANNOT_TELL: 3}


@dataclass
class TaskVerdict:
    """The pairs of one task, its loss by claim, and its verdict by Holm."""

    pairs: TaskPairs
    losses: dict[Claim, Difference]
    verdict: Verdict = Verdict.CANNOT_TELL


@dataclass(frozen=True)
class Judgement:
    """The verdict on all tasks, and why: the mean loss by claim, in one-sided limits, each at its own level.

    A loss has the p-values of "it loses more than the margin" (`p_kept`) and of "it loses at most the margin"
    (`p_broken`).

    `refused` is the reason why these problems cannot be spoken of, if there is one. `needed` is a number of samples of
    each problem, or of problems, by the claim that decides: it would settle the verdict in 80 % of comparisons if the
    loss is the observed one. `reasons` say why nothing can be told whatever the limits are. `copied` is the share of
    the problems whose samples are copies of one long text.
    """

    verdict: Verdict
    claim: Claim
    margin: float
    losses: dict[Claim, Difference]
    tasks: Sequence[TaskVerdict]
    refused: str
    needed: int | None
    needed_other: int | None
    reasons: Sequence[str]
    length: Difference | None
    copied: float

    @property
    def right(self) -> tuple[float, float]:
        """The shares of right answers before and after, the means over tasks."""
        before, after = np.mean([task.pairs.right for task in self.tasks], axis=0).tolist()
        return before, after

    @property
    def changed(self) -> tuple[int, int]:
        """The numbers of pairs that lost and gained, over all tasks."""
        lost, gained = np.sum([task.pairs.changed for task in self.tasks], axis=0).tolist()
        return lost, gained

    @property
    def problems(self) -> int:
        """The number of problems of all tasks."""
        return sum(len(task.pairs.losses) for task in self.tasks)

    @property
    def losing_tasks(self) -> list[str]:
        """The tasks that lose by themselves."""
        return [task.pairs.task for task in self.tasks if task.verdict is Verdict.LOSES]


def judge_pairs(pairs: PairedAnswers, margin: float, claim: Claim | None, both_ways: bool = False) -> Judgement:
    """Return the verdict on the pairs of two sides.

    Without a claim it is that on these problems where several independent samples allow it. With `both_ways` the
    sides should be one thing: a gain above the margin counts as a loss does, and each of the two has half of the level.
    Raises KvatlasError for a claim on these problems that the samples cannot make.
    """
    copied = 0.0
    for task in pairs.tasks:
        copied = max(copied, _copied_share(task.before, pairs.before), _copied_share(task.after, pairs.after))
    refused = _dependence(pairs, claim, copied)
    if claim is Claim.THESE and refused:
        raise KvatlasError(f"No claim on these problems alone is possible: {refused}.")
    samples = max(task.losses.shape[1] for task in pairs.tasks)
    decides = claim or (Claim.THESE if samples > 1 and not refused else Claim.LIKE)
    claims = [Claim.LIKE] if refused else list(Claim)
    level = LEVEL / 2 if both_ways else LEVEL
    levels = (level / 2 if len(pairs.tasks) > 1 else level, level)
    losses = {each: _mean_loss(pairs.tasks, each, margin, levels) for each in claims}
    is_gain = both_ways and losses[decides].high < -margin

    # Where something speaks against every proof of keeping, no task keeps anything; a gain is proven all the same.
    reasons = [] if is_gain else _reasons(pairs, decides, margin)
    tasks = _task_verdicts(pairs.tasks, claims, decides, margin, levels, can_keep=not reasons)
    verdict = Verdict.CANNOT_TELL
    if not reasons:
        if is_gain or losses[decides].low > margin or any(task.verdict is Verdict.LOSES for task in tasks):
            verdict = Verdict.LOSES
        elif losses[decides].high <= margin and (not both_ways or losses[decides].low >= -margin):
            verdict = Verdict.KEEPS

    needed = None
    needed_other = None
    if verdict is Verdict.CANNOT_TELL and not reasons:
        needed = _settling_size(pairs.tasks, decides, margin, both_ways)
        if decides is Claim.THESE:
            needed_other = _settling_size(pairs.tasks, Claim.LIKE, margin, both_ways)

    return Judgement(
        verdict,
        decides,
        margin,
        losses,
        tasks,
        refused=refused,
        needed=needed,
        needed_other=needed_other,
        reasons=reasons,
        length=_length_change(pairs.tasks),
        copied=copied,
    )


def _dependence(pairs: PairedAnswers, claim: Claim | None, copied: float) -> str:
    """Return why the samples are no independent draws; "" if they are, or if there is one of each problem."""
    independents = (pairs.before.independent, pairs.after.independent)
    if False in independents:
        return GREEDY
    for task in pairs.tasks:
        if task.samples[0] != task.samples[1]:
            return f"the sides have {task.samples[0]} and {task.samples[1]} samples of a problem"
    if max(task.losses.shape[1] for task in pairs.tasks) == 1:
        return ""
    if copied > MOST_COPIED:
        return copies_clause(copied)
    if None in independents and claim is not Claim.THESE:
        return (
            "the temperature is unknown, or several logs have one seed; --claim these_problems says that the samples "
            "are independent draws"
        )
    return ""


#: Texts of fewer characters may be equal by chance.
_LONG_IN_CHARACTERS = 4 * LONG_TEXT


def _copied_share(grid: AnswerGrid, side: Side) -> float:
    """Return the share of problems on which samples are one long text; 0 where equal texts are no copies."""
    if not side.may_copy:
        return 0.0
    least = LONG_TEXT if side.length_unit == "tokens" else _LONG_IN_CHARACTERS
    return copied_share(grid.fingerprints, grid.lengths >= least)


# -- limits ------------------------------------------------------------------------------------------------------------


def _losses_by_unit(tasks: Sequence[TaskPairs], claim: Claim) -> tuple[float, Group]:
    """Return the mean loss over tasks, and the losses of all tasks by unit, missing ones at both ends."""
    by_task = []
    for task in tasks:
        # A single row, in which every unit was promised.
        losses = task.losses[None]
        promised = np.ones(losses.shape, bool)
        strata = np.zeros(len(task.losses), int)
        of_pairs = claim is Claim.THESE
        by_task.append(units_of_traces(losses, promised, strata, by_trace=of_pairs, clusters=task.clusters))
    units = joined_units(by_task)
    return float(units.means[0]), Group([0], units.lowest, units.highest, units.strata)


def _mean_loss(tasks: Sequence[TaskPairs], claim: Claim, margin: float, levels: tuple[float, float]) -> Difference:
    """Return the mean over tasks with limits at the levels of the lower and of the upper one."""
    loss, group = _losses_by_unit(tasks, claim)
    low = lower_limit(group.lowest, -1.0, 1.0, normal_quantile(levels[0]), group.strata)
    high = group.upper_limit(normal_quantile(levels[1]))
    score = group.score(margin)[0]
    p_kept = float(special.ndtr(score))
    p_broken = float(special.ndtr(-score))
    return Difference(loss, float(low[0]), float(high[0]), units=len(group.strata), p_kept=p_kept, p_broken=p_broken)


def _task_verdicts(
    tasks: Sequence[TaskPairs],
    claims: Sequence[Claim],
    decides: Claim,
    margin: float,
    levels: tuple[float, float],
    can_keep: bool,
) -> list[TaskVerdict]:
    shared = (levels[0] / len(tasks), levels[1] / len(tasks))
    verdicts = []
    for task in tasks:
        losses = {claim: _mean_loss([task], claim, margin, shared) for claim in claims}
        verdicts.append(TaskVerdict(task, losses))

    kept = holm([verdict.losses[decides].p_kept for verdict in verdicts])
    broken = holm([verdict.losses[decides].p_broken for verdict in verdicts])
    for index, verdict in enumerate(verdicts):
        if broken[index] <= levels[0]:
            verdict.verdict = Verdict.LOSES
        elif can_keep and kept[index] <= levels[1]:
            verdict.verdict = Verdict.KEEPS
    return verdicts


def _reasons(pairs: PairedAnswers, claim: Claim, margin: float) -> list[str]:
    """Return why nothing can be told: too little can be lost, or too much is missing."""
    reasons = []
    if pairs.missing_share > MOST_MISSING:
        reasons.append(f"{100 * pairs.missing_share:.0f} % of the pairs lack an answer; at most 5 % may")

    # What was right before, by the unit of the claim, bounds what can be lost.
    solved = []
    for task in pairs.tasks:
        scores = np.nan_to_num(task.before.scores)
        of_units = means_of_clusters(scores.mean(1), task.clusters)
        solved.append(scores.ravel() if claim is Claim.THESE else of_units)
    strata = strata_of_sizes([len(values) for values in solved])
    least = float(lower_limit(np.concatenate(solved), 0.0, 1.0, normal_quantile(LEVEL), strata))
    if least <= margin:
        right = float(np.concatenate(solved) @ weights(strata))
        way_out = "take easier problems" if right <= margin else "take more problems, or easier ones"
        cut = sum(task.before.count([Status.TRUNCATED]) for task in pairs.tasks)
        answers = sum(task.before.scores.size for task in pairs.tasks)
        if 2 * cut > answers:
            limit = pairs.before.token_limit or "their limit of"
            way_out = f"{cut:,} of {answers:,} were cut at {limit} tokens, allow more"
        reasons.append(
            f"before the change {100 * right:.1f} % were right, so a loss above the margin of {100 * margin:g} points "
            f"could not have been seen; {way_out}"
        )
    return reasons


# -- what would settle it ----------------------------------------------------------------------------------------------


def _settling_size(tasks: Sequence[TaskPairs], claim: Claim, margin: float, both_ways: bool = False) -> int | None:
    """Return the samples of each problem (these problems) or the problems (problems like these) that settle it.

    None if the loss is the margin itself, or if more than 20 times as many, and more than 4,000 units, are needed.
    Unlike samples, problems of another kind may be lost without having been met: a margin always needs some problems.
    """
    _, group = _losses_by_unit(tasks, claim)
    values = group.highest[0]
    strata = group.strata
    loss = float(values @ weights(strata))
    # A gain is as near to its margin as the same loss.
    loss = abs(loss) if both_ways else loss
    gap = abs(margin - loss)
    if gap < 1e-9:
        return None
    # A single problem tells nothing of the spread.
    error = float(np.nan_to_num(standard_error(values, strata), posinf=0.0))

    limits = 2 if both_ways else 1
    quantile = normal_quantile(LEVEL / limits) + POWER_QUANTILE
    times = max(1.0, (quantile * error / gap) ** 2)
    most = max(MOST_TIMES, MOST_PROBLEMS / len(values))
    if times > most:
        return None
    sizes = np.bincount(strata).tolist()
    provable = margin - max(loss, 0.0) if loss < margin else gap / (1 + loss)
    times = max(times, sum(provable_sizes(sizes, provable, limits)) / sum(sizes))

    count = len(values) if claim is Claim.LIKE else max(task.losses.shape[1] for task in tasks)
    return None if times > most else math.ceil(times * count)


# -- lengths -----------------------------------------------------------------------------------------------------------


def _length_change(tasks: Sequence[TaskPairs]) -> Difference | None:
    """Return the mean change of lengths, after minus before, with its 95 % limits by problem; None if unknown.

    The limits hold for answers up to the longest one that was seen.
    """
    changes = []
    longest = 0.0
    for task in tasks:
        before = task.before.lengths
        after = task.after.lengths
        change = mean_of_known(after) - mean_of_known(before)
        change = change[~np.isnan(change)]
        if not change.size:
            return None
        changes.append(change)
        longest = max(longest, float(np.nanmax(after)), float(np.nanmax(before)))
    if not longest:
        return None

    strata = strata_of_sizes([len(of_task) for of_task in changes])
    every = np.concatenate(changes)
    # In steps of a ten-thousandth of the longest: equal changes are counted, however many problems there are.
    contrast = mean_difference(np.round(every / longest, 4), strata)
    return Difference(float(every @ weights(strata)), longest * contrast.low, longest * contrast.high, contrast.p)
