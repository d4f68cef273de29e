from __future__ import annotations

import re

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Status

ANSWER = "j = 6 , t = 4 , y = 8 , o = 0 , v = 0 , f = 6 , u = 4 , c = 8 , l = 0 , r = 0"


def solve(question: str) -> dict[str, int]:
    """Evaluate a question's definitions without looking at how they were made."""
    body, _, queries = question.partition(" ? ")
    definitions = dict(part.split(" = ") for part in body.split(" ; "))

    def value(name: str) -> int:
        words = definitions[name].split()
        if len(words) == 1:
            return int(words[0])
        left, operator, right = words
        return (value(left) + (1 if operator == "+" else -1) * value(right)) % 10

    return {name: value(name) for name in queries.split(" , ")}


@pytest.mark.parametrize("size", [3, 6, 14, 26])
def test_reference_answers_solve_their_problems(size: int) -> None:
    for problem in find(f"CHAIN{size}").problems(40):
        assert problem.question.count("=") == size
        stated = {name: int(digit) for name, digit in re.findall(r"([a-z]) = (\d)", problem.answer)}
        assert stated == solve(problem.question)


def test_problems_are_the_same_everywhere_and_any_number_can_be_had() -> None:
    chain = find("CHAIN12")
    assert chain.problems(5) == chain.problems(400)[:5]
    assert len(chain.problems()) == 300
    assert len({problem.question for problem in chain.problems()}) == 300
    assert chain.problems(1)[0].question.startswith("n = 6 ; t = o - j ; f = n - m ;")
    assert chain.problems(1)[0].answer == ANSWER


def test_a_range_of_sizes_takes_their_problems_in_turn() -> None:
    """So that a part of any length is as hard as the whole, and no problem is new beside those of its sizes."""
    mixed = find("CHAIN8-10").problems(7)
    single = [find(f"CHAIN{size}").problems(7)[i] for i, size in enumerate([8, 9, 10, 8, 9, 10, 8])]
    assert [(item.question, item.answer, item.about) for item in mixed] == [
        (item.question, item.answer, item.about) for item in single
    ]
    assert [item.about["n"] for item in mixed] == [8, 9, 10, 8, 9, 10, 8]
    assert [item.id for item in mixed[:2]] == ["CHAIN8-10-0000", "CHAIN8-10-0001"]
    assert find("CHAIN8-10").name == "CHAIN8-10"


@pytest.mark.parametrize(
    ("answer", "correct", "progress", "status"),
    [
        (ANSWER, True, 1.0, Status.OK),
        (" , ".join(reversed(ANSWER.split(" , "))), True, 1.0, Status.OK),
        (ANSWER.replace("r = 0", "r = 1"), False, 0.9, Status.OK),
        ("j = 6", False, 0.1, Status.OK),
        (f"j = 7 , {ANSWER}", True, 1.0, Status.OK),
        (f"{ANSWER} , j = 7", False, 0.9, Status.OK),
        ("z = 3", False, 0.0, Status.OK),
        (ANSWER.replace("j = 6", "j = 60"), False, 0.9, Status.OK),
        ("", False, 0.0, Status.NO_ANSWER),
        ("six", False, 0.0, Status.NO_ANSWER),
    ],
)
def test_grading(answer: str, correct: bool, progress: float, status: Status) -> None:
    chain = find("CHAIN12")
    grade = chain.grade(chain.problems(1)[0], answer)
    assert (grade.correct, grade.progress, grade.status) == (correct, progress, status)


@pytest.mark.parametrize(
    "name",
    ["CHAIN", "CHAIN2", "CHAIN27", "CHAINx", "CHAIN-3", "CHAIN8-", "CHAIN9-8", "CHAIN8-8", "CHAIN8-27", "CHAIN2-8"],
)
def test_a_size_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(KvatlasError, match="valid are CHAIN3 to CHAIN26"):
        find(name)
