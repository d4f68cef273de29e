"""Expressions compared by math-verify, in a pool of processes with limits on time and memory.

Symbolic algebra on a model's answer may take any time and memory. The processes are plain subprocesses with pipes
(`python -m kvatlas.benchmarks.judges SECONDS BYTES`): they start from any thread, from daemonic workers and from
actors, which neither signals nor `multiprocessing` allow. Requests and answers are lines of JSON. A process that does
not answer in time is killed, and the next request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from enum import Enum

from kvatlas.core import KvatlasError

#: Seconds for one comparison, and bytes of address space of a process.
SECONDS, MEMORY = 5, 2 * 2**30
#: Seconds in which a process must have imported its libraries.
START = 120.0


class Equality(Enum):
    """The result of a comparison; `TIMEOUT` also where memory ran out."""

    EQUAL = True
    UNEQUAL = False
    TIMEOUT = None


class _Judge:
    """One process. Its lines are read by a thread, so that waiting for them can end in time on every platform."""

    def __init__(self, seconds: int) -> None:
        # One thread: several of them reserve more address space than a limit allows.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvatlas.benchmarks.judges", str(seconds), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                self.lines.put(line)
        self.lines.put("null")

    def answer(self, request: list[str], seconds: float) -> Equality:
        """Compare; a process that does not answer in time, or ends, is killed."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            verdict = Equality(json.loads(self.lines.get(timeout=seconds)))
        except (OSError, queue.Empty):
            verdict = Equality.TIMEOUT
        if verdict is Equality.TIMEOUT:
            self.kill()
        return verdict

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Judges:
    """At most `size` processes that compare, started when first needed, for any number of threads."""

    def __init__(self, size: int = 2, seconds: int = SECONDS) -> None:
        self.seconds = seconds
        self._owner = os.getpid()
        self._places = threading.BoundedSemaphore(size)
        self._idle: list[_Judge] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def owned(self) -> bool:
        """True in the process that started them: a forked child leaves its parent's alone."""
        return self._owner == os.getpid()

    def ask(self, request: list[str]) -> Equality:
        """Compare two expressions (LaTeX without dollar signs, or plain), or find one in a text (a third word)."""
        with self._places:
            judge = self._take()
            verdict = judge.answer(request, self.seconds)
            if verdict is not Equality.TIMEOUT:
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
        judge = _Judge(self.seconds)
        if judge.answer(["1", "1"], START) is Equality.TIMEOUT:
            raise KvatlasError("Answers cannot be compared: the process that runs math-verify does not start.")
        return judge

    def close(self) -> None:
        """End all processes; a later request starts new ones."""
        if self.owned:
            with self._lock:
                while self._idle:
                    self._idle.pop().kill()


_judges: Judges | None = None
_lock = threading.Lock()


def compare(first: str, second: str) -> Equality:
    """Compare two expressions in this process's own pool."""
    return _pool().ask([first, second])


def read(reference: str, text: str) -> Equality:
    """Find out if math-verify finds the reference in a text, whatever it takes for the text's answer."""
    return _pool().ask([reference, text, "read"])


def _pool() -> Judges:
    global _judges
    with _lock:
        if _judges is None or not _judges.owned:
            _judges = Judges()
        return _judges


def main() -> None:
    """Answer requests until there are no more. Out of memory the process ends: it is not to be trusted any more."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before any limit: importing costs more than judging, and a kill in the middle of it would look like a verdict.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[object]:
        # The library's own time limits need the main thread's alarm, which is ours.
        return list(parse(text, extraction, parsing_timeout=None))

    def equal(reference: str, text: str, *whole: str) -> bool:
        try:
            expected, other = parsed(f"${reference}$"), parsed(text if whole else f"${text}$")
            # Either order: an interval and the inequality that means the same are found equal in one of them only.
            return any(verify(a, b, timeout_seconds=None) for a, b in ((expected, other), (other, expected)))
        except MemoryError:
            raise
        except Exception:
            return False

    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def limit(time: float) -> None:
        # Over its time the process ends by a signal, even after its parent has ended.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, time)

    for line in sys.stdin:
        limit(seconds + 1)
        reply = equal(*json.loads(line))
        limit(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
