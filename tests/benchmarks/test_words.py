"""WORDS problems: what they say holds, one way leads to the number, and answers are judged by it."""

from __future__ import annotations

import random
import re

import pytest

from kvatlas.benchmarks import find
from kvatlas.benchmarks.words import MOST, draw
from kvatlas.core import KvatlasError, Status


def solved(question: str) -> int:
    """The number asked for, from the text alone, by a solver of its own."""
    counts = {name: int(count) for name, count in re.findall(r"(\w+) has (\d+) (?!more|fewer)\w+\.", question)}
    compared = re.findall(r"(\w+) has (\d+) (more|fewer) \w+ than (\w+)\.", question)
    for _ in compared:
        for name, difference, way, than in compared:
            if than in counts:
                counts[name] = counts[than] + int(difference) * (1 if way == "more" else -1)
    asked = re.search(r"does (\w+) have\?", question)
    assert asked
    return counts[asked[1]]


def test_every_problem_has_the_answer_that_it_says() -> None:
    benchmark = find("WORDS2-14")
    for problem in benchmark.problems(60):
        assert problem.answer.endswith(f"Answer: {solved(problem.question)}")
        assert benchmark.grade(problem, problem.answer).correct
    assert benchmark.problems(2) == benchmark.problems(60)[:2]
    assert [problem.about["n"] for problem in benchmark.problems(14)] == [*range(2, 15), 2]
    assert benchmark.prompt(problem) == problem.question


def test_counts_stay_small_and_people_are_told_apart() -> None:
    for seed in range(200):
        story = draw(9, random.Random(seed))
        assert len({fact.name for fact in story.told}) == len(story.told) == 15
        assert all(1 <= fact.count <= MOST for fact in story.told)
        assert story.way[-1].things == story.way[0].things


@pytest.mark.parametrize(
    ("answer", "correct", "progress", "status"),
    [
        ("Tom 5, Rosa 9, Ben 6. Answer: 6", True, 1.0, Status.OK),
        ("Tom 5, Rosa 8, Ben 6. Answer: 6", True, 1 / 3, Status.OK),
        ("Tom 5, Rosa 9, Ben 7. Answer: 7", False, 2 / 3, Status.OK),
        ("Ben has 6 marbles.", True, 0.0, Status.OK),
        ("6", True, 0.0, Status.OK),
        ("Tom: 5, Rosa: 9. The answer is **6**.", True, 2 / 3, Status.OK),
        ("I cannot tell.", False, 0.0, Status.NO_ANSWER),
        ("", False, 0.0, Status.NO_ANSWER),
    ],
)
def test_answers(answer: str, correct: bool, progress: float, status: Status) -> None:
    benchmark = find("WORDS3")
    problem = benchmark.problems(1)[0]
    problem = type(problem)(problem.id, problem.question, "Tom 5, Rosa 9, Ben 6. Answer: 6", {})
    grade = benchmark.grade(problem, answer)
    assert (grade.correct, grade.progress, grade.status) == (correct, pytest.approx(progress), status)


@pytest.mark.parametrize("name", ["WORDS", "WORDS1", "WORDS21", "WORDS9-4", "WORDS4-4", "WORDSx"])
def test_sizes_that_do_not_exist(name: str) -> None:
    with pytest.raises(KvatlasError, match="valid are WORDS2 to WORDS20, and ranges"):
        find(name)
