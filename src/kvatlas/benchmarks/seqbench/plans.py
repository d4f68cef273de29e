"""Plans through a maze: how they are written, read, followed and measured (seqBench, arXiv 2509.16866).

A plan is a tuple of actions, an action a pair of words: `('move_to', 'E6')`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvatlas.benchmarks.seqbench.facts import TARGET, Maze

Action = tuple[str, str]
Plan = tuple[Action, ...]

ACTIONS = ("start", "move_to", "pick_up_key", "use_key", "unlock_and_open_door_to", "rescue")

#: First-error classes, and the word for a plan that has no error.
ERRORS = (
    "bad_start",
    "no_such_door",
    "door_locked",
    "key_not_here",
    "key_not_held",
    "wrong_key",
    "use_without_unlock",
    "misplaced_rescue",
    "ended_early",
    "not_optimal",
    "format",
)
NO_ERROR = "none"

#: A plan of 400 actions has about 12,000 characters; longer lists, and lists far from the end, are not looked at.
LONGEST_LIST = 100_000
_LAST_LISTS = 50


def format_plan(plan: Sequence[Action]) -> str:
    """The answer format: a Python list of tuples, as `[('start', 'F6'), ('move_to', 'E6')]`."""
    return str([tuple(action) for action in plan])


def parse_plan(text: str) -> Plan | None:
    """The last well-formed list in the text whose items are tuples that begin with a word; None if there is none.

    Numbers count as words (`('use_key', 12)`), inner lists as tuples, and so do texts that begin with an action
    (`'use_key 12'`). The last bracket of a list that ends the text may be missing. An item that is no pair gets the
    argument "", which no action accepts. Nothing is evaluated but literals, and no more than `LONGEST_LIST` characters
    at once.
    """
    for candidate in _last_lists(text):
        try:
            items = ast.literal_eval(candidate)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(items, list) and items and all(isinstance(item, str) for item in items):
            items = [tuple(re.findall(r"\w+", item)) for item in items]
            if not all(len(item) == 2 and item[0] in ACTIONS for item in items):
                continue
        if isinstance(items, list) and all(_is_action(item) for item in items):
            return tuple((item[0], str(item[1]) if len(item) == 2 else "") for item in items)
    return None


def _last_lists(text: str) -> Iterator[str]:
    """Balanced [...] stretches, the one that ends last first; at most two brackets deep, so that parsing is cheap.

    Before them the stretch from the last bracket that is not closed to the end, closed.
    """
    opened: list[int] = []
    lists: list[tuple[int, int]] = []
    offset = max(0, len(text) - 2 * LONGEST_LIST)
    for bracket in re.finditer(r"[][]", text[offset:]):
        if bracket[0] == "[":
            opened.append(bracket.start())
        elif opened:
            lists.append((opened.pop(), bracket.end()))
    if opened:
        candidate = text[offset + opened[-1] :].rstrip(" \t\r\n`.,") + "]"
        if len(candidate) <= LONGEST_LIST and _FLAT.fullmatch(candidate):
            yield candidate
    for begin, end in lists[: -_LAST_LISTS - 1 : -1]:
        candidate = text[offset + begin : offset + end]
        if len(candidate) <= LONGEST_LIST and _FLAT.fullmatch(candidate):
            yield candidate


# Flat inner brackets and no escapes: nothing that could exhaust a parser.
_FLAT = re.compile(r"\[(?:[^][(){}\\]|\([^][(){}\\]*\)|\[[^][(){}\\]*\])*\]")


def _is_action(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) > 0 and isinstance(item[0], str)


@dataclass
class _State:
    """Where a walk stands: the room (None before the start), keys held, doors opened, the key just used, the end."""

    room: str | None = None
    held: set[str] = field(default_factory=set)
    opened: set[frozenset[str]] = field(default_factory=set)
    used: str | None = None
    rescued: bool = False


def follow(maze: Maze, plan: Plan) -> tuple[int, str]:
    """Number of leading actions that can be done, and why the next one cannot (`NO_ERROR` for a rescue at the end).

    The rescue must be the last action: with anything after it, it is itself the misplaced one.
    """
    state = _State()
    for index, (name, argument) in enumerate(plan):
        if state.rescued:
            return index - 1, "misplaced_rescue"
        error = _step(maze, state, name, argument)
        if error:
            return index, error
    return len(plan), NO_ERROR if state.rescued else "ended_early"


def _step(maze: Maze, state: _State, name: str, argument: str) -> str | None:
    """Do one action; the error class if it cannot be done."""
    if name not in ACTIONS or not argument:
        return "format"
    if (name == "start") != (state.room is None):
        return "bad_start"
    if (name == "unlock_and_open_door_to") != (state.used is not None):
        return _unlock_apart(maze, state, name, argument)
    return _STEPS[name](maze, state, argument)


def _unlock_apart(maze: Maze, state: _State, name: str, argument: str) -> str:
    """The error of a `use_key` that no unlock follows, or of an unlock that no `use_key` precedes."""
    if name != "unlock_and_open_door_to":
        return "use_without_unlock"
    key = maze.doors.get(state.room or "", {}).get(argument)
    if key is None:
        return "no_such_door"
    return "use_without_unlock" if key in state.held else "key_not_held"


def _start(maze: Maze, state: _State, room: str) -> str | None:
    state.room = room
    return None if room == maze.start else "bad_start"


def _move(maze: Maze, state: _State, room: str) -> str | None:
    doors = maze.doors[state.room or ""]
    if room not in doors:
        return "no_such_door"
    if doors[room] is not None and frozenset((state.room, room)) not in state.opened:
        return "door_locked"
    state.room = room
    return None


def _pick_up(maze: Maze, state: _State, key: str) -> str | None:
    if (key, state.room) not in maze.keys or key in state.held:
        return "key_not_here"
    state.held.add(key)
    return None


def _use(maze: Maze, state: _State, key: str) -> str | None:
    if key not in state.held:
        return "key_not_held"
    state.used = key
    return None


def _unlock(maze: Maze, state: _State, room: str) -> str | None:
    used, state.used = state.used, None
    key = maze.doors[state.room or ""].get(room)
    door = frozenset((state.room or "", room))
    if key is None or door in state.opened:
        return "no_such_door"
    if key != used:
        return "wrong_key"
    state.opened.add(door)
    return None


def _rescue(maze: Maze, state: _State, target: str) -> str | None:
    state.rescued = True
    return None if state.room == maze.goal and target == TARGET else "misplaced_rescue"


_STEPS = {
    "start": _start,
    "move_to": _move,
    "pick_up_key": _pick_up,
    "use_key": _use,
    "unlock_and_open_door_to": _unlock,
    "rescue": _rescue,
}


@dataclass(frozen=True)
class Verdict:
    """A plan against the reference and against the maze; all but the last two are in [0, 1].

    `progress` is the share of the reference plan that the plan begins with; `progress_valid` counts leading actions
    that can be done instead, over the length of the reference, and is 1 only for a rescue. `precision` and `recall`
    compare the actions as multisets. `first_error_index` counts from 0 and is the length of the plan if none is wrong.
    """

    solved: bool
    valid: bool
    progress: float
    progress_valid: float
    precision: float
    recall: float
    first_error: str
    first_error_index: int


def judge(maze: Maze, reference: Plan, plan: Plan) -> Verdict:
    """All metrics of a plan."""
    solved = plan == reference
    pairs = enumerate(zip(plan, reference, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(plan), len(reference)))
    done, error = follow(maze, plan)
    valid = error == NO_ERROR
    index = done
    if valid and not solved:
        index, error = same, "not_optimal"
    if not solved:
        # All of the reference and more: its last action, the rescue, came too early.
        same = min(same, len(reference) - 1)
    common = sum((Counter(plan) & Counter(reference)).values())
    return Verdict(
        solved=solved,
        valid=valid,
        progress=same / len(reference),
        progress_valid=1.0 if valid else min(done, len(reference) - 1) / len(reference),
        precision=common / len(plan) if plan else 0.0,
        recall=common / len(reference),
        first_error=error,
        first_error_index=index,
    )
