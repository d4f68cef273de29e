"""Ends what a killed process has left behind: `python -m kvatlas.orphans`, started by it, at the other end of a pipe.

It notes the descendants of its parent, and kills them when the pipe breaks. For programs such as Ray's, some of which
outlive a driver that was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

#: Seconds between two looks at the descendants.
LOOK = 1.0


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """Should this process be killed while this lasts, so are its descendants; on Linux, where /proc names them."""
    if not Path("/proc/self/stat").exists():
        yield
        return
    words = [sys.executable, "-m", "kvatlas.orphans"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            # Not the end of the pipe but a word: nobody was killed.
            with contextlib.suppress(OSError):
                watcher.communicate(b"done")


def _processes() -> dict[int, tuple[int, str]]:
    """All processes: their parents, and when they began, which tells them from later ones of the same number."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            processes[int(folder.name)] = int(fields[1]), fields[19]
    return processes


def _grown(noted: dict[int, str]) -> dict[int, str]:
    """The processes of `noted` that are still there, and their descendants."""
    there = _processes()
    grown = {process: began for process, began in noted.items() if process in there and there[process][1] == began}
    before = -1
    while before != len(grown):
        before = len(grown)
        grown |= {process: began for process, (parent, began) in there.items() if parent in grown}
    return grown


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    noted = _grown({parent: _processes()[parent][1]})
    while not select.select([sys.stdin], [], [], LOOK)[0]:
        noted = _grown(noted)
    if sys.stdin.read():
        return
    for process in _grown(noted).keys() - {os.getpid(), parent}:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    _main()
