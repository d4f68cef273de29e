"""Comparisons in pairs: policies, models, cells of maps with others, and settings with those of one policy.

Every comparison is of pairs of cells, on the problems and samples that both have (`paired_values`).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product

import numpy as np

from kvatlas.core import AGAIN, CellCoord, Claim, KvatlasError, MapName, Setting, differing, grouped, with_means
from kvatlas.stats.numerics.arrays import (
    LEVEL,
    Difference,
    Flags,
    Floats,
    Ints,
    cluster_numbers,
    holm,
    mean_of_known,
    normal_quantile,
    strata_of_clusters,
    strata_of_sizes,
)
from kvatlas.stats.numerics.units import Units, joined_units, units_of_traces
from kvatlas.stats.run_data import RunData, short_names, shown_policies
from kvatlas.stats.table import CellTraces, ProblemKey, check_same_problems, select, units_of_problems, with_samples

#: A cell and the one that it is compared with.
CellPair = tuple[CellTraces, CellTraces]


@dataclass(frozen=True)
class PairedValues:
    """First minus second of pairs of cells, [pairs, problems, samples], NaN where a pair lacks one of the two traces.

    `promised` tells the pairs of traces that the run was to have. `problems` are those of any of the cells, and
    `strata` number their benchmarks, `clusters` what they share, None where each problem stands for itself.
    """

    traces: Floats
    promised: Flags
    problems: tuple[ProblemKey, ...]
    strata: Ints
    clusters: Ints | None = None

    @cached_property
    def values(self) -> Floats:
        """The means over the samples of a problem, [pairs, problems]; NaN where a problem has no pair."""
        return mean_of_known(self.traces)

    @cached_property
    def unit_strata(self) -> Ints:
        """The benchmarks of the units of problems like these: problems, or their clusters."""
        return strata_of_clusters(self.strata, self.clusters)

    @cached_property
    def missing(self) -> Ints:
        """The number of promised pairs of traces that are missing, of each pair of cells."""
        return np.asarray((self.promised & np.isnan(self.traces)).sum((1, 2)))

    @cached_property
    def pairs(self) -> Ints:
        """The number of promised pairs of traces of each pair of cells."""
        return np.asarray(self.promised.sum((1, 2)))

    def units(self, claim: Claim) -> Units:
        """Return the differences by the units of a claim, missing ones at worst."""
        by_trace = claim is Claim.THESE
        return units_of_traces(self.traces, self.promised, self.strata, by_trace=by_trace, clusters=self.clusters)

    def averaged(self, claim: Claim) -> Units:
        """Return the averages over all pairs of cells by the units of a claim, as a single row."""
        of_pairs = self.units(claim)
        pooled = np.moveaxis(self.traces, 0, 1).reshape(1, len(self.problems), -1)
        by_trace = claim is Claim.THESE
        together = units_of_traces(pooled, ~np.isnan(pooled), self.strata, by_trace=by_trace, clusters=self.clusters)
        lowest = mean_of_known(of_pairs.lowest.T)[None]
        highest = mean_of_known(of_pairs.highest.T)[None]
        return replace(of_pairs, means=together.means, lowest=lowest, highest=highest)


def paired_values(benchmarks: Sequence[Sequence[CellPair | None]], first: int | None = None) -> PairedValues:
    """Compare pairs of cells on the problems and samples of both; more samples of one are averaged (`folded_samples`).

    Only the `first` samples of each problem are compared, all of them for None. Each benchmark has the same pairs in
    the same order, None where it lacks one. Raises KvatlasError for cells of unlike problems.
    """
    traces = []
    promised = []
    keys: list[ProblemKey] = []
    units: list[Hashable] = []
    sizes = []
    for pairs in benchmarks:
        # A full cache is in every pair, so its values are put in order once.
        cells = {id(cell): cell for cell in chain.from_iterable(filter(None, pairs))}
        check_same_problems(cells.values())
        problems = list(dict.fromkeys(chain.from_iterable(cell.place for cell in cells.values())))
        one = next(iter(cells.values()))
        keys += [(one.benchmark, problem) for problem in problems]
        units += units_of_problems(one.table.manifest.clusters, one.benchmark, problems)
        sizes.append(len(problems))
        values = {name: cell.in_order(cell.values(), problems) for name, cell in cells.items()}

        samples = max(table.shape[1] for table in values.values())
        differences = np.full((len(pairs), len(problems), samples), math.nan)
        is_promised = np.zeros(differences.shape, bool)
        for row, pair in enumerate(pairs):
            if pair is not None:
                minuend, subtrahend = (values[id(cell)] for cell in pair)
                shared = min(minuend.shape[1], subtrahend.shape[1])
                differences[row, :, :shared] = folded_samples(minuend, shared) - folded_samples(subtrahend, shared)
                in_both = pair[0].place.keys() & pair[1].place.keys()
                is_promised[row, :, :shared] = np.array([problem in in_both for problem in problems])[:, None]
        traces.append(differences)
        promised.append(is_promised)

    samples = max(of_benchmark.shape[2] for of_benchmark in traces)
    return PairedValues(
        np.concatenate([with_samples(of_benchmark, samples, math.nan) for of_benchmark in traces], axis=1)[..., :first],
        np.concatenate([with_samples(of_benchmark, samples, False) for of_benchmark in promised], axis=1)[..., :first],
        tuple(keys),
        strata_of_sizes(sizes),
        cluster_numbers(units),
    )


def folded_samples(values: Floats, samples: int) -> Floats:
    """Return the values [..., samples] in so many groups, each sample with the later ones that are theirs alone.

    Where one cell has more samples than the other a trace of the other is paired with the mean of a group, that of
    sample 1 of 2 with the mean of 1, 3 and 5. No trace is in two groups, so pairs stay independent units in [-1, 1],
    and their mean is the same loss, with less noise from the cell that has more. A group that lacks a trace is missing.
    """
    groups = -(-values.shape[-1] // samples)
    lacking = groups * samples - values.shape[-1]
    shape = (*values.shape[:-1], groups, samples)
    padded = np.concatenate([values, np.zeros((*values.shape[:-1], lacking))], axis=-1).reshape(shape)
    counts = np.full(samples, groups)
    counts[samples - lacking :] -= 1
    return np.asarray(padded.sum(-2) / counts, float)


# -- policies, models and settings -------------------------------------------------------------------------------------

#: A model under the settings of a policy.
ModelPolicy = tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """A paired comparison with its names: `difference` is first minus second, over `cells` pairs of settings."""

    model: str
    benchmark: str
    metric: str
    first: str
    second: str
    cells: int
    difference: Difference
    note: str = ""


def comparisons(run: RunData) -> list[Comparison]:
    """Return all paired comparisons that the cells of a run support, on the problems and samples of both sides.

    For each model and each pair of grid policies: all pairs of cells that agree on the axes and in the parameters that
    all policies share, averaged over cells for each unit of the claim, benchmarks of equal weight. The same for each
    policy and each pair of models. In a run without maps every setting is compared with every other one. Raises
    KvatlasError as `maps_of_run` does for axes and metric.
    """
    measured = _measured(run)
    if run.has_maps:
        sides = _cells_by_policy(measured)
    else:
        names = short_names(cell.setting for cell in measured.cells)
        sides = grouped(filter(measured.fits, measured.cells), lambda cell: (cell.model, names[cell.setting.id]))

    found = []
    for first, second in combinations(sides, 2):
        same_model = first[0] == second[0]
        same_name = first[1] == second[1]
        if same_model == same_name:
            continue
        # Cells of one benchmark, in a run with maps those that agree.
        pairs = [pair for pair in product(sides[first], sides[second]) if _agree(*pair, run)]
        difference = difference_of_cells(run, pairs)
        if difference is None:
            continue

        benchmarks = list(dict.fromkeys(cell.benchmark for cell, _ in pairs))
        on = benchmarks[0] if len(benchmarks) == 1 else f"{len(benchmarks)} benchmarks"
        if same_model:
            comparison = Comparison(first[0], on, run.metric, first[1], second[1], len(pairs), difference)
        else:
            models = f"{first[0]}, {second[0]}"
            comparison = Comparison(models, on, run.metric, first[0], second[0], len(pairs), difference, first[1])
        found.append(comparison)
    return found


def _cells_by_policy(run: RunData) -> dict[ModelPolicy, list[CellTraces]]:
    """Return the grid cells over benchmarks: whole maps, and policies with one of the two axes."""
    by_policy: dict[ModelPolicy, list[CellTraces]] = {}
    shown = shown_policies(cell.setting.policy for cell in run.cells)
    for name, group in run.groups.items():
        by_policy.setdefault((name.model, name.policy), []).extend(group)

    mapped = set(map(id, chain.from_iterable(by_policy.values())))
    for cell in run.cells:
        is_alone = not cell.baseline and id(cell) not in mapped
        if is_alone and run.fits(cell) and set(run.axes) & set(cell.all_values):
            by_policy.setdefault((cell.model, shown[cell.setting.policy]), []).append(cell)
    return by_policy


def _agree(cell: CellTraces, other: CellTraces, run: RunData) -> bool:
    """Return whether two cells of a benchmark have equal values on the axes, and of shared parameters that both name.

    A parameter of a method itself, such as the number of queries that it observes, belongs to the policy compared. In a
    run without maps all cells of a benchmark agree.
    """
    if cell.benchmark != other.benchmark or not run.has_maps:
        return cell.benchmark == other.benchmark
    named = set(cell.facts.shared).intersection(other.facts.shared)
    on_axes = cell.all_values.keys() & other.all_values.keys() & dict(run.manifest.axes).keys()
    return all(cell.all_values[name] == other.all_values[name] for name in named | on_axes)


def difference_of_cells(run: RunData, pairs: Sequence[CellPair]) -> Difference | None:
    """Return first minus second over pairs of cells, by the claim of the run; None where they share no trace.

    The difference is the mean over benchmarks of the mean over problems, on pairs of samples that both have; missing
    traces count at worst. Benchmarks weigh equally, and so do the problems of one. Several pairs of a benchmark are
    averaged first, for each problem and sample: they share random numbers, so they are no units.
    """
    of_benchmarks = []
    for of_benchmark in grouped(pairs, lambda pair: pair[0].benchmark).values():
        paired = paired_values([of_benchmark], run.look.samples)
        if not np.isnan(paired.traces).all():
            of_benchmarks.append(paired)
    if not of_benchmarks:
        return None

    # A single row of units, of which every benchmark has some.
    claims: dict[str, Difference] = {}
    for claim in [Claim.LIKE] if run.refused else Claim:
        units = joined_units([paired.averaged(claim) for paired in of_benchmarks])
        (contrast,) = units.contrasts(stretch=run.look.widening)
        assert contrast is not None
        claims[claim] = contrast
    problems = sum(int((~np.isnan(paired.traces)).any((0, 2)).sum()) for paired in of_benchmarks)
    count = sum(int(np.count_nonzero(~np.isnan(paired.traces))) for paired in of_benchmarks)
    return replace(claims[run.claim], problems=problems, pairs=count, claims=claims)


def adjusted(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons with p-values adjusted over all of them (Holm)."""
    adjusted_p = holm([comparison.difference.p for comparison in comparisons])
    pairs = zip(comparisons, adjusted_p, strict=True)
    return tuple(replace(one, difference=replace(one.difference, p_holm=p)) for one, p in pairs)


