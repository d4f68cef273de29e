"""Models under settings, compared problem by problem: who is ahead how often, and how alike they find problems."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain, combinations
from statistics import fmean
from typing import Any

import numpy as np

from kvatlas.core import Claim, KvatlasError, Setting, grouped, policy_names, telling_parameters
from kvatlas.stats.numerics.arrays import LEVEL, Difference, Floats, normal_quantile
from kvatlas.stats.numerics.planning import POWER_QUANTILE
from kvatlas.stats.pairs import difference_of_cells, paired_values
from kvatlas.stats.run_data import RunData, shown_policies
from kvatlas.stats.table import CellTraces, ProblemKey, check_distinct, check_same_problems
from kvatlas.text import counted, signed

#: Systems that a sentence names before it only counts them.
_NAMED = 6


@dataclass(frozen=True)
class ModelSetting:
    """A model under a setting, with its cells of the same problems, and what is known of these as `about`."""

    model: str
    setting: Setting
    cells: tuple[CellTraces, ...]
    about: Mapping[ProblemKey, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def all_values(self) -> Mapping[str, Any]:
        """The parameters of its setting, those included that the setting does not name."""
        return {**self.cells[0].all_values, **self.setting.values}

    @cached_property
    def means(self) -> dict[ProblemKey, float]:
        """The metric of each problem that has a trace: the mean over samples, or that of a rule over samples."""
        means = {}
        for cell in self.cells:
            for problem, samples in zip(cell.place, cell.values().tolist(), strict=True):
                measured = [value for value in samples if not math.isnan(value)]
                if measured:
                    means[cell.benchmark, problem] = fmean(measured)
        return means


def systems_of(
    runs: Sequence[RunData], metric: str = "progress", benchmarks: Sequence[str] | None = None
) -> list[ModelSetting]:
    """Return all models under their settings of some runs, in the order of the manifests.

    On these benchmarks, or on all. Raises KvatlasError for a metric or benchmark that the runs do not have, and where
    two runs hold the same trace.
    """
    promised = chain.from_iterable(run.manifest.expected for run in runs)
    of_runs = list(dict.fromkeys(cell.benchmark for cell in promised))
    for benchmark in benchmarks or ():
        if benchmark not in of_runs:
            raise KvatlasError(f"No run has the benchmark {benchmark!r}; there are: {', '.join(of_runs)}.")

    tables = [run.table for run in runs]
    for table in tables:
        table.check(metric, tables)
    cells = list(chain.from_iterable(table.cells(metric) for table in tables))
    if benchmarks:
        cells = [cell for cell in cells if cell.benchmark in benchmarks]
    check_distinct(cells)
    check_same_problems(cells)

    # The difficulty of each problem.
    about: dict[ProblemKey, Mapping[str, Any]] = {}
    for run in runs:
        for benchmark, by_problem in run.manifest.about.items():
            about |= {(benchmark, problem): values for problem, values in by_problem.items()}
    systems = []
    for (model, setting), of_system in grouped(cells, lambda cell: (cell.model, cell.setting)).items():
        if any(cell.measured for cell in of_system):
            systems.append(ModelSetting(model, setting, tuple(of_system), about))
    return systems


def choose(systems: Sequence[ModelSetting], names: Sequence[str], *, best: bool = False) -> list[ModelSetting]:
    """Return the system of each name, in the order of the names.

    All words of a name must fit: a model, a policy (`*` stands for anything), `PARAMETER=VALUE`, as in `R1-Qwen full`
    or `dynts ratio=0.3 local_window=500`. Without names all systems are compared. With `best` a name may fit several
    settings of a policy, of which it is the one with the highest mean, and of more than `SEVERAL` systems those are
    compared: chosen by their values, so that a comparison flatters them. Raises KvatlasError unless each name fits one
    system of its own; a name that fits none is said first.
    """
    if not systems:
        raise KvatlasError("No setting has a trace yet, so none can be chosen; `kvatlas sweep` decodes a spec's.")
    if not names:
        return _best_of_policies(systems) if best and len(systems) > SEVERAL else list(systems)
    fitting = {name: fitting_systems(systems, name) for name in names}
    if best:
        fitting = {name: _best_of_policies(fits) for name, fits in fitting.items()}

    for name, fits in fitting.items():
        if len(fits) > 1:
            which = ", the best setting of each model and policy," if best else ""
            way_out = ""
            if " " not in name and "=" in name:
                way_out = f' A system of several words stands in quotes, as "{fits[0].setting.policy_name} {name}".'
            raise KvatlasError(
                f"{name!r} fits {len(fits)} of the systems{which} and must fit one: {names_to_choose(fits, systems)}."
                f"{way_out}"
            )

    chosen = [fitting[name][0] for name in names]
    if len(set(map(id, chosen))) < len(chosen):
        raise KvatlasError(f"The names {', '.join(map(repr, names))} say a system twice.")
    return chosen


def fitting_systems(systems: Sequence[ModelSetting], name: str) -> list[ModelSetting]:
    """Return the systems that a name fits, as `choose` reads it. Raises KvatlasError if there are none."""
    fits = list(systems)
    for word in _words_of(name, systems):
        left = [system for system in fits if _fits(word, system)]
        if not left:
            of_name = "" if word == name else f" of {name!r}"
            raise KvatlasError(f"{word!r}{of_name} fits none of the systems; {_why_none(systems, fits, word)}.")
        fits = left
    return fits


def _words_of(name: str, systems: Sequence[ModelSetting]) -> list[str]:
    """Return the words of a name, also as results print it: `dynts(ratio=0.3)` or `dynts local_window 8."""
    parameters = set(chain.from_iterable(system.all_values for system in systems))
    words: list[str] = []
    for word in re.split(r"[()\s]+|,(?=\s|$)", name):
        if words and words[-1] in parameters:
            words[-1] += f"={word}"
        elif word:
            words.append(word)
    return words


def _why_none(systems: Sequence[ModelSetting], fits: Sequence[ModelSetting], word: str) -> str:
    """Return a clause on a word of a name that none of the systems fits which the words before it fit."""
    parameter, equals, text = word.partition("=")
    values = dict.fromkeys(str(system.all_values[parameter]) for system in fits if parameter in system.all_values)
    if equals and values:
        return f"the values of {parameter} are {', '.join(values)}"

    if equals:
        parameters = dict.fromkeys(chain.from_iterable(system.all_values for system in systems))
        near = get_close_matches(parameter, parameters, n=1)
        return f"write {near[0]}={text}" if near else f"the parameters are {', '.join(parameters)}"

    models = ", ".join(dict.fromkeys(system.model for system in systems))
    policies = ", ".join(shown_policies(system.setting.policy for system in systems).values())
    return f"there are the policies {policies} and the models {models}"


def names_to_choose(systems: Sequence[ModelSetting], every_system: Sequence[ModelSetting] = ()) -> str:
    """Return the first of the systems as names for `choose`, with the values alone that tell a policy's apart.

    They choose among `every_system`, by default among these.
    """
    every_setting = [system.setting for system in every_system or systems]
    shown = shown_policies(setting.policy for setting in every_setting)
    with_model = len({system.model for system in every_system or systems}) > 1

    names = []
    for policy, group in grouped(systems, lambda system: system.setting.policy).items():
        parameters = telling_parameters(setting for setting in every_setting if setting.policy == policy)
        for system in group:
            words = [system.model] if with_model else []
            words.append(shown[policy])
            words += [f"{name}={system.all_values[name]}" for name in parameters if name in system.all_values]
            names.append(" ".join(words))
    more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _best_of_policies(systems: Sequence[ModelSetting]) -> list[ModelSetting]:
    """Return the setting with the highest mean of each model and policy, the first of equal ones."""
    groups = grouped(systems, lambda system: (system.model, system.setting.policy))
    return [max(group, key=_mean_of_benchmarks) for group in groups.values()]


def _mean_of_benchmarks(system: ModelSetting) -> float:
    """Return the mean over benchmarks of the means over their problems."""
    by_benchmark = grouped(system.means, lambda key: key[0])
    return fmean(fmean(map(system.means.__getitem__, keys)) for keys in by_benchmark.values())


def _fits(word: str, system: ModelSetting) -> bool:
    """Return whether a word of a name fits: a value of the setting, or the pattern of a policy or model."""
    parameter, equals, value = word.partition("=")
    if equals:
        values = system.all_values
        return parameter in values and str(values[parameter]) == value
    # Models are `embedded:NAME` or `OWNER/NAME` and may be given by the last part alone.
    models = (system.model, system.model.rpartition(":")[2], system.model.rpartition("/")[2])
    names = (*policy_names(system.setting.policy), *models)
    return any(fnmatchcase(text.lower(), word.lower()) for text in names)


#: Systems that are compared with each other without being named.
SEVERAL = 8
#: Differences of means up to this count as being on the line.
EQUAL = 1e-9


@dataclass(frozen=True)
class Pair:
    """System x against system y on the problems of both; `x`, `y` [problems] are means over samples.

    `above`, `on`, `below` are the shares of problems above the line y = x (y is ahead), on it, and below (x is ahead).
    `difference` is the mean of x - y over benchmarks, by the `claim` of the runs.
    """

    places: tuple[ProblemKey, ...]
    x: Floats
    y: Floats
    above: float
    on: float
    below: float
    difference: Difference
    claim: Claim

    @property
    def needed(self) -> int | None:
        """Problems that would prove this difference with a power of 0.8, were it the true one; None where it is proven.

        By the normal distribution: a half of the width of the interval falls as the square root of the problems.
        """
        difference = self.difference
        if difference.excludes_zero or abs(difference.value) <= EQUAL:
            return None
        z = normal_quantile(LEVEL / 2)
        error = (difference.high - difference.low) / 2 / z
        return math.ceil(len(self.places) * ((z + POWER_QUANTILE) * error / difference.value) ** 2)

    def in_words(self, first: str, second: str) -> str:
        """Return sentences: which system is above the other, by how many points, and what would decide it."""
        difference = self.difference
        is_behind = difference.value < -EQUAL
        higher, lower = (second, first) if is_behind else (first, second)
        sign = -1 if is_behind else 1

        def limits(contrast: Difference) -> str:
            return " to ".join(signed(100 * end, 1, "-") for end in sorted((sign * contrast.low, sign * contrast.high)))

        by_claim = difference.claims
        own_limits = limits(difference)
        if len({limits(contrast) for contrast in by_claim.values()}) > 1:
            own_limits += f" for {self.claim.words}"
            other = next(claim for claim in Claim if claim is not self.claim)
            own_limits += f", {limits(by_claim[other])} for {other.words}"

        problems = counted(len(self.places), "problem")
        if abs(difference.value) <= EQUAL:
            text = f"{first} and {second} are equal in the mean of {problems} ({own_limits} points)"
        else:
            points = f"{100 * abs(difference.value):.1f} points"
            text = f"{higher} is above {lower} by {points} ({own_limits}) on {problems}"
        if difference.excludes_zero:
            text += ", proven"
        elif self.needed:
            text += f", not proven; about {self.needed:,} would prove it if that is the difference"
        elsewhere = f"{first} is above on {100 * self.below:.1f} %, {second} on {100 * self.above:.1f} %"
        return f"{text}. {elsewhere}, equal on {100 * self.on:.1f} %."

    def to_json(self, first: str, second: str) -> dict[str, Any]:
        """Return plain data."""

        def limits(contrast: Difference) -> dict[str, float]:
            return {"value": contrast.value, "low": contrast.low, "high": contrast.high}

        return {
            "x": first,
            "y": second,
            "problems": len(self.places),
            "above": self.above,
            "on": self.on,
            "below": self.below,
            "claim": self.claim.value,
            "difference": limits(self.difference),
            "needed": self.needed,
            "limits": {str(claim): limits(contrast) for claim, contrast in self.difference.claims.items()},
        }


def pairs_of(systems: Sequence[ModelSetting]) -> list[tuple[int, int, Pair]]:
    """Return every pair of systems by their places in the sequence: first with second, first with third, and so on."""
    if len(systems) < 2:
        found = names_to_choose(systems)
        raise KvatlasError(f"A comparison needs two or more systems; there is {len(systems)} ({found}); name another.")
    return [(i, j, pair(systems[i], systems[j])) for i, j in combinations(range(len(systems)), 2)]


def pair(first: ModelSetting, second: ModelSetting) -> Pair:
    """Compare two systems on the problems that both have; KvatlasError if there are fewer than two."""
    places = tuple(key for key in first.means if key in second.means)
    if len(places) < 2:
        raise KvatlasError(
            f"{first.model} under {first.setting} and {second.model} under {second.setting} have "
            f"{len(places)} problems in common; a comparison needs at least 2."
        )

    x = np.array([first.means[place] for place in places])
    y = np.array([second.means[place] for place in places])
    claim, difference = compared_systems(first, second)
    ahead = y - x
    return Pair(
        places,
        x,
        y,
        above=float(np.mean(ahead > EQUAL)),
        on=float(np.mean(np.abs(ahead) <= EQUAL)),
        below=float(np.mean(ahead < -EQUAL)),
        difference=difference,
        claim=claim,
    )


def compared_systems(
    first: ModelSetting, second: ModelSetting, other_claim: Claim | None = None
) -> tuple[Claim, Difference]:
    """Return first - second with its limits by each claim that the runs of both can make, and the claim of the runs.

    `other_claim` takes the place of theirs. Traces that were promised and are missing count at worst. Raises
    KvatlasError where the two have no problem and sample in common, and for an `other_claim` that they cannot make.
    """
    cells = [*first.cells, *second.cells]
    table = cells[0].table
    run = RunData(table.manifest, table, cells[0].metric, chosen=cells, other_claim=other_claim)
    by_benchmark = {cell.benchmark: cell for cell in second.cells}
    pairs = [(cell, by_benchmark[cell.benchmark]) for cell in first.cells if cell.benchmark in by_benchmark]
    pairs = [pair for pair in pairs if not pair[0].place.keys().isdisjoint(pair[1].place)]
    has_traces = [not np.isnan(paired_values([[pair]], run.look.samples).traces).all() for pair in pairs]
    difference = difference_of_cells(run, pairs) if all(has_traces) else None
    if difference is None:
        raise KvatlasError("The two have no problem and sample in common, so there is nothing to compare.")
    return run.claim, difference
