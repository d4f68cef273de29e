"""Output of commands about a run, finished or being decoded, and of the demo: its folder and its terminal."""

import io
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from kvatlas.cli import output, progress, sweeps
from kvatlas.core import Grade, Setting, Status, Trace
from kvatlas.report.demo import FIGURES, first_look
from kvatlas.results import Store
from kvatlas.sweeps import Progress
from tests.command_line import Call
from tests.stats.synthetic import grid, manifest, trace, traces
from tests.stored import store_run

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
        ([LATE], {"grader timeout": 1}),
    ],
)
def test_traces_are_called_what_they_came_to(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    grades: list[tuple[Grade, str]],
    counts: dict[str, int],
) -> None:
    plan = manifest(
        [], benchmarks=["CHAIN6"], baselines=[Setting.from_parameters("full")], problems=len(grades), samples=1, axes=()
    )
    (expected,) = plan.expected
    monkeypatch.setattr(output, "table_console", lambda: Console(width=200))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for number, (grade, _) in enumerate(grades):
            store.add(expected.run_key, trace(expected, f"p{number}", 0, False, grade=grade))
    sweeps.print_run(tmp_path / "run", len(grades))
    lines = capsys.readouterr().out.splitlines()
    for number, (grade, text) in enumerate(grades):
        assert f"p{number}, sample 0: {text}" in lines
        assert text.startswith(grade.outcome)
    names, values = (re.split(r"  +", line.strip()) for line in lines[:2])
    assert names[-3:] == ["KV tokens", "new tokens", "traces"]
    assert values[-1] == ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    assert " ok" not in " ".join(lines)


@pytest.fixture
def decoded() -> Trace:
    return next(traces(manifest(grid("dynts"), problems=1, samples=1)))[1]


def test_a_log_gets_a_line_now_and_then_and_at_the_end(
    decoded: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Traces of earlier sessions do not count for the rate: after 8 of 11 one takes 16 s, the next two 32."""
    clock = itertools.chain([0.0, 16.0], itertools.repeat(17.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for quiet, lines in ((False, ["9/11", "11/11"]), (True, [])):
        on_trace = progress.progress_display(quiet=quiet)
        for done in range(9, 12):
            on_trace(Progress(decoded, done, 11, 300 * (done - 8), 0))
        err = capsys.readouterr().err.splitlines()
        assert [line.split()[0] for line in err] == lines
        assert quiet or "0:00:32 left" in err[0]


def test_a_terminal_gets_a_bar_that_ends(decoded: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    clock = itertools.count()
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    on_trace = progress.progress_display()
    for done in range(1, 12):
        on_trace(Progress(decoded, done, 11, 3_000_000 * done, 0))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())
    last = text.replace("\r", "\n").strip("\n").splitlines()[-1]
    assert "100% 11/11 traces" in last
    assert len(last) <= 80
    # The cursor is there again.
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize(
    "words",
    [
        ("list", "policies"),
        ("list", "recipes"),
        ("list", "benchmarks"),
        ("plan", "demo", "--tokens-per-second", 1000),
        ("describe", "published:dynts_r1_llama"),
    ],
)
def test_eighty_columns_hold_every_letter(
    kvatlas: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Sentences wrap, and are neither cut nor wider than the terminal; tables in Markdown are as wide as they are."""
    wide = kvatlas.succeed(*words)

    def console() -> Console:
        return Console(width=80, force_terminal=True, no_color=True)

    for module in ("output", "lists"):
        monkeypatch.setattr(f"kvatlas.cli.{module}.table_console", console, raising=False)
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", kvatlas.succeed(*words))
    assert max(len(line) for line in narrow.splitlines() if not line.startswith("|")) <= 80
    # Rows of a table wrap column by column, so letters are counted and not read in their order.
    assert Counter("".join(narrow.split())) == Counter("".join(wide.split()))


def test_a_remark_behind_columns_wraps_under_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "table_console", lambda: Console(width=60, force_terminal=True))
    output.print_text("  with loops       17 minutes  (if 3 in 10 traces of half of the settings run on)")
    first, second = capsys.readouterr().out.splitlines()
    assert len(second) - len(second.lstrip()) == first.index("(")


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


