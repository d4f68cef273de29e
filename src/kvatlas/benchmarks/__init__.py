"""Benchmarks: problems, prompts and grading; one file per family, found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvatlas.benchmarks.base import Benchmark, Family, for_model, grade_answer, identity, problem_of
from kvatlas.benchmarks.problem_files import SUFFIXES
from kvatlas.benchmarks.public import SOURCES, questions
from kvatlas.core import KvatlasError
from kvatlas.registry import Registry
from kvatlas.text import did_you_mean


def _family_fault(_: str, value: object) -> str:
    """Return why a plug-in's object cannot be a family of benchmarks; empty if it can."""
    if not callable(getattr(value, "named", None)):
        return f"it is {value!r}; expected an object with a method named(rest) that returns a benchmark"
    if not all(isinstance(getattr(value, word, None), str) for word in ("about", "examples")):
        return "it lacks the texts about and examples"
    return ""


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
    """Return the benchmark of a name: CHAIN12, AIME24, AIME24@FILE (its problems from a file), file:FILE.

    A name that ends with the suffix of a problem file needs no `file:`. `options` are those of a spec's entry: file,
    prompt, columns, grader; empty ones are ignored. Raises KvatlasError for an unknown name.
    """
    options = {option: value for option, value in options.items() if value}
    if "@" not in name and ":" not in name and name.lower().removesuffix(".gz").endswith(SUFFIXES):
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
        raise KvatlasError(
            f"Unknown benchmark {name!r}; expected {families.listed()} (CHAIN with a size, as in CHAIN12) "
            f"and file:FILE.{did_you_mean(name, families.names())}"
        )
    try:
        return families.get(family).named(name[len(family) :], **options)
    except TypeError as error:
        if not options:
            raise
        raise KvatlasError(f"The benchmark {name!r} takes no {' or '.join(options)}.") from error


__all__ = ["Benchmark", "Family", "families", "find", "for_model", "grade_answer", "identity", "problem_of"]
