"""The rules for how an answer was lost, against planted deaths and against chains whose truth is known."""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from kvatlas.autopsy.kinds_of_death import (
    Death,
    LocatedDeath,
    TraceText,
    find_death,
    loop_start,
    lost_at,
    read_statements,
)
from kvatlas.benchmarks import chain, ledger, words
from kvatlas.core import EvictionTrace, Status

PLANTED = 200
#: The texts of the lines of a trace, each with the name that it computes, "" for recaps.
Lines = list[tuple[str, str]]
#: A planted text with the death in it, and the trace of the full cache.
Planted = tuple[TraceText, TraceText]


class Story:
    """A problem with its solution as lines: a chain, a word problem or a ledger."""

    def __init__(self, language: str, rng: random.Random) -> None:
        self.language = language
        self.rng = rng
        draw_steps, self.write_line = LANGUAGES[language]
        self.steps = draw_steps(rng)

    def values(self) -> dict[str, int]:
        return {name: value for name, _, value in self.steps}

    def line(self, name: str, values: dict[str, int]) -> str:
        """Return the line that computes a name from these values."""
        operands = next(step[1] for step in self.steps if step[0] == name)
        return self.write_line(name, operands, values)

    def result(self, line: str) -> int:
        """Return the value that a line computes."""
        number = re.findall(r"\d+", line)[-1]
        # The name of a line of a ledger ends in a digit, too.
        return int(number[-1] if self.language == "LEDGER" else number)

    def another(self, value: int) -> int:
        """Return a wrong value."""
        return (value + 1) % 10 if self.language == "LEDGER" else value + 1

    def recap(self, names: Sequence[str], values: dict[str, int]) -> str:
        if self.language == "LEDGER":
            return "wait, let me check, 1 + 1 = 2 , yes .\n"
        joint = "" if self.language == "CHAIN" else " "
        return "so far, " + " , ".join(f"{name}{joint}{values[name]}" for name in names) + " .\n"

    def lines(self) -> Lines:
        values = self.values()
        lines: Lines = []
        for index, (name, _, _) in enumerate(self.steps):
            lines.append((name, self.line(name, values)))
            if index % 3 == 2:
                done = [step[0] for step in self.steps[: index + 1]]
                lines.append(("", self.recap(self.rng.sample(done, 2), values)))
        return lines

    def answer(self, values: dict[str, int]) -> str:
        names = [step[0] for step in self.steps]
        if self.language != "WORDS":
            return " , ".join(f"{name} = {values[name]}" for name in names)
        return ", ".join(f"{name} {values[name]}" for name in names) + f". Answer: {values[names[-1]]}"

    def trace(self, lines: Lines, values: dict[str, int] | None, lost: Callable[[str], int] = lambda _: 0) -> TraceText:
        """Return a text of lines and an answer with one token for each character, lost as a line says."""
        thinking = "".join(line for _, line in lines)
        answer = "" if values is None else "</think>" + self.answer(values)
        text = thinking + answer
        start = len(thinking) + len("</think>") if values is not None else len(text)
        lost_tokens: list[int] = []
        for _, line in lines:
            lost_tokens += [lost(line)] * len(line)
        lost_tokens += [0] * (len(text) - len(lost_tokens))
        status = Status.TRUNCATED if values is None else Status.OK
        statements = read_statements(self.language, text, start)
        return TraceText(text, start, status, statements, list(accumulate(1 for _ in text)), lost_tokens)

    def full(self) -> TraceText:
        return self.trace(self.lines(), self.values())


def chain_steps(rng: random.Random) -> list[tuple[str, tuple[str, ...], int]]:
    system = chain.draw_system(rng.randint(8, 12), rng)
    return [(d.name, (d.left, d.operator, d.right) if d.operator else (), d.value) for d in system.definitions]


