"""Comparison of expressions by math-verify and sympy, in a process with limits on time and memory.

Symbolic algebra on a model's answer may take any time and memory. The process is a plain subprocess with pipes
(`python -P -m kvatlas.benchmarks.judges SECONDS BYTES`), because that starts from any thread, daemonic worker or actor;
with -P no file of the working folder takes the place of a library. A request is a line of JSON, [reference, text,
find_in_text], and so is the reply, true or false. A process that does not reply in time, or whose reply is not waited
for, is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from typing import Any

from kvatlas.core import KvatlasError

#: Seconds for one comparison.
COMPARISON_SECONDS = 5
#: Bytes of address space of the process.
MEMORY_BYTES = 2 * 2**30
#: Seconds for all comparisons of one answer, whose parts may be many.
ANSWER_SECONDS = 10.0
#: Seconds for the start of the process, which imports its libraries.
START_SECONDS = 120.0


class Equality(Enum):
    """The result of a comparison, of the values that the process replies; `TIMEOUT` also if memory ran out."""

    EQUAL = True
    UNEQUAL = False
    TIMEOUT = None


#: A reference, a text, and if the text holds more than one expression, of which the first is compared.
_Request = tuple[str, str, bool]


class Judge:
    """A process that compares expressions, one at a time, for any number of threads; started on demand."""

    def __init__(self, seconds: int = COMPARISON_SECONDS) -> None:
        self.seconds = seconds
        #: A forked child leaves the process of its parent alone.
        self.owner_pid = os.getpid()
        self.process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, reference: str, text: str, find_in_text: bool = False) -> Equality:
        """Compare two expressions (LaTeX without dollar signs, or plain); see `compare`."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            seconds = min(self.seconds, _deadline.get() - time.monotonic())
            if seconds <= 0:
                return Equality.TIMEOUT
            return self._exchange((reference, text, find_in_text), seconds)

    def _start(self) -> None:
        self.close()
        # One thread: several reserve more address space than the limit allows.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvatlas.benchmarks.judges", str(self.seconds), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        if self._exchange(("1", "1", False), START_SECONDS) is Equality.TIMEOUT:
            raise KvatlasError("Answers cannot be compared: the process that runs math-verify does not start.")

    def _exchange(self, request: _Request, seconds: float) -> Equality:
        """Send a request and return the reply. A process that does not reply in time, or ends, is killed."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        try:
            timer.start()
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return Equality(json.loads(process.stdout.readline()))
        except BaseException as error:
            # After an interrupt the reply would be read as that to the next request.
            self.close()
            if isinstance(error, OSError | ValueError):
                return Equality.TIMEOUT
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


_judge: Judge | None = None
_lock = threading.Lock()
#: The time (monotonic) when the comparisons of the present answer have to end.
_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


@contextlib.contextmanager
def one_answer() -> Iterator[None]:
    """Limit the time of all comparisons inside, which are those of the parts of one answer."""
    token = _deadline.set(min(_deadline.get(), time.monotonic() + ANSWER_SECONDS))
    try:
        yield
    finally:
        _deadline.reset(token)


def compare(reference: str, text: str, find_in_text: bool = False) -> Equality:
    """Compare two expressions by this process's own judge.

    With `find_in_text` the second one is the first expression in a longer text.
    """
    global _judge
    with _lock:
        if _judge is None or _judge.owner_pid != os.getpid():
            _judge = Judge()
    return _judge.ask(reference, text, find_in_text)


#: Functions and constants that typed mathematics and sympy call alike, and those with another name in sympy.
_SAME_NAMES = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh"),
    *("sqrt", "cbrt", "exp", "log", "binomial", "pi", "oo"),
)
_OTHER_NAMES = {
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "abs": "Abs",
    "ln": "log",
    "binom": "binomial",
    "infty": "oo",
}
_SYMPY_NAMES = {**dict(zip(_SAME_NAMES, _SAME_NAMES, strict=True)), **_OTHER_NAMES}
# Longer names first, so that "binom" does not match the beginning of "binomial".
_NAME = re.compile("|".join(sorted(_SYMPY_NAMES, key=len, reverse=True)))
#: Texts of numbers, these names, single letters and signs alone: safe for sympy's parser, which evaluates Python.
_TYPED = re.compile(
    rf"(?:\d+(?:\.\d+)?(?:[eE][+-]?\d{{1,3}}(?!\d))?|\.\d+|\\?(?:{_NAME.pattern})(?![a-z])|[a-zA-Z]|[-+*/^()!,\s])*"
)


def _typed_reader(symbol: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that reads typed mathematics, such as 2*sqrt(3) or pi/2; None for other texts.

    `symbol` gives the symbol of a letter.
    """
    import sympy
    from sympy.parsing import sympy_parser as parser

    letters = {letter: symbol(letter) for letter in string.ascii_letters}
    names = {name: getattr(sympy, value) for name, value in _SYMPY_NAMES.items()}
    builders = {name: getattr(sympy, name) for name in ("Symbol", "Integer", "Float", "Rational", "factorial")}
    steps = (
        *parser.standard_transformations,
        parser.convert_xor,
        parser.implicit_multiplication_application,
        parser.rationalize,
    )

    def read(text: str) -> Any:
        # C(5, 2) is a binomial coefficient.
        text = re.sub(r"(?<![A-Za-z])C\(", "binomial(", text)
        if not _NAME.search(text) or not _TYPED.fullmatch(text):
            return None
        text = text.replace("\\", "")
        with contextlib.suppress(SyntaxError, TypeError, ValueError, AttributeError, parser.TokenError):
            return parser.parse_expr(text, {**letters, **names}, steps, {"__builtins__": {}, **builders})
        return None

    return read


