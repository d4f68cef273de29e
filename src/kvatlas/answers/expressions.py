r"""Reading of expressions: LaTeX and typed mathematics to sympy, the whole text or nothing.

One grammar reads both: `\frac{2\sqrt{3}}{3}`, `2*sqrt(3)/3`. A sign or a command without a rule makes a text
unreadable, so that no part of it is ever dropped. Letters are real numbers, but for i and e; a letter with an index,
an accent or primes is a symbol of its own, as are the values of unknown functions.
"""

import re
from dataclasses import dataclass
from typing import Any

import sympy

#: A number, a command, a run of letters, or a sign.
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|[A-Za-z]+|<=|>=|!=|\S)", re.DOTALL)
_FUNCTIONS = {
    **{name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "exp")},
    **{name: getattr(sympy, name) for name in ("sinh", "cosh", "tanh", "coth", "asin", "acos", "atan", "acot")},
    **{"arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot},
    **{"ln": sympy.log, "abs": sympy.Abs, "cbrt": sympy.cbrt},
}
_INVERSES = {sympy.sin: sympy.asin, sympy.cos: sympy.acos, sympy.tan: sympy.atan, sympy.cot: sympy.acot}
#: Functions that stay as they are, with any number of arguments.
_OPERATORS = "gcd lcm max min det arg Re Im deg dim inf sup sgn tr rank"
_UNKNOWN_FUNCTIONS = tuple(_OPERATORS.split())
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell emptyset square circ"
)
_SYMBOLS = frozenset(_GREEK.split())
#: Commands that make a symbol of what follows them.
_ACCENTS = (
    *("vec", "hat", "bar", "overline", "dot", "ddot", "tilde", "widehat"),
    *("mathbb", "mathcal", "angle", "triangle", "nabla", "overrightarrow", "widetilde"),
)
#: Names in typed mathematics; \log without a base has an unknown base, a typed log is natural.
_TYPED = {
    **{name: "\\" + name for name in (*_FUNCTIONS, *_UNKNOWN_FUNCTIONS, "sqrt", "pi", "binom")},
    **{"binomial": r"\binom", "log": r"\ln", "oo": r"\infty"},
}
_NAMES = "|".join(sorted(_TYPED, key=len, reverse=True))
_TYPED_WORD = re.compile(rf"([a-zA-Z]??)({_NAMES})([a-zA-Z]?)")
_SIGNS = (
    "le ge ne approx equiv in notin subset subseteq supset perp parallel Rightarrow Leftarrow to mid sim cup cap "
    "setminus mod"
)
_RELATIONS = {
    **{sign: sign for sign in ("=", "<", ">")},
    **{"<=": r"\le", ">=": r"\ge", "!=": r"\ne", r"\lt": "<", r"\gt": ">"},
    **{"\\" + name: "\\" + name for name in _SIGNS.split()},
}
_CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
#: The bits of the largest number that is computed: a few signs may stand for one that fills the memory.
_MOST_BITS = 2**18
_UNTOLD_BASE = sympy.Symbol("base", positive=True)


class UnreadableError(ValueError):
    """A text that is no expression of this grammar."""


