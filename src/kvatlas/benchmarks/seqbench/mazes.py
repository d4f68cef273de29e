"""Mazes with tunable depth: the generator of seqBench (arXiv 2509.16866).

The rooms of a grid are joined to a tree by Kruskal's algorithm with shuffled walls, so that one path joins any two
rooms. The plan is built backwards from the goal (rewind construction): choose a key room, lock one random door of the
path to it, put the door's key there, continue from there; the last leg ends at the start. With m moves and B locked
doors the plan has L = m + 2 + 3B actions.

Choices where the source is silent:

- With keys of the kind `detour` a key room is a dead end of the walk. With `on_way`, as in the published examples, the
  walk is one path, on which each key lies before its door and behind the door of the key before. With either the
  optimal plan is the only one of its length, and "equals the reference" means "optimal".
- Distracting facts are true and grow from the solution path: a random door from a room already named to a new room,
  again and again. So they are side corridors that look like the path until they end.
- In mazes with locked doors a quarter of the distracting doors are locked, each with its key in a room already named.
  In mazes without (B = 0) and in small grids (up to 6x6) all distracting doors are open.
- Paths in such trees are seldom longer than five sides of the grid. If the walk is one longer path, it is laid first: a
  piece of the closed way around a tree of half the grid's size. Kruskal's algorithm then joins the others.
- Every maze is checked by search: the shortest way takes the plan, no other plan is as short, and without any one of
  its keys there is no plan.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvatlas.benchmarks.seqbench.plans import SENTENCES, TARGET, Action, Maze, Plan, check_maze, read_maze
from kvatlas.core import KvatlasError

_DRAWS = 400
_GOALS_PER_TREE = 8
_DECOY_LOCKED = 0.25
#: Grids of at most so many rows and columns are small: they have simpler defaults and no locked distracting doors.
SMALL = 6
#: The kinds of places of keys.
ON_WAY = "on_way"
DETOUR = "detour"
#: Paths without locked doors of more moves than this, over (columns + rows), are laid before the tree.
_LAID = 2.5

Edge = tuple[int, int]
#: The neighbours of each room in a spanning tree of the grid, whose rooms are numbered row by row from 0.
Tree = list[list[int]]
#: A piece of the walk: its rooms in walking order, from the start or a key room to the next key room or the goal; and
#: the index i of the locked door between rooms[i] and rooms[i + 1], None on the first leg.
Leg = tuple[list[int], int | None]


@dataclass(frozen=True)
class MazeShape:
    """A kind of maze: grid, logical depth L (`length`, None for any), locked doors B, noise N, shuffle ratio S, `keys`.

    `noise` is distracting facts over supporting facts; `shuffle` the share of the facts' places that is permuted;
    `keys` lie on the way (`on_way`) or in dead ends (`detour`).
    """

    columns: int
    rows: int
    length: int | None = None
    doors: int = 0
    noise: float = 0.0
    shuffle: float = 0.0
    keys: str = DETOUR

    def __post_init__(self) -> None:
        grid = f"{self.columns}x{self.rows}"
        rooms = self.columns * self.rows
        if min(self.columns, self.rows) < 1 or not 4 <= rooms <= 10_000:
            raise KvatlasError(f"A maze of {grid} rooms cannot be drawn; expected grids of 4 to 10000 rooms.")
        for name, value, most in (("noise ratio N", self.noise, 10), ("shuffle ratio S", self.shuffle, 1)):
            if not 0 <= value <= most:
                raise KvatlasError(f"The {name} is {value:g}; expected 0 to {most}.")
        if self.doors < 0 or 2 * self.doors + 2 > rooms:
            raise KvatlasError(
                f"B = {self.doors} locked doors do not fit into {grid} rooms; expected 0 to {rooms // 2 - 1}."
            )

        # A door needs a leg of two moves to its key and back past it, and the last leg is at least one move.
        shortest = 3 * self.doors + 2 + (2 * self.doors + 1)
        longest = 3 * self.doors + 2 + (1 if self.keys == ON_WAY else self.doors + 1) * (rooms - 1)
        if self.length is not None and not shortest <= self.length <= longest:
            raise KvatlasError(
                f"L = {self.length} actions do not fit {grid} rooms and B = {self.doors} locked doors; expected "
                f"{shortest} to {longest}."
            )

    @property
    def small(self) -> bool:
        return max(self.columns, self.rows) <= SMALL

    @property
    def is_one_path(self) -> bool:
        """Return True if the walk crosses no room twice."""
        return self.keys == ON_WAY or not self.doors


@dataclass(frozen=True)
class Instance:
    """One maze with its only optimal plan and its facts in order."""

    maze: Maze
    plan: Plan
    facts: tuple[str, ...]


def draw(shape: MazeShape, rng: random.Random) -> Instance:
    """Return a random checked instance. Raises KvatlasError if many draws give none of that shape."""
    longest = 0
    for _ in range(_DRAWS):
        # A walk that a random tree is unlikely to have is laid before the tree.
        path: list[int] = []
        if shape.length is not None and shape.is_one_path:
            moves = shape.length - 3 * shape.doors - 2
            if moves > _LAID * (shape.columns + shape.rows):
                path = long_path(shape.columns, shape.rows, moves, rng)
        tree = spanning_tree(shape.columns, shape.rows, rng, path)

        for _ in range(1 if path or shape.length is None else _GOALS_PER_TREE):
            legs, reached = _walk_through(tree, path, shape, rng)
            longest = max(longest, reached)
            instance = _furnish(tree, legs, shape, rng) if legs else None
            if instance is not None:
                check_maze(instance.maze, instance.plan)
                return instance
    length = f"L = {shape.length}, " if shape.length else ""
    raise KvatlasError(
        f"None of {_DRAWS} mazes of {shape.columns}x{shape.rows} rooms has {length}B = {shape.doors} and "
        f"N = {shape.noise:g} (the longest plan has {longest} actions); take a larger grid, or smaller L, B or N."
    )


def _walk_through(tree: Tree, path: list[int], shape: MazeShape, rng: random.Random) -> tuple[list[Leg] | None, int]:
    """Return the legs of a walk, along the `path` if one was laid, None for none; and the largest L in its reach."""
    if not shape.is_one_path:
        return _rewind(tree, shape, rng)
    reached = len(path) + 1
    # The actions that pick up and use keys and open locked doors.
    key_actions = 3 * shape.doors
    if not path:
        # The whole way without its doors, which are added afterwards.
        length = None if shape.length is None else shape.length - key_actions
        legs, reached = _rewind(tree, replace(shape, doors=0, length=length), rng)
        path = legs[0][0] if legs else []
    reached += key_actions

    # Cut the path at the rooms of keys, with a locked door on each leg but the first.
    doors = shape.doors
    spare = len(path) - 1 - (2 * doors + 1)
    if not path or spare < 0:
        return None, reached
    # The first leg has a move, each other two; the spare moves are spread at random.
    spread = sorted(rng.sample(range(spare + doors), doors))
    cuts = [cut + index + 1 for index, cut in enumerate(spread)]
    first, *others = [path[begin : end + 1] for begin, end in pairwise([0, *cuts, len(path) - 1])]
    return [(first, None), *((leg, rng.randrange(1, len(leg) - 1)) for leg in others)], reached


def room_name(column: int, row: int) -> str:
    """Return column letters as in a spreadsheet and row number, both from 0: (0, 0) is A1, (26, 4) is AA5."""
    letters = ""
    column += 1
    while column:
        column, letter = divmod(column - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return f"{letters}{row + 1}"


def spanning_tree(columns: int, rows: int, rng: random.Random, path: Sequence[int] = ()) -> Tree:
    """Return a random tree by Kruskal's algorithm over all walls in random order, after the steps of a `path`."""
    rooms = columns * rows
    walls = [(room, room + 1) for room in range(rooms) if (room + 1) % columns]
    walls += [(room, room + columns) for room in range(rooms - columns)]
    # One sort by random numbers takes a third of the time of random.shuffle, which dominates for large mazes.
    walls.sort(key=lambda _: rng.random())
    walls[:0] = pairwise(path)

    # Disjoint sets; scipy's would take half a second to import. Rooms point to one nearer to the root of their set.
    above = list(range(rooms))

    def root_of(room: int) -> int:
        while above[room] != room:
            above[room] = above[above[room]]
            room = above[room]
        return room

    tree: Tree = [[] for _ in range(rooms)]
    for a, b in walls:
        root = root_of(a)
        other_root = root_of(b)
        if root != other_root:
            above[root] = other_root
            tree[a].append(b)
            tree[b].append(a)
    return tree


