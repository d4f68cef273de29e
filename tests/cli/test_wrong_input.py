"""Wrong input at the command line: each ends in one sentence, soon."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvatlas import cli
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec
from tests.cli.wrong_inputs import Case, cases
from tests.command_line import Call
from tests.stats.synthetic import trace


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Imports are not what is timed."""
    importlib.import_module("kvatlas.stats.inference")


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
    assert time.process_time() - began < 30


def test_a_problem_far_on_is_drawn_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It was drawn with all before it, which took minutes for mazes."""
    monkeypatch.setattr(sys, "argv", ["kvatlas", "benchmarks", "show", "SEQBENCH-6x6-L14", "--problem", "99999"])
    began = time.process_time()
    with contextlib.suppress(SystemExit):
        cli.main()
    assert "Alice is in room" in capsys.readouterr().out
    assert time.process_time() - began < 30


def test_a_path_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kvatlas", "plan", os.fsdecode(b"\xff.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert r"'\udcff.yaml' cannot be read" in capsys.readouterr().err


def options_of(words: Sequence[str]) -> set[str]:
    """The options of the command that these words begin with."""
    command: Any = typer.main.get_command(cli.app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(
    "words",
    [
        *[(name, "run", "--out", f"x.{end}") for name, end in (("map", "png"), ("report", "html"))],
        *[("describe", "run"), ("export", "run"), ("compare", "run", "--out", "x.png")],
        *[("curves", "run", "--out", "x.png"), ("export-setting", "run", "--to", "r-kv-vllm", "--out", "x")],
        ("verify", "http://127.0.0.1:9", "--against", "run", "--out", "x"),
        *[("benchmarks", name, "odd.jsonl") for name in ("check", "show")],
        ("run", "embedded:tiny-llama", "odd.jsonl"),
        ("run", "embedded:tiny-llama", "CHAIN4", "--out", "run"),
        *[("plan", "odd.yaml"), ("sweep", "odd.yaml", "--out", "x"), ("screen", "odd.yaml", "--out", "x")],
        ("sweep", "seed.yaml", "--out", "run"),
    ],
    ids=" ".join,
)
def test_options_that_an_error_names_are_there(kvatlas: Call, unfinished: Path, words: tuple[str, ...]) -> None:
    """Of the command that was called, or of those that the sentence names."""
    code, _, said = kvatlas(*words)
    assert code == 2
    sentence = said.splitlines()[-1]
    commands = [words, *(name.split() for name in re.findall(r"kvatlas ([a-z-]+(?: [a-z-]+)?)", sentence))]
    there = set().union(*(options_of(name) for name in commands))
    assert set(re.findall(r"--[a-z][a-z-]+", sentence)) <= there, sentence


@pytest.fixture
def unfinished(tmp_path: Path, spec_data: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that misses traces, specs, and a problem file with unusual columns."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(parse_spec(spec_data()))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan.manifest())
        cell = plan.manifest().expected[0]
        store.add(cell.run_key, trace(cell, cell.problems[0], 0, True))
    (tmp_path / "odd.jsonl").write_text('{"q": "1 + 1?", "a": "2"}\n')
    odd = {"name": "odd", "file": "odd.jsonl"}
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(spec_data(benchmarks=[odd])))
    (tmp_path / "seed.yaml").write_text(yaml.safe_dump(spec_data(seed=9)))
    return tmp_path


def test_options_that_a_sentence_names_are_those_of_a_command() -> None:
    """Of all sentences for users: errors, findings, notes, and what commands print."""
    source = Path(cli.__file__).parents[1]
    told = "KvatlasError", "Finding", "Note", "echo", "_note"
    named = {
        option
        for path in source.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) in told
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text.value)
    }
    commands = [typer.main.get_command(cli.app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    there = {
        name
        for command in commands
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert len(named) > 10
    assert named - there <= {"--no-deps", "--user", "--map-root-user", "--mount"}
