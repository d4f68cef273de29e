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


#: Each was judged otherwise once.
FAULTS: list[tuple[str, str, bool]] = [
    (r"\{x \mid -2 \le x < 1\}", "1", False),
    (r"\{x|-2<=x<1\}", "[-2,1)", True),
    (r"\{x \mid x > 2\}", r"\{x | x < 2\}", False),
    ("5x-7y+11z+4=0", "0", False),
    ("y=-2x+5", "2x+y-5=0", True),
    (r"0.5\%", r"50\%", False),
    ("a=1,b=2", "a=2,b=1", False),
    ("2:3:4", "2:4:3", False),
    ("(-2,1)", "-2,1", False),
    (r"5\text{ cm}", r"5\text{ m}", False),
    (r"25", r"25\text{ marbles}", True),
    (r"\frac{1}{3}", r"0.\overline{3}", True),
    (r"0.1\overline{6}", r"\frac{1}{6}", True),
    (r"\begin{pmatrix}\frac12\\3\end{pmatrix}", r"\begin{pmatrix}0.5\\[4pt]3\end{pmatrix}", True),
    ("32", "£32", True),
    (r"\frac{1}{6}", r"P(A\cap B)=\frac{1}{6}", True),
]


#: Their neighbours, which were right and stay so.
NEIGHBOURS: list[tuple[str, str, bool]] = [
    (r"\{x|-2<=x<1\}", "1", False),
    (r"\{x|x>2\}", r"\{x|x<2\}", False),
    (r"\{x|x=2k+1, k\in Z\}", "1", False),
    (r"60\text{ mph}", r"60\text{ miles per hour}", True),
    (r"25", r"25\text{ thousand}", False),
]


@pytest.mark.parametrize(("reference", "answer", "same"), [*FAULTS, *NEIGHBOURS])
def test_each_known_fault(reference: str, answer: str, same: bool) -> None:
    assert right(("", reference, rf"\boxed{{{answer}}}", same))


@pytest.mark.parametrize(
    ("reference", "text", "same"),
    [
        ("1,-2", r"The roots are \boxed{1} and \boxed{-2}.", True),
        ("-2", r"The roots are \boxed{1} and \boxed{-2}.", False),
        ("-2", r"First \boxed{1}. Then \boxed{-2}.", True),
        ("34", "Final Answer: The largest n is 34", True),
        ("34", "**Final Answer**\n\n34", True),
        ("34", "The answer is 34 (that is even).", False),
    ],
)
def test_lists_of_boxes_and_answers_in_sentences(reference: str, text: str, same: bool) -> None:
    assert right(("", reference, text, same))


@pytest.mark.parametrize(
    "text", ["(" * 20_000, "answer" + " " * 20_000, r"\boxed{" + "([" * 10_000 + "}", "{" * 20_000]
)
def test_the_letter_of_a_text_takes_linear_time(text: str) -> None:
    began = time.perf_counter()
    assert letter(text, ("a", "b", "c", "d")) is None
    assert time.perf_counter() - began < 0.2
