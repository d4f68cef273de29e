"""The command line, run in this process: a new one would spend seconds on importing torch."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvatlas import cli


@dataclass
class Call:
    """Runs a command of kvatlas and returns its exit code, standard output and standard error."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["kvatlas", *map(str, words)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = self.capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    def succeed(self, *words: object, err: str | None = None) -> str:
        """Run a command that has to succeed, and to say just `err` beside, and return its standard output."""
        code, out, said = self(*words)
        assert (code, said if err is not None else None) == (0, err), f"kvatlas {words}\n{out}\n{said}"
        return out

    def refuse(self, *words: object) -> str:
        """Run a command with wrong input and return its one sentence, typer's for an option."""
        code, out, err = self(*words)
        of_parser = ("Invalid value", "Missing ", "No such ", "Got unexpected", " needs a value")
        sentences = err.count("kvatlas: ") or sum(map(err.count, of_parser))
        assert (code, out, sentences) == (2, "", 1), f"{out}\n{err}"
        return err


#: Commands of `kvatlas` from the standard input, to what they return and print.
COMMANDS = """
import contextlib, io, json, sys
from kvatlas import cli
done = []
for words in json.load(sys.stdin):
    sys.argv = ["kvatlas", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
    done.append((code, out.getvalue(), err.getvalue()))
json.dump(done, sys.stdout)
"""


def run_apart(
    commands: Iterable[str], folder: Path, python: object = sys.executable, **environment: str
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of commands, one after the other in a process of their own."""
    done = subprocess.run(
        [str(python), "-c", COMMANDS], cwd=folder, env=os.environ | environment,
        input=json.dumps([words.split() for words in commands]), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def run_command(words: Iterable[str], output: int) -> None:
    """Run a command in a fork of a process of tests, with all that it prints at a file."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    # Of the handlers of logs that other tests made, a new process has none.
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    sys.argv = ["kvatlas", *words]
    cli.main()


@pytest.fixture
def kvatlas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line."""
    return Call(monkeypatch, capsys)


@pytest.fixture
def succeed(kvatlas: Call) -> Callable[..., str]:
    """Runs a command that has to succeed: its standard output."""
    return kvatlas.succeed
