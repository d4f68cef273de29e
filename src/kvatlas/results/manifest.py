"""What a run is to hold: the cells that a sweep promised, against which missing ones are noticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvatlas.core import Setting


@dataclass(frozen=True)
class Expected:
    """One cell that a run is to hold: every problem, `samples` times. `baseline` cells stand beside the grid."""

    model: str
    benchmark: str
    setting: Setting
    run_key: str
    problems: tuple[str, ...]
    samples: int
    baseline: bool


@dataclass(frozen=True)
class Manifest:
    """The promise of one sweep. `axes` are the grid's parameters with their values, the first one vertical.

    `about[benchmark][problem]` is what the benchmark says about a problem's difficulty (a maze's L, B, N, S).
    """

    axes: tuple[tuple[str, tuple[Any, ...]], ...]
    expected: tuple[Expected, ...]
    spec: Mapping[str, Any]
    provenance: Mapping[str, Any]
    about: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the store; problem lists are written once per benchmark."""
        problems = {cell.benchmark: list(cell.problems) for cell in self.expected}
        return {
            "axes": [[name, list(values)] for name, values in self.axes],
            "expected": [
                [c.model, c.benchmark, c.setting.policy, c.setting.values, c.run_key, c.samples, c.baseline]
                for c in self.expected
            ],
            "problems": problems,
            "spec": dict(self.spec),
            "provenance": dict(self.provenance),
            "about": {name: {id_: dict(about) for id_, about in each.items()} for name, each in self.about.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_json`."""
        problems = {benchmark: tuple(ids) for benchmark, ids in data["problems"].items()}
        expected = tuple(
            Expected(model, benchmark, Setting.of(policy, **values), key, problems[benchmark], samples, baseline)
            for model, benchmark, policy, values, key, samples, baseline in data["expected"]
        )
        axes = tuple((name, tuple(values)) for name, values in data["axes"])
        return cls(axes, expected, data["spec"], data["provenance"], data.get("about", {}))
