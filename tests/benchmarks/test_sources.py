"""Public sets as they lie on the hub: the paths and columns of each data set, with questions of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvatlas.benchmarks.public import SOURCES
from tests.hub_server import hub

ARENA = [
    {"problem_idx": 1, "problem": "What is half of one?", "answer": r"\frac{1}{2}", "problem_type": ["Algebra"]},
    {"problem_idx": 2, "problem": "Find all roots of $x^2 = 4$.", "answer": "2,-2", "problem_type": ["Algebra"]},
]
OLYMPIAD = {
    "id": 1606,
    "question": "Compute the sum of all digits.",
    "solution": ["One adds them up."],
    "final_answer": ["45"],
    "context": None,
    "image_1": None,
    "modality": "Text-only",
    "difficulty": "Competition",
    "is_multiple_answer": False,
    "unit": None,
    "answer_type": "Numerical",
    "error": None,
    "question_type": "Open-ended",
    "subfield": "Algebra",
    "subject": "Math",
    "language": "English",
}
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
    "HMMT25": ({"data/train-00000-of-00001.parquet": ARENA}, [r"\frac{1}{2}", "2,-2"]),
    "BRUMO25": ({"data/train-00000-of-00001.parquet": ARENA}, [r"\frac{1}{2}", "2,-2"]),
    "AIME26": (
        {"data/train-00000-of-00001.parquet": [{"problem_idx": 1, "answer": 70, "problem": "Seventy?"}]},
        ["70"],
    ),
    "OLYMPIADBENCH": (
        {
            "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet": [
                OLYMPIAD,
                {**OLYMPIAD, "question": "Name $(x, y)$.", "final_answer": ["$(1,2)$", "$(2,1)$"]},
            ],
            "OlympiadBench/OE_TO_maths_zh_COMP/OE_TO_maths_zh_COMP.parquet": WRONG,
            "OlympiadBench/OE_MM_maths_en_COMP/OE_MM_maths_en_COMP.parquet": WRONG,
            "OlympiadBench/TP_TO_maths_en_COMP/TP_TO_maths_en_COMP.parquet": WRONG,
        },
        ["45", "$(1,2)$, $(2,1)$"],
    ),
    "MINERVA": (
        {
            "test.jsonl": [
                {"question": "How bright is the star, in erg per second?", "answer": "4.5e33"},
                {"question": "At which angle?", "answer": r"\arcsin{1.3 \sin{\theta_w}}"},
            ]
        },
        ["4.5e33", r"\arcsin{1.3 \sin{\theta_w}}"],
    ),
}
#: Reads every benchmark by its name alone, and grades each reference as an answer.
READ = """
import json, sys
from kvatlas.benchmarks import find
from kvatlas.benchmarks.check import check
found = {}
for name in sys.argv[1:]:
    benchmark = find(name)
    problems = benchmark.problems()
    right = [benchmark.grade(each, "So it is \\\\boxed{" + each.answer + "}.").correct for each in problems]
    told = {one.name: one.status for one in check(benchmark)}
    found[name] = [[each.answer for each in problems], right, told, problems[-1].about.get("source_id")]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without a cache reads of each benchmark from a hub with these files."""
    where = tmp_path_factory.mktemp("hub")
    folders = {}
    for name, (files, _) in LAYOUTS.items():
        folders[SOURCES[name].repository] = where / name
        for path, rows in files.items():
            file = where / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".jsonl":
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                parquet.write_table(pa.Table.from_pylist(rows), file)
    with hub(folders) as (endpoint, _):
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(where / "cache"), "HF_HUB_DISABLE_XET": "1"}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-c", READ, *LAYOUTS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_right_file_and_columns_of_a_public_set_are_read(name: str, read: dict[str, Any]) -> None:
    answers, right, told, source = read[name]
    assert answers == LAYOUTS[name][1]
    assert all(right)
    assert (told["columns"], told["references"], told["own answers"]) == ("ok", "ok", "ok")
    # Where the set numbers its problems, their numbers are kept.
    assert source == {"GSM8K": None, "MINERVA": None, "OLYMPIADBENCH": "1606", "AIME26": "1"}.get(name, "2")
