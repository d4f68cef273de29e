"""What `bench/attack.py` gives to the command line, the quick part: each ends in one sentence, soon."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from kvatlas import cli

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from attacks.inputs import Case, cases

#: A representative of each kind; `bench/attack.py` tries them all, each in a process of its own.
CHOSEN = (
    "spec: seed of 5,000 digits",
    "spec: seed of 30 digits",
    "spec: deep list",
    "spec: alias bomb in a list of models",
    "spec: alias to itself",
    "spec: a billion problems",
    "spec: a billion samples",
    "spec: grid of 10^12",
    "spec: key twice within",
    "spec: digits of another script in a name",
    "spec: file of 5,000 characters",
    "spec: date that is none",
    "map: digits of another script",
    "map: null byte",
    "map: huge window",
    "problems: deep JSON lines",
    "problems: nan as answer",
    "problems: surrogate",
    "problems: unquoted comma",
    "problems: row without an answer",
    "plan --memory nan",
    "plan --tokens-per-second 0",
    "run --temperature inf",
    "serve --grace inf",
    "run --out of 300 characters",
    "run a model of 5,000 characters",
    "run --problems 10^9",
    "show --problem 999999999",
    "draw a maze of 5,000 digits",
    "run folder of 5,000 characters",
    "executor",
    "figure of 300 characters",
    "log that is no archive",
)


@pytest.mark.parametrize("case", [case for case in cases() if case.name in CHOSEN], ids=lambda case: case.name)
def test_wrong_input_ends_in_one_sentence(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in case.files.items():
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvatlas", *(word.format(out=tmp_path / "out") for word in case.words)])
    began = time.process_time()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("kvatlas: ") == 1 or "Invalid value" in said
    assert len(said) < 3000
    assert time.process_time() - began < 3


def test_every_chosen_case_is_there() -> None:
    assert set(CHOSEN) <= {case.name for case in cases()}


def test_a_problem_far_on_is_drawn_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It was drawn with all before it, which took minutes for mazes."""
    monkeypatch.setattr(sys, "argv", ["kvatlas", "benchmarks", "show", "SEQBENCH-6x6-L14", "--problem", "99999"])
    began = time.process_time()
    with contextlib.suppress(SystemExit):
        cli.main()
    assert "Alice is in room" in capsys.readouterr().out
    assert time.process_time() - began < 3


def test_a_path_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kvatlas", "plan", os.fsdecode(b"\xff.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert r"'\udcff.yaml' cannot be read" in capsys.readouterr().err
