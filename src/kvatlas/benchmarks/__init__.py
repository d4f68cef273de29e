"""What is asked and how it is judged: one file per family, found by name."""

from __future__ import annotations

import re

from kvatlas.benchmarks.base import Benchmark, Family
from kvatlas.core import KvatlasError
from kvatlas.registry import Registry

families: Registry[Family] = Registry(
    "benchmark family",
    "kvatlas.benchmarks",
    {
        "CHAIN": "kvatlas.benchmarks.chain:Chain",
        "RG": "kvatlas.benchmarks.reasoning_gym:ReasoningGym",
        "SEQBENCH": "kvatlas.benchmarks.seqbench:SeqBench",
    },
)


def find(name: str) -> Benchmark:
    """The benchmark of that name (NAME@FILE: from a file); KvatlasError names the families when there is none."""
    name, _, file = name.partition("@")
    family = re.match(r"[A-Z]+", name)
    if family is None or family[0] not in families.names():
        known = ", ".join(families.names())
        raise KvatlasError(f"Unknown benchmark {name!r}; valid are names of these families: {known} (as in CHAIN12).")
    rest = name[len(family[0]) :]
    if not file:
        return families.get(family[0]).named(rest)
    try:
        return families.get(family[0]).named(rest, file=file)
    except TypeError as error:
        raise KvatlasError(f"The benchmark {name!r} is not read from a file.") from error


__all__ = ["Benchmark", "Family", "families", "find"]
