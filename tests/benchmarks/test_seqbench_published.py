"""Files in the layout of the published data set; the rows are made here, the real file is the user's to bring."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import parse_plan
from kvatlas.core import KvatlasError, Status


def rows(count: int = 3) -> list[dict[str, Any]]:
    """Generated mazes as the published data set writes its own, with other people in them."""
    made = []
    for number, problem in enumerate(find("SEQBENCH-6x6-B1").problems(count)):
        context = problem.question.replace("\n", " ").replace("Bob", "Dana").replace("Alice", "Lee")
        plan = parse_plan(problem.answer)
        made.append(
            {
                "instance_id": f"maze_{number}",
                "context": f"Here are the facts. {context} What is the plan?",
                "completion": problem.answer.replace("Alice", "Lee"),
                "complexity_parameters": {
                    "logical_depth_L": len(plan),
                    "backtracking_count_B": 1,
                    "noise_ratio_N": 1.0,
                },
                "instance_metadata": {"maze_rows": 6, "agent_name": "Dana", "target_name": "Lee"},
                "structural_details": "{}",
            }
        )
    return made


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["mazes.jsonl", "mazes.jsonl.gz"])
def test_the_published_layout_is_read(tmp_path: Path, name: str) -> None:
    bench = find(f"SEQBENCH@{write(tmp_path / name, rows())}")
    ours = find("SEQBENCH-6x6-B1").problems(3)
    assert [p.id for p in bench.problems()] == ["maze_0", "maze_1", "maze_2"]
    assert [(p.question, p.answer) for p in bench.problems()] == [(p.question, p.answer) for p in ours]
    first = bench.problems(1)[0]
    assert (first.about["L"], first.about["B"], first.about["N"]) == (ours[0].about["L"], 1, 1.0)
    assert bench.prompt(first).startswith("# Task")
    assert bench.grade(first, first.answer).correct
    assert bench.grade(first, "none").status is Status.NO_ANSWER
    assert bench.typical_output_tokens > 0
    assert find(bench.name) == bench


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    row = rows(1)[0]
    row["context"] = row["context"].replace("Here are", "Here\u2028\x85are")
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", newline="")
    assert find(f"SEQBENCH@{path}").problems() == find(f"SEQBENCH@{write(tmp_path / 'n.jsonl', rows(1))}").problems()


def test_completions_may_be_lists(tmp_path: Path) -> None:
    content = rows()
    content[0]["completion"] = [list(action) for action in parse_plan(content[0]["completion"])]
    content[1]["completion"] = [f"{name}: {argument}" for name, argument in parse_plan(content[1]["completion"])]
    content[2]["instance_metadata"] = json.dumps(content[2]["instance_metadata"])
    bench = find(f"SEQBENCH@{write(tmp_path / 'm.jsonl', content)}")
    assert [p.answer for p in bench.problems()] == [p.answer for p in find("SEQBENCH-6x6-B1").problems(3)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"completion": "move along"}, "Line 2 .* has a completion that is no plan"),
        ({"completion": "[('start', 'A1'), ('rescue', 'Lee')]"}, "Line 2 .* fails at action"),
        ({"completion": [1, 2]}, "Line 2 .* has a completion that is no plan"),
        ({"context": "Once upon a time."}, "Line 2 .* say once where Bob is"),
        ({"instance_id": "maze_0"}, "has an instance_id twice"),
        (None, "Line 2 .* lacks instance_id, context or completion"),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, change: dict[str, Any] | None, sentence: str) -> None:
    content = rows()
    content[1] = content[1] | change if change else {"problem": "1 + 1", "answer": "2"}
    with pytest.raises(KvatlasError, match=sentence):
        find(f"SEQBENCH@{write(tmp_path / 'm.jsonl', content)}").problems()


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "m.jsonl.gz"
    broken.write_bytes(gzip.compress(b"{}")[:12])
    text = tmp_path / "m.txt"
    text.write_text("facts\n")
    empty = write(tmp_path / "empty.jsonl", [])
    for path, sentence in ((broken, "cannot be read"), (text, "cannot be read"), (empty, "holds no mazes")):
        with pytest.raises(KvatlasError, match=sentence):
            find(f"SEQBENCH@{path}").problems()
    with pytest.raises(KvatlasError, match="cannot be read"):
        find("SEQBENCH@nowhere.jsonl").problems()
    with pytest.raises(KvatlasError, match=r"name it as 'SEQBENCH@m\.jsonl'"):
        find("SEQBENCH-5x5@m.jsonl")
    with pytest.raises(KvatlasError, match="'CHAIN12' takes no file"):
        find("CHAIN12@m.jsonl")
