from __future__ import annotations

import io
import sys

import pytest

from kvatlas.cli import progress
from kvatlas.core import Grade, Setting, Status, Trace, Usage
from kvatlas.sweep import Progress

TRACE = Trace(
    "m", "CHAIN8", "p", 0, Setting.of("full"), (1,), "", Grade(True, 1.0, "", Status.OK), Usage(1, 1, 0, 2, 2.0, 0, 0.1)
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    with progress.showing(4, quiet=False) as tell:
        for done in range(1, 5):
            tell(Progress(TRACE, done, 4, 300 * done, 100 * done))
    shown = screen.getvalue()
    assert "4/4" in shown
    assert "CHAIN8" in shown
    assert "25% of tokens saved" in shown


def test_a_log_gets_a_line_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 16.0, 17.0, 18.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.showing(4, quiet=False) as tell:
        for done in range(1, 5):
            tell(Progress(TRACE, done, 4, 300 * done, 0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["2/4", "4/4"]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.showing(1, quiet=True) as tell:
        tell(Progress(TRACE, 1, 1, 1, 0))
    assert capsys.readouterr().err == ""
