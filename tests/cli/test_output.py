"""Output of commands about a run, finished or being decoded."""

import itertools
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvatlas.cli import output
from kvatlas.core import Grade, Setting, Status, Trace
from kvatlas.results import Store
from kvatlas.sweeps import Progress
from tests.stats.synthetic import grid, manifest, trace, traces

GRADES = [
    (Grade(True, 1.0, "7", Status.OK), "correct, answer 7"),
    (Grade(False, 0.0, "8", Status.OK), "wrong, answer 8"),
    (Grade(False, 0.0, None, Status.TRUNCATED), "truncated"),
    (Grade(False, 0.0, None, Status.NO_ANSWER), "no answer"),
    (Grade(False, 0.0, "[/red] 9", Status.OK), "wrong, answer [/red] 9"),
]
#: A verdict that has a column only where it is there.
LATE = (Grade(False, 0.0, "x^2", Status.GRADER_TIMEOUT), "grader timeout, answer x^2")


@pytest.mark.parametrize(
    ("grades", "counts"),
    [
        (GRADES, {"correct": 1, "wrong": 2, "truncated": 1, "no answer": 1}),
        ([LATE], {"correct": 0, "wrong": 0, "truncated": 0, "no answer": 0, "grader timeout": 1}),
    ],
)
def test_traces_are_called_what_they_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], grades: list[tuple[Grade, str]], counts: dict[str, int]
) -> None:
    plan = manifest([], benchmarks=["CHAIN6"], baselines=[Setting.of("full")], problems=len(grades), samples=1, axes=())
    (expected,) = plan.expected
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for number, (grade, _) in enumerate(grades):
            store.add(expected.run_key, trace(expected, f"p{number}", 0, False, grade=grade))
    output.print_run(tmp_path / "run", len(grades))
    lines = capsys.readouterr().out.splitlines()
    for number, (grade, text) in enumerate(grades):
        assert f"p{number}, sample 0: {text}" in lines
        assert text.startswith(grade.verdict)
    names, numbers = (re.split(r"  +", line.strip()) for line in lines[:2])
    first, last = names.index("problems") + 1, names.index("kept tokens")
    assert dict(zip(names[first:last], map(int, numbers[first:last]), strict=True)) == counts
    assert " ok" not in " ".join(lines)


@pytest.fixture
def decoded() -> Trace:
    return next(traces(manifest(grid("dynts"), problems=1, samples=1)))[1]


def test_a_log_gets_a_line_now_and_then_and_at_the_end(
    decoded: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Traces of earlier sessions do not count for the rate: after 8 of 11 one takes 16 s, the next two 32."""
    clock = itertools.chain([0.0, 16.0], itertools.repeat(17.0))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    for quiet, lines in ((False, ["9/11", "11/11"]), (True, [])):
        on_trace = output.progress_display(quiet=quiet)
        for done in range(9, 12):
            on_trace(Progress(decoded, done, 11, 300 * (done - 8), 0))
        err = capsys.readouterr().err.splitlines()
        assert [line.split()[0] for line in err] == lines
        assert quiet or "0:00:32 left" in err[0]


def test_a_narrow_terminal_gets_whole_names_and_fewer_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "table_console", lambda: Console(width=40, force_terminal=True, no_color=True))
    name = "a-long-name-that-must-be-typed"
    output.print_rows([{"name": name, "pass_at_1": 61.5, "kept_tokens": 250}])
    said = capsys.readouterr().out
    assert name in said
    assert "250" not in said
    assert "Left out at 40 columns: pass at 1, kept tokens; --json has all." in said
