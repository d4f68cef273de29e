"""A picture of one maze: rooms, doors and keys as the facts state them, the optimal path, a model's path, its error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.benchmarks.seqbench import Maze, Plan, judge, parse_plan, read_maze
from kvatlas.benchmarks.seqbench.facts import AGENT, TARGET
from kvatlas.core import KvatlasError, Problem, Trace
from kvatlas.figures import style
from kvatlas.figures.look import LEAST_TYPE, Foot, FootLine, Look, canvas, settle, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

#: The floor, light and dark.
_ROOM = ("#e4e7ea", "#2b323a")
#: The optimal path, a model's, and its first error, light and dark; all can be read as text.
_PATHS = (("#0072b2", "#b84f00", "#c1121f"), ("#56b4e9", "#f58b4c", "#ff9b90"))
#: Colours of the keys that the plan needs and their doors; the others are grey.
_KEYS = ("#009e73", "#8e5ea2", "#b8860b", "#56b4e9", "#cc79a7")
_DECOY = "#9aa1a8"
#: Inches of a room's side, and how much of it the floor takes.
_LARGEST, _FLOOR = 0.62, 0.72
#: Inches of a side from which on a room holds texts.
_READABLE = 0.4

ERROR_TEXTS = {
    "bad_start": "does not start where Bob is",
    "no_such_door": "there is no such door",
    "door_locked": "the door is locked",
    "key_not_here": "the key is not here",
    "key_not_held": "the key is not held",
    "wrong_key": "the key is for another door",
    "use_without_unlock": "a key is used and no door unlocked, or the other way round",
    "misplaced_rescue": "the rescue is out of place",
    "ended_early": "the plan ends early",
    "not_optimal": "legal, but not the shortest way",
    "format": "no such action",
}


def maze_figure(problem: Problem, trace: Trace | None = None, *, look: Look | None = None) -> Figure:
    """The maze of a seqBench problem; with a trace, the model's path up to its first error, which is marked and named.

    Raises KvatlasError for a problem that is no maze and a trace of another problem.
    """
    if trace is not None and trace.problem != problem.id:
        raise KvatlasError(f"The trace is of {trace.problem}, not of {problem.id}.")
    maze = read_maze(problem.question.splitlines())
    reference = parse_plan(problem.answer)
    if reference is None:
        raise KvatlasError(f"The problem {problem.id} has no reference plan.")
    spots = {room: _spot(room) for room in maze.rooms}
    xs, ys = [x for x, _ in spots.values()], [y for _, y in spots.values()]
    columns, rows = max(xs) - min(xs) + 1, max(ys) - min(ys) + 1
    look = look or Look()
    look.across(1, 1)
    side = min(_LARGEST, (look.widest - 0.3) / max(columns, rows))
    with look.applied():
        size = (look.width or max(columns * side + 0.3, 4.6), rows * side + 0.5)
        figure, (panel,) = canvas(size, foot=_foot(problem, maze, reference, trace, size[0], look))
        panel.set(xlim=(min(xs) - 0.5, max(xs) + 0.5), ylim=(max(ys) + 0.5, min(ys) - 0.5), aspect="equal")
        panel.axis("off")
        panel.set_title(look.named(problem.id), fontsize=9)
        _rooms(panel, maze, reference, spots, side, look)
        # Side by side where they run together.
        apart = 0.09 if trace else 0.0
        _path(panel, _walk(reference), spots, _PATHS[look.dark][0], -apart, side)
        if trace is not None:
            _attempt(panel, maze, reference, trace, spots, apart, side, look)
        _people(panel, maze, spots, side, look)
        settle(figure, look)
    return figure


def _spot(room: str) -> Point:
    """Where a room is: columns to the right, row numbers downwards."""
    match = re.fullmatch(r"([A-Z]+)(\d+)", room)
    if match is None:
        raise KvatlasError(f"{room!r} is no room of a maze.")
    column = 0
    for letter in match[1]:
        column = 26 * column + ord(letter) - ord("A") + 1
    return float(column), float(match[2])


def _rooms(panel: Axes, maze: Maze, reference: Plan, spots: dict[str, Point], side: float, look: Look) -> None:
    from matplotlib.patches import FancyBboxPatch

    gap, floor = 1 - _FLOOR, _ROOM[look.dark]
    for a, b in maze.open_doors:
        _passage(panel, spots[a], spots[b], floor, gap)
    needed = [key for name, key in reference if name == "use_key"]
    colours = {key: _KEYS[i % len(_KEYS)] for i, key in enumerate(needed)}
    for x, y in spots.values():
        panel.add_patch(
            FancyBboxPatch(
                (x - _FLOOR / 2, y - _FLOOR / 2), _FLOOR, _FLOOR, boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=floor, edgecolor="none", zorder=1,
            )
        )  # fmt: skip
    small = max(LEAST_TYPE, side * 72 * 0.18)
    for a, b, key in maze.locked_doors:
        _passage(panel, spots[a], spots[b], colours.get(key, _DECOY), gap)
        x, y = (spots[a][0] + spots[b][0]) / 2, (spots[a][1] + spots[b][1]) / 2
        if side > _READABLE:
            panel.text(x, y, key, fontsize=small, color="white", ha="center", va="center", zorder=6, fontweight="bold")
    drawn: dict[str, int] = {}
    for key, room in maze.keys:
        x, y = spots[room]
        shift = drawn.get(room, 0)
        drawn[room] = shift + 1
        colour = colours.get(key, _DECOY)
        if side > _READABLE:
            panel.text(
                x - _FLOOR / 2 + 0.06, y - _FLOOR / 2 + 0.15 + 0.22 * shift, f"key {key}", fontsize=small,
                color=colour, ha="left", va="center", zorder=6, fontweight="bold",
            )  # fmt: skip
        else:
            panel.plot(x - 0.2 + 0.2 * shift, y - 0.2, marker="P", markersize=side * 20, color=colour, zorder=6)
    if side > _READABLE:
        for room, (x, y) in spots.items():
            panel.text(
                x + _FLOOR / 2 - 0.05, y + _FLOOR / 2 - 0.06, room, fontsize=small, color="#8a9097", ha="right",
                va="bottom", zorder=2,
            )  # fmt: skip


def _passage(panel: Axes, a: Point, b: Point, colour: str, gap: float) -> None:
    from matplotlib.patches import Rectangle

    (x, y), flat = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2), a[1] == b[1]
    across, along = 0.36, gap + 0.04
    wide, high = (along, across) if flat else (across, along)
    panel.add_patch(Rectangle((x - wide / 2, y - high / 2), wide, high, facecolor=colour, edgecolor="none", zorder=2))


def _walk(plan: Plan) -> list[str]:
    """The rooms of a plan in order."""
    return [argument for name, argument in plan if name in ("start", "move_to")]


def _path(panel: Axes, rooms: list[str], spots: dict[str, Point], colour: str, shift: float, side: float) -> None:
    points = [spots[room] for room in rooms if room in spots]
    if len(points) > 1:
        panel.plot(
            [x + shift for x, _ in points], [y + shift for _, y in points], color=colour, alpha=0.85, zorder=4,
            linewidth=max(side * 5.5, 1.4), solid_joinstyle="round", solid_capstyle="round",
        )  # fmt: skip


def _attempt(
    panel: Axes,
    maze: Maze,
    reference: Plan,
    trace: Trace,
    spots: dict[str, Point],
    shift: float,
    side: float,
    look: Look,
) -> None:
    """The model's path as far as it can be walked, and a cross where it first goes wrong."""
    _, colour, error = _PATHS[look.dark]
    plan = parse_plan(trace.grade.answer or "")
    if plan is None:
        return
    verdict = judge(maze, reference, plan)
    if verdict.solved or verdict.valid:
        _path(panel, _walk(plan), spots, colour, shift, side)
        if verdict.solved:
            return
    index = verdict.first_error_index
    walked = _walk(plan[:index])
    if not verdict.valid:
        _path(panel, walked, spots, colour, shift, side)
    at = spots[walked[-1]] if walked and walked[-1] in spots else spots[maze.start]
    wanted = spots.get(plan[index][1]) if index < len(plan) else None
    if wanted is not None and wanted != at:
        dashed = {"arrowstyle": "->", "color": error, "linewidth": max(side * 3, 1.2), "linestyle": (0, (2, 1.5))}
        panel.annotate(
            "", (wanted[0] + shift, wanted[1] + shift), (at[0] + shift, at[1] + shift), zorder=7,
            arrowprops=dashed,
        )  # fmt: skip
    panel.plot(
        at[0] + shift, at[1] + shift, marker="X", markersize=max(side * 20, 7), color=error, markeredgecolor="white",
        markeredgewidth=max(side * 1.5, 0.6), zorder=8,
    )  # fmt: skip


