"""Problem files in all layouts, public sets as they lie on the hub, prompts, and choices."""

import csv
import gzip
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest
from huggingface_hub import close_session, constants
from pyarrow import parquet

from kvatlas.benchmarks import find, identity
from kvatlas.benchmarks.file_checks import check_benchmark, notes_on
from kvatlas.benchmarks.problem_files import read_problems
from kvatlas.benchmarks.public_data import SOURCES
from kvatlas.core import Check, KvatlasError
from tests.hub_server import hub
from tests.r1 import AIME

#: Where the whole public problem files are: beside the checkout, or where this variable says.
SHARED = Path(os.environ.get("KVATLAS_PROBLEM_FILES", Path(__file__).parents[3] / "shared" / "benchmarks"))
FILES = {name: SHARED / f"{name.lower()}.jsonl" for name in ("AIME24", "AIME25", "AMC23", "MATH500", "GAOKAO2023EN")}
#: They belong to others and are not shipped; fixtures in tests/data stand for them in all other tests.
with_public_files = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the public problem files are not shipped; KVATLAS_PROBLEM_FILES names their folder"
)
ROWS = [{"question": "One and one?", "answer": 2.0}, {"question": "Two and two?", "answer": 4.0}]
GPQA = [
    {
        "Record ID": f"rec{i}",
        "Question": f"Which is the {i}th of the letters?",
        "Correct Answer": f"right {i}",
        **{f"Incorrect Answer {j}": f"wrong {i} {j}" for j in (1, 2, 3)},
    }
    for i in range(24)
]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "a.jsonl": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n"),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode())),
    "a.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "a.csv": write_csv,
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


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"text": "One and one?", "question": "no", "sum": 2}))
    benchmark = find("SUMS", file=str(path), columns={"question": "text", "answer": "sum"}, prompt="plain")
    assert benchmark.name == "SUMS"
    (problem,) = benchmark.problems()
    assert (benchmark.prompt(problem), problem.answer) == ("One and one?", "2")


@pytest.mark.parametrize("name", ["Body", "context", "passage", "premise", "Input"])
def test_a_question_in_two_columns_is_asked_whole(tmp_path: Path, name: str) -> None:
    text = "A shed has 7 crates with 6 plums in each."
    path = tmp_path / "plums.jsonl"
    rows = [
        {name: text, "Question": "How many plums are there?", "Answer": 42.0},
        {name: text, "Question": f"{text} How many crates are there?", "Answer": 7},
        {name: None, "Question": "How many days has a week?", "Answer": 7},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    asked = [problem.question for problem in find(f"file:{path}").problems()]
    assert asked == [f"{text}\nHow many plums are there?", rows[1]["Question"], rows[2]["Question"]]
    assert notes_on(find(f"file:{path}")) == []
    # Who names the question has named all of it, unless the context is named, too.
    alone = find("MINE", file=str(path), columns={"question": "Question"})
    assert [problem.question for problem in alone.problems()] == [row["Question"] for row in rows]
    assert notes_on(alone) == []
    both = find("MINE", file=str(path), columns={"question": "Question", "context": name})
    assert [problem.question for problem in both.problems()] == asked


def test_a_column_with_the_whole_question_beside_its_parts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "svamp.jsonl"
    parts = {"Body": "Each pack of plums costs 7 crowns.", "Question": "How much do you pay for 2 packs?"}
    row = {
        "ID": "chal-1",
        **parts,
        "Equation": "( 7.0 * 2 )",
        "Answer": 14.0,
        "question_concat": " ".join(parts.values()),
    }
    path.write_text(json.dumps(row))
    (problem,) = find(f"file:{path}").problems()
    assert problem.question == "\n".join(parts.values())
    assert notes_on(find(f"file:{path}")) == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"context": "Plums are fruit.", "passage": "Crates hold six."}, "'context' or 'passage'"),
        ({"Scenario": "A shed has 7 crates with plums."}, "'Scenario'"),
        ({"solution": "Seven times six is 42, so there are 42.", "ID": "p-1", "year": "2021"}, ""),
    ],
)
def test_text_that_may_belong_to_the_question_is_named(tmp_path: Path, more: dict[str, str], named: str) -> None:
    path = tmp_path / "plums.jsonl"
    # A cell of the first row may be empty.
    empty = dict.fromkeys(more, "")
    rows = [{**empty, "question": "How many?", "answer": 1}, {**more, "question": "Why?", "answer": 2}]
    path.write_text("\n".join(map(json.dumps, rows)))
    benchmark = find(f"file:{path}")
    assert [problem.question for problem in benchmark.problems()] == ["How many?", "Why?"]
    (found, *_) = check_benchmark(benchmark)
    unread = [column for column in more if column != "year"]
    assert f"; not read: {', '.join(map(repr, unread))}" in found.message
    notes = notes_on(benchmark)
    assert len(notes) == bool(named)
    assert all(f"if {named} belongs to the question name it" in note for note in notes)


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


