"""Graders that follow others' code, beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvatlas.benchmarks import find, identity
from kvatlas.core import KvatlasError, Status
from kvatlas.sweeps import parse_spec

CASES = [
    # reference, answer, what ours says, what DynTS's code says
    ("7", r"So \boxed{7}.", True, True),
    ("7", r"First \boxed{7}, then \boxed{8}.", False, False),
    ("1234", "We add them and get 1,234", False, True),
    ("7", "It is 7, since 2 + 5 are 7, as there are 3 of them", False, False),
    ("7", "The answer is 7.", True, True),
    ("0.5", r"\boxed{50\%}", True, True),
    ("1000", r"\boxed{1000.05}", False, True),
    ("1000", r"\boxed{1001}", False, False),
    (r"\frac{1}{2}x+1", r"\boxed{1+\frac{x}{2}}", True, True),
]


def grade(tmp_path: Path, row: dict[str, object], answer: str, grader: str) -> tuple[bool, str | None, Status]:
    (tmp_path / "one.json").write_text(json.dumps([row]))
    benchmark = find(f"file:{tmp_path / 'one.json'}", grader=grader)
    result = benchmark.grade(benchmark.problems()[0], answer)
    return result.correct, result.answer, result.status


@pytest.mark.parametrize(("reference", "answer", "ours", "theirs"), CASES)
def test_short_answers(tmp_path: Path, reference: str, answer: str, ours: bool, theirs: bool) -> None:
    row = {"question": "What?", "answer": reference}
    assert grade(tmp_path, row, answer, "kvatlas")[0] is ours
    assert grade(tmp_path, row, answer, "dynts")[0] is theirs


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"\boxed{C}", "C"),
        ("Both B and C hold, so (D)", "D"),
        ("The answer is B, as D is wrong", "B"),
        ("C it is, what a day", "A"),  # Upper case is taken before letters are looked for.
        ("nothing", None),
    ],
)
def test_choices_as_dynts_finds_them(tmp_path: Path, answer: str, found: str | None) -> None:
    row = {"question": "Which?", "options": ["1", "2", "3", "4"], "answer": "C"}
    assert grade(tmp_path, row, answer, "dynts")[:2] == (found == "C", found)


def test_math_verify_alone(tmp_path: Path) -> None:
    row = {"question": "What?", "answer": "7"}
    assert grade(tmp_path, row, r"So \boxed{7}.", "math-verify")[0]
    assert not grade(tmp_path, row, r"So \boxed{8}.", "math-verify")[0]
    # Ours counts an unclosed box, math-verify reads none.
    assert grade(tmp_path, row, r"So \boxed{7", "kvatlas")[0]


def test_a_spec_names_prompt_and_grader_and_both_are_part_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([{"question": "What?", "answer": "7"}]))
    entries = [{}, {"prompt": "dynts"}, {"prompt": "dynts", "grader": "dynts"}, {"grader": "math-verify"}]
    results = [
        parse_spec({"models": ["embedded:tiny-llama"], "benchmarks": [{"name": "ONE", "file": str(path), **entry}]})
        .benchmarks[0]
        .find()
        for entry in entries
    ]
    assert len({json.dumps(identity(benchmark)) for benchmark in results}) == len(entries)
    assert results[1].prompt(results[1].problems()[0]) == "What?"
    with pytest.raises(KvatlasError, match="Unknown grader 'mine'; valid are kvatlas, dynts, math-verify"):
        find(f"file:{path}", grader="mine")
