"""A run as statistics look at it: its cells, its axes, which cells belong to one map, and what its numbers speak of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import LOSE_AT_MOST, Claim, KvatlasError, MapName, Note, NoteKind, grouped
from kvatlas.core.settings import BITS
from kvatlas.core.traces import AGAIN, Setting, is_reference, policy_name, telling_parameters
from kvatlas.results.manifest import Manifest
from kvatlas.results.store import Store
from kvatlas.stats.estimates import rule, usual_metric
from kvatlas.stats.numerics.arrays import LEVEL, Flags
from kvatlas.stats.numerics.looks import Look
from kvatlas.stats.table import CellTraces, TraceTable
from kvatlas.text import counted, parse_yaml, percent_text

Axes = tuple[str, str]
#: The cells of one map-to-be.
Groups = dict[MapName, list[CellTraces]]


def short_names(settings: Iterable[Setting]) -> dict[str, str]:
    """Return names by id: the policy with those parameters alone in which the policy's settings differ."""
    distinct = {setting.id: setting for setting in settings}
    shown = shown_policies(setting.policy for setting in distinct.values())
    names: dict[str, str] = {}
    for policy, group in grouped(distinct.values(), lambda setting: setting.policy).items():
        parameters = telling_parameters(group)
        for setting in group:
            values = {name: value for name, value in setting.parameters if name in parameters}
            names[setting.id] = Setting.from_parameters(policy, **values).shown_as(shown[policy])
    return names


def shown_policies(policies: Iterable[str]) -> dict[str, str]:
    """Return policies as readers see them: classes of files without the file, where no other has that name."""
    distinct = dict.fromkeys(policies)
    count = Counter(map(policy_name, distinct))
    return {policy: policy_name(policy) if count[policy_name(policy)] == 1 else policy for policy in distinct}


def whole_names(settings: Iterable[Setting]) -> dict[str, str]:
    """Return names by id: the policy as readers see it beside the others, with all parameters."""
    distinct = {setting.id: setting for setting in settings}
    shown = shown_policies(setting.policy for setting in distinct.values())
    return {id_: setting.shown_as(shown[setting.policy]) for id_, setting in distinct.items()}


def setting_words(setting: Setting, candidates: Sequence[Setting]) -> str:
    """Return a setting by the parameters that its policy varies among the candidates.

    As in `dynts local_window 16, ratio 0.5`.
    """
    if not candidates:
        return str(setting)
    parameters = telling_parameters(candidate for candidate in candidates if candidate.policy == setting.policy)
    names = [f"{name} {value}" for name, value in setting.parameters if value != "" and name in parameters]
    shown = shown_policies(candidate.policy for candidate in (*candidates, setting))
    return f"{shown[setting.policy]} {', '.join(names)}".strip()