@dataclass(frozen=True)
class Chain:
    """The sides of a chain of relations and the signs between them; a single side is a value."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...] = ()


def read_expression(text: str) -> Chain | None:
    """Return the reading of a tidy answer; None for a text that cannot be read to its end."""
    try:
        return _Parser(_tokens(text)).chain()
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None


def _tokens(text: str) -> list[str]:
    """Return the tokens of a text; names in typed mathematics as commands, other letters one by one."""
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        if not token.isalpha() or not token.isascii():
            tokens.append(token)
        elif match := _TYPED_WORD.fullmatch(token):
            tokens += [piece for piece in (match[1], _TYPED[match[2]], match[3]) if piece]
        else:
            # A long word is no product of its letters: it can be a name alone, in an index.
            tokens += token if len(token) < 4 else [token]
    return tokens


class _Parser:
    """A parser by recursive descent over a list of tokens."""

    def __init__(self, tokens: list[str], variables: tuple[str, ...] = ()) -> None:
        self.tokens = tokens
        #: Variables of sums, which may be called i or e.
        self.variables = variables
        self.at = 0
        #: The absolute values that are open.
        self.bars = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        """Return the next token and go on. Raises UnreadableError if it is not `expected`."""
        token = self.next
        if not token or (expected and token not in expected):
            raise UnreadableError(token)
        self.at += 1
        return token

    def accept(self, *tokens: str) -> str:
        """Return the next token and go on if it is one of these, else ""."""
        return self.take() if self.next and self.next in tokens else ""

    def chain(self) -> Chain:
        """Read all tokens."""
        sides = [self.terms()]
        signs = []
        while self.next:
            # A modulus in brackets, `(\mod 3)`.
            bracket = self.accept("(") if self.tokens[self.at + 1 : self.at + 2] == [r"\mod"] else ""
            signs.append(_RELATIONS[self.take(*_RELATIONS)])
            sides.append(self.terms())
            if bracket:
                self.take(")")
        return Chain(tuple(sides), tuple(signs))

    def terms(self) -> Any:
        sign = self.accept("+", "-")
        value = -self.term() if sign == "-" else self.term()
        while sign := self.accept("+", "-"):
            value = value - self.term() if sign == "-" else value + self.term()
        return value

    def term(self) -> Any:
        """Read a product; factors without a sign between them belong together: `a/bc` is a/(bc), but `1/2x` is x/2."""
        start = self.at
        value = self.product()
        while sign := self.accept("*", "/", r"\cdot", r"\times", r"\div", ":"):
            if sign == ":" and ":" in self.tokens[self.at :]:
                raise UnreadableError(sign)
            is_fraction = sign in "/:" and self.at == start + 2 and value.is_Integer and self.next.isdecimal()
            if is_fraction:
                value = _quotient(value, self.factor()) * self.product(empty=True)
                continue
            factor = -self.product() if self.accept("-") else self.product()
            value = _quotient(value, factor) if sign in ("/", r"\div", ":") else value * factor
        return value

    def product(self, empty: bool = False, of_function: bool = False) -> Any:
        """Read factors without a sign between them, in the argument of a function up to the next function."""
        value = sympy.Integer(1) if empty else self.factor()
        while self.begins_factor(of_function):
            value = value * self.factor()
        return value

    def begins_factor(self, of_function: bool) -> bool:
        token = self.next
        if token[:1].isdigit() or token[:1] == ".":
            # Two numbers side by side are no product.
            return not self.tokens[self.at - 1][-1].isdigit()
        if token == "|":
            return not self.bars
        name = token[1:]
        if token.startswith("\\"):
            is_function = name in _FUNCTIONS or name in _UNKNOWN_FUNCTIONS or name == "log"
            if of_function and is_function:
                return False
            is_listed = is_function or name in _SYMBOLS or name in _ACCENTS or token in _CLOSING
            return is_listed or name in ("frac", "sqrt", "binom", "pi", "begin", "sum", "prod", "int", "lim", "infty")
        if self.tokens[self.at + 1 : self.at + 2] == [r"\mod"]:
            return False
        return token.isalpha() or token in ("(", "[", "{")

    def factor(self) -> Any:
        """Read a value and what follows it: powers, factorials, degrees, per cent."""
        value = self.value()
        while sign := self.accept("^", "!", "%"):
            if sign == "!":
                value = _combinations(sympy.factorial, value)
            elif sign == "%":
                value = value / 100
            elif self.accept(r"\circ"):
                value = value * sympy.pi / 180
            else:
                value = self.power(value, self.argument())
        return value

    def power(self, base: Any, exponent: Any) -> Any:
        if exponent.is_Rational:
            sizes = [max(abs(rational.p), rational.q) for rational in base.atoms(sympy.Rational)]
            _check_size(abs(exponent) * max((size.bit_length() - 1 for size in sizes), default=0))
        # An odd root of a negative number is real.
        if base.is_Rational and base < 0 and exponent.is_Rational and exponent.q % 2 and exponent.q > 1:
            return (-1) ** exponent.p * (-base) ** exponent
        return base**exponent

    def argument(self) -> Any:
        """Read the argument of a command or a power: a group, or one value with its sign."""
        if self.accept("-"):
            return -self.argument()
        if self.accept("+"):
            return self.argument()
        value = self.value()
        return self.power(value, self.argument()) if self.accept("^") else value

    def group(self, opening: str) -> list[Any]:
        """Read the expressions in brackets, of which the first is the next token."""
        self.take(opening)
        bars = self.bars
        self.bars = 0
        values = [self.terms()]
        while self.accept(",", ";"):
            values.append(self.terms())
        self.take(_CLOSING[opening])
        self.bars = bars
        return values

    def single(self, opening: str) -> Any:
        """Read one expression in brackets."""
        values = self.group(opening)
        if len(values) > 1:
            raise UnreadableError(opening)
        return values[0]

    def raw(self) -> str:
        """Return the next group or token as it is written."""
        if not self.accept("{"):
            return self.take()
        start = self.at
        depth = 1
        while depth:
            token = self.take()
            depth += (token == "{") - (token == "}")
        return "".join(self.tokens[start : self.at - 1])

    def value(self) -> Any:
        token = self.next
        if token[:1].isdigit() or token[:1] == ".":
            return sympy.Rational(self.take())
        if token in ("(", "[", "{"):
            return self.single(token)
        if token == "|":
            self.take()
            self.bars += 1
            value = self.terms()
            self.take("|")
            self.bars -= 1
            return sympy.Abs(value)
        if token.isalpha() and token.isascii() and len(token) == 1:
            return self.letter()
        if token.startswith("\\"):
            return self.command()
        raise UnreadableError(token)

    def letter(self) -> Any:
        """Read a letter with its index and primes, a function of unknown form, or a number i, e."""
        name = self.take()
        bare = name
        if name == "C" and self.next == "(":
            # Typed combinations.
            return _combinations(sympy.binomial, *self.group("("))
        if self.accept("_"):
            name += "_" + self.raw()
        while self.accept("'"):
            name += "'"
        if self.tokens[self.at : self.at + 5] == ["^", "{", "-", "1", "}"] and bare in "fgh":
            self.at += 5
            name += "^{-1}"
        if self.next == "(" and (name != bare or bare in "fghFGHPE"):
            return sympy.Function(name, real=True)(*self.group("("))
        if name in ("i", "e") and name not in self.variables:
            return {"i": sympy.I, "e": sympy.E}[name]
        return sympy.Symbol(name, real=True)

    def command(self) -> Any:
        token = self.take()
        name = token[1:]
        if name in _FUNCTIONS or name == "log":
            return self.function(name)
        if name in _UNKNOWN_FUNCTIONS:
            arguments = self.group("(") if self.next == "(" else [self.factor()]
            return sympy.Function(name, real=True)(*arguments)
        if name in _SYMBOLS:
            return sympy.Symbol(name + ("_" + self.raw() if self.accept("_") else ""), real=True)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _ACCENTS:
            return self.accented(name)
        if token in _CLOSING:
            self.at -= 1
            value = self.single(token)
            return sympy.floor(value) if name == "lfloor" else sympy.ceiling(value)
        match name:
            case "frac":
                return self.fraction()
            case "binom":
                numbers = self.group("(") if self.next == "(" else (self.argument(), self.argument())
                return _combinations(sympy.binomial, *numbers)
            case "sqrt":
                degree = self.single("[") if self.next == "[" else sympy.Integer(2)
                return self.power(self.argument(), 1 / degree)
            case "begin":
                return self.matrix()
            case "sum" | "prod" | "int" | "lim":
                return self.bounded(name)
        raise UnreadableError(token)

    def function(self, name: str) -> Any:
        """Read a function of one argument, which ends before a sum, another function, and a sign of multiplication."""
        exponent = base = None
        while sign := self.accept("^", "_"):
            if sign == "^":
                exponent = self.argument()
            elif name == "log":
                base = self.argument()
            else:
                raise UnreadableError(name)

        if self.next in ("(", "{", "["):
            argument = self.single(self.next)
        else:
            is_negative = bool(self.accept("-"))
            argument = self.product(of_function=True)
            # A part of pi, `\sin\pi/6`.
            while argument.has(sympy.pi) and self.accept("/"):
                argument = argument / self.factor()
            argument = -argument if is_negative else argument

        if name == "log":
            value = sympy.log(argument) / sympy.log(_UNTOLD_BASE if base is None else base)
        else:
            function = _FUNCTIONS[name]
            if exponent == -1:
                function = _INVERSES[function]
                exponent = None
            value = function(argument)
        return value if exponent is None else value**exponent

    def fraction(self) -> Any:
        """Read numerator and denominator; a derivative is a symbol."""
        start = self.at
        parts = [self.raw(), self.raw()]
        for sign in ("d", r"\partial"):
            of = rf"{re.escape(sign)}(?:\^\d)?[A-Za-z\\]"
            if re.match(of, parts[0]) and re.fullmatch(rf"{of}(?:\^\d)?", parts[1]):
                return sympy.Symbol("/".join(parts), real=True)
        self.at = start
        top = self.argument()
        return _quotient(top, self.argument())

    def accented(self, name: str) -> Any:
        """Read what an accent makes a symbol of: a group, or the letters that follow."""
        text = self.raw()
        if name in ("angle", "triangle"):
            while self.next.isalpha():
                text += self.take()
        if self.accept("_"):
            text += "_" + self.raw()
        return sympy.Symbol(f"{name} {text}", real=True)

    def matrix(self) -> Any:
        """Read a matrix; of one between bars its determinant."""
        kind = self.raw()
        rows = [[self.terms()]]
        while sign := self.accept("&", "\\\\"):
            if sign == "&":
                rows[-1].append(self.terms())
            elif self.next != r"\end":
                rows.append([self.terms()])
        self.take(r"\end")
        if kind not in ("pmatrix", "vmatrix") or self.raw() != kind:
            raise UnreadableError(kind)
        matrix = sympy.ImmutableMatrix(rows)
        return matrix if kind == "pmatrix" else matrix.det()

    def bounded(self, name: str) -> Any:
        """Read a sum, a product, an integral or a limit."""
        bounds = {}
        while sign := self.accept("_", "^"):
            start = self.at
            self.raw()
            tokens = self.tokens[start : self.at]
            bounds[sign] = tokens[1:-1] if tokens[0] == "{" else tokens

        if name == "int":
            ends = [i for i in range(self.at, len(self.tokens) - 1) if self.tokens[i] == "d"]
            if not ends:
                raise UnreadableError(name)
            body = _whole(self.tokens[self.at : ends[0]])
            self.at = ends[0] + 1
            variable = self.letter()
            limits = [_whole(bounds[sign]) for sign in "_^" if sign in bounds]
            return sympy.Integral(body, (variable, *limits))

        letter, sign, *first = bounds["_"]
        if sign != (r"\to" if name == "lim" else "=") or not letter.isalpha():
            raise UnreadableError(name)
        variables = self.variables
        self.variables = (*variables, letter)
        body = self.term()
        self.variables = variables
        variable = sympy.Symbol(letter, real=True)
        if name == "lim":
            return sympy.Limit(body, variable, _whole(first))
        operation = sympy.Sum if name == "sum" else sympy.Product
        return operation(body, (variable, _whole(first), _whole(bounds["^"])))


def _check_size(bits: Any) -> None:
    """Raise UnreadableError for a number of so many bits that it is not computed."""
    if bits > _MOST_BITS:
        raise UnreadableError("too large a number")


def _combinations(function: Any, number: Any, *chosen: Any) -> Any:
    """Return a factorial, or a binomial coefficient of a number and of how many are chosen."""
    if number.is_Integer:
        factors = min([abs(number), *(abs(count) for count in chosen if count.is_Integer)])
        _check_size(factors * int(number).bit_length())
    return function(number, *chosen)


def _quotient(top: Any, bottom: Any) -> Any:
    if bottom == 0:
        raise UnreadableError("division by zero")
    return top / bottom


def _whole(tokens: list[str]) -> Any:
    """Return the value of all of these tokens."""
    chain = _Parser(tokens).chain()
    if chain.signs:
        raise UnreadableError(chain.signs[0])
    return chain.sides[0]
