"""What a run is to hold: the cells that a sweep promised, against which missing ones are noticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvatlas.core import Setting


@dataclass(frozen=True)
class Expected:
    """One cell that a run is to hold: every problem, `samples` times. `baseline` cells are outside the grid."""

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
    `allocation` is empty where all cells are to have all problems; an adaptive sweep tells its `blocks`, the number of
    `problems` of each benchmark, and by model whether and why it `stopped`. Its cells have the first so many problems
    of one order each, and what they are promised grows while it runs.
    """

    axes: tuple[tuple[str, tuple[Any, ...]], ...]
    expected: tuple[Expected, ...]
    spec: Mapping[str, Any]
    provenance: Mapping[str, Any]
    about: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    allocation: Mapping[str, Any] = field(default_factory=dict)
    screened: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data for the store; problem lists are written once per benchmark, and how many of them a cell has."""
        problems: dict[str, list[str]] = {}
        for cell in self.expected:
            if len(cell.problems) > len(problems.get(cell.benchmark, ())):
                problems[cell.benchmark] = list(cell.problems)
        return {
            "axes": [[name, list(values)] for name, values in self.axes],
            "expected": [
                [
                    *(c.model, c.benchmark, c.setting.policy, c.setting.values, c.run_key, c.samples, c.baseline),
                    len(c.problems),
                ]
                for c in self.expected
            ],
            "problems": problems,
            "spec": dict(self.spec),
            "provenance": dict(self.provenance),
            "about": {
                name: {id_: dict(about) for id_, about in problems.items()} for name, problems in self.about.items()
            },
            "allocation": dict(self.allocation),
            "screened": self.screened,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_json`."""
        problems = {benchmark: tuple(ids) for benchmark, ids in data["problems"].items()}
        expected = tuple(
            Expected(
                *(model, benchmark, Setting.of(policy, **values), key),
                problems[benchmark][: rest[0] if rest else None],
                *(samples, baseline),
            )
            for model, benchmark, policy, values, key, samples, baseline, *rest in data["expected"]
        )
        axes = tuple((name, tuple(values)) for name, values in data["axes"])
        return cls(
            axes,
            expected,
            data["spec"],
            data["provenance"],
            data.get("about", {}),
            data.get("allocation", {}),
            data.get("screened", False),
        )
