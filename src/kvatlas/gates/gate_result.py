"""The result of a gate: all that is known of two sides, as sentences and as plain data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvatlas.core import Claim, Status, percent
from kvatlas.gates.cards import ENTRIES, UNKNOWN, is_drawn
from kvatlas.gates.judgement import EXIT_CODES, Judgement, TaskVerdict, Verdict
from kvatlas.gates.outcomes import AnswerName, AnswerTexts
from kvatlas.gates.pairing import PairedAnswers, TaskPairs
from kvatlas.stats.numerics.planning import MOST_PROBLEMS
from kvatlas.stats.run_data import MOST_COPIED, copies_clause
from kvatlas.text import counted, digits_apart, limit_text, margin_text, percent_text, signed, visible

#: Problems that the text names.
NAMED = 5
#: Lost answers whose texts are read for a likely cause, and the share of the answers from which a cause is named.
_READ = 200
_MANY = 0.05
#: Answers that did not end, and those that ended without an answer.
TRUNCATED = [status for status in Status if not status.ended]
NO_ANSWER = [status for status in Status if status.ended and not status.answered]
#: The names of a loss and its limits in data.
_LOSES = ("loses", "loses_low", "loses_high")
_OF_CLAIM = {
    Claim.THESE: "On these problems, however often they are sampled",
    Claim.LIKE: "For problems like these",
}


@dataclass(frozen=True)
class ChangedProblem:
    """A problem whose number of right answers changed: scores before and after, summed over `samples`.

    `names` are those of the answer that changed most, before and after.
    """

    task: str
    problem: str
    before: float
    after: float
    samples: int
    names: Sequence[AnswerName]


@dataclass(frozen=True)
class JudgedChange:
    """The pairs of two sides, and the verdict.

    `str` gives its text, notebooks show it; `to_dict` gives the data of `kvatlas gate --json`.
    """

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
        pairs = [(task.before.fingerprints, task.after.fingerprints) for task in self.pairs.tasks]
        # A fingerprint of 0 is that of an answer without a text.
        return all(before.all() and np.array_equal(before, after) for before, after in pairs)

    @cached_property
    def equal_answers(self) -> str:
        """In words what is equal of all answers, "" if a score or a text differs or is missing."""
        has_texts = any(task.before.fingerprints.any() or task.after.fingerprints.any() for task in self.pairs.tasks)
        if any((task.losses != 0).any() for task in self.pairs.tasks) or (has_texts and not self.same_texts):
            return ""
        count = sum(task.before.scores.size for task in self.pairs.tasks)
        return f"all {count:,} answers are equal{'' if has_texts else ' by their scores'}"

    @cached_property
    def regraded(self) -> int:
        """The number of answers of equal texts whose scores differ."""
        count = 0
        for task in self.pairs.tasks:
            if task.counts_answers:
                before = task.before.fingerprints
                is_same = (before != 0) & (before == task.after.fingerprints)
                count += int((is_same & ~np.isnan(task.losses) & (task.losses != 0)).sum())
        return count

    @cached_property
    def warnings(self) -> list[str]:
        """The sentences to read before the verdict: other sampling, likely causes, and what is unknown."""
        found = []
        sides = (self.pairs.before, self.pairs.after)
        is_drawn_apart = all(side.kind == "endpoint" and is_drawn(side.cards.values()) for side in sides)
        if is_drawn_apart and self.same_texts and self.judgement.copied <= MOST_COPIED:
            found.append("All texts are equal, and none is greedy: is it one server, or is the option not at work?")
        if self.pairs.sampling:
            found.append(f"Answers were drawn or graded otherwise: {'; '.join(map(str, self.pairs.sampling))}.")
        found += _likely_causes(self)
        if self.regraded:
            found.append(f"The grader differs: {counted(self.regraded, 'answer')} of equal texts got unequal scores.")
        if 0 < self.judgement.copied <= MOST_COPIED:
            found.append(f"On a side {copies_clause(self.judgement.copied)}; they count as independent draws.")
        found += [note if note.endswith("?") else f"{note}." for note in self.pairs.notes if _is_told_first(self, note)]

        if self.pairs.unknown:
            found.append(_unknown_text(self.pairs))
        return found

    @cached_property
    def changed(self) -> list[ChangedProblem]:
        """The problems whose score changed, the greatest loss first."""
        problems = []
        for task in self.pairs.tasks:
            is_paired = ~np.isnan(task.losses)
            changes = np.where(is_paired, abs(task.losses), 0.0)
            before, after = (np.where(is_paired, scores, 0.0).sum(1) for scores in task.scores)
            pairs = task.losses.shape[1]

            for row in np.flatnonzero(changes.any(1)).tolist():
                # The sample of the texts: the one that changed most.
                column = int(changes[row].argmax())
                names = [grid.name_of(row, column, pairs) for grid in (task.before, task.after)]
                numbers = (float(before[row]), float(after[row]), int(is_paired[row].sum()))
                problems.append(ChangedProblem(task.task, task.problems[row], *numbers, names))

        return sorted(problems, key=lambda problem: problem.after - problem.before)

    def texts(self, problems: Sequence[ChangedProblem]) -> list[list[AnswerTexts | None]]:
        """Return question and text of the answers to changed problems on both sides, None where a log has none."""
        found = []
        for index, side in enumerate((self.pairs.before, self.pairs.after)):
            names = [problem.names[index] for problem in problems]
            of_side = side.texts(names)
            found.append([of_side.get(name) for name in names])
        return found

    def side_data(self, index: int) -> dict[str, Any]:
        """Return what is known of one side, 0 before and 1 after: its shares and its answers by their ending."""
        side = (self.pairs.before, self.pairs.after)[index]
        grids = [(task.before, task.after)[index] for task in self.pairs.tasks]
        return {
            "name": side.name,
            "kind": side.kind,
            "right": percent(self.judgement.right[index]),
            "truncated": sum(grid.count(TRUNCATED) for grid in grids) if side.endings_known else None,
            "no_answer": sum(grid.count(NO_ANSWER) for grid in grids),
            "missing": sum(grid.missing for grid in grids),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data; shares are in percent, losses in points."""
        judgement = self.judgement
        decides = judgement.losses[judgement.claim]
        is_on_these = judgement.claim is Claim.THESE

        limits: dict[str, dict[str, Any]] = {claim.value: {"refused": judgement.refused} for claim in Claim}
        for claim, loss in judgement.losses.items():
            limits[claim.value] = {
                **loss.in_percent(*_LOSES),
                "units": loss.units,
                "p_kept": loss.p_kept,
                "p_broken": loss.p_broken,
                "kept": loss.high <= judgement.margin,
                "broken": loss.low > judgement.margin,
            }

        tasks = []
        for task in judgement.tasks:
            pairs = task.pairs
            numbers = {
                "task": pairs.task,
                "verdict": task.verdict.value,
                "problems": len(pairs.losses),
                "samples": pairs.samples[0] if pairs.counts_answers else list(pairs.samples),
                **dict(zip(("before", "after"), map(percent, pairs.right), strict=True)),
                **dict(zip(("lost", "gained"), pairs.changed, strict=True)),
                **task.losses[judgement.claim].in_percent(*_LOSES),
            }
            tasks.append(numbers)
        lost, gained = judgement.changed

        length = None
        if judgement.length is not None:
            length = {
                "unit": self.pairs.before.length_unit,
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
            "problems": judgement.problems,
            "counted": "answers" if all(task.counts_answers for task in self.pairs.tasks) else "problems",
            "lost": lost,
            "gained": gained,
            "missing": percent(self.pairs.missing_share),
            **decides.in_percent(*_LOSES),
            "limits": limits,
            "tasks": tasks,
            "reasons": list(judgement.reasons),
            "needed": {
                "samples": judgement.needed if is_on_these else None,
                "problems": judgement.needed_other if is_on_these else judgement.needed,
            },
            "length": length,
            "same_texts": self.same_texts,
            "warnings": self.warnings,
            "differences": [row.to_dict() for row in self.pairs.differences],
            "sampling": [row.to_dict() for row in self.pairs.sampling],
            "unknown": [row.to_dict() for row in self.pairs.unknown],
            "changed": [
                {"task": item.task, "problem": item.problem, "before": item.before, "after": item.after}
                for item in self.changed
            ],
            "notes": list(self.pairs.notes),
        }

    def __str__(self) -> str:
        """Return the text as Markdown: headline, warnings, sentences, table of tasks, what differs, notes."""
        paragraphs = [f"# {gate_headline(self)}", *self.warnings, gate_text(self), task_table(self)]

        lost = [problem for problem in self.changed if problem.after < problem.before]
        if lost:
            named = ", ".join(f"{problem.task} {problem.problem}" for problem in lost[:NAMED])
            more = f" and {len(lost) - NAMED:,} more" if len(lost) > NAMED else ""
            paragraphs.append(f"Lost most: {named}{more}.")
        if self.pairs.differences:
            lines = "\n".join(f"- {line}" for line in difference_lines(self))
            paragraphs += ["What differs between the sides:", lines]
        if note_lines(self):
            paragraphs.append("\n".join(f"- {note}" for note in note_lines(self)))
        return str(visible("\n\n".join(paragraphs)))

    _repr_markdown_ = __str__


