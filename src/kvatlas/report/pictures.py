"""Finished pictures that a report embeds: systems problem by problem, line charts of runs with one axis."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.core import KvatlasError, Map
from kvatlas.figures import style
from kvatlas.figures.style import rendered
from kvatlas.stats.maps import curves_of_run, mean_maps
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import ModelSetting, pairs_of, systems_of

#: Systems of the pairwise figure: six panels.
SYSTEMS = 4
_DOTS = 130


@dataclass(frozen=True)
class Picture:
    """A finished picture for the page: its title, what it shows as text, and its SVG or PNG content."""

    title: str
    about: str
    content: bytes

    @property
    def address(self) -> str:
        """A data address; SVG shown as an image runs nothing."""
        kind = "image/png" if self.content.startswith(b"\x89PNG") else "image/svg+xml"
        return f"data:{kind};base64,{base64.b64encode(self.content).decode()}"


def pictures(run: RunData, maps: Sequence[Map]) -> list[Picture]:
    """The line chart of a run with one axis, pairs where problems are graded by progress."""
    charts = []
    if run.is_line:
        from kvatlas.figures.curves import line_figure

        about = f"{style.label(run.metric)} with 95 % intervals."
        charts.append(Picture("Line chart.", about, rendered(line_figure(curves_of_run(run)), ".svg")))
    pairwise = _pairwise(run, maps)
    return [*charts, *([pairwise] if pairwise else [])]


def _pairwise(run: RunData, maps: Sequence[Map]) -> Picture | None:
    """Baselines and each policy's highest cell against each other; None where progress says no more than right."""
    progress = run.table.records["progress"]
    if not ((progress > 0) & (progress < 1)).any():
        return None
    from kvatlas.figures.pairwise import names_of, pairwise_figure

    try:
        systems = _chosen(systems_of([run], "progress"), maps)
        figure = pairwise_figure(systems, pairs_of(systems), "progress", [])
    except KvatlasError:
        return None
    about = f"Progress problem by problem, a panel for every two of {', '.join(names_of(systems))}."
    return Picture("Every two against each other.", about, rendered(figure, ".png", _DOTS))


def _chosen(systems: Sequence[ModelSetting], maps: Sequence[Map]) -> list[ModelSetting]:
    """The baselines of each model and the highest cell of each of its maps, means before single benchmarks."""
    names: dict[tuple[str, str], None] = {}
    for model in dict.fromkeys(map_.model for map_ in maps):
        own = [map_ for map_ in maps if map_.model == model]
        for map_ in mean_maps(own) or own:
            names |= dict.fromkeys((model, cell.setting.id) for cell in map_.baselines.values())
        for map_ in mean_maps(own) or own:
            names[model, map_.cells[map_.best].setting.id] = None
    by_name = {(system.model, system.setting.id): system for system in systems}
    return [by_name[name] for name in names if name in by_name][:SYSTEMS]
