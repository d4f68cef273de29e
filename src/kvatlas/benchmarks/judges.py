"""Comparison of expressions by math-verify, in a pool of processes with limits on time and memory.

Symbolic algebra on a model's answer may take any time and memory. The processes are plain subprocesses with pipes
(`python -m kvatlas.benchmarks.judges SECONDS BYTES`), because these start from any thread, daemonic worker or actor.
Requests and replies are lines of JSON. A process that does not reply in time is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from enum import Enum

from kvatlas.core import KvatlasError

#: Seconds for one comparison, and bytes of address space of a process.
SECONDS, MEMORY = 5, 2 * 2**30
#: Seconds for the start of a process, which imports its libraries.
START = 120.0


class Equality(Enum):
    """The result of a comparison; `TIMEOUT` also if memory ran out."""

    EQUAL = True
    UNEQUAL = False
    TIMEOUT = None


class _Judge:
    """One process that compares expressions."""

    def __init__(self, seconds: int) -> None:
        # One thread: several reserve more address space than the limit allows.
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

    def answer(self, request: list[str], seconds: float) -> Equality:
        """Compare. A process that does not reply in time, or ends, is killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            verdict = Equality(json.loads(self.process.stdout.readline()))
        except (OSError, ValueError):
            # The process has ended.
            self.kill()
            verdict = Equality.TIMEOUT
        finally:
            timer.cancel()
        return verdict

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Judges:
    """A pool of at most `size` processes for any number of threads, started on demand."""

    def __init__(self, size: int = 2, seconds: int = SECONDS) -> None:
        self.seconds = seconds
        self._owner = os.getpid()
        self._places = threading.BoundedSemaphore(size)
        self._idle: list[_Judge] = []
        atexit.register(self.close)

    @property
    def owned(self) -> bool:
        """True in the process that created the pool: a forked child leaves the processes of its parent alone."""
        return self._owner == os.getpid()

    def ask(self, request: list[str]) -> Equality:
        """Compare two expressions (LaTeX without dollar signs, or plain), or find one in a text (a third word)."""
        with self._places:
            judge = self._take()
            verdict = judge.answer(request, self.seconds)
            if verdict is not Equality.TIMEOUT:
                self._idle.append(judge)
            return verdict

    def _take(self) -> _Judge:
        # list.pop and list.append are atomic.
        with contextlib.suppress(IndexError):
            while (judge := self._idle.pop()).process.poll() is not None:
                judge.kill()
            return judge
        judge = _Judge(self.seconds)
        if judge.answer(["1", "1"], START) is Equality.TIMEOUT:
            raise KvatlasError("Answers cannot be compared: the process that runs math-verify does not start.")
        return judge

    def close(self) -> None:
        """End all processes. A later request starts new ones."""
        with contextlib.suppress(IndexError):
            while self.owned:
                self._idle.pop().kill()


_judges: Judges | None = None
_lock = threading.Lock()


def compare(first: str, second: str) -> Equality:
    """Compare two expressions in this process's own pool."""
    return _pool().ask([first, second])


def read(reference: str, text: str) -> Equality:
    """Return EQUAL if math-verify finds the reference in a text."""
    return _pool().ask([reference, text, "read"])


def _pool() -> Judges:
    global _judges
    with _lock:
        if _judges is None or not _judges.owned:
            _judges = Judges()
        return _judges


def main() -> None:
    """Reply to requests until the input ends. If memory runs out, the process ends, as its state is then unknown."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before any limit: the import takes longer than a comparison.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[object]:
        # The library's own time limits need the main thread's alarm, which is ours.
        return list(parse(text, extraction, parsing_timeout=None))

    def equal(reference: str, text: str, *whole: str) -> bool:
        try:
            expected, other = parsed(f"${reference}$"), parsed(text if whole else f"${text}$")
            # In both orders: an interval and the equivalent inequality are equal in one order only.
            return any(verify(a, b, timeout_seconds=None) for a, b in ((expected, other), (other, expected)))
        except MemoryError:
            raise
        except Exception:
            return False

    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def limit(time: float) -> None:
        # A process over its time ends by a signal, even after its parent has ended.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, time)

    for line in sys.stdin:
        limit(seconds + 1)
        reply = equal(*json.loads(line))
        limit(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
