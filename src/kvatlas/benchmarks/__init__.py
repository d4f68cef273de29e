"""Benchmarks: problems, prompts and grading; one file per family, found by name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvatlas.benchmarks.base import Benchmark, Family, for_model, grade_answer, identity, problems_of, prompt_of
from kvatlas.benchmarks.problem_files import FROM_HERE
from kvatlas.benchmarks.public import questions
from kvatlas.benchmarks.public_data import SOURCES
from kvatlas.class_files import class_file, load_named, record_file
from kvatlas.core import PROBLEM_SUFFIXES, KvatlasError, has_problem_suffix, refusal
from kvatlas.registry import Registry
from kvatlas.text import did_you_mean, did_you_mean_file


def _family_fault(_: str, value: object) -> str:
    """Return why a plug-in's object cannot be a family of benchmarks; empty if it can."""
    if not callable(getattr(value, "named", None)):
        return f"it is {value!r}; expected an object with a method named(rest) that returns a benchmark"
    if not all(isinstance(getattr(value, word, None), str) for word in ("about", "examples")):
        return "it lacks the texts about and examples"
    return ""


#: The members of a benchmark.
_MEMBERS = ("name", "version", "typical_output_tokens", "problems", "prompt", "grade")
#: Those with values, with the test of each, and what to expect.
_VALUES: dict[str, tuple[Callable[[Any], object], str]] = {
    "name": (lambda value: isinstance(value, str) and value.strip(), "a text"),
    "version": (lambda value: type(value) is int, "an integer"),
    "typical_output_tokens": (lambda value: isinstance(value, int | float) and value > 0, "a number above 0"),
}
#: A name stands for one benchmark (AIME24) or begins the names of a family (CHAIN12).
families: Registry[Family] = Registry(
    "benchmark family",
    "kvatlas.benchmarks",
    {
        "CHAIN": "kvatlas.benchmarks.chain:Chain",
        "LEDGER": "kvatlas.benchmarks.ledger:LedgerBenchmark",
        "SEQBENCH": "kvatlas.benchmarks.seqbench:SeqBench",
        "WORDS": "kvatlas.benchmarks.words:Words",
    }
    | {name: f"kvatlas.benchmarks.public:{name}" for name in SOURCES},
    _family_fault,
)


def find(name: str, **options: Any) -> Benchmark:
    """Return the benchmark of a name: CHAIN12, AIME24, AIME24@FILE (its problems from a file), file:FILE, FILE.py:NAME.

    A name that ends with the suffix of a problem file needs no `file:`. `options` are those of a spec's entry: file,
    prompt, columns, grader; empty ones are ignored. Raises KvatlasError for an unknown name.
    """
    options = {option: value for option, value in options.items() if value}
    python_file = class_file(name)
    if python_file is not None and not name.startswith("file:"):
        return _benchmark_in_file(name, python_file, options)
    if "@" not in name and ":" not in name and has_problem_suffix(name):
        name = f"file:{name}"
    name, _, file = name.partition("@")
    kind, _, path = name.partition(":")
    if kind == "file" and path:
        return questions(Path(path).name.partition(".")[0], file=path, **options)
    if file:
        options = {**options, "file": file}

    # The longest name of a family with which the name begins.
    family = max((prefix for prefix in families.names() if name.startswith(prefix)), key=len, default=None)
    if family is None:
        if options.get("file"):
            return questions(name, **options)
        if has_problem_suffix(kind) and path:
            raise KvatlasError(f"{name!r}: :CLASS belongs to FILE.py; name {kind} alone.")
        if Path(name).is_file():
            suffixes = ", ".join(PROBLEM_SUFFIXES)
            raise KvatlasError(
                f"The file {name!r} has an unknown suffix; expected a problem file in {suffixes} (also with .gz)."
            )
        if re.fullmatch(r"[./~].*|.*\.[A-Za-z]+", name):
            raise KvatlasError(
                f"There is no file {name!r}; expected a problem file in {', '.join(PROBLEM_SUFFIXES)}, or the name of "
                f"a benchmark (`kvatlas list benchmarks`).{did_you_mean_file(Path(name)) or FROM_HERE}"
            )
        raise KvatlasError(
            f"Unknown benchmark {name!r}; expected {families.listed()} (CHAIN with a size, as in CHAIN12)"
            f", file:FILE and FILE.py:CLASS.{did_you_mean(name, families.names())}"
        )
    with refusal(f"The benchmark {name!r} cannot be made"):
        try:
            return families.get(family).named(name[len(family) :], **options)
        except TypeError as error:
            if not options:
                raise
            raise KvatlasError(f"The benchmark {name!r} takes no {' or '.join(options)}; leave it out.") from error


def _benchmark_in_file(name: str, file: Path, options: dict[str, Any]) -> Benchmark:
    """Return the benchmark FILE.py:CLASS, or FILE.py:CLASS12 of a family; the file needs a permission."""
    benchmark: Benchmark
    found_class, rest = load_named(name, "benchmark", _is_benchmark, takes_rest=True)
    try:
        with refusal(f"The benchmark {name!r} cannot be made"):
            if hasattr(found_class, "named"):
                benchmark = found_class.named(rest, **options)
            elif rest:
                raise KvatlasError(
                    f"The benchmark {name!r} has {rest!r} behind its class, which takes it with `named`."
                )
            else:
                benchmark = found_class(**options)
    except KvatlasError as error:
        if rest or not hasattr(found_class, "named"):
            raise
        example = name if name.endswith(f":{found_class.__name__}") else f"{name}:{found_class.__name__}"
        raise KvatlasError(f"{error} The rest of the name stands behind the class, as in {example}12.") from error

    # A class that derives from the contract has members without a body.
    missing = []
    for member in _MEMBERS:
        is_inherited = getattr(type(benchmark), member, None) is getattr(Benchmark, member, member)
        if is_inherited or not hasattr(benchmark, member):
            missing.append(member)
    if missing:
        kind = type(benchmark).__name__
        advice = "; add version: ClassVar[int] = 1" if "version" in missing else ""
        fault = f"its class {kind} lacks {', '.join(missing)}{advice}"
        raise KvatlasError(f"The benchmark {name!r} cannot be used ({fault}).")
    for member, (accepts, expected) in _VALUES.items():
        value = getattr(benchmark, member)
        if not accepts(value):
            fault = f"its {member} is {value!r}; expected {expected}"
            raise KvatlasError(f"The benchmark {name!r} cannot be used ({fault}).")
    record_file(type(benchmark), file)
    return benchmark


def _is_benchmark(value: object) -> bool:
    """Return whether an object of a file is a class of benchmarks or of a family of them."""
    return isinstance(value, type) and (callable(getattr(value, "named", None)) or hasattr(value, "problems"))


__all__ = ["Benchmark", "families", "find", "for_model", "grade_answer", "identity", "problems_of", "prompt_of"]
