"""The axis of losses of a figure: what lies far beyond the margin is drawn closer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvatlas.figures import style
from kvatlas.figures.marks import State
from kvatlas.stats.numerics.arrays import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvatlas.figures.colours import Palette

#: The share of a panel that the closer part of its axis takes.
_CLOSER_SHARE = 0.2
#: Inches between two ticks.
_TICK_STEP = 0.22


class LossSpan(NamedTuple):
    """A loss in points, with the ends of its interval where they are known."""

    value: float
    low: float | None = None
    high: float | None = None


def tick_number(value: float) -> str:
    """Return a value as it stands on an axis, with a true minus."""
    return f"{value:g}".replace("-", "−")


@dataclass(frozen=True)
class LossAxis:
    """The axis of losses: from `low` to `high`, and so many times closer beyond `turn`."""

    low: float
    turn: float
    high: float
    closer: float = 1.0

    @classmethod
    def of(cls, spans: Sequence[LossSpan], margin: float | None, others: Sequence[float] = ()) -> LossAxis:
        """Return the axis of losses and `others` without intervals: closer beyond those near the margin, if any."""
        lows = [span.value if span.low is None else span.low for span in spans]
        highs = [span.value if span.high is None else span.high for span in spans]
        reach = max([*highs, *others])
        if margin is None:
            room = 0.04 * (max(highs) - min(lows)) or 1.0
            return cls(min(lows) - room, max(highs) + room, max(highs) + room)

        low = min(-0.6 * margin, *(value - 0.1 * margin for value in lows))
        near = [high for span, high in zip(spans, highs, strict=True) if span.value <= 2 * margin]
        turn = 1.05 * max([2 * margin, *near])
        if reach <= 2.5 * turn:
            high = max(1.3 * margin, 1.03 * reach)
            return cls(low, high, high)
        high = 1.03 * reach
        width = (turn - low) * _CLOSER_SHARE / (1 - _CLOSER_SHARE)
        return cls(low, turn, high, (high - turn) / width)

    @property
    def words(self) -> list[str]:
        """A clause that says where the axis is closer, if it is."""
        if self.closer <= 1:
            return []
        return [f"beyond {self.turn:.0f} points the axis is {self.closer:.0f} times closer (grey)"]

    @property
    def middle_beyond(self) -> float:
        """The loss in the middle of the closer part."""
        return float(self.inverse(np.atleast_1d(self.forward(np.array([self.turn, self.high])).mean()))[0])

    def forward(self, values: Floats) -> Floats:
        """Return the places of losses on paper."""
        values = np.asarray(values, float)
        return np.where(values <= self.turn, values, self.turn + (values - self.turn) / self.closer)

    def inverse(self, places: Floats) -> Floats:
        """Return the losses at places on paper."""
        places = np.asarray(places, float)
        return np.where(places <= self.turn, places, self.turn + (places - self.turn) * self.closer)

    def place(self, value: float) -> float:
        """Return the place of a loss on paper, from 0 to 1."""
        low, here, high = self.forward(np.array([self.low, value, self.high]))
        return float((here - low) / (high - low))

    def ticks(self, inches: float) -> list[float]:
        """Return round values, no two of them nearer than a step."""
        beyond = style.round_values(self.turn, self.high) if self.closer > 1 else []
        found: list[float] = []
        # The last value beyond the turn goes before those between.
        for value in [*style.round_values(self.low, self.turn), *reversed(beyond)]:
            if all(inches * abs(self.place(value) - self.place(other)) > _TICK_STEP for other in found):
                found.append(value)
        return sorted(found)


def draw_margin(
    axes: Axes, axis: LossAxis, margin: float, is_proven: bool, palette: Palette, is_vertical: bool = False
) -> str:
    """Draw the line of the margin with the reference at 0 and the closer part, and return the colour of the margin.

    Where a setting `is_proven` to stay within the margin it has a band. An axis that `is_vertical` has losses downward.
    """
    line = axes.axhline if is_vertical else axes.axvline
    span = axes.axhspan if is_vertical else axes.axvspan
    colour = palette.states[State.WITHIN] if is_proven else palette.soft
    if is_proven:
        span(axis.low, margin, color=palette.band, linewidth=0, zorder=0)
    line(margin, color=colour, linewidth=1.1, zorder=1, gid="margin")
    line(0, color=palette.ink, linewidth=0.6, zorder=1)
    if axis.closer > 1:
        span(axis.turn, axis.high, color=palette.closer, linewidth=0, zorder=0)
    return colour
