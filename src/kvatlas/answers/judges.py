"""Comparison of expressions by math-verify and sympy, in a process with limits on time and memory.

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
import string
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
_TYPED_NAME = re.compile(rf"(?<![\\A-Za-z])(?:{_NAME.pattern}|C(?=\())(?![a-z])")
#: Texts of numbers, these names, single letters and signs alone: safe for sympy's parser, which evaluates Python.
_TYPED = re.compile(
    rf"(?:\d+(?:\.\d+)?(?:[eE][+-]?\d{{1,3}}(?!\d))?|\.\d+|\\?(?:{_NAME.pattern})(?![a-z])|[a-zA-Z]|[-+*/^()!,\s])*"
)


#: Marks that latex2sympy accepts without reading them (derivatives, omitted terms, bases of numbers, transposed
#: matrices, approximations, indices of I), and symbols whose order or case it does not keep.
_NOT_READ = re.compile(
    r"'|\\(?:[lcvd]?dots|prime|approx|angle|triangle|nabla|Gamma)(?![A-Za-z])|\d\s*_"
    r"|\^\s*\{?\s*\\?T(?![A-Za-z])|(?<![A-Za-z\\])I\s*[_^]"
)
#: The exponent of 2^(1/3), of which LaTeX would raise to the bracket alone.
_TYPED_POWER = re.compile(r"\^\s*\(((?:[^()]|\([^()]*\))*)\)")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[a-z]*\}|\\[A-Za-z]+")
#: A logarithm whose base is not stated, and the same with a symbol as its base.
_BASELESS_LOG = re.compile(r"\\log(?![A-Za-z])(?!\s*_)")
_LOG_OF_UNKNOWN_BASE = r"\\log_{\\varsigma}"
#: A natural and a common logarithm in a reference, which tell the base of a \log in the answer.
_NATURAL_LOG = re.compile(r"\\ln(?![A-Za-z])")
_COMMON_LOG = re.compile(r"\\log\s*_\s*(?:\{\s*10\s*\}|10)")
#: A logarithm in typed mathematics, which is that of \ln or \log.
_TYPED_LOG = re.compile(r"(?<![\\A-Za-z])log(?=[\s(\d])")
#: The largest difference of two equal numbers as a share of the reference, where one is written as a decimal.
ROUNDING = 1e-6
#: The same where both are exact, evaluated with `DIGITS` digits.
EXACT = 1e-25
DIGITS = 30


class _Reader:
    r"""Reads whole expressions, in typed mathematics (2*sqrt(3), pi/2) or LaTeX; None for one that is read in part.

    Each letter of a text has to be a symbol in its reading, and each number has to matter: another number in its place
    gives another reading.
    """

    def __init__(self) -> None:
        import sympy
        from latex2sympy2_extended import latex2sympy2
        from sympy.core.function import AppliedUndef
        from sympy.parsing import sympy_parser as parser

        self._sympy = sympy
        self._parser = parser
        self._latex = latex2sympy2
        # A capital letter is another symbol than a small one.
        self._conversion = latex2sympy2.ConversionConfig(lowercase_symbols=False)
        self._unknown_function = AppliedUndef
        letters = {letter: sympy.Symbol(letter, real=True) for letter in string.ascii_letters}
        letters |= {"i": sympy.I, "I": sympy.I, "e": sympy.E}
        self._names = {**letters, **{name: getattr(sympy, value) for name, value in _SYMPY_NAMES.items()}}
        self._builders = {
            name: getattr(sympy, name) for name in ("Symbol", "Integer", "Float", "Rational", "factorial")
        }
        self._steps = (
            *parser.standard_transformations,
            parser.convert_xor,
            parser.implicit_multiplication_application,
            parser.rationalize,
        )

    def read(self, text: str) -> Any:
        """Return the reading of all of a text; None if it has no reading."""
        # In LaTeX names without a backslash are products of letters.
        if not _TYPED_NAME.search(text):
            reading = self._read_latex(text)
            if reading is not None and self._covers(reading, text):
                return reading

        # Typed mathematics; C(5, 2) is a binomial coefficient.
        text = re.sub(r"(?<![A-Za-z])C\(", "binomial(", text)
        if not _NAME.search(text) or not _TYPED.fullmatch(text) or _BASELESS_LOG.search(text):
            return None
        text = text.replace("\\", "")
        with contextlib.suppress(SyntaxError, TypeError, ValueError, AttributeError, self._parser.TokenError):
            return self._parser.parse_expr(text, self._names, self._steps, {"__builtins__": {}, **self._builders})
        return None

    def _read_latex(self, text: str) -> Any:
        """Return the reading of LaTeX with exact decimals, one imaginary unit, and symbols for derivatives of unknown
        functions.

        None for a text that is not read whole, and for a statement that becomes true or false by that.
        """
        text = _BASELESS_LOG.sub(_LOG_OF_UNKNOWN_BASE, _TYPED_POWER.sub(r"^{\1}", text))
        if _NOT_READ.search(text):
            return None
        # All commands have to be read whole: to latex2sympy an unknown \pmod is \pm and the letters o, d.
        lexer = self._latex.PSLexer(self._latex.InputStream(text))
        lexer.removeErrorListeners()
        ends = {token.start: token.stop + 1 for token in lexer.getAllTokens()}
        if any(ends.get(command.start(), command.end()) < command.end() for command in _COMMAND.finditer(text)):
            return None

        sympy = self._sympy
        try:
            # Degrees are numbers, so that \sin 30^\circ is 1/2.
            reading = self._latex.latex2sympy(
                text, is_real=True, convert_degrees=True, normalization_config=None, conversion_config=self._conversion
            )
            terms = {decimal: sympy.Rational(str(decimal)) for decimal in reading.atoms(sympy.Float)}
            terms |= {symbol: sympy.I for symbol in reading.free_symbols if symbol.name == "i"}
            for derivative in reading.atoms(sympy.Derivative):
                # Sympy takes the derivative of y by x for zero.
                if not derivative.expr.has(*derivative.variables):
                    variables = " d".join(map(str, derivative.variables))
                    terms[derivative] = sympy.Symbol(f"d{derivative.expr}/d{variables}", real=True)
            if isinstance(reading, sympy.And):
                # The order of a chain is lost otherwise.
                return type(reading)(*(relation.xreplace(terms) for relation in reading._unsorted_args))
            reading = reading.xreplace(terms)
            return None if isinstance(reading, sympy.logic.boolalg.BooleanAtom) else reading
        except MemoryError:
            raise
        except Exception:
            return None

    def _covers(self, reading: Any, text: str) -> bool:
        """Return whether a reading holds each letter of a text, and each number matters to it."""
        sympy = self._sympy
        names = [symbol.name for symbol in reading.atoms(sympy.Symbol)]
        names += [str(function.func) for function in reading.atoms(self._unknown_function)]
        constants = {"iI": (sympy.I,), "e": (sympy.E, sympy.exp), "d": (sympy.Derivative, sympy.Integral)}
        names += [letters for letters, readings in constants.items() if reading.has(*readings)]
        if r"\mathbb" in text:
            names.append("NZQRC")
        letters_of_text = set(re.findall("[A-Za-z]", _COMMAND.sub(" ", text)))
        if not letters_of_text <= set("".join(names)):
            return False

        numbers: set[str] = set()
        for rational in reading.atoms(sympy.Rational):
            numbers |= {str(abs(rational.p)), str(abs(rational.q))}
        for match in re.finditer(r"\d+", text):
            if match[0] in numbers:
                continue
            # Of two other numbers one may have the same value, as in the binomial coefficients of 5 and 2 or 3.
            others = [f"{text[: match.start()]}{int(match[0]) + more}{text[match.end() :]}" for more in (1, 2)]
            if all(self._read_latex(other) == reading for other in others):
                return False
        return True


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
    """Comparison of expressions by sympy and math-verify, in the process of comparisons."""

    def __init__(self) -> None:
        import math_verify
        import sympy

        self._library = math_verify
        self._sympy = sympy
        self._reader = _Reader()

    def equal(self, reference: str, text: str, find_in_text: bool) -> bool:
        """Return whether two expressions are equal; False if one cannot be read (see `compare_expressions`)."""
        try:
            if find_in_text:
                return self._verified(self._find(f"${reference}$"), self._find(text))
            tolerance = ROUNDING if "." in reference + text else EXACT
            first = self._reader.read(reference)
            for spelling in _log_spellings(reference, text):
                second = self._reader.read(spelling)
                if first is not None and second is not None and self._same(first, second, tolerance):
                    return True
            return False
        except MemoryError:
            raise
        except Exception:
            return False

    def _find(self, text: str) -> Any:
        """Return math-verify's readings of the first expression in a text."""
        # The library's own time limits need the main thread's alarm, which is ours.
        return self._library.parse(text, parsing_timeout=None)

    def _verified(self, first: Any, second: Any) -> bool:
        # In both orders: an interval and the equivalent inequality are equal in one order only.
        orders = ((first, second), (second, first))
        return any(self._library.verify(gold, answer, timeout_seconds=None) for gold, answer in orders)

    def _same(self, first: Any, second: Any, tolerance: float) -> bool:
        """Return whether two readings are equal."""
        first_links = self._links(first)
        second_links = self._links(second)

        # A statement about constants differs from every other statement, and a false one from every value.
        for links in (first_links, second_links):
            if links and not any(link.free_symbols for link in links):
                if (first_links and second_links) or not self._is_equation(links):
                    return False
                if not all(self._same(link.lhs, link.rhs, tolerance) for link in links):
                    return False
        if first == second:
            return True

        if first_links and second_links:
            if self._is_equation(first_links) and self._is_equation(second_links):
                return self._same_equation(first_links, second_links, tolerance)
            return self._verified(first, second)
        if self._is_equation(first_links or second_links):
            # Of an equation and a value the right side counts.
            first = first_links[-1].rhs if first_links else first
            second = second_links[-1].rhs if second_links else second
            return self._same(first, second, tolerance)
        return self._same_value(first, second, tolerance)

    def _links(self, reading: Any) -> Sequence[Any]:
        """Return the relations of a chain, or the one of a relation; none for a value."""
        if isinstance(reading, self._sympy.And):
            return list(reading._unsorted_args)
        return [reading] if isinstance(reading, self._sympy.core.relational.Relational) else []

    def _is_equation(self, links: Sequence[Any]) -> bool:
        return bool(links) and all(isinstance(link, self._sympy.Eq) for link in links)

    def _same_value(self, first: Any, second: Any, tolerance: float) -> bool:
        """Return whether two expressions are equal: numbers by their digits, others by algebra."""
        sympy = self._sympy
        if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
            return self._verified(first, second)
        if not (first.is_number and second.is_number):
            return bool(sympy.simplify(first - second) == 0)

        values = [sympy.N(quantity.doit(), DIGITS) for quantity in (first, second)]
        if not all(value.is_finite for value in values):
            return bool(values[0] == values[1] and values[0].is_infinite and values[0].is_extended_real)
        difference = abs(values[0] - values[1])
        if difference <= tolerance * abs(values[0]):
            return True
        # Zero has no digits.
        return bool(difference <= EXACT and sympy.simplify(first - second) == 0)

    def _same_equation(self, first: Sequence[Any], second: Sequence[Any], tolerance: float) -> bool:
        """Return whether two equations have proportional sides or the same solutions, or two chains equal ends."""
        sympy = self._sympy
        if len(first) > 1 or len(second) > 1:
            # The steps of a chain are on the way to its last value.
            return self._same(first[0].lhs, second[0].lhs, tolerance) and self._same(
                first[-1].rhs, second[-1].rhs, tolerance
            )
        (equation,) = first
        (other,) = second
        sides = (equation.lhs, equation.rhs, other.lhs, other.rhs)
        if not all(isinstance(side, sympy.Expr) for side in sides):
            return bool(equation.lhs == other.lhs) and self._same(equation.rhs, other.rhs, tolerance)

        difference = equation.lhs - equation.rhs
        other_difference = other.lhs - other.rhs
        ratio = sympy.simplify(difference / other_difference)
        if ratio.is_number:
            return bool(ratio.is_finite and ratio != 0)

        # Of periodic functions sympy gives some of the zeros.
        periodic = (sympy.sin, sympy.cos, sympy.tan)
        if difference.has(*periodic) or other_difference.has(*periodic):
            return False
        symbols = difference.free_symbols
        if symbols != other_difference.free_symbols:
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
