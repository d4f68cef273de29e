"""What the thinking adapter learns from: sums that are right, and answers that are graded so."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from kvatlas.benchmarks import find
from kvatlas.benchmarks.words import draw

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm"


@pytest.mark.parametrize("size", [2, 5, 9, 14])
def test_reference_solutions(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    from solutions import solution

    benchmark = find(f"WORDS{size}")
    for index in range(10):
        story = draw(size, random.Random(f"kvatlas words {size} test {index}"))
        done = solution(story, random.Random(index))
        assert benchmark.grade(benchmark.problem(index), done.answer).correct
        text, counts = "".join(done.pieces), {fact.name: fact.count for fact in story.way}
        sums = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", text)
        assert len(sums) >= size - 1
        assert all(int(a) + int(b) * (1 if sign == "+" else -1) == int(c) for a, sign, b, c in sums)
        # Whom a piece states a count of, and that the piece holds it.
        assert {name for name, _ in done.results} == set(counts)
        for name, piece in done.results:
            assert re.search(rf"\b{counts[name]}\b", done.pieces[piece])
    sys.modules.pop("solutions")