def chain_line(name: str, operands: tuple[str, ...], values: dict[str, int]) -> str:
    value = values[name]
    if not operands:
        return f"{name} = {value} , {name}{value} .\n"
    left, operator, right = operands
    one = values[left]
    other = values[right]
    total = (one + other if operator == "+" else one - other) % 10
    line = f"{name} = {left} {operator} {right} : {left}{one} , {right}{other} , "
    return f"{line}{one} {operator} {other} = {total} , {name}{total} .\n"


def words_steps(rng: random.Random) -> list[tuple[str, tuple[str, ...], int]]:
    way = words.draw_story(rng.randint(6, 10), rng).way
    return [(fact.name, (fact.than, str(fact.difference)) if fact.than else (), fact.count) for fact in way]


def words_line(name: str, operands: tuple[str, ...], values: dict[str, int]) -> str:
    if not operands:
        return f"{name} has {values[name]} beads.\n"
    than, difference = operands
    sign = "+" if int(difference) > 0 else "-"
    size = abs(int(difference))
    more = "more" if sign == "+" else "fewer"
    total = values[than] + int(difference)
    return f"{name} has {size} {more} beads than {than}: {values[than]} {sign} {size} = {total}.\n"


def ledger_steps(rng: random.Random) -> list[tuple[str, tuple[str, ...], int]]:
    drawn = ledger.draw_ledger(rng.randint(8, 20), rng)
    steps: list[tuple[str, tuple[str, ...], int]] = []
    before = ""
    for name, balance in drawn.balances.items():
        amount = ledger.amount_of(name)
        steps.append((name, (before, f"{amount}{drawn.amounts[amount]}") if before else (), balance))
        before = name
    return steps


def ledger_line(name: str, operands: tuple[str, ...], values: dict[str, int]) -> str:
    if not operands:
        return f"{name} = {values[name]} , {name}{values[name]} .\n"
    before, amount = operands
    one, other = values[before], int(amount[1])
    line = f"{name} : {before}{one} , {amount} , {one} {ledger.operator_of(one)} {other}"
    total = ledger.booked(one, other)
    return f"{line} = {total} , {name}{total} .\n"


# Of each language what draws the steps of a problem, and what writes the line of one.
LANGUAGES = {
    "CHAIN": (chain_steps, chain_line),
    "WORDS": (words_steps, words_line),
    "LEDGER": (ledger_steps, ledger_line),
}


def plant_loop(story: Story) -> Planted:
    full = story.full()
    lines = story.lines()
    start = story.rng.randrange(2, len(lines) - 1)
    looped = lines[start : start + story.rng.randint(1, 3)]
    return story.trace(lines[:start] + looped * story.rng.randint(5, 20), None), full


def plant_forgotten(story: Story) -> Planted:
    """A value is other, or unknown, in a later step; all its earlier statements were evicted."""
    full = story.full()
    names = [step[0] for step in story.steps]
    place, operand = story.rng.choice(
        [(index, name) for index, step in enumerate(story.steps) for name in set(step[1]) & set(names)]
    )
    values = story.values()
    wrong = {**values, operand: (values[operand] + story.rng.randint(1, 5)) % (99 if story.language == "WORDS" else 10)}
    name = names[place]
    lines = story.lines()
    index = next(number for number, line in enumerate(lines) if line[0] == name)
    line = story.line(name, wrong)
    result = story.result(line)
    if story.language == "CHAIN" and story.rng.random() < 0.5:
        line = f"{line.split(' : ')[0]} : {operand} unknown .\n"
    final = {**values, name: result}
    if final[name] == values[name]:
        final[name] = story.another(values[name])
    before = sum(len(text) for _, text in lines[:index])
    tail = [item for item in lines[index + 1 :] if name not in item[1] and operand not in item[1]]
    return story.trace(
        [*lines[:index], (name, line), *tail], final, lambda text: before if operand in text else 0
    ), full


