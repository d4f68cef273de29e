"""AIME24, GPQA_D, MATH500, GSM8K and other public sets (benchmarks/sources.py), and any problem file of one's own.

Problems come from the hub (its cache first) or from a local file in any usual layout. They are never part of this
package: GPQA's authors ask that it is not published in plain text, and the others have licences of their own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvatlas.benchmarks import answers, equality, graders, prompts, tables
from kvatlas.benchmarks.judges import Verdict
from kvatlas.benchmarks.sources import SOURCES, file_of
from kvatlas.core import Grade, KvatlasError, Problem, digest

#: How a column of another name is named.
_NAMED = (
    "; name another with columns: {{{0}: NAME}} in a spec, or --{0}-field NAME of kvatlas run and kvatlas benchmarks"
)
#: The seed behind the seeds of all permutations of choices: part of the benchmark, so that everybody asks the same.
CHOICE_SEED = 0


@dataclass(frozen=True)
class Questions:
    """A set of questions with short answers, or with choices, asked through a named prompt format.

    `file` replaces the hub; `columns` names columns (question, answer, id, options) that have unusual names; `grader`
    is one of benchmarks/graders.py.
    """

    name: str
    file: str = ""
    prompt_format: str = prompts.DEFAULT
    columns: tuple[tuple[str, str], ...] = ()
    output_tokens: int = 8000
    grader: str = graders.OWN
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        prompts.check(self.prompt_format)
        graders.check(self.grader)
        unknown = [name for name, _ in self.columns if name not in ("question", "answer", "id", "options")]
        if unknown:
            raise KvatlasError(
                f"Unknown column {unknown[0]!r} of {self.name}; valid are question, answer, id, options."
            )

    @property
    def typical_output_tokens(self) -> int:
        return SOURCES[self.name].output_tokens if self.name in SOURCES else self.output_tokens

    @property
    def identity(self) -> list[Any]:
        """Prompt format, a digest of all problems, another grader: the same problems are the same from any file."""
        content = [[p.id, p.question, p.answer, p.about.get("choices")] for p in self._problems]
        format_, version, *grader = self.rules_identity
        return [format_, version, digest(content), *grader]

    @property
    def rules_identity(self) -> list[Any]:
        """Prompt format, and another grader."""
        grader = [] if self.grader == graders.OWN else [self.grader, graders.VERSION]
        return [*prompts.identity(self.prompt_format), *grader]

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        return self._problems[:limit]

    def prompt(self, problem: Problem) -> str:
        inside = bool(problem.about.get("choices_in_question"))
        return prompts.message(self.prompt_format, problem.question, tuple(problem.about.get("choices", ())), inside)

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Correct where the last boxed answer, else the stated one, means the same as the reference.

        Where the prompt is the question alone a bare last line is an answer, too.
        """
        choices = tuple(problem.about.get("choices", ()))
        if self.grader == "dynts" or (self.grader != graders.OWN and not choices):
            return graders.GRADERS[self.grader](problem.answer, choices, answer)
        by_letter = bool(choices) or _is_letter(problem.answer)
        given = answers.letter(answer, choices) if by_letter else None
        if given is None and not choices:
            given = answers.final(answer)
        if given is None and prompts.asks_nothing(self.prompt_format):
            # Nobody told the model how to end.
            last = answers.bare(answer)
            given = answers.letter(last, choices) if last and by_letter else last
        if given is None:
            return graders.graded(Verdict.UNEQUAL, None)
        if by_letter:
            return graders.graded(Verdict(given == (_is_letter(problem.answer) or problem.answer)), given)
        return graders.graded(equality.same(problem.answer, given), given)

    @cached_property
    def path(self) -> Path:
        """The file of the problems, fetched from the hub where it has to be."""
        return Path(self.file).expanduser() if self.file else file_of(self.name)

    @cached_property
    def rows(self) -> Sequence[tables.Row]:
        """The file as it is, one mapping for each problem, those without a reference answer among them."""
        return tables.read_rows(self.path)

    @property
    def _problems(self) -> tuple[Problem, ...]:
        where = f"The problem file {str(self.path)!r}"
        named = dict(self.columns)
        problems = []
        for number, row in enumerate(self.rows, 1):
            problem = _problem(f"{self.name}-{number:03d}", row, named, where)
            # A question without a reference answer could only be counted wrong.
            if problem.answer:
                problems.append(problem)
        if not problems:
            raise KvatlasError(f"{where} holds no problem with an answer.")
        return tuple(problems)

    def __getstate__(self) -> Mapping[str, Any]:
        # Workers are given their problems; a thousand others need not travel with them.
        return {name: value for name, value in vars(self).items() if name not in ("_problems", "rows")}


def _is_letter(answer: str) -> str:
    """The letter that a reference answer of a choice question is, in any dress; "" for other answers."""
    match = re.fullmatch(r"\$?\s*(?:\\text\s*\{)?\s*\(?\s*([A-K])\s*\)?\s*\}?\s*\$?", answer)
    return match[1] if match else ""


