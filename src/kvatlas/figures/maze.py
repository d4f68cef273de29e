"""A picture of one maze: rooms, doors and keys as the facts state them, the optimal path, a model's path, its error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvatlas.benchmarks.seqbench import Maze, Plan, judge, parse_plan, read_maze
from kvatlas.benchmarks.seqbench.plans import AGENT, TARGET
from kvatlas.core import KvatlasError, Problem, Trace
from kvatlas.figures import style
from kvatlas.figures.style import EDGE, LEAST_TYPE, SMALL_TYPE, Line, Look, Margins, settle, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

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
    side = min(_LARGEST, (look.widest - 0.3) / max(columns, rows))
    width = look.width or max(columns * side + 0.3, 4.6)
    sentences = _sentences(maze, reference, trace)
    with look.applied():
        lines = [Line(text, SMALL_TYPE, colour) for text, colour in zip(sentences, look.colours.paths, strict=False)]
        margins, title = Margins(EDGE, EDGE, 0, 0.05, EDGE), look.named(problem.id)
        figure, (panel,) = sheet(look, (width, rows * side), 1, 1, margins, title=title, lines=lines)
        panel.set(xlim=(min(xs) - 0.5, max(xs) + 0.5), ylim=(max(ys) + 0.5, min(ys) - 0.5), aspect="equal", anchor="W")
        panel.axis("off")
        board = _Board(panel, maze, spots, side, look)
        board.rooms(reference)
        # Side by side where they run together.
        apart = 0.09 if trace else 0.0
        board.path(_walk(reference), look.colours.paths[0], -apart)
        plan = None if trace is None else parse_plan(trace.grade.answer or "")
        if plan is not None:
            board.attempt(plan, reference, apart)
        board.people()
        settle(figure, look)
    return figure


def _spot(room: str) -> Point:
    """The place of a room: columns to the right, row numbers downwards."""
    match = re.fullmatch(r"([A-Z]+)(\d+)", room)
    if match is None:
        raise KvatlasError(f"{room!r} is no room of a maze.")
    column = 0
    for letter in match[1]:
        column = 26 * column + ord(letter) - ord("A") + 1
    return float(column), float(match[2])


def _walk(plan: Plan) -> list[str]:
    """The rooms of a plan in order."""
    return [argument for name, argument in plan if name in ("start", "move_to")]


@dataclass(frozen=True)
class _Board:
    """A maze on a panel: its rooms have `spots` and are `side` inches wide."""

    panel: Axes
    maze: Maze
    spots: dict[str, Point]
    side: float
    look: Look

    def text(self, x: float, y: float, text: str, colour: str, share: float = 0.18, **how: Any) -> None:
        """A text whose type is a share of the side; nothing where it would be unreadable."""
        if self.side > _READABLE:
            size = max(LEAST_TYPE, self.side * 72 * share)
            self.panel.text(x, y, text, fontsize=size, color=colour, **{"ha": "left", "va": "center", **how})

    def rooms(self, reference: Plan) -> None:
        """Floors and passages, with doors and keys in the colours of those that the reference plan needs."""
        from matplotlib.patches import FancyBboxPatch

        floor = self.look.colours.floor
        for a, b in self.maze.open_doors:
            self.passage(a, b, floor)
        needed = [key for name, key in reference if name == "use_key"]
        colours = {key: _KEYS[i % len(_KEYS)] for i, key in enumerate(needed)}
        for room, (x, y) in self.spots.items():
            self.panel.add_patch(
                FancyBboxPatch(
                    (x - _FLOOR / 2, y - _FLOOR / 2), _FLOOR, _FLOOR, boxstyle="round,pad=0,rounding_size=0.08",
                    facecolor=floor, edgecolor="none", zorder=1,
                )
            )  # fmt: skip
            self.text(x + _FLOOR / 2 - 0.05, y + _FLOOR / 2 - 0.06, room, "#8a9097", ha="right", va="bottom", zorder=2)
        for a, b, key in self.maze.locked_doors:
            x, y = self.passage(a, b, colours.get(key, _DECOY))
            self.text(x, y, key, "white", ha="center", zorder=6, fontweight="bold")
        held: dict[str, int] = {}
        for key, room in self.maze.keys:
            (x, y), shift, colour = self.spots[room], held.get(room, 0), colours.get(key, _DECOY)
            held[room] = shift + 1
            left, top = x - _FLOOR / 2 + 0.06, y - _FLOOR / 2 + 0.15 + 0.22 * shift
            self.text(left, top, f"key {key}", colour, zorder=6, fontweight="bold")
            if self.side <= _READABLE:
                self.panel.plot(
                    x - 0.2 + 0.2 * shift, y - 0.2, marker="P", markersize=self.side * 20, color=colour, zorder=6
                )

    def passage(self, first: str, second: str, colour: str) -> Point:
        """Draw the floor between two rooms and return its middle."""
        from matplotlib.patches import Rectangle

        (left, top), (right, bottom) = self.spots[first], self.spots[second]
        x, y = (left + right) / 2, (top + bottom) / 2
        wide, high = (1 - _FLOOR + 0.04, 0.36) if top == bottom else (0.36, 1 - _FLOOR + 0.04)
        corner = (x - wide / 2, y - high / 2)
        self.panel.add_patch(Rectangle(corner, wide, high, facecolor=colour, edgecolor="none", zorder=2))
        return x, y

    def path(self, rooms: Sequence[str], colour: str, shift: float) -> None:
        """A line through rooms, a little beside their middles."""
        points = [self.spots[room] for room in rooms if room in self.spots]
        if len(points) > 1:
            self.panel.plot(
                [x + shift for x, _ in points], [y + shift for _, y in points], color=colour, alpha=0.85, zorder=4,
                linewidth=max(self.side * 5.5, 1.4), solid_joinstyle="round", solid_capstyle="round",
            )  # fmt: skip

    def attempt(self, plan: Plan, reference: Plan, shift: float) -> None:
        """The model's path as far as it can be walked, and a cross where it first goes wrong."""
        _, colour, error = self.look.colours.paths
        verdict = judge(self.maze, reference, plan)
        index = verdict.first_error_index
        walked = _walk(plan[:index])
        self.path(_walk(plan) if verdict.solved or verdict.valid else walked, colour, shift)
        if verdict.solved:
            return
        x, y = self.spots.get(walked[-1] if walked else "", self.spots[self.maze.start])
        to = self.spots.get(plan[index][1], (x, y)) if index < len(plan) else (x, y)
        if to != (x, y):
            width = max(self.side * 3, 1.2)
            arrow = {"arrowstyle": "->", "color": error, "linewidth": width, "linestyle": (0, (2, 1.5))}
            end, start = (to[0] + shift, to[1] + shift), (x + shift, y + shift)
            self.panel.annotate("", end, start, zorder=7, arrowprops=arrow)
        self.panel.plot(
            x + shift, y + shift, marker="X", markersize=max(self.side * 20, 7), color=error, zorder=8,
            markeredgecolor="white", markeredgewidth=max(self.side * 1.5, 0.6),
        )  # fmt: skip

    def people(self) -> None:
        """Both people as marks, with their names."""
        colours = self.look.colours
        for person, room, marker, size in ((AGENT, self.maze.start, "o", 15), (TARGET, self.maze.goal, "*", 24)):
            x, y = self.spots[room]
            self.panel.plot(
                x, y, marker=marker, markersize=max(self.side, 0.4) * size, color=colours.ink,
                markeredgecolor=colours.ground, markeredgewidth=self.side * 1.5, zorder=7,
            )  # fmt: skip
            self.text(x - _FLOOR / 2 + 0.06, y + 0.27, person, colours.ink, 0.16, zorder=9)


def _sentences(maze: Maze, reference: Plan, trace: Trace | None) -> list[str]:
    """Sentences about the optimal path, the model's, and its first error."""
    doors = sum(name == "use_key" for name, _ in reference)
    people = f"circle: {AGENT}, star: {TARGET}"
    sentences = [f"optimal path: L = {len(reference)} actions, locked doors B = {doors}; {people}"]
    if trace is None:
        return sentences
    source = f"{style.model(trace.model)}, {trace.setting.policy}, sample {trace.sample}"
    plan = parse_plan(trace.grade.answer or "")
    if plan is None:
        return [*sentences, f"{source}: no plan ({trace.grade.status.value})"]
    verdict = judge(maze, reference, plan)
    sentences.append(f"{source}: {len(plan)} actions, progress ratio {style.fixed(verdict.progress, 2)}")
    if not verdict.solved:
        index = verdict.first_error_index
        action = f"{plan[index][0]} {plan[index][1]}".strip() if index < len(plan) else "the end"
        sentences.append(f"first error at action {index + 1} ({action}): {ERROR_TEXTS[verdict.first_error]}")
    return sentences