def plant_skip(story: Story) -> Planted:
    """A step before the last one is missing: its value is guessed, and later steps build on the guess."""
    full = story.full()
    names = [step[0] for step in story.steps]
    name = story.rng.choice(names[1:-1])
    values = story.values()
    values[name] = story.another(values[name])
    for later, operands, _ in story.steps[names.index(name) + 1 :]:
        if operands:
            values[later] = story.result(story.line(later, values))
    lines = [(step, story.line(step, values) if step else line) for step, line in story.lines() if step != name]
    return story.trace([item for item in lines if item[0] or "so far" not in item[1]], values), full


def plant_early_stop(story: Story) -> Planted:
    full = story.full()
    lines = story.lines()
    last = [index for index, item in enumerate(lines) if item[0]][-story.rng.randint(1, 3) :]
    cut = lines[: last[0]]
    names = {lines[index][0] for index in last}
    values = {name: story.another(value) if name in names else value for name, value in story.values().items()}
    return story.trace(cut, values), full


def plant_slip(story: Story) -> Planted:
    """A sum is wrong, from operands that are right."""
    full = story.full()
    lines = story.lines()
    values = story.values()
    places = [index for index, item in enumerate(lines) if " = " in item[1] and ":" in item[1] and item[0]]
    index = story.rng.choice(places)
    name, line = lines[index]
    slipped = story.another(values[name])
    line = re.sub(
        r"= \d+( , (?:[a-z]|[A-F]\d))?\d*( ?\.\n)$",
        lambda found: f"= {slipped}{found[1] or ''}{slipped if found[1] else ''}{found[2]}",
        line,
    )
    tail = [item for item in lines[index + 1 :] if name not in item[1]]
    return story.trace([*lines[:index], (name, line), *tail], {**values, name: slipped}), full


