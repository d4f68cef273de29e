"""`kvatlas import ANSWERS --axis NAME`: a file of answers becomes a run, bad rows end in sentences."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import Setting, Status
from kvatlas.results import Store
from tests.command_line import Call
from tests.stored import traces_of

PROBLEMS = 12


def answers(path: Path, *, samples: int = 1, **changes: Any) -> Path:
    """Answers of the reference and of two windows, of which the narrow one loses all but two problems."""
    rows = []
    for window in (None, 512, 256):
        for problem in range(PROBLEMS):
            for sample in range(samples):
                row: dict[str, Any] = {"problem": f"p{problem}", "sample": sample, "output_tokens": 100}
                row |= {"correct": window != 256 or problem < 2, "text": f"text {problem} {sample} {window == 256}"}
                rows.append(row | ({} if window is None else {"window": window}) | changes)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_answers_of_any_program_make_a_run_that_everything_reads(kvatlas: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = kvatlas.succeed("import", answers(tmp_path / "a.jsonl"), run, "--axis", "window")
    assert "2 settings and the reference" in out
    traces = traces_of(run)
    assert len(traces) == 3 * PROBLEMS
    by_setting = {trace.setting for trace in traces}
    windows = [Setting.from_parameters("served", window=width) for width in (512, 256)]
    assert by_setting == {Setting.from_parameters("reference"), *windows}
    with Store.open(run) as store:
        manifest = store.manifest()
    assert manifest.axes == (("window", (512, 256)),)
    assert [cell.setting.policy for cell in manifest.expected if cell.baseline] == ["reference"]
    # Equal texts are known to be equal, though no program gave tokens.
    written = {(trace.setting, trace.problem): trace.token_digest for trace in traces}
    for problem in range(PROBLEMS):
        reference, wide, narrow = (written[each, f"p{problem}"] for each in (Setting("reference"), *windows))
        assert reference == wide != narrow

    # Two of twelve are right.
    lines = kvatlas.succeed("describe", run).splitlines()
    (line,) = [line for line in lines if line.startswith("| served(window=256)")]
    assert " 16.7" in line
    kvatlas.succeed("map", run, "--out", tmp_path / "map.png")
    kvatlas.succeed("view", run, "--out", tmp_path / "run.html")
    code, out, _ = kvatlas("gate", f"{run}@reference", f"{run}@served window=256", "--json")
    assert code == 1
    assert json.loads(out)["lost"] == PROBLEMS - 2
    kvatlas.succeed("compare", run, "reference", "served window=512", "--out", tmp_path / "c.png")


def test_a_changed_file_replaces_the_answers_of_the_former_one(kvatlas: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvatlas.succeed("import", answers(tmp_path / "a.jsonl", samples=2), run, "--axis", "window")
    kvatlas.succeed("import", answers(tmp_path / "a.jsonl", correct=True), run, "--axis", "window")
    with Store.open(run) as store:
        traces = [trace for _, trace in store.traces()]
    assert len(traces) == 3 * PROBLEMS
    assert all(trace.grade.correct for trace in traces)


def test_another_file_is_refused_beside_the_answers_of_the_first(kvatlas: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvatlas.succeed("import", answers(tmp_path / "a.jsonl"), run, "--axis", "window")
    refused = kvatlas.refuse("import", answers(tmp_path / "b.jsonl", model="other"), run, "--axis", "window")
    assert "holds the answers of a.jsonl; import b.jsonl into a run of its own." in refused


def test_samples_are_numbered_in_their_order_and_lacking_answers_are_told(kvatlas: Call, tmp_path: Path) -> None:
    file = answers(tmp_path / "a.jsonl", samples=2, output_tokens=100.0)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    # Numbers from 1, as many programs count.
    file.write_text("".join(f"{json.dumps(row | {'sample': 1 + row['sample']})}\n" for row in rows))
    kvatlas.succeed("import", file, tmp_path / "run", "--axis", "window", err="")
    traces = traces_of(tmp_path / "run")
    assert {trace.sample for trace in traces} == {0, 1}
    assert {trace.usage.output_tokens for trace in traces} == {100}
    kvatlas.succeed("describe", tmp_path / "run")

    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-5]))
    words = ("import", file, tmp_path / "other", "--axis", "window")
    kvatlas.succeed(*words, err="a.jsonl lacks 5 answers: problems or samples of some settings alone.\n")


def test_a_run_is_described_where_one_claim_of_two_is_proven_of_every_setting(kvatlas: Call, tmp_path: Path) -> None:
    names = [(problem, sample, kv) for problem in range(60) for sample in (0, 1) for kv in (None, "fp8")]
    rows = [{"problem": problem, "sample": sample, "kv": kv, "correct": 1} for problem, sample, kv in names]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    kvatlas.succeed("import", file, tmp_path / "run", "--axis", "kv")
    assert "On these 60 problems served kv fp8 is proven" in kvatlas.succeed("describe", tmp_path / "run")


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ("stop", Status.OK),
        (None, Status.OK),
        ("length", Status.TRUNCATED),
        (" MAX_TOKENS ", Status.TRUNCATED),
        ("content_filter", Status.NO_ANSWER),
    ],
)
def test_the_finish_reason_is_the_status_of_a_wrong_answer(
    kvatlas: Call, tmp_path: Path, finish: str | None, status: Status
) -> None:
    kvatlas.succeed("import", answers(tmp_path / "a.jsonl", finish=finish), tmp_path / "run", "--axis", "window")
    grades = [trace.grade for trace in traces_of(tmp_path / "run")]
    assert {grade.status for grade in grades if not grade.correct} == {status}
    assert {grade.status for grade in grades if grade.correct} == {Status.OK}


def test_a_table_is_read_as_json_lines_are(kvatlas: Call, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = [f"p{problem},{width},{int(width != 256)},100\n" for width in ("", 512, 256) for problem in range(3)]
    file.write_text("problem,window,correct,output_tokens\n" + "".join(rows))
    kvatlas.succeed("import", file, tmp_path / "run", "--axis", "window")
    traces = traces_of(tmp_path / "run")
    assert {trace.usage.output_tokens for trace in traces} == {100}
    assert sum(trace.grade.correct for trace in traces) == 6
    # Without texts nothing is known of equal ones.
    assert {trace.token_digest for trace in traces} == {""}


def test_texts_are_graded_by_a_file_of_problems(kvatlas: Call, tmp_path: Path) -> None:
    problems = tmp_path / "sums.jsonl"
    problems.write_text("".join(f'{{"id": "s{n}", "problem": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(4)))
    rows = [
        {"problem": f"s{n}", "dtype": dtype, "text": f"<think>sum</think>\\boxed{{{n + 1 + (dtype == 'fp8')}}}"}
        for dtype in ("auto", "fp8")
        for n in range(4)
    ]
    rows[0] |= {"text": "<think>sum", "finish": "length"}
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("--axis", "dtype", "--reference", "dtype=auto")
    assert "Row 1 of a.jsonl has no grade; expected --benchmark FILE" in kvatlas.refuse(
        "import", file, tmp_path / "run", *words
    )
    kvatlas.succeed("import", file, tmp_path / "run", *words, "--benchmark", problems)
    other = answers(tmp_path / "b.jsonl")
    refused = kvatlas.refuse("import", other, tmp_path / "b", "--axis", "window", "--benchmark", problems)
    assert "Row 1 of b.jsonl: sums has no problem 'p0'; its first is 'sums-001'." in refused
    graded = {(trace.setting.policy, trace.problem): trace.grade for trace in traces_of(tmp_path / "run")}
    assert [graded["reference", f"sums-{n:03d}"].correct for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert graded["reference", "sums-001"].status is Status.TRUNCATED
    assert not any(grade.correct for (policy, _), grade in graded.items() if policy == "served")
    # The run knows the file, so that its texts are graded again, and no more of a sweep than that.
    assert kvatlas.succeed("grade", tmp_path / "run").splitlines()[-1].startswith("0 verdicts changed")
    exported = ("deploy", "export", tmp_path / "run", "--to", "kvpress", "--out", tmp_path / "engine")
    assert "is not a sweep" in kvatlas.refuse(*exported)
    file.write_text("".join(f"{json.dumps({**row, 'text': None, 'correct': True})}\n" for row in rows))
    kvatlas.succeed("import", file, tmp_path / "graded", *words, "--benchmark", problems)
    assert "was imported with a grade and no text" in kvatlas.refuse("grade", tmp_path / "graded")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"problem": ""}, "Row 14 of a.jsonl names no problem."),
        ({"sample": 0.5}, "Row 14 of a.jsonl: 'sample' is '0.5'; expected a whole number from 0"),
        ({"sample": "x"}, "'sample' is 'x'"),
        (
            {"correct": "maybe"},
            "Row 14 of a.jsonl: 'correct' is 'maybe'; expected a score from 0 to 1, or true and false.",
        ),
        ({"correct": 0.5}, "Row 14 of a.jsonl: 'correct' is 0.5; expected true or false."),
        ({"finish": "timeout"}, "Row 14 of a.jsonl: 'finish' is 'timeout'; expected stop,"),
        ({"correct": None, "text": None}, "Row 14 of a.jsonl has no grade; expected 'correct' or 'text'."),
        ({"text": 3}, "Row 14 of a.jsonl: 'text' is '3'; expected a text."),
        ({"output_tokens": -1}, "Row 14 of a.jsonl: 'output_tokens' is '-1'"),
        ({"problem": "p0"}, "Row 14 of a.jsonl: served(window=512) has sample 0 of 'p0' twice."),
        ({"problem": " p0 "}, "Row 14 of a.jsonl: served(window=512) has sample 0 of 'p0' twice."),
        ({"problem": "p\ud800"}, "cannot be stored"),
    ],
)
def test_a_bad_row_is_named(kvatlas: Call, tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    file = answers(tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[PROBLEMS + 1] |= change
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert sentence in kvatlas.refuse("import", file, tmp_path / "run", "--axis", "window")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--axis", "dtype"), "has a value of dtype"),
        (("--axis", "problem"), "expected other columns than problem"),
        (("--axis", "window", "--axis", "window"), "each once"),
        (("--axis", "window", "--axis", "output_token"), "has 'window' and no 'output_token'"),
        (("--axis", "window", "--reference", "512"), "expected NAME=VALUE"),
        (("--axis", "window", "--reference", "dtype=auto"), "NAME is one of window"),
        (("--axis", "window", "--benchmark", "nothing.jsonl"), "nothing.jsonl"),
        (("--axis", "window", "--scorer", "match"), "--scorer chooses among the scores of a log"),
        ((), "needs --axis NAME"),
        (("--reference", "window=512"), "needs --axis NAME"),
    ],
)
def test_wrong_words_end_in_a_sentence(kvatlas: Call, tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    file = answers(tmp_path / "a.jsonl")
    assert sentence in kvatlas.refuse("import", file, tmp_path / "run", *words)


@pytest.mark.parametrize(
    ("first", "second"), [("1.1", "1.10"), (7, "007"), ("1000", "1e3"), ("FP8", "fp8"), ("fp8", "fp8 ")]
)
def test_one_value_in_two_spellings_is_refused(kvatlas: Call, tmp_path: Path, first: Any, second: Any) -> None:
    file = tmp_path / "a.jsonl"
    values = [None, first, second]
    rows = [{"problem": "p0", "sample": sample, "correct": 1, "version": value} for sample, value in enumerate(values)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    refused = kvatlas.refuse("import", file, tmp_path / "run", "--axis", "version")
    assert f"Row 3 of a.jsonl has 'version' as {str(second)!r}, and a row before as {str(first)!r}" in refused


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "1_0"])
def test_a_value_of_an_axis_is_a_finite_number_or_a_text(kvatlas: Call, tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"problem,scale,correct\np0,,1\np0,{value},1\n")
    refused = kvatlas.refuse("import", file, tmp_path / "run", "--axis", "scale")
    assert f"Row 2 of a.csv: 'scale' is {value!r}; expected a finite number or a text." in refused


def test_rows_without_values_are_no_reference_beside_a_named_one(kvatlas: Call, tmp_path: Path) -> None:
    file = answers(tmp_path / "a.jsonl")
    refused = kvatlas.refuse("import", file, tmp_path / "run", "--axis", "window", "--reference", "window=512")
    assert "Row 1 of a.jsonl has no value of window" in refused


def test_an_id_that_two_problems_have_is_refused(kvatlas: Call, tmp_path: Path) -> None:
    problems = tmp_path / "sums.jsonl"
    problems.write_text("".join(f'{{"id": "s", "problem": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(2)))
    file = answers(tmp_path / "a.jsonl", problem="s")
    refused = kvatlas.refuse("import", file, tmp_path / "run", "--axis", "window", "--benchmark", problems)
    assert "two problems with the id 's'" in refused


def test_a_file_without_the_reference_or_of_a_sweep_is_refused(kvatlas: Call, tmp_path: Path) -> None:
    file = answers(tmp_path / "a.jsonl")
    lines = file.read_text().splitlines(True)
    file.write_text("".join(lines[PROBLEMS:]))
    run = tmp_path / "run"
    assert "has no answers of the reference" in kvatlas.refuse("import", file, run, "--axis", "window")
    kvatlas.succeed("import", file, run, "--axis", "window", "--reference", "window=512")
    sweep = tmp_path / "sweep"
    kvatlas.succeed("run", "embedded:tiny-llama", "CHAIN3", "--problems", 1, "--max-new-tokens", 20, "--out", sweep)
    words = ("--axis", "window", "--reference", "window=512")
    assert "is no run of imported answers" in kvatlas.refuse("import", file, sweep, *words)
