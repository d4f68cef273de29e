"""What a model says it can do: the ranges of problems in the `kvatlas_claims.json` beside its weights, if there is one.

By family of benchmarks, then by what its problems are about: `{"CHAIN": {"n": [3, 13]}, "SEQBENCH": {"grid": ["4x4",
"6x6"], "B": [0, 1]}}`. Both ends are within; of a grid both sides are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvatlas.core import Problem

FILE = "kvatlas_claims.json"


@dataclass(frozen=True)
class Claims:
    """Ranges by family and by name in `Problem.about`; none for a model that claims nothing."""

    ranges: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Claims:
        """Those of a model's folder."""
        file = folder / FILE
        return cls(json.loads(file.read_text()) if file.is_file() else {})

    def __str__(self) -> str:
        def words(name: str, low: Any, high: Any) -> str:
            return f"{name} {low}" if low == high else f"{name} {low} to {high}"

        return "; ".join(
            f"{family} with {', '.join(words(name, *ends) for name, ends in ranges.items())}"
            for family, ranges in self.ranges.items()
        )

    def outside(self, benchmark: str, problems: Sequence[Problem]) -> int:
        """How many problems of a benchmark are outside; none if nothing is claimed."""
        family = next((self.ranges[name] for name in self.ranges if benchmark.startswith(name)), None)
        if family is None:
            return len(problems) if self.ranges else 0
        return sum(
            not all(_within(problem.about.get(name, low), low, high) for name, (low, high) in family.items())
            for problem in problems
        )


def _within(value: Any, low: Any, high: Any) -> bool:
    """Whether a number, or each side of a grid `6x6`, lies between two of its kind."""
    parts = ([float(part) for part in re.findall(r"[\d.]+", str(item))] for item in (low, value, high))
    return all(least <= own <= most for least, own, most in zip(*parts, strict=True))