def test_letters_of_choices_depend_on_the_question_alone(tmp_path: Path) -> None:
    """Neither on earlier rows, nor on the name of the set, nor on the order of the wrong answers."""
    turned = {f"Incorrect Answer {j}": f"Incorrect Answer {j % 3 + 1}" for j in (1, 2, 3)}
    files = {
        "gpqa.csv": GPQA,
        "shorter.csv": GPQA[1:],
        "turned.csv": [{**row, **{name: row[other] for name, other in turned.items()}} for row in GPQA],
    }
    for name, rows in files.items():
        write_csv(tmp_path / name, rows)
    names = (f"GPQA_D@{tmp_path / 'gpqa.csv'}", *(f"file:{tmp_path / name}" for name in files))
    letters = [{problem.question: problem.answer for problem in find(name).problems()} for name in names]
    assert len(set(letters[0].values())) == 4
    assert all(other.items() <= letters[0].items() for other in letters)
    assert list(map(len, letters)) == [24, 24, 23, 24]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_as_pandas_or_a_spreadsheet_writes_it_is_read(tmp_path: Path, separator: str) -> None:
    """With an index without a name, and with another separator."""
    table = pandas.DataFrame({"question": ["What; is, 2+2?", "Which is it?"], "answer": ["4", "1,5"]})
    table.to_csv(tmp_path / "a.csv", sep=separator)
    problems = find(f"file:{tmp_path / 'a.csv'}").problems()
    assert [(problem.question, problem.answer) for problem in problems] == [
        ("What; is, 2+2?", "4"),
        ("Which is it?", "1.5" if separator == ";" else "1,5"),
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3,5", "3.5"),
        ("-0,125", "-0.125"),
        (",5", ".5"),
        ("3,5 %", "3.5 %"),
        ("-2,25 cm", "-2.25 cm"),
        ("1.234,50", "1234.50"),
        ("2,3,4", "2,3,4"),
        ("(2,3)", "(2,3)"),
    ],
)
def test_decimal_commas_of_a_spreadsheet_are_decimal_points(tmp_path: Path, text: str, answer: str) -> None:
    (tmp_path / "a.csv").write_text(f"question;answer\nWhat is it?;{text}\n")
    (problem,) = find(f"file:{tmp_path / 'a.csv'}").problems()
    assert problem.answer == answer


def test_a_large_integer_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"question": "10^400?", "answer": {10**400}}}')
    (problem,) = find(f"file:{tmp_path / 'a.jsonl'}").problems()
    assert problem.answer == str(10**400)


