"""The command `map`: heatmaps, difference maps, cost maps, line charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli.figure_options import with_figure_options
from kvatlas.cli.results import Fix, Inputs, LoseAtMost, Partial, PolicyOption, fixed
from kvatlas.core import KvatlasError

if TYPE_CHECKING:
    from kvatlas.figures.panels import Frame

MapMetric = Annotated[
    str | None,
    typer.Option(
        help="pass@1, progress, ..., or a cost: mean_kv_tokens, kv_memory, seconds, truncated, ... Default: pass@1.",
    ),
]


@with_figure_options
def map_(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(metavar="FILE", help="PNG, SVG or PDF by its suffix.")],
    mean: Annotated[bool, typer.Option("--mean", help="Means over benchmarks, models side by side.")] = False,
    shared: Annotated[
        bool | None,
        typer.Option(
            "--shared/--own",
            help="One colour scale for all panels, or one from the lowest to the highest cell of each. "
            "Default: one for each, as wide as an interval at least.",
        ),
    ] = None,
    policy: PolicyOption = None,
    metric: MapMetric = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|RUN|CSV",
            help="Differences to a baseline (full), a policy, a model, another run or CSV map, in pairs.",
        ),
    ] = None,
    frame: Annotated[
        str,
        typer.Option(
            metavar="margin|plateau|none",
            help="Outline the cells shown to keep the margin, or those statistically tied with the best.",
        ),
    ] = "margin",
    lose_at_most: LoseAtMost = None,
    partial: Partial = False,
    fix: Fix = None,
    *,
    look: Any,
) -> None:
    """Draw heatmaps over local window and ratio: a panel for each benchmark, or means side by side.

    Runs that vary one parameter, or only the policy, become line charts. The data is written next to the figure.
    """
    from kvatlas.report.map_figure import plot_sources

    written = plot_sources(
        inputs,
        out,
        mean=mean,
        shared=shared,
        policy=policy,
        metric=metric,
        against=against,
        frame=_frame(frame),
        lose_at_most=lose_at_most,
        look=look,
        partial=partial,
        fix=fixed(fix),
    )
    for path in written:
        typer.echo(path)


def _frame(name: str) -> Frame:
    from kvatlas.figures.panels import Frame

    if name not in list(Frame):
        raise KvatlasError(f"--frame is one of {', '.join(Frame)}; {name!r} was given.")
    return Frame(name)


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("map")(map_)