class _Comparer:
    """Comparison by math-verify, in the process of the judge."""

    def __init__(self) -> None:
        import math_verify

        self._library = math_verify
        self._extraction = (math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig())
        self._read_typed = _typed_reader(lambda letter: self._find(f"${letter}$")[0])

    def equal(self, reference: str, text: str, find_in_text: bool) -> bool:
        """Return whether two expressions are equal; False if one cannot be read (see `compare`)."""
        try:
            given = self._find(text) if find_in_text else self._read(text)
            return self._same(self._read(reference), given)
        except MemoryError:
            raise
        except Exception:
            return False

    def _read(self, text: str) -> list[Any]:
        """Return the readings of an expression."""
        # Before LaTeX, in which names without a backslash are products of letters.
        typed = self._read_typed(text)
        return self._find(f"${text}$") if typed is None else [typed]

    def _find(self, text: str) -> list[Any]:
        """Return the readings of the first expression in a text; in dollar signs it is all of it."""
        # The library's own time limits need the main thread's alarm, which is ours.
        found = self._library.parse(text, self._extraction, parsing_timeout=None)
        return [_with_one_i(expression) for expression in found]

    def _same(self, first: list[Any], second: list[Any]) -> bool:
        # In both orders: an interval and the equivalent inequality are equal in one order only.
        orders = ((first, second), (second, first))
        return any(self._library.verify(gold, answer, timeout_seconds=None) for gold, answer in orders)


def _with_one_i(expression: Any) -> Any:
    """Return the expression with sympy's I for math-verify's other symbol of i."""
    from sympy import I

    if not hasattr(expression, "xreplace"):
        return expression
    return expression.xreplace({symbol: I for symbol in expression.free_symbols if symbol.name == "i"})


def _limit_memory(size: int) -> None:
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _limit_time(seconds: float) -> None:
    # A process over its time ends by a signal, even after its parent has ended.
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Reply to requests until the input ends or memory runs out."""
    seconds = int(sys.argv[1])
    memory = int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before any limit: the import takes longer than a comparison.
    comparer = _Comparer()
    _limit_memory(memory)
    for line in sys.stdin:
        _limit_time(seconds + 1)
        reference, text, find_in_text = json.loads(line)
        reply = comparer.equal(reference, text, find_in_text)
        _limit_time(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
