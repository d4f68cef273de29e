from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvatlas.benchmarks.answers import letter
from kvatlas.benchmarks.public import Questions
from kvatlas.core import Problem

Pair = tuple[str, str, str, bool]


def pairs() -> list[Pair]:
    """Kind, reference, what a model wrote, and whether it is the same."""
    kind, result = "", []
    for line in (Path(__file__).parent / "answer_pairs.txt").read_text(encoding="utf-8").split("\n"):
        if line.startswith("# "):
            kind = line[2:]
        elif line.startswith(("= ", "! ")):
            reference, answer = line[2:].split(" :: ")
            text = answer.replace(r"\n", "\n") if kind.startswith("texts") else rf"\boxed{{{answer}}}"
            result.append((kind, reference, text, line[0] == "="))
    return result


def right(pair: Pair) -> bool:
    _, reference, text, same = pair
    return Questions("T", file="unused").grade(Problem("p", "q", reference, {}), text).correct is same


def test_answers_of_all_kinds_are_judged_as_a_person_judges_them() -> None:
    everything = pairs()
    assert len(everything) > 380
    wrong = [pair for pair in everything if not right(pair)]
    assert len(wrong) <= 0.04 * len(everything), wrong
    assert sum(not same for *_, same in wrong) <= 2, wrong


@pytest.mark.parametrize(
    "text", ["(" * 20_000, "answer" + " " * 20_000, r"\boxed{" + "([" * 10_000 + "}", "{" * 20_000]
)
def test_the_letter_of_a_text_takes_linear_time(text: str) -> None:
    began = time.process_time()
    assert letter(text, ("a", "b", "c", "d")) is None
    assert time.process_time() - began < 2
