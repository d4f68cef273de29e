"""What maps say, typed: every number that `describe` prints, before it is text or JSON. Shares in [0, 1]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvatlas.core import CellCoord, KvatlasError, Map, MapName, Note, NoteKind
from kvatlas.figures.style import scale
from kvatlas.stats.bare_maps import (
    PooledEffect,
    common,
    model_difference,
    peak_of_bare_maps,
    pooled_effects,
    verdicts_of_maps,
)
from kvatlas.stats.choice import Choice, choices_of_maps
from kvatlas.stats.inference import benjamini_hochberg, holm
from kvatlas.stats.intervals import LEVEL
from kvatlas.stats.losses import Difference
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.validity import Finding
from kvatlas.stats.verdicts import Basis, Effect, Verdict

#: Values nearer than this are the same peak.
_TIE = 1e-9


@dataclass(frozen=True)
class MapDescription:
    """A map with its verdict; `holm` are the adjusted p-values of its trends by axis, over the whole description."""

    map: Map
    verdict: Verdict | None
    holm: Mapping[str, float]

    @property
    def values(self) -> list[float]:
        """The value of every cell."""
        return [cell.estimate.value for cell in self.map.cells.values()]

    @property
    def mean(self) -> float:
        """The mean over cells."""
        return sum(self.values) / len(self.values)

    @property
    def peaks(self) -> list[CellCoord]:
        """The highest cells."""
        return self._at(max(self.values))

    @property
    def lowest(self) -> list[CellCoord]:
        """The lowest cells."""
        return self._at(min(self.values))

    @property
    def problems(self) -> int | None:
        """How many problems each cell has; None where they differ or are not known."""
        return common([cell.estimate.problems for cell in self.map.cells.values()])

    @property
    def samples(self) -> int | None:
        """How many samples of each problem; None where they differ or are not known."""
        return common([cell.estimate.samples for cell in self.map.cells.values()])

    @property
    def notes(self) -> tuple[Note, ...]:
        """What is said of the map and of its tests."""
        return (*self.map.notes, *(self.verdict.notes if self.verdict else ()))

    def supports(self, effect: Effect) -> bool:
        """Whether the trend along an axis holds after Holm's adjustment."""
        return self.holm.get(effect.axis, 1.0) < LEVEL

    def _at(self, wanted: float) -> list[CellCoord]:
        return [coord for coord, cell in self.map.cells.items() if abs(cell.estimate.value - wanted) <= _TIE]


@dataclass(frozen=True)
class Across:
    """A model and policy over several benchmarks: where there is evidence, and which cells are on every plateau."""

    model: str
    policy: str
    benchmarks: tuple[str, ...]
    with_evidence: tuple[str, ...]
    good_for_all: tuple[CellCoord, ...]
    axes: tuple[str, str]
    cells: int


@dataclass(frozen=True)
class AdjustedComparison:
    """A comparison with p-values adjusted over all of the description."""

    comparison: Comparison
    p_holm: float
    p_bh: float


@dataclass(frozen=True)
class Description:
    """All that is said of some maps.

    `choices` are the recommendations, one for each model. `effects` are the axes' over all benchmarks, `peak_p` is of
    "no cell stands out" over all maps of bare Pass@1.
    """

    findings: tuple[Finding, ...]
    maps: tuple[MapDescription, ...]
    means: tuple[MapDescription, ...]
    across: tuple[Across, ...]
    comparisons: tuple[AdjustedComparison, ...]
    choices: tuple[Choice, ...]
    notes: tuple[Note, ...]
    effects: tuple[PooledEffect, ...] = ()
    peak_p: float | None = None

    @property
    def single(self) -> list[MapDescription]:
        """Maps of one benchmark."""
        return [described for described in self.maps if not described.map.is_mean]

    @property
    def shown(self) -> list[MapDescription]:
        """Maps, then the means that are not among them."""
        given = {described.map.name for described in self.maps}
        return [*self.maps, *(described for described in self.means if described.map.name not in given)]


def describe(
    maps: Sequence[Map],
    comparisons: Sequence[Comparison] = (),
    means: Sequence[Map] | None = None,
    notes: Sequence[Note] = (),
    verdicts: Mapping[MapName, Verdict] | None = None,
    choices: Sequence[Choice] | None = None,
    findings: Sequence[Finding] = (),
) -> Description:
    """The description of maps. `verdicts` and `choices` are those of runs; other maps get those of the binomial bound.

    `means` are made from the maps where they are not given. Raises KvatlasError for no maps.
    """
    if not maps:
        raise KvatlasError("There is no map to describe.")
    averaged, remarks = _means(maps) if means is None else (means, [])
    by_map = verdicts_of_maps(maps) | dict(verdicts or {})
    parts = [map_ for map_ in maps if not map_.is_mean]
    chosen = list(choices or [])
    covered = {choice.model for choice in chosen}
    alone = Counter((map_.model, map_.policy) for map_ in parts)
    sole = [map_ for map_ in parts if alone[map_.model, map_.policy] == 1]
    effects = pooled_effects(maps, by_map)
    chosen += [c for c in choices_of_maps([*averaged, *sole], by_map, effects) if c.model not in covered]
    described = _described([*maps, *averaged], by_map)
    return Description(
        findings=tuple(findings),
        maps=tuple(described[: len(maps)]),
        means=tuple(described[len(maps) :]),
        across=tuple(_across(parts, by_map)),
        comparisons=_adjusted([*comparisons, *_models_by_bound(parts, by_map)]),
        choices=tuple(chosen),
        notes=(*notes, *remarks, *_scales(parts)),
        effects=tuple(effects),
        peak_p=peak_of_bare_maps(parts),
    )


