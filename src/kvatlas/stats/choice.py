"""The recommendation: the cheapest setting that is proven to lose at most a margin against the full cache."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvatlas.core import LOSE_AT_MOST, Cell, Map, Setting, differing, grouped, is_reference, mean_of
from kvatlas.core.settings import CAP
from kvatlas.stats.controls import Changes, changes_of, control_of, drift_reason, sessions_reason
from kvatlas.stats.losses import GridLosses, LossFamily, Required, grid_by_benchmark
from kvatlas.stats.maps import mean_cell
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.orders import kept_by_rule
from kvatlas.stats.power import Provable, provable
from kvatlas.stats.run_data import GREEDY, MOST_MISSING, RunData, setting_words
from kvatlas.stats.table import CellTraces, select
from kvatlas.stats.validity import validity_of
from kvatlas.text import percent_text

#: The ways to save: fewer tokens stay, fewer are written, or both.
WAYS = ("kept", "written", "both")
#: Costs of at most so many times the least one count as equal.
SAME_COST = 1.01


@dataclass(frozen=True)
class Saving:
    """The mean cost of a setting as a share of the full cache's, on the mean over benchmarks.

    `memory` is that of the KV bytes (tokens where bytes are unknown), `work` that of bytes times written tokens: traces
    that become longer under compression save less work than memory. Where thinking is capped, `written` is that of the
    tokens written, and the work is that of every trace, of which a cap ends the longest. Of servers the memory is that
    of a token as the spec declares it (`is_declared`).
    """

    memory: float
    work: float | None
    written: float | None = None
    is_declared: bool = False

    @property
    def longer_texts(self) -> bool:
        """True if the work is known and differs, as printed, from the memory: texts are longer or shorter."""
        return self.work is not None and round(100 * self.work) != round(100 * self.memory)


@dataclass(frozen=True)
class Way:
    """The cheapest setting that is proven in one way to save: `cell` is None where none of its `candidates` is.

    `kind` is `kept` (fewer tokens stay), `written` (a cap ends the thinking of uncompressed traces), or `both`.
    """

    kind: str
    candidates: int
    cell: Cell | None
    saving: Saving | None


class Blocked(NamedTuple):
    """A setting whose own limit is within the margin, and the one before it in its chain that is not proven."""

    setting: Setting
    loss: Difference
    end: Setting


@dataclass(frozen=True)
class Choice:
    """The cheapest settings that may be chosen, by mean KV bytes (or tokens kept) and by seconds a trace.

    Where thinking is capped the former is by KV bytes times written tokens, and `ways` tell what either saves.

    Those are the settings proven to lose at most the `margin` by the claim of the run; `family` has the `losses`,
    `deployable` is the cheapest setting that is proven by every claim. Of the settings within 1 % of the least cost the
    one with the smallest limit is chosen. `control` is what the run's own control loses, which tells whether it can see
    a loss. `by_memory` and `by_time` are None where the cost is unknown or none may be chosen. `vacuous` is the reason,
    as a clause, why nothing is chosen, `withheld` why nothing is recommended though losses are known. `savings` are
    those of the settings with a loss, by id, as far as the costs are known. Where they are not, the last proven setting
    in an order of the spec is chosen (`is_last`), or none. `changes` are the changed answers of a run whose reference
    was asked again.
    """

    model: str
    benchmark: str
    candidates: int
    by_memory: Cell | None = None
    by_time: Cell | None = None
    deployable: Cell | None = None
    control: tuple[Setting, Difference] | None = None
    vacuous: str | None = None
    withheld: str = ""
    changes: Sequence[Changes] = ()
    is_last: bool = False
    margin: float = LOSE_AT_MOST / 100
    family: LossFamily = field(default_factory=lambda: LossFamily(LOSE_AT_MOST / 100, {}))
    losses: Mapping[str, Difference] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    savings: Mapping[str, Saving] = field(default_factory=dict)
    ways: Sequence[Way] = ()

    @property
    def is_judged(self) -> bool:
        """Return whether losses are known, and nothing speaks against a recommendation."""
        return bool(self.losses) and self.vacuous is None and not self.withheld

    @property
    def proven(self) -> list[tuple[Setting, Difference]]:
        """The settings proven by the claim of the run, with their losses; of an order of the spec the last ones."""
        found = [id_ for id_, loss in self.losses.items() if loss.is_kept]
        if self.family.is_in_order:
            kept = set(found)
            found = []
            for of_chain in self.family.chains:
                found += [id_ for id_ in of_chain if id_ in kept][-1:]
        return [(self.settings[id_], self.losses[id_]) for id_ in found]

    @property
    def is_capped(self) -> bool:
        """Return whether a setting has a cap on thinking."""
        return any(CAP in setting.values for setting in self.settings.values())

    @property
    def loss(self) -> Difference | None:
        """The loss of the chosen setting against the full cache."""
        chosen = self.by_memory or self.by_time
        return None if chosen is None else self.losses.get(chosen.setting.id)

    @property
    def offered(self) -> Setting | None:
        """The setting that is chosen by memory; or else the nearest to be proven, or the safest."""
        nearest = self.by_memory or self.blocked or self.required
        if nearest is not None:
            return nearest.setting
        return None if self.safest is None else self.safest[0]

    @property
    def recommended(self) -> Setting | None:
        """The setting that is chosen by memory, where traces can show a difference."""
        return None if self.by_memory is None or self.vacuous is not None else self.by_memory.setting

    @property
    def saving(self) -> Saving | None:
        """The saving of the offered setting; None where a cost is unknown."""
        return None if self.offered is None else self.savings.get(self.offered.id)

    @property
    def shown(self) -> bool:
        """True if a setting is proven to keep the margin."""
        return any(loss.is_kept for loss in self.losses.values())

    @property
    def undecided(self) -> int:
        """The number of settings of which neither is proven, a loss of at most the margin nor a larger one."""
        return sum(not (loss.keeps_any or loss.breaks_any or loss.is_control) for loss in self.losses.values())

    @property
    def untested(self) -> dict[str, Setting]:
        """Undecided settings by id, with the setting at which the order of tests ended before them."""
        ends = self.family.ends_of_tests(self.family.claim)
        return {id_: end for id_, end in ends.items() if id_ in self.losses and not self.losses[id_].breaks_any}

    @property
    def silent(self) -> list[str]:
        """The settings of which hardly a trace was compressed, by id."""
        return [id_ for id_, loss in self.losses.items() if self.family.is_silent(loss) and not loss.is_control]

    @property
    def controls(self) -> list[str]:
        """The policies of the controls among the settings, or the settings themselves where others are none."""
        controls = [self.settings[id_] for id_, loss in self.losses.items() if loss.is_control]
        studied = {self.settings[id_].policy for id_, loss in self.losses.items() if not loss.is_control}
        candidates = list(self.settings.values())
        names = [setting_words(one, candidates) if one.policy in studied else one.policy_name for one in controls]
        return list(dict.fromkeys(names))

    @property
    def ended_chains(self) -> list[tuple[str, str, str]]:
        """The chains with settings that are not tested: what their settings share, and where each ends."""
        candidates = list(self.settings.values())
        untested = self.untested
        found = []
        for of_chain in self.family.chains:
            end = next((untested[id_] for id_ in of_chain if id_ in untested), None)
            if end is None:
                continue
            within = differing(self.settings[id_].values for id_ in of_chain if id_ in self.settings)
            shared = {name: value for name, value in end.parameters if name not in within}
            name = setting_words(Setting.from_parameters(end.policy, **shared), candidates)
            end_in_chain = ", ".join(f"{one} {end.values.get(one)}" for one in within)
            found.append((name, setting_words(end, candidates), end_in_chain))
        return found

    @property
    def blocked(self) -> Blocked | None:
        """Of the untested settings whose own limit is within the margin the one whose chain is nearest to reach it."""
        found: list[tuple[float, float, int, Blocked]] = []
        for id_, end in self.untested.items():
            loss = self.losses[id_]
            if loss.limit <= self.margin and not self.family.is_silent(loss) and loss.missing_share <= MOST_MISSING:
                required = self.family.required_at_stops.get(end.id)
                effort = math.inf if required is None else required.effort(self.family.claim)
                found.append((effort, loss.limit, -len(found), Blocked(self.settings[id_], loss, end)))
        return min(found)[-1] if found else None

    @property
    def samples(self) -> int:
        """The samples of each problem that the losses rest on."""
        return int(self.family.paired.promised.sum(2).max(initial=1))

    @property
    def is_greedy(self) -> bool:
        """Return whether nothing was drawn."""
        return self.family.refused == GREEDY

    @property
    def is_single(self) -> bool:
        """Return whether both claims are the same, or only one can be made."""
        return bool(self.family.refused) or self.samples == 1

    @property
    def worst_benchmark(self) -> tuple[str, float] | None:
        """The benchmark on which the offered setting lost most, and the loss, where that is beyond the margin."""
        loss = None if self.offered is None else self.losses.get(self.offered.id)
        if loss is None or len(loss.by_benchmark) < 2:
            return None
        name, lost = max(loss.by_benchmark.items(), key=itemgetter(1))
        return (name, lost) if lost > self.margin else None

    @property
    def cheapest_here(self) -> Setting | None:
        """The setting proven on these problems that keeps least by its own numbers; None without one."""
        proven = [id_ for id_, loss in self.losses.items() if loss.keeps_any]
        least = min(proven, key=lambda id_: kept_by_rule(self.settings[id_]) or math.inf, default=None)
        return None if least is None else self.settings[least]

    @property
    def safest(self) -> tuple[Setting, Difference] | None:
        """The setting with the smallest joint limit of its loss, and the loss; None where all are controls."""
        losses = {id_: loss for id_, loss in self.losses.items() if not loss.is_control}
        # Of equal limits that with the smallest loss.
        setting = min(losses, key=lambda id_: (losses[id_].joint_limit, losses[id_].value), default=None)
        return None if setting is None else (self.settings[setting], losses[setting])

    @property
    def provable(self) -> Provable | None:
        """The margin that the problems prove if nothing is lost; None where nothing is tested."""
        family = self.family
        if not family.chains:
            return None
        samples = 1 if family.refused else self.samples
        problems = np.bincount(family.paired.strata).tolist()
        return provable(family.sizes, self.margin, family.orders, samples, problems)

    @property
    def required(self) -> Required | None:
        """The setting that is proven with least effort, and the effort; None if no more would decide one.

        Where there is a setting whose own limit is within the margin it is the end of the chain before that, else the
        one of those at which a chain stopped that takes the fewest samples or problems.
        """
        if self.blocked is not None:
            return self.family.required_at_stops.get(self.blocked.end.id)
        claim = self.family.claim
        at_stops = [one for id_, one in self.family.required_at_stops.items() if id_ in self.settings]
        return min(at_stops, key=lambda one: (one.effort(claim), one.loss.limit), default=None)


def choices(run: RunData, lost: GridLosses) -> list[Choice]:
    """Return one choice for each model with a full cache, among its grid cells, on the mean over benchmarks."""
    found = []
    for model, benchmarks in grid_by_benchmark(run).items():
        cells = list(chain.from_iterable(benchmarks.values()))
        family = lost.get((model, frozenset(benchmarks)))
        ids = {cell.setting.id for cell in cells}
        if family is not None and ids & family.by_setting.keys():
            found.append(_choice_of(run, model, cells, family))
    return found


def _choice_of(run: RunData, model: str, cells: Sequence[CellTraces], family: LossFamily) -> Choice:
    """Return the choice from the grid `cells` of a model by their losses."""
    full = [cell for cell in select(run.cells, model=model) if is_reference(cell.setting) and cell.stored]
    names = list(dict.fromkeys(cell.benchmark for cell in cells))
    changes = changes_of(run, model)
    withheld = drift_reason(changes) or sessions_reason(run.manifests, model)

    stored = grouped((cell for cell in cells if cell.stored), lambda cell: cell.setting.id)
    # The family may have settings of other policies, too.
    losses = {id_: loss for id_, loss in family.by_setting.items() if id_ in stored}

    # From a vacuous map nothing is chosen: its traces can show no loss.
    checked = validity_of(cells)
    reason = checked.reason if checked is not None else None
    if reason is None and family.is_floor:
        reason = floor_reason(family)

    settings = {cell.setting.id: cell.setting for cell in cells}
    is_capped = any(CAP in setting.values for setting in settings.values())

    def cheapest_of(members: Sequence[Cell]) -> Cell | None:
        if is_capped:
            return cheapest(members, [_mean_work(stored[cell.setting.id]) for cell in members], losses)
        costs = kv_costs(members)
        if None in costs:
            # Of servers the bytes of a token may be declared.
            costs = [_token_bytes(stored[cell.setting.id]) for cell in members]
        return cheapest(members, costs, losses) or _last_in_order(members, family)

    kept = [id_ for id_, loss in losses.items() if loss.is_kept and reason is None]
    means = {id_: _mean_of_traces(stored[id_]) for id_ in kept}
    proven = [] if withheld else list(means.values())
    # Seconds of servers depend on how many questions are open, and are no cost.
    timed = proven if family.reference == "the full cache" else []
    by_memory = cheapest_of(proven)
    certain = [cell for cell in proven if losses[cell.setting.id].keeps_like]

    every_saving = {id_: _saving_of_cells(stored[id_], full, is_capped) for id_ in losses}
    savings = {id_: saving for id_, saving in every_saving.items() if saving is not None}

    # The cheapest proven setting of each way to save.
    ways = []
    by_way = grouped(losses, lambda id_: _way_of(stored[id_])) if is_capped and reason is None else {}
    for kind in WAYS:
        candidates = by_way.get(kind, [])
        chosen = cheapest_of([means[id_] for id_ in candidates if id_ in means])
        if candidates:
            ways.append(Way(kind, len(candidates), chosen, savings.get(chosen.setting.id) if chosen else None))

    return Choice(
        model,
        names[0] if len(names) == 1 else mean_of(len(names)),
        len(settings),
        by_memory=by_memory,
        by_time=cheapest(timed, [cell.number("seconds") for cell in timed], losses),
        deployable=cheapest_of(certain),
        control=control_of(run, model, names, family),
        vacuous=reason,
        withheld=withheld if reason is None else "",
        changes=changes,
        is_last=by_memory is not None and by_memory.setting.id not in savings and family.is_in_order,
        margin=family.margin,
        family=family,
        losses=losses,
        settings=settings,
        savings=savings,
        ways=ways,
    )


def _way_of(cells: Sequence[CellTraces]) -> str:
    """Return the way in which a setting saves, one of `WAYS`; "" for one that compresses no trace and has no cap."""
    compresses = any(bool((cell.numbers("compressions") > 0).any()) for cell in cells)
    if CAP not in cells[0].setting.values:
        return "kept" if compresses else ""
    return "both" if compresses else "written"


def floor_reason(family: LossFamily) -> str:
    """Return as a clause why a full cache that solves next to nothing can lose nothing."""
    assert family.full is not None
    problems = f"{family.problem_count:,} problems"
    margin = f"{round(100 * family.margin, 4):g} points"
    if not family.full.value:
        return f"{family.reference} solves none of the {problems}, so nothing could be lost"
    return (
        f"{family.reference} solves {percent_text(family.full.value)} % of the {problems} and perhaps only "
        f"{percent_text(family.full.low or 0.0)} %, so a loss of more than {margin} could not be seen"
    )


def _token_bytes(cells: Sequence[CellTraces]) -> float | None:
    """Return the bytes of a cached token of a setting, the mean over benchmarks; None if unknown."""
    sizes = [cell.expected.kv_bytes[0] for cell in cells if cell.expected.kv_bytes is not None]
    return math.fsum(sizes) / len(sizes) if len(sizes) == len(cells) else None


def _last_in_order(members: Sequence[Cell], family: LossFamily) -> Cell | None:
    """Return the last member of the only chain that has some, of settings that a spec names from gentle to harsh."""
    by_id = {cell.setting.id: cell for cell in members}
    chains = [of_chain for of_chain in family.chains if not by_id.keys().isdisjoint(of_chain)]
    if not family.is_in_order or len(chains) != 1:
        return None
    return by_id[next(id_ for id_ in reversed(chains[0]) if id_ in by_id)]


def _mean_of_traces(cells: Sequence[CellTraces]) -> Cell:
    """Return the mean over benchmarks of the cells of one setting."""
    return mean_cell([cell.cell for cell in cells])


def _mean_work(cells: Sequence[CellTraces]) -> float | None:
    """Return the mean over benchmarks of KV bytes (or tokens) times written tokens of a trace; None if unknown."""
    works = []
    for cell in cells:
        token_bytes, tail_bytes = cell.expected.kv_bytes or (1, 0)
        kept = cell.numbers("mean_kv_tokens") * token_bytes + tail_bytes
        works.append(float((kept * cell.numbers("output_tokens"))[cell.is_stored].mean()))
    mean = math.fsum(works) / len(works)
    return None if math.isnan(mean) else mean


def _saving_of_cells(cells: Sequence[CellTraces], full_cells: Sequence[CellTraces], is_capped: bool) -> Saving | None:
    """Return what the cells of a setting cost beside the full cache; None where the memory of either is unknown.

    The work is that of the mean memory and the mean length, where thinking `is_capped` that of each trace.
    """
    chosen = _mean_of_traces(cells)
    full = _mean_of_traces(full_cells)
    kept, kept_by_full = kv_costs([chosen, full])
    if kept is None or kept_by_full is None:
        # Of servers the bytes of a token may be declared.
        token_bytes = _token_bytes(cells)
        token_bytes_of_full = _token_bytes(full_cells)
        if token_bytes is None or not token_bytes_of_full:
            return None
        return Saving(token_bytes / token_bytes_of_full, None, is_declared=True)
    if not kept_by_full:
        return None

    memory = kept / kept_by_full
    length = chosen.number("output_tokens")
    length_of_full = full.number("output_tokens")
    if length is None or not length_of_full:
        return Saving(memory, None)
    written = length / length_of_full
    if not is_capped:
        return Saving(memory, memory * written)
    benchmarks = {cell.benchmark for cell in cells}
    work = _mean_work(cells)
    work_of_full = _mean_work([cell for cell in full_cells if cell.benchmark in benchmarks])
    return Saving(memory, work / work_of_full if work and work_of_full else None, written)


def with_recommended(maps: Sequence[Map], every_choice: Sequence[Choice]) -> list[Map]:
    """Return the maps, each with the cell of the setting that is recommended for its model."""
    found = []
    for map_ in maps:
        by_setting = {choice.recommended: choice for choice in every_choice if choice.model == map_.model}
        coords = [coord for coord, cell in map_.cells.items() if cell.setting in by_setting]
        if coords:
            choice = by_setting[map_.cells[coords[0]].setting]
            map_ = replace(map_, recommended=coords[0], recommended_for=choice.benchmark)
        found.append(map_)
    return found


def kv_tokens_of(cell: Cell) -> float | None:
    """Return the KV tokens that a cell keeps: measured, else what the published rule leaves; None if unknown."""
    tokens: float | None = cell.number("mean_kv_tokens")
    return kept_by_rule(cell.setting) if tokens is None else tokens


def kv_costs(cells: Sequence[Cell]) -> list[float | None]:
    """Return the mean KV bytes of the cells if all are known, else the tokens that they keep."""
    sizes = [cell.number("kv_memory") for cell in cells]
    return [kv_tokens_of(cell) for cell in cells] if None in sizes else sizes


def cheapest(members: Sequence[Cell], costs: Sequence[float | None], losses: Mapping[str, Difference]) -> Cell | None:
    """Return the member of the smallest limit of its loss within 1 % of the least cost; None if one is unknown."""
    all_costs = [cost for cost in costs if cost]
    if len(all_costs) < len(members) or not members:
        return None
    least = min(all_costs)
    near = [(cell, cost) for cell, cost in zip(members, all_costs, strict=True) if cost <= SAME_COST * least]
    return min(near, key=lambda pair: (losses[pair[0].setting.id].limit, pair[1]))[0]