@dataclass(frozen=True)
class RunData:
    """A run's promises with the table of its traces, and how to look at them.

    With `partial` missing traces are no error. `fix` holds axes to one value each, which may be written as text.
    `chosen` are the cells instead of all. `lose_at_most` is the margin against the full cache in points; the sweep's
    own where None. `other_claim` takes the place of the claim that the spec decided.
    """

    manifest: Manifest
    table: TraceTable
    metric: str = "pass@1"
    partial: bool = False
    fix: Mapping[str, Any] = field(default_factory=dict)
    chosen: Sequence[CellTraces] | None = None
    folder: Path | None = None
    lose_at_most: float | None = None
    other_claim: Claim | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        metric: str | None = "pass@1",
        partial: bool = False,
        fix: Mapping[str, Any] | None = None,
        lose_at_most: float | None = None,
        claim: Claim | None = None,
    ) -> RunData:
        """Open the run in a folder; without a metric with its usual one.

        Raises KvatlasError for a folder without a run, and if `fix` names an axis or a value that the run does not
        have.
        """
        with Store.open(Path(folder)) as store:
            manifest = store.manifest()
            table = TraceTable(manifest, store.columns())
        metric = metric or usual_metric(manifest)
        run = cls(manifest, table, metric, partial, fix or {}, None, Path(folder), lose_at_most, claim)
        run.check_fixed()
        return run

    def __post_init__(self) -> None:
        values = dict(self.manifest.axes)
        fixed = dict(self.fix)
        for name, value in self.fix.items():
            # A command line writes every value as text.
            if isinstance(value, str) and value not in values.get(name, ()):
                fixed[name] = parse_yaml(value)
        object.__setattr__(self, "fix", fixed)

    def store(self) -> Store:
        """Open the store with the whole traces; KvatlasError if the run is not from a folder."""
        if self.folder is None:
            raise KvatlasError("This shows traces, so it needs a run that is stored in a folder.")
        return Store.open(self.folder)

    @cached_property
    def cells(self) -> Sequence[CellTraces]:
        """The promised cells with their traces; KvatlasError for a metric that the run does not have."""
        return self.table.cells(self.metric, lambda: self.claim) if self.chosen is None else self.chosen

    @property
    def varied(self) -> list[str]:
        """The parameters that the run varies and `fix` does not hold to one value."""
        return [name for name, values in self.manifest.axes if len(set(values)) > 1 and name not in self.fix]

    def check_fixed(self) -> None:
        """Raise KvatlasError if `fix` names an axis or a value that the run does not have."""
        cells = self.manifest.expected if self.chosen is None else self.chosen
        by_setting = {cell.setting: cell for cell in cells}
        values = {}
        for axis, levels in self.manifest.axes:
            # The levels of the axis, and the other values that settings fix.
            of_settings = [cell.all_values[axis] for cell in by_setting.values() if axis in cell.all_values]
            values[axis] = list(dict.fromkeys([*levels, *of_settings]))
        for name, value in self.fix.items():
            if value not in values.get(name, ()):
                axes = "; ".join(f"{axis}: {', '.join(map(str, levels))}" for axis, levels in values.items())
                raise KvatlasError(f"{name} cannot be fixed to {value!r}; the run has: {axes or 'no axes'}.")

    @cached_property
    def axes(self) -> Axes:
        """The (vertical, horizontal) axes: the first two parameters that the run varies and `fix` does not hold.

        Each value of a further one has maps of its own. Raises KvatlasError if there are fewer than two, or if `fix`
        names an axis or value that is not there.
        """
        self.check_fixed()
        names = self.varied
        if len(names) < 2:
            listed = ", ".join(names) or "none"
            raise KvatlasError(f"A map needs two axes with at least two values each; this run varies {listed}.")
        return names[0], names[1]

    @cached_property
    def groups(self) -> Groups:
        """The cells of each map, without baselines and policies with a single value on an axis.

        A policy with several values of another parameter gives several groups, with that parameter in the label. In a
        run without maps the groups are those of models and benchmarks: all settings but the reference.
        """
        if self.has_maps:
            return self._grids
        compared = [cell for cell in self.cells if not is_reference(cell.setting) and cell.setting != AGAIN]
        by_table = grouped(filter(self.fits, compared), lambda cell: (cell.model, cell.benchmark))
        return {MapName(model, benchmark, ""): group for (model, benchmark), group in by_table.items()}

    @cached_property
    def _grids(self) -> Groups:
        """The cells of each map of a run that varies two parameters."""
        # An unknown metric is refused before axes are.
        cells = self.cells
        axes = set(self.axes)
        on_grid = [cell for cell in cells if not cell.baseline and axes <= cell.all_values.keys()]

        by_rest = grouped(filter(self.fits, on_grid), self.without_axes)
        settings = grouped(by_rest, lambda key: key[0])
        names = {model: short_names(map(itemgetter(2), keys)) for model, keys in settings.items()}

        groups = {}
        for (model, benchmark, setting), group in by_rest.items():
            rows, columns = map(set, zip(*(cell.coord(self.axes) for cell in group), strict=True))
            if len(rows) > 1 and len(columns) > 1:
                groups[MapName(model, benchmark, names[model][setting.id])] = group
        return groups

    @cached_property
    def off_maps(self) -> list[CellTraces]:
        """The cells of a run with maps that stand on none: of settings with fewer than two values of an axis."""
        on_maps = {cell.expected.name for cell in chain.from_iterable(self._grids.values())}
        settings = [cell for cell in self.cells if not cell.baseline and self.fits(cell)]
        return [cell for cell in settings if cell.expected.name not in on_maps]

    def without_axes(self, cell: CellTraces) -> tuple[str, str, Setting]:
        """Return model, benchmark, and the setting without its values on the axes: equal for the cells of a map."""
        return cell.model, cell.benchmark, without(cell, self.axes)

    @property
    def margin(self) -> float:
        """The loss against the full cache that a setting may have, in (0, 1)."""
        points = self.manifest.spec.get("lose_at_most") if self.lose_at_most is None else self.lose_at_most
        return margin_from_points(points)

    @cached_property
    def manifests(self) -> list[Manifest]:
        """The manifests of the cells, which may come from several runs."""
        of_cells = [cell.table.manifest for cell in self.chosen or ()]
        by_id = {id(manifest): manifest for manifest in of_cells or [self.manifest]}
        return list(by_id.values())

    @cached_property
    def stored_claim(self) -> Claim:
        """The claim that the specs decided before the data; problems like these for runs that had none."""
        claims = {manifest.spec.get("claim") for manifest in self.manifests}
        return Claim.THESE if claims == {Claim.THESE.value} else Claim.LIKE

    @cached_property
    def copied(self) -> float:
        """The largest share of problems of a cell on which two samples are one long text (`copied_share`)."""
        shares = [copied_share(one.token_digest, one.numbers("output_tokens") >= LONG_TEXT) for one in self.cells]
        return max(shares, default=0.0)

    @cached_property
    def refused(self) -> str:
        """Why the run cannot speak of its problems sampled anew, as a clause, or "".

        Samples of a problem that are one long text may be one draw, which limits by trace would count as several. All
        of a loss may lie on such problems: where a share q of their draws is lost, n of them show nothing with a chance
        of (1 - q)^n, however many samples each has. So a run with copies speaks of problems like these: limits by
        problem hold however the samples of a problem depend on each other. Copies on a share of at most `MOST_COPIED`
        of the problems are let pass, since a text may be drawn twice: if all of these problems were lost, the loss
        would be higher by that share, one point.
        """
        if rule(self.metric) is not None:
            return f"{self.metric} is made of the samples of a problem together"
        temperatures = [manifest.spec.get("sampling", {}).get("temperature") for manifest in self.manifests]
        if any(temperature is not None and float(temperature) == 0 for temperature in temperatures):
            return GREEDY
        sessions = chain.from_iterable(manifest.provenance.get("sessions", ()) for manifest in self.manifests)
        if any(session.get("seeds") == "constant" for session in sessions):
            return "the server writes one text for all seeds"
        return copies_clause(self.copied) if self.copied > MOST_COPIED else ""

    @cached_property
    def claim(self) -> Claim:
        """The claim of the numbers of the run.

        Raises KvatlasError where these problems are asked for, of a run that cannot speak of them.
        """
        if self.other_claim is Claim.THESE and self.refused:
            raise KvatlasError(f"The run cannot speak of these problems alone: {self.refused}.")
        claim = self.other_claim or self.stored_claim
        return Claim.LIKE if self.refused else claim

    @cached_property
    def claim_notes(self) -> list[Note]:
        """Notes on the claim and on the look at the run."""
        look = self.look
        left_out = self.manifest.provenance.get("left_out", {})
        texts = [f"{setting} is left out of the run: {fault}" for setting, fault in left_out.items()]
        for benchmark, clusters in self.manifest.clusters.items():
            texts.append(
                f"{benchmark}: {len(clusters):,} problems share questions, passages, seeds or templates, in "
                f"{counted(len(set(clusters.values())), 'cluster')}; clusters are the units of claims on problems like "
                "these, and weigh equally"
            )
        if reclustered := self.manifest.provenance.get("reclustered"):
            texts.append(
                f"The clusters of {', '.join(reclustered)} were changed after the first traces, so the units of claims "
                "on problems like these were chosen after the data"
            )
        if self.manifest.provenance.get("replaced"):
            texts.append(
                "The spec was replaced after the first traces (--replace), so what is tested, and in which order, was "
                "chosen after the data"
            )
        if self.other_claim not in (None, self.stored_claim):
            texts.append(f"The claim ({self.claim.words}) was chosen after the data")
        copied = self.copied
        if copied > MOST_COPIED and self.stored_claim is Claim.THESE:
            texts.append(f"Nothing is claimed of these problems alone: {copies_clause(copied)}")
        elif 0 < copied <= MOST_COPIED:
            texts.append(
                f"Under one of the settings {copies_clause(copied)}; they count as independent draws, so limits of the "
                f"claim on these problems may be too near by up to {percent_text(copied)} points"
            )
        if look.share is not None:
            looks = self.manifest.spec["looks"]
            text = f"Read at {look.samples} of {looks[-1]} samples: limits and tests allow for all declared looks"
            if look.samples is not None and look.samples < looks[0]:
                text += ", and for this one before the first of them"
            texts.append(f"{text}; intervals of values are those of a single look")
        if look.extensions:
            times = "once" if look.extensions == 1 else f"{look.extensions} times"
            texts.append(
                f"The run was extended {times} without declared looks, so its limits are those of "
                f"{100 * LEVEL / 2**look.extensions:.2g} % and err in up to 10 % in all"
            )

        return [Note(NoteKind.INTERVAL, text) for text in texts]

    @cached_property
    def look(self) -> Look:
        """The look at the run; with declared looks the last one of which all samples are there."""
        extensions = max((manifest.provenance.get("extensions", 0) for manifest in self.manifests), default=0)
        looks = self.manifests[0].spec.get("looks") if len(self.manifests) == 1 else None
        if extensions or not looks:
            return Look(extensions=extensions)

        # The first samples that are there of nearly every problem, in each cell.
        whole_samples = []
        for cell in self.cells:
            lacking = 1 - cell.is_stored.mean(0)
            is_lacking = lacking > MOST_MISSING
            whole_samples.append(int(np.argmax(is_lacking)) if is_lacking.any() else len(lacking))
        reached = [samples for samples in looks if samples <= min(whole_samples, default=0)]
        # The limits of an early reading are those of its own share, farther than at any look.
        samples = reached[-1] if reached else max(min(whole_samples, default=0), 1)
        return Look(share=samples / looks[-1], samples=samples)

    @cached_property
    def has_maps(self) -> bool:
        """False if the run has a table of settings and no maps: no policy varies two parameters."""
        return len(self.varied) >= 2 and bool(self._grids)

    def fits(self, cell: CellTraces) -> bool:
        """Return whether the cell has the values that `fix` holds."""
        # A baseline that names no bits stands beside settings of any.
        values = cell.setting.values if cell.baseline else cell.all_values
        return all(values.get(name, value) == value for name, value in self.fix.items())

    def of_policy(self, policy: str) -> RunData:
        """Return the same of the cells of a policy with the baselines."""
        name = policy.partition("(")[0]
        return self.with_cells([cell for cell in self.cells if cell.baseline or cell.setting.is_of(name)])

    def with_cells(self, cells: Sequence[CellTraces]) -> RunData:
        """Return the same of these cells alone; they may come from other runs with the same axes."""
        return replace(self, chosen=cells)


