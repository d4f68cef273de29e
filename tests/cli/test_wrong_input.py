"""Wrong input at the command line: each ends in one sentence, soon."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from kvatlas import cli

# Imports are not what is timed.
from kvatlas.stats.inference import planning as _  # noqa: F401
from tests.cli.wrong_inputs import Case, cases


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
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