def long_path(columns: int, rows: int, moves: int, rng: random.Random) -> list[int]:
    """Return a path of that many moves, cut from the way around a random tree; empty if that way is too short.

    Each room of the tree is a square of four rooms of the grid; the way around it visits every one of them once.
    """
    across = columns // 2
    down = rows // 2
    tree = spanning_tree(across, down, rng) if min(across, down) > 1 else []

    # The two neighbours of each room on the closed way.
    adjacent: dict[int, list[int]] = {}
    for square, neighbours in enumerate(tree):
        corner = square // across * 2 * columns + square % across * 2
        last = corner + 1 + columns
        # By side: its step in the tree, its step in the grid, its two rooms.
        sides = (
            (-across, -columns, corner, corner + 1),
            (1, 1, corner + 1, last),
            (across, columns, corner + columns, last),
            (-1, -1, corner, corner + columns),
        )
        for way, step, a, b in sides:
            # If the tree continues there, the way leaves the square at both ends of the side; else it follows the side.
            joined = square + way in neighbours
            adjacent.setdefault(a, []).append(a + step if joined else b)
            adjacent.setdefault(b, []).append(b + step if joined else a)

    if moves >= len(adjacent):
        return []
    path = [rng.choice(sorted(adjacent))]
    path.append(rng.choice(adjacent[path[0]]))
    while len(path) <= moves:
        neighbour, other = adjacent[path[-1]]
        path.append(other if neighbour == path[-2] else neighbour)
    return path


