"""The result of a gate: all that is known of two sides, as sentences and as plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvatlas.core import NO_ANSWERS, NOT_ENDED, Claim, percent
from kvatlas.gates.judgement import EXIT_CODES, Judgement, LossLimits, Verdict
from kvatlas.gates.outcomes import AnswerName, AnswerTexts, Side
from kvatlas.gates.pairing import PairedAnswers
from kvatlas.text import counted, fixed, percent_text, points_text, visible

#: Problems that the text names.
NAMED = 5
_OF_CLAIM = {
    Claim.THESE: "on these problems, however often they are sampled",
    Claim.LIKE: "for problems like these",
}


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
class JudgedChange:
    """Two sides, their pairs, and the verdict.

    `str` gives its text, notebooks show it; `to_dict` gives the data of `kvatlas gate --json`.
    """

    before: Side
    after: Side
    pairs: PairedAnswers
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
        for task in self.pairs.tasks:
            before = task.before.fingerprints
            after = task.after.fingerprints
            # A fingerprint of 0 is that of an answer without a text.
            if not (before.all() and after.all() and (before == after).all()):
                return False
        return True

    @cached_property
    def changed(self) -> list[ChangedProblem]:
        """The problems whose score changed, the greatest loss first."""
        problems = []
        for task in self.pairs.tasks:
            is_paired = ~np.isnan(task.losses)
            changes = np.where(is_paired, abs(task.losses), 0.0)
            before = np.where(is_paired, task.before.scores, 0.0).sum(1)
            after = np.where(is_paired, task.after.scores, 0.0).sum(1)

            for row in np.flatnonzero(changes.any(1)).tolist():
                # The sample of the texts: the one that changed most.
                column = int(changes[row].argmax())
                problems.append(
                    ChangedProblem(
                        task.task,
                        task.problems[row],
                        float(before[row]),
                        float(after[row]),
                        int(is_paired[row].sum()),
                        (task.before.name_of(row, column), task.after.name_of(row, column)),
                    )
                )

        return sorted(problems, key=lambda problem: problem.after - problem.before)

    def texts(
        self, names: Collection[AnswerName]
    ) -> tuple[dict[AnswerName, AnswerTexts], dict[AnswerName, AnswerTexts]]:
        """Return question and text of answers on both sides, as far as the logs have them."""
        return dict(self.before.texts(names)), dict(self.after.texts(names))

    def side_data(self, index: int) -> dict[str, Any]:
        """Return what is known of one side, 0 before and 1 after: its shares and its answers by their ending."""
        side = (self.before, self.after)[index]
        right = (self.judgement.before, self.judgement.after)[index]
        truncated = 0
        no_answer = 0
        missing = 0
        for task in self.pairs.tasks:
            answers = (task.before, task.after)[index]
            truncated += answers.ended(NOT_ENDED)
            no_answer += answers.ended(NO_ANSWERS)
            missing += int(np.isnan(answers.scores).sum())

        return {
            "name": side.name,
            "kind": side.kind,
            "right": percent(right),
            "truncated": truncated if side.endings_known else None,
            "no_answer": no_answer,
            "missing": missing,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data; shares are in percent, losses in points."""
        judgement = self.judgement
        decides = judgement.limits[judgement.claim]
        is_on_these = judgement.claim is Claim.THESE

        limits: dict[str, Any] = {}
        for claim in Claim:
            of_claim = judgement.limits.get(claim)
            if of_claim is None:
                limits[claim.value] = {"refused": judgement.refused}
                continue
            limits[claim.value] = {
                **_limits_data(of_claim),
                "units": of_claim.units,
                "p_kept": of_claim.p_kept,
                "p_broken": of_claim.p_broken,
                "kept": of_claim.high <= judgement.margin,
                "broken": of_claim.low > judgement.margin,
            }

        tasks = [
            {
                "task": task.task,
                "verdict": task.verdict.value,
                "problems": task.problems,
                "samples": task.samples,
                "before": percent(task.before),
                "after": percent(task.after),
                "lost": task.lost,
                "gained": task.gained,
                **_limits_data(task.limits[judgement.claim]),
            }
            for task in judgement.tasks
        ]

        length = None
        if judgement.length is not None:
            length = {
                "unit": self.before.length_unit,
                "change": round(judgement.length.value, 4),
                "low": round(judgement.length.low, 4),
                "high": round(judgement.length.high, 4),
            }

        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "margin": percent(judgement.margin),
            "claim": judgement.claim.value,
            "unit": "pair of answers" if is_on_these else "problem",
            "units": decides.units,
            "before": self.side_data(0),
            "after": self.side_data(1),
            "problems": sum(task.problems for task in judgement.tasks),
            "lost": judgement.lost,
            "gained": judgement.gained,
            "missing": percent(self.pairs.missing_share),
            **_limits_data(decides),
            "limits": limits,
            "tasks": tasks,
            "reasons": list(judgement.reasons),
            "needed": {
                "samples": judgement.needed if is_on_these else None,
                "problems": judgement.needed_other if is_on_these else judgement.needed,
            },
            "length": length,
            "same_texts": self.same_texts,
            "differences": [difference._asdict() for difference in self.pairs.differences],
            "changed": [
                {"task": item.task, "problem": item.problem, "before": item.before, "after": item.after}
                for item in self.changed
            ],
            "notes": list(self.pairs.notes),
        }

    def __str__(self) -> str:
        """Return the text as Markdown: headline, sentences, table of tasks, what differs, notes."""
        paragraphs = [f"# {gate_headline(self)}", gate_text(self), task_table(self.judgement)]

        lost = [problem for problem in self.changed if problem.after < problem.before]
        if lost:
            named = ", ".join(f"{problem.task} {problem.problem}" for problem in lost[:NAMED])
            more = f" and {len(lost) - NAMED:,} more" if len(lost) > NAMED else ""
            paragraphs.append(f"Lost most: {named}{more}.")
        if self.pairs.differences:
            paragraphs.append("What else differs between the sides:")
            paragraphs.append("\n".join(f"- {line}" for line in difference_lines(self)))
        if self.pairs.notes:
            paragraphs.append("\n".join(f"- {note}" for note in note_lines(self)))
        return str(visible("\n\n".join(paragraphs)))

    _repr_markdown_ = __str__


