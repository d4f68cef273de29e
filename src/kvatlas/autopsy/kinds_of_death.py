"""The kinds of death of lost answers: rules that read two traces and when tokens were evicted.

A benchmark's language is read as statements: a name, its value, and the step in which it is computed. Chains, word
problems, mazes and ledgers have readers of their own; other texts state values as `x = 12`. The rules are the same for
all.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from kvatlas.core import EvictionTrace, Status

#: The least repetitions of a text at the end of a trace, and their least characters in all, that are a loop.
LOOP_TIMES = 3
LOOP_CHARACTERS = 60
#: The longest repeated text in characters.
LOOP_PERIOD = 2_000


class Death(StrEnum):
    """The kinds of death of an answer, in the order in which the rules are tried.

    FORGOTTEN: a value stated earlier is unknown or other later, and no statement of it is in the cache any more.
    MISREAD: the same while a statement of it is in the cache, or where evictions are unknown.
    RECOMPUTED: a step computes a wrong value from its own operands, or another value than an earlier step.
    SKIPPED: a step of the full cache's trace is missing, later ones are there. EARLY_STOP: the last steps are missing.
    CHANGED_PLAN: the steps have another order than those of the full cache, or there are others, and no other rule
    holds. UNEXPLAINED: none of these.
    """

    LOOP = "loop"
    TRUNCATED = "truncated"
    NO_ANSWER = "no answer"
    FORGOTTEN = "forgotten value"
    MISREAD = "misread value"
    RECOMPUTED = "recomputed wrongly"
    SKIPPED = "skipped step"
    EARLY_STOP = "early stop"
    CHANGED_PLAN = "changed plan"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class StatedValue:
    """`name` has `value` (None: said to be unknown), at the characters `start` to `end`.

    `step` is the name that the step around it computes, "" outside of steps. `computed` is True for the result of that
    step; `sound` is False for a result that does not follow from the operands of its own line.
    """

    name: str
    value: str | None
    start: int
    end: int
    step: str = ""
    computed: bool = False
    sound: bool = True


@dataclass(frozen=True)
class TraceText:
    """The text of a trace with the statements in it.

    `answer_start` is the character at which the answer begins, the length of the text without one. `token_ends` are the
    characters at which the new tokens end, `lost_at` the number of new tokens when a first layer or head lost each of
    them, 0 for never (see `lost_at`); both are empty if they are unknown.
    """

    text: str
    answer_start: int
    status: Status
    statements: Sequence[StatedValue]
    token_ends: Sequence[int] = ()
    lost_at: Sequence[int] = ()

    def token_at(self, character: int) -> int | None:
        """Return the number of the new token with a character; None if tokens are unknown."""
        if not self.token_ends:
            return None
        return min(bisect_right(self.token_ends, character), len(self.token_ends) - 1)

    def in_cache(self, statement: StatedValue, character: int) -> bool | None:
        """Return whether all tokens of a statement are in the cache when a character is written; None if unknown."""
        now = self.token_at(character)
        first = self.token_at(statement.start)
        last = self.token_at(statement.end - 1)
        if now is None or first is None or last is None or not self.lost_at:
            return None
        # A token that a compression evicts after `now` new tokens is still seen by token `now`, and not by the next.
        return all(step == 0 or step > now for step in self.lost_at[first : last + 1])

    @cached_property
    def steps(self) -> list[str]:
        """The names that the thinking computes, in the order of their first results."""
        return list(dict.fromkeys(item.name for item in self.statements if item.computed))

    @cached_property
    def final_values(self) -> dict[str, set[str]]:
        """The values that the answer states of each name."""
        values: dict[str, set[str]] = {}
        for item in self.statements:
            if item.start >= self.answer_start and item.value is not None:
                values.setdefault(item.name, set()).add(item.value)
        return values


def lost_at(trace: EvictionTrace, prompt: int, local_window: int) -> list[int]:
    """Return for each new token the number of new tokens when a first layer or head lost it; 0 if all kept it.

    Where every layer or head chooses for itself, a trace does not say when the first of them dropped a token: at the
    earliest at the first compression that had it outside its local window.
    """
    evicted_at = trace.evicted_at[prompt:]
    if trace.holders == 1:
        return list(evicted_at)

    compressions = sorted(set(trace.evicted_at) - {0})
    lost = []
    for index, holders in enumerate(trace.kept_by[prompt:]):
        # Before a compression at `step` new tokens, all but the newest of them were cached.
        first = next((step for step in compressions if index < step - 1 - local_window), 0)
        lost.append(0 if holders == trace.holders else first)
    return lost


@dataclass(frozen=True)
class LocatedDeath:
    """The death of an answer: its kind, the new token where it happened, and the name concerned.

    Of a value that is forgotten or misread, `missed` are the earlier statements that have it, in their order.
    """

    kind: Death
    token: int | None = None
    name: str = ""
    missed: Sequence[StatedValue] = ()


def find_death(trace: TraceText, full: TraceText) -> LocatedDeath:
    """Return how the answer of a trace was lost that the full cache solves."""
    if trace.status.answered or trace.status is Status.UNKNOWN:
        return _first_contradiction(trace, full) or _difference_of_steps(trace, full)

    start = loop_start(trace.text)
    if start is not None:
        return LocatedDeath(Death.LOOP, trace.token_at(start))
    kind = Death.TRUNCATED if trace.status is Status.TRUNCATED else Death.NO_ANSWER
    end = max(0, len(trace.text) - 1)
    return LocatedDeath(kind, trace.token_at(end))


def loop_start(text: str) -> int | None:
    """Return the character from which a text repeats itself to its end; None without a loop."""
    reversed_text = text.rstrip()[::-1]
    longest = min(LOOP_PERIOD, len(reversed_text) // LOOP_TIMES)
    tail = reversed_text[:8]
    period = reversed_text.find(tail, 1)
    while 0 < period <= longest:
        # The number of characters that equal those a period later.
        length = 0
        for character, repeated in zip(reversed_text, reversed_text[period:], strict=False):
            if character != repeated:
                break
            length += 1

        if length >= period * (LOOP_TIMES - 1) and length + period >= LOOP_CHARACTERS:
            # The first repetition is no part of the loop: until there the text may be right.
            return len(reversed_text) - length
        period = reversed_text.find(tail, period + 1)
    return None


def _first_contradiction(trace: TraceText, full: TraceText) -> LocatedDeath | None:
    """Return the first statement that contradicts an earlier one, or its own line, and that the answer suffers from."""
    # The names whose last values differ from those of the full cache, in the thinking or in the answer.
    last = {item.name: item.value for item in trace.statements}
    right = {item.name: item.value for item in full.statements}
    wrong = {name for name, value in right.items() if last.get(name) != value}
    names = trace.final_values | full.final_values
    wrong |= {name for name in names if trace.final_values.get(name) != full.final_values.get(name)}

    last_values: dict[str, str] = {}
    stated: dict[tuple[str, str], list[StatedValue]] = {}
    for statement in trace.statements:
        is_wrong = statement.name in wrong or statement.step in wrong
        place = trace.token_at(statement.start), statement.name
        before = last_values.get(statement.name)
        if is_wrong and statement.computed and not statement.sound:
            return LocatedDeath(Death.RECOMPUTED, *place)
        if is_wrong and before is not None and before != statement.value:
            if statement.computed:
                return LocatedDeath(Death.RECOMPUTED, *place)
            earlier = stated[statement.name, before]
            in_cache = [trace.in_cache(item, statement.start) for item in earlier]
            is_forgotten = not any(state is None or state for state in in_cache)
            return LocatedDeath(Death.FORGOTTEN if is_forgotten else Death.MISREAD, *place, earlier)

        if statement.value is not None:
            last_values[statement.name] = statement.value
            stated.setdefault((statement.name, statement.value), []).append(statement)
    return None


def _difference_of_steps(trace: TraceText, full: TraceText) -> LocatedDeath:
    """Return the death of a trace without a contradiction, from its steps beside those of the full cache."""
    end = min(trace.answer_start, max(0, len(trace.text) - 1))
    missing = [name for name in full.steps if name not in trace.steps]
    if missing and full.steps[-len(missing) :] == missing:
        return LocatedDeath(Death.EARLY_STOP, trace.token_at(end), missing[0])
    if missing:
        # The first step that the full cache takes after the missing one.
        later = full.steps[full.steps.index(missing[0]) + 1 :]
        starts = [item.start for item in trace.statements if item.computed and item.name in later]
        start = min(starts, default=end)
        return LocatedDeath(Death.SKIPPED, trace.token_at(start), missing[0])

    for index, name in enumerate(trace.steps):
        if full.steps[index : index + 1] != [name]:
            start = next(item.start for item in trace.statements if item.computed and item.name == name)
            return LocatedDeath(Death.CHANGED_PLAN, trace.token_at(start), name)
    return LocatedDeath(Death.UNEXPLAINED, trace.token_at(end))


# -- the languages of benchmarks ---------------------------------------------------------------------------------------

#: Returns the statements of a text whose answer begins at a character.
Reader = Callable[[str, int], Iterator[StatedValue]]

_CHAIN_STEP = re.compile(r"([a-z]) = ([a-z]) [+-] ([a-z]) :")
_CHAIN_GIVEN = re.compile(r"([a-z]) = (\d+) ,")
_CHAIN_VALUE = re.compile(r"\b([a-z])(?:(\d+)\b| (unknown))")
_SUM = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")
_CHAIN_ANSWER = re.compile(r"\b([a-z]) = (\d+)\b")


def _lines(text: str, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each line of a text before a character."""
    start = 0
    for line in text[:stop].splitlines(keepends=True):
        yield start, start + len(line)
        start += len(line)


