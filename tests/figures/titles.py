"""Readers of titles: each knows one form of a title, and checks it against what is drawn.

A title whose form no reader knows is refused, so that a new form comes with its check.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

#: A title's number, as in `3.1`.
NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass
class Drawn:
    """The drawing of a figure: of each panel its name and its marks (state, loss, place), and the places of its boxes.

    `saves` are the percentages of boxed rows, `ends` the upper ends of the intervals by panel and place. Lines are
    points (x, y) by name, of each panel, `is_falling` where 0 is at the top. `pairs` are the outcomes of the tests of
    each panel, `effects` those of levels: axis, level, points and p. `cells` are the values of each panel by the level
    of each axis.
    """

    names: list[str] = field(default_factory=list)
    marks: list[list[tuple[str, float, float]]] = field(default_factory=list)
    boxes: list[list[float]] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    ends: dict[tuple[int, float], float] = field(default_factory=dict)
    lines: list[Mapping[str, Sequence[tuple[float, float]]]] = field(default_factory=list)
    is_falling: bool = False
    pairs: list[Sequence[bool]] = field(default_factory=list)
    effects: list[Mapping[str, Any]] = field(default_factory=list)
    cells: list[Mapping[tuple[Any, Any], float]] = field(default_factory=list)

    def count(self, state: str) -> int:
        """Return the number of marks of a state in all panels."""
        return sum(one == state for of_panel in self.marks for one, _, _ in of_panel)


def read(figure: Figure) -> Drawn:
    """Return what the panels of a figure draw."""
    drawn = Drawn()
    for number, axes in enumerate(figure.axes):
        marks = []
        for artist in axes.collections:
            kind = (artist.get_gid() or "").removeprefix("mark-")
            if isinstance(artist, PathCollection) and kind in ("within", "open", "beyond", "untested"):
                ((x, y),) = artist.get_offsets()
                marks.append((kind, float(x), float(y)))
        drawn.marks.append(marks)
        boxes = [patch.get_y() + patch.get_height() / 2 for patch in axes.patches if patch.get_gid() == "picked"]
        drawn.boxes.append([round(box, 6) for box in boxes])
        bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
        drawn.names += [text.get_text() for text in bold if text.get_position()[1] > 1 and len(bold) > 0][:1]
        drawn.saves += [text.get_text() for text in bold if text.get_text().endswith(" %")]
        for line in axes.lines:
            xs, ys = line.get_xdata(), line.get_ydata()
            if len(xs) == 2 and ys[0] == ys[1] and float(ys[0]).is_integer():
                drawn.ends[number, float(ys[0])] = max(map(float, xs))
    return drawn


def faults_of(title: str, drawn: Drawn) -> list[str]:
    """Return what a title says that is not drawn; one sentence for a title that no reader knows."""
    for form, check in READERS:
        found = re.search(form, title)
        if found:
            return list(check(found, drawn))
    return [f"no reader knows the title {title!r}"]


def _counts(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `6 of 32 cells are proven within 5 points of full, 5 beyond`."""
    within, every = int(found[1]), int(found[2])
    if (drawn.count("within"), sum(map(len, drawn.marks))) != (within, every):
        yield f"{drawn.count('within')} of {sum(map(len, drawn.marks))} marks are filled"
    beyond = int(found[3] or 0)
    if drawn.count("beyond") != beyond:
        yield f"{drawn.count('beyond')} marks are crosses"


