"""The grid of a run: which two axes a map has, and which cells belong to one map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvatlas.core import KvatlasError, MapName, Setting
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.cells import CellTraces

Axes = tuple[str, str]
#: The cells of one map-to-be.
Groups = dict[MapName, list[CellTraces]]


def map_axes(manifest: Manifest, fix: Mapping[str, Any] | None = None) -> Axes:
    """The names of the (vertical, horizontal) axes: the two parameters that the run varies and `fix` does not hold.

    Raises KvatlasError, naming them, if there are more or fewer, or if `fix` names an axis or value that is not there.
    """
    fixed = dict(fix or {})
    values = dict(manifest.axes)
    for name, value in fixed.items():
        if name not in values:
            raise KvatlasError(f"The run has no axis {name!r} to fix; its axes are: {', '.join(values) or 'none'}.")
        if value not in values[name]:
            raise KvatlasError(f"{name} cannot be fixed to {value!r}; the run has: {_listed(values[name])}.")
    names = varied(manifest, fixed)
    if len(names) > 2:
        example = f"{names[-1]}={values[names[-1]][0]}"
        raise KvatlasError(
            f"A map has two axes and this run varies {len(names)} ({', '.join(names)}); "
            f"fix all but two of them to one value each, for example {example}."
        )
    if len(names) < 2:
        raise KvatlasError(
            f"A map needs two axes with at least two values each; this run varies {names[0] if names else 'none'}."
        )
    return names[0], names[1]


def varied(manifest: Manifest, fix: Mapping[str, Any]) -> list[str]:
    """The parameters that a run varies and `fix` does not hold to one value."""
    return [name for name, values in manifest.axes if len(set(values)) > 1 and name not in fix]


def grid_groups(cells: Iterable[CellTraces], axes: Axes, fix: Mapping[str, Any] | None = None) -> Groups:
    """The cells of the grid, without baselines, by map, in the order of the manifest.

    A policy counts where it has at least two values on both axes. A policy that is there with several values of
    another parameter gives several groups, told apart by that parameter in the label.
    """
    fixed = dict(fix or {})
    variants: dict[tuple[str, str], list[Setting]] = {}
    by_rest: dict[tuple[str, str, str], tuple[Setting, list[CellTraces]]] = {}
    for cell in cells:
        values = cell.expected.setting.values
        on_grid = not cell.expected.baseline and all(axis in values for axis in axes)
        if not on_grid or any(name in values and values[name] != value for name, value in fixed.items()):
            continue
        rest = Setting.of(
            cell.expected.setting.policy, **{name: value for name, value in values.items() if name not in axes}
        )
        key = (cell.expected.model, cell.expected.benchmark, rest.id)
        by_rest.setdefault(key, (rest, []))[1].append(cell)
        known = variants.setdefault((cell.expected.model, rest.policy), [])
        if rest not in known:
            known.append(rest)
    return {
        MapName(model, benchmark, _label(rest, variants[model, rest.policy])): group
        for (model, benchmark, _), (rest, group) in by_rest.items()
        if all(len({cell.expected.setting.values[axis] for cell in group}) > 1 for axis in axes)
    }


def _label(rest: Setting, variants: list[Setting]) -> str:
    """The policy's name, with the parameters in which its variants differ."""
    names = [name for name in rest.values if len({repr(other.values.get(name)) for other in variants}) > 1]
    return str(Setting.of(rest.policy, **{name: rest.values[name] for name in names}))


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def short_names(settings: Iterable[Setting]) -> dict[str, str]:
    """Settings by id, each with its policy and those parameters alone in which the policy's settings differ."""
    by_policy: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        by_policy.setdefault(setting.policy, {})[setting.id] = setting
    names: dict[str, str] = {}
    for policy, group in by_policy.items():
        every = dict.fromkeys(name for setting in group.values() for name in setting.values)
        told = [name for name in every if len({repr(setting.values.get(name)) for setting in group.values()}) > 1]
        for identity, setting in group.items():
            values = {name: value for name, value in setting.values.items() if name in told}
            names[identity] = str(Setting.of(policy, **values))
    return names