# -- sentences ---------------------------------------------------------------------------------------------------------


def gate_headline(result: JudgedChange) -> str:
    """Return the verdict in a line."""
    judgement = result.judgement
    margin = margin_text(judgement.margin)
    decides = judgement.losses[judgement.claim]
    if judgement.verdict is Verdict.KEEPS:
        most = _most_lost(decides.high, judgement.margin)
        kept = f"{result.equal_answers}; {most.removeprefix('loses ')}" if result.equal_answers else most
        return f"Keeps: {kept} points (margin {margin})"
    if judgement.verdict is Verdict.LOSES:
        names = judgement.losing_tasks
        if decides.low <= judgement.margin and names:
            return f"Loses: more than {margin} on {', '.join(names)}"
        return f"Loses: at least {limit_text(decides.low, judgement.margin)} points (margin {margin})"
    return f"Cannot tell whether it loses more than {margin}"


def gate_text(result: JudgedChange) -> str:
    """Return the sentences on the claim that decides, on the other one, and on what would settle an open verdict."""
    judgement = result.judgement
    claim = judgement.claim
    loss = judgement.losses[claim]

    # The answers, and the limits of the claim that decides.
    samples = dict.fromkeys(_samples_text(task) for task in result.pairs.tasks)
    times = "" if [*samples] == ["1"] else f", {' or '.join(samples)} samples of each"
    lost, gained = judgement.changed
    change = f"{counted(lost, 'answer')} {'was' if lost == 1 else 'were'} lost and {gained:,} gained"
    if not all(task.counts_answers for task in result.pairs.tasks):
        change = f"the score of {counted(lost, 'problem')} fell and that of {gained:,} rose"
    mean = " in the mean over tasks" if len(judgement.tasks) > 1 else ""
    units = counted(loss.units, "pair" if claim is Claim.THESE else "problem")
    sentences = [
        f"{counted(judgement.problems, 'problem')}{times}: {percent_text(judgement.right[0])} % of the answers were "
        f"right before and {percent_text(judgement.right[1])} % after{mean}; {change}.",
        f"{_OF_CLAIM[claim]} it {_limits_text(judgement)} (95 %, {units}).",
    ]
    sentences += [f"Nothing is proven: {reason}." for reason in judgement.reasons]
    if len(judgement.tasks) > 1 and judgement.losing_tasks:
        names = ", ".join(judgement.losing_tasks)
        sentences.append(f"More than the margin is lost on {names} (Holm over {len(judgement.tasks)} tasks).")
    # The setting is what is compared.
    conditions = dict.fromkeys(item.name for item in result.pairs.differences if item.condition != "setting")
    if conditions:
        sentences.append(f"The sides also differ in {', '.join(conditions)}: the verdict is on all of it together.")

    sentences.append(_other_claim(judgement))
    if judgement.verdict is Verdict.CANNOT_TELL and not judgement.reasons:
        sentences.append(_settling_sizes(result))

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
    if length is not None and result.pairs.before.length_unit == result.pairs.after.length_unit:
        unit = result.pairs.before.length_unit.removesuffix("s")
        longer = round(length.value)
        words = "as long"
        if longer:
            words = f"{counted(abs(longer), unit)} {'longer' if longer > 0 else 'shorter'}"
        limits = f"{round(length.low):+,} to {round(length.high):+,}"
        sentences.append(f"Answers are {words} on average (95 %: {limits}).")
    if result.same_texts:
        sentences.append("Both sides wrote the same texts, answer by answer.")
    return " ".join(sentences)