def read_chain(text: str, answer_start: int) -> Iterator[StatedValue]:
    """Yield the statements of a chain: `v = d - q : d6 , q1 , 6 - 1 = 5 , v5 .`, recaps, and `v = 5` in the answer."""
    for start, end in _lines(text, answer_start):
        step = _CHAIN_STEP.match(text, start, end)
        sum_ = _SUM.search(text, start, end) if step else None
        given = _CHAIN_GIVEN.match(text, start, end)
        if given:
            yield StatedValue(given[1], given[2], start, given.end(2), given[1], computed=True)
        for found in _CHAIN_VALUE.finditer(text, step.end() if step else start, end):
            name = step[1] if step else ""
            is_result = sum_ is not None and found[1] == name and found.start() > sum_.end()
            sound = sum_ is None or not is_result or _follows_from_sum(sum_, found[2], modulo=10)
            yield StatedValue(found[1], found[2], *found.span(), step=name, computed=is_result, sound=sound)

    for found in _CHAIN_ANSWER.finditer(text, answer_start):
        yield StatedValue(found[1], found[2], *found.span())


def _follows_from_sum(sum_: re.Match[str], result: str | None, modulo: int = 0) -> bool:
    """Return whether a result follows from the sum of its line, and the sum from the operands before it."""
    left, operator, right, total = sum_.groups()
    value = int(left) + int(right) if operator == "+" else int(left) - int(right)
    if modulo:
        operands = [found[2] for found in _CHAIN_VALUE.finditer(sum_.string, sum_.pos, sum_.start()) if found[2]]
        if operands and operands != [left, right]:
            return False
        value %= modulo
    return value == int(total) and total == result


