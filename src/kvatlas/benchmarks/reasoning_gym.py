"""RG-...: the data sets of reasoning-gym (arXiv 2505.24760), each with its own scorer; needs the extra `reasoning-gym`.

A name is `RG-<data set>` and then any settings of the data set: `RG-chain_sum`, `RG-chain_sum-min_terms=4-max_terms=6`.
The question is followed by the request to put the answer between <answer> tags; the last such answer is scored.
Scores lie in [0, 1]: 1 is correct, and the score is the progress.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

from kvatlas.core import Grade, KvatlasError, Problem, Status

STANDARD_PROBLEMS = 300
#: Seed and size of every data set: part of the benchmark, so that everybody asks the same (some questions depend on
#: both).
SEED, SIZE = 0, 1000
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_REQUEST = "\n\nGive your final answer between <answer> and </answer>."
_LONGEST = 20_000
#: Scorers that turn an answer into an expression do it with eval; their answers are looked at before.
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(\s*(?:answer|user)")
_REACHES_OUT = re.compile(r"[A-Za-z_]\w*\s*\(|\)\s*\(|\]\s*\(|\.\s*[A-Za-z_]|__")
_FUNCTIONS = {"sqrt", "exp", "log", "ln", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"}
#: Data sets whose own answers are none, and why.
_REFUSED = {
    "intermediate_integration": "some of its reference answers are integrals that nobody worked out, so that "
    "the question itself would be a right answer"
}


@dataclass(frozen=True)
class ReasoningGym:
    """One data set under some settings. Questions are those of `SEED`, the same on every machine."""

    dataset: str
    settings: tuple[tuple[str, Any], ...] = ()
    version: ClassVar[int] = 1
    about: ClassVar[str] = "the data sets of reasoning-gym with their own scorers (extra: reasoning-gym)"
    examples: ClassVar[str] = "RG-chain_sum, RG-countdown, RG-maze-min_dist=5"

    @classmethod
    def named(cls, rest: str) -> ReasoningGym:
        """The benchmark from what follows RG; KvatlasError without the extra, for unknown data sets and settings."""
        name, *settings = re.split(r"-(?=[A-Za-z_]\w*=)", rest.removeprefix("-"))
        known = _datasets()
        if name not in known:
            near = [candidate for candidate in known if name and name.split("_")[0] in candidate] or sorted(known)[:5]
            raise KvatlasError(
                f"Unknown benchmark 'RG{rest}'; valid are the {len(known)} data sets of reasoning-gym, such as "
                f"{', '.join(f'RG-{candidate}' for candidate in near[:8])}."
            )
        if name in _REFUSED:
            raise KvatlasError(f"RG-{name} cannot be a benchmark: {_REFUSED[name]}.")
        benchmark = cls(name, tuple(sorted(_setting(name, text) for text in settings)))
        first, other = benchmark.source(), benchmark.source()
        if any(repr(first[i]) != repr(other[i]) for i in range(3)):
            raise KvatlasError(
                f"{benchmark.name} cannot be a benchmark: reasoning-gym draws other questions each time, whatever the "
                "seed."
            )
        return benchmark

    @property
    def name(self) -> str:
        return "-".join(["RG", self.dataset, *(f"{name}={value}" for name, value in self.settings)])

    @property
    def typical_output_tokens(self) -> int:
        return 2000

    @property
    def identity(self) -> list[Any]:
        """Questions change with the package that draws them."""
        from importlib.metadata import version

        return ["reasoning-gym", version("reasoning-gym"), SEED]

    def source(self) -> Any:
        """reasoning-gym's data set; KvatlasError for settings that it refuses."""
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self.dataset, seed=SEED, size=SIZE, **dict(self.settings))
        except (AssertionError, TypeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise KvatlasError(f"reasoning-gym refuses the settings of {self.name} ({reason}).") from error

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        size = STANDARD_PROBLEMS if limit is None else limit
        if size > SIZE:
            raise KvatlasError(f"{self.name} has {SIZE} problems; {size} were asked for.")
        return [self._problem(i, self._drawn[i]) for i in range(size)]

    def prompt(self, problem: Problem) -> str:
        return problem.question + _REQUEST

    def grade(self, problem: Problem, answer: str) -> Grade:
        """The data set's own score of the last tagged answer."""
        answers = _ANSWER.findall(answer)
        if not answers:
            return Grade(False, 0.0, None, Status.NO_ANSWER)
        text = answers[-1].strip()
        score = self._score(text, problem)
        return Grade(score >= 1.0, score, text, Status.OK)

    def _problem(self, index: int, entry: Mapping[str, Any]) -> Problem:
        difficulty = entry.get("metadata", {}).get("difficulty")
        about = {"index": index} | ({"difficulty": difficulty} if isinstance(difficulty, int | float | str) else {})
        return Problem(f"{self.name}-{index:04d}", entry["question"], str(entry["answer"]), about)

    def _score(self, text: str, problem: Problem) -> float:
        if len(text) > _LONGEST or (self._evaluates and not _harmless(text)):
            return 0.0
        try:
            score = float(self._drawn.score_answer(text, self._drawn[int(problem.about["index"])]))
        except Exception:
            # Scorers are written for well-formed answers; one that they fail on is wrong.
            return 0.0
        return min(max(score, 0.0), 1.0)

    @cached_property
    def _drawn(self) -> Any:
        return self.source()

    @cached_property
    def _evaluates(self) -> bool:
        return bool(_EVALUATES.search(inspect.getsource(inspect.getmodule(type(self._drawn)) or type(self._drawn))))

    def __getstate__(self) -> dict[str, Any]:
        # Workers draw what they need themselves.
        return {"dataset": self.dataset, "settings": self.settings}


@cache
def _datasets() -> Mapping[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise KvatlasError("Benchmarks RG-... need the extra: pip install 'kvatlas[reasoning-gym]'.") from error
    datasets: Mapping[str, Any] = DATASETS
    return datasets


def _setting(dataset: str, text: str) -> tuple[str, Any]:
    """A setting and its value as a Python literal or a word."""
    name, equals, value = text.partition("=")
    valid = [field.name for field in dataclasses.fields(_datasets()[dataset][1]) if field.name not in ("seed", "size")]
    if not equals or name not in valid:
        raise KvatlasError(f"Unknown setting {text!r} of RG-{dataset}; valid are NAME=VALUE of {', '.join(valid)}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _harmless(text: str) -> bool:
    """Whether an answer is numbers, words, lists and arithmetic, with no call but of elementary functions."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        # Not Python as it stands, but sympy rewrites before it evaluates: no calls and no attributes at all.
        return _REACHES_OUT.search(text) is None
    return len(text) < 2000 and all(_plain(node) for node in nodes)


def _plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
        # No towers: an exponent is a small number.
        power = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
        return (
            isinstance(power, ast.Constant | ast.BinOp)
            and all(
                not isinstance(node, ast.Constant) or (isinstance(node.value, int | float) and abs(node.value) <= 64)
                for node in ast.walk(power)
            )
            and not any(isinstance(node, ast.Pow | ast.LShift | ast.Mult) for node in ast.walk(power))
        )
    return isinstance(
        node,
        ast.Expression | ast.BinOp | ast.UnaryOp | ast.Compare | ast.Constant | ast.Name | ast.List | ast.Tuple
        | ast.expr_context | ast.operator | ast.unaryop | ast.cmpop,
    )  # fmt: skip
