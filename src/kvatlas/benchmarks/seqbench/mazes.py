"""Mazes with tunable depth: the generator of seqBench (arXiv 2509.16866), and the search that checks it.

The rooms of a grid are joined to a tree by Kruskal's algorithm with shuffled walls, so that one path joins any two
rooms. The plan is built backwards from the goal (rewind construction): draw a key room, lock one random door of the
path to it, put the door's key there, go on from there; the last leg ends at the start. With m moves and B locked doors
the plan has L = m + 2 + 3B actions.

Choices where the source is silent:

- With keys of the kind `detour` a key room is a dead end of the walk: Bob leaves it through the door by which he came,
  so each locked door forces a detour. With `on_way`, as in the published examples, the walk is one path, on which each
  key lies before its door and behind the door of the key before. With either the optimal plan is the only one of its
  length, and "equals the reference" means "optimal".
- Distracting facts are true and grow out of the solution path: a random door from a room already named to a new room,
  again and again. So they are side corridors that look like the path until they end, and a solver must search; facts
  about far-away rooms, which can be left out at a glance, come only when corridors have grown that far.
- In mazes with locked doors a quarter of the distracting doors are locked, each with its key in a room already named.
  In mazes without (B = 0) and in small grids (up to 6x6) all distracting doors are open.
- Paths in such trees are seldom longer than five sides of the grid. Where the walk is one longer path, it is laid
  first: a piece of the closed way around a tree of half the grid's size. Kruskal's algorithm then joins the others.
- Every maze is checked by search before it is handed out: the plan is what the shortest way takes, no other plan is
  as short, and without any one of its keys there is no plan.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from kvatlas.benchmarks.seqbench.facts import AGENT, TARGET, Maze, key_in, locked_door, open_door, person_in
from kvatlas.benchmarks.seqbench.plans import Action, Plan
from kvatlas.benchmarks.seqbench.search import check
from kvatlas.benchmarks.seqbench.trees import Tree, long_path, spanning_tree
from kvatlas.core import KvatlasError

_DRAWS = 400
_GOALS_PER_TREE = 8
_DECOY_LOCKED = 0.25
#: Grids of up to so many rows and columns are small: they have simpler defaults and no locked distracting doors.
SMALL = 6
#: Where keys lie.
ON_WAY, DETOUR = "on_way", "detour"
#: Moves over (columns + rows) from which on a path without locked doors is laid before the tree.
_LAID = 2.5

Edge = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """What to draw: grid, logical depth L (`length`, None for any), locked doors B, noise N, shuffle ratio S, `keys`.

    `noise` is distracting facts over supporting facts; `shuffle` the share of the facts' places that is permuted;
    `keys` lie on the way (`on_way`) or in dead ends (`detour`). Raises KvatlasError for what no maze can be.
    """

    columns: int
    rows: int
    length: int | None = None
    doors: int = 0
    noise: float = 0.0
    shuffle: float = 0.0
    keys: str = DETOUR

    def __post_init__(self) -> None:
        grid, rooms = f"{self.columns}x{self.rows}", self.columns * self.rows
        if min(self.columns, self.rows) < 1 or not 4 <= rooms <= 10_000:
            raise KvatlasError(f"A maze of {grid} rooms cannot be drawn; valid are grids of 4 to 10000 rooms.")
        if not 0 <= self.noise <= 10:
            raise KvatlasError(f"The noise ratio N is {self.noise:g}; valid are 0 to 10.")
        if not 0 <= self.shuffle <= 1:
            raise KvatlasError(f"The shuffle ratio S is {self.shuffle:g}; valid are 0 to 1.")
        if self.doors < 0 or 2 * self.doors + 2 > rooms:
            raise KvatlasError(
                f"B = {self.doors} locked doors do not fit into {grid} rooms; valid are 0 to {rooms // 2 - 1}."
            )
        if self.length is None:
            return
        # A door needs a leg of two moves to its key and back past it, and the last leg is at least one move.
        shortest = 3 * self.doors + 2 + (2 * self.doors + 1)
        longest = 3 * self.doors + 2 + (1 if self.keys == ON_WAY else self.doors + 1) * (rooms - 1)
        if self.length < shortest:
            raise KvatlasError(
                f"L = {self.length} actions are too few for B = {self.doors} locked doors; "
                f"valid are at least {shortest} (start, rescue, 3 for each door and the moves between)."
            )
        if self.length > longest:
            raise KvatlasError(
                f"L = {self.length} actions are too many for {grid} rooms and B = {self.doors} locked doors; "
                f"no maze has more than {longest}."
            )

    @property
    def small(self) -> bool:
        """Whether the grid is a small one."""
        return max(self.columns, self.rows) <= SMALL


@dataclass(frozen=True)
class Instance:
    """One maze with its only optimal plan and its facts in the order in which they are stated.

    `supporting` counts the facts that the plan rests on; the rest distract.
    """

    maze: Maze
    plan: Plan
    facts: tuple[str, ...]
    supporting: int

    @property
    def doors(self) -> int:
        """B: locked doors on the optimal path."""
        return sum(name == "use_key" for name, _ in self.plan)

    @property
    def moves(self) -> int:
        """m: rooms entered on the optimal path."""
        return sum(name == "move_to" for name, _ in self.plan)


def facts(instance: Instance) -> str:
    """The facts in words, one a line."""
    return "\n".join(instance.facts)


def draw(shape: Shape, rng: random.Random) -> Instance:
    """A random checked instance. KvatlasError if none of that shape is found in many draws.

    Without a length, goal and start are uniform over the rooms that are at least two moves apart.
    """
    longest = 0
    one_path = shape.keys == ON_WAY or not shape.doors
    added = 3 * shape.doors if one_path else 0
    walked = replace(shape, doors=0, length=shape.length and shape.length - added) if one_path else shape
    moves = (walked.length or 0) - 2
    laid = one_path and moves > _LAID * (shape.columns + shape.rows)
    for _ in range(_DRAWS):
        path = long_path(shape.columns, shape.rows, moves, rng) if laid else []
        tree = spanning_tree(shape.columns, shape.rows, rng, path)
        for _ in range(1 if path or shape.length is None else _GOALS_PER_TREE):
            route, reached = ([_Leg(path, None)], len(path) + 1) if path else _rewind(tree, walked, rng)
            longest = max(longest, reached + added)
            if route and added:
                route = _with_keys(route[0].rooms, shape.doors, rng)
            instance = _furnish(tree, route, shape, rng) if route else None
            if instance is not None:
                check(instance.maze, instance.plan)
                return instance
    wanted = f"L = {shape.length}, " if shape.length else ""
    raise KvatlasError(
        f"None of {_DRAWS} mazes of {shape.columns}x{shape.rows} rooms has {wanted}B = {shape.doors} and "
        f"N = {shape.noise:g} (the longest plan has {longest} actions); take a larger grid, or smaller L, B or N."
    )


@dataclass(frozen=True)
class _Leg:
    """A piece of the walk in walking order: from the start or a key room to the next key room or the goal.

    `door` is the index i of the locked door between rooms[i] and rooms[i + 1], None on the first leg.
    """

    rooms: list[int]
    door: int | None


def _with_keys(path: list[int], doors: int, rng: random.Random) -> list[_Leg] | None:
    """A path cut at the rooms of keys, with a locked door on each leg but the first; None if it is too short."""
    spare = len(path) - 1 - (2 * doors + 1)
    if spare < 0:
        return None
    # The first leg has a move, each other two, and the moves to spare fall to them in any way.
    cuts = [cut + number + 1 for number, cut in enumerate(sorted(rng.sample(range(spare + doors), doors)))]
    legs = [path[begin : end + 1] for begin, end in pairwise([0, *cuts, len(path) - 1])]
    return [_Leg(leg, rng.randrange(1, len(leg) - 1) if number else None) for number, leg in enumerate(legs)]


def _rewind(tree: Tree, shape: Shape, rng: random.Random) -> tuple[list[_Leg] | None, int]:
    """The legs of a walk in walking order, None if this attempt finds none; and the largest L within its reach."""
    left = None if shape.length is None else shape.length - 2 - 3 * shape.doors
    here, back = rng.randrange(len(tree.neighbours)), None
    locked: set[Edge] = set()
    legs: list[_Leg] = []
    walked = 0
    for legs_left in range(shape.doors + 1, 0, -1):
        before, layers = _explore(tree, here, back, locked)
        reach = 2 + 3 * shape.doors + walked + len(layers) - 1
        # A walk without doors has at least two moves; with doors its first leg may be a single one.
        nearest = 1 if legs_left == 1 and shape.doors else 2
        distance = _distance(layers, nearest, legs_left, left, rng)
        if distance is None:
            return None, reach if legs_left == 1 else 0
        path = [rng.choice(layers[distance])]
        while path[-1] != here:
            path.append(before[path[-1]])
        walked += distance
        if left is not None:
            left -= distance
        if legs_left == 1:
            legs.append(_Leg(path, None))
            break
        # Any door of the path but the one at the key room, through which Bob must come first.
        door = rng.randrange(1, distance)
        locked |= {(path[door], path[door + 1]), (path[door + 1], path[door])}
        legs.append(_Leg(path, door))
        here, back = path[0], path[1]
    return legs[::-1], 2 + 3 * shape.doors + walked


def _explore(tree: Tree, here: int, back: int | None, locked: set[Edge]) -> tuple[dict[int, int], list[list[int]]]:
    """Rooms by their distance from `here` through open doors, and the room before each; the first step goes `back`."""
    before = {here: here}
    layers = [[here]]
    layer = [here]
    while layer:
        following = []
        for room in layer:
            for neighbour in tree.neighbours[room] if room != here or back is None else [back]:
                if neighbour not in before and (room, neighbour) not in locked:
                    before[neighbour] = room
                    following.append(neighbour)
        layer = following
        if layer:
            layers.append(layer)
    return before, layers


def _distance(
    layers: list[list[int]], nearest: int, legs_left: int, left: int | None, rng: random.Random
) -> int | None:
    """How many moves the next leg of the rewind has; None if it cannot be.

    Free (`left` None) it is that of a room drawn uniformly; else so that the moves `left` can come out exactly.
    """
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


def _furnish(tree: Tree, legs: list[_Leg], shape: Shape, rng: random.Random) -> Instance | None:
    """Names, keys, facts and distractions for a walk; None if the tree has too few doors left to distract with."""
    names = tree.names
    keys, spare = _key_numbers(legs, shape, rng)
    start, goal = names[legs[0].rooms[0]], names[legs[-1].rooms[-1]]
    plan: list[Action] = [("start", start)]
    world = _World([], [], [])
    supporting = [person_in(AGENT, start)]
    crossed: set[Edge] = set()
    for number, leg in enumerate(legs):
        key = keys[number - 1] if number else ""
        if number:
            plan.append(("pick_up_key", key))
            supporting.append(world.put_key(key, names[leg.rooms[0]]))
        for i, (here, there) in enumerate(pairwise(leg.rooms)):
            if i == leg.door:
                plan += [("use_key", key), ("unlock_and_open_door_to", names[there])]
            plan.append(("move_to", names[there]))
            if (here, there) not in crossed:
                crossed |= {(here, there), (there, here)}
                pair = _either_way(names[here], names[there], rng)
                supporting += world.lock(pair, key) if i == leg.door else [world.join(pair)]
    plan.append(("rescue", TARGET))
    supporting.append(person_in(TARGET, goal))
    wanted = round(shape.noise * len(supporting))
    distracting = _distract(tree, crossed, world, wanted, spare, rng)
    if distracting is None:
        return None
    maze = Maze(tuple(world.open_doors), tuple(world.locked_doors), tuple(world.keys), start, goal)
    stated = _order(supporting, distracting, shape.shuffle, rng)
    return Instance(maze, tuple(plan), tuple(stated), len(supporting))


@dataclass(frozen=True)
class _World:
    """Doors and keys as they are stated; each method adds one thing and returns its sentences."""

    open_doors: list[tuple[str, str]]
    locked_doors: list[tuple[str, str, str]]
    keys: list[tuple[str, str]]

    def join(self, pair: tuple[str, str]) -> str:
        self.open_doors.append(pair)
        return open_door(*pair)

    def lock(self, pair: tuple[str, str], key: str) -> list[str]:
        self.locked_doors.append((*pair, key))
        return locked_door(*pair, key)

    def put_key(self, key: str, room: str) -> str:
        self.keys.append((key, room))
        return key_in(key, room)


def _key_numbers(legs: list[_Leg], shape: Shape, rng: random.Random) -> tuple[list[str], list[str]]:
    """Numbers for the needed keys, and for as many others as there could be (none in a maze without locked doors)."""
    if not shape.doors:
        return [], []
    most = sum(len(leg.rooms) for leg in legs) + 3 * shape.doors + 2
    others = 0 if shape.small else round(shape.noise * most) // 3
    # From one pool, so that a number does not tell whether its key is needed.
    pool = rng.sample(range(1, max(100, 2 * (shape.doors + others))), shape.doors + others)
    numbers = [str(number) for number in pool]
    return numbers[: shape.doors], numbers[shape.doors :]


def _either_way(a: str, b: str, rng: random.Random) -> tuple[str, str]:
    return (a, b) if rng.random() < 0.5 else (b, a)


def _distract(
    tree: Tree, crossed: set[Edge], world: _World, wanted: int, spare: list[str], rng: random.Random
) -> list[str] | None:
    """`wanted` true facts that the plan never needs, grown out of the walk; None if the tree is used up before."""
    known = sorted({room for edge in crossed for room in edge})
    seen = set(known)
    frontier = [(room, there) for room in known for there in tree.neighbours[room] if there not in seen]
    distracting: list[str] = []
    while len(distracting) < wanted:
        if not frontier:
            return None
        index = rng.randrange(len(frontier))
        frontier[index], frontier[-1] = frontier[-1], frontier[index]
        room, there = frontier.pop()
        pair = _either_way(tree.names[room], tree.names[there], rng)
        if spare and len(distracting) + 3 <= wanted and rng.random() < _DECOY_LOCKED:
            key = spare.pop()
            distracting += [*world.lock(pair, key), world.put_key(key, tree.names[rng.choice(known)])]
        else:
            distracting.append(world.join(pair))
        known.append(there)
        seen.add(there)
        frontier += [(there, beyond) for beyond in tree.neighbours[there] if beyond not in seen]
    return distracting


def _order(supporting: list[str], distracting: list[str], shuffle: float, rng: random.Random) -> list[str]:
    """Supporting facts in path order with the others at random places between; then that share of places permuted."""
    places = set(rng.sample(range(len(supporting) + len(distracting)), len(distracting)))
    supports, other = iter(supporting), iter(distracting)
    stated = [next(other if i in places else supports) for i in range(len(supporting) + len(distracting))]
    moved = rng.sample(range(len(stated)), round(shuffle * len(stated)))
    for index, fact in zip(sorted(moved), [stated[i] for i in moved], strict=True):
        stated[index] = fact
    return stated