def test_bytes_of_a_table_are_texts(tmp_path: Path) -> None:
    """As Parquet files have them whose writer did not mark texts."""
    rows = [{"question": b"Which?", "answer": "blåa".encode(), "options": [b"r\xc3\xb6d", "blåa".encode()]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (problem,) = find(f"file:{tmp_path / 'a.parquet'}").problems()
    assert (problem.question, problem.answer, problem.about["choices"]) == ("Which?", "B", ["röd", "blåa"])


GOOD = '{"question": "One and one?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"question": "Q?", "answer": "1", "answer": "2"}', "row 2, has the column 'answer' twice"),
        ("a.jsonl", '{"question": "Q?", "answer": "1", "Answer": "2"}', "row 2, has the columns 'answer' and 'Answer'"),
        ("a.jsonl", '{"Question": "P?", "question ": "Q?", "answer": 1}', "row 2, has the columns 'Question' and"),
        ("a.json", '[{"question": "Q?", "answer": 1, "answer": 2}]', "row 1, has the column 'answer' twice"),
        ("a.csv", "question,answer,answer\nQ?,1,2\n", "has the column 'answer' twice"),
        ("a.csv", "question,answer, Answer\nQ?,1,2\n", "row 1, has the columns 'answer' and ' Answer'"),
        ("a.csv", "question;answer\nQ?;1,234\n", "row 1, column 'answer', holds '1,234'"),
        ("a.jsonl", '{"question": "Q?", "answer": {"b": 2}}', "row 2, column 'answer', holds {'b': 2}"),
        ("a.jsonl", '{"question": "Q?", "answer": [{"b": 2}]}', "row 2, column 'answer', holds {'b': 2}"),
        ("a.jsonl", '{"question": "Q?", "answer": [[1], 2]}', "row 2, column 'answer', holds [[1], 2]"),
        ("a.jsonl", '{"question": "Q?", "answer": 1e999}', "row 2, column 'answer', holds '1e999'"),
        ("a.jsonl", '{"question": "Q?", "answer": -1e-999}', "row 2, column 'answer', holds '-1e-999'"),
        ("a.jsonl", '{"question": "Q?", "answer": "\\ud83d"}', "row 2, column 'answer', 'utf-8' codec can't encode"),
        ("a.jsonl", '{"question": "\\ud83d?", "answer": 1}', "row 2, column 'question', 'utf-8' codec can't encode"),
        ("a.csv", "question;answer\nQ?;1,234 km\n", "row 1, column 'answer', holds '1,234 km'"),
        ("a.jsonl", '{"question": [{"role": "user"}], "answer": 1}', "row 2, column 'question', holds [{'role'"),
        ("a.jsonl", '{"question": "Q?", "answer": 0, "options": [{"text": "a"}, "b"]}', "of which one holds {'text'"),
        ("a.jsonl", '{"question": "Q?", "answer": 0, "options": ["a", null]}', "of which one is empty"),
        ("a.csv", "question,answer,options\nQ?,a,a|b\n", 'expected a list, in a CSV file as ["red", "green"]'),
    ],
)
def test_a_cell_that_is_read_in_two_ways_is_refused_with_its_row_and_column(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(f"{GOOD}{content}\n" if name.endswith(".jsonl") else content)
    with pytest.raises(KvatlasError) as caught:
        find(f"file:{tmp_path / name}").problems()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([b"\xff\xfe"], "row 1, column 'answer', byte 1 of what was read, 0xff, is not UTF-8"),
        ([float("inf")], "row 1, column 'answer', holds inf"),
        ([pandas.Timestamp("2024-01-02")], "row 1, column 'answer', holds datetime"),
    ],
)
def test_a_cell_of_a_parquet_file_that_is_no_answer_is_refused(
    tmp_path: Path, values: list[Any], sentence: str
) -> None:
    table = pa.table({"question": ["Q?"], "answer": values})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(KvatlasError, match=re.escape(sentence)):
        find(f"file:{tmp_path / 'a.parquet'}").problems()
    parquet.write_table(table.append_column("answer", pa.array(["2"])), tmp_path / "a.parquet")
    with pytest.raises(KvatlasError, match="has the column 'answer' twice"):
        find(f"file:{tmp_path / 'a.parquet'}").problems()


def test_a_column_that_the_user_names_decides_between_two_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "Q?", "answer": "1", "Answer": "2"}')
    (problem,) = find("MINE", file=str(tmp_path / "a.jsonl"), columns={"answer": "Answer"}).problems()
    assert problem.answer == "2"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_no_more_of_a_file_is_read_than_is_asked_for(tmp_path: Path, name: str) -> None:
    """A row beyond that cannot be read is seen by those who ask for it, or for all."""
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(2500)]
    WRITERS[name](tmp_path / name, [*rows, {"question": "", "answer": "1"}])
    benchmark = find(f"file:{tmp_path / name}")
    assert [problem.id for problem in benchmark.problems(2)] == ["a-001", "a-002"]
    assert notes_on(benchmark, 2) == []
    assert len(benchmark.problems(2000)) == 2000
    assert len(benchmark.problems(2)) == 2
    for ask in (benchmark.problems, lambda: notes_on(benchmark), lambda: benchmark.problems(2501)):
        with pytest.raises(KvatlasError, match="has an empty question"):
            ask()