def _problem(id_: str, row: tables.Row, named: Mapping[str, str], where: str) -> Problem:
    question_at = tables.column(row, tables.QUESTION, named.get("question"), where, "question", _NAMED)
    about: dict[str, Any] = {}
    identity_at = named.get("id") or tables.find(row, tables.IDENTITY)
    if identity_at:
        about["source_id"] = str(row.get(identity_at))
    question = str(row[question_at] or "").strip()
    if not question:
        raise KvatlasError(f"{where} has an empty question ({id_}).")
    correct_at = tables.find(row, (tables.CORRECT,))
    wrong = [str(row[at]).strip() for name in tables.INCORRECT if (at := tables.find(row, (name,))) and row[at]]
    if correct_at and wrong:
        return _permuted(id_, question, str(row[correct_at]).strip(), wrong, about)
    given = row[tables.column(row, tables.ANSWER, named.get("answer"), where, "answer", _NAMED)]
    # GSM8K's references are whole solutions that end so.
    answer = tables.as_text(given).rpartition("\n#### ")[2].strip()
    options_at = named.get("options") or tables.find(row, tables.OPTIONS)
    options = row.get(options_at) if options_at else [row[at] for at in tables.lettered(row)]
    if options:
        by_index = isinstance(given, int | float) and not isinstance(given, bool)
        about["choices"], answer = _options(options, answer, where, by_index)
    elif answer and (choices := _choices_inside(question)) and (letter := _chosen(answer, choices)):
        about |= {"choices": choices, "choices_in_question": True}
        answer = letter
    return Problem(id_, question, answer, about)


def _permuted(id_: str, question: str, correct: str, wrong: list[str], about: dict[str, Any]) -> Problem:
    """A question whose choices are put in an order drawn from its own seed, which is kept with it."""
    seed = int(digest(["choices", CHOICE_SEED, id_])[:8], 16)
    choices = [correct, *wrong]
    random.Random(seed).shuffle(choices)
    about |= {"choices": choices, "choice_seed": seed}
    return Problem(id_, question, chr(ord("A") + choices.index(correct)), about)


_MARK = re.compile(r"\(([A-K])\)|(?:^|\n|\\n)\s*([A-K])[.):]\s")


def _choices_inside(question: str) -> list[str]:
    """The texts behind the last (A), (B), ... of a question, or behind A), B), ... at the beginning of lines."""
    marks = list(_MARK.finditer(question))
    starts = [i for i, mark in enumerate(marks) if "A" in mark.groups()]
    run = marks[starts[-1] :] if starts else []
    letters = [mark[1] or mark[2] for mark in run]
    if len(run) < 2 or letters != [chr(ord("A") + i) for i in range(len(run))]:
        return []
    ends = [*(mark.start() for mark in run[1:]), len(question)]
    return [question[mark.end() : end].removesuffix("\\n").strip() for mark, end in zip(run, ends, strict=True)]


def _chosen(answer: str, choices: Sequence[str]) -> str:
    """The letter of an answer that is a letter or the text of exactly one choice; "" for another answer."""
    letter = _is_letter(answer)
    if letter:
        return letter if ord(letter) - ord("A") < len(choices) else ""
    return chr(ord("A") + choices.index(answer)) if choices.count(answer) == 1 else ""


def _options(value: Any, answer: str, where: str, by_index: bool = False) -> tuple[list[str], str]:
    """Choices as texts without their letters, and the answer as a letter.

    A number (`by_index`) counts from 0 even where it is the text of an option, too.
    """
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)] if "text" not in value else value["text"]
    if not isinstance(value, list | tuple):
        raise KvatlasError(f"{where} has options that are no list.")
    choices = [re.sub(r"^\s*\(?[A-Z][).:]\s+", "", str(option)).strip() for option in value]
    letter = _is_letter(answer)
    if letter and ord(letter) - ord("A") >= len(choices):
        letter = ""
    elif not letter and answer.isdecimal() and int(answer) < len(choices) and (by_index or answer not in choices):
        letter = chr(ord("A") + int(answer))
    if not letter and answer in choices:
        letter = chr(ord("A") + choices.index(answer))
    if not letter:
        raise KvatlasError(f"{where} has the answer {answer!r}, which is none of its options.")
    return choices, letter


@dataclass(frozen=True)
class Named:
    """The family of one name: `AIME24`."""

    name: str
    about: str
    examples: str = field(default="")

    def named(self, rest: str, **options: Any) -> Questions:
        """The benchmark; nothing may follow its name. Options: file, prompt, columns, grader."""
        if rest:
            raise KvatlasError(f"Unknown benchmark {self.name + rest!r}; {self.name} stands alone.")
        return questions(self.name, **options)


def questions(
    name: str, *, file: str = "", prompt: str = prompts.DEFAULT, columns: Any = (), grader: str = graders.OWN
) -> Questions:
    """Questions by that name, with options as they stand in a spec."""
    return Questions(name, file, prompt, tuple(sorted(dict(columns).items())), grader=grader)


def _family(name: str) -> Named:
    source = SOURCES[name]
    return Named(name, f"{source.about} ({source.size} problems; hub: {source.repository})", name)


AIME24 = _family("AIME24")
AIME25 = _family("AIME25")
AMC23 = _family("AMC23")
GPQA_D = _family("GPQA_D")
MATH500 = _family("MATH500")
GAOKAO2023EN = _family("GAOKAO2023EN")
GSM8K = _family("GSM8K")
HMMT25 = _family("HMMT25")
BRUMO25 = _family("BRUMO25")
AIME26 = _family("AIME26")
OLYMPIADBENCH = _family("OLYMPIADBENCH")
MINERVA = _family("MINERVA")