_WORDS_STEP = re.compile(
    r"(?:\d+\. )?([A-Z][a-z]+) has \d+ (?:more|fewer) [a-z]+ than ([A-Z][a-z]+): (\d+) ([+-]) (\d+) = (\d+)"
)
_WORDS_GIVEN = re.compile(r"(?:\d+\. )?([A-Z][a-z]+) has (\d+) (?!more\b|fewer\b)[a-z]+\.")
_WORDS_VALUE = re.compile(r"\b(?!Answer\b)([A-Z][a-z]+):? (\d+)\b")


def read_words(text: str, answer_start: int) -> Iterator[StatedValue]:
    """Yield the statements of a word problem: `Rosa has 4 more marbles than Tom: 5 + 4 = 9.`, recaps, the answer."""
    for start, end in _lines(text, answer_start):
        step = _WORDS_STEP.match(text, start, end)
        given = _WORDS_GIVEN.match(text, start, end)
        if step:
            sum_ = _SUM.search(text, start, end)
            sound = sum_ is None or _follows_from_sum(sum_, step[6])
            yield StatedValue(step[2], step[3], *step.span(3), step[1])
            yield StatedValue(step[1], step[6], *step.span(6), step[1], True, sound)
        elif given:
            yield StatedValue(given[1], given[2], given.start(1), given.end(2), given[1], computed=True)
        else:
            for found in _WORDS_VALUE.finditer(text, start, end):
                yield StatedValue(found[1], found[2], *found.span())

    for found in _WORDS_VALUE.finditer(text, answer_start):
        yield StatedValue(found[1], found[2], *found.span())


_MAZE_NOTE = re.compile(r"\b([A-Z]+\d+) (?:by key )?(to|then) ([A-Z]+\d+)\b")
_MAZE_FLAG = re.compile(r"\b[A-Z]+\d+ and ([A-Z]+\d+) (new|done)\b")
_MAZE_MOVE = re.compile(r"'(?:start|move_to)', '([A-Z]+\d+)'")


def read_maze_search(text: str, answer_start: int) -> Iterator[StatedValue]:
    """Yield the notes of a search, `D6 to C5`, each a step when `, want` follows, its flags, and the moves of the plan.

    A room that has a note is done: one that is called new contradicts it. A move goes where the note of its room says.
    """
    searched: set[str] = set()
    ways: set[tuple[str, str]] = set()

    for start, end in _lines(text, answer_start):
        for found in _MAZE_NOTE.finditer(text, start, end):
            is_step = found.start() == start and text.startswith(", want", found.end(), end)
            name = f"{found[1]} {found[2]}"
            yield StatedValue(name, found[3], *found.span(), step=name if is_step else "", computed=is_step)
            searched.add(found[1])
            ways.add((name, found[3]))
        for found in _MAZE_FLAG.finditer(text, start, end):
            if (found[2] == "new") == (found[1] in searched):
                yield StatedValue(f"{found[1]} to", found[2], found.start(1), found.end(), step=f"{found[1]} to")

    for move, next_move in pairwise(_MAZE_MOVE.finditer(text, answer_start)):
        # On the way to a key the notes say `then`.
        link = "then" if (f"{move[1]} then", next_move[1]) in ways else "to"
        yield StatedValue(f"{move[1]} {link}", next_move[1], move.start(1), next_move.end())