def _people(panel: Axes, maze: Maze, spots: dict[str, Point], side: float, look: Look) -> None:
    marks: tuple[tuple[str, str, Any], ...] = ((AGENT, maze.start, "o"), (TARGET, maze.goal, "*"))
    for person, room, marker in marks:
        x, y = spots[room]
        panel.plot(
            x, y, marker=marker, markersize=max(side, 0.4) * (15 if marker == "o" else 24), color=look.ink,
            markeredgecolor=look.ground, markeredgewidth=side * 1.5, zorder=7,
        )  # fmt: skip
        if side > _READABLE:
            panel.text(
                x - _FLOOR / 2 + 0.06, y + 0.27, person, fontsize=max(LEAST_TYPE, side * 72 * 0.16), ha="left",
                va="center", zorder=9, color=look.ink,
            )  # fmt: skip


def _foot(problem: Problem, maze: Maze, reference: Plan, trace: Trace | None, inches: float, look: Look) -> Foot:
    told = _told(maze, reference, trace, _PATHS[look.dark])
    lines = [FootLine(line, colour) for text, colour in told for line in wrapped(text, inches - 0.2)]
    return Foot(lines if look.notes else [], ". ".join([problem.id, *(text for text, _ in told)]) + ".")


def _told(maze: Maze, reference: Plan, trace: Trace | None, colours: Sequence[str]) -> list[tuple[str, str]]:
    """What is said of the paths, in their colours."""
    optimal, own, error = colours
    doors = sum(name == "use_key" for name, _ in reference)
    people = f"circle: {AGENT}, star: {TARGET}"
    told = [(f"optimal path: L = {len(reference)} actions, locked doors B = {doors}; {people}", optimal)]
    if trace is None:
        return told
    who = f"{style.model(trace.model)}, {trace.setting.policy}, sample {trace.sample}"
    plan = parse_plan(trace.grade.answer or "")
    if plan is None:
        return [*told, (f"{who}: no plan ({trace.grade.status.value})", own)]
    verdict = judge(maze, reference, plan)
    told.append((f"{who}: {len(plan)} actions, progress ratio {style.fixed(verdict.progress, 2)}", own))
    if not verdict.solved:
        index = verdict.first_error_index
        action = f"{plan[index][0]} {plan[index][1]}".strip() if index < len(plan) else "the end"
        told.append((f"first error at action {index + 1} ({action}): {ERROR_TEXTS[verdict.first_error]}", error))
    return told
