"""Findings as the titles of figures: what tests of the results prove, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvatlas.core import Claim
from kvatlas.figures.panels import CellQuestion, Panel, TestedCells


def panels_title(panels: Sequence[Panel]) -> str:
    """State of how many cells something is proven; the range of the cells if nothing was tested."""
    tested = [panel.tested for panel in panels if panel.tested is not None]
    asked = {(one.question, one.reference) for one in tested}
    if len(tested) < len(panels) or len(asked) > 1:
        return _value_range(panels)

    counts = _CellCounts(panels, tested)
    if tested[0].question is CellQuestion.MARGIN:
        is_of_these = any(panel.map.claim is Claim.THESE for panel in panels)
        return _of_margin(counts, tested[0].reference, "on these problems" if is_of_these else "of full")
    if tested[0].question is CellQuestion.DIFFERENCE:
        return _of_difference(counts, tested[0].reference)
    # Which cells are worse than the best.
    if counts.bad:
        return f"{counts.some(counts.bad)} shown to be worse than the best"
    if counts.every == 1:
        return "there is only one setting, so nothing is compared"
    of_its_map = " of its map" if len(panels) > 1 else ""
    return f"no {counts.noun} is shown to be better than another{of_its_map}"


class _CellCounts:
    """The number of cells of panels, of those that are proven good and bad, and the noun for them."""

    def __init__(self, panels: Sequence[Panel], tested: Sequence[TestedCells]) -> None:
        self.every = sum(len(panel.cells) for panel in panels)
        self.good = sum(len(one.good) for one in tested)
        self.bad = sum(len(one.bad) for one in tested)
        # A cell is a setting on a benchmark.
        benchmarks = {panel.map.benchmark for panel in panels}
        self.noun = "setting" if len(benchmarks) == 1 else "cell"

    @property
    def all(self) -> str:
        """All cells in words."""
        return f"the only {self.noun}" if self.every == 1 else f"all {self.every} {self.noun}s"

    def some(self, count: int) -> str:
        """Return `9 of 40 settings are`."""
        return f"{count} of {self.every} {self.noun}s {'is' if count == 1 else 'are'}"

    def verb(self, singular: str, plural: str) -> str:
        """Return the form of a verb for all cells."""
        return singular if self.every == 1 else plural


def _of_margin(counts: _CellCounts, margin: str, claim: str) -> str:
    """State how many cells stay within a margin, and how many lose more, in few words.

    `claim` says of which problems, else of what.
    """
    within = f"proven within {margin} {claim}"
    if counts.good == counts.every:
        return f"{counts.all} {counts.verb('is', 'are')} {within}"
    if counts.bad == counts.every:
        return f"{counts.all} {counts.verb('loses', 'lose')} more than {margin}, proven"
    if counts.good:
        more = f", {counts.bad} beyond" if counts.bad else ""
        return f"{counts.some(counts.good)} {within}{more}"
    if counts.bad:
        return f"{counts.some(counts.bad)} proven to lose more than {margin}, none within"
    return f"no {counts.noun} is {within}, and none beyond"


def _of_difference(counts: _CellCounts, other: str) -> str:
    """State how many cells differ from another side, and in which direction."""
    if counts.good == counts.every:
        return f"{counts.all} {counts.verb('lies', 'lie')} above {other}, proven"
    if counts.bad == counts.every:
        return f"{counts.all} {counts.verb('lies', 'lie')} below {other}, proven"
    if counts.good:
        return f"{counts.some(counts.good)} proven to lie above {other}, {counts.bad or 'none'} below"
    if counts.bad:
        return f"{counts.some(counts.bad)} proven to lie below {other}, none above"
    return f"no {counts.noun} is proven to differ from {other}"


def _value_range(panels: Sequence[Panel]) -> str:
    """State what the panels show, and of one measure from which value to which."""
    labels = dict.fromkeys(panel.label for panel in panels)
    subject = " and ".join(labels)
    if len(labels) > 1:
        return subject
    cells = sorted(chain.from_iterable(panel.cells.values() for panel in panels))
    unit = panels[0].unit.removeprefix("in ")
    if cells[0].text == cells[-1].text:
        return f"{subject} {cells[0].text} {unit}"
    return f"{subject} from {cells[0].text} to {cells[-1].text} {unit}"