def _beyond(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `1 of 9 settings is proven to lose more than 7 points, none within`."""
    if (drawn.count("beyond"), sum(map(len, drawn.marks)), drawn.count("within")) != (int(found[1]), int(found[2]), 0):
        yield f"{drawn.count('beyond')} crosses and {drawn.count('within')} filled marks"


def _nothing(_: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `No setting is proven to stay within 3 points of the full cache: too few problems`."""
    if drawn.count("within"):
        yield f"{drawn.count('within')} marks are filled"
    if any(drawn.boxes):
        yield "a setting has a box"


def _saves(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `dynts saves 52 to 58 % of KV memory, proven to lose at most 5 points`, with or without what it saves."""
    margin = float(found[3])
    told = {f"{one} %" for one in (found[1], found[2]) if one}
    for panel, (boxes, marks) in enumerate(zip(drawn.boxes, drawn.marks, strict=True)):
        if len(boxes) != 1:
            yield f"panel {panel} has {len(boxes)} boxes"
            continue
        states = [state for state, _, place in marks if place == boxes[0]]
        if states != ["within"]:
            yield f"the boxed row of panel {panel} is {states}"
        if drawn.ends[panel, boxes[0]] > margin:
            yield f"the interval of the boxed row of panel {panel} reaches {drawn.ends[panel, boxes[0]]}"
    shares = sorted(int(text.split()[0]) for text in drawn.saves)
    if told and {f"{shares[0]} %", f"{shares[-1]} %"} != told:
        yield f"the boxed rows save {shares}"


def _alone(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `On tiny-llama alone, dynts is proven to lose at most 5 points`."""
    with_box = [name for name, boxes in zip(drawn.names, drawn.boxes, strict=True) if boxes]
    if with_box != [found[1]]:
        yield f"{with_box} have boxes"


def _level(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `Ratio 0.1 is 1.5 points below the rest in 8 of 8 maps (p 0.016)`: no effect as sure is larger."""
    axis, level, points, side = found[1].lower(), found[2], float(found[3]), found[5]
    told = [one for one in drawn.effects if one["axis"].lower() == axis and str(one["level"]) == level]
    if not told or abs(abs(told[0]["points"]) - points) > 0.051 or (told[0]["points"] < 0) != (side == "below"):
        yield f"{axis} {level} differs by {[one['points'] for one in told]}"
        return
    for other in drawn.effects:
        if other["p"] <= told[0]["p"] and abs(other["points"]) > abs(told[0]["points"]):
            yield f"{other['axis']} {other['level']} differs by {other['points']} points at p {other['p']}"
    if found[6] and drawn.cells:
        alike = 0
        for cells in drawn.cells:
            own = [value for place, value in cells.items() if level in map(str, place)]
            rest = [value for place, value in cells.items() if level not in map(str, place)]
            alike += (sum(own) / len(own) < sum(rest) / len(rest)) == (side == "below")
        if (alike, len(drawn.cells)) != (int(found[6]), int(found[7])):
            yield f"it is {side} in {alike} of {len(drawn.cells)} panels"


def _lines(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `A is above B in 6 of 6 pairs`: above is what stands higher on paper."""
    names = [found[1].lower(), found[2].lower()]
    higher = 0
    pairs = 0
    for panel in drawn.lines:
        first, second = (next(line for name, line in panel.items() if one.startswith(name)) for one in names)
        for x, y in first:
            nearest = min(second, key=lambda point: abs(point[0] - x))
            if abs(nearest[0] - x) <= 8 and nearest[1] != y:
                pairs += 1
                higher += (y < nearest[1]) if drawn.is_falling else (y > nearest[1])
    if higher < pairs or not pairs:
        yield f"the line of {names[0]} is higher in {higher} of {pairs} places"


def _pairs(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `A is proven better than B in 4 of 4 panels`: a rule holds for every pair of a panel."""
    whole = sum(all(of_panel) for of_panel in drawn.pairs)
    if (whole, len(drawn.pairs)) != (int(found[1]), int(found[2])):
        yield f"it is proven for all pairs in {whole} of {len(drawn.pairs)} panels"


def _gate(found: re.Match[str], drawn: Drawn) -> Iterable[str]:
    """Read `Keeps: loses at most 3.1 points (margin 5 points)` by the first row."""
    end = drawn.ends[0, 0.0]
    if abs(end - float(found[1])) > 0.051:
        yield f"the first interval ends at {end}"
    if [state for state, _, place in drawn.marks[0] if place == 0] != ["within"] or end > float(found[2]):
        yield "the first row is not within the margin"


READERS: Sequence[tuple[str, Callable[[re.Match[str], Drawn], Iterable[str]]]] = [
    (r"(\d+) of (\d+) (?:settings|cells) (?:is|are) proven within [^,]*(?:, (\d+) beyond)?$", _counts),
    (r"(\d+) of (\d+) (?:settings|cells) (?:is|are) proven to lose more than .*, none within", _beyond),
    (r"(?i)no (?:setting|cell) is proven (?:to stay )?within", _nothing),
    (r"^On (\S+) alone, .* (?:is|are) proven", _alone),
    (
        rf"(?:saves? (\d+)(?: to (\d+))? % of KV memory,|is|are) proven (?:to lose at most|within) {NUMBER} points?",
        _saves,
    ),
    (rf"^(.+) (\S+) is {NUMBER}(?: to {NUMBER})? points (below|above) the rest(?:.* in (\d+) of (\d+) maps)?", _level),
    (r"^(\S+) is above (\S+) in \d+ of \d+ pairs", _lines),
    (r"is proven better than .* in (\d+) of (\d+) panels", _pairs),
    (rf"^Keeps: loses at most {NUMBER} points? \(margin {NUMBER}", _gate),
]