def _limits_text(judgement: Judgement) -> str:
    """Return the loss by the claim that decides, with its limits."""
    loss = judgement.losses[judgement.claim]
    value, high, low = (limit_text(share, judgement.margin) for share in (loss.value, loss.high, loss.low))
    verb = "gains" if value.startswith("-") else "loses"
    value, gained, most_gained = (text.removeprefix("-") for text in (value, high, low))
    if high.startswith("-"):
        return f"{verb} {value} points, at least {gained} and at most {most_gained}"
    limits = f"{high} and at least {low}" if loss.low >= 0 else f"{high} lost or {most_gained} gained"
    return f"{verb} {value} points, at most {limits}"


def _most_lost(share: float, margin: float) -> str:
    """Return an upper limit of a loss in words: a negative one is a gain."""
    text = limit_text(share, margin)
    return f"gains at least {text[1:]}" if text.startswith("-") else f"loses at most {text}"


def _samples_text(task: TaskPairs) -> str:
    """Return the samples of a problem in words: 4, or 1 and 4 on two sides."""
    return " and ".join(map(str, dict.fromkeys(task.samples)))


def _unknown_text(pairs: PairedAnswers) -> str:
    """Return a sentence on what is unknown of one side or of both, so that it was not compared."""
    names: dict[str, list[str]] = {}
    for row in pairs.unknown:
        side = "after" if row.after == UNKNOWN else "before"
        if row.before == row.after:
            side = "both sides"
        names.setdefault(side, []).append(row.name)

    clauses = []
    for side, conditions in names.items():
        if set(ENTRIES) <= set(conditions):
            # A log that says nothing but its answers.
            conditions = ["all conditions of the task", *(name for name in conditions if name not in ENTRIES)]
        clauses.append(f"{', '.join(conditions)} ({side})")
    by_name = sum(task.by_name for task in pairs.tasks)
    paired = f" {counted(by_name, 'problem')} are paired by name." if by_name else ""
    return f"Unknown, so not compared: {'; '.join(clauses)}.{paired}"


