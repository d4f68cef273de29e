"""Programs of ours in processes that can be killed, for work whose time and memory nobody knows beforehand.

Plain subprocesses with pipes: they can be started from any thread, from daemonic workers and from actors, which neither
signals nor `multiprocessing` allow. Requests and answers are lines of JSON. A process that does not answer in time is
killed, and the next request starts another.
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
from collections.abc import Callable
from typing import Any

from kvatlas.core import KvatlasError

#: Seconds in which a process must have imported its libraries.
START = 120.0


class _Program:
    """One process. Its lines are read by a thread, so that waiting for them can end in time on every platform."""

    def __init__(self, words: list[str]) -> None:
        # One thread: several of them reserve more address space than a limit allows.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
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
        self.lines.put("")

    def ask(self, request: object, seconds: float) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request, default=str) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except (OSError, queue.Empty) as error:
            raise TimeoutError from error
        if not line:
            raise TimeoutError
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Programs:
    """Processes of `python -m MODULE WORDS`, at most `size`, started when first needed, for any number of threads.

    `seconds` are there for an answer. A new process is asked `probe` first; if it gives no answer, `missing` is raised
    as a KvatlasError.
    """

    def __init__(self, module: str, *words: object, size: int, seconds: float, probe: object, missing: str) -> None:
        self.words, self.seconds, self.probe, self.missing = [module, *map(str, words)], seconds, probe, missing
        self._owner = os.getpid()
        self._places = threading.BoundedSemaphore(size)
        self._idle: list[_Program] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def owned(self) -> bool:
        """Whether this is the process that made them: a forked child leaves its parent's alone."""
        return self._owner == os.getpid()

    def ask(self, request: object) -> Any:
        """The answer to a request; TimeoutError if none came in time, or the process died of it."""
        with self._places:
            program = self._take()
            try:
                answer = program.ask(request, self.seconds)
            except TimeoutError:
                program.kill()
                raise
            with self._lock:
                self._idle.append(program)
        return answer

    def _take(self) -> _Program:
        with self._lock:
            while self._idle:
                program = self._idle.pop()
                if program.process.poll() is None:
                    return program
                program.kill()
        program = _Program(self.words)
        try:
            program.ask(self.probe, START)
        except TimeoutError as error:
            program.kill()
            raise KvatlasError(self.missing) from error
        return program

    def close(self) -> None:
        """End all processes; a later request starts new ones."""
        if self.owned:
            with self._lock:
                while self._idle:
                    self._idle.pop().kill()


def serve(answer: Callable[[Any], object], memory: int, seconds: float) -> None:
    """The program's side: answer requests until there are no more, within so many bytes of address space.

    A request over its time ends the process by a signal, even after its parent has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def limit(time: float) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, time)

    for line in sys.stdin:
        limit(seconds)
        reply = answer(json.loads(line))
        limit(0)
        print(json.dumps(reply), flush=True)
