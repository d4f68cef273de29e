"""The public sets on the hub, and the prompts: what `public.json` has, for readers that grade nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PublicSource:
    """A benchmark on the hub: the data set's id, patterns of its files, and the number of its problems.

    `answers` is the fingerprint (benchmarks/file_checks.py) of the reference answers if all copies agree on them,
    `problems` are the marks of the questions with their answers, of two copies where these have other words.
    """

    about: str
    size: int
    output_tokens: int
    repository: str
    files: Sequence[str]
    answers: str = ""
    problems: Sequence[str] = ()


_DATA = json.loads(Path(__file__).with_name("public.json").read_text(encoding="utf-8"))
SOURCES: dict[str, PublicSource] = {name: PublicSource(**entry) for name, entry in _DATA["sets"].items()}
#: Prompts by name: templates with {question}, `question` and `choice` (with {options}); `version` rises whenever one
#: changes, or the definition of an answer to it.
FORMATS: dict[str, dict[str, Any]] = _DATA["prompts"]
DEFAULT = "r1"
