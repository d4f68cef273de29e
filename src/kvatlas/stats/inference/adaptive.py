"""The state of an adaptive sweep, replayed from its traces: which settings are left, and what that says of its maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.core import CellCoord, Map, MapName, Note, NoteKind, mean_of
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.anytime import mean_interval
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.maps import mean_cell, mean_map
from kvatlas.stats.estimates.pass_at_1 import LEVEL, Ints
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.estimates.validity import validity
from kvatlas.stats.inference.choice import Choice, cheapest, kv_tokens_of, unless_vacuous
from kvatlas.stats.inference.map_tests import Basis, Verdict
from kvatlas.stats.inference.resampling import Need, Test, TestMethod
from kvatlas.stats.inference.sequential import EARLY, Block, Race, race

NO_PAIRS = Note(
    NoteKind.LEFT_OUT,
    "0 paired comparisons: in an adaptive sweep the problems that two settings share depend on their outcomes",
)


@dataclass(frozen=True)
class Standing:
    """One model's sweep so far: its grid settings by id, the race between them, and the blocks that are complete."""

    settings: tuple[str, ...]
    race: Race
    complete: int
    values: Mapping[str, tuple[np.ndarray, Ints]]

    @property
    def active(self) -> frozenset[str]:
        """The ids of the settings that are not dropped."""
        return frozenset(setting for setting, active in zip(self.settings, self.race.active, strict=True) if active)

    def widest(self) -> float:
        """The width of the widest always-valid interval of the active settings, on the mean over benchmarks."""
        spans = [mean_interval(*self.values[one]) for one in self.active if one in self.values]
        return max((high - low for low, high in spans), default=1.0)


