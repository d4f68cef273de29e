r"""Checks that a benchmark holds the right problems: a damaged file would look like a fault of models or settings.

The checks take a few seconds at most, so that they run before every sweep.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kvatlas.benchmarks import normal, tables
from kvatlas.benchmarks.base import Benchmark
from kvatlas.benchmarks.public import SOURCES, Questions
from kvatlas.core import Check, Finding, KvatlasError, Problem, canonical, digest

Problems = Sequence[Problem]
#: Problems with a fault, the fault, and advice.
Fault = tuple[Problems, str, str]

#: The least share of problems for a fault of the whole file.
MANY = 0.2
#: A longer reference answer of several sentences is a solution, in characters.
SOLUTION = 200
#: The search for reference answers that are graded wrong ends after so many.
ENOUGH = 20
#: So many questions of exactly the greatest length show that a limit cut them.
CUT = 3
#: The largest plausible deviation of the count of a right letter from its expectation, in standard deviations.
CHANCE = 5.0

_COMMANDS = r"(?:frac|sqrt|left|right|cdot|times|text|overline|angle|mathbb|boxed|leq|geq|pi)(?![A-Za-z])"
#: Traces of damage in texts.
_DAMAGE = (
    (
        r"<\|im_start\|>|<\|begin_of_text\|>|\[INST\]|<｜User｜>|['\"]role['\"]\s*:",
        "hold a chat template or a list of messages",
        "leave the question alone in its column: the model's own template is put around it",
    ),
    (
        r"Ã[^\sA-Za-z]|â€|â‰|Â[°±²³·½]|�",
        "hold characters that were decoded wrongly, as in â€™",
        "write the file again as UTF-8",
    ),
    (
        r"[\x07\x08]\w|\x0b(?:ec|ert)|\x0c(?:rac|orall)|\t(?:imes|ext|heta|an\b|riangle)|\r(?:ight|ho\b|angle)",
        r"hold control characters where LaTeX commands begin, such as a form feed and rac for \frac",
        "write backslashes twice in JSON and in Python texts",
    ),
    (rf"(?<!\\)\\\\{_COMMANDS}", r"hold LaTeX commands with two backslashes, as in \\frac", "one backslash too many"),
    (r"&(?:lt|gt|amp|quot|nbsp|#\d+);", "hold HTML entities, as in &lt;", "write the characters themselves"),
)
_NOTHING = re.compile(r"(?i)(?:nan|null|n/a|unknown|tbd|todo|\?+|-+|error)")
_DIRECTIVE = re.compile(r"(?i)\\boxed|(?:think|reason) step by step")
_LEAK = re.compile(r"(?:####|(?i:\banswer\s*(?:is|[:=])))\s*\$?(?P<answer>[^\n$]+?)\$?\.?\s*$")


def check(benchmark: Benchmark, length: Callable[[str], int] = len, unit: str = "characters") -> Iterator[Finding]:
    """Yield the findings about a benchmark; `length` measures prompts in that `unit`.

    Raises KvatlasError for an unreadable file.
    """
    problems = benchmark.problems()
    if isinstance(benchmark, Questions):
        yield _columns(benchmark)
        yield _published(benchmark, problems)
        yield _first("texts", problems, _damage(problems), "no sign of damage")
        shortest, longest = (pick(len(p.question) for p in problems) for pick in (min, max))
        yield _first("questions", problems, _questions(problems, longest), f"{shortest} to {longest} characters")
        references = f"{max(len(p.answer) for p in problems)} characters at most"
        finding = _first("references", problems, _references(problems), references)
        fatal = sum(map(_is_solution, problems)) >= MANY * len(problems)
        yield replace(finding, status=Check.FAILED) if fatal else finding
        yield _choices([p for p in problems if p.about.get("choices")])
        yield _own_answers(benchmark, problems)
    else:
        yield Finding("problems", Check.OK, f"{len(problems)} problems (digest {_digest(problems)})")
    yield _first("duplicates", problems, _duplicates(problems), "every question is there once")
    lengths = [length(benchmark.prompt(problem)) for problem in problems]
    message = f"{statistics.median(lengths):,.0f} {unit} in the median, {max(lengths):,} at most"
    yield Finding("prompts", Check.OK, message)
    example = problems[0]
    yield Finding(
        "example", Check.OK, f"{example.id}, to be answered with {example.answer}:\n{benchmark.prompt(example)}"
    )


def notes_on(benchmark: Benchmark) -> list[str]:
    """Return warnings about a problem file before a sweep, as sentences; empty for generated problems.

    Raises KvatlasError for the file of another benchmark.
    """
    if not isinstance(benchmark, Questions):
        return []
    findings = list(check(benchmark))
    for finding in findings:
        if finding.status is Check.FAILED:
            raise KvatlasError(f"{benchmark.name} cannot be measured with {str(benchmark.path)!r}: {finding}.")
    return [f"{benchmark.name}: {finding}." for finding in findings if finding.status is Check.WARNING]


def fingerprint(problems: Problems) -> str:
    """Return a digest of the reference answers that does not depend on their order and spelling."""
    texts = [normal.without_unit(normal.tidy(problem.answer)) for problem in problems]
    return digest(sorted(str(value if (value := normal.rational(text)) is not None else text) for text in texts))[:12]


def _digest(problems: Problems) -> str:
    return digest([[p.question, p.answer, p.about.get("choices")] for p in problems])[:12]


def _first(name: str, problems: Problems, faults: Iterable[Fault], fine: str) -> Finding:
    """Return the first fault of any problem as a warning."""
    for affected, fault, advice in faults:
        if affected:
            message = f"{_of(len(affected), problems)} {fault} (first {affected[0].id})"
            return Finding(name, Check.WARNING, message, advice)
    return Finding(name, Check.OK, fine)


def _of(count: int, everything: Sequence[object]) -> str:
    return f"{count} of {len(everything)} problems"


def _columns(benchmark: Questions) -> Finding:
    """Name the columns in use, and others with as good a name and another content."""
    name, named, rows = "columns", dict(benchmark.columns), benchmark.rows
    used, doubts = [], []
    for content, usual in (("question", tables.QUESTION), ("answer", tables.ANSWER)):
        at = named.get(content) or tables.find(rows[0], *usual)
        if at is None:
            continue
        used.append(f"{content} in {at!r}")
        others = [column for word in usual if (column := tables.find(rows[0], word)) and column != at]
        for other in () if content in named else others:
            differ = sum(tables.as_text(row.get(at)) != tables.as_text(row.get(other)) for row in rows)
            if differ and not (content == "answer" and tables.find(rows[0], *tables.INCORRECT)):
                doubts.append(f"{other!r} could be the {content}, too, and differs from {at!r} in {_of(differ, rows)}")
    if doubts:
        advice = "name the right one with columns: {question: NAME, answer: NAME}"
        return Finding(name, Check.WARNING, "; ".join(doubts), advice)
    options = named.get("options") or tables.find(rows[0], *tables.OPTIONS) or ", ".join(tables.lettered(rows[0]))
    return Finding(name, Check.OK, ", ".join([*used, *([f"options in {options!r}"] if options else [])]))


def _published(benchmark: Questions, problems: Problems) -> Finding:
    """Compare number and answers with those of the published set."""
    name, source = "problems", SOURCES.get(benchmark.name)
    message = f"{len(problems)} problems with a reference answer (digest {_digest(problems)})"
    mark = fingerprint(problems)
    other = next((source_name for source_name, source in SOURCES.items() if source.answers == mark), benchmark.name)
    if source and other != benchmark.name:
        return Finding(name, Check.FAILED, f"the reference answers are those of {other}", f"name it {other}")
    without = len(benchmark.rows) - len(problems)
    left_out = f"{without} without one are left out" if without else ""
    if source and source.size != len(problems):
        message = f"{len(problems)} problems with a reference answer, where the published set has {source.size}"
        return Finding(name, Check.WARNING, message, left_out or "the file is not the published set")
    if without:
        return Finding(name, Check.WARNING, message, left_out)
    if source and source.answers not in ("", mark):
        return Finding(name, Check.WARNING, "the reference answers are not all those of the published set")
    return Finding(name, Check.OK, f"{message}, as published" if source else message)


def _damage(problems: Problems) -> Iterator[Fault]:
    texts = ["\n".join([p.question, p.answer, *p.about.get("choices", ())]) for p in problems]
    for pattern, fault, advice in _DAMAGE:
        yield [p for p, text in zip(problems, texts, strict=True) if re.search(pattern, text)], fault, advice


def _questions(problems: Problems, longest: int) -> Iterator[Fault]:
    """Yield questions that are a number, hold their answer or an instruction, or are cut."""
    numbers = [p for p in problems if re.fullmatch(r"[-+\d.,\s]*", p.question)]
    yield numbers, "are a number and no question", "name the column of the question"
    leaks = [
        p for p in problems if (m := _LEAK.search(p.question)) and m["answer"].strip(" .*") == p.answer.strip("$ ")
    ]
    yield leaks, "end with their answer", "leave it out of the question"
    directed = [p for p in problems if _DIRECTIVE.search(p.question)]
    advice = "the prompt format says so again; take the format plain, or leave it out of the questions"
    yield directed if len(directed) >= MANY * len(problems) else [], "say how to answer", advice
    cut = [p for p in problems if len(p.question) == longest and re.search(r"[\w,(=+-]$", p.question)]
    fault = f"are exactly {longest} characters long, the most there are, and end in the middle"
    yield cut if len({p.question for p in cut}) >= CUT else [], fault, "they seem cut"


def _references(problems: Problems) -> Iterator[Fault]:
    """Yield reference answers that no answer of a model could equal."""
    solutions = [p for p in problems if _is_solution(p)]
    advice = "name the column with the final answer: columns: {answer: NAME}"
    yield solutions, "have a whole solution for a reference answer", advice
    nothing = [p for p in problems if _NOTHING.fullmatch(p.answer)]
    yield nothing, "have a placeholder for a reference answer", "leave their answer empty"
    unclosed = [p for p in problems if _is_open(p)]
    yield unclosed, "have a reference answer whose braces or $ do not close", "they seem cut"
    noisy = [p for p in problems if re.fullmatch(r"-?\d+\.\d{12,}", p.answer)]
    yield noisy, "have the rounding error of a float in their reference answer", "write them as they were meant"
    letters = [p for p in problems if re.fullmatch(r"\(?[A-E]\)?", p.answer) and not p.about.get("choices")]
    advice = "name their column with columns: {options: NAME}, or write them into the question as A) ..., B) ..."
    many = letters if len(letters) >= MANY * len(problems) else []
    yield many, "have a letter for a reference answer and no choices", advice


def _is_solution(problem: Problem) -> bool:
    answer = problem.answer
    sentences = len(re.findall(r"[a-z)$][.!?](?:\s|$)", answer))
    return r"\boxed" in answer or "####" in answer or (len(answer) > SOLUTION and sentences > 1)


def _is_open(problem: Problem) -> bool:
    plain = re.sub(r"\\\\|\\[{}$]", "", problem.answer)
    return plain.count("{") != plain.count("}") or plain.count("$") % 2 == 1


def _choices(problems: Problems) -> Finding:
    """Look for missing or repeated options, and for letters that are right more often than by chance."""
    name = "choices"
    if not problems:
        return Finding(name, Check.OK, "none: answers are compared by meaning")
    choices = [(p, p.about["choices"]) for p in problems]
    sizes = Counter(len(texts) for _, texts in choices)
    usual, most = sizes.most_common(1)[0]
    others = [p for p, texts in choices if len(texts) != usual]
    right = Counter(p.answer for p in problems)
    shares = ", ".join(f"{letter} {count / len(problems):.0%}" for letter, count in sorted(right.items()))
    empty = [p for p, texts in choices if not all(texts)]
    twice = [p for p, texts in choices if len(set(texts)) < len(texts)]
    some = others if len(others) <= MANY / 4 * len(problems) else []
    faults = (
        (empty, "have an empty option", ""),
        (twice, "have an option twice", "no letter is right alone"),
        (some, f"do not have {usual} options as the others do", ""),
    )
    finding = _first(name, problems, faults, f"{most} of {len(problems)} with {usual} options; answers {shares}")
    for index in range(max(sizes) if finding.status is Check.OK else 0):
        letter, chances = chr(ord("A") + index), [1 / len(texts) for _, texts in choices if index < len(texts)]
        spread = sum(chance * (1 - chance) for chance in chances) ** 0.5
        if abs(right[letter] - sum(chances)) > CHANCE * spread:
            message = f"{letter} is the answer of {_of(right[letter], problems)}, where chance gives {sum(chances):.0f}"
            advice = "a model that has a favourite letter is rewarded for it; see whether indices count from 1"
            return Finding(name, Check.WARNING, message, advice)
    return finding


def _own_answers(benchmark: Questions, problems: Problems) -> Finding:
    """Look for reference answers that, boxed, are graded wrong."""
    name = "own answers"
    # Integers are always graded right, and another finding reports those that do not close.
    spelled = [p for p in problems if not re.fullmatch(r"-?\d{1,9}", p.answer) and not _is_open(p)]
    refused = (p for p in spelled if not benchmark.grade(p, rf"\boxed{{{p.answer}}}").correct)
    wrong = list(itertools.islice(refused, ENOUGH))
    if not wrong:
        return Finding(name, Check.OK, "every reference answer is graded right")
    many = "or more " if len(wrong) == ENOUGH else ""
    first = f"first {wrong[0].id}: {wrong[0].answer[:80]!r}"
    message = f"{len(wrong)} {many}of {len(problems)} reference answers are graded wrong themselves ({first})"
    return Finding(name, Check.FAILED if len(wrong) >= MANY * len(problems) else Check.WARNING, message)


def _duplicates(problems: Problems) -> Iterator[Fault]:
    groups: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        words = re.sub(r"\W+", "", problem.question).casefold() or problem.question
        groups[canonical([words, sorted(problem.about.get("choices", ()))])].append(problem)
    twice = [group for group in groups.values() if len(group) > 1]
    several = sum(len({problem.answer for problem in group}) > 1 for group in twice)
    advice = f"{several} of them with different reference answers" if several else ""
    if twice:
        yield [p for group in twice for p in group[1:]], f"are there before, first {twice[0][0].id} again", advice