COLOURS, NUMBERS = ["red", "blue"], ["1", "0", "3", "2"]


@pytest.mark.parametrize(
    ("row", "letter", "choices"),
    [
        ({"options": ["A) red", "B) blue"], "answer": "B"}, "B", COLOURS),
        ({"options": COLOURS, "answer": "blue"}, "B", COLOURS),
        # As in a CSV file.
        ({"options": '["red", "blue"]', "answer": "blue"}, "B", COLOURS),
        # An integer is an index even where an option reads so; the text of an option comes first.
        ({"options": NUMBERS, "answer": 2}, "C", NUMBERS),
        ({"options": NUMBERS, "answer": 2.0}, "C", NUMBERS),
        ({"options": NUMBERS, "answer": "2"}, "D", NUMBERS),
        # Letters in a question that are no choices.
        ({"question": "Points (A) and (B) are 3 apart. How far is (A)?", "answer": "3"}, "3", None),
    ],
)
def test_options_in_columns(tmp_path: Path, row: dict[str, Any], letter: str, choices: Any) -> None:
    (tmp_path / "mine.json").write_text(json.dumps([{"question": "Which?", **row}]))
    (problem,) = find(f"file:{tmp_path / 'mine.json'}").problems()
    assert (problem.answer, problem.about.get("choices")) == (letter, choices)


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
    assert identity(kinds["r1"])[:4] == ["AIME24", 3, "r1", 1]


def test_a_benchmark_travels_to_workers_without_its_problems() -> None:
    benchmark = find(f"AIME24@{AIME}")
    problems = benchmark.problems(2)
    assert len(problems) == 2
    copy = pickle.loads(pickle.dumps(benchmark))
    assert len(pickle.dumps(benchmark)) == len(pickle.dumps(copy)) < 400
    assert copy == benchmark
    assert copy.prompt(problems[1]) == benchmark.prompt(problems[1])


@pytest.mark.parametrize("name", ["AIME", "AIME99", "gpqa", "", "file:", "CHAI"])
def test_an_unknown_name_lists_what_is_there(name: str) -> None:
    with pytest.raises(KvatlasError, match=r"expected CHAIN, .*AIME24, AIME25, .*file:FILE"):
        find(name)


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        (None, "a.jsonl", "is not there"),
        ("", "a.jsonl", "holds no problems"),
        ("[1, 2]", "a.json", "an object with named fields"),
        ("x", "a.parquet", "cannot be read"),
        ("x", "a.txt", "unknown suffix; expected .jsonl, .json"),
        ('{"question": "a"}', "a.jsonl", "has no column for the answer; there are: question"),
        (
            '{"question": "", "answer": "a"}',
            "a.jsonl",
            "row 1, has an empty question in 'question'; fill it, or leave the row out",
        ),
        ('{"question": "a", "answer": ""}', "a.jsonl", "holds no problem with an answer"),
        ('{"question": "a", "answer": "x", "options": ["y"]}', "a.jsonl", "expected one of its options"),
        (
            '\n{"question": "One?", "answer": "1"}\n{"question": "Two?", "answer" "2"}\n',
            "a.jsonl",
            "(line 3, column 31: ",
        ),
        (
            '{"question": "One?", "answer": "1"\n{"question": "Two?", "answer": "2"}\n',
            "a.jsonl",
            "(line 1, column 35: Expecting ',' delimiter, where the line ends with '",
        ),
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
        ({"prompt": "r2"}, "Unknown prompt format 'r2'; expected r1, plain, dynts, line"),
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