#: Cell minus what it is compared with, in [-1, 1], by map and place on its axes.
Differences = Mapping[MapName, Mapping[CellCoord, Difference]]


def differences_of_run(run: RunData, baseline: str) -> Differences:
    """Return cell minus `baseline` (its short name, such as `full`), on the problems and samples of both.

    Means over benchmarks are there too. None of maps that share no sample with the baseline.
    Raises KvatlasError as `maps_of_run` does for axes and metric.
    """
    baselines = [cell for cell in select(run.cells, baseline=True) if cell.measured]
    names = short_names(cell.setting for cell in baselines)
    found = {(cell.model, cell.benchmark): cell for cell in baselines if names[cell.setting.id] == baseline}
    return _differences_of_cells(run, lambda name, _: found.get((name.model, name.benchmark)))


def differences_of_runs(run: RunData, other: RunData, partner: Callable[[MapName], MapName]) -> Differences:
    """Return cell minus the same cell of a map of another run, the `partner` of the cell's map.

    Else as `differences_of_run`. Empty if the two runs have unlike axes.
    """
    if other.axes != run.axes:
        return {}
    cells: dict[tuple[MapName, CellCoord], CellTraces] = {}
    for name, group in _measured(other).groups.items():
        cells |= {(name, cell.coord(run.axes)): cell for cell in group}

    def same_cell(name: MapName, coord: CellCoord) -> CellTraces | None:
        if other is run and partner(name) == name:
            return None
        return cells.get((partner(name), coord))

    return _differences_of_cells(run, same_cell)


