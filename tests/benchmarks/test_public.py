from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvatlas.benchmarks import find, identity
from kvatlas.benchmarks.public import Questions
from kvatlas.core import KvatlasError

AIME = Path(__file__).parents[1] / "data" / "aime24.jsonl"
#: Where the whole public problem files are: beside the checkout, or where this variable says.
SHARED = Path(os.environ.get("KVATLAS_PROBLEM_FILES", Path(__file__).parents[3] / "shared" / "benchmarks"))
ROWS = [{"question": "One and one?", "answer": 2.0}, {"question": "Two and two?", "answer": 4.0}]
GPQA = [
    {
        "Record ID": f"rec{i}",
        "Question": f"Which is the {i}th of the letters?",
        "Correct Answer": f"right {i}",
        **{f"Incorrect Answer {j}": f"wrong {i} {j}" for j in (1, 2, 3)},
    }
    for i in range(12)
]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "a.jsonl": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n"),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode())),
    "a.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "b.json": lambda path, rows: path.write_text(json.dumps({"version": 1, "data": rows})),
    "c.json": lambda path, rows: path.write_text(json.dumps({key: [row[key] for row in rows] for key in rows[0]})),
    "d.json": lambda path, rows: path.write_text(json.dumps({str(i): row for i, row in enumerate(rows)})),
    "bom.json": lambda path, rows: path.write_text(json.dumps(rows), encoding="utf-8-sig"),
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": lambda path, rows: parquet.write_table(pa.Table.from_pylist(rows), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_gives_the_same_problems(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    benchmark = find(f"AIME25@{tmp_path / name}")
    assert [(p.id, p.question, p.answer) for p in benchmark.problems()] == [
        ("AIME25-001", "One and one?", "2"),
        ("AIME25-002", "Two and two?", "4"),
    ]
    # The same problems have the same run keys, whatever file they came from.
    WRITERS["a.jsonl"](tmp_path / "reference.jsonl", ROWS)
    assert identity(benchmark) == identity(find(f"AIME25@{tmp_path / 'reference.jsonl'}"))


@pytest.mark.parametrize(
    ("question", "answer"), [("problem", "solution_answer"), ("Problem", "Answer"), ("prompt", "target")]
)
def test_columns_are_found_by_their_usual_names(tmp_path: Path, question: str, answer: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"ID": "x7", question: "One and one?", answer: "$2$"}))
    (problem,) = find(f"file:{path}").problems()
    assert (problem.question, problem.answer, problem.about["source_id"]) == ("One and one?", "$2$", "x7")


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"text": "One and one?", "question": "no", "sum": 2}))
    benchmark = find("SUMS", file=str(path), columns={"question": "text", "answer": "sum"}, prompt="plain")
    assert benchmark.name == "SUMS"
    (problem,) = benchmark.problems()
    assert (benchmark.prompt(problem), problem.answer) == ("One and one?", "2")


def test_choices_are_permuted_by_a_seed_that_is_kept(tmp_path: Path) -> None:
    write_csv(tmp_path / "gpqa.csv", GPQA)
    benchmark = find(f"GPQA_D@{tmp_path / 'gpqa.csv'}")
    problems = benchmark.problems()
    assert {problem.answer for problem in problems} == set("ABCD")
    assert len({problem.about["choice_seed"] for problem in problems}) == len(GPQA)
    for number, problem in enumerate(problems):
        choices = problem.about["choices"]
        assert choices["ABCD".index(problem.answer)] == f"right {number}"
        assert len(set(choices)) == 4
        assert benchmark.grade(problem, rf"\boxed{{{problem.answer}}}").correct
    assert find(f"GPQA_D@{tmp_path / 'gpqa.csv'}").problems() == problems
    first = problems[0]
    lines = benchmark.prompt(first).splitlines()
    assert lines[:2] == ["Which is the 0th of the letters?", ""]
    assert lines[2:6] == [f"{letter}) {choice}" for letter, choice in zip("ABCD", first.about["choices"], strict=True)]
    assert lines[-1].endswith(r"put the letter of your final answer within \boxed{}.")


@pytest.mark.parametrize(
    ("options", "answer", "letter"),
    [
        (["A) red", "B) blue"], "B", "B"),
        (["red", "blue"], 1, "B"),
        (["red", "blue"], "blue", "B"),
        ({"A": "red", "B": "blue"}, "(B)", "B"),
        ({"text": ["red", "blue"], "label": ["A", "B"]}, "B", "B"),
    ],
)
def test_options_in_a_column(tmp_path: Path, options: Any, answer: Any, letter: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"question": "Which?", "options": options, "answer": answer}]))
    (problem,) = find(f"file:{path}").problems()
    assert (problem.answer, problem.about["choices"]) == (letter, ["red", "blue"])


def test_options_inside_the_question_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    question = "Which one?\nA) red\nB) blue\nC) green"
    path.write_text(json.dumps([{"question": question, "answer": "C"}]))
    benchmark = find(f"GPQA_D@{path}")
    (problem,) = benchmark.problems()
    assert benchmark.prompt(problem).startswith(question)
    assert benchmark.grade(problem, "The answer is C.").correct
    assert not benchmark.grade(problem, "Consider C.").correct


