r"""AIME24, GPQA_D, MATH500, GSM8K and other public sets (public.json), and problem files of users.

Problems come from the hub (its cache first) or from a local file in any usual layout (benchmarks/problem_files.py).
They are never part of this package: GPQA's authors ask for no publication in plain text, and the others have their
own licences.

Prompt formats have names and versions, because they change answers. `r1` is the advice on the model cards of
DeepSeek-R1 and its distilled models: no system prompt, and for mathematics a closing directive to reason step by step
and to put the final answer within \boxed{}.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvatlas.answers import grading
from kvatlas.benchmarks import problem_files
from kvatlas.benchmarks.public_data import DEFAULT, FORMATS, SOURCES, PublicSource
from kvatlas.core import Grade, KvatlasError, Problem
from kvatlas.hub import Repository


def download_problems(name: str) -> Path:
    """Return the file of a benchmark's problems, from the hub's cache or the hub. Raises KvatlasError without it."""
    source = SOURCES[name]
    repository = Repository(source.repository, "dataset")

    # The cache first.
    for find_folder in (repository.cached, lambda: repository.folder(tuple(source.files))):
        if (folder := find_folder()) is None:
            continue
        paths = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        for pattern in source.files:
            if names := sorted(fnmatch.filter(paths, pattern)):
                return folder / names[0]
    raise KvatlasError(
        f"The data set {source.repository!r} holds no file {' or '.join(source.files)}; name a local file: {name}@FILE."
    )


@dataclass(frozen=True)
class Questions:
    """A set of questions with short answers, or with choices.

    `file` replaces the hub; `prompt_format` is the name of a format or a template with {question}; `columns` names
    those of question, answer and options; `grader` is one of answers/grading.py.
    """

    name: str
    file: str = ""
    prompt_format: str = DEFAULT
    columns: tuple[tuple[str, str], ...] = ()
    grader: str = grading.OWN
    #: What was read of the file, the last reading alone.
    _read: list[problem_files.ProblemFile] = field(default_factory=list, init=False, repr=False, compare=False)
    version: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if self.prompt_format not in FORMATS and "{question}" not in self.prompt_format:
            advice = " Give the text of the file." if self.prompt_format.endswith((".txt", ".md")) else ""
            raise KvatlasError(
                f"Unknown prompt format {self.prompt_format!r}; expected {', '.join(FORMATS)} and any text with "
                f"{{question}}.{advice}"
            )
        if self.grader not in grading.GRADERS:
            raise KvatlasError(f"Unknown grader {self.grader!r}; expected {', '.join(grading.GRADERS)}.")
        for name, _ in self.columns:
            if name not in ("context", "question", "answer", "options", "cluster"):
                raise KvatlasError(
                    f"Unknown column {name!r} of {self.name}; expected context, question, answer, options, cluster."
                )

    @property
    def typical_output_tokens(self) -> int:
        return SOURCES[self.name].output_tokens if self.name in SOURCES else 8000

    @property
    def identity(self) -> list[Any]:
        """Prompt format, and another grader than ours."""
        version = FORMATS[self.prompt_format]["version"] if self.prompt_format in FORMATS else 0
        grader = [] if self.grader == grading.OWN else [self.grader, grading.VERSION]
        return [self.prompt_format, version, *grader]

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        return self.read(limit).problems[:limit]

    def read(self, limit: int | None = None) -> problem_files.ProblemFile:
        """Return the file's first `limit` problems at least, and what was found on the way."""
        last = self._read[0] if self._read else None
        is_enough = last is not None and (last.whole or (limit is not None and len(last.problems) >= limit))
        if not is_enough:
            self._read[:] = [problem_files.read_problems(self.path, self.name, dict(self.columns), limit)]
        return self._read[0]

    def prompt(self, problem: Problem) -> str:
        choices = problem.about.get("choices", ())
        template = self.prompt_format
        if template in FORMATS:
            template = str(FORMATS[template]["choice" if choices else "question"])
        options = "\n".join(f"{chr(ord('A') + i)}) {choice}" for i, choice in enumerate(choices))
        if problem.about.get("choices_in_question"):
            options = ""
            template = template.replace("{options}\n\n", "").replace("\n\n{options}", "")
        # Not str.format: questions and templates are full of braces.
        before, _, after = template.partition("{question}")
        return f"{before.replace('{options}', options)}{problem.question}{after.replace('{options}', options)}"

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Correct if the last boxed answer, else the stated one, means the same as the reference."""
        # These prompts of DynTS's code do not say how to end, so that a bare last line is an answer, too.
        alone = self.prompt_format in ("plain", "dynts")
        return grading.grade_text(self.grader, problem.answer, problem.about.get("choices", ()), answer, alone)

    @cached_property
    def path(self) -> Path:
        """The file of the problems, fetched from the hub if necessary."""
        return Path(self.file).expanduser() if self.file else download_problems(self.name)

    def __getstate__(self) -> Mapping[str, Any]:
        # Workers get their own problems; the others need not travel with them.
        return {**vars(self), "_read": []}


def questions(
    name: str, *, file: str = "", prompt: str = DEFAULT, columns: Any = (), grader: str = grading.OWN
) -> Questions:
    """Return the questions of that name, with options as they stand in a spec."""
    return Questions(name, file, prompt, tuple(sorted(dict(columns).items())), grader)


class PublicSet:
    """The family of one name: `AIME24`."""

    def __init__(self, name: str, source: PublicSource) -> None:
        self.about = f"{source.about} ({source.size} problems; hub: {source.repository})"
        self.examples = name

    def named(self, rest: str, **options: Any) -> Questions:
        """Return the benchmark; nothing may follow its name. Options: file, prompt, columns, grader."""
        if rest:
            raise KvatlasError(f"Unknown benchmark {self.examples + rest!r}; {self.examples} stands alone.")
        return questions(self.examples, **options)


# The registry finds each family by the benchmark's name.
globals().update({name: PublicSet(name, source) for name, source in SOURCES.items()})
