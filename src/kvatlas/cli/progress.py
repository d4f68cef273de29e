"""The progress of a sweep on a terminal and in a log."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvatlas import __version__
from kvatlas.cli.output import LOG, note
from kvatlas.core import KvatlasError
from kvatlas.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from kvatlas.sweeps import Progress

#: Seconds between two lines of progress.
INTERVAL = 10.0


def progress_display(quiet: bool = False, verbose: bool = False) -> Callable[[Progress], None]:
    """Return the function that a sweep calls after each trace.

    On a terminal it moves a bar; elsewhere it says a line now and then, and at the end. A `verbose` one says each
    trace. A `quiet` one writes to the log alone.
    """
    from rich.console import Console

    console = Console(stderr=True)
    say = message_display(quiet)
    began = last = time.monotonic()
    before = -1
    bar = _ProgressBar(console) if console.is_terminal and not (quiet or verbose) else None

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
            bar.show(progress, progress.text(before, now - began))
        if now - last >= INTERVAL or is_last:
            last = now
            # Beside a bar the line is for the log.
            (say if bar is None else LOG.info)(progress.text(before, now - began))

    return on_trace


def message_display(quiet: bool) -> Callable[[str], None]:
    """Return the function that says a sentence; a quiet one writes to the log alone."""
    return (lambda sentence: LOG.info(visible(sentence))) if quiet else note


class _ProgressBar:
    """A bar on a terminal, which ends with the last trace, or with the command."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Display
        from rich.table import Column

        # Of a line that is too wide the end of the text is cut.
        text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        share = TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4))
        self._display = Display(BarColumn(12), share, text, console=console, expand=True)
        self._task = self._display.add_task("", total=None)
        # A bar that is left running hides the cursor.
        atexit.register(self._display.stop)

    def show(self, progress: Progress, text: str) -> None:
        """Show so many traces of all, and the text; the last trace ends the bar."""
        self._display.start()
        self._display.update(self._task, total=progress.total, completed=progress.done, description=visible(text))
        if progress.done == progress.total:
            self._display.stop()
            atexit.unregister(self._display.stop)


def count_display(name: str, unit: str) -> Callable[[int, int], None]:
    """Return the function that is called with the units that are done and all; it prints ten lines."""

    def on_done(done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            note(f"{name}: {done:,} of {total:,} {unit}")

    return on_done


@contextmanager
def logging_to(file: Path | None) -> Iterator[None]:
    """Append everything that is said to a log with times, its beginning and the reason of its end; None for no log."""
    if file is None:
        yield
        return
    try:
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise KvatlasError(f"The log {str(file)!r} cannot be written ({error.strerror}).") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)

    began = time.monotonic()
    LOG.info(visible(f"kvatlas {__version__} on {platform.node()}, process {os.getpid()}: {shlex.join(sys.argv[1:])}"))
    try:
        yield
        LOG.info("Ended after %.0f s.", time.monotonic() - began)
    except (KvatlasError, typer.Exit) as end:
        LOG.error(visible(str(end) or "Stopped."))
        raise
    except BaseException:
        LOG.exception("Ended by an error.")
        raise
    finally:
        LOG.removeHandler(handler)
        handler.close()
