"""The command line, run in this process: a new one would spend seconds on importing torch."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

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
        assert (code, out, err.count("kvatlas: ") or err.count("Invalid value")) == (2, "", 1), f"{out}\n{err}"
        return err


@pytest.fixture
def kvatlas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line."""
    return Call(monkeypatch, capsys)


@pytest.fixture
def succeed(kvatlas: Call) -> Callable[..., str]:
    """Runs a command that has to succeed: its standard output."""
    return kvatlas.succeed
