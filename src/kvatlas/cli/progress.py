"""The progress of a sweep."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvatlas.cli.output import note
from kvatlas.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Display

    from kvatlas.sweeps import Progress

#: Seconds between two lines of progress.
INTERVAL = 10.0


def progress_display(quiet: bool = False, verbose: bool = False) -> Callable[[Progress], None]:
    """Return the function that a sweep calls after each trace.

    On a terminal it moves a bar; elsewhere it says a line now and then, and at the end. A `verbose` one says each
    trace. A `quiet` one is silent.
    """
    from rich.console import Console

    console = Console(stderr=True)
    say = message_display(quiet)
    began = last = time.monotonic()
    before = -1
    bar = _progress_bar(console) if console.is_terminal and not (quiet or verbose) else None

    def on_trace(progress: Progress) -> None:
        nonlocal before, last
        if before < 0:
            before = progress.done - 1
        now = time.monotonic()
        if verbose:
            trace = progress.trace
            tokens = trace.usage.output_tokens
            name = f"{trace.model} {trace.setting}, {trace.problem}, sample {trace.sample}"
            say(f"{name}: {trace.grade.outcome}, {tokens} tokens")

        is_last = progress.done == progress.total
        if bar is not None:
            text = visible(progress.text(before, now - began))
            bar.start()
            bar.update(bar.task_ids[0], total=progress.total, completed=progress.done, description=text)
            if is_last:
                bar.stop()
                atexit.unregister(bar.stop)
        elif now - last >= INTERVAL or is_last:
            last = now
            say(progress.text(before, now - began))

    return on_trace


def message_display(quiet: bool) -> Callable[[str], None]:
    """Return the function that says a sentence; a quiet one is silent."""
    return (lambda _: None) if quiet else note


def _progress_bar(console: Console) -> Display:
    """Return a bar on a terminal, which ends with the last trace, or with the command."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Display
    from rich.table import Column

    # Of a line that is too wide the end of the text is cut.
    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    share = TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4))
    bar = Display(BarColumn(12), share, text, console=console, expand=True)
    bar.add_task("", total=None)
    # A bar that is left running hides the cursor.
    atexit.register(bar.stop)
    return bar


def count_display(name: str, unit: str) -> Callable[[int, int], None]:
    """Return the function that is called with the units that are done and all; it prints ten lines."""

    def on_done(done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            note(f"{name}: {done:,} of {total:,} {unit}")

    return on_done