def _limits_data(limits: LossLimits) -> dict[str, Any]:
    return {"loses": percent(limits.loss), "loses_low": percent(limits.low), "loses_high": percent(limits.high)}


# -- sentences ---------------------------------------------------------------------------------------------------------


def gate_headline(result: JudgedChange) -> str:
    """Return the verdict in a line."""
    judgement = result.judgement
    margin = f"{100 * judgement.margin:g} points"
    decides = judgement.limits[judgement.claim]
    if judgement.verdict is Verdict.KEEPS:
        return f"Keeps: loses at most {percent_text(decides.high)} points (margin {margin})"
    if judgement.verdict is Verdict.LOSES:
        names = judgement.losing_tasks
        if decides.low <= judgement.margin and names:
            return f"Loses: more than {margin} on {', '.join(names)}"
        return f"Loses: at least {percent_text(decides.low)} points (margin {margin})"
    return f"Cannot tell whether it loses more than {margin}"


def gate_text(result: JudgedChange) -> str:
    """Return the sentences on the claim that decides, on the other one, and on what would settle an open verdict."""
    judgement = result.judgement
    claim = judgement.claim
    limits = judgement.limits[claim]

    # The answers, and the limits of the claim that decides.
    problems = sum(task.problems for task in judgement.tasks)
    samples = sorted({task.samples for task in judgement.tasks})
    times = "" if samples == [1] else f", {' and '.join(map(str, samples))} samples of each"
    mean = " in the mean over tasks" if len(judgement.tasks) > 1 else ""
    words = _OF_CLAIM[claim]
    units = counted(limits.units, "pair" if claim is Claim.THESE else "problem")
    sentences = [
        f"{counted(problems, 'problem')}{times}: {percent_text(judgement.before)} % of the answers were right before "
        f"and {percent_text(judgement.after)} % after{mean}; {judgement.lost:,} answers were lost and "
        f"{judgement.gained:,} gained.",
        f"{words[:1].upper()}{words[1:]} it loses {_points_lost(limits.loss)} points, at most "
        f"{_points_lost(limits.high)} and at least {_points_lost(limits.low)} (95 %, {units}).",
    ]

    sentences += [f"Nothing is proven: {reason}." for reason in judgement.reasons]
    if len(judgement.tasks) > 1 and judgement.losing_tasks:
        names = ", ".join(judgement.losing_tasks)
        sentences.append(f"More than the margin is lost on {names} (Holm over {len(judgement.tasks)} tasks).")
    if result.pairs.differences:
        conditions = ", ".join(dict.fromkeys(item.condition for item in result.pairs.differences))
        sentences.append(f"The sides also differ in {conditions}: the verdict is on all of it together.")

    sentences.append(_other_claim(judgement))
    if judgement.verdict is Verdict.CANNOT_TELL and not judgement.reasons:
        sentences.append(_settling_sizes(judgement))

    # How answers end, and how long they are.
    before = result.side_data(0)
    after = result.side_data(1)
    clauses = []
    for name, word in (("truncated", "truncated"), ("no_answer", "without an answer"), ("missing", "missing")):
        if before[name] or after[name]:
            clauses.append(f"{word} {_count_text(before[name])} before and {_count_text(after[name])} after")
    if clauses:
        sentences.append(f"Answers: {'; '.join(clauses)}.")
    length = judgement.length
    if length is not None and result.before.length_unit == result.after.length_unit:
        unit = result.before.length_unit
        word = "longer" if length.value >= 0 else "shorter"
        sentences.append(
            f"Answers are {abs(length.value):,.0f} {unit} {word} on average (95 %: {length.low:+,.0f} to "
            f"{length.high:+,.0f})."
        )
    if result.same_texts:
        sentences.append("Both sides wrote the same texts, answer by answer.")
    return " ".join(sentences)


