"""All that the traces of a run support, whichever way its sweep gave out problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import Map
from kvatlas.results.manifest import Manifest
from kvatlas.stats.adaptive import NO_PAIRS, adaptive_choices, adaptive_verdicts, standings
from kvatlas.stats.cells import Gathered
from kvatlas.stats.choice import Choice, choices
from kvatlas.stats.comparisons import Comparison, comparisons
from kvatlas.stats.grid import Axes
from kvatlas.stats.verdicts import Name, Verdict, verdicts


@dataclass(frozen=True)
class Judgement:
    """Verdicts by map name, what to choose, paired comparisons, and notes on what is left out."""

    verdicts: Mapping[Name, Verdict]
    choices: Sequence[Choice]
    comparisons: Sequence[Comparison] = ()
    notes: Sequence[str] = ()


def judge(
    manifest: Manifest,
    cells: Sequence[Gathered],
    maps: Sequence[Map],
    axes: Axes,
    metric: str = "pass@1",
    fix: Mapping[str, Any] | None = None,
) -> Judgement:
    """The judgement on a run's gathered cells; `maps` are theirs. For adaptive runs only what is valid at any stop."""
    if manifest.allocation:
        held = standings(manifest, cells)
        found = adaptive_verdicts(held, cells, maps, axes, fix)
        return Judgement(found, adaptive_choices(held, cells), (), (NO_PAIRS,))
    return Judgement(verdicts(cells, axes, fix), choices(cells, axes, fix), comparisons(cells, axes, metric, fix))
