"""Losses of the settings of a run against its full cache."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from kvatlas.core import REFERENCE, Claim, Estimate, Setting, is_reference, reference_words, with_means
from kvatlas.stats.estimates import mean_over_benchmarks
from kvatlas.stats.numerics.against_reference import losses_of_units
from kvatlas.stats.numerics.arrays import Difference, Flags, mean_of_known, means_of_clusters, weights
from kvatlas.stats.numerics.looks import ONE_LOOK, Look
from kvatlas.stats.numerics.planning import needed_problems, needed_samples
from kvatlas.stats.orders import IN_ORDER, Orders, TestedSetting, orders_of_claims
from kvatlas.stats.pairs import CellPair, PairedValues, paired_values
from kvatlas.stats.run_data import MOST_MISSING, RunData, margin_from_points
from kvatlas.stats.table import CellTraces
from kvatlas.stats.validity import count_compressed, is_compressed

#: The pairs of a family without settings.
NO_PAIRS = PairedValues(np.zeros((0, 0, 1)), np.zeros((0, 0, 1), bool), (), np.zeros(0, int))


@dataclass(frozen=True)
class Required:
    """The effort that would prove a setting to keep the margin with a power of 0.8, if its loss is the observed one.

    `samples` of each problem prove it on these problems, so many `problems` in all, in the same mix of benchmarks, for
    problems like these; None where the loss is not below the margin, where that is not practicable, or where the run
    cannot make the claim. There are `samples_now` and `problems_now`.
    """

    setting: Setting
    loss: Difference
    problems_now: int
    samples_now: int
    problems: int | None
    samples: int | None

    def count_of(self, claim: Claim) -> int | None:
        """Return the samples, or the problems, that a claim takes."""
        return self.samples if claim is Claim.THESE else self.problems

    def effort(self, claim: Claim) -> float:
        """Return the same, infinite where it is None."""
        count = self.count_of(claim)
        return math.inf if count is None else count


@dataclass(frozen=True)
class LossFamily:
    """The losses of all grid settings of a model on the same benchmarks: the family for which 5 % holds.

    `by_setting` has those that share problems of each benchmark with the full cache, by the `claim` of the run. Traces
    that were not compressed equal the full cache's and cannot lose.
    `orders` are the chains of setting ids by claim in which they are tested (`kvatlas.stats.orders`), `sizes` the
    problems of each benchmark, or their clusters. `paired` has the differences to the full cache in the order of
    `settings`, `has_compressed` [settings, problems] tells problems with a compressed trace. `full` is what the full
    cache solves. `reference` names the full cache, or the reference of servers, whose settings are in the order of the
    spec if that says so (`is_in_order`).
    """

    margin: float
    by_setting: Mapping[str, Difference]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    orders: Mapping[Claim, Orders] = field(default_factory=dict)
    sizes: Sequence[int] = ()
    paired: PairedValues = field(default=NO_PAIRS, repr=False, compare=False)
    has_compressed: Flags = field(default_factory=lambda: np.zeros((0, 0), bool), repr=False, compare=False)
    claim: Claim = Claim.LIKE
    refused: str = ""
    full: Estimate | None = None
    look: Look = ONE_LOOK
    reference: str = "the full cache"
    is_in_order: bool = False

    @property
    def problem_count(self) -> int:
        """The problems of all benchmarks, of which those of a cluster are one unit."""
        return len(self.paired.strata)

    @property
    def unit(self) -> str:
        """The noun for what is drawn of problems like these."""
        return "cluster" if sum(self.sizes) < self.problem_count else "problem"

    @property
    def chains(self) -> Orders:
        """The chains of the claim of the run."""
        return self.orders.get(self.claim, [])

    def open_chains(self, claim: Claim) -> int:
        """Return the number of chains that share the level of a claim: those that are not proven to their end."""
        return sum(self._end_of(of_chain, claim) != "" for of_chain in self.orders.get(claim, []))

    def _end_of(self, of_chain: Sequence[str], claim: Claim) -> str:
        """Return the first setting of a chain that is not proven, or "" for a chain that is proven to its end."""
        return next((id_ for id_ in of_chain if self._ends(id_, claim)), "")

    def _ends(self, setting: str, claim: Claim) -> bool:
        """Return whether the settings behind this one in its chain are not tested."""
        loss = self.by_setting.get(setting)
        # What was hardly compressed keeps its limit and proves nothing, and those behind it are tested.
        return loss is None or not (loss.claims.get(claim, loss).is_kept or self.is_silent(loss))

    def is_silent(self, loss: Difference) -> bool:
        """Return whether too few traces of a setting were compressed for a loss beyond the margin."""
        return loss.traces > 0 and loss.compressed <= self.margin * loss.traces

    @property
    def is_floor(self) -> bool:
        """Return whether the full cache may solve no more than the margin, so that no loss beyond it could be seen."""
        return self.full is not None and self.full.low is not None and self.full.low <= self.margin

    def among_compressed(self, setting: str) -> Difference | None:
        """Return the loss of a setting on the problems with a compressed trace, over the benchmarks that have any.

        None where there is no such problem, or no other.
        """
        row = list(self.settings).index(setting)
        values = self.paired.values[row]
        chosen = self.has_compressed[row] & ~np.isnan(values)
        if not chosen.any() or chosen.sum() == np.count_nonzero(~np.isnan(values)):
            return None

        # Benchmarks and clusters without a compressed trace are left out, so the others are numbered anew.
        strata = np.unique(self.paired.strata[chosen], return_inverse=True)[1]
        clusters = self.paired.clusters
        if clusters is not None:
            clusters = np.unique(clusters[chosen], return_inverse=True)[1]
        of_problems = replace(
            self.paired,
            traces=self.paired.traces[row : row + 1, chosen],
            promised=self.paired.promised[row : row + 1, chosen],
            strata=strata,
            clusters=clusters,
        )
        return of_problems.units(self.claim).negated().contrasts()[0]

    def ends_of_tests(self, claim: Claim) -> dict[str, Setting]:
        """Return the settings that a claim does not test, by id, with the unproven one before them in their chain."""
        found: dict[str, Setting] = {}
        for of_chain in self.orders.get(claim, []):
            end = self._end_of(of_chain, claim)
            if end:
                behind = of_chain[of_chain.index(end) + 1 :]
                found |= dict.fromkeys(behind, self.settings[end])
        return found

    @cached_property
    def required_at_stops(self) -> dict[str, Required]:
        """The effort for the first setting of each chain that is not proven to keep the margin."""
        found: dict[str, Required] = {}
        for of_chain in self.chains:
            setting = self._end_of(of_chain, self.claim)
            loss = self.by_setting.get(setting)
            if loss is None or loss.is_broken:
                continue

            # The observed differences of the setting are the pilot for a larger run.
            row = list(self.settings).index(setting)
            lost = -means_of_clusters(self.paired.values, self.paired.clusters)[row]
            is_known = ~np.isnan(lost)
            pilot = lost[is_known]
            problems = None
            # What is proven takes nothing more.
            if self._ends(setting, Claim.LIKE):
                chains = self.open_chains(Claim.LIKE)
                problems = needed_problems(pilot, self.paired.unit_strata[is_known], loss.value, self.margin, chains)
            samples = None
            if self._ends(setting, Claim.THESE) and not self.refused:
                has_value = ~np.isnan(self.paired.values[row])
                strata = self.paired.strata[has_value]
                chains = self.open_chains(Claim.THESE)
                squares = mean_of_known(self.paired.traces[row, has_value] ** 2)
                differing = float(squares @ weights(strata))
                samples = needed_samples(np.bincount(strata).tolist(), differing, loss.value, self.margin, chains)
            samples_now = int(self.paired.promised[row].sum(1).max())
            found[setting] = Required(self.settings[setting], loss, len(pilot), samples_now, problems, samples)
        return found


#: The losses of a model on some benchmarks, of a map or of a mean.
GridLosses = Mapping[tuple[str, frozenset[str]], LossFamily]


def family_of(groups: Sequence[Sequence[CellTraces]]) -> tuple[str, frozenset[str]]:
    """Return the model and the benchmarks of the cells of a map or mean."""
    return groups[0][0].model, frozenset(group[0].benchmark for group in groups)


def grid_by_benchmark(run: RunData) -> dict[str, dict[str, list[CellTraces]]]:
    """Return the grid cells of all policies, by model and benchmark."""
    grid: dict[str, dict[str, list[CellTraces]]] = {}
    for name, group in run.groups.items():
        grid.setdefault(name.model, {}).setdefault(name.benchmark, []).extend(group)
    return grid


def losses_of(run: RunData) -> GridLosses:
    """Return the losses of the grid's settings, on the benchmarks of each map and of each mean.

    A family holds all settings of a model on these benchmarks, whatever their policies. Families without a full cache
    on each benchmark are missing.
    """
    references = [cell for cell in run.cells if is_reference(cell.setting) and cell.measured]
    full_caches = {(cell.model, cell.benchmark): cell for cell in references}
    grid = grid_by_benchmark(run)
    families: dict[tuple[str, frozenset[str]], LossFamily] = {}
    for model, benchmarks in dict.fromkeys(map(family_of, with_means(run.groups).values())):
        names = [name for name in grid[model] if name in benchmarks]
        full = [full_caches[model, name] for name in names if (model, name) in full_caches]
        if len(full) == len(names):
            families[model, benchmarks] = _loss_family([grid[model][name] for name in names], full, run)
    return families


def _loss_family(benchmarks: Sequence[Sequence[CellTraces]], full: Sequence[CellTraces], run: RunData) -> LossFamily:
    """Return the losses of the settings of the cells of each benchmark against its full cache."""
    # The cells of each benchmark with its full cache, in the order of the settings; None where there is no cell.
    cells = {cell.setting.id: cell for cell in chain.from_iterable(benchmarks)}
    ids = list(cells)
    pairs: list[list[CellPair | None]] = []
    for group, reference in zip(benchmarks, full, strict=True):
        by_id = {cell.setting.id: cell for cell in group}
        pairs.append([(by_id[id_], reference) if id_ in by_id else None for id_ in ids])
    paired = paired_values(pairs, run.look.samples)

    orders = _orders_of_tests(list(cells.values()), paired)
    family = LossFamily(
        run.margin,
        {},
        {setting: cell.setting for setting, cell in cells.items()},
        orders,
        np.bincount(paired.unit_strata).tolist(),
        paired,
        claim=run.claim,
        refused=run.refused,
        full=mean_over_benchmarks([cell.cell.estimate for cell in full]),
        look=run.look,
        reference=reference_words(cell.setting for cell in full),
        is_in_order=full[0].setting == REFERENCE and full[0].table.manifest.spec.get("tests") == IN_ORDER,
    )

    # The losses of all settings by each claim that the run can make.
    if family.is_floor:
        untested = list(range(len(ids)))
    else:
        untested = np.flatnonzero(paired.missing > MOST_MISSING * paired.pairs).tolist()
    by_claim: dict[Claim, list[Difference | None]] = {}
    for claim in [Claim.LIKE] if family.refused else Claim:
        # With one sample of problems without clusters both claims have the same units, and often the same chains.
        is_same = paired.traces.shape[2] < 2 and paired.clusters is None and orders[Claim.THESE] == orders[Claim.LIKE]
        if Claim.THESE in by_claim and is_same:
            by_claim[claim] = by_claim[Claim.THESE]
        else:
            lost = paired.units(claim).negated()
            rows = [list(map(ids.index, of_chain)) for of_chain in orders[claim]]
            by_claim[claim] = losses_of_units(lost, family.margin, rows, family.look, untested)

    by_setting = {}
    has_compressed = np.zeros(paired.values.shape, bool)
    for row, setting in enumerate(ids):
        of_setting = [pair[0] for of_benchmark in pairs if (pair := of_benchmark[row]) is not None]
        has_compressed[row] = _problems_with_compressed(of_setting, paired)
        claims: dict[str, Difference] = {
            claim: loss for claim, found in by_claim.items() if (loss := found[row]) is not None
        }
        if claims:
            by_setting[setting] = _setting_loss(family, row, claims, of_setting)
    return replace(family, by_setting=by_setting, has_compressed=has_compressed)


def _orders_of_tests(cells: Sequence[CellTraces], paired: PairedValues) -> dict[Claim, Orders]:
    """Return the chains by claim: of the promised settings, problems and samples, at the margin of the spec."""
    tested = [TestedSetting(cell.setting, cell.expected.kv_bytes) for cell in cells if not cell.is_control]
    manifest = cells[0].table.manifest
    axes = [name for name, values in manifest.axes if len(values) > 1]
    # Chains stay as they are from look to look.
    samples = max([cell.expected.samples for cell in cells] + list(manifest.spec.get("looks") or []))
    problems = np.bincount(paired.strata).tolist()
    units = np.bincount(paired.unit_strata).tolist()
    # A margin that is chosen later changes no chain.
    margin = margin_from_points(manifest.spec.get("lose_at_most"))
    return orders_of_claims(tested, problems, units, samples, margin, manifest.spec.get("tests", "each"), axes)


def _problems_with_compressed(cells: Sequence[CellTraces], paired: PairedValues) -> Flags:
    """Return for each problem whether a trace of one of the cells of a setting was compressed."""
    found = set()
    for cell in cells:
        has_any = zip(cell.problems, np.asarray(is_compressed(cell).any(1)).tolist(), strict=True)
        found |= {(cell.benchmark, problem) for problem, is_any in has_any if is_any}
    return np.array([key in found for key in paired.problems], bool)


def _setting_loss(
    family: LossFamily, row: int, claims: Mapping[str, Difference], cells: Sequence[CellTraces]
) -> Difference:
    """Return the loss of the setting of a row by the claim of the family, with what it rests on."""
    paired = family.paired
    traces, compressed = count_compressed(cells)
    lost = -paired.values[row]
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in paired.problems))
    lost_on = [float(mean_of_known(lost[paired.strata == stratum])) for stratum in range(len(benchmarks))]
    loss = replace(
        claims[family.claim],
        is_control=cells[0].is_control,
        units=int(paired.pairs[row]) if family.claim is Claim.THESE else paired.units(Claim.LIKE).units(row),
        pairs=int(paired.pairs[row]),
        missing=int(paired.missing[row]),
        traces=traces,
        compressed=compressed,
        by_benchmark=dict(zip(benchmarks, lost_on, strict=True)),
    )
    if family.is_silent(loss):
        # What was never compressed could lose nothing, so that it lost nothing proves nothing.
        claims = {claim: replace(of_claim, is_kept=False) for claim, of_claim in claims.items()}
        loss = replace(loss, is_kept=False)
    loss = replace(loss, claims=claims)
    if family.claim is Claim.LIKE:
        # Problems like these include these, so both limits have to say so.
        loss = replace(loss, is_kept=loss.keeps_like, is_broken=loss.breaks_like)
    return loss
