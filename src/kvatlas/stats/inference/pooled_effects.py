"""What the axes do over all benchmarks: by problem where there are traces, by permutation on maps of bare Pass@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvatlas.core import Map, MapName
from kvatlas.stats.estimates.pass_at_1 import LEVEL
from kvatlas.stats.inference.axis_permutation import axis_effect, peak_p
from kvatlas.stats.inference.map_tests import Basis, Verdict
from kvatlas.stats.inference.resampling import Contrast, holm


@dataclass(frozen=True)
class PooledEffect:
    """One joint test of an axis: each level against the mean of the others, with limits that hold together.

    `over` says what was pooled, `adjusted_p` allows for all effects that are tested. Of maps of bare Pass@1 `maps` are
    how many and `below` counts, by level, those in which it lies below the others.
    """

    axis: str
    over: str
    p: float
    adjusted_p: float
    levels: tuple[tuple[Any, Contrast], ...]
    maps: int = 0
    below: tuple[int, ...] = ()

    @property
    def supported(self) -> bool:
        """Whether some level differs, after the adjustment."""
        return self.adjusted_p < LEVEL

    @property
    def worse(self) -> tuple[Any, ...]:
        """The levels that lie below the others, of a supported effect."""
        return tuple(
            level for level, contrast in self.levels if self.supported and contrast.p < LEVEL and contrast.value < 0
        )


def pooled_effects(maps: Sequence[Map], verdicts: Mapping[MapName, Verdict]) -> list[PooledEffect]:
    """The effects of all axes, adjusted together (Holm): of each model and policy with traces, over its benchmarks,
    and of bare maps with the same axes, over benchmarks and models."""
    made = [effect for map_ in maps for effect in _by_problem(map_, maps, verdicts)]
    for group in bare_groups(maps):
        made += [_permuted(group, side) for side in (0, 1)]
    adjusted = holm([effect.p for effect in made])
    return [replace(effect, adjusted_p=p) for effect, p in zip(made, adjusted, strict=True)]


def peak_of_bare_maps(maps: Sequence[Map]) -> float | None:
    """The p-value of "no single cell stands out" over all bare maps with the axes of the first; None without any."""
    groups = bare_groups(maps)
    return peak_p(_values(groups[0])) if groups else None


def bare_groups(maps: Sequence[Map]) -> list[list[Map]]:
    """Single maps without traces and without holes, by their axes."""
    groups: dict[Any, list[Map]] = {}
    for map_ in maps:
        whole = len(map_.cells) == len(map_.axes[0][1]) * len(map_.axes[1][1])
        if not map_.is_mean and map_.validity is None and whole and min(len(values) for _, values in map_.axes) > 1:
            groups.setdefault(map_.axes, []).append(map_)
    return list(groups.values())


def _by_problem(map_: Map, maps: Sequence[Map], verdicts: Mapping[MapName, Verdict]) -> list[PooledEffect]:
    """The effects of a mean over benchmarks, or of the only benchmark that a model and policy have."""
    parts = [other for other in maps if (other.model, other.policy) == (map_.model, map_.policy) and not other.is_mean]
    if map_.is_mean or map_ is not parts[0]:
        return []
    name = map_.name if len(parts) == 1 else MapName.of_mean(map_.model, len(parts), map_.policy)
    verdict = verdicts.get(name)
    if verdict is None or verdict.basis is not Basis.TRACES:
        return []
    over = f"{map_.model} | {name.benchmark} | {map_.policy}"
    return [PooledEffect(effect.axis, over, effect.p, effect.p, effect.levels) for effect in verdict.effects]


def _permuted(group: Sequence[Map], side: int) -> PooledEffect:
    values = _values(group)
    effect = axis_effect(values if side == 1 else values.transpose(0, 2, 1))
    axis, levels = group[0].axes[side]
    contrasts = [
        Contrast(*map(float, numbers))
        for numbers in zip(effect.value, effect.low, effect.high, effect.level_p, strict=True)
    ]
    over = f"{len(group)} maps" if len(group) > 1 else "1 map"
    return PooledEffect(
        axis, over, effect.p, effect.p, tuple(zip(levels, contrasts, strict=True)), effect.maps, effect.below
    )


def _values(group: Sequence[Map]) -> np.ndarray[Any, np.dtype[np.float64]]:
    (_, rows), (_, columns) = group[0].axes
    return np.array([[[map_.cells[r, c].estimate.value for c in columns] for r in rows] for map_ in group])
