"""Comparison of expressions by sympy, in a process with limits on time and memory.

Symbolic algebra on a model's answer may take any time and memory. The process is a plain subprocess with pipes
(`python -P -m kvatlas.answers.judges BYTES`), because that starts from any thread, daemonic worker or actor; with -P
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
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
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
            [sys.executable, "-P", "-m", "kvatlas.answers.judges", str(MEMORY_BYTES)],
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


def compare_expressions(reference: str, text: str, find_in_text: bool = False) -> Equality:
    """Compare two expressions by this process's own process.

    With `find_in_text` the second one is the first expression in a longer text.
    """
    global _process
    with _lock:
        if _process is None or _process.owner_pid != os.getpid():
            _process = ComparisonProcess()
    return _process.ask(reference, text, find_in_text)


#: A logarithm whose base is not stated, and the same with a symbol as its base.
_BASELESS_LOG = re.compile(r"\\log(?![A-Za-z])(?!\s*_)")
#: A natural and a common logarithm in a reference, which tell the base of a \log in the answer.
_NATURAL_LOG = re.compile(r"\\ln(?![A-Za-z])")
_COMMON_LOG = re.compile(r"\\log\s*_\s*(?:\{\s*10\s*\}|10)")
#: A logarithm in typed mathematics, which is that of \ln or \log.
_TYPED_LOG = re.compile(r"(?<![\\A-Za-z])log(?=[\s(\d])")
#: The largest difference of two equal numbers as a share of the reference, where one is written as a decimal.
ROUNDING = 1e-6
#: The largest difference of two exact numbers that are equal, alone and as a share, evaluated with `DIGITS` digits.
EXACT = 1e-25
EXACT_SHARE = 1e-300
DIGITS = 400
_DECIMALS = re.compile(r"\.(\d+)")
_TURNED = {">": "<", r"\ge": r"\le"}


def _log_spellings(reference: str, text: str) -> list[str]:
    r"""Return the spellings of an answer that are compared: they differ in what its logarithms without a base mean.

    A typed log is natural, or a `\log`. A `\log` has the base of the logarithms of the reference if these are all
    natural or all common, since models write `\log` for both. A `\log` of the reference is equal to no other logarithm.
    """
    spellings = [text, _TYPED_LOG.sub(r"\\log", text)]
    is_natural = _NATURAL_LOG.search(reference) is not None
    is_common = _COMMON_LOG.search(reference) is not None
    if is_natural != is_common:
        base = r"\\ln" if is_natural else r"\\log_{10}"
        spellings += [_BASELESS_LOG.sub(base, spelling) for spelling in spellings]
    return list(dict.fromkeys(spellings))


class _Comparer:
    """Comparison of expressions by sympy, and of texts by math-verify, in the process of comparisons."""

    def __init__(self) -> None:
        import sympy

        from kvatlas.answers.expressions import Chain, read_expression

        self._sympy = sympy
        self._read = read_expression
        self._value = Chain

    def equal(self, reference: str, text: str, find_in_text: bool) -> bool:
        """Return whether two expressions are equal; False if one cannot be read (see `compare_expressions`)."""
        try:
            if find_in_text:
                return self._verified(reference, text)
            decimals = [len(digits) for digits in _DECIMALS.findall(f"{reference} {text}")]
            last_digit = 10.0 ** -max(decimals) if decimals else 0.0
            first = self._read(reference)
            readings = map(self._read, _log_spellings(reference, text))
            return first is not None and any(
                second is not None and self._same(first, second, last_digit) for second in readings
            )
        except MemoryError:
            raise
        except Exception:
            return False

    def _verified(self, reference: str, text: str) -> bool:
        """Return whether math-verify finds the reference in a text.

        In both orders: an interval and the equivalent inequality are equal in one order only.
        """
        import math_verify

        # The library's own time limits need the main thread's alarm, which is ours.
        first, second = (math_verify.parse(each, parsing_timeout=None) for each in (f"${reference}$", text))
        orders = ((first, second), (second, first))
        return any(math_verify.verify(gold, answer, timeout_seconds=None) for gold, answer in orders)

    def _same(self, first: Any, second: Any, last_digit: float) -> bool:
        """Return whether two readings are equal."""
        if first.signs and second.signs:
            return self._same_relations(first, second, last_digit)
        value, chain = (second, first) if first.signs else (first, second)
        if not set(chain.signs) <= {"=", r"\approx"} or not self._holds(chain):
            return False
        # Each side of an equation between numbers states the value, else the last one; 7 = x + y states none.
        is_number = [side.is_number for side in chain.sides]
        if is_number[0] and not is_number[-1]:
            return False
        sides = chain.sides if all(is_number) else chain.sides[-1:]
        return any(self._same_value(value.sides[0], side, last_digit) for side in sides)

    def _holds(self, chain: Any) -> bool:
        """Return whether the neighbouring numbers of an equation are equal; a decimal may be rounded."""
        for sign, left, right in zip(chain.signs, chain.sides, chain.sides[1:], strict=False):
            if not (left.is_number and right.is_number) or self._same_value(left, right, 0.0):
                continue
            places = max(self._places(left), self._places(right))
            # The last digit may be cut off where the sign tells of it, else it is rounded.
            error = 10.0**-places * (1.0 if sign == r"\approx" else 0.5)
            if places < (1 if sign == r"\approx" else 2) or abs(self._sympy.N(left - right)) > error:
                return False
        return True

    def _places(self, number: Any) -> int:
        """Return the decimal places of a number; 0 for an integer and for one that is no decimal."""
        if not number.is_Rational:
            return 0
        return next((places for places in range(1, 16) if (number * 10**places).is_integer), 0)

    def _same_value(self, first: Any, second: Any, last_digit: float) -> bool:
        """Return whether two values are equal: numbers by their digits, others by algebra."""
        sympy = self._sympy
        if first == second:
            return True
        if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
            is_matrix = all(isinstance(each, sympy.MatrixBase) for each in (first, second))
            if not is_matrix or first.shape != second.shape:
                return False
            return all(self._same_value(a, b, last_digit) for a, b in zip(first, second, strict=True))
        # A product from 1 to n is one from 2 to n, but not what was written.
        first, second = (
            each if each.free_symbols and each.has(sympy.Product) else each.doit() for each in (first, second)
        )
        if first == second:
            return True
        if not (first.is_number and second.is_number):
            return self._same_formula(first, second)

        sizes = [abs(sympy.N(each)) for each in (first, second)]
        if not all(size.is_finite for size in sizes):
            return bool(first == second and first.is_extended_real)
        difference = abs(sympy.N(first - second, 15, maxn=DIGITS))
        # A decimal is a rounded number, an integer is not.
        is_rounded = last_digit and not (first.is_Integer or second.is_Integer)
        if is_rounded and difference <= min(ROUNDING * sizes[0], last_digit):
            return True
        if first.is_Rational and second.is_Rational:
            return False
        return bool(difference <= min(EXACT, EXACT_SHARE * max(sizes))) or (
            bool(difference <= EXACT) and sympy.simplify(first - second) == 0
        )

    def _same_formula(self, first: Any, second: Any) -> bool:
        """Return whether two expressions with symbols are equal; of roots for positive values of the symbols."""
        sympy = self._sympy
        if sympy.simplify(first - second) == 0:
            return True

        def has_root(formula: Any) -> bool:
            return any(power.exp.is_Rational and power.exp.q == 2 for power in formula.atoms(sympy.Pow))

        if not (has_root(first) and has_root(second)) or first.has(sympy.Abs) or second.has(sympy.Abs):
            return False
        difference = first - second
        positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in difference.free_symbols}
        return bool(sympy.simplify(difference.subs(positive)) == 0)

    def _same_relations(self, first: Any, second: Any, last_digit: float) -> bool:
        """Return whether two chains of relations are equal, from left to right or turned round."""
        sympy = self._sympy
        chains = []
        for chain in (first, second):
            if _TURNED.keys() & set(chain.signs):
                signs = tuple(_TURNED.get(sign, f"not {sign}") for sign in reversed(chain.signs))
                chain = self._value(chain.sides[::-1], signs)
            # A statement about numbers differs from every other statement.
            if all(side.is_number for side in chain.sides):
                return False
            chains.append(chain)
        first, second = chains

        is_equation = set(first.signs) == set(second.signs) == {"="}
        if is_equation and max(len(first.signs), len(second.signs)) > 1:
            # The steps of a chain are on the way to its last value.
            pairs = [(first.sides[0], second.sides[0]), (first.sides[-1], second.sides[-1])]
            return all(self._same_value(*pair, last_digit) for pair in pairs)
        if first.signs != second.signs:
            return False
        is_single = len(first.signs) == 1 and all(isinstance(side, sympy.Expr) for side in first.sides + second.sides)
        if is_single and first.signs[0] in ("=", r"\ne"):
            return self._same_equation(first.sides, second.sides)
        if is_single and first.signs[0] in ("<", r"\le"):
            ratio = sympy.simplify((first.sides[0] - first.sides[1]) / (second.sides[0] - second.sides[1]))
            return bool(ratio.is_number and ratio.is_finite and ratio > 0)
        return all(self._same_value(a, b, last_digit) for a, b in zip(first.sides, second.sides, strict=True))

    def _same_equation(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        """Return whether two equations, of two sides each, have proportional sides or the same solutions."""
        sympy = self._sympy
        difference = first[0] - first[1]
        other_difference = second[0] - second[1]
        ratio = sympy.simplify(difference / other_difference)
        if ratio.is_number:
            return bool(ratio.is_finite and ratio != 0)

        # Of periodic functions sympy gives some of the zeros.
        periodic = (sympy.sin, sympy.cos, sympy.tan)
        if difference.has(*periodic) or other_difference.has(*periodic):
            return False
        symbols = difference.free_symbols
        if not symbols or symbols != other_difference.free_symbols:
            return False
        for symbol in symbols:
            zeros = {sympy.simplify(zero) for zero in sympy.solve(difference, symbol)}
            other_zeros = {sympy.simplify(zero) for zero in sympy.solve(other_difference, symbol)}
            if not zeros or zeros != other_zeros:
                return False
        return True


def _limit_time(seconds: float) -> None:
    # A process over its time ends by a signal, even after its parent has ended.
    if HAS_CPU_LIMIT:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve_requests() -> None:
    """Reply to requests until the input ends or memory runs out."""
    memory = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before any limit: the import takes longer than a comparison.
    comparer = _Comparer()
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    for line in sys.stdin:
        reference, text, find_in_text, seconds = json.loads(line)
        began = time.process_time()
        _limit_time(seconds)
        is_equal = comparer.equal(reference, text, find_in_text)
        _limit_time(0)
        print(json.dumps([is_equal, time.process_time() - began]), flush=True)


if __name__ == "__main__":
    serve_requests()
