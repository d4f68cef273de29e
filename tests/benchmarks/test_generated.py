"""CHAIN, WORDS and LEDGER: problems hold the answers that they say, and answers are judged by them."""

import re

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Problem, Status

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
    for problem in find(f"CHAIN{size}").problems(15):
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


def balances(question: str) -> tuple[dict[str, int], list[str]]:
    """Book a ledger from the text alone: its balances, and the lines in question."""
    found = re.fullmatch(r"A1 = (\d) ; (.*) to (\w\d) \? ?(.*?)(?: ?at (\d))?", question)
    assert found
    balance = int(found[1])
    amounts = [int(part[1]) for part in found[2].split(" , ")]
    booked = {"A1": balance}
    while found[3] not in booked:
        line = "ABCDEF"[len(booked) // 6] + str(len(booked) % 6 + 1)
        amount = amounts[len(booked) % 6]
        balance = (balance - amount if balance % 2 else balance + amount) % 10
        booked[line] = balance
    asked = [name for name in found[4].split(" , ") if name]
    if found[5]:
        asked.append(next(line for line, value in booked.items() if value == int(found[5])))
    return booked, asked


def test_every_ledger_has_the_answer_that_it_says() -> None:
    benchmark = find("LEDGER8-36")
    problems = benchmark.problems(116)
    for problem in problems:
        booked, asked = balances(problem.question)
        assert len(booked) == problem.about["n"]
        stated, _, sums = problem.answer.partition(" : ")
        assert stated == " , ".join(f"{line} = {booked[line]}" for line in asked)
        assert int(sums[-1]) == sum(booked[line] for line in asked) % 10
        assert 2 <= len(asked) <= 4
        assert benchmark.grade(problem, problem.answer).correct
    # Half of the problems ask for a line that only the thinking tells.
    assert 0.35 <= sum(" at " in problem.question for problem in problems) / len(problems) <= 0.65


LEDGER = "B5 = 1 , A3 = 7 , C2 = 8 : 1 + 7 = 8 , 8 + 8 = 6"
STORY = "Tom 5, Rosa 9, Ben 6. Answer: 6"


@pytest.mark.parametrize(
    ("reference", "answer", "correct", "progress", "status"),
    [
        (ANSWER, ANSWER, True, 1.0, Status.OK),
        (ANSWER, ANSWER.replace("r = 0", "r = 1"), False, 0.9, Status.OK),
        (ANSWER, "j = 6", False, 0.1, Status.OK),
        (ANSWER, f"j = 7 , {ANSWER}", True, 1.0, Status.OK),
        (ANSWER, f"{ANSWER} , j = 7", False, 0.9, Status.OK),
        (ANSWER, "z = 3", False, 0.0, Status.OK),
        (ANSWER, ANSWER.replace("j = 6", "j = 60"), False, 0.9, Status.OK),
        (ANSWER, "six", False, 0.0, Status.NO_ANSWER),
        (LEDGER, LEDGER, True, 1.0, Status.OK),
        (LEDGER, "C2 = 8 , A3 = 7 , B5 = 1 : 8 + 7 = 5 , 5 + 1 = 6", True, 1.0, Status.OK),
        (LEDGER, LEDGER[:-1] + "5", False, 1.0, Status.OK),
        (LEDGER, LEDGER.replace("A3 = 7", "A3 = 6"), False, 2 / 3, Status.OK),
        (LEDGER, "B5 = 1 , A3 = 7 , D1 = 8 : 1 + 7 = 8 , 8 + 8 = 6", False, 2 / 3, Status.OK),
        (LEDGER, "B5 = 1 , A3 = 7 : 1 + 7 = 8", False, 2 / 3, Status.OK),
        (LEDGER, "the balance is 6", False, 0.0, Status.NO_ANSWER),
        (STORY, STORY, True, 1.0, Status.OK),
        (STORY, "Tom 5, Rosa 8, Ben 6. Answer: 6", True, 1 / 3, Status.OK),
        (STORY, "Tom 5, Rosa 9, Ben 7. Answer: 7", False, 2 / 3, Status.OK),
        (STORY, "Ben has 6 marbles.", True, 0.0, Status.OK),
        (STORY, "Tom: 5, Rosa: 9. The answer is **6**.", True, 2 / 3, Status.OK),
        (STORY, "I cannot tell.", False, 0.0, Status.NO_ANSWER),
    ],
)
def test_grading(reference: str, answer: str, correct: bool, progress: float, status: Status) -> None:
    benchmark = find({ANSWER: "CHAIN12", LEDGER: "LEDGER16", STORY: "WORDS3"}[reference])
    grade = benchmark.grade(Problem("p", "q", reference), answer)
    assert (grade.correct, grade.progress, grade.status) == (correct, pytest.approx(progress), status)


@pytest.mark.parametrize("size", ["", "1", "37", "9-8", "8-8"])
@pytest.mark.parametrize(
    ("family", "valid"),
    [("CHAIN", "CHAIN3 to CHAIN26"), ("WORDS", "WORDS2 to WORDS20, and ran"), ("LEDGER", "LEDGER8 to LEDGER36")],
)
def test_a_size_that_is_not_there_is_refused(family: str, size: str, valid: str) -> None:
    with pytest.raises(KvatlasError, match=f"expected {valid}"):
        find(family + size)
