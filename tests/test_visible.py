"""Hostile text, in names and in what models wrote, on its way to a terminal, a figure, a table and a log."""

import json
import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from typer.main import get_command

from kvatlas import cli
from kvatlas.cli.sweeps import print_run
from kvatlas.core import Grade, Status, Trace
from kvatlas.results.csv_maps import read_maps
from kvatlas.text import guarded, unguarded, visible
from tests.command_line import Call
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run

#: A colour, a title, the clipboard, a cleared screen, markup of Rich, and writing turned round.
HOSTILE = "\x1b[38;5;201mpink\x1b]0;title\x07\x1b]52;c;aGk=\x07\x1b[2J[/nope][link=http://x]here[/link]\u202e\x9b31m"
#: What of it must not come out: the introducers of its commands. (Rich's own colours begin with ESC [ and a digit.)
STEERING = ("\x1b[38;5;201m", "\x1b]", "\x07", "\x1b[2J", "\u202e", "\x9b")
NAME = f"=1+1{HOSTILE}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = manifest(grid("dynts"), models=(NAME,), benchmarks=(NAME,), problems=2, samples=1)

    def harm(trace: Trace) -> Trace:
        return replace(trace, text=HOSTILE, grade=Grade(trace.grade.correct, 1.0, HOSTILE, Status.OK))

    return store_run(tmp_path_factory.mktemp("hostile") / "run", plan, change=harm)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], str]]:
    """Calls something whose standard output and error are a real terminal: what the terminal was sent."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    sent: list[bytes] = []

    def collect() -> None:
        try:
            while data := os.read(ours, 65536):
                sent.append(data)
        except OSError:
            pass

    reader = threading.Thread(target=collect)
    reader.start()

    def call(action: Callable[[], None]) -> str:
        with open(theirs, "w", encoding="utf-8", closefd=False) as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "stderr", stream)
            assert stream.isatty()
            action()
        os.close(theirs)
        reader.join(5)
        return b"".join(sent).decode()

    yield call
    os.close(ours)


def command(*words: object) -> Callable[[], None]:
    def action() -> None:
        sys.argv = ["kvatlas", *map(str, words)]
        with pytest.raises(SystemExit):
            cli.main()

    return action


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "RUN"),
        ("describe", "RUN", "--long"),
        ("map", "RUN", "--metric", HOSTILE, "--out", "OUT"),
        ("describe", f"nowhere{HOSTILE}"),
        ("list", "benchmarks", "file:FILE"),
        ("check", "file:FILE"),
        ("plan", "SPEC"),
        ("deploy", "export", "RUN", "--to", "kvpress", "--policy", HOSTILE, "--out", "FOLDER"),
        (
            "deploy",
            "verify",
            f"http://127.0.0.1:1/{HOSTILE}",
            "--against",
            "RUN",
            "--policy",
            HOSTILE,
            "--out",
            "FOLDER",
        ),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, tuple) else None,
)
def test_no_command_sends_hostile_text_to_a_terminal(
    terminal: Callable[..., str], run: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    file, spec = tmp_path / "mine.json", tmp_path / "spec.yaml"
    file.write_text(json.dumps([{"question": f"{HOSTILE}?", "answer": f"7{HOSTILE}"}]))
    spec.write_text(yaml.safe_dump({"models": [f"hf:{HOSTILE}"], "benchmarks": ["CHAIN4"]}))
    names = {"RUN": run, "OUT": tmp_path / "a.svg", "FOLDER": tmp_path / "a", "file:FILE": f"file:{file}", "SPEC": spec}
    said = terminal(command(*(names.get(word, word) for word in words)))
    assert "⟨U+001B⟩" in said or r"\x1b" in said
    assert not [mark for mark in STEERING if mark in said]
    assert "Traceback" not in said


def every_command(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(every_command(get_command(cli.app))), ids=" ".join)
def test_every_command_repeats_what_it_was_given_harmlessly(
    terminal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = terminal(command(*path, f"a{HOSTILE}", f"b{HOSTILE}", "--out", f"c{HOSTILE}"))
    assert said
    assert not [mark for mark in STEERING if mark in said]
    assert "Traceback" not in said


def test_a_finished_run_is_printed_whatever_its_names(terminal: Callable[..., str], run: Path) -> None:
    said = terminal(lambda: print_run(run, 2))
    assert "[/nope]" in said
    assert not [mark for mark in STEERING if mark in said]


def test_what_goes_to_a_file_or_a_program_is_exact(kvatlas: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('[{"question": "Which \\u202e mark?", "answer": "7"}]')
    assert kvatlas("list", "benchmarks", f"file:{file}")[1].startswith("Which \u202e mark?\n")


def test_figures_and_tables_of_hostile_names_can_be_opened(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    figure = tmp_path / "a.svg"
    assert kvatlas("map", run, "--out", figure)[0] == 0
    root = ElementTree.parse(figure).getroot()
    texts = "".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "⟨U+001B⟩" in texts
    table = tmp_path / "a.data.csv"
    assert table.read_text().splitlines()[1].lstrip('"').startswith("'=1+1")
    assert {(item.model, item.benchmark) for item in read_maps(table)} == {(visible(NAME), visible(NAME))}
    assert not [mark for mark in STEERING if mark in table.read_text()]


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-x+1", "@SUM(A1)", "'quoted", "'=1", "''=1", "-2", "+3.5e4", "plain", ""]
)
def test_formulas_are_guarded_and_come_back(text: str) -> None:
    assert unguarded(guarded(text)) == text
    assert not guarded(text).startswith(("=", "@"))
    assert guarded(-2) == -2


def test_letters_of_all_scripts_stay() -> None:
    text = "naïve 中文 العربية ≤ ∀x 🙂\n\tend"
    assert visible(text) == text
    assert visible("a\u200bb\ufeff\r\x7f\ud800") == "a⟨U+200B⟩b⟨U+FEFF⟩⟨U+000D⟩⟨U+007F⟩⟨U+D800⟩"
    assert visible(7) == 7