def test_numbers_end_below_each_other_and_none_is_left_out_where_all_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "window", "kept_tokens": 1250, "seconds": 7}, {"name": "h2o", "kept_tokens": 9, "seconds": 12345}]
    output.print_rows(rows)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].index("1250") == lines[2].index("9") - 3

    # Two spaces stand behind each column, the last one, too.
    width = len(lines[0]) + 2
    monkeypatch.setattr(output, "table_console", lambda: Console(width=width, force_terminal=True, no_color=True))
    output.print_rows(rows)
    assert "Left out" not in capsys.readouterr().out


def test_a_first_look_then_figures_report_and_what_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store_run(tmp_path / "run", manifest(grid("dynts"), problems=4))
    pictures = first_look(folder)
    assert pictures == [folder / "answer.png", folder / "means.png", folder / "tiny-dynts.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    sweeps.print_demo(folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "tiny dynts: local_window \\ ratio" in said
    assert "In words tiny, mean of 2" in said
    assert "report.html" in said
    names = {path.name for path in folder.iterdir()}
    assert {f"{name}.{kind}" for name in ("answer", "means", "tiny-dynts") for kind in FIGURES} <= names
    assert {"maps.csv", "report.html"} <= names


def cells(folder: Path) -> list[tuple[int, str]]:
    """Of each cell how many problems it was promised, and its setting."""
    with Store.open(folder) as store:
        return [(len(cell.problems), str(cell.setting)) for cell in store.manifest().expected]


def test_each_warning_is_said_once(kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of the plan come first, limits of the finished run last."""
    spec = (
        "{models: ['embedded:tiny-llama'], benchmarks: [CHAIN3, CHAIN4], problems: 2, samples: 1,"
        " sampling: {max_new_tokens: 20}, baseline: [{policy: full}],"
        " settings: [{policy: window, kv_budget: 90, ratio_over: thinking}],"
        " axes: {local_window: [8, 12, 16], ratio: [0.2, 0.4]}}"
    )
    monkeypatch.setattr("kvatlas.sweeps.spec.recipes", lambda: {"demo-quick": spec})
    monkeypatch.setattr("kvatlas.cli.sweeps.FIRST_PROBLEMS", 1)
    # Drawing is tested above.
    drawn: list[list[tuple[int, str]]] = []
    monkeypatch.setattr("kvatlas.cli.sweeps.print_demo", lambda _: None)
    monkeypatch.setattr("kvatlas.report.demo.first_look", lambda folder: drawn.append(cells(folder)) or [folder])
    code, _, said = kvatlas("demo", "--quick", "--workers", 1, "--out", tmp_path / "run")
    assert code == 0, said
    (coarse,), whole = drawn, cells(tmp_path / "run")
    assert {problems for problems, _ in coarse} == {1}
    # The full cache and four of six cells, on two benchmarks: an axis of two values keeps both, or there is no map.
    assert len(coarse) == 10
    assert {problems for problems, _ in whole} == {2}
    assert {setting for _, setting in coarse} < {setting for _, setting in whole}
    assert "First maps, of every second step and 1 of 2 problems" in said
    before, _, after = said.rpartition("traces, ")
    assert before.count("compress nothing on CHAIN") == 2
    assert "Warning: CHAIN" not in before
    assert "compress nothing" not in after
    assert after.count("traces are without an answer (0) or truncated") == 2
    assert kvatlas("demo", "--quick", "--workers", 1, "--out", tmp_path / "run")[0] == 0
    assert len(drawn) == 1
    # The first maps decide nothing, so limits do not allow for a second look.
    with Store.open(tmp_path / "run") as store:
        assert "extensions" not in store.manifest().provenance


def test_without_standard_output_a_command_writes_nothing(tmp_path: Path) -> None:
    """As `describe RUN >&-`."""
    command = ["sh", "-c", '"$0" -m kvatlas list policies >&-', sys.executable]
    ended = subprocess.run(command, stderr=subprocess.PIPE, cwd=tmp_path, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