_LEDGER_STEP = re.compile(r"([A-F][1-6]) : ")
_LEDGER_GIVEN = re.compile(r"([A-F][1-6]) = (\d) ,")
_LEDGER_VALUE = re.compile(r"\b([A-F][1-6]|[a-f])(?:(\d)\b| (unknown))")
_LEDGER_FIRST = re.compile(r"\bnew([A-F][1-6])\b")
_LEDGER_ANSWER = re.compile(r"\b([A-F][1-6]) = (\d)\b")
#: The name of the first line with the balance that is sought; its value is a line.
_FIRST = "first"


def read_ledger(text: str, answer_start: int) -> Iterator[StatedValue]:
    """Yield the statements of a ledger: `B2 : B13 , b7 , 3 - 7 = 6 , B26 , newB2 .`, and `B2 = 6` in the answer.

    The answer states the lines that are marked `key`, and the one that is marked `new`, which is the first with the
    balance that is sought: a second one contradicts it, and so does an answer with another line, or without any.
    """
    keys: set[str] = set()
    first = ""
    for start, end in _lines(text, answer_start):
        given = _LEDGER_GIVEN.match(text, start, end)
        if given:
            yield StatedValue(given[1], given[2], start, given.end(2), given[1], computed=True)
        step = _LEDGER_STEP.match(text, start, end)
        if step is None:
            continue

        # The operands of a line, and behind its sum the result.
        sum_ = _SUM.search(text, start, end)
        operands: list[str] = []
        for found in _LEDGER_VALUE.finditer(text, step.end(), end):
            is_result = sum_ is not None and found.start() > sum_.end()
            sound = sum_ is None or not is_result or _is_booked(operands, sum_, found[2])
            yield StatedValue(found[1], found[2], *found.span(), step=step[1], computed=is_result, sound=sound)
            operands.append(found[2])

        if text.find(", key", start, end) >= 0:
            keys.add(step[1])
        for found in _LEDGER_FIRST.finditer(text, start, end):
            first = found[1]
            yield StatedValue(_FIRST, first, *found.span())

    answered = list(_LEDGER_ANSWER.finditer(text, answer_start))
    for found in answered:
        yield StatedValue(found[1], found[2], *found.span())
    # The line that the answer takes for the first one: one that is not marked.
    if first and answered:
        others = [found for found in answered if found[1] not in keys]
        last = others[-1] if others else answered[-1]
        yield StatedValue(_FIRST, last[1] if others else None, *last.span())


def _is_booked(operands: Sequence[str], sum_: re.Match[str], result: str | None) -> bool:
    """Return whether a balance follows from the sum of its line: an amount is subtracted from an odd balance."""
    left, operator, right, total = sum_.groups()
    odd = int(left) % 2 == 1
    value = int(left) - int(right) if odd else int(left) + int(right)
    return [left, right] == operands and operator == "+-"[odd] and str(value % 10) == total == result


_EQUATION = re.compile(r"\b([A-Za-z](?:_?\w{1,12})?)\s*=\s*(-?\d+(?:[./]\d+)?)\b(?!\s*[-+*/^=])")


def read_equations(text: str, _answer_start: int) -> Iterator[StatedValue]:
    """Yield the values of named quantities in any text: `x = 12`, which is a step where it comes first."""
    named: set[str] = set()
    for found in _EQUATION.finditer(text):
        is_step = found[1] not in named
        named.add(found[1])
        yield StatedValue(found[1], found[2], *found.span(), found[1] if is_step else "", is_step)


#: The readers by the beginning of a benchmark's name.
READERS: dict[str, Reader] = {
    "CHAIN": read_chain,
    "WORDS": read_words,
    "SEQBENCH": read_maze_search,
    "LEDGER": read_ledger,
}


def read_statements(benchmark: str, text: str, answer_start: int) -> list[StatedValue]:
    """Return the statements of a trace's text by the reader of its benchmark, in their order."""
    reader = next((reader for family, reader in READERS.items() if benchmark.startswith(family)), read_equations)
    return sorted(reader(text, answer_start), key=lambda item: item.start)