def _points_lost(share: float) -> str:
    return fixed(100 * share)


def _count_text(count: int | None) -> str:
    return "an unknown number" if count is None else f"{count:,}"


def _other_claim(judgement: Judgement) -> str:
    """Return a sentence on the claim that does not decide."""
    other = Claim.LIKE if judgement.claim is Claim.THESE else Claim.THESE
    limits = judgement.limits.get(other)
    if limits is None:
        return f"For these problems alone nothing is claimed: {judgement.refused}."
    if other is Claim.THESE:
        if max(task.samples for task in judgement.tasks) == 1:
            return "With one sample of each problem the limits are the same for these problems alone."
        return (
            f"On these problems, however often they are sampled, it loses at most {_points_lost(limits.high)} points."
        )
    return (
        f"For problems like these it may lose up to {_points_lost(limits.high)} points: a kind of problem that these "
        f"{limits.units:,} do not hold may fail."
    )


def _settling_sizes(judgement: Judgement) -> str:
    """Return a sentence on the samples or problems that would settle the verdict."""
    samples = max(task.samples for task in judgement.tasks)
    ways = []
    if judgement.claim is Claim.THESE:
        if judgement.needed:
            ways.append(f"about {judgement.needed:,} samples of each of these problems (now {samples})")
        if judgement.needed_other:
            ways.append(f"about {judgement.needed_other:,} problems for the claim on problems like these")
    elif judgement.needed:
        problems = sum(task.problems for task in judgement.tasks)
        ways.append(f"about {judgement.needed:,} problems (now {problems:,})")
    if not ways:
        return "The loss is so near to the margin that no practicable number of problems would tell."
    return f"If this is its loss, {', or '.join(ways)} would tell."


def task_table(judgement: Judgement) -> str:
    """Return a Markdown table of the tasks, and of their mean."""
    rows = []
    for task in judgement.tasks:
        # A name must not end its cell of the table.
        name = task.task.replace("|", "\\|").replace("\n", " ")
        rows.append(
            f"| {name} | {task.problems:,} x {task.samples} | {percent_text(task.before)} | "
            f"{percent_text(task.after)} | {task.lost:,} | {task.gained:,} | "
            f"{_loss_with_limits(task.limits[judgement.claim])} | {task.verdict.value} |"
        )

    if len(judgement.tasks) > 1:
        rows.append(
            f"| mean | {sum(task.problems for task in judgement.tasks):,} | {percent_text(judgement.before)} | "
            f"{percent_text(judgement.after)} | {judgement.lost:,} | {judgement.gained:,} | "
            f"{_loss_with_limits(judgement.limits[judgement.claim])} | {judgement.verdict.value} |"
        )

    head = "| task | problems x samples | before, % | after, % | lost | gained | loses (at least, at most) | verdict |"
    return "\n".join([head, "|---|--:|--:|--:|--:|--:|--:|---|", *rows])


def _loss_with_limits(limits: LossLimits) -> str:
    return f"{points_text(limits.loss)} ({points_text(limits.low)}, {points_text(limits.high)})"


def note_lines(result: JudgedChange) -> list[str]:
    """Return the notes as sentences."""
    return [note if note.endswith("?") else f"{note}." for note in result.pairs.notes]


def difference_lines(result: JudgedChange) -> list[str]:
    """Return a line for each condition that differs."""
    return [
        f"{item.condition}: {item.before or 'not named'} before, {item.after or 'not named'} after"
        for item in result.pairs.differences
    ]
