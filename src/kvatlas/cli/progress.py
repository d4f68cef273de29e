"""Progress of a sweep on standard error: a bar in a terminal, plain lines now and then otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvatlas.text import visible

if TYPE_CHECKING:
    from kvatlas.sweeps import Progress

#: Seconds between two lines where the output is no terminal, and between two pictures where it is one.
INTERVAL, REFRESH = 15.0, 0.5


@contextmanager
def showing(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Yield the function that a sweep calls after each trace."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar() as on_trace:
            yield on_trace
    else:
        yield _lines()


class Rate:
    """The text of a sweep's progress; traces of earlier sessions count as done, and not for the rate."""

    def __init__(self) -> None:
        self.began, self.before = time.monotonic(), -1

    def text(self, progress: Progress) -> str:
        """Traces, tokens per second, the share that shared trunks save, the time left."""
        if self.before < 0:
            self.before = progress.done - 1
        seconds = time.monotonic() - self.began
        decoded, saved = progress.decoded_tokens, progress.saved_tokens
        rate = decoded / seconds if seconds > 0 else 0.0
        share = saved / (decoded + saved) if decoded + saved else 0.0
        left = seconds * (progress.total - progress.done) / (progress.done - self.before)
        text: str = visible(
            f"{progress.done}/{progress.total} traces, {progress.trace.benchmark}, {rate:,.0f} tokens/s, "
            f"{share:.0%} of tokens saved by shared trunks, {clock(left)} left"
        )
        return text


def clock(seconds: float) -> str:
    """Seconds as 59:59 or 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = BarColumn(), TextColumn("{task.description}", markup=False)
    with Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task, rate, last = bar.add_task("starting", total=None), Rate(), 0.0

        def on_trace(progress: Progress) -> None:
            nonlocal last
            text, now = rate.text(progress), time.monotonic()
            if now - last >= REFRESH or progress.done == progress.total:
                last = now
                bar.update(task, completed=progress.done, total=progress.total, description=text, refresh=True)

        yield on_trace


def _lines() -> Callable[[Progress], None]:
    rate, last = Rate(), time.monotonic()

    def on_trace(progress: Progress) -> None:
        nonlocal last
        text, now = rate.text(progress), time.monotonic()
        if now - last >= INTERVAL or progress.done == progress.total:
            last = now
            print(text, file=sys.stderr, flush=True)

    return on_trace