def _differences_of_cells(run: RunData, partner: Callable[[MapName, CellCoord], CellTraces | None]) -> Differences:
    """Return each cell minus its `partner`, which is found by its map and place."""
    sides: dict[MapName, dict[CellCoord, CellPair]] = {}
    for name, group in _measured(run).groups.items():
        of_map: dict[CellCoord, CellPair] = {}
        for cell in group:
            coord = cell.coord(run.axes)
            other = partner(name, coord)
            if other is not None:
                of_map[coord] = (cell, other)
        if of_map:
            sides[name] = of_map

    # Of a mean over benchmarks the places that all of them have.
    differences: dict[MapName, dict[CellCoord, Difference]] = {}
    for name, benchmarks in with_means(sides).items():
        shared = set(benchmarks[0]).intersection(*benchmarks[1:])
        coords = [coord for coord in benchmarks[0] if coord in shared]
        differences[name] = {}
        if not coords:
            continue
        sides_of_coords = [list(map(of_map.__getitem__, coords)) for of_map in benchmarks]
        paired = paired_values(sides_of_coords, run.look.samples)
        found = paired.units(run.claim).contrasts(stretch=run.look.widening)
        contrasts = {coord: contrast for coord, contrast in zip(coords, found, strict=True) if contrast is not None}
        adjusted_p = holm([contrast.p for contrast in contrasts.values()])
        for (coord, contrast), p in zip(contrasts.items(), adjusted_p, strict=True):
            differences[name][coord] = replace(contrast, p_holm=p)
    return differences