def _rewind(tree: Tree, shape: MazeShape, rng: random.Random) -> tuple[list[Leg] | None, int]:
    """Return the legs of a walk in walking order, None if this attempt finds none; and the largest L in its reach."""
    # Actions that are no moves.
    others = 2 + 3 * shape.doors
    here = rng.randrange(len(tree))
    # The first room on the way back through the leg before.
    back: int | None = None
    locked: set[Edge] = set()
    legs: list[Leg] = []
    walked = 0

    for legs_left in range(shape.doors + 1, 0, -1):
        before, layers = _explore(tree, here, back, locked)
        reach = others + walked + len(layers) - 1
        # A walk without doors has at least two moves; with doors its first leg may be a single one.
        nearest = 1 if legs_left == 1 and shape.doors else 2
        left = None if shape.length is None else shape.length - others - walked
        distance = _leg_length(layers, nearest, legs_left, left, rng)
        if distance is None:
            return None, reach if legs_left == 1 else 0

        path = [rng.choice(layers[distance])]
        while path[-1] != here:
            path.append(before[path[-1]])
        walked += distance
        if legs_left == 1:
            legs.append((path, None))
            break
        # Any door of the path but the one at the key room, through which Bob must come first.
        door = rng.randrange(1, distance)
        locked |= {(path[door], path[door + 1]), (path[door + 1], path[door])}
        legs.append((path, door))
        here = path[0]
        back = path[1]
    return legs[::-1], others + walked


def _explore(tree: Tree, here: int, back: int | None, locked: set[Edge]) -> tuple[dict[int, int], list[list[int]]]:
    """Search from `here` through open doors, first to `back`; return the room before each, and rooms by distance."""
    before = {here: here}
    layers = [[here]]
    while layers[-1]:
        following = []
        for room in layers[-1]:
            for neighbour in tree[room] if room != here or back is None else [back]:
                if neighbour not in before and (room, neighbour) not in locked:
                    before[neighbour] = room
                    following.append(neighbour)
        layers.append(following)
    return before, layers[:-1]


def _leg_length(
    layers: list[list[int]], nearest: int, legs_left: int, left: int | None, rng: random.Random
) -> int | None:
    """Return the moves of the next leg of the rewind, for any number `left` those to a random room; None if too far."""
    farthest = len(layers) - 1
    if left is not None and legs_left == 1:
        return left if nearest <= left <= farthest else None
    if left is not None:
        farthest = min(farthest, left - (2 * legs_left - 3))
    if farthest < nearest:
        return None
    if left is None:
        return rng.choices(range(nearest, farthest + 1), [len(layer) for layer in layers[nearest:]])[0]
    return min(max(round(left / legs_left * rng.uniform(0.5, 1.5)), nearest), farthest)


def _either_way(a: str, b: str, rng: random.Random) -> tuple[str, str]:
    return (a, b) if rng.random() < 0.5 else (b, a)


def _door_facts(rooms: tuple[str, str], key: str = "") -> list[str]:
    """Return the facts of an open door, or of a locked one with its key."""
    a, b = rooms
    kinds = ("locked", "requires") if key else ("open",)
    return [SENTENCES[kind].format(a=a, b=b, key=key) for kind in kinds]


