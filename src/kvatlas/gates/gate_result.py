"""The result of a gate: all that is known of two sides, and the same as plain data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvatlas.core import Claim, percent
from kvatlas.gates.judgement import EXIT_CODES, Judgement, Limits, TaskVerdict
from kvatlas.gates.outcomes import AnswerName, Side, Texts
from kvatlas.gates.pairing import Grid, Pairs, TaskPairs


@dataclass(frozen=True)
class ChangedProblem:
    """A problem whose number of right answers changed: scores before and after, summed over `samples`."""

    task: str
    problem: str
    before: float
    after: float
    samples: int
    names: tuple[AnswerName, AnswerName]


@dataclass(frozen=True)
class Judged:
    """Two sides, their pairs, and the verdict; `to_dict` gives the data of `kvatlas gate --json`."""

    before: Side
    after: Side
    pairs: Pairs
    judgement: Judgement

    @property
    def verdict(self) -> str:
        """One of `keeps`, `loses` and `cannot tell`."""
        return self.judgement.verdict.value

    @property
    def exit_code(self) -> int:
        """0 for keeps, 1 for loses, 3 for cannot tell."""
        return EXIT_CODES[self.judgement.verdict]

    @cached_property
    def same_texts(self) -> bool:
        """True if both sides have texts and all of them are equal."""
        return all(_are_equal(task.before, task.after) for task in self.pairs.tasks)

    @cached_property
    def changed(self) -> list[ChangedProblem]:
        """The problems whose score changed, the greatest loss first."""
        problems = []
        for task in self.pairs.tasks:
            problems += _changed_of_task(task)
        return sorted(problems, key=lambda problem: problem.after - problem.before)

    def texts(self, names: Collection[AnswerName]) -> tuple[dict[AnswerName, Texts], dict[AnswerName, Texts]]:
        """Return question and text of answers on both sides, as far as the logs have them."""
        return dict(self.before.texts(names)), dict(self.after.texts(names))

    def side_data(self, index: int) -> dict[str, Any]:
        """Return what is known of one side, 0 before and 1 after: its shares and its answers by their ending."""
        side = (self.before, self.after)[index]
        grids = [(task.before, task.after)[index] for task in self.pairs.tasks]
        right = (self.judgement.before, self.judgement.after)[index]
        return _side_data(side, grids, right)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data; shares are in percent, losses in points."""
        judgement = self.judgement
        pairs = self.pairs
        decides = judgement.limits[judgement.claim]
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "margin": percent(judgement.margin),
            "claim": judgement.claim.value,
            "unit": "pair of answers" if judgement.claim is Claim.THESE else "problem",
            "units": decides.units,
            "before": self.side_data(0),
            "after": self.side_data(1),
            "problems": sum(task.problems for task in judgement.tasks),
            "lost": judgement.lost,
            "gained": judgement.gained,
            "missing": percent(pairs.missing_share),
            **_limits_data(decides),
            "limits": {claim.value: _claim_data(judgement, claim) for claim in Claim},
            "tasks": [_task_data(task, judgement.claim) for task in judgement.tasks],
            "reasons": list(judgement.reasons),
            "needed": _needed_data(judgement),
            "length": _length_data(self),
            "same_texts": self.same_texts,
            "differences": [difference._asdict() for difference in pairs.differences],
            "changed": [
                {"task": item.task, "problem": item.problem, "before": item.before, "after": item.after}
                for item in self.changed
            ],
            "notes": list(pairs.notes),
        }


def _are_equal(before: Grid, after: Grid) -> bool:
    is_known = (before.fingerprints != 0) & (after.fingerprints != 0)
    return bool(is_known.all() and (before.fingerprints == after.fingerprints).all())


def _changed_of_task(task: TaskPairs) -> list[ChangedProblem]:
    losses = task.losses
    is_paired = ~np.isnan(losses)
    changes = np.where(is_paired, abs(losses), 0.0)
    rows = np.flatnonzero(changes.any(1))
    # The sample of the texts: the one that changed most.
    columns = changes.argmax(1)[rows].tolist()
    before = np.where(is_paired, task.before.scores, 0.0).sum(1)[rows].tolist()
    after = np.where(is_paired, task.after.scores, 0.0).sum(1)[rows].tolist()
    samples = is_paired.sum(1)[rows].tolist()
    names = task.problems
    return [
        ChangedProblem(
            task.task,
            names[row],
            before[index],
            after[index],
            samples[index],
            (task.before.name_of(row, columns[index]), task.after.name_of(row, columns[index])),
        )
        for index, row in enumerate(rows.tolist())
    ]


# -- data --------------------------------------------------------------------------------------------------------------


def _side_data(side: Side, grids: Sequence[Grid], right: float) -> dict[str, Any]:
    has_endings = side.endings_known
    return {
        "name": side.name,
        "kind": side.kind,
        "right": percent(right),
        "truncated": sum(grid.ended("truncated") for grid in grids) if has_endings else None,
        "no_answer": sum(grid.ended("no answer") for grid in grids),
        "missing": int(sum((grid.scores != grid.scores).sum() for grid in grids)),
    }


def _limits_data(limits: Limits) -> dict[str, Any]:
    return {"loses": percent(limits.loss), "loses_low": percent(limits.low), "loses_high": percent(limits.high)}


def _claim_data(judgement: Judgement, claim: Claim) -> dict[str, Any]:
    limits = judgement.limits.get(claim)
    if limits is None:
        return {"refused": judgement.refused}
    return {
        **_limits_data(limits),
        "units": limits.units,
        "p_kept": limits.p_kept,
        "p_broken": limits.p_broken,
        "kept": limits.high <= judgement.margin,
        "broken": limits.low > judgement.margin,
    }


def _task_data(task: TaskVerdict, claim: Claim) -> dict[str, Any]:
    return {
        "task": task.task,
        "verdict": task.verdict.value,
        "problems": task.problems,
        "samples": task.samples,
        "before": percent(task.before),
        "after": percent(task.after),
        "lost": task.lost,
        "gained": task.gained,
        **_limits_data(task.limits[claim]),
    }


def _needed_data(judgement: Judgement) -> dict[str, int | None]:
    these = judgement.claim is Claim.THESE
    return {
        "samples": judgement.needed if these else None,
        "problems": judgement.needed_other if these else judgement.needed,
    }


def _length_data(result: Judged) -> dict[str, Any] | None:
    length = result.judgement.length
    if length is None:
        return None
    return {
        "unit": result.before.length_unit,
        "change": round(length.value, 4),
        "low": round(length.low, 4),
        "high": round(length.high, 4),
    }
