from __future__ import annotations

import io
import itertools
import sys

import pytest

from kvatlas.cli import output
from kvatlas.core import Trace
from kvatlas.sweeps import Progress
from tests.stats.synthetic import grid, manifest, traces


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def trace() -> Trace:
    return next(traces(manifest(grid("dynts"), problems=1, samples=1)))[1]


def test_a_terminal_gets_a_bar(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    with output.progress_display(quiet=False) as on_trace:
        for done in range(1, 5):
            on_trace(Progress(trace, done, 4, 300 * done, 100 * done))
    shown = screen.getvalue()
    assert "4/4 traces" in shown
    assert "25% of tokens saved" in shown
    assert "0:00 left" in shown


def test_a_log_gets_a_line_now_and_then_and_at_the_end(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Traces of earlier sessions count as done, not for the rate: after 8 of 11 one takes 16 s, the next two 32."""
    clock = itertools.chain([0.0], itertools.repeat(16.0, 1), itertools.repeat(17.0))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress_display(quiet=False) as on_trace:
        for done in range(9, 12):
            on_trace(Progress(trace, done, 11, 300 * (done - 8), 0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["9/11", "11/11"]
    assert "0:00:32 left" in lines[0]


def test_quiet_says_nothing(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress_display(quiet=True) as on_trace:
        on_trace(Progress(trace, 1, 2, 3, 4))
    assert capsys.readouterr().err == ""
