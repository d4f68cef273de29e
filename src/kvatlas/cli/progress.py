"""Progress of a sweep on standard error: a live view in a terminal, plain lines now and then otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.core import KvatlasError
from kvatlas.visible import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvatlas.core import Map
    from kvatlas.results import Manifest
    from kvatlas.stats.estimates.cells import CellTraces
    from kvatlas.sweeps import Progress

#: Seconds between two lines where the output is no terminal, and between two pictures where it is one.
INTERVAL, REFRESH = 15.0, 0.5
#: Lines that a map and the table of benchmarks take besides their rows.
_AROUND_MAP, _AROUND_TABLE = 5, 5
_BAR = 24


@contextmanager
def showing(manifest: Manifest, folder: Path, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Yields what a sweep is to call after each trace; `folder` may hold what earlier sessions finished."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _live(manifest, folder) as on_trace:
            yield on_trace
    else:
        yield _lines()


class Watch:
    """What is known of a sweep so far: earlier sessions' traces and those told since."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        from kvatlas.results.store import FILE, Store
        from kvatlas.stats.estimates.cells import add_traces, cells_of
        from kvatlas.stats.estimates.metrics import Measure, usual_metric
        from kvatlas.stats.estimates.run_data import RunData

        self.metric = usual_metric(manifest)
        self.measure = Measure(manifest, self.metric)
        self.began = time.monotonic()
        self.latest: Progress | None = None
        self.cells = cells_of(manifest, self.measure)
        if (folder / FILE).is_file():
            with Store.open(folder) as store:
                add_traces(self.cells, store.columns(), self.measure)
        self.run = RunData(manifest, (), self.metric, partial=True, chosen=self.cells)
        self.before = sum(cell.stored for cell in self.cells)
        self._keys = {(c.model, c.benchmark, c.setting): c.run_key for c in manifest.expected}

    def add(self, progress: Progress) -> None:
        """Count a finished trace."""
        from kvatlas.results import TraceColumns
        from kvatlas.stats.estimates.cells import add_traces

        trace = progress.trace
        self.latest = progress
        key = self._keys.get((trace.model, trace.benchmark, trace.setting), "")
        add_traces(self.cells, TraceColumns.of([(key, trace)]), self.measure)

    def text(self) -> str:
        """Traces, rate, what shared trunks save, time left, in one line."""
        if self.latest is None:
            return "starting"
        return _text(self.latest, time.monotonic() - self.began, self.before)

    def groups(self) -> list[tuple[str, int, int, int, int]]:
        """By benchmark (and model, where there are several): traces done and promised, settings done and promised."""
        several = len({cell.expected.model for cell in self.cells}) > 1
        names: dict[str, list[CellTraces]] = {}
        for cell in self.cells:
            name = f"{cell.expected.model} | {cell.expected.benchmark}" if several else cell.expected.benchmark
            names.setdefault(name, []).append(cell)
        return [
            (
                name,
                sum(cell.stored for cell in group),
                sum(cell.promised for cell in group),
                sum(cell.stored >= cell.promised for cell in group),
                len(group),
            )
            for name, group in names.items()
        ]

    def maps(self) -> list[Map]:
        """The maps so far of the benchmark at work; none where the run has not two axes."""
        from kvatlas.stats.estimates.maps import maps_of_run

        if self.latest is None:
            return []
        at = self.latest.trace.model, self.latest.trace.benchmark
        cells = [cell for cell in self.cells if (cell.expected.model, cell.expected.benchmark) == at]
        try:
            return maps_of_run(self.run.with_cells(cells))
        except KvatlasError:
            return []


def _text(progress: Progress, seconds: float, before: int) -> str:
    decoded, saved = progress.decoded_tokens, progress.saved_tokens
    rate = decoded / seconds if seconds > 0 else 0.0
    share = saved / (decoded + saved) if decoded + saved else 0.0
    fresh = progress.done - before
    left = seconds * (progress.total - progress.done) / fresh if fresh > 0 else 0.0
    return (
        f"{progress.done}/{progress.total} traces, {progress.trace.benchmark}, {rate:,.0f} tokens/s, "
        f"{share:.0%} of tokens saved by shared trunks, {_clock(left)} left"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _live(manifest: Manifest, folder: Path) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    watch = Watch(manifest, folder)
    last = 0.0
    with Live(picture(watch, console), console=console, auto_refresh=False, transient=True) as live:

        def on_trace(progress: Progress) -> None:
            nonlocal last
            watch.add(progress)
            now = time.monotonic()
            if now - last >= REFRESH or progress.done == progress.total:
                last = now
                live.update(picture(watch, console), refresh=True)

        yield on_trace


def picture(watch: Watch, console: Console) -> RenderableType:
    """The live view: a line, a table of benchmarks, and as many maps so far as the terminal has room for."""
    from rich.console import Group
    from rich.text import Text

    from kvatlas.report.terminal import map_table

    maps = watch.maps()
    tall = max((len(map_.axes[0][1]) * 2 + _AROUND_MAP for map_ in maps), default=0)
    groups = watch.groups()
    rows = max(1, min(len(groups), console.height - _AROUND_TABLE - tall))
    parts: list[RenderableType] = [Text(visible(watch.text()), style="bold"), _table(groups, rows)]
    room = console.height - _AROUND_TABLE - rows
    for map_ in maps:
        table = map_table(map_, console.width)
        room -= len(console.render_lines(table, pad=False))
        if room < 0:
            break
        parts.append(table)
    return Group(*parts)


def _table(groups: list[tuple[str, int, int, int, int]], rows: int) -> RenderableType:
    """The benchmarks, those at work first where not all fit."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("benchmark", "left"), ("", "left"), ("traces", "right"), ("settings done", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    shown = (
        sorted(groups, key=lambda group: (group[1] >= group[2], -group[1] / max(group[2], 1)))
        if rows < len(groups)
        else groups
    )
    for name, done, promised, settings, of in shown[:rows]:
        bar = ProgressBar(total=max(promised, 1), completed=done, width=_BAR)
        table.add_row(Text(visible(name)), bar, f"{done}/{promised}", f"{settings}/{of}")
    if rows < len(groups):
        table.caption = f"and {len(groups) - rows} more benchmarks"
    return table


def _lines() -> Callable[[Progress], None]:
    began = last = time.monotonic()
    before: int | None = None

    def on_trace(progress: Progress) -> None:
        nonlocal last, before
        now = time.monotonic()
        before = progress.done - 1 if before is None else before
        if now - last >= INTERVAL or progress.done == progress.total:
            last = now
            print(visible(_text(progress, now - began, before)), file=sys.stderr, flush=True)

    return on_trace
