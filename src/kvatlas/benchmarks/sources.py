"""Public benchmarks on the Hugging Face hub: where they are, how many problems they have, what their answers are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvatlas.core import KvatlasError
from kvatlas.hub import Repository, matching


@dataclass(frozen=True)
class Source:
    """Where a benchmark is on the hub: the data set's id, patterns of its files, and how many problems it has.

    `answers` is the fingerprint (benchmarks/check.py) of the reference answers where all copies agree on them.
    """

    repository: str
    patterns: tuple[str, ...]
    size: int
    output_tokens: int
    about: str
    answers: str = ""


#: Where MathArena has its files.
_ARENA = ("data/train*.parquet", "*.parquet")

SOURCES: dict[str, Source] = {
    "AIME24": Source(
        "HuggingFaceH4/aime_2024",
        ("data/train*.parquet",),
        30,
        11_000,
        "American Invitational Mathematics Exam 2024",
        "b1f0c9e511c1",
    ),
    "AIME25": Source(
        "math-ai/aime25",
        ("test*.jsonl", "*.parquet", "*.jsonl"),
        30,
        12_000,
        "American Invitational Mathematics Exam 2025",
        "864d704745e4",
    ),
    "AMC23": Source(
        "math-ai/amc23",
        ("data/test*.parquet", "*.parquet", "*.jsonl"),
        40,
        6000,
        "American Mathematics Competitions 2023",
        "dc370b5df0dd",
    ),
    "GPQA_D": Source(
        "Idavidrein/gpqa",
        ("gpqa_diamond.csv",),
        198,
        7000,
        "graduate-level science questions with four choices, the diamond set (gated on the hub)",
    ),
    "MATH500": Source(
        "HuggingFaceH4/MATH-500", ("test.jsonl",), 500, 4000, "500 competition problems with LaTeX answers"
    ),
    "GAOKAO2023EN": Source(
        "MARIO-Math-Reasoning/Gaokao2023-Math-En",
        ("*.jsonl",),
        385,
        4000,
        "Chinese college entrance and other exams of 2023 in English, LaTeX answers",
    ),
    "GSM8K": Source(
        "openai/gsm8k", ("main/test*.parquet", "*test.jsonl"), 1319, 1500, "grade-school word problems, the test set"
    ),
    "HMMT25": Source(
        "MathArena/hmmt_feb_2025", _ARENA, 30, 14_000, "Harvard-MIT Mathematics Tournament, February 2025"
    ),
    "BRUMO25": Source("MathArena/brumo_2025", _ARENA, 30, 11_000, "Brown University Math Olympiad 2025"),
    "AIME26": Source("MathArena/aime_2026", _ARENA, 30, 12_000, "American Invitational Mathematics Exam 2026"),
    "OLYMPIADBENCH": Source(
        "Hothan/OlympiadBench",
        ("*OE_TO_maths_en_COMP.parquet", "*OE_TO_maths_en_COMP.jsonl"),
        674,
        9000,
        "OlympiadBench: open-ended mathematical competition problems in English, text only",
    ),
    "MINERVA": Source(
        "math-ai/minervamath", ("test.jsonl", "*.jsonl", "*.parquet"), 272, 5000, "university science and mathematics"
    ),
}


def file_of(name: str) -> Path:
    """The file of a benchmark's problems, from the hub's cache or the hub; KvatlasError where there is none."""
    source = SOURCES.get(name)
    if source is None:
        raise KvatlasError(f"The benchmark {name!r} needs a problem file.")
    repository = Repository(source.repository, "dataset")
    for folder in (repository.cached, lambda: repository.folder(source.patterns)):
        where = folder()
        there = [] if where is None else [str(path.relative_to(where)) for path in where.rglob("*") if path.is_file()]
        for pattern in source.patterns:
            if where is not None and (names := matching(there, (pattern,))):
                return where / names[0]
    raise KvatlasError(
        f"The data set {source.repository!r} holds no file {' or '.join(source.patterns)}; name a local file: "
        f"{name}@FILE."
    )