def without(cell: CellTraces, axes: Sequence[str]) -> Setting:
    """Return a cell's setting without its values on axes: equal for the cells of a map, or the points of a line."""
    others = {name: value for name, value in cell.setting.parameters if name not in axes}
    if not set(BITS).isdisjoint(axes):
        # Equal bits of keys and values are named as one, others as two.
        others.pop("kv_bits", None)
        others |= {name: cell.all_values[name] for name in BITS if name in cell.all_values and name not in axes}
    return Setting.from_parameters(cell.setting.policy, **others)


def margin_from_points(lose_at_most: Any) -> float:
    """Return points as a share, 3 points for None. Raises KvatlasError for a value out of range."""
    points = LOSE_AT_MOST if lose_at_most is None else lose_at_most
    if not isinstance(points, int | float) or isinstance(points, bool) or not 0 < points < 100:
        raise KvatlasError(f"lose_at_most is {points!r}; expected a number of points above 0 and below 100.")
    return float(points) / 100


# -- the claim of the numbers ------------------------------------------------------------------------------------------

#: Why a greedy run cannot speak of its problems sampled anew.
GREEDY = "at temperature 0 nothing is drawn"
#: Texts of fewer tokens may be equal by chance.
LONG_TEXT = 50
#: The share of problems with copies above which the samples are no independent draws.
MOST_COPIED = 0.01
#: Above this share of missing pairs nothing is proven.
MOST_MISSING = 0.05