def cut(problems: int, blocks: int, number: int) -> slice:
    """The places of the problems of one benchmark that come in block `number`, from 0."""
    return slice(problems * number // blocks, problems * (number + 1) // blocks)


def standing(
    cells: Sequence[CellTraces], orders: Mapping[str, Sequence[str]], sizes: Mapping[str, int], blocks: int
) -> Standing:
    """Replay one model's grid cells. `orders` are the problems of each benchmark as they come, `sizes` how many in all.

    A block counts when every setting that was active before it has all its samples of all its problems.
    """
    by_setting: dict[str, dict[str, CellTraces]] = {}
    for cell in cells:
        if not cell.expected.baseline:
            by_setting.setdefault(cell.expected.setting.id, {})[cell.expected.benchmark] = cell
    settings = tuple(by_setting)
    total = sum(sizes.values())
    complete: list[Block] = []
    state = race([], len(settings))
    for number in range(blocks):
        places = [
            (stratum, benchmark, problem)
            for stratum, benchmark in enumerate(orders)
            for problem in orders[benchmark][cut(sizes[benchmark], blocks, number)]
        ]
        means = np.array(
            [[_mean(by_setting[one].get(benchmark), problem) for one in settings] for _, benchmark, problem in places]
        )
        promised = sum(len(range(sizes[name])[cut(sizes[name], blocks, number)]) for name in orders)
        if len(places) < promised or bool(np.isnan(means[:, state.active]).any()):
            break
        complete.append(Block(np.where(state.active, means, math.nan), np.array([stratum for stratum, _, _ in places])))
        state = race(complete, len(settings), total - sum(len(block.strata) for block in complete))
    return Standing(settings, state, len(complete), _values(settings, state, complete))


def _mean(cell: CellTraces | None, problem: str) -> float:
    samples = cell.outcomes.get(problem, {}) if cell is not None else {}
    full = cell is not None and len(samples) == cell.expected.samples
    return math.fsum(samples.values()) / len(samples) if full else math.nan


def _values(settings: Sequence[str], state: Race, blocks: Sequence[Block]) -> dict[str, tuple[np.ndarray, Ints]]:
    values = {}
    for index, one in enumerate(settings):
        took = blocks[: state.blocks[index]]
        if took:
            grades = np.concatenate([block.means[:, index] for block in took])
            values[one] = grades, np.concatenate([block.strata for block in took])
    return values


def standings(manifest: Manifest, cells: Sequence[CellTraces]) -> dict[str, Standing]:
    """The standing of each model of an adaptive run, from its manifest and gathered cells."""
    allocation = manifest.allocation
    orders: dict[str, tuple[str, ...]] = {}
    for cell in cells:
        expected = cell.expected
        orders[expected.benchmark] = max(orders.get(expected.benchmark, ()), expected.problems, key=len)
    models = dict.fromkeys(cell.expected.model for cell in cells)
    return {
        model: standing(
            [cell for cell in cells if cell.expected.model == model],
            orders,
            allocation["problems"],
            allocation["blocks"],
        )
        for model in models
    }


def adaptive_verdicts(by_model: Mapping[str, Standing], run: RunData, maps: Sequence[Map]) -> dict[MapName, Verdict]:
    """The verdict of each mean map (of the only benchmark's map where there is one) of an adaptive run.

    Its plateau holds the settings that were not dropped, over all policies together. "All settings are equal" is
    rejected with the largest e-value, times the number of settings (Bonferroni).
    """
    groups: dict[tuple[str, str], list[Map]] = {}
    for one in maps:
        groups.setdefault((one.model, one.policy), []).append(one)
    by_map: dict[MapName, Verdict] = {}
    for (model, policy), parts in groups.items():
        if model not in by_model:
            continue
        mean = mean_map(parts) if len(parts) > 1 else parts[0]
        ids = {
            cell.coord(run.axes): cell.expected.setting.id
            for name, group in run.groups.items()
            for cell in group
            if (name.model, name.policy) == (model, policy)
        }
        by_map[mean.name] = _verdict(by_model[model], mean, ids)
    return by_map


def _verdict(one: Standing, mean: Map, ids: Mapping[CellCoord, str]) -> Verdict:
    p = dict(zip(one.settings, np.minimum(1.0, np.exp(-one.race.log_e)), strict=True))
    values = np.array([cell.estimate.value for cell in mean.cells.values()])
    places = list(mean.cells)
    smallest = min(1.0, float(min(p.values())) * len(p))
    if any(p[setting] > EARLY for setting in one.settings if setting not in one.active):
        # Dropped by the final test, whose chance of an error this is.
        smallest = min(smallest, LEVEL - EARLY)
    dropped = len(one.settings) - len(one.active)
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return Verdict(
        peaks=tuple(place for place, value in zip(places, values, strict=True) if value >= values.max() - 1e-9),
        lowest=places[int(values.argmin())],
        omnibus=Test(float(np.exp(one.race.log_e.max())), smallest, TestMethod.E_VALUES),
        plateau=tuple(place for place in places if ids[place] in one.active),
        p_best={place: float(p[ids[place]]) for place in places},
        may_lose={},
        effects=(),
        peak_share=None,
        spread=spread,
        noise=None,
        need=Need(None, None),
        basis=Basis.E_VALUES,
        notes=(
            Note(
                NoteKind.ADAPTIVE,
                f"adaptive: {dropped} of {len(one.settings)} settings of all policies were shown worse than the best",
            ),
        ),
    )


def adaptive_choices(by_model: Mapping[str, Standing], cells: Sequence[CellTraces]) -> list[Choice]:
    """What to choose in an adaptive run: the cheapest of each model's settings that were not dropped."""
    chosen = []
    for model, one in by_model.items():
        own: dict[str, list[CellTraces]] = {}
        for cell in cells:
            if cell.expected.model == model and cell.expected.setting.id in one.active and cell.stored:
                own.setdefault(cell.expected.setting.id, []).append(cell)
        members = [mean_cell([cell.cell() for cell in group]) for group in own.values()]
        benchmarks = list(dict.fromkeys(cell.expected.benchmark for cell in cells))
        choice = Choice(
            model,
            benchmarks[0] if len(benchmarks) == 1 else mean_of(len(benchmarks)),
            len(one.settings),
            len(members),
            cheapest(members, [kv_tokens_of(cell) for cell in members]),
            cheapest(members, [cell.seconds_mean for cell in members]),
            {},
        )
        grid = [cell for cell in cells if cell.expected.model == model and not cell.expected.baseline]
        chosen.append(unless_vacuous(choice, validity(grid)))
    return chosen
