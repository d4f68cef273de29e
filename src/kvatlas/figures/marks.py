"""The marks of settings: one key for figures, pages and gates.

A filled mark is proven to stay within the margin, a hollow one is not decided, a cross is proven to lie beyond it, and
a dotted one fits by its own limit without a test. A ring or a box is around what is recommended, and around nothing
else. Shapes tell the states apart without colours. Losses grow downward from 0 at the top, or to the right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import CellCoord, Claim, Map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvatlas.figures.colours import Palette
    from kvatlas.stats.numerics.arrays import Difference

#: The kinds of a key beside the states: the ring or the box of what is recommended, and the tick of a control.
RING = "ring"
BOX = "box"
CONTROL = "control"
#: Points of a mark's width, and of a ring's around it.
SIZE = 5.0
RING_SIZE = 12.0
#: The widths of a mark's edge, of the line of an interval, and of a ring.
_EDGE = 1.1
_LINE = 1.3
_RING = 1.4
#: The signs of recommendation and control are markers of matplotlib.
_MARKERS = {RING: "o", BOX: "s", CONTROL: "|"}
#: The dashes of a dotted edge, in widths of the edge.
_DOTS = (0, (0.9, 1.0))


class State(StrEnum):
    """The state of a setting beside the margin, by the claim of its run."""

    WITHIN = "within"
    OPEN = "open"
    BEYOND = "beyond"
    UNTESTED = "untested"


class Mark(NamedTuple):
    """The mark of a state: its sign in text, its marker of matplotlib, and its words, `{}` for the margin."""

    sign: str
    marker: str
    words: str
    is_filled: bool = False
    is_dotted: bool = False


MARKS: Mapping[str, Mark] = {
    State.WITHIN: Mark("●", "o", "proven within {}", is_filled=True),
    State.OPEN: Mark("○", "o", "not decided"),
    State.BEYOND: Mark("✕", "X", "proven beyond {}", is_filled=True),
    State.UNTESTED: Mark("◌", "o", "fits, not tested", is_dotted=True),
}


class KeyEntry(NamedTuple):
    """An entry of the key of a figure: a state or another kind of mark, and its words."""

    kind: str
    words: str


def state_of(loss: Difference, margin: float, is_untested: bool = False) -> State:
    """Return the state of a setting with a loss; `is_untested` where the tests ended before it."""
    if loss.is_kept:
        return State.WITHIN
    if loss.is_broken:
        return State.BEYOND
    return State.UNTESTED if is_untested and loss.limit <= margin else State.OPEN


def states_of(map_: Map) -> dict[CellCoord, State]:
    """Return the states of the cells of a map by the claim of its run; empty for a map without a margin."""
    if map_.keeps is None:
        return {}
    is_of_these = map_.claim is Claim.THESE
    kept = map_.keeps if is_of_these else map_.keeps_like
    broken = (map_.breaks if is_of_these else map_.breaks_like) or frozenset()
    states = dict.fromkeys(map_.cells, State.OPEN)
    for coords, state in ((map_.fits, State.UNTESTED), (broken, State.BEYOND), (kept, State.WITHIN)):
        states |= dict.fromkeys(states.keys() & coords, state)
    return states


def key_of(states: Collection[State], margin: str, claim: str = "") -> list[KeyEntry]:
    """Return the states that are drawn, in the order of the key, with their words; `claim` stands after proofs."""
    found = []
    for state, mark in MARKS.items():
        if state in states:
            claimed = f" {claim}" if claim and mark.is_filled else ""
            found.append(KeyEntry(state, mark.words.format(margin) + claimed))
    return found


def page_marks() -> dict[str, dict[str, str]]:
    """Return the sign and the words of each state, for pages."""
    return {state: {"sign": mark.sign, "words": mark.words} for state, mark in MARKS.items()}


def add_mark(
    parent: Axes | Figure, place: tuple[float, float], kind: str, palette: Palette, size: float = SIZE
) -> None:
    """Add the mark of a state, a ring, a box or the tick of a control, so many points wide, above all lines.

    Places are on the axes of a panel, or in inches of a figure.
    """
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.markers import MarkerStyle
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import IdentityTransform

    mark = MARKS.get(kind)
    colour = palette.soft if kind == CONTROL else palette.picked
    face = "none"
    if mark is not None:
        colour = palette.states[kind]
        face = colour if mark.is_filled else palette.ground
    edge = {RING: _RING, BOX: _RING, State.BEYOND: 0.4}.get(kind, _EDGE * min(1.0, size / SIZE))
    style = MarkerStyle(_MARKERS[kind] if mark is None else mark.marker)
    collection = PathCollection(
        [style.get_path().transformed(style.get_transform())],
        # A cross of the same width looks smaller.
        sizes=[(1.3 * size if kind == State.BEYOND else size) ** 2],
        offsets=[place],
        offset_transform=parent.transData if isinstance(parent, Axes) else parent.dpi_scale_trans,
        facecolors=face,
        # An edge of the ground sets a cross off from lines below it.
        edgecolors=palette.ground if kind == State.BEYOND else colour,
        linewidths=edge,
        linestyles=[_DOTS] if mark is not None and mark.is_dotted else "solid",
        zorder=4,
        clip_on=False,
        gid=f"mark-{kind}",
    )
    collection.set_transform(IdentityTransform())
    if mark is not None and mark.is_dotted:
        # The gaps between dots have the ground of the mark.
        collection.set_path_effects([withStroke(linewidth=_EDGE, foreground=palette.ground)])
    parent.add_artist(collection)


def draw_setting(
    axes: Axes,
    place: tuple[float, float],
    state: State,
    palette: Palette,
    horizontal: tuple[float, float] | None = None,
    vertical: tuple[float, float] | None = None,
) -> None:
    """Draw the mark of a setting with the ends of its intervals: solid where something is proven, else dashed."""
    line: dict[str, Any] = {"color": palette.states[state], "linewidth": _LINE, "zorder": 3, "solid_capstyle": "butt"}
    line["linestyle"] = "-" if MARKS[state].is_filled else (0, (2, 1))
    if horizontal is not None:
        axes.plot(horizontal, (place[1], place[1]), **line)
    if vertical is not None:
        axes.plot((place[0], place[0]), vertical, **line)
    add_mark(axes, place, state, palette)
