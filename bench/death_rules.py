"""Do the rules for kinds of death agree with a walk through the text that knows the true values?

Of each lost answer of some runs that ends in an answer, the rules say one of three things: a value that had been stated
rightly is wrong later (`value`: forgotten, misread, recomputed wrongly), a step is missing (`missing`: skipped, early
stop), or neither (`other`). A walk of its own, which shares no code with the rules and reads the true values off the
question, says the same. The document has the counts of each pair, and the share that agrees with its interval.

    python bench/death_rules.py --runs runs/demo runs/smollm
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import arguments, keep
from kvatlas.autopsy.kinds_of_death import Death
from kvatlas.autopsy.lost_answers import lost_answers
from kvatlas.report.materials import RunMaterials
from kvatlas.results import Store
from kvatlas.stats.estimates import pass_at_1

VALUE = (Death.FORGOTTEN, Death.MISREAD, Death.RECOMPUTED)
MISSING = (Death.SKIPPED, Death.EARLY_STOP)
ENDLESS = (Death.LOOP, Death.TRUNCATED, Death.NO_ANSWER)


@dataclass
class Walk:
    """A walk through a text: which names were stated rightly, which falsely after that, and which were computed."""

    true: dict[str, str]
    right: set[str] = field(default_factory=set)
    false: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    def state(self, name: str, value: str | None, step: str = "") -> None:
        """Note that a step, or the answer, says that a name has a value; None for one that is unknown."""
        if value is not None and value == self.true.get(name):
            self.right.add(name)
        elif name in self.right:
            self.false |= {name, step} - {""}

    def verdict(self, final: dict[str, str], needed: set[str]) -> str:
        """Return what made the answer wrong, by its `final` values of the names that it needs."""
        wrong = {name for name in needed if final.get(name) != self.true[name]}
        wrong |= {name for name, value in final.items() if self.true.get(name) != value}
        if wrong & self.false:
            return "value"
        return "missing" if wrong - self.done else "other"


def halves(text: str) -> tuple[list[str], str]:
    thinking, _, answer = text.partition("</think>")
    return thinking.splitlines(), answer


def is_true_sum(left: str, operator: str, right: str, total: str, modulo: int = 0) -> bool:
    value = int(left) + int(right) if operator == "+" else int(left) - int(right)
    return (value % modulo if modulo else value) == int(total)


def chain_values(question: str) -> tuple[dict[str, str], set[str]]:
    """Return the true value of each letter, and the letters that are computed."""
    bodies = dict(item.split(" = ") for item in question.split(" ? ")[0].split(" ; "))
    values: dict[str, int] = {}

    def value(name: str) -> int:
        if name not in values:
            first, *rest = bodies[name].split()
            if not rest:
                values[name] = int(first)
            else:
                operator, second = rest
                sign = 1 if operator == "+" else -1
                values[name] = (value(first) + sign * value(second)) % 10
        return values[name]

    true = {name: str(value(name)) for name in bodies}
    return true, {name for name, body in bodies.items() if " " in body}


def walk_chain(question: str, _reference: str, text: str) -> str:
    true, computed = chain_values(question)
    walk = Walk(true)
    lines, answer = halves(text)
    for line in lines:
        step = re.match(r"([a-z]) = [a-z] [+-] [a-z] : (.*)", line)
        given = re.match(r"([a-z]) = \d", line)
        name = step[1] if step else ""
        if not step and given:
            name = given[1]
        body = step[2] if step else line
        for one, digit, _ in re.findall(r"\b([a-z])(?:(\d)\b| (unknown))", body):
            walk.state(one, digit or None, name)
            if digit and one == name:
                walk.done.add(one)
        total = re.search(r"(\d) ([+-]) (\d) = (\d)", body)
        if step and total and not is_true_sum(*total.groups(), modulo=10):
            walk.false.add(name)
    final = dict(re.findall(r"([a-z]) = (\d+)", answer))
    for one, digit in final.items():
        walk.state(one, digit)
    return walk.verdict(final, computed)


RELATION = re.compile(r"([A-Z][a-z]+) has (\d+) (more|fewer) [a-z]+ than ([A-Z][a-z]+)")


def words_values(question: str) -> dict[str, str]:
    """Return the true value of each person."""
    relations = {name: (int(count), how, other) for name, count, how, other in RELATION.findall(question)}
    given = dict(re.findall(r"([A-Z][a-z]+) has (\d+) (?!more|fewer)[a-z]+\.", question))

    def value(name: str) -> int:
        if name in given:
            return int(given[name])
        count, how, other = relations[name]
        return value(other) + (count if how == "more" else -count)

    return {name: str(value(name)) for name in [*relations, *given]}


def walk_words(question: str, reference: str, text: str) -> str:
    walk = Walk(words_values(question))
    lines, answer = halves(text)
    for line in lines:
        step = RELATION.search(line)
        total = re.search(r": (\d+) ([+-]) (\d+) = (\d+)", line)
        given = re.search(r"([A-Z][a-z]+) has (\d+) (?!more|fewer)[a-z]+\.", line)
        if step and total:
            walk.state(step[4], total[1], step[1])
            if not is_true_sum(*total.groups()):
                walk.false.add(step[1])
            walk.state(step[1], total[4])
            walk.done.add(step[1])
        elif given:
            walk.state(given[1], given[2])
            walk.done.add(given[1])
        elif line.startswith("So far"):
            for name, number in re.findall(r"([A-Z][a-z]+) (\d+)", line):
                walk.state(name, number)
    final = dict(re.findall(r"([A-Z][a-z]+) (\d+)\b", answer))
    for name, number in final.items():
        walk.state(name, number)
    needed = {name for name, _ in re.findall(r"([A-Z][a-z]+) (\d+)", reference)}
    return walk.verdict(final, needed)


def walk_maze(question: str, reference: str, text: str) -> str:
    """The way back from each room that was searched is its value: what the first note says, if that door is open."""
    doors = {frozenset(pair) for pair in re.findall(r"Room (\w+) and (\w+) are connected", question)}
    walk = Walk({})
    lines, answer = halves(text)
    for line in lines:
        for room, back in re.findall(r"\b([A-Z]\d+) to ([A-Z]\d+)\b", line):
            if frozenset((room, back)) in doors:
                walk.true.setdefault(room, back)
            walk.state(room, back)
            walk.done.add(room)
        for room in re.findall(r"and ([A-Z]\d+) new", line):
            # A room that was searched is not new.
            if room in walk.done:
                walk.false.add(room)
    moves = re.findall(r"'(?:start|move_to)', '([A-Z]\d+)'", answer)
    path = re.findall(r"'(?:start|move_to)', '([A-Z]\d+)'", reference)
    for room, following in pairwise(moves):
        walk.state(room, following)
    # Any false room leads the search astray; a path that lacks a searched room lacks a step.
    if walk.false:
        return "value"
    return "missing" if set(path[:-1]) - walk.done else "other"


def walk_ledger(question: str, reference: str, text: str) -> str:
    """The true balances are booked again from the question; the line that is sought is a value of its own."""
    head, asked = question.split(" ? ")
    first, balance, booked, last = re.fullmatch(r"(\w\d) = (\d) ; (.*) to (\w\d)", head).groups()
    amounts = {item[0]: int(item[1]) for item in booked.split(" , ")}
    names = [f"{page}{line}" for page in "ABCDEF" for line in range(1, 7)]
    true = {first: balance}
    for name in names[1 : names.index(last) + 1]:
        before = int(balance)
        amount = amounts["abcdef"[int(name[1]) - 1]]
        balance = str((before - amount if before % 2 else before + amount) % 10)
        true[name] = balance
    sought = re.search(r" at (\d)", asked)
    found = next((name for name, value in true.items() if sought and value == sought[1]), "")
    walk = Walk(true)
    lines, answer = halves(text)
    for line in lines:
        step = re.match(r"([A-F][1-6])(?: :| = )", line)
        if step is None:
            continue
        for name, digit, _ in re.findall(r"\b([A-F][1-6])(?:(\d)\b| (unknown))", line[step.end() :]):
            walk.state(name, digit or None, step[1])
        if re.search(rf"\b{step[1]}\d\b", line[step.end() :]):
            walk.done.add(step[1])
        for name in re.findall(r"new([A-F][1-6])", line):
            # A later line that is called the first contradicts the mark of the first.
            if found in walk.done and name != found:
                walk.false.add(name)
    final = dict(re.findall(r"([A-F][1-6]) = (\d)", answer))
    for name, digit in final.items():
        walk.state(name, digit)
    needed = {name for name, _ in re.findall(r"([A-F][1-6]) = (\d)", reference)}
    # A line that the answer should not have, or lacks, is a forgotten mark if the thinking has computed it.
    if set(final) != needed and needed <= walk.done:
        return "value"
    return walk.verdict(final, needed)


WALKS: dict[str, Callable[[str, str, str], str]] = {
    "CHAIN": walk_chain,
    "WORDS": walk_words,
    "SEQBENCH": walk_maze,
    "LEDGER": walk_ledger,
}


def rule_verdict(death: Death) -> str:
    if death in VALUE:
        return "value"
    return "missing" if death in MISSING else "other"


def compare(folder: Path, counts: dict[str, Counter[str]], outcomes: dict[str, dict[str, list[float]]]) -> None:
    """Count the pairs of verdicts of a run's lost answers by language."""
    with Store.open(folder) as store:
        materials = RunMaterials.from_manifest(store.manifest())
        for lost in lost_answers(store, materials.pieces):
            problem = materials.problem(lost.trace)
            language = next((name for name in WALKS if lost.trace.benchmark.startswith(name)), None)
            if language is None or problem is None or lost.death.kind in ENDLESS:
                continue
            true = WALKS[language](problem.question, problem.answer, lost.trace.text)
            ours = rule_verdict(lost.death.kind)
            counts.setdefault(language, Counter())[f"{ours}, {true}"] += 1
            of_problem = outcomes.setdefault(language, {}).setdefault(f"{lost.trace.benchmark} {problem.id}", [])
            of_problem.append(float(ours == true))


def main() -> None:
    args = arguments(__doc__, runs=["runs/demo"])
    counts: dict[str, Counter[str]] = {}
    outcomes: dict[str, dict[str, list[float]]] = {}
    for name in args.runs:
        compare(Path(name), counts, outcomes)
    languages: dict[str, Any] = {}
    for language, pairs in counts.items():
        agreeing = sum(count for pair, count in pairs.items() if len(set(pair.split(", "))) == 1)
        languages[language] = {
            "answers": pairs.total(),
            "agree": round(agreeing / pairs.total(), 4),
            "mean_over_problems": pass_at_1(outcomes[language]).to_dict(),
            "rules_and_walk": dict(pairs.most_common()),
        }
    keep(args, bench="death_rules", languages=languages)


if __name__ == "__main__":
    main()