def _likely_causes(result: JudgedChange) -> Iterator[str]:
    """Yield why answers were probably lost or gained, where many of a side are cut off or have no answer."""
    sides = (result.side_data(0), result.side_data(1))
    open_ends = [(side["truncated"] or 0) + side["no_answer"] for side in sides]
    answers = [sum(task.before.scores.size for task in result.pairs.tasks)]
    answers.append(sum(task.after.scores.size for task in result.pairs.tasks))
    shares = [count / every for count, every in zip(open_ends, answers, strict=True)]
    for index, word in enumerate(("before", "after")):
        if shares[index] - shares[1 - index] > _MANY:
            yield (
                f"{open_ends[index]:,} of {answers[index]:,} answers {word} have no answer or were cut off "
                f"({open_ends[1 - index]:,} on the other side): {_cut_text(result, index)}."
            )
            return

    # Answers that one side alone got wrong: do they lack the box?
    for index, word in enumerate(("before", "after")):
        wrong = [item for item in result.changed if (item.after < item.before) == (index == 1)][:_READ]
        if len(wrong) <= _MANY * max(answers):
            continue
        without = [_without_box(answers) for answers in result.texts(wrong)]
        if without[index] - without[1 - index] > len(wrong) / 2:
            yield (
                f"{without[index]:,} of {len(wrong):,} answers that are wrong {word} alone have no box, "
                f"{without[1 - index]:,} on the other side: {_cut_text(result, index)}."
            )


def _without_box(answers: Sequence[AnswerTexts | None]) -> int:
    """Return how many answers have no box."""
    return sum(answer is None or "\\boxed" not in answer[1] for answer in answers)


def _cut_text(result: JudgedChange, index: int) -> str:
    """Return that answers of a side were perhaps cut, with the limits that its log names."""
    limit = (result.pairs.before, result.pairs.after)[index].token_limit
    return f"perhaps cut: {limit} new tokens" if limit else "perhaps cut"


def _count_text(count: int | None) -> str:
    return "an unknown number" if count is None else f"{count:,}"