PLANTS: dict[Death, Callable[[Story], Planted]] = {
    Death.LOOP: plant_loop,
    Death.FORGOTTEN: plant_forgotten,
    Death.SKIPPED: plant_skip,
    Death.EARLY_STOP: plant_early_stop,
    Death.RECOMPUTED: plant_slip,
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_planted_deaths_are_found(language: str) -> None:
    found: Counter[tuple[Death, Death]] = Counter()
    for death, plant in PLANTS.items():
        for number in range(PLANTED):
            story = Story(language, random.Random(f"{death} {number}"))
            found[death, find_death(*plant(story)).kind] += 1
    for death in PLANTS:
        named = sum(count for (_, kind), count in found.items() if kind is death)
        assert found[death, death] >= 0.9 * PLANTED, (death, found)
        assert found[death, death] >= 0.9 * named, (death, found)


def test_the_token_is_where_it_happened() -> None:
    full = Story("CHAIN", random.Random(1)).full()
    text = "a = 1 , a1 .\nb = 2 , b2 .\nc = a + b : a1 , b2 , 1 + 2 = 3 , c3 .\nd = c + a : c unknown .\n"
    answer = "</think>c = 3 , d = 9"
    right = text.replace("c unknown .", "c3 , a1 , 3 + 1 = 4 , d4 .") + "</think>c = 3 , d = 4"
    full = read(right, [0] * len(right))
    lost = [50] * text.index("d = c") + [0] * (len(text + answer) - text.index("d = c"))
    found = find_death(read(text + answer, lost), full)
    start = text.index("c unknown")
    assert replace(found, missed=()) == LocatedDeath(Death.FORGOTTEN, start, "c")
    # The only statement of the value that was missed.
    assert [(item.value, text[item.start : item.end]) for item in found.missed] == [("3", "c3")]
    # While a statement of the value is in the cache, it was misread.
    assert find_death(read(text + answer, [0] * len(lost)), full).kind is Death.MISREAD


def read(text: str, lost: Sequence[int], benchmark: str = "CHAIN9") -> TraceText:
    start = text.index("</think>") + len("</think>")
    ends = list(range(1, len(text) + 1))
    return TraceText(text, start, Status.OK, read_statements(benchmark, text, start), ends, lost)


LEDGER = (
    "A1 = 4 , A14 .\n"
    "A2 : A14 , b3 , 4 + 3 = 7 , A27 , key .\n"
    "A3 : A27 , c2 , 7 - 2 = 5 , A35 ,  newA3 .\n"
    "A4 : A35 , d0 , 5 - 0 = 5 , A45 .\n"
    "A5 : A45 , e1 , 5 - 1 = 4 , A54 .\n"
    "</think>"
)


@pytest.mark.parametrize(
    ("thinking", "answer", "name"),
    [
        # A balance that the answer recalls, another line than the marked one, none, and a second mark.
        (LEDGER, "A2 = 1 , A3 = 5 : 1 + 5 = 6", "A2"),
        (LEDGER, "A2 = 7 , A4 = 5 : 7 + 5 = 2", "first"),
        (LEDGER, "A2 = 7 : 7", "first"),
        (LEDGER.replace("A45 .\nA5", "A45 ,  newA4 .\nA5"), "A2 = 7 , A4 = 5 : 7 + 5 = 2", "first"),
    ],
)
def test_the_marked_lines_of_a_ledger_are_values(thinking: str, answer: str, name: str) -> None:
    right = LEDGER + "A2 = 7 , A3 = 5 : 7 + 5 = 2"
    full = read(right, [0] * len(right), "LEDGER8")
    marked = ("A27", "A35", "newA3")
    lost = [0] * len(thinking + answer)
    for token in marked:
        start = thinking.index(token)
        for place in range(start, start + len(token)):
            lost[place] = thinking.index("A4 :")
    lost_answer = find_death(read(thinking + answer, lost, "LEDGER8"), full)
    kept_answer = find_death(read(thinking + answer, [0] * len(lost), "LEDGER8"), full)
    assert (kept_answer.kind, kept_answer.name) == (Death.MISREAD, name)
    # The next line restates the balance; the mark stands nowhere else.
    assert lost_answer.kind is (Death.FORGOTTEN if name == "first" else Death.MISREAD)


@pytest.mark.parametrize("text", ["", "abc" * 5, "a line that is not repeated, and another one that is not, either"])
def test_short_and_plain_texts_are_no_loops(text: str) -> None:
    assert loop_start(text) is None


def test_a_loop_begins_where_a_text_comes_the_second_time() -> None:
    begin = "something else comes first, then "
    again = "round and round it goes; "
    # The space at the end of the text does not count.
    assert loop_start(begin + again * 6) == len(begin) + len(again) - 1


def test_a_token_is_lost_when_the_first_head_may_have_dropped_it() -> None:
    # Two heads; compressions after 8 and 12 new tokens, with a window of 2.
    trace = EvictionTrace(2, (0, 8, 0, 12, 0, 0), (2, 0, 1, 0, 1, 2))
    assert lost_at(trace, 1, 2) == [8, 8, 8, 8, 0]


def test_mazes_are_read_from_note_to_note() -> None:
    thinking = (
        "C6, want D2 : no , C6 and D6 .\nD6 to C6, want D2 : no , D6 and E6 .\nE6 to D6, want D2 : yes .\n</think>"
    )
    right = thinking + "[('start', 'E6'), ('move_to', 'D6'), ('move_to', 'C6')]"
    wrong = thinking + "[('start', 'E6'), ('move_to', 'D6'), ('move_to', 'D5'), ('move_to', 'C6')]"
    start = len(thinking)
    full = TraceText(right, start, Status.OK, read_statements("SEQBENCH-6x6", right, start))
    lost = TraceText(wrong, start, Status.OK, read_statements("SEQBENCH-6x6", wrong, start))
    found = find_death(lost, full)
    # Evictions are unknown.
    assert (found.kind, found.name, found.token) == (Death.MISREAD, "D6 to", None)
