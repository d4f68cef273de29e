"""What `run` prints: what traces came to, never that a wrong answer is ok."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvatlas.cli.output import print_run
from kvatlas.core import Grade, Setting, Status
from kvatlas.results import Store
from tests.stats.synthetic import manifest, trace

GRADES = [
    (Grade(True, 1.0, "7", Status.OK), "correct, answer 7"),
    (Grade(False, 0.0, "8", Status.OK), "wrong, answer 8"),
    (Grade(False, 0.0, None, Status.TRUNCATED), "truncated"),
    (Grade(False, 0.0, None, Status.NO_ANSWER), "no answer"),
    (Grade(False, 0.0, "[/red] 9", Status.OK), "wrong, answer [/red] 9"),
]


def printed(folder: Path, grades: list[Grade], capsys: pytest.CaptureFixture[str]) -> list[str]:
    plan = manifest([], benchmarks=["CHAIN6"], baselines=[Setting.of("full")], problems=len(grades), samples=1, axes=())
    (expected,) = plan.expected
    with Store.create(folder) as store:
        store.put_manifest(plan)
        for number, grade in enumerate(grades):
            store.add(expected.run_key, trace(expected, f"p{number}", 0, False, grade=grade))
    print_run(folder, len(grades))
    return capsys.readouterr().out.splitlines()


def counts(lines: list[str]) -> dict[str, int]:
    """What the table says of verdicts, by the names of its columns."""
    names, numbers = (re.split(r"  +", line.strip()) for line in lines[:2])
    first, last = names.index("problems") + 1, names.index("kept tokens")
    return dict(zip(names[first:last], map(int, numbers[first:last]), strict=True))


def test_traces_are_called_what_they_came_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(tmp_path / "run", [grade for grade, _ in GRADES], capsys)
    for number, (grade, text) in enumerate(GRADES):
        assert f"p{number}, sample 0: {text}" in lines
        assert text.startswith(grade.verdict)
    assert counts(lines) == {"correct": 1, "wrong": 2, "truncated": 1, "no answer": 1}
    assert " ok" not in " ".join(lines)


def test_a_rare_verdict_is_counted_where_it_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = Grade(False, 0.0, "x^2", Status.GRADER_TIMEOUT)
    lines = printed(tmp_path / "run", [late], capsys)
    assert counts(lines) == {"correct": 0, "wrong": 0, "truncated": 0, "no answer": 0, "grader timeout": 1}
    assert "p0, sample 0: grader timeout, answer x^2" in lines
