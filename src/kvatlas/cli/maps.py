"""The command `map`: heatmaps, difference maps, cost maps, line charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli.results import Fix, Inputs, Partial, PolicyOption, fixed, maps_of

if TYPE_CHECKING:
    from kvatlas.core import Map
    from kvatlas.figures.look import Look
    from kvatlas.figures.panels import Panel

MapMetric = Annotated[
    str,
    typer.Option(help="pass@1, progress, ..., or a cost: mean_kv_tokens, kv_memory, seconds, truncated, ..."),
]


def map_(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(metavar="FILE", help="PNG, SVG or PDF by its suffix.")],
    mean: Annotated[bool, typer.Option("--mean", help="Means over benchmarks, models side by side.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared/--own", help="One colour scale for all panels, or each its own.")
    ] = False,
    policy: PolicyOption = None,
    metric: MapMetric = "pass@1",
    against: Annotated[
        str | None, typer.Option(metavar="BASELINE", help="Differences to a baseline, such as full, in pairs.")
    ] = None,
    plateau: Annotated[
        bool, typer.Option("--plateau/--no-plateau", help="Outline the cells not shown worse than the best.")
    ] = True,
    columns: Annotated[
        int | None, typer.Option(min=1, max=2, help="Fill one or two columns of a paper (3.35 or 7 inches).")
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="On a dark ground.")] = False,
    partial: Partial = False,
    fix: Fix = None,
) -> None:
    """Draw heatmaps over local window and ratio: a panel for each benchmark, or means side by side.

    Runs that vary one parameter, or only the policy, become line charts. The data is written beside the figure.
    """
    from kvatlas.figures.heatmap import draw
    from kvatlas.figures.look import Look, save
    from kvatlas.figures.panels import data_csv

    look = Look(columns, dark)
    if _has_one_axis(inputs, fix):
        written = _curves(inputs[0], out, metric, partial, fix, policy, look)
    else:
        panels, maps = _panels(inputs, metric, against, partial, fix, policy, mean, plateau)
        figure = draw(panels, shared=shared, one_bar=mean, look=look)
        written = save(figure, out, maps, data=None if maps else data_csv(panels))
    for path in written:
        typer.echo(path)


def _panels(
    inputs: list[str],
    metric: str,
    against: str | None,
    partial: bool,
    fix: list[str] | None,
    policy: str | None,
    mean: bool,
    plateau: bool,
) -> tuple[list[Panel], list[Map]]:
    """The panels, and the maps whose values they print (none for costs and differences)."""
    from kvatlas.figures.panels import cost_panels, difference_panels, metric_panels
    from kvatlas.stats.estimates.maps import mean_maps
    from kvatlas.stats.estimates.metrics import COSTS

    cost = metric if metric in COSTS else None
    maps = maps_of(inputs, None if cost else metric, partial, fix, policy)
    single = maps
    if mean:
        maps = mean_maps(maps)
    if cost:
        return cost_panels(maps, cost, against), []
    if against:
        return difference_panels(maps, _differences(inputs, against, metric, fix), against), []
    return metric_panels(maps, _plateaus(inputs, single, metric, fix) if plateau else None), maps


def _plateaus(inputs: list[str], maps: list[Map], metric: str, fix: list[str] | None) -> dict[Any, Any]:
    """The plateau of each map: from the traces of a run, from the bound for a CSV map."""
    from kvatlas.results import Store
    from kvatlas.stats.inference.binomial_tests import verdicts_of_maps
    from kvatlas.stats.run_analysis import verdicts_of_run

    found: dict[Any, Any] = {}
    for source in inputs:
        if Path(source).is_dir():
            with Store.open(Path(source)) as store:
                found |= verdicts_of_run(store.manifest(), store.traces(texts=False), metric, fixed(fix, [source]))
    if not all(Path(source).is_dir() for source in inputs):
        found = verdicts_of_maps(maps) | found
    return {name: verdict.plateau for name, verdict in found.items()}


def _differences(inputs: list[str], against: str, metric: str, fix: list[str] | None) -> dict[Any, Any]:
    from kvatlas.results import Store
    from kvatlas.stats.pairs.differences import differences_of_run

    found: dict[Any, Any] = {}
    for source in inputs:
        if Path(source).is_dir():
            with Store.open(Path(source)) as store:
                found |= differences_of_run(
                    store.manifest(), store.traces(texts=False), against, metric, fixed(fix, [source])
                )
    return found


def _has_one_axis(inputs: list[str], fix: list[str] | None) -> bool:
    from kvatlas.core import KvatlasError
    from kvatlas.results import Store
    from kvatlas.stats.estimates.curves import one_axis

    found = []
    for source in inputs:
        if Path(source).is_dir():
            with Store.open(Path(source)) as store:
                found.append(one_axis(store.manifest(), fixed(fix, [source])))
    if any(found) and len(inputs) > 1:
        raise KvatlasError("A run with fewer than two axes is drawn as a line chart, alone; name one run.")
    return any(found)


def _curves(
    source: str, out: Path, metric: str, partial: bool, fix: list[str] | None, policy: str | None, look: Look
) -> list[Path]:
    from kvatlas.core import KvatlasError
    from kvatlas.figures.curves import curve_figure, data_csv
    from kvatlas.figures.look import save
    from kvatlas.results import Store
    from kvatlas.stats.estimates.curves import curves_of_run
    from kvatlas.stats.estimates.metrics import COSTS, usual_metric

    cost = metric if metric in COSTS else None
    with Store.open(Path(source)) as store:
        manifest = store.manifest()
        graded = usual_metric(manifest) if cost else metric
        curves = curves_of_run(manifest, store.traces(texts=False), graded, partial, fixed(fix, [source]))
    chosen = [one for one in curves if policy in (None, one.policy)]
    if not chosen:
        there = ", ".join(dict.fromkeys(one.policy for one in curves))
        raise KvatlasError(f"There is no curve of the policy {policy!r}; there are: {there}.")
    return save(curve_figure(chosen, cost=cost, look=look), out, data=data_csv(chosen, cost))


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("map")(map_)
