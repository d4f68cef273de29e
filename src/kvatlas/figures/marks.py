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
from kvatlas.figures import colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvatlas.figures.colours import Palette
    from kvatlas.stats.losses import SettingLoss

#: The area of a mark of one point's width in the units of matplotlib.
_UNIT = 1.0
#: The widths of a mark's edge, of the line of an interval, and of a ring.
_EDGE = 1.1
_LINE = 1.5
_RING = 1.4
#: The dashes of a dotted edge, in widths of the edge.
_DOTS = (0, (1, 1.1))


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


MARKS: Mapping[State, Mark] = {
    State.WITHIN: Mark("●", "o", "proven within {}", is_filled=True),
    State.OPEN: Mark("○", "o", "not decided"),
    State.BEYOND: Mark("✕", "X", "proven beyond {}", is_filled=True),
    State.UNTESTED: Mark("◌", "o", "fits, not tested", is_dotted=True),
}


def state_of(loss: SettingLoss, margin: float, is_untested: bool = False) -> State:
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
    states = {}
    for coord in map_.cells:
        states[coord] = State.OPEN
        if coord in kept:
            states[coord] = State.WITHIN
        elif coord in broken:
            states[coord] = State.BEYOND
        elif coord in map_.fits:
            states[coord] = State.UNTESTED
    return states


def legend_of(states: Collection[State], margin: str, claim: str = "") -> list[tuple[State, str]]:
    """Return the states that are drawn, in the order of the key, with their words; `claim` stands after proofs."""
    found = []
    for state, mark in MARKS.items():
        if state in states:
            words = mark.words.format(margin)
            is_proof = "{}" in mark.words
            found.append((state, f"{words} {claim}".strip() if is_proof else words))
    return found


def key_in_words(states: Collection[State], margin: str, claim: str = "") -> str:
    """Return the key as a clause: `● proven within 5 points, ○ not decided`."""
    return ", ".join(f"{MARKS[state].sign} {words}" for state, words in legend_of(states, margin, claim))


def page_marks() -> dict[str, dict[str, str]]:
    """Return the sign, the words, and the colours on a light and a dark ground of each state, for pages."""
    found = {}
    for state, mark in MARKS.items():
        light, dark = (palette.states[state] for palette in (colours.LIGHT, colours.DARK))
        found[str(state)] = {"sign": mark.sign, "words": mark.words, "light": light, "dark": dark}
    return found


def draw_mark(
    axes: Axes,
    place: tuple[float, float],
    state: State,
    palette: Palette,
    size: float = 5.0,
    **words: Any,
) -> None:
    """Draw the mark of a state at a place, so many points wide."""
    mark = MARKS[state]
    colour = palette.states[state]
    axes.scatter(
        *place,
        s=_UNIT * size**2,
        marker=mark.marker,
        facecolors=colour if mark.is_filled else palette.ground,
        edgecolors=colour if not mark.is_filled or mark.marker == "o" else palette.ground,
        linewidths=0.5 if mark.marker == "X" else _EDGE,
        linestyles=[_DOTS] if mark.is_dotted else "solid",
        **{"zorder": 4, "gid": f"state-{state}", "clip_on": False, **words},
    )


def draw_interval(
    axes: Axes,
    ends: tuple[tuple[float, float], tuple[float, float]],
    state: State,
    palette: Palette,
) -> None:
    """Draw the line of an interval between two places: solid where something is proven, else dashed."""
    (x_low, y_low), (x_high, y_high) = ends
    axes.plot(
        (x_low, x_high),
        (y_low, y_high),
        color=palette.states[state],
        linewidth=_LINE,
        linestyle="-" if MARKS[state].is_filled else (0, (2, 1)),
        solid_capstyle="butt",
        zorder=3,
    )


def draw_ring(axes: Axes, place: tuple[float, float], palette: Palette, size: float = 12.0) -> None:
    """Draw the ring around the mark of the recommended setting."""
    axes.scatter(
        *place,
        s=_UNIT * size**2,
        marker="o",
        facecolors="none",
        edgecolors=palette.picked,
        linewidths=_RING,
        zorder=5,
        clip_on=False,
        gid="ringed",
    )
