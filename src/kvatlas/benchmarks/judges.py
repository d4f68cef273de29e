"""Comparison of expressions by math-verify and sympy, in a process with limits on time and memory.

Symbolic algebra on a model's answer may take any time and memory. The process is a plain subprocess with pipes
(`python -P -m kvatlas.benchmarks.judges BYTES`), because that starts from any thread, daemonic worker or actor; with -P
no file of the working folder takes the place of a library. A request is a line of JSON, [reference, text, find_in_text,
seconds], and so is the reply, [true or false, seconds]. A process that does not reply in time, or whose reply is not
waited for, is killed and replaced.

Times are those of the process on its CPU, so that a grade does not depend on what else the machine does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
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
from dataclasses import dataclass
from enum import Enum
from typing import Any

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


class Judge:
    """A process that compares expressions, one at a time, for any number of threads; started on demand."""

    def __init__(self, seconds: float = COMPARISON_SECONDS) -> None:
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
            allowance = _allowance.get() or _Allowance(math.inf)
            seconds = min(self.seconds, allowance.seconds)
            if seconds <= 0:
                return Equality.TIMEOUT
            result, taken = self._exchange((reference, text, find_in_text), seconds, CLOCK_SECONDS * seconds)
            allowance.seconds -= taken
            return result

    def _start(self) -> None:
        self.close()
        # One thread: several reserve more address space than the limit allows.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvatlas.benchmarks.judges", str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        if self._exchange(("1", "1", False), COMPARISON_SECONDS, START_SECONDS)[0] is Equality.TIMEOUT:
            raise KvatlasError("Answers cannot be compared: the process that runs math-verify does not start.")

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


_judge: Judge | None = None
_lock = threading.Lock()


@dataclass
class _Allowance:
    """The CPU seconds that are left to the comparisons of an answer."""

    seconds: float


_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


@contextlib.contextmanager
def one_answer() -> Iterator[None]:
    """Limit the time of all comparisons inside, which are those of the parts of one answer."""
    if _allowance.get() is not None:
        yield
        return
    token = _allowance.set(_Allowance(ANSWER_SECONDS))
    try:
        yield
    finally:
        _allowance.reset(token)


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
    if HAS_CPU_LIMIT:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Reply to requests until the input ends or memory runs out."""
    memory = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before any limit: the import takes longer than a comparison.
    comparer = _Comparer()
    _limit_memory(memory)
    for line in sys.stdin:
        reference, text, find_in_text, seconds = json.loads(line)
        began = time.process_time()
        _limit_time(seconds)
        is_equal = comparer.equal(reference, text, find_in_text)
        _limit_time(0)
        print(json.dumps([is_equal, time.process_time() - began]), flush=True)


if __name__ == "__main__":
    main()
