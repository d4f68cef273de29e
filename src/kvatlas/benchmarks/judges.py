"""A pool of killable processes in which math-verify compares expressions, with limits on time and memory.

Plain subprocesses with pipes: they can be started from any thread, from daemonic workers and from actors, which neither
signals nor `multiprocessing` allow. A process that does not answer in time is killed and its place is filled anew.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from enum import Enum

from kvatlas.core import KvatlasError

#: Seconds for one comparison, and bytes of address space of a process.
SECONDS, MEMORY = 5, 2 * 2**30
#: Seconds in which a process must have imported its libraries.
START = 120


class Verdict(Enum):
    """What came of a comparison; `timeout` also where memory ran out."""

    EQUAL = True
    UNEQUAL = False
    TIMEOUT = None


class _Judge:
    """One process. Its lines are read by a thread, so that waiting for them can end in time on every platform."""

    def __init__(self, seconds: int, memory: int) -> None:
        command = [sys.executable, "-m", "kvatlas.benchmarks.verifier", str(seconds), str(memory)]
        # One thread: several of them reserve more address space than the limit allows.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        if self.ask("1", "1", START) is not Verdict.EQUAL:
            self.kill()
            raise KvatlasError("Answers cannot be compared: the process that runs math-verify does not start.")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                self.lines.put(line)
        self.lines.put("")

    def ask(self, first: str, second: str, seconds: float) -> Verdict:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([first, second]) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except (OSError, queue.Empty):
            return Verdict.TIMEOUT
        return Verdict(json.loads(line)) if line else Verdict.TIMEOUT

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Judges:
    """Processes that are started when first needed, at most `size` of them, and used by any number of threads."""

    def __init__(self, size: int = 2, seconds: int = SECONDS, memory: int = MEMORY) -> None:
        self.size, self.seconds, self.memory = size, seconds, memory
        self._owner = os.getpid()
        self._places = threading.BoundedSemaphore(size)
        self._idle: list[_Judge] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def compare(self, first: str, second: str) -> Verdict:
        """Whether two expressions (LaTeX without dollar signs, or plain) are equal."""
        with self._places:
            judge = self._take()
            verdict = judge.ask(first, second, self.seconds)
            if verdict is Verdict.TIMEOUT:
                judge.kill()
            else:
                with self._lock:
                    self._idle.append(judge)
        return verdict

    def _take(self) -> _Judge:
        with self._lock:
            while self._idle:
                judge = self._idle.pop()
                if judge.process.poll() is None:
                    return judge
                judge.kill()
        return _Judge(self.seconds, self.memory)

    def close(self) -> None:
        """End all processes; a later comparison starts new ones. A forked child leaves its parent's alone."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            while self._idle:
                self._idle.pop().kill()


_judges: Judges | None = None
_lock = threading.Lock()


def compare(first: str, second: str) -> Verdict:
    """Whether two expressions are equal, decided in this process's own pool."""
    global _judges
    with _lock:
        if _judges is None or _judges._owner != os.getpid():
            _judges = Judges()
    return _judges.compare(first, second)
