"""A maze as its facts state it, plans through it, and the search for the shortest plan (seqBench, arXiv 2509.16866).

A plan is a tuple of actions, an action a pair of words: `('move_to', 'E6')`. Rooms are joined only if a fact says so.
The search does not depend on the generator.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import Grade, KvatlasError, Status, grouped

Action = tuple[str, str]
Plan = tuple[Action, ...]

AGENT = "Bob"
TARGET = "Alice"
ACTIONS = ("start", "move_to", "pick_up_key", "use_key", "unlock_and_open_door_to", "rescue")
#: The word for a plan without an error, in place of an error class.
NO_ERROR = "none"

#: Longer lists are ignored, in characters. A plan of 400 actions has about 12,000.
LONGEST_LIST = 100_000
#: Only so many lists at the end of a text are read.
_LAST_LISTS = 50
# Flat inner brackets and no escapes: nothing that could exhaust a parser.
_FLAT = re.compile(r"\[(?:[^][(){}\\]|\([^][(){}\\]*\)|\[[^][(){}\\]*\])*\]")

#: The facts of a maze: an open door, a locked one and its key, the place of a key, the places of Bob and Alice.
SENTENCES = {
    "open": "Room {a} and {b} are connected by an open door.",
    "locked": "Room {a} and {b} are connected by a closed and locked door.",
    "requires": "The locked door between {a} and {b} requires key {key}.",
    "key": "Key {key} is in room {a}.",
    "start": f"{AGENT} is in room {{a}}.",
    "goal": f"{TARGET} is in room {{a}}.",
}
_PATTERNS = {
    kind: re.compile(re.sub(r"\{(\w+)\}", lambda m: r"(\d+)" if m[1] == "key" else r"([A-Z]+\d+)", text[:-1]) + r"\.")
    for kind, text in SENTENCES.items()
}


@dataclass(frozen=True)
class Maze:
    """The content of the facts.

    `doors` has for each room, in order of first mention, its neighbours with the key of the door between them, None for
    an open door. `locked_doors` has two rooms and a key for each; `keys` are pairs of key and room.
    """

    doors: Mapping[str, Mapping[str, str | None]]
    locked_doors: Sequence[tuple[str, str, str]]
    keys: Sequence[tuple[str, str]]
    start: str
    goal: str


def read_maze(sentences: Iterable[str]) -> Maze:
    """Return the maze of these facts, in any order. Raises KvatlasError for an unknown sentence."""
    facts: dict[str, list[tuple[str, ...]]] = {kind: [] for kind in SENTENCES}
    for sentence in map(str.strip, sentences):
        matches = ((kind, pattern.fullmatch(sentence)) for kind, pattern in _PATTERNS.items())
        kind, match = next(((kind, match) for kind, match in matches if match), ("", None))
        if match is None:
            raise KvatlasError(f"{sentence[:80]!r} is no fact of a seqBench maze.")
        facts[kind].append(match.groups())
    if len(facts["start"]) != 1 or len(facts["goal"]) != 1:
        raise KvatlasError(f"The facts of a seqBench maze say once where {AGENT} is and once where {TARGET} is.")

    ((start,),) = facts["start"]
    ((goal,),) = facts["goal"]
    key_of = {frozenset((a, b)): key for a, b, key in facts["requires"]}
    # A door without a fact about its key stays locked: no key is called "".
    locked_doors = [(a, b, key_of.get(frozenset((a, b)), "")) for a, b in facts["locked"]]
    doors: dict[str, dict[str, str | None]] = {start: {}, goal: {}}
    for a, b, key in [*((a, b, None) for a, b in facts["open"]), *locked_doors]:
        doors.setdefault(a, {})[b] = key
        doors.setdefault(b, {})[a] = key
    return Maze(doors, locked_doors, [(key, room) for key, room in facts["key"]], start, goal)


def count_doors_and_moves(plan: Plan) -> tuple[int, int]:
    """Return the numbers of locked doors (B) and moves (m) on the way of a plan."""
    names = [name for name, _ in plan]
    return names.count("use_key"), names.count("move_to")


def format_plan(plan: Sequence[Action]) -> str:
    """Return the answer format: a Python list of tuples, as `[('start', 'F6'), ('move_to', 'E6')]`."""
    return str([tuple(action) for action in plan])


def parse_plan(text: str) -> Plan | None:
    """Return the last well-formed list in the text whose items are tuples that begin with a word; None without any.

    Numbers count as words, inner lists and texts that begin with an action (`'use_key 12'`) as tuples. The last bracket
    at the end of the text may be missing. An item that is no pair gets the argument "", which no action accepts.
    """
    for candidate in _last_lists(text):
        if len(candidate) > LONGEST_LIST or not _FLAT.fullmatch(candidate):
            continue
        try:
            items = ast.literal_eval(candidate)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        plan = _plan_of_items(items) if isinstance(items, list) else None
        if plan is not None:
            return plan
    return None


def _plan_of_items(items: list[Any]) -> Plan | None:
    """Return the plan in a list; None if an item is neither a tuple with a word first nor the text of an action."""
    if items and all(isinstance(item, str) for item in items):
        pairs = [tuple(re.findall(r"\w+", item)) for item in items]
        return tuple(pairs) if all(len(pair) == 2 and pair[0] in ACTIONS for pair in pairs) else None

    plan: list[Action] = []
    for item in items:
        if not isinstance(item, tuple | list) or not item or not isinstance(item[0], str):
            return None
        plan.append((item[0], str(item[1]) if len(item) == 2 else ""))
    return tuple(plan)


def _last_lists(text: str) -> Iterator[str]:
    """Yield the text from the last unclosed bracket on, closed; then balanced [...] stretches, the last end first."""
    opened: list[int] = []
    lists: list[tuple[int, int]] = []
    text = text[max(0, len(text) - 2 * LONGEST_LIST) :]
    for bracket in re.finditer(r"[][]", text):
        if bracket[0] == "[":
            opened.append(bracket.start())
        elif opened:
            lists.append((opened.pop(), bracket.end()))

    if opened:
        yield text[opened[-1] :].rstrip(" \t\r\n`.,") + "]"
    for begin, end in lists[: -_LAST_LISTS - 1 : -1]:
        yield text[begin:end]


def follow(maze: Maze, plan: Plan) -> tuple[int, str]:
    """Return the number of possible leading actions, and the error class of the next one, or `NO_ERROR`."""
    walk = _Walk(maze)
    for index, (name, argument) in enumerate(plan):
        if walk.is_over:
            # The rescue before this action came too early.
            return index - 1, "misplaced_rescue"
        error = walk.act(name, argument)
        if error:
            return index, error
    return len(plan), NO_ERROR if walk.is_over else "ended_early"


class _Walk:
    """The state of a maze while the actions of a plan are followed, up to the first error."""

    def __init__(self, maze: Maze) -> None:
        self.maze = maze
        #: Empty before the start.
        self.room = ""
        self.held_keys: set[str] = set()
        self.opened: set[frozenset[str]] = set()
        #: The key of the action before, if that was `use_key`; else empty.
        self.used_key = ""
        self.is_over = False

    def act(self, name: str, argument: str) -> str:
        """Take an action; return its error class, empty without an error."""
        if name not in ACTIONS or not argument:
            return "format"
        is_first = not self.room
        if (name == "start") != is_first:
            return "bad_start"
        used_key = self.used_key
        self.used_key = ""
        if name == "unlock_and_open_door_to":
            return self._unlock(argument, used_key)
        if used_key:
            # Only the door may follow the use of its key.
            return "use_without_unlock"

        if name == "start":
            self.room = argument
            return "" if argument == self.maze.start else "bad_start"
        if name == "move_to":
            doors = self.maze.doors.get(self.room, {})
            if argument not in doors:
                return "no_such_door"
            if doors[argument] is not None and frozenset((self.room, argument)) not in self.opened:
                return "door_locked"
            self.room = argument
            return ""
        if name == "pick_up_key":
            if (argument, self.room) not in self.maze.keys or argument in self.held_keys:
                return "key_not_here"
            self.held_keys.add(argument)
            return ""
        if name == "use_key":
            self.used_key = argument
            return "" if argument in self.held_keys else "key_not_held"
        self.is_over = True
        return "" if self.room == self.maze.goal and argument == TARGET else "misplaced_rescue"

    def _unlock(self, room: str, used_key: str) -> str:
        """Open the door to a room with the key that was just used, empty without one."""
        door = frozenset((self.room, room))
        needed = self.maze.doors.get(self.room, {}).get(room)
        if needed is None or (used_key and door in self.opened):
            return "no_such_door"
        if not used_key:
            return "use_without_unlock" if needed in self.held_keys else "key_not_held"
        if used_key != needed:
            return "wrong_key"
        self.opened.add(door)
        return ""


def judge(maze: Maze, reference: Plan, plan: Plan) -> Grade:
    """Compare a plan with the reference and with the maze.

    `progress` is the share of the reference with which the plan begins; `progress_valid` is the number of possible
    leading actions over the length of the reference, and 1 only for a rescue. `precision` and `recall` compare the
    actions as multisets. `first_error_index` is the length of the plan if there is no error.
    """
    solved = plan == reference
    pairs = enumerate(zip(plan, reference, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(plan), len(reference)))
    done, error = follow(maze, plan)
    valid = error == NO_ERROR

    index = done
    if valid and not solved:
        index = same
        error = "not_optimal"
    if not solved:
        # If the plan continues after the whole reference, the last action of the reference, the rescue, is too early.
        same = min(same, len(reference) - 1)

    common = sum((Counter(plan) & Counter(reference)).values())
    metrics: dict[str, float | str] = {
        "valid": float(valid),
        "progress_valid": 1.0 if valid else min(done, len(reference) - 1) / len(reference),
        "precision": common / len(plan) if plan else 0.0,
        "recall": common / len(reference),
        "first_error": error,
        "first_error_index": index,
    }
    return Grade(solved, same / len(reference), format_plan(plan), Status.OK, metrics)


def check_maze(maze: Maze, plan: Plan) -> None:
    """Raise AssertionError unless the plan is possible, is the only shortest one, and needs every key."""
    if follow(maze, plan) != (len(plan), NO_ERROR):
        raise AssertionError(f"the plan cannot be followed: {follow(maze, plan)}")
    if shortest(maze) != (len(plan), 1):
        raise AssertionError(f"the plan has {len(plan)} actions, the search finds {shortest(maze)}")
    for name, key in plan:
        if name == "use_key" and shortest(maze, without=key) != (0, 0):
            raise AssertionError(f"key {key} is not needed")


#: The key of each door, None for an open one, by its two rooms.
_Doors = dict[str, dict[str, str | None]]
#: A room, the keys held, the keys of opened doors, the key just used.
_Place = tuple[str, frozenset[str], frozenset[str], str]


def shortest(maze: Maze, without: str = "") -> tuple[int, int]:
    """Return the number of actions of a shortest plan, and of such plans; (0, 0) if the goal cannot be reached.

    The key `without` stays where it is. Dead ends without a useful key are removed first: no shortest plan enters them.
    """
    keys = {key: room for key, room in maze.keys if key != without}
    doors, keys_in = _without_dead_ends(maze, keys)

    nothing: frozenset[str] = frozenset()
    layer: dict[_Place, int] = {(maze.start, nothing, nothing, ""): 1}
    done = set(layer)
    actions = 2
    while layer:
        plans = sum(count for (room, *_), count in layer.items() if room == maze.goal)
        if plans:
            return actions, plans

        following: Counter[_Place] = Counter()
        for place, count in layer.items():
            for next_place in _next_places(place, doors, keys_in):
                following[next_place] += count
        layer = {place: count for place, count in following.items() if place not in done}
        done.update(layer)
        actions += 1
    return 0, 0


def _next_places(place: _Place, doors: _Doors, keys_in: Mapping[str, Sequence[str]]) -> Iterator[_Place]:
    """Yield the places after each possible action."""
    room, held, opened, used = place
    if used:
        yield room, held, opened | {used}, ""
        return
    for key in keys_in.get(room, ()):
        if key not in held:
            yield room, held | {key}, opened, ""
    for neighbour, needed in doors[room].items():
        if needed is None or needed in opened:
            yield neighbour, held, opened, ""
        elif needed in held:
            yield room, held, opened, needed


def _without_dead_ends(maze: Maze, keys: Mapping[str, str]) -> tuple[_Doors, dict[str, list[str]]]:
    """Return the doors by room, and keys by room, without those that no shortest plan can need; `keys` have rooms."""
    doors = {room: dict(neighbours) for room, neighbours in maze.doors.items()}
    keys_in = grouped(keys, keys.__getitem__)

    ahead = list(doors)
    while ahead:
        room = ahead.pop()
        if room not in doors or len(doors[room]) > 1 or keys_in.get(room) or room in (maze.start, maze.goal):
            continue
        for neighbour, key in doors.pop(room).items():
            del doors[neighbour][room]
            ahead.append(neighbour)
            if key is not None and key in keys:
                keys_in[keys[key]].remove(key)
                ahead.append(keys[key])
    return doors, keys_in