def _other_claim(judgement: Judgement) -> str:
    """Return a sentence on the claim that does not decide."""
    other = Claim.LIKE if judgement.claim is Claim.THESE else Claim.THESE
    loss = judgement.losses.get(other)
    if loss is None:
        return f"For these problems alone nothing is claimed: {judgement.refused}."
    if other is Claim.THESE and all(task.pairs.samples == (1, 1) for task in judgement.tasks):
        return "With one sample of each problem the limits are the same for these problems alone."
    most = _most_lost(loss.high, judgement.margin)
    if other is Claim.THESE:
        return f"On these problems, however often they are sampled, it {most} points."
    return (
        f"For problems like these it {most} points: a kind of problem that these {loss.units:,} do not hold may fail."
    )


def _settling_sizes(result: JudgedChange) -> str:
    """Return a sentence on the missing answers, samples or problems that would settle the verdict."""
    judgement = result.judgement
    samples = max(task.pairs.samples[0] for task in judgement.tasks)
    ways = []
    if judgement.claim is Claim.THESE:
        if judgement.needed:
            ways.append(f"about {judgement.needed:,} samples of each of these problems (now {samples})")
        if judgement.needed_other:
            ways.append(f"about {judgement.needed_other:,} problems for the claim on problems like these")
    elif judgement.needed:
        ways.append(f"about {judgement.needed:,} problems (now {judgement.problems:,})")
    if not ways:
        unit = "pairs of answers" if judgement.claim is Claim.THESE else "problems"
        ways.append(f"only more than {MOST_PROBLEMS:,} {unit}")
    missing = sum(result.side_data(index)["missing"] for index in (0, 1))
    begin = "If this is its loss"
    if missing:
        begin = f"First complete the {counted(missing, 'missing answer')}, which may all be lost; if they are"
    return f"{begin}, {', or '.join(ways)} would tell."


def task_table(result: JudgedChange) -> str:
    """Return a Markdown table of the tasks (see `task_rows`)."""
    lines = []
    for row in task_rows(result):
        # A name must not end its cell of the table.
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, f"|---|{(len(cells) - 2) * '--:|'}---|")
    return "\n".join(lines)


def task_rows(result: JudgedChange) -> list[list[str]]:
    """Return the head of a table, its tasks and their mean."""
    head = ("task", "problems x samples", "before, %", "after, %", "lost", "gained", "loses (at least, at most)")
    rows = [[*head, "verdict"]]
    judgement = result.judgement
    for task in judgement.tasks:
        size = f"{len(task.pairs.losses):,} x {_samples_text(task.pairs)}"
        rows.append([task.pairs.task.replace("\n", " "), size, *_numbers_in_row(task.pairs, task, judgement)])
    if len(judgement.tasks) > 1:
        numbers = _numbers_in_row(judgement, judgement, judgement)
        rows.append(["mean", f"{judgement.problems:,}", *numbers])
    return rows


def _numbers_in_row(numbers: TaskPairs | Judgement, judged: TaskVerdict | Judgement, judgement: Judgement) -> list[str]:
    loss = judged.losses[judgement.claim]
    shares = (loss.value, loss.low, loss.high)
    texts = [signed(100 * share, digits_apart(share, judgement.margin), "-") for share in shares]
    limits = f"{texts[0]} ({texts[1]}, {texts[2]})"
    counts = [f"{count:,}" for count in numbers.changed]
    return [*map(percent_text, numbers.right), *counts, limits, judged.verdict.value]


def note_lines(result: JudgedChange) -> list[str]:
    """Return the notes as sentences, but those that are among the warnings."""
    return [f"{note}." for note in result.pairs.notes if not _is_told_first(result, note)]


def _is_told_first(result: JudgedChange, note: str) -> bool:
    """Return whether a note asks something, or tells of an endpoint, as that its answers are old."""
    if note.endswith("?"):
        return True
    sides = (result.pairs.before, result.pairs.after)
    return any(side.kind == "endpoint" and note.removeprefix(f"{side.name}: ") in side.notes for side in sides)


def difference_lines(result: JudgedChange) -> list[str]:
    """Return a line for each condition that differs."""
    return [f"{item.name}: {item.before} before, {item.after} after" for item in result.pairs.differences]
