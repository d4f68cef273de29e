"""The figure of runs and CSV maps: heatmaps of a metric, a cost or differences; rows of runs with one axis."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from matplotlib.figure import Figure

from kvatlas.columns import Column, cost_columns, measures_of
from kvatlas.core import CellCoord, KvatlasError, Map, MapName, Measure, Note, NoteKind, percent
from kvatlas.figures.heatmap import plot
from kvatlas.figures.loss_cost import cost_csv, cost_figure
from kvatlas.figures.panels import (
    ComparedMaps,
    Panel,
    cost_panels,
    difference_panels,
    loss_panels,
    metric_panels,
    panels_csv,
)
from kvatlas.figures.setting_rows import (
    MOST_ROWS,
    against_csv,
    against_figure,
    answer_csv,
    answer_figure,
    nearest_words,
)
from kvatlas.figures.style import FigureOptions, check_figure, save
from kvatlas.report.evidence import Evidence, MapResult
from kvatlas.report.sentences import effect_title, recommended_words, short_headline
from kvatlas.report.sources import ReadOptions, Source, bare_maps, every_map, of_policy, open_sources
from kvatlas.results.csv_maps import PUBLISHED
from kvatlas.results.export import marked_csv
from kvatlas.stats.choice import with_recommended
from kvatlas.stats.costs import cost_ratios
from kvatlas.stats.csv_tests import unpaired_losses
from kvatlas.stats.maps import check_complete, mean_maps, run_notes
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.pairs import Comparison, against_policy, differences_of_run, differences_of_runs, rows_of_policy
from kvatlas.stats.run_data import RunData
from kvatlas.text import model_name, signed

#: What the cells of maps lose against the full cache.
Losses = Mapping[MapName, Mapping[CellCoord, Difference]]


@dataclass(frozen=True)
class MapOptions:
    """The options of a figure of maps.

    Args:
        mean: means over benchmarks, side by side on one colour scale.
        shared: how far scales go (see `kvatlas.figures.heatmap.plot`).
        against: differences to a baseline, a policy, a model, or the maps of another run or CSV file.
        forest: a row for each setting with what it saves and loses, in place of a map.
        cost: what settings lose against this cost (see `kvatlas.stats.costs`), in place of a map.
        figure: the options of all figures.
    """

    mean: bool = False
    shared: bool | None = None
    against: str | None = None
    forest: bool = False
    cost: str | None = None
    figure: FigureOptions | None = None


def plot_sources(
    sources: Sequence[str | Path],
    out: Path,
    options: ReadOptions | None = None,
    show: MapOptions | None = None,
) -> list[Path]:
    """Draw runs and CSV maps to `out` and return what was written: the figure, and its numbers as CSV.

    The metric of the options may be a cost; without one it is pass@1. Raises KvatlasError for what cannot be drawn.
    """
    check_figure(out)
    options = options or ReadOptions(metric=None)
    show = show or MapOptions()
    opened = open_sources(sources, replace(options, metric=None))
    cost = options.metric if options.metric in _costs_of(opened) else None
    metric = None if cost else options.metric or "pass@1"
    read = replace(options, metric=metric)
    if metric:
        measured = [replace(one, metric=metric) if isinstance(one, RunData) else one for one in opened]
        opened = open_sources(measured, read)
    result = Evidence(opened, read)
    if show.forest or show.cost:
        return _draw_answer(result, out, show)

    if any(not run.has_maps for run in result.opened_runs):
        return _draw_rows(result, out, cost, options.policy, show)
    if show.mean and not result.untested_means:
        raise KvatlasError(
            "--mean averages two or more benchmarks of one model, and there is one; --shared draws its maps side by "
            "side on one colour scale."
        )

    if cost and show.against:
        raise KvatlasError("--against draws differences of a metric, and --metric names a cost; leave one of them out.")
    if show.against:
        panels = _panels_against(result, show.against, show.mean)
        policies = {show.against, *(panel.map.policy for panel in panels)}
        lead = short_headline((), _comparisons_of(result, policies))
        return _draw_panels(result, panels, out, show, lead)

    maps = [one.map for one in (means_of(result) if show.mean else result.maps)]
    if cost:
        return _draw_panels(result, cost_panels(maps, cost), out, show)
    for map_ in maps:
        if options.metric and map_.metric != options.metric:
            # A CSV map of another metric than the one that was asked for.
            raise KvatlasError(
                f"The map of {map_.model} on {map_.benchmark} shows {map_.metric} and no {options.metric!r}."
            )
    losses = losses_of_means(result) if show.mean and options.metric is None else {}
    if options.metric is None and not result.opened_runs:
        losses = unpaired_losses(result.untested, result.margin)
        if not all(map_.name in losses for map_ in maps):
            losses = {}
        if options.lose_at_most is not None and not losses:
            raise KvatlasError(
                "--lose-at-most is a margin against a full cache, and these maps have no row `full` with its problems."
            )
        maps = [_with_states(map_, losses.get(map_.name, {}), result.margin) for map_ in maps]
    points = {}
    for name, of_map in losses.items():
        points[name] = {at: [percent(loss.value), percent(loss.low), percent(loss.high)] for at, loss in of_map.items()}
    data = marked_csv(with_recommended(maps, result.choices), points)
    return save(metric_figure(result, maps, show, losses), out, data=data)


def _with_states(map_: Map, losses: Mapping[CellCoord, Difference], margin: float) -> Map:
    """Return a bare map with the cells whose losses are proven to be within the margin, and beyond it."""
    if not losses:
        return map_
    keeps = frozenset(coord for coord, loss in losses.items() if loss.is_kept)
    breaks = frozenset(coord for coord, loss in losses.items() if loss.is_broken)
    notes = (*map_.notes, Note(NoteKind.INTERVAL, "losses are not paired by problem, so their limits are wide"))
    map_ = replace(map_, margin=margin, notes=notes)
    return replace(map_, keeps=keeps, breaks=breaks, keeps_like=keeps, breaks_like=breaks)


def _costs_of(sources: Sequence[Source]) -> dict[str, Column]:
    """Return the costs of runs and maps by name; measures in [0, 1] are metrics of a run, and costs of a CSV map."""
    measures: list[Measure] = []
    for source in sources:
        if isinstance(source, RunData):
            measures += [one for one in source.manifest.measures if not (one.is_share or one.counts)]
        else:
            measures += measures_of(chain.from_iterable(map_.cells.values() for map_ in source))
    return cost_columns(measures)


def _draw_answer(result: Evidence, out: Path, show: MapOptions) -> list[Path]:
    """Draw what settings save and lose: as rows, or against a cost."""
    option = "--forest" if show.forest else f"--cost {show.cost}"
    others = {"--mean": show.mean, "--against": show.against, "--cost": show.cost and show.forest}
    for other, is_given in others.items():
        if is_given:
            raise KvatlasError(f"{option} draws what settings lose, and {other} another figure; leave one of them out.")
    # Those that rest on losses against a full cache.
    choices = [choice for choice in result.choices if choice.losses]
    if not choices:
        raise KvatlasError(
            "What settings save and lose is told against a full cache, and no run here has one; `kvatlas describe` "
            "prints the values with their intervals."
        )
    metric = result.opened_runs[0].metric
    title = short_headline(result.choices, result.comparisons)
    if show.cost is None:
        rows = 0
        for choice in choices:
            losses = choice.losses.values()
            rows = max(rows, sum(not loss.is_control for loss in losses))
        if rows > MOST_ROWS:
            raise KvatlasError(
                f"{rows} settings are more rows than the {MOST_ROWS} that a figure holds; draw their map "
                "(--mean), or one policy (--policy NAME)."
            )
        figure = answer_figure(choices, metric, title=title, options=show.figure)
        return save(figure, out, data=answer_csv(choices))

    run_of_model: dict[str, RunData] = {}
    for run in result.runs:
        for cell in run.cells:
            run_of_model.setdefault(cell.model, run)
    ratios = {}
    for choice in choices:
        ratios[choice.model] = cost_ratios(run_of_model[choice.model], choice.model, show.cost, choice.settings)
    figure = cost_figure(choices, show.cost, ratios, metric, title=title, options=show.figure)
    return save(figure, out, data=cost_csv(choices, show.cost, ratios))


def _check_heatmap_options(show: MapOptions, figure: str) -> None:
    """Raise KvatlasError for options of heatmaps beside another `figure`, which would go without a word."""
    given = {"--mean": show.mean, "--shared": show.shared is True, "--own": show.shared is False}
    for option, is_given in given.items():
        if is_given:
            raise KvatlasError(f"{option} is for runs with two axes, and this figure shows {figure}; leave it out.")


def losses_of_means(result: Evidence) -> Losses:
    """Return the losses of the cells of means against the full cache; empty unless those of all cells are known."""
    means = means_of(result)
    for one in means:
        if one.map.full is None or one.map.margin is None or not one.map.cells.keys() <= one.losses.keys():
            return {}
    return {one.map.name: one.losses for one in means}


def metric_figure(result: Evidence, maps: Sequence[Map], show: MapOptions, losses: Losses) -> Figure:
    """Return maps or means of a result, with the comparison of their policies where there are two.

    With `losses` of all maps, the figure shows these, unless it shall be plain, as papers have maps.
    """
    maps = with_recommended(maps, result.choices)
    comparisons = _comparisons_of(result, {map_.policy for map_ in maps})
    # The means of all policies are the whole result.
    is_whole = show.mean and result.options.policy is None

    title = short_headline(result.choices, comparisons) if is_whole else ""
    if not title and all(map_.keeps is None for map_ in maps):
        title = effect_title(result.effects)

    # The colours of a panel's own range tell tenths apart.
    is_plain = show.figure is not None and show.figure.plain
    panels = metric_panels(maps, exact=is_plain or show.shared is False)
    if losses and not is_plain:
        panels = loss_panels(maps, losses)
    notes = [*recommended_notes(result, maps), *_comparison_notes(comparisons)]
    return plot(panels, shared=show.shared, one_bar=show.mean, title=title, notes=notes, options=show.figure)


def recommended_notes(result: Evidence, maps: Sequence[Map], *, is_metric: bool = True) -> list[Note]:
    """Return a note that names the settings that are ringed on these maps, with what they save and lose.

    Where nothing is proven it names the nearest settings, if the maps are of a metric.
    """
    with_ring = [map_ for map_ in maps if map_.recommended is not None]
    ringed = {(map_.model, map_.cells[map_.recommended].setting) for map_ in with_ring if map_.recommended is not None}
    words = [recommended_words(one) for one in result.choices if (one.model, one.recommended) in ringed]
    if not words:
        drawn = {map_.model for map_ in maps} if is_metric else ()
        named = [(one.model, nearest_words(one)) for one in result.choices if one.model in drawn]
        nearest = "; ".join(f"{model_name(model)}: {text}" for model, text in named if text)
        return [Note(NoteKind.RECOMMENDED, f"None is proven within the margin: {nearest}")] if nearest else []
    return [Note(NoteKind.RECOMMENDED, f"Recommended: {'; '.join(words)}")]


def _draw_panels(result: Evidence, panels: Sequence[Panel], out: Path, show: MapOptions, title: str = "") -> list[Path]:
    maps = with_recommended([panel.map for panel in panels], result.choices)
    panels = [replace(panel, map=map_) for panel, map_ in zip(panels, maps, strict=True)]
    notes = recommended_notes(result, maps, is_metric=False)
    figure = plot(panels, shared=show.shared, one_bar=show.mean, title=title, notes=notes, options=show.figure)
    return save(figure, out, data=panels_csv(panels))


def _comparisons_of(result: Evidence, policies: Set[str]) -> list[Comparison]:
    """Return the comparisons of two policies in each model; none where there are other than two."""
    if len(policies) != 2:
        return []
    return [one for one in result.comparisons if {one.first, one.second} == policies]


def _comparison_notes(comparisons: Sequence[Comparison]) -> list[Note]:
    """Return a note on the difference of two policies in each model, with its interval."""
    texts = []
    for one in comparisons:
        lead = one.difference
        limits = f"({signed(100 * lead.low)} to {signed(100 * lead.high)})"
        texts.append(f"{model_name(one.model)} {signed(100 * lead.value)} points {limits}")
    if not texts:
        return []
    return [Note(NoteKind.INTERVAL, f"Difference {comparisons[0].first} − {comparisons[0].second}: {', '.join(texts)}")]


# -- means -------------------------------------------------------------------------------------------------------------


def means_of(result: Evidence) -> list[MapResult]:
    """Return the means of a result: those that its sources gave, and those of their maps."""
    return [one for one in result.grids if one.map.is_mean]


# -- rows --------------------------------------------------------------------------------------------------------------


def _draw_rows(result: Evidence, out: Path, cost: str | None, policy: str | None, show: MapOptions) -> list[Path]:
    """Draw the settings of runs without maps: against those of one policy, else what they save and lose."""
    if show.against:
        return _draw_against(result, out, cost, policy, show)
    if cost:
        raise KvatlasError(
            f"--metric {cost} is for maps, and this run has fewer than two axes; `kvatlas export --format cells` has "
            "the costs of its settings."
        )
    _check_heatmap_options(show, "the settings of a run with fewer than two axes")
    # Missing traces and unknown policies are refused here.
    _ = result.tables
    return _draw_answer(result, out, show)


def _draw_against(result: Evidence, out: Path, cost: str | None, policy: str | None, show: MapOptions) -> list[Path]:
    """Draw the settings of runs without maps against those of one policy, with `policy` the settings of that alone."""
    assert show.against is not None
    if cost:
        raise KvatlasError(f"--against {show.against} draws differences of a metric; leave out the cost {cost}.")
    _check_heatmap_options(show, f"the settings of a run against {show.against}")
    runs = result.opened_runs
    for run in runs:
        check_complete(list(filter(run.fits, run.cells)), run.partial, "figure")
    tables = list(chain.from_iterable(against_policy(run, show.against) for run in runs))
    if policy:
        tables = rows_of_policy(tables, policy)
    notes = list(chain.from_iterable(run_notes(run, run.cells) for run in runs))
    return save(against_figure(tables, notes=notes, options=show.figure), out, data=against_csv(tables))


# -- differences -------------------------------------------------------------------------------------------------------


def _panels_against(result: Evidence, against: str, mean: bool) -> list[Panel]:
    """Return the maps of a result minus a baseline, a policy, a model, or the maps of another source."""
    is_source = Path(against).exists() or against.startswith(PUBLISHED)
    other = result.options.open_source(against) if is_source else None
    compared = maps_against(every_map(result.sources), result.opened_runs, against, other)
    compared = replace(compared, maps=of_policy(compared.maps, result.shown_policy))

    tested = {one.map.name: one.map for one in (*result.maps, *result.means)}
    if mean:
        others = [replace(compared.others[map_.name], **map_.name._asdict()) for map_ in compared.maps]
        means = {of_others.name: of_others for of_others in mean_maps(others)}
        compared = replace(compared, maps=mean_maps(compared.maps), others=means)
    # Maps with the outcomes of their tests.
    maps = [tested.get(map_.name, map_) for map_ in compared.maps]
    return difference_panels(replace(compared, maps=maps))


def maps_against(maps: Sequence[Map], runs: Sequence[RunData], against: str, other: Source | None) -> ComparedMaps:
    """Return maps against a baseline, a policy, a model, or the maps of the `other` source.

    Raises KvatlasError where nothing has that name, and where no map can be compared with it.
    """
    if other is not None:
        # The maps of the same name in another source.
        other_runs = [other] if isinstance(other, RunData) else []
        name = Path(against).name
        return _compared_maps(maps, name, bare_maps(other), lambda map_name: map_name, runs, other_runs)

    if any(against in map_.baselines for map_ in maps):
        # Each map with its baseline in all cells.
        others = {}
        for map_ in maps:
            if against not in map_.baselines:
                names = ", ".join(map_.baselines) or "none"
                raise KvatlasError(
                    f"The map of {map_.model} on {map_.benchmark} has no baseline {against!r}; its baselines are: "
                    f"{names}."
                )
            others[map_.name] = replace(map_, cells=dict.fromkeys(map_.cells, map_.baselines[against]))
        paired: dict[MapName, Mapping[CellCoord, Difference]] = {}
        for run in runs:
            paired |= differences_of_run(run, against)
        return ComparedMaps(maps, against, others, paired)

    if any(against == map_.policy for map_ in maps):
        compared = [map_ for map_ in maps if map_.policy != against]
        return _compared_maps(compared, against, maps, lambda name: name._replace(policy=against), runs, runs)

    models = dict.fromkeys(map_.model for map_ in maps)
    model = next((name for name in models if against in (name, model_name(name))), None)
    if model is not None:
        compared = [map_ for map_ in maps if map_.model != model]
        return _compared_maps(compared, model_name(model), maps, lambda name: name._replace(model=model), runs, runs)

    valid = dict.fromkeys(chain.from_iterable(map_.baselines for map_ in maps))
    valid |= dict.fromkeys(map_.policy for map_ in maps)
    valid |= dict.fromkeys(map_.model for map_ in maps)
    raise KvatlasError(
        f"There is no baseline, policy or model {against!r} to compare with, and no such run or CSV map; there are: "
        f"{', '.join(filter(None, valid))}."
    )


def _compared_maps(
    maps: Sequence[Map],
    name: str,
    others: Sequence[Map],
    partner_of: Callable[[MapName], MapName],
    runs: Sequence[RunData],
    other_runs: Sequence[RunData],
) -> ComparedMaps:
    """Return maps with their partners of the same axes among the others, which are shown under one name.

    Raises KvatlasError if no map has a partner.
    """
    by_name = {(map_.name, map_.axis_names): map_ for map_ in others}
    found = {map_.name: by_name.get((partner_of(map_.name), map_.axis_names)) for map_ in maps}
    partners = {map_name: partner for map_name, partner in found.items() if partner is not None}
    if not partners:
        raise KvatlasError(f"No map has the model, benchmark, policy and axes of a map of {name} to be compared with.")

    contrasts: dict[MapName, Mapping[CellCoord, Difference]] = {}
    for run in runs:
        for other_run in other_runs:
            contrasts |= differences_of_runs(run, other_run, partner_of)
    return ComparedMaps([map_ for map_ in maps if map_.name in partners], name, partners, contrasts)
