"""Comparison of expressions by sympy, in a process with limits on time and memory.

Symbolic algebra on a model's answer may take any time and memory. The process is a plain subprocess with pipes
(`python -P -m kvatlas.answers.judges`), because that starts from any thread, daemonic worker or actor; with -P
no file of the working folder takes the place of a library. A request is a line of JSON, [reference, text, find_in_text,
seconds], and so is the reply, [true or false, seconds]. A process that does not reply in time, or whose reply is not
waited for, is killed and replaced.

Times are those of the process on its CPU, so that a grade does not depend on what else the machine does.
"""

import atexit
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum

from kvatlas.core import KvatlasError

#: CPU seconds for one comparison.
COMPARISON_SECONDS = 5.0
#: Bytes of address space of the process.
MEMORY_BYTES = 2 * 2**30
#: CPU seconds for all comparisons of one answer, whose parts may be many.
ANSWER_SECONDS = 10.0
#: Whether a process can be stopped after so much time on its CPU; else its time is that of a clock.
HAS_CPU_LIMIT = hasattr(signal, "setitimer")
#: Seconds by the clock after which a process is stopped, for each CPU second that it may take.
CLOCK_SECONDS = 20.0 if HAS_CPU_LIMIT else 1.0
#: Seconds by the clock for the start of the process, which imports its libraries.
START_SECONDS = 600.0


class Equality(Enum):
    """The result of a comparison, of the values that the process replies; `TIMEOUT` also if memory ran out."""

    EQUAL = True
    UNEQUAL = False
    TIMEOUT = None


#: A reference, a text, and if the text holds more than one expression, of which the first is compared.
_Request = tuple[str, str, bool]


class ComparisonProcess:
    """A process that compares expressions, one at a time, for any number of threads; started on demand."""

    def __init__(self, seconds: float = COMPARISON_SECONDS) -> None:
        self.seconds = seconds
        #: A forked child leaves the process of its parent alone.
        self.owner_pid = os.getpid()
        self.process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, reference: str, text: str, find_in_text: bool = False) -> Equality:
        """Compare two expressions (LaTeX without dollar signs, or plain); see `compare_expressions`."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            left = _seconds_left.get()
            seconds = min(self.seconds, left)
            if seconds <= 0:
                return Equality.TIMEOUT
            result, taken = self._exchange((reference, text, find_in_text), seconds, CLOCK_SECONDS * seconds)
            _seconds_left.set(left - taken)
            return result

    def _start(self) -> None:
        self.close()
        # One thread: several reserve more address space than the limit allows.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvatlas.answers.judges"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        if self._exchange(("1", "1", False), COMPARISON_SECONDS, START_SECONDS)[0] is Equality.TIMEOUT:
            raise KvatlasError("Answers cannot be compared: the process that runs sympy does not start.")

    def _exchange(self, request: _Request, seconds: float, clock_seconds: float) -> tuple[Equality, float]:
        """Send a request that may take so many CPU seconds; return the reply and the seconds that it took.

        A process that does not reply in time, or ends, is killed.
        """
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(clock_seconds, process.kill)
        try:
            timer.start()
            process.stdin.write(json.dumps([*request, seconds]) + "\n")
            process.stdin.flush()
            is_equal, taken = json.loads(process.stdout.readline())
            return Equality(is_equal), taken
        except BaseException as error:
            # After an interrupt the reply would be read as that to the next request.
            self.close()
            if isinstance(error, OSError | ValueError):
                return Equality.TIMEOUT, seconds
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process. A later request starts a new one."""
        process = self.process
        # Before the kill: after an interrupt in between, no later request meets a process that may be dead.
        self.process = None
        if process is not None and self.owner_pid == os.getpid():
            with contextlib.suppress(OSError), process:
                process.kill()


_process: ComparisonProcess | None = None
_lock = threading.Lock()


#: The CPU seconds that are left to the comparisons of an answer.
_seconds_left: ContextVar[float] = ContextVar("seconds_left", default=math.inf)


@contextlib.contextmanager
def one_answer() -> Iterator[None]:
    """Limit the time of all comparisons inside, which are those of the parts of one answer."""
    token = _seconds_left.set(ANSWER_SECONDS)
    try:
        yield
    finally:
        _seconds_left.reset(token)


def compare_expressions(reference: str, text: str, find_in_text: bool = False) -> Equality:
    """Compare two expressions by this process's own process.

    With `find_in_text` the second one is the first expression in a longer text.
    """
    global _process
    with _lock:
        if _process is None or _process.owner_pid != os.getpid():
            _process = ComparisonProcess()
    return _process.ask(reference, text, find_in_text)


def _limit_time(seconds: float) -> None:
    # A process over its time ends by a signal, even after its parent has ended.
    if HAS_CPU_LIMIT:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve_requests() -> None:
    """Reply to requests until the input ends or memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before any limit: the import takes longer than a comparison.
    from kvatlas.answers import algebra

    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    for line in sys.stdin:
        reference, text, find_in_text, seconds = json.loads(line)
        began = time.process_time()
        _limit_time(seconds)
        is_equal = algebra.equal(reference, text, find_in_text)
        _limit_time(0)
        print(json.dumps([is_equal, time.process_time() - began]), flush=True)


if __name__ == "__main__":
    serve_requests()