def _means(maps: Sequence[Map]) -> tuple[Sequence[Map], list[Note]]:
    try:
        return mean_maps(maps), []
    except KvatlasError as error:
        return [], [Note(NoteKind.LEFT_OUT, f"No means over benchmarks: {error}")]


def _described(maps: Sequence[Map], by_map: Mapping[MapName, Verdict]) -> list[MapDescription]:
    """The maps with Holm's p-values over all trends of all of them."""
    described = [MapDescription(map_, by_map.get(map_.name), {}) for map_ in maps]
    trends = [
        (number, effect.axis, rounded_p(effect.trend.p))
        for number, entry in enumerate(described)
        for effect in (entry.verdict.effects if entry.verdict else ())
        if effect.trend is not None
    ]
    adjusted: dict[int, dict[str, float]] = {}
    for (number, axis, _), p in zip(trends, holm([p for _, _, p in trends]), strict=True):
        adjusted.setdefault(number, {})[axis] = p
    return [replace(entry, holm=adjusted.get(number, {})) for number, entry in enumerate(described)]


def _across(maps: Sequence[Map], by_map: Mapping[MapName, Verdict]) -> list[Across]:
    groups: dict[tuple[str, str], list[Map]] = {}
    for map_ in maps:
        if map_.name in by_map:
            groups.setdefault((map_.model, map_.policy), []).append(map_)
    return [
        Across(
            model,
            policy,
            tuple(map_.benchmark for map_ in group),
            tuple(map_.benchmark for map_ in group if by_map[map_.name].evidence),
            tuple(
                coord
                for coord in by_map[group[0].name].plateau
                if all(coord in by_map[map_.name].plateau for map_ in group)
            ),
            (group[0].axes[0][0], group[0].axes[1][0]),
            len(group[0].cells),
        )
        for (model, policy), group in groups.items()
        if len(group) > 1
    ]


def _adjusted(comparisons: Sequence[Comparison]) -> tuple[AdjustedComparison, ...]:
    p = [rounded_p(comparison.difference.p) for comparison in comparisons]
    return tuple(map(AdjustedComparison, comparisons, holm(p), benjamini_hochberg(p)))


def _models_by_bound(maps: Sequence[Map], by_map: Mapping[MapName, Verdict]) -> list[Comparison]:
    """Comparisons between the models of maps without traces, by the binomial bound, over the benchmarks of both."""
    groups: dict[tuple[str, str], dict[str, Map]] = {}
    for map_ in maps:
        if map_.name in by_map and by_map[map_.name].basis is Basis.BOUND:
            groups.setdefault((map_.model, map_.policy), {})[map_.benchmark] = map_
    names = list(groups)
    made = []
    for index, (model, policy) in enumerate(names):
        for other, theirs in names[index + 1 :]:
            shared = [name for name in groups[model, policy] if name in groups[other, theirs]]
            if model == other or policy != theirs or not shared:
                continue
            mine = [groups[model, policy][name] for name in shared]
            between = model_difference(mine, [groups[other, theirs][name] for name in shared])
            if between is not None:
                problems = sum(next(iter(map_.cells.values())).estimate.problems or 0 for map_ in mine)
                made.append(
                    Comparison(
                        f"{model}, {other}",
                        shared[0] if len(shared) == 1 else f"{len(shared)} benchmarks",
                        mine[0].metric,
                        *(model, other),
                        sum(len(map_.cells) for map_ in mine),
                        Difference(between.value, between.low, between.high, between.p, problems),
                        f"by the binomial bound, policy {policy}" if policy else "by the binomial bound",
                    )
                )
    return made


def _scales(maps: Sequence[Map]) -> list[Note]:
    """A warning where panels drawn each on its own colour scale would show one value in several colours."""
    scales = {map_.name: scale([map_]) for map_ in maps}
    if len({tuple(round(end, 1) for end in ends) for ends in scales.values()}) < 2:
        return []
    low, *_, high = sorted(scales.items(), key=lambda item: sum(item[1]))
    text = (
        f"Panels have unlike colour scales, from {low[1][0]:.1f} to {low[1][1]:.1f} ({low[0].benchmark}) up to "
        f"{high[1][0]:.1f} to {high[1][1]:.1f} ({high[0].benchmark}): equal colours are unequal values; "
        "kvatlas map --shared draws one scale"
    )
    return [Note(NoteKind.SCALES, text)]


def rounded_p(p: float) -> float:
    """A p-value as files have it."""
    return round(p, 6)


def p_text(p: float) -> str:
    """A p-value to three places; below that, a bound."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