def test_prompt_formats_change_the_message_and_the_run_key() -> None:
    kinds = {name: find("AIME24", file=str(AIME), prompt=name) for name in ("r1", "plain", "line", "Q: {question} {x}")}
    problem = kinds["r1"].problems()[0]
    messages = {name: kind.prompt(problem) for name, kind in kinds.items()}
    assert messages["plain"] == problem.question
    assert messages["r1"] == (
        problem.question + "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert messages["Q: {question} {x}"] == f"Q: {problem.question} {{x}}"
    assert len({str(identity(kind)) for kind in kinds.values()}) == 4
    assert identity(kinds["r1"])[:4] == ["AIME24", 2, "r1", 1]


def test_a_benchmark_travels_to_workers_without_its_problems() -> None:
    benchmark = find(f"AIME24@{AIME}")
    problems = benchmark.problems(2)
    assert len(problems) == 2
    copy = pickle.loads(pickle.dumps(benchmark))
    assert "_problems" not in vars(copy)
    assert copy == benchmark
    assert copy.prompt(problems[1]) == benchmark.prompt(problems[1])


@pytest.mark.parametrize("name", ["AIME", "AIME99", "gpqa", "", "file:", "CHAI"])
def test_an_unknown_name_lists_what_is_there(name: str) -> None:
    with pytest.raises(KvatlasError, match=r"valid are CHAIN, .*AIME24, AIME25, .*file:FILE"):
        find(name)


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        (None, "a.jsonl", "is not there"),
        ("", "a.jsonl", "holds no problems"),
        ("", "a.json", "holds no problems"),
        ("", "a.csv", "holds no problems"),
        ("question,answer\n", "a.csv", "holds no problems"),
        ("[]", "a.json", "holds no problems"),
        ("3", "a.json", "neither a list nor an object"),
        ("[1, 2]", "a.json", "one object with named fields"),
        ("{", "a.jsonl", "cannot be read"),
        ("x", "a.parquet", "cannot be read"),
        ("x", "a.jsonl.gz", "cannot be read"),
        ("x", "a.txt", "unknown suffix; valid are .jsonl, .json"),
        ('{"question": "a"}', "a.jsonl", "has no column for the answer; there are: question"),
        ('{"answer": "a"}', "a.jsonl", "has no column for the question; there are: answer"),
        ('{"question": "", "answer": "a"}', "a.jsonl", "has an empty question (AIME24-001)"),
        ('{"question": "a", "answer": ""}', "a.jsonl", "holds no problem with an answer"),
        ('{"question": "a", "answer": "x", "options": ["y"]}', "a.jsonl", "none of its options"),
        ('{"question": "a", "answer": "x", "options": 3}', "a.jsonl", "options that are no list"),
    ],
)
def test_a_wrong_file_is_told_in_one_sentence(tmp_path: Path, content: str | None, name: str, sentence: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(KvatlasError) as caught:
        find(f"AIME24@{path}").problems()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_options_are_told_in_one_sentence() -> None:
    for options, sentence in [
        ({"prompt": "r2"}, "Unknown prompt format 'r2'; valid are r1, plain, dynts, line"),
        ({"columns": {"solution": "x"}}, "Unknown column 'solution' of AIME24"),
        ({"columns": {"answer": "x"}}, "has no column 'x' for the answer; there are: id, problem"),
    ]:
        with pytest.raises(KvatlasError) as caught:
            find("AIME24", file=str(AIME), **options).problems()
        assert sentence in str(caught.value)
    with pytest.raises(KvatlasError, match="The benchmark 'CHAIN4' takes no file"):
        find("CHAIN4", file="x")
    with pytest.raises(KvatlasError, match="AIME24 stands alone"):
        find("AIME245")


FILES = {"AIME24": "aime24", "AIME25": "aime25", "AMC23": "amc23", "MATH500": "math500", "GAOKAO2023EN": "gaokao2023en"}
FORMS = (
    r"\boxed{%s}",
    r"Thus $\boxed{%s}$.",
    "The answer is $%s$.",
    "**Final Answer:** $%s$",
    "\\[\n\\boxed{ %s }\n\\]",
)
COPIES: tuple[Callable[[str], str], ...] = (
    lambda text: text.replace("\\frac", "\\dfrac"),
    lambda text: text.replace("\\frac", "\\tfrac"),
    lambda text: text.replace("(", "\\left(").replace(")", "\\right)"),
    lambda text: text.replace("-", "−"),
    lambda text: text.replace("^\\circ", "°").replace("\\pi", "π"),
    lambda text: text.replace(",", ", ") if "(" in text else text,
    lambda text: text.replace("{", "{ ").replace("}", " }") if "\\{" not in text else text,
)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public problem files are not beside this checkout")
@pytest.mark.parametrize("name", FILES)
def test_every_reference_answer_is_right_against_itself_and_its_copies(name: str) -> None:
    benchmark = find(f"{name}@{SHARED / FILES[name]}.jsonl")
    assert isinstance(benchmark, Questions)
    wrong = []
    for problem in benchmark.problems():
        inner = problem.answer.strip()
        inner = inner if "$" in inner.strip("$") else inner.strip("$")
        texts = [form % inner for form in FORMS]
        if "$" not in inner and "text" not in inner and "mbox" not in inner and "begin" not in inner:
            texts += [rf"\boxed{{{copy(inner)}}}" for copy in COPIES]
        wrong += [(problem.answer, text) for text in dict.fromkeys(texts) if not benchmark.grade(problem, text).correct]
    assert wrong == []