@with_public_files
@pytest.mark.parametrize("name", FILES)
def test_every_reference_answer_is_right_against_itself_and_its_copies(name: str) -> None:
    """Each in one of the forms that models write, every fourth in other spellings, too."""
    benchmark = find(f"{name}@{FILES[name]}")
    wrong = []
    for number, problem in enumerate(benchmark.problems()):
        inner = problem.answer.strip()
        inner = inner if "$" in inner.strip("$") else inner.strip("$")
        texts = [FORMS[number % len(FORMS)] % inner]
        if number % 4 == 0 and not any(word in inner for word in ("$", "text", "mbox", "begin")):
            texts += [rf"\boxed{{{copy(inner)}}}" for copy in COPIES]
        wrong += [(problem.answer, text) for text in dict.fromkeys(texts) if not benchmark.grade(problem, text).correct]
    assert wrong == []


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c"])
def test_lines_end_at_line_feeds_only(tmp_path: Path, separator: str) -> None:
    row = {"question": f"One{separator}and one?", "answer": "2"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n", newline="")
    write_csv(tmp_path / "a.csv", [{**row, "question": row["question"] + "\nSay it."}])
    for name, question in (("a.jsonl", row["question"]), ("a.csv", row["question"] + "\nSay it.")):
        (problem,) = find(f"file:{tmp_path / name}").problems()
        assert problem.question == question


@pytest.mark.parametrize(
    "question", ["Which one is it: (A) red (B) blue (C) $x^2$", "See (A) and (B).\nWhich?\nA) red\nB) blue\nC) $x^2$"]
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


OLYMPIAD = {"id": 1606, "question": "Compute the sum of all digits.", "solution": ["So."], "final_answer": ["45"]}
WRONG = [{"question": "Is this another file?", "answer": "yes", "final_answer": ["yes"]}]
#: For each benchmark the files of its data set, and the answers that are to be found in the right one.
LAYOUTS: dict[str, tuple[dict[str, list[dict[str, Any]]], list[str]]] = {
    "GSM8K": (
        {
            "main/test-00000-of-00001.parquet": [
                {"question": "Ann has 3 eggs and eats 1. What is left?", "answer": "3 - 1 = <<3-1=2>>2\n#### 2"},
                {"question": "Bob earns $40 an hour for 30 hours.", "answer": "40 * 30 = 1,200 dollars.\n#### 1,200"},
            ],
            "main/train-00000-of-00001.parquet": WRONG,
            "socratic/test-00000-of-00001.parquet": WRONG,
        },
        ["2", "1,200"],
    ),
    "OLYMPIADBENCH": (
        {
            "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet": [
                OLYMPIAD,
                {**OLYMPIAD, "question": "Name $(x, y)$.", "final_answer": ["$(1,2)$", "$(2,1)$"]},
            ],
            "OlympiadBench/OE_TO_maths_zh_COMP/OE_TO_maths_zh_COMP.parquet": WRONG,
            "OlympiadBench/OE_MM_maths_en_COMP/OE_MM_maths_en_COMP.parquet": WRONG,
        },
        ["45", "$(1,2)$, $(2,1)$"],
    ),
    "MINERVA": (
        {"test.jsonl": [{"question": "At which angle?", "answer": r"\arcsin{1.3 \sin{\theta_w}}"}]},
        [r"\arcsin{1.3 \sin{\theta_w}}"],
    ),
}


def connect(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Let the hub's client of this process ask another hub, with an empty cache and without a proxy."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    address = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    for name, value in {
        "HUGGINGFACE_CO_URL_TEMPLATE": address,
        "ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    close_session()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_right_file_and_columns_of_a_public_set_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name alone, from a hub."""
    files, answers = LAYOUTS[name]
    for path, rows in files.items():
        file = tmp_path / "data" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[f"a{file.suffix}"](file, rows)
    with hub({SOURCES[name].repository: tmp_path / "data"}) as (endpoint, _):
        connect(monkeypatch, endpoint, tmp_path / "cache")
        benchmark = find(name)
        problems = benchmark.problems()
        told = {one.name: one.status for one in check_benchmark(benchmark)}
    assert [problem.answer for problem in problems] == answers
    assert all(benchmark.grade(each, rf"So it is \boxed{{{each.answer}}}.").correct for each in problems)
    assert (told["columns"], told["references"], told["own answers"]) == (Check.OK, Check.OK, Check.OK)


def test_nan_in_a_parquet_file_is_a_missing_cell(tmp_path: Path) -> None:
    path = tmp_path / "floats.parquet"
    rows = [{"problem": "1 + 2", "answer": 3.0}, {"problem": "0 / 0", "answer": float("nan")}]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert [problem.answer for problem in read_problems(path, "floats", {}).problems] == ["3"]
