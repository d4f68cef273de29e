"""The decisions of an adaptive sweep as tests of maps and choices (the method: `kvatlas.stats.numerics.sequential`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import numpy as np

from kvatlas.core import Claim, Map, MapName, Note, NoteKind, grouped, is_reference
from kvatlas.results.manifest import Manifest
from kvatlas.stats.choice import Choice, choice_of
from kvatlas.stats.losses import LossFamily, SettingLoss
from kvatlas.stats.map_tests import Basis, MapTests
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.numerics.against_reference import Loss
from kvatlas.stats.numerics.arrays import Floats
from kvatlas.stats.numerics.sequential import Decision, TracesSoFar, block_slice, decisions, in_order
from kvatlas.stats.table import CellTraces, select


class AdaptiveDecisions:
    """The last decision on the grid settings of each model of an adaptive run."""

    def __init__(self, manifest: Manifest, cells: Sequence[CellTraces], margin: float) -> None:
        self.cells = cells
        self.margin = margin
        #: By model the ids of the grid settings, and the decision on them.
        self.by_model: dict[str, tuple[Sequence[str], Decision]] = {}

        sizes = manifest.allocation["problems"]
        blocks = manifest.allocation["blocks"]
        orders: dict[str, Sequence[str]] = {}
        for cell in cells:
            # The cells of a benchmark have the first problems of one order; the longest one has them all.
            orders[cell.benchmark] = max(orders.get(cell.benchmark, ()), cell.expected.problems, key=len)
        for model, model_cells in grouped(cells, lambda cell: cell.model).items():
            settings, traces = observed_differences(model_cells, orders, sizes, blocks)
            *_, last_decision = decisions(traces, margin)
            self.by_model[model] = settings, last_decision

    def tests(self, maps: Sequence[Map]) -> dict[MapName, MapTests]:
        """Return the tests of each mean map, or only map: losses against the full cache and nothing else."""
        # One map for each model and policy: a mean map, which comes last, takes the place of those of its benchmarks.
        by_policy: dict[tuple[str, str], Map] = {}
        for map_ in (*maps, *mean_maps(maps)):
            if map_.model in self.by_model:
                by_policy[map_.model, map_.policy] = map_

        by_map: dict[MapName, MapTests] = {}
        for map_ in by_policy.values():
            settings, decision = self.by_model[map_.model]
            coords = {cell.setting.id: coord for coord, cell in map_.cells.items()}
            values = [cell.estimate.value for cell in map_.cells.values()]
            text = (
                f"adaptive: of {len(settings)} settings of all policies, {int(decision.kept.sum())} are proven to lose "
                f"at most the margin and {int(decision.broken.sum())} to lose more"
            )
            losses = losses_of_decision(decision, settings)
            by_map[map_.name] = MapTests(
                Basis.GROUP_SEQUENTIAL,
                spread=float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
                notes=(Note(NoteKind.ADAPTIVE, text),),
                losses={coords[setting]: loss for setting, loss in losses.items() if setting in coords},
            )
        return by_map

    def choices(self) -> list[Choice]:
        """Return the choice for each model; the costs of the first block decide which setting keeps least."""
        choices = []
        for model, (settings, decision) in self.by_model.items():
            recommended = [] if decision.recommended is None else [settings[decision.recommended]]
            grid = select(self.cells, model=model, baseline=False)
            family = LossFamily(self.margin, losses_of_decision(decision, settings))
            choices.append(choice_of(model, grid, family, among=recommended))
        return choices


def observed_differences(
    cells: Sequence[CellTraces], orders: Mapping[str, Sequence[str]], sizes: Mapping[str, int], blocks: int
) -> tuple[tuple[str, ...], TracesSoFar]:
    """Return the ids of one model's grid settings, and their differences to the full cache so far.

    A problem counts if setting and full cache have all of its samples. `orders` are the problems of each benchmark as
    they come, as far as cells are promised; `sizes` the numbers of all of them.
    """
    problems = {}
    for benchmark, order in orders.items():
        # Problems that no cell is promised yet have no name, and so no grades.
        problems[benchmark] = [*order, *repeat("", sizes[benchmark] - len(order))]

    cells_by_setting = grouped(select(cells, baseline=False), lambda cell: cell.setting.id)
    full_means = _problem_means([cell for cell in cells if is_reference(cell.setting)], problems)
    # With a shape of its own where no setting has a cell.
    means = np.empty((len(cells_by_setting), len(full_means)))
    for row, setting_cells in enumerate(cells_by_setting.values()):
        means[row] = _problem_means(setting_cells, problems)

    # Costs are those of the first block, so that a later look does not change an earlier decision.
    first_block = {name: names[block_slice(len(names), blocks, 0)] for name, names in problems.items()}
    costs = np.array([_mean_kv_tokens(setting_cells, first_block) for setting_cells in cells_by_setting.values()])

    # The means lie benchmark by benchmark; a sweep takes their problems in blocks.
    ends = np.cumsum([sizes[benchmark] for benchmark in orders])
    benchmark_columns = np.split(np.arange(len(full_means)), ends[:-1])
    traces, _ = in_order(means - full_means, benchmark_columns, costs, blocks)
    return tuple(cells_by_setting), traces


def _problem_means(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> Floats:
    """Return the mean grade of every problem, benchmark after benchmark; NaN unless all of its samples are known."""
    means = {benchmark: np.full(len(names), math.nan) for benchmark, names in problems.items()}
    for cell in cells:
        means[cell.benchmark] = cell.in_order(cell.grades.mean(1), problems[cell.benchmark])
    return np.concatenate(list(means.values()))


def _mean_kv_tokens(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> float:
    """Return the mean KV tokens of a setting on some problems; infinite if it has none of them."""
    kept: list[float] = []
    for cell in cells:
        tokens = cell.in_order(cell.traces["mean_kv_tokens"], problems[cell.benchmark])
        kept += tokens[~np.isnan(tokens)].tolist()
    return math.fsum(kept) / len(kept) if kept else math.inf


def losses_of_decision(decision: Decision, settings: Sequence[str]) -> dict[str, SettingLoss]:
    """Return the losses by setting id, with limits that hold at any look; `settings` are the ids of the rows.

    A setting that no look has seen yet has none.
    """
    losses = {}
    for row, setting in enumerate(settings):
        if not math.isnan(decision.value[row]):
            loss = Loss(
                float(decision.value[row]),
                float(decision.low[row]),
                float(decision.high[row]),
                limit=float(decision.high[row]),
                joint_limit=float(decision.high[row]),
                is_kept=bool(decision.kept[row]),
                is_broken=bool(decision.broken[row]),
            )
            losses[setting] = SettingLoss(**vars(loss), claims={Claim.LIKE: loss})
    return losses
