"""The reference solutions of small seqBench mazes that the embedded models learn from.

The search goes backwards, from the room to be reached to the room one comes from, depth first. Every room found notes
the next room on the way (`D6 to C5`), lists its other doors and says whether it is the wanted one; dead ends go back
room by room. The answer is read off forwards, from note to note, so it needs notes from all over the trace. With a
locked door there are two searches: from Alice to the key's room (`D6 to C5`, `D6 by key to C5`), then from there to Bob
(`E6 then F5`). Every few rooms a recap repeats some notes and some doors are checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from examples import Example, Scribe
from vocabulary import words

from kvatlas.benchmarks.seqbench.mazes import Instance
from kvatlas.benchmarks.seqbench.plans import format_plan

RECAP_RATE = 0.25
CHECK_RATE = 0.2
LOOKUP_WEIGHT = 3.0
# The order in which doors are listed is free, so the next one is half a lookup.
CHOICE_WEIGHT = 2.0


@dataclass(frozen=True)
class Doors:
    """Rooms beyond the doors of each room, and the pair of rooms that the locked door joins, if there is one."""

    beyond: dict[str, list[str]]
    locked: frozenset[str] | None


def maze_example(instance: Instance, rng: random.Random) -> Example:
    """Prompt, thinking and answer of one maze with at most one locked door."""
    maze = instance.maze
    locked = next((frozenset(door[:2]) for door in maze.locked_doors), None)
    doors = Doors({room: list(beyond) for room, beyond in maze.doors.items()}, locked)
    scribe = Scribe("maze", "\n".join(instance.facts))
    if locked is None:
        scribe.say("Bob", " at ", maze.start, " , ", "Alice", " at ", maze.goal, " .\n")
        _search(scribe, doors, maze.goal, maze.start, " to ", rng)
    else:
        ((_, room),) = maze.keys
        scribe.say("key", " at ", room, " , ", "Alice", " at ", maze.goal, " .\n")
        _search(scribe, doors, maze.goal, room, " to ", rng)
        scribe.say("Bob", " at ", maze.start, " , ", "key", " at ", room, " .\n")
        _search(scribe, doors, room, maze.start, " then ", rng)
    return scribe.finish(words(format_plan(instance.plan)))


def maze_drill(instance: Instance, rng: random.Random) -> Example:
    """All doors of all rooms, one room after the other, without a search."""
    doors = instance.maze.doors
    scribe = Scribe("maze", "\n".join(instance.facts))
    for room in rng.sample(list(doors), len(doors)):
        scribe.say("back to ", room, " : ")
        for i, other in enumerate(rng.sample(list(doors[room]), len(doors[room]))):
            _door(scribe, room, other, i)
        scribe.say(" .\n")
    return scribe.finish([])


def _search(scribe: Scribe, doors: Doors, root: str, target: str, link: str, rng: random.Random) -> None:
    notes: dict[str, str] = {}

    def others(room: str) -> list[str]:
        # Before the key is taken, the locked door is closed.
        shut = doors.locked if link == " then " else None
        results = [item for item in doors.beyond[room] if item != notes.get(room) and frozenset((room, item)) != shut]
        return rng.sample(results, len(results))

    def note(room: str) -> None:
        towards = notes[room]
        word = " by key to " if frozenset((room, towards)) == doors.locked else link
        scribe.result(f"{room}{link}", room, word, towards)

    room = root
    while True:
        if room == root:
            scribe.say(room)
        else:
            note(room)
        scribe.say(", want ", target, " : ")
        if room == target:
            scribe.say("yes", " .\n")
            return
        scribe.say("no", " , ")
        ahead = others(room)
        if not ahead:
            scribe.say("none", " .\n")
        for i, other in enumerate(ahead):
            _door(scribe, room, other, i)
        if ahead:
            scribe.say(" .\n")
            if rng.random() < RECAP_RATE and room != root:
                _recap(scribe, _path(notes, room), note, rng)
            elif rng.random() < CHECK_RATE:
                _check(scribe, doors, room, rng.choice(ahead))
        new = ahead
        while not new:
            room = notes[room]
            new = []
            scribe.say("back to ", room, " : ")
            for i, other in enumerate(others(room)):
                _door(scribe, room, other, i)
                scribe.heavy(LOOKUP_WEIGHT, " done" if other in notes else " new")
                if other not in notes:
                    new.append(other)
            scribe.say(" .\n")
        notes[new[0]] = room
        room = new[0]


def _door(scribe: Scribe, room: str, other: str, number: int) -> None:
    """`C4 and B4`, as the fact says it: without the first room the model guesses neighbours from the grid."""
    scribe.say(*([" , "] if number else []), room, " and ")
    scribe.heavy(CHOICE_WEIGHT, other)


def _path(notes: dict[str, str], room: str) -> list[str]:
    path = []
    while room in notes:
        path.append(room)
        room = notes[room]
    return path


def _recap(scribe: Scribe, path: list[str], note: Callable[[str], None], rng: random.Random) -> None:
    scribe.say("so far, ")
    for i, room in enumerate(rng.sample(path, min(len(path), rng.randint(2, 4)))):
        if i:
            scribe.say(" , ")
        note(room)
    scribe.say(" .\n")


def _check(scribe: Scribe, doors: Doors, room: str, other: str) -> None:
    state = " locked" if frozenset((room, other)) == doors.locked else " open"
    scribe.say("wait, let me check, ", room, " and ", other, state, " , ", "yes", " .\n")