def _measured(run: RunData) -> RunData:
    """Return the run without cells that have no trace, and without the reference asked again, which is no setting."""
    return run.with_cells([cell for cell in run.cells if cell.measured and cell.setting != AGAIN])


# -- settings and those of one policy ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgainstPolicy:
    """A setting minus that of the policy with the same values, in [-1, 1].

    `name` is the policy, with the values that the other setting lacks; `group` has the values that both share and in
    which the settings of the run differ. The limits of all settings of a model hold at the same time in 95 % of runs
    (Bonferroni), so that one whose limits exclude 0 is proven without further adjustment.
    """

    setting: Setting
    partner: Setting
    name: str
    group: tuple[tuple[str, object], ...]
    contrast: Difference


@dataclass(frozen=True)
class AgainstTable:
    """The settings of a model against a policy, in the order of the run.

    `problems` counts those that any of them has; a difference is of the problems of its own pair.
    """

    model: str
    benchmarks: tuple[str, ...]
    policy: str
    metric: str
    problems: int
    rows: tuple[AgainstPolicy, ...]

    @property
    def detectable(self) -> float:
        """The difference in [0, 1] that half of the settings would have shown: their median distance to the near limit.

        A difference is shown where its near limit excludes 0.
        """
        contrasts = [row.contrast for row in self.rows]
        distances = [one.value - one.low if one.value > 0 else one.high - one.value for one in contrasts]
        return sorted(distances)[len(distances) // 2]


def against_policy(run: RunData, policy: str) -> list[AgainstTable]:
    """Return, for each model, every setting minus the setting of `policy` that has the same values.

    The partner's parameters are among those of the setting, with equal values; of several the one with the most. A
    setting without one is left out, as one that lacks a benchmark is. Raises KvatlasError if no setting has a partner,
    and if `policy` names classes of several files.
    """
    named = list(dict.fromkeys(cell.setting.policy for cell in run.cells if cell.setting.is_of(policy)))
    if len(named) > 1 and policy not in named:
        raise KvatlasError(f"Several policies are named {policy!r}; expected one of: {', '.join(named)}.")

    measured = [cell for cell in run.cells if run.fits(cell) and cell.measured]
    by_model = grouped(measured, lambda cell: cell.model)
    tables = [_against_table(run, model, policy, cells) for model, cells in by_model.items()]
    found = [table for table in tables if table is not None]
    if not found:
        policies = ", ".join(shown_policies(cell.setting.policy for cell in measured).values())
        raise KvatlasError(
            f"No setting has one of the policy {policy!r} with the same values to be compared with; there are: "
            f"{policies}."
        )
    return found


def rows_of_policy(tables: Sequence[AgainstTable], policy: str) -> list[AgainstTable]:
    """Return the tables with the settings of one policy alone, their limits as they are.

    Raises KvatlasError if no setting is of that policy.
    """
    kept = []
    for table in tables:
        rows_of_table = tuple(row for row in table.rows if row.setting.is_of(policy))
        if rows_of_table:
            kept.append(replace(table, rows=rows_of_table))
    if not kept:
        rows = chain.from_iterable(table.rows for table in tables)
        policies = ", ".join(shown_policies(row.setting.policy for row in rows).values())
        raise KvatlasError(f"No setting of the policy {policy!r} is compared; there are: {policies}.")
    return kept


def _against_table(run: RunData, model: str, policy: str, cells: Sequence[CellTraces]) -> AgainstTable | None:
    """Return the settings of a model that stand on all its benchmarks minus their partners; None without any."""
    by_setting = grouped(cells, lambda cell: cell.setting)
    benchmarks = tuple(dict.fromkeys(cell.benchmark for cell in cells))
    whole = {setting: of_setting for setting, of_setting in by_setting.items() if len(of_setting) == len(benchmarks)}
    partners = {setting: partner_of(setting, policy, list(whole)) for setting in whole}
    paired = {setting: partner for setting, partner in partners.items() if partner is not None}
    if not paired:
        return None

    # The cells of each benchmark with those of their partners.
    sides: list[list[CellPair]] = []
    for benchmark in benchmarks:
        of_benchmark = {cell.setting: cell for cell in cells if cell.benchmark == benchmark}
        sides.append([(of_benchmark[setting], of_benchmark[partner]) for setting, partner in paired.items()])
    values = paired_values(sides, run.look.samples)
    z = normal_quantile(LEVEL / 2 / len(paired))
    contrasts = values.units(run.claim).contrasts(z, run.look.widening)

    # Rows with the same values of those parameters in which partners differ stand together.
    varied = differing(partner.values for partner in paired.values())
    names = row_names(paired)
    rows = []
    for (setting, partner), contrast in zip(paired.items(), contrasts, strict=True):
        if contrast is not None:
            group = tuple((name, value) for name, value in partner.parameters if name in varied)
            rows.append(AgainstPolicy(setting, partner, names[setting], group, contrast))
    return AgainstTable(model, benchmarks, policy, run.metric, len(values.problems), tuple(rows))


def partner_of(setting: Setting, policy: str, settings: Sequence[Setting]) -> Setting | None:
    """Return the setting of a policy whose values are all those of the `setting`, the closest one; None without one."""
    of_policy = [other for other in settings if other != setting and other.is_of(policy)]
    candidates = [other for other in of_policy if other.values.items() <= setting.values.items()]
    return max(candidates, key=lambda other: len(other.parameters), default=None)


def row_names(paired: Mapping[Setting, Setting]) -> dict[Setting, str]:
    """Return the settings by their policy, with those of its parameters in which its settings differ and no partner."""
    shared = set(chain.from_iterable(partner.values for partner in paired.values()))
    alone = {}
    for setting in chain.from_iterable(paired.items()):
        own_values = {name: value for name, value in setting.parameters if name not in shared}
        alone[setting] = Setting.from_parameters(setting.policy, **own_values)
    # Beside its partner a setting of the same policy is named by its values.
    names = short_names([*(alone[setting] for setting in paired), *(alone[partner] for partner in paired.values())])
    return {setting: names[alone[setting].id] for setting in paired}
