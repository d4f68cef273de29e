"""The verdict in words: Markdown, which a terminal shows as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvatlas.core import Claim
from kvatlas.gates.judgement import Judgement, Limits, TaskVerdict, Verdict
from kvatlas.text import counted, fixed, percent_text, points_text, visible

if TYPE_CHECKING:
    from kvatlas.gates.gate_result import Judged

#: Problems that the text names.
NAMED = 5
_OF_CLAIM = {
    Claim.THESE: "on these problems, however often they are sampled",
    Claim.LIKE: "for problems like these",
}


def as_markdown(judged: Judged) -> str:
    """Return the whole text: headline, sentences, table of tasks, what differs, notes."""
    paragraphs = [f"# {headline(judged)}", " ".join(sentences(judged)), task_table(judged.judgement)]
    changed = changed_sentence(judged)
    paragraphs += [changed] if changed else []
    if judged.pairs.differences:
        paragraphs.append("What else differs between the sides:")
        paragraphs.append("\n".join(f"- {line}" for line in difference_lines(judged)))
    if judged.pairs.notes:
        paragraphs.append("\n".join(f"- {note}" for note in note_lines(judged)))
    return str(visible("\n\n".join(paragraphs)))


def headline(judged: Judged) -> str:
    """Return the verdict in a line."""
    judgement = judged.judgement
    margin = f"{100 * judgement.margin:g} points"
    decides = judgement.limits[judgement.claim]
    if judgement.verdict is Verdict.KEEPS:
        return f"Keeps: loses at most {percent_text(decides.high)} points (margin {margin})"
    if judgement.verdict is Verdict.LOSES:
        tasks = _losing(judgement)
        if decides.low <= judgement.margin and tasks:
            return f"Loses: more than {margin} on {', '.join(task.task for task in tasks)}"
        return f"Loses: at least {percent_text(decides.low)} points (margin {margin})"
    return f"Cannot tell whether it loses more than {margin}"


def sentences(judged: Judged) -> list[str]:
    """Return the sentences on the claim that decides, on the other one, and on what would settle an open verdict."""
    judgement = judged.judgement
    found = [_counts(judged), _limit_sentence(judgement, judgement.claim)]
    found += [f"Nothing is proven: {reason}." for reason in judgement.reasons]
    found += _losing_sentence(judgement)
    if judged.pairs.differences:
        conditions = ", ".join(dict.fromkeys(item.condition for item in judged.pairs.differences))
        found.append(f"The sides also differ in {conditions}: the verdict is on all of it together.")
    found.append(_other_claim(judgement))
    if judgement.verdict is Verdict.CANNOT_TELL and not judgement.reasons:
        found.append(_what_would_tell(judgement))
    found += [_endings(judged), _length(judged)]
    if judged.same_texts:
        found.append("Both sides wrote the same texts, answer by answer.")
    return [sentence for sentence in found if sentence]


def _counts(judged: Judged) -> str:
    judgement = judged.judgement
    problems = sum(task.problems for task in judgement.tasks)
    samples = sorted({task.samples for task in judgement.tasks})
    times = "" if samples == [1] else f", {' and '.join(map(str, samples))} samples of each"
    mean = " in the mean over tasks" if len(judgement.tasks) > 1 else ""
    return (
        f"{counted(problems, 'problem')}{times}: {percent_text(judgement.before)} % of the answers were right before "
        f"and {percent_text(judgement.after)} % after{mean}; {judgement.lost:,} answers were lost and "
        f"{judgement.gained:,} gained."
    )


def _limit_sentence(judgement: Judgement, claim: Claim) -> str:
    limits = judgement.limits[claim]
    words = _OF_CLAIM[claim]
    return (
        f"{words[:1].upper()}{words[1:]} it loses {_points(limits.loss)} points, at most "
        f"{_points(limits.high)} and at least {_points(limits.low)} (95 %, {_units(limits, claim)})."
    )


def _points(share: float) -> str:
    return fixed(100 * share)


def _units(limits: Limits, claim: Claim) -> str:
    return counted(limits.units, "pair" if claim is Claim.THESE else "problem")


def _losing(judgement: Judgement) -> list[TaskVerdict]:
    return [task for task in judgement.tasks if task.verdict is Verdict.LOSES]


def _losing_sentence(judgement: Judgement) -> list[str]:
    tasks = _losing(judgement)
    if len(judgement.tasks) == 1 or not tasks:
        return []
    names = ", ".join(task.task for task in tasks)
    return [f"More than the margin is lost on {names} (Holm over {len(judgement.tasks)} tasks)."]


def _other_claim(judgement: Judgement) -> str:
    """Return a sentence on the claim that does not decide."""
    other = Claim.LIKE if judgement.claim is Claim.THESE else Claim.THESE
    limits = judgement.limits.get(other)
    if limits is None:
        return f"For these problems alone nothing is claimed: {judgement.refused}."
    if other is Claim.THESE:
        if max(task.samples for task in judgement.tasks) == 1:
            return "With one sample of each problem the limits are the same for these problems alone."
        return f"On these problems, however often they are sampled, it loses at most {_points(limits.high)} points."
    return (
        f"For problems like these it may lose up to {_points(limits.high)} points: a kind of problem that these "
        f"{limits.units:,} do not hold may fail."
    )


def _what_would_tell(judgement: Judgement) -> str:
    """Return the samples or problems that would settle the verdict."""
    samples = max(task.samples for task in judgement.tasks)
    if judgement.claim is Claim.THESE:
        ways = []
        if judgement.needed:
            ways.append(f"about {judgement.needed:,} samples of each of these problems (now {samples})")
        if judgement.needed_other:
            ways.append(f"about {judgement.needed_other:,} problems for the claim on problems like these")
    else:
        problems = sum(task.problems for task in judgement.tasks)
        ways = [f"about {judgement.needed:,} problems (now {problems:,})"] if judgement.needed else []
    if not ways:
        return "The loss is so near to the margin that no practicable number of problems would tell."
    return f"If this is its loss, {', or '.join(ways)} would tell."


def _endings(judged: Judged) -> str:
    before = judged.side_data(0)
    after = judged.side_data(1)
    clauses = []
    for name, word in (("truncated", "truncated"), ("no_answer", "without an answer"), ("missing", "missing")):
        if before[name] or after[name]:
            clauses.append(f"{word} {_known(before[name])} before and {_known(after[name])} after")
    if not clauses:
        return ""
    return f"Answers: {'; '.join(clauses)}."


def _known(count: int | None) -> str:
    return "an unknown number" if count is None else f"{count:,}"


def _length(judged: Judged) -> str:
    length = judged.judgement.length
    if length is None or judged.before.length_unit != judged.after.length_unit:
        return ""
    unit = judged.before.length_unit
    word = "longer" if length.value >= 0 else "shorter"
    return (
        f"Answers are {abs(length.value):,.0f} {unit} {word} on average (95 %: {length.low:+,.0f} to "
        f"{length.high:+,.0f})."
    )


def task_table(judgement: Judgement) -> str:
    """Return a Markdown table of the tasks, and of their mean."""
    rows = [
        f"| {_cell(task.task)} | {task.problems:,} x {task.samples} | {percent_text(task.before)} | "
        f"{percent_text(task.after)} | {task.lost:,} | {task.gained:,} | {_change(task.limits[judgement.claim])} | "
        f"{task.verdict.value} |"
        for task in judgement.tasks
    ]
    if len(judgement.tasks) > 1:
        rows.append(
            f"| mean | {sum(task.problems for task in judgement.tasks):,} | {percent_text(judgement.before)} | "
            f"{percent_text(judgement.after)} | {judgement.lost:,} | {judgement.gained:,} | "
            f"{_change(judgement.limits[judgement.claim])} | {judgement.verdict.value} |"
        )
    head = "| task | problems x samples | before, % | after, % | lost | gained | loses (at least, at most) | verdict |"
    return "\n".join([head, "|---|--:|--:|--:|--:|--:|--:|---|", *rows])


def _cell(text: str) -> str:
    """Return a text that does not end its cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _change(limits: Limits) -> str:
    return f"{points_text(limits.loss)} ({points_text(limits.low)}, {points_text(limits.high)})"


def changed_sentence(judged: Judged) -> str:
    """Return the problems with the greatest losses."""
    lost = [problem for problem in judged.changed if problem.after < problem.before]
    if not lost:
        return ""
    named = ", ".join(f"{problem.task} {problem.problem}" for problem in lost[:NAMED])
    more = f" and {len(lost) - NAMED:,} more" if len(lost) > NAMED else ""
    return f"Lost most: {named}{more}."


def note_lines(judged: Judged) -> Sequence[str]:
    """Return the notes as sentences."""
    return [note if note.endswith("?") else f"{note}." for note in judged.pairs.notes]


def difference_lines(judged: Judged) -> Sequence[str]:
    """Return a line for each condition that differs."""
    return [
        f"{item.condition}: {item.before or 'not named'} before, {item.after or 'not named'} after"
        for item in judged.pairs.differences
    ]
