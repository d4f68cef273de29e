"""Spanning trees of a grid of rooms, which are numbered row by row from 0, and long paths through one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


def room_name(column: int, row: int) -> str:
    """Column letters as in a spreadsheet and row number, both from 0: (0, 0) is A1, (26, 4) is AA5."""
    letters = ""
    column += 1
    while column:
        column, letter = divmod(column - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return f"{letters}{row + 1}"


@dataclass(frozen=True)
class Tree:
    """A spanning tree of the grid: neighbours of each room by number, and the rooms' names."""

    neighbours: list[list[int]]
    names: list[str]


def spanning_tree(columns: int, rows: int, rng: random.Random, path: Sequence[int] = ()) -> Tree:
    """Kruskal's algorithm over all walls in random order, after the steps of a path, if one is given."""
    rooms = columns * rows
    walls = [(room, room + 1) for room in range(rooms) if (room + 1) % columns]
    walls += [(room, room + columns) for room in range(rooms - columns)]
    # One sort by random numbers takes a third of the time of random.shuffle, and a large maze is mostly this.
    number = rng.random
    walls.sort(key=lambda _: number())
    walls[:0] = pairwise(path)
    root = list(range(rooms))
    neighbours: list[list[int]] = [[] for _ in range(rooms)]
    for a, b in walls:
        i, j = a, b
        while root[i] != i:
            root[i] = i = root[root[i]]
        while root[j] != j:
            root[j] = j = root[root[j]]
        if i != j:
            root[j] = i
            neighbours[a].append(b)
            neighbours[b].append(a)
    return Tree(neighbours, [room_name(room % columns, room // columns) for room in range(rooms)])


def long_path(columns: int, rows: int, moves: int, rng: random.Random) -> list[int]:
    """Rooms of a path with that many moves, cut from the way around a random tree; empty if that is too short.

    Each room of the tree is a square of four rooms of the grid; going around it visits every one of them once.
    """
    across, down = columns // 2, rows // 2
    tree = spanning_tree(across, down, rng).neighbours if min(across, down) > 1 else []
    beside: dict[int, list[int]] = {}
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
            # Where the tree goes on, the way leaves the square at both ends of that side; else it follows the side.
            joined = square + way in neighbours
            beside.setdefault(a, []).append(a + step if joined else b)
            beside.setdefault(b, []).append(b + step if joined else a)
    if moves >= len(beside):
        return []
    path = [rng.choice(sorted(beside))]
    path.append(rng.choice(beside[path[0]]))
    while len(path) <= moves:
        neighbour, other = beside[path[-1]]
        path.append(other if neighbour == path[-2] else neighbour)
    return path
