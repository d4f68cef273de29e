from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvatlas.cli import progress
from kvatlas.core import Trace
from kvatlas.results import Manifest, Store
from kvatlas.sweeps import Progress
from tests.stats.synthetic import grid, manifest, setting, traces


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def plan() -> Manifest:
    return manifest(grid("dynts", "random"), problems=4, samples=1)


def told(plan: Manifest) -> Iterator[tuple[str, Trace, Progress]]:
    every = list(traces(plan))
    for done, (key, trace) in enumerate(every, 1):
        yield key, trace, Progress(trace, done, len(every), 300 * done, 100 * done)


def test_a_terminal_gets_a_live_view(plan: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    # rich keeps the codes of a style for the first terminal that shows it; other tests' terminals have all colours.
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "50")
    with progress.showing(plan, tmp_path, quiet=False) as on_trace:
        for _, _, trace in told(plan):
            on_trace(trace)
    shown = screen.getvalue()
    assert "152/152 traces" in shown
    assert "25% of tokens saved" in shown
    assert "0:00 left" in shown
    assert "Local Window Size" in shown
    assert "76/76" in shown
    assert "19/19" in shown


def picture(watch: progress.Watch, width: int = 120, height: int = 50) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=False)
    console.print(progress.picture(watch, console))
    return file.getvalue()


def test_the_map_so_far_has_intervals_and_dashes(plan: Manifest, tmp_path: Path) -> None:
    watch = progress.Watch(plan, tmp_path)
    assert "starting" in picture(watch)
    for _, _, trace in list(told(plan))[: 4 * 5]:
        watch.add(trace)
    text = picture(watch)
    assert "tiny | CHAIN6 | dynts" in text
    assert "50.0" in text
    assert "7.0–93.0" in text
    assert text.count("–") > 5
    assert "20/76" in text
    assert "5/19" in text


def test_what_earlier_sessions_finished_counts(plan: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Store.create(tmp_path) as store:
        for key, trace, _ in list(told(plan))[:40]:
            store.add(key, trace)
    watch = progress.Watch(plan, tmp_path)
    assert watch.before == 40
    assert watch.groups()[0][1:] == (40, 76, 10, 19)
    *_, (_, _, last) = list(told(plan))[:41]
    watch.add(last)
    # One trace in ten seconds, 111 to go.
    assert "18:30 left" in watch.text()


def test_many_benchmarks_and_a_small_terminal_fit(tmp_path: Path) -> None:
    many = manifest(grid("dynts"), benchmarks=[f"B{n}" for n in range(40)], problems=1, samples=1)
    watch = progress.Watch(many, tmp_path)
    for _, _, trace in list(told(many))[:10]:
        watch.add(trace)
    text = picture(watch, 80, 24)
    assert text.count("\n") <= 24
    assert "B0" in text
    assert "more benchmarks" in text


def test_a_run_without_a_grid_has_no_map(tmp_path: Path) -> None:
    single = manifest([], baselines=[setting("window", 8, 0.1)], axes=())
    watch = progress.Watch(single, tmp_path)
    for _, _, trace in told(single):
        watch.add(trace)
    assert watch.maps() == []
    assert "24/24" in picture(watch)


def test_several_models_are_told_apart(tmp_path: Path) -> None:
    both = manifest(grid("dynts"), models=("one", "two"), benchmarks=("CHAIN6",))
    assert [name for name, *_ in progress.Watch(both, tmp_path).groups()] == ["one | CHAIN6", "two | CHAIN6"]


def test_a_log_gets_a_line_now_and_then_and_at_the_end(
    plan: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 16.0, 17.0, 18.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    trace = next(told(plan))[1]
    with progress.showing(plan, tmp_path, quiet=False) as on_trace:
        for done in range(1, 5):
            on_trace(Progress(trace, done, 4, 300 * done, 0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["2/4", "4/4"]
    assert "0:16 left" in lines[0]


def test_quiet_says_nothing(plan: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.showing(plan, tmp_path, quiet=True) as on_trace:
        on_trace(next(told(plan))[2])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3725, "1:02:05")])
def test_time_left_is_a_clock(seconds: float, shown: str) -> None:
    assert progress._clock(seconds) == shown
