"""The command line, run in this process: a new one would spend seconds on importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from kvatlas import cli

#: Words of a command to its exit code, standard output and standard error.
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvatlas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvatlas", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def succeed(kvatlas: Call) -> Callable[..., str]:
    """Runs a command that has to succeed: its standard output."""

    def call(*words: object) -> str:
        code, out, err = kvatlas(*words)
        assert code == 0, f"kvatlas {' '.join(map(str, words))}\n{out}\n{err}"
        return out

    return call
