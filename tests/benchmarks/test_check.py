"""Every damaged copy of two small problem sets is told in a sentence, and sets that are right pass in silence."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import families, find
from kvatlas.benchmarks.file_checks import check_benchmark, notes_on
from kvatlas.benchmarks.public_data import SOURCES
from kvatlas.core import KvatlasError
from tests.benchmarks.test_problem_files import FILES, with_public_files
from tests.command_line import Call
from tests.r1 import AIME

Row = dict[str, Any]

SUMS: list[Row] = [
    {"question": f"Let $x = \\frac{{{i}}}{{7}}$ and $y \\times 7 = {i * i}$. What is $x + y$?", "answer": answer}
    for i, answer in enumerate(f"\\frac{{{i + i * i}}}{{7}}" for i in range(40))
]
CHOICES: list[Row] = [
    {
        "question": f"Which of these numbers is {i} more than {i * i}?",
        "options": [str(i * i + i + j - i % 4) for j in range(4)],
        "answer": "ABCD"[i % 4],
    }
    for i in range(40)
]


def changed(rows: list[Row], **changes: Callable[[Row], Any]) -> list[Row]:
    return [{**row, **{name: change(row) for name, change in changes.items()}} for row in rows]


def first(rows: list[Row], **changes: Callable[[Row], Any]) -> list[Row]:
    return [*changed(rows[:1], **changes), *rows[1:]]


DAMAGED: dict[str, tuple[list[Row], str]] = {
    "a question twice with two answers": (
        [*SUMS, {**SUMS[3], "answer": "5"}],
        "1 of them with different reference answers",
    ),
    "references that are solutions": (
        changed(SUMS, answer=lambda r: f"We add them. Then we get $\\boxed{{{r['answer']}}}$."),
        "40 of 40 problems have a whole solution for a reference answer",
    ),
    "a reference cut": (first(SUMS, answer=lambda r: r["answer"][:-1]), "1 of 40 reference answers are graded wrong"),
    "a number that is refused without its remark": (
        first(SUMS, answer=lambda _: "9 (that is even)"),
        "1 of 40 reference answers are graded wrong themselves (first damaged-001: '9' for '9 (that is even)')",
    ),
    "decimal commas": (
        changed(SUMS, answer=lambda _: "1,5"),
        "40 of 40 problems have a comma for a decimal point",
    ),
    "no reference": (first(SUMS, answer=lambda _: ""), "left out: 1 without one (first rows: 1)"),
    "a truth value": (
        first(SUMS, answer=lambda _: True),
        "1 of 40 problems have true or false for a reference answer (first damaged-001); write the text that",
    ),
    "letters without choices": (
        [{"question": row["question"], "answer": row["answer"]} for row in CHOICES],
        "have a letter for a reference answer and no choices (first damaged-001); put them into one column",
    ),
    "several right answers": (
        first(SUMS, answer=lambda r: [r["answer"], f"{r['answer']} in all"]),
        "1 of 40 problems have a list for a reference answer, and only an answer with all its members is right",
    ),
    "an index from 1": (
        changed(CHOICES, answer=lambda r: "ABCD".index(r["answer"]) + 1),
        "expected one of its options",
    ),
    "no answer that counts": (changed(SUMS, answer=lambda r: r["answer"] + "x" * 1000), "graded wrong themselves"),
}


def said(name: str) -> list[str]:
    """Return the findings about a benchmark, refusals included."""
    try:
        return notes_on(find(name))
    except KvatlasError as error:
        return [str(error)]


@pytest.mark.parametrize("rows", [SUMS, CHOICES])
def test_a_set_that_is_right_passes_in_silence(tmp_path: Path, rows: list[Row]) -> None:
    (tmp_path / "right.json").write_text(json.dumps(rows))
    assert said(f"file:{tmp_path / 'right.json'}") == []


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_set_is_told_in_a_sentence(tmp_path: Path, damage: str) -> None:
    rows, sentence = DAMAGED[damage]
    (tmp_path / "damaged.json").write_text(json.dumps(rows))
    (told,) = said(f"file:{tmp_path / 'damaged.json'}")
    assert sentence in told
    assert told.endswith(".")


def test_columns_of_numbers_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "choices.csv"
    path.write_text("question,A,B,answer\nWhich of these is the larger one?,1,2,B\n")
    findings = {finding.name: finding for finding in check_benchmark(find(str(path)))}
    assert findings["columns"].message.endswith("; not read: 'A', 'B'")


@pytest.mark.parametrize("correct", ["False", "answer == problem.answer"])
def test_a_class_that_refuses_its_own_references_is_told(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, correct: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from kvatlas.core import Grade, Problem, Status\n\nclass Mine:\n"
        "    name, version, typical_output_tokens = 'mine', 1, 9\n"
        "    def problems(self, limit=None): return [Problem(f'mine-{i}', f'{i} + 1', str(i + 1)) for i in range(16)]\n"
        "    def prompt(self, problem): return problem.question\n"
        f"    def grade(self, problem, answer): return Grade({correct}, 0.0, answer, Status.OK)\n"
    )
    findings = {row["name"]: row for row in json.loads(kvatlas.succeed("check", "mine.py:Mine", "--json"))}
    own = findings["own answers"]
    if correct == "False":
        assert own["status"] == "warning"
        assert own["message"] == (
            "16 of 16 problems have a reference answer that is graded wrong, in whatever form (first mine-0)"
        )
    else:
        assert own["status"] == "ok"


def test_a_set_under_the_name_of_another_is_told(tmp_path: Path) -> None:
    assert said(f"MATH500@{AIME}") == [
        "MATH500: 3 problems with a reference answer, where the published set has 500; the file is not the published "
        "set."
    ]
    (tmp_path / "sums.json").write_text(json.dumps(SUMS[:30]))
    assert said(f"AIME24@{tmp_path / 'sums.json'}") == [
        "AIME24: the reference answers are not all those of the published set."
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_every_public_benchmark_is_found_and_reads_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "One and two?", "final_answer": ["$3$"]}]))
    (problem,) = find(f"{name}@{path}").problems()
    assert (problem.id, problem.answer) == (f"{name}-001", "$3$")
    assert families.get(name).about.endswith(f"hub: {SOURCES[name].repository})")


def test_the_command_prints_a_line_for_each_thing_and_an_example(kvatlas: Call, tmp_path: Path) -> None:
    contents = {"sums": [*SUMS, SUMS[0]], "one": SUMS[:1], "solutions": DAMAGED["references that are solutions"][0]}
    files = {name: tmp_path / f"{name}.json" for name in contents}
    for name, rows in contents.items():
        files[name].write_text(json.dumps(rows))
    out = kvatlas.succeed("check", f"file:{files['sums']}")
    assert "ok       columns         question in 'question', answer in 'answer'" in out
    assert "warning  duplicates      1 of 41 problems are there before, first sums-001 again" in out
    assert "Please reason step by step" in out
    findings = {row["name"]: row for row in json.loads(kvatlas.succeed("check", f"file:{files['one']}", "--json"))}
    assert "characters in the median" in findings["prompts"]["message"]
    code, *_ = kvatlas("check", f"file:{files['solutions']}")
    assert code == 2


@with_public_files
def test_the_public_files_pass_and_are_told_apart() -> None:
    for name in set(FILES) - {"GAOKAO2023EN"}:
        assert said(f"{name}@{FILES[name]}") == []
    assert said(f"GAOKAO2023EN@{FILES['GAOKAO2023EN']}") == [
        "GAOKAO2023EN: 383 problems with a reference answer, where the published set has 385; left out: 2 without "
        "one (first rows: 168, 193)."
    ]
    (told,) = said(f"MATH500@{FILES['AIME24']}")
    assert "the reference answers are those of AIME24; name it AIME24" in told


def _a_false_condition(rows: list[Row]) -> list[Row]:
    return first(
        rows, question=lambda r: re.sub(r"\d+", lambda number: str(int(number[0]) + 1), r["question"], count=1)
    )


#: Damage of a public set whose reference answers are all there, and the number of problems that it touches.
TOUCHED: dict[str, tuple[Callable[[list[Row]], list[Row]], int]] = {
    "a false condition": (_a_false_condition, 1),
    "another relation": (lambda rows: first(rows, question=lambda r: r["question"].replace("=", "<") + "="), 1),
    "the answer in the question": (
        lambda rows: first(rows, question=lambda r: f"{r['question']} The answer is {r['answer']}."),
        1,
    ),
    "a question cut": (lambda rows: first(rows, question=lambda r: r["question"][: len(r["question"]) // 2]), 1),
    "two answers exchanged": (
        lambda rows: [{**rows[0], "answer": rows[1]["answer"]}, {**rows[1], "answer": rows[0]["answer"]}, *rows[2:]],
        2,
    ),
}


@with_public_files
@pytest.mark.parametrize("name", ["AIME24", "AIME25", "AMC23"])
def test_questions_that_are_not_the_published_ones_are_told(tmp_path: Path, name: str) -> None:
    """Copies that differ in spaces and markup alone are as published."""
    rows = [json.loads(line) for line in FILES[name].read_text().splitlines()]
    rows = [{"question": row.get("problem") or row["question"], "answer": row["answer"]} for row in rows]
    path = tmp_path / "copy.json"

    def line(copy: list[Row]) -> str:
        path.write_text(json.dumps(copy))
        return next(str(item) for item in check_benchmark(find(f"{name}@{path}")) if item.name == "problems")

    copies = {"\\frac": "\\dfrac", "$": " $ ", "(": "\\left(", ")": "\\right)", " ": "  ", "-": "−"}
    for spelling, other in copies.items():
        copy = [{**row, "question": row["question"].replace(spelling, other)} for row in rows[::-1]]
        assert line(copy).endswith(", as published")
    for damage, (touch, count) in TOUCHED.items():
        assert f"answers as published, {count} question" in line(touch(rows)), damage
    # Where most words are other ones, it is another form of the set.
    assert "questions in other words are not compared" in line(changed(rows, question=lambda r: f"{r['question']} Go"))
