"""What the thinking adapter learns from: sums that are right, and answers that are graded so."""

from __future__ import annotations

import random
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer

from kvatlas.benchmarks import find
from kvatlas.benchmarks.words import draw
from kvatlas.sweeps import parse_spec

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


def test_drills_are_right_and_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    spec = spec_from_file_location("smollm_train", RECIPE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    train = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "smollm_train", train)
    spec.loader.exec_module(train)
    tokenizer = ByT5Tokenizer()
    row = train.Writer(tokenizer).drill(random.Random(0))
    text = tokenizer.decode(row.words[row.prompt :])
    sums = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)\.", text)
    assert len(sums) == train.DRILL_SUMS
    assert all(int(a) + int(b) * (1 if sign == "+" else -1) == int(c) for a, sign, b, c in sums)
    assert row.results == ()
    for name in ("solutions", "masks", "examples"):
        sys.modules.pop(name, None)


def test_panels_are_sweeps_in_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    import panels

    for name, (budget, *_) in panels.PANELS.items():
        spec = parse_spec(panels.spec(name))
        assert find(name).name == spec.benchmarks[0].name == name
        windows = spec.axes["local_window"]
        assert [round(12 * window / budget) for window in windows] == [1, 4, 7]
        assert {item.policy for item in spec.baseline} == {"full", *panels.RIVALS}
    sys.modules.pop("panels")