def _furnish(tree: Tree, legs: Sequence[Leg], shape: MazeShape, rng: random.Random) -> Instance | None:
    """Add names, keys, facts and distractions to a walk; None if the tree has too few doors left to distract with."""
    names = [room_name(room % shape.columns, room // shape.columns) for room in range(len(tree))]

    # The names of keys, first those of the plan's locked doors, then those of distracting doors: from one pool, so that
    # a number does not tell whether its key is needed.
    keys: list[str] = []
    if shape.doors:
        count = shape.doors
        if not shape.small:
            # The most facts that the plan may need; a locked distracting door takes three facts.
            most = sum(len(rooms) for rooms, _ in legs) + 3 * shape.doors + 2
            count += round(shape.noise * most) // 3
        keys = [str(drawn) for drawn in rng.sample(range(1, max(100, 2 * count)), count)]

    plan, supporting = _narrate(legs, names, keys, rng)
    distracting = _distract(tree, names, legs, round(shape.noise * len(supporting)), keys[shape.doors :], rng)
    if distracting is None:
        return None
    facts = _state_facts(supporting, distracting, shape.shuffle, rng)
    return Instance(read_maze([*supporting, *distracting]), plan, facts)


def _narrate(
    legs: Sequence[Leg], names: Sequence[str], keys: Sequence[str], rng: random.Random
) -> tuple[Plan, list[str]]:
    """Return the plan of a walk, and the facts that it needs in the order of the walk."""
    start = names[legs[0][0][0]]
    goal = names[legs[-1][0][-1]]
    plan: list[Action] = [("start", start)]
    supporting = [SENTENCES["start"].format(a=start)]
    crossed: set[Edge] = set()

    # The first leg has no key.
    for key, (rooms, door) in zip(["", *keys], legs, strict=False):
        if key:
            plan.append(("pick_up_key", key))
            supporting.append(SENTENCES["key"].format(key=key, a=names[rooms[0]]))
        for i, (here, ahead) in enumerate(pairwise(rooms)):
            if i == door:
                plan += [("use_key", key), ("unlock_and_open_door_to", names[ahead])]
            plan.append(("move_to", names[ahead]))
            # A door that is crossed again is no new fact.
            if (here, ahead) not in crossed:
                crossed |= {(here, ahead), (ahead, here)}
                supporting += _door_facts(_either_way(names[here], names[ahead], rng), key if i == door else "")

    plan.append(("rescue", TARGET))
    supporting.append(SENTENCES["goal"].format(a=goal))
    return tuple(plan), supporting


def _distract(
    tree: Tree, names: Sequence[str], legs: Sequence[Leg], count: int, spare: list[str], rng: random.Random
) -> list[str] | None:
    """Return `count` true facts that the plan does not need, grown from the walk; None if the tree has too few."""
    seen: set[int] = set().union(*(rooms for rooms, _ in legs))
    named = sorted(seen)
    # Doors from a named room to a new one.
    frontier: list[Edge] = []
    for room in named:
        frontier += [(room, neighbour) for neighbour in tree[room] if neighbour not in seen]

    distracting: list[str] = []
    while len(distracting) < count:
        if not frontier:
            return None
        index = rng.randrange(len(frontier))
        frontier[index], frontier[-1] = frontier[-1], frontier[index]
        room, added = frontier.pop()
        pair = _either_way(names[room], names[added], rng)
        if spare and len(distracting) + 3 <= count and rng.random() < _DECOY_LOCKED:
            key = spare.pop()
            place = names[rng.choice(named)]
            distracting += [*_door_facts(pair, key), SENTENCES["key"].format(key=key, a=place)]
        else:
            distracting += _door_facts(pair)
        named.append(added)
        seen.add(added)
        frontier += [(added, beyond) for beyond in tree[added] if beyond not in seen]
    return distracting


def _state_facts(supporting: list[str], distracting: list[str], shuffle: float, rng: random.Random) -> tuple[str, ...]:
    """Return supporting facts in path order with the others at random places between; then permute a share of them."""
    count = len(supporting) + len(distracting)
    places = set(rng.sample(range(count), len(distracting)))
    supports = iter(supporting)
    others = iter(distracting)
    stated = [next(others if i in places else supports) for i in range(count)]

    moved = rng.sample(range(count), round(shuffle * count))
    moved_facts = [stated[i] for i in moved]
    for index, fact in zip(sorted(moved), moved_facts, strict=True):
        stated[index] = fact
    return tuple(stated)
