from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Problem
from tests.benchmarks.test_public import SHARED


def only(path: Path, row: dict[str, Any]) -> Problem:
    path.write_text(json.dumps([row]))
    (problem,) = find(f"file:{path}").problems()
    return problem


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_lines_end_at_line_feeds_only(tmp_path: Path, separator: str) -> None:
    row = {"question": f"One{separator}and one?", "answer": "2"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n", newline="")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow({**row, "question": row["question"] + "\nSay it."})
    for name, question in (("a.jsonl", row["question"]), ("a.csv", row["question"] + "\nSay it.")):
        (problem,) = find(f"file:{tmp_path / name}").problems()
        assert problem.question == question


@pytest.mark.parametrize("name", ["file:{}", "CODE@{}", "SEQBENCH@{}"])
@pytest.mark.parametrize("line", ['{"question": "Two?", "answer" "2"}', "{", '{"question": "Two?", "answer": NaN,}'])
def test_a_damaged_line_is_told_by_its_number(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'\n{{"question": "One?", "answer": "1"}}\n{line}\n')
    with pytest.raises(KvatlasError, match=r"cannot be read \(line 3: ") as caught:
        find(name.format(path)).problems()
    assert "line 1" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "answer", "letter"),
    [
        (["0", "1", "2", "3"], 2, "C"),
        (["1", "0", "3", "2"], 2, "C"),
        (["1", "0", "3", "2"], 2.0, "C"),
        (["1", "0", "3", "2"], "2", "D"),
        (["1", "4", "9", "16"], 16, "D"),
    ],
)
def test_an_integer_is_an_index_even_where_an_option_reads_so(
    tmp_path: Path, options: list[str], answer: Any, letter: str
) -> None:
    problem = only(tmp_path / "a.json", {"question": "Which?", "options": options, "answer": answer})
    assert (problem.answer, problem.about["choices"]) == (letter, options)


@pytest.mark.parametrize("names", ["ABCD", "abcd", ["option_a", "option_b", "option_c", "option_d"]])
def test_options_in_columns_of_their_letters(tmp_path: Path, names: Any) -> None:
    texts = ["red", "blue", "green", "grey"]
    problem = only(
        tmp_path / "a.json", {"question": "Which?", **dict(zip(names, texts, strict=True)), "answer": "green"}
    )
    assert (problem.answer, problem.about["choices"]) == ("C", texts)


@pytest.mark.parametrize(
    "question",
    ["Which one is it: (A) red (B) blue (C) $x^2$", "See (A) and (B).\nWhich?\nA) red\nB) blue\nC) $x^2$"],
)
@pytest.mark.parametrize("answer", ["C", "(C)", "$x^2$"])
def test_choices_inside_a_question_get_the_letter_prompt_and_grading(
    tmp_path: Path, question: str, answer: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": question, "answer": answer}]))
    benchmark = find(f"file:{path}")
    (problem,) = benchmark.problems()
    assert (problem.answer, problem.about["choices"]) == ("C", ["red", "blue", "$x^2$"])
    prompt = benchmark.prompt(problem)
    assert prompt.startswith(question + "\n\nPlease")
    assert "put the letter of your final answer" in prompt
    assert benchmark.grade(problem, r"\boxed{C}").correct
    assert benchmark.grade(problem, r"\boxed{x^2}").correct
    assert not benchmark.grade(problem, r"\boxed{\text{red}}").correct


def test_letters_in_a_question_that_are_no_choices_leave_it_as_it_is(tmp_path: Path) -> None:
    problem = only(tmp_path / "a.json", {"question": "Points (A) and (B) are 3 apart. How far is (A)?", "answer": "3"})
    assert (problem.answer, problem.about) == ("3", {})


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public problem files are not beside this checkout")
def test_choices_inside_questions_of_a_public_file_are_found() -> None:
    benchmark = find(f"GAOKAO2023EN@{SHARED / 'gaokao2023en.jsonl'}")
    inside = [problem for problem in benchmark.problems() if problem.about.get("choices_in_question")]
    assert len(inside) >= 35
    assert all("letter of your final answer" in benchmark.prompt(problem) for problem in inside)
