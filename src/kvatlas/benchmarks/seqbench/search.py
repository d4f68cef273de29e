"""Search over (room, keys held, doors opened): what a plan is checked against. It knows nothing of the generator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from kvatlas.benchmarks.seqbench.facts import Maze
from kvatlas.benchmarks.seqbench.plans import NO_ERROR, Plan, follow


def check(maze: Maze, plan: Plan) -> None:
    """Raise AssertionError unless the plan can be followed, is the only shortest one, and needs every key."""
    if follow(maze, plan) != (len(plan), NO_ERROR):
        raise AssertionError(f"the plan cannot be followed: {follow(maze, plan)}")
    if shortest(maze) != (len(plan), 1):
        raise AssertionError(f"the plan has {len(plan)} actions, the search finds {shortest(maze)}")
    for name, key in plan:
        if name == "use_key" and reachable(maze, without=key):
            raise AssertionError(f"key {key} is not needed")


def reachable(maze: Maze, without: str = "") -> bool:
    """Whether the goal can be reached, if need be without ever holding one key."""
    lying = _keys_by_room(maze)
    carried: set[str] = set()
    seen = {maze.start}
    shut: dict[str, list[str]] = {}
    ahead = [maze.start]
    while ahead:
        room = ahead.pop()
        new = [key for key in lying.get(room, ()) if key != without]
        carried.update(new)
        there = [far for key in new for far in shut.pop(key, ())]
        for neighbour, needed in maze.doors[room].items():
            if needed is None or needed in carried:
                there.append(neighbour)
            else:
                shut.setdefault(needed, []).append(neighbour)
        for neighbour in there:
            if neighbour not in seen:
                seen.add(neighbour)
                ahead.append(neighbour)
    return maze.goal in seen


def shortest(maze: Maze) -> tuple[int, int]:
    """Actions of a shortest plan, and how many plans are that short; (0, 0) if the goal cannot be reached.

    Breadth-first search over (room, keys held, doors opened). Dead ends that hold nothing of use are cut first, again
    and again: no shortest plan enters them.
    """
    doors, lying = _cut_dead_ends(maze)
    number = {key: i for i, key in enumerate(sorted({k for k, _ in maze.keys}))}
    # A state is (room, bits of keys held, bits of doors opened); a door's bit is its key's.
    begin = (maze.start, 0, 0)
    ways: dict[tuple[str, int, int], int] = {begin: 1}
    layers: deque[dict[tuple[str, int, int], int]] = deque([ways, {}, {}])
    done: set[tuple[str, int, int]] = set()
    actions = 1
    while any(layers):
        layer = layers.popleft()
        layers.append({})
        plans = 0
        for state, count in layer.items():
            if state in done:
                continue
            done.add(state)
            room, carried, opened = state
            if room == maze.goal:
                plans += count
                continue
            for cost, following in _following(doors, lying, number, room, carried, opened):
                if following not in done:
                    layers[cost - 1][following] = layers[cost - 1].get(following, 0) + count
        if plans:
            return actions + 1, plans
        actions += 1
    return 0, 0


def _following(
    doors: Mapping[str, Mapping[str, str | None]],
    lying: Mapping[str, Iterable[str]],
    number: Mapping[str, int],
    room: str,
    carried: int,
    opened: int,
) -> Iterable[tuple[int, tuple[str, int, int]]]:
    """States after one action (a move, a key picked up) or two (a key used and its door unlocked), with their cost."""
    for key in lying.get(room, ()):
        if not carried >> number[key] & 1:
            yield 1, (room, carried | 1 << number[key], opened)
    for neighbour, needed in doors[room].items():
        if needed is None or (needed in number and opened >> number[needed] & 1):
            yield 1, (neighbour, carried, opened)
        elif needed in number and carried >> number[needed] & 1:
            yield 2, (room, carried, opened | 1 << number[needed])


def _cut_dead_ends(maze: Maze) -> tuple[dict[str, dict[str, str | None]], dict[str, list[str]]]:
    """The doors by room, and keys by room, without what no shortest plan can need."""
    doors = {room: dict(neighbours) for room, neighbours in maze.doors.items()}
    lying = _keys_by_room(maze)
    where = dict(maze.keys)
    ahead = list(doors)
    while ahead:
        room = ahead.pop()
        if room not in doors or len(doors[room]) > 1 or lying.get(room) or room in (maze.start, maze.goal):
            continue
        for neighbour, key in doors.pop(room).items():
            del doors[neighbour][room]
            ahead.append(neighbour)
            if key in where:
                lying[where[key]].remove(key)
                ahead.append(where[key])
    return doors, lying


def _keys_by_room(maze: Maze) -> dict[str, list[str]]:
    lying: dict[str, list[str]] = {}
    for key, room in maze.keys:
        lying.setdefault(room, []).append(key)
    return lying
