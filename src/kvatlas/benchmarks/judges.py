"""Comparison of expressions by math-verify, in a process with limits on time and memory.

Symbolic algebra on a model's answer may take any time and memory. The process is a plain subprocess with pipes
(`python -m kvatlas.benchmarks.judges SECONDS BYTES`), because that starts from any thread, daemonic worker or actor.
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

#: Seconds for one comparison, and bytes of address space of the process.
SECONDS, MEMORY = 5, 2 * 2**30
#: Seconds for the start of the process, which imports its libraries.
START = 120.0


class Equality(Enum):
    """The result of a comparison; `TIMEOUT` also if memory ran out."""

    EQUAL = True
    UNEQUAL = False
    TIMEOUT = None


class Judge:
    """A process that compares expressions, one at a time, for any number of threads; started on demand."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self.seconds = seconds
        #: A forked child leaves the process of its parent alone.
        self.owner = os.getpid()
        self.process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, request: list[str]) -> Equality:
        """Compare two expressions (LaTeX without dollar signs, or plain), or find one in a text (a third word)."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            return self._answer(request, self.seconds)

    def _start(self) -> None:
        self.close()
        # One thread: several reserve more address space than the limit allows.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvatlas.benchmarks.judges", str(self.seconds), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        if self._answer(["1", "1"], START) is Equality.TIMEOUT:
            raise KvatlasError("Answers cannot be compared: the process that runs math-verify does not start.")

    def _answer(self, request: list[str], seconds: float) -> Equality:
        """Compare. A process that does not reply in time, or ends, is killed."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return Equality(json.loads(process.stdout.readline()))
        except (OSError, ValueError):
            self.close()
            return Equality.TIMEOUT
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process. A later request starts a new one."""
        if self.process is not None and self.owner == os.getpid():
            with contextlib.suppress(OSError), self.process:
                self.process.kill()
        self.process = None


_judge: Judge | None = None
_lock = threading.Lock()


def compare(*request: str) -> Equality:
    """Compare two expressions by this process's own judge; with a third word "read", find the first in a text."""
    global _judge
    with _lock:
        if _judge is None or _judge.owner != os.getpid():
            _judge = Judge()
    return _judge.ask(list(request))


def main() -> None:
    """Reply to requests until the input ends or memory runs out."""
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