def copies_clause(share: float) -> str:
    """Return as a clause that samples are copies of each other on a share of the problems."""
    return f"two samples are copies of one long text on {percent_text(share)} % of the problems"


def copied_share(texts: NDArray[Any], is_long: Flags) -> float:
    """Return the share of problems on which two samples are one long text, as with one seed for both.

    `texts` [problems, samples] are numbers or digests of texts, zeros where they are unknown; short ones may be equal
    by chance, so that problems without two long texts count in neither. It is the largest share over the pairs of
    samples: samples 0 and 4 are copies where a log of four samples was read twice, though samples 0 and 1 differ.
    """
    if texts.shape[1] < 2 or not len(texts):
        return 0.0
    is_known = is_long & (texts != np.zeros(1, texts.dtype))
    numbers = np.unique(texts, return_inverse=True)[1].reshape(texts.shape)
    most = 0.0
    for first in range(texts.shape[1] - 1):
        # The later samples beside this one, all at once.
        are_known = is_known[:, first, None] & is_known[:, first + 1 :]
        are_equal = are_known & (numbers[:, first, None] == numbers[:, first + 1 :])
        known_pairs = are_known.sum(0)
        # The texts of a single problem may be equal by chance.
        most = max(most, float((are_equal.sum(0) / np.where(known_pairs > 1, known_pairs, math.inf)).max()))
    return most
