"""Progress of a sweep on standard error: a live line in a terminal, plain lines now and then otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvatlas.sweep import Progress

#: Seconds between two lines where the output is no terminal.
INTERVAL = 15.0


@contextmanager
def showing(total: int, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Yields what a sweep is to call after each trace."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _live(total) as tell:
            yield tell
    else:
        yield _lines()


def _text(progress: Progress, seconds: float) -> str:
    decoded, saved = progress.decoded_tokens, progress.saved_tokens
    rate = decoded / seconds if seconds > 0 else 0.0
    share = saved / (decoded + saved) if decoded + saved else 0.0
    return f"{progress.trace.benchmark}, {rate:,.0f} tokens/s, {share:.0%} of tokens saved by shared trunks"


@contextmanager
def _live(total: int) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    began = time.monotonic()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("traces"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda p: bar.update(task, completed=p.done, description=_text(p, time.monotonic() - began))


def _lines() -> Callable[[Progress], None]:
    began = last = time.monotonic()

    def tell(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= INTERVAL or progress.done == progress.total:
            last = now
            print(
                f"{progress.done}/{progress.total} traces, {_text(progress, now - began)}", file=sys.stderr, flush=True
            )

    return tell
