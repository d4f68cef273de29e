r"""Whether a benchmark holds the problems that it should: a damaged file would look like a fault of models or settings.

Everything here takes a few seconds at most, so that it runs before every sweep.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from kvatlas.benchmarks import normal, tables, units
from kvatlas.benchmarks.base import Benchmark
from kvatlas.benchmarks.public import Questions
from kvatlas.benchmarks.sources import SOURCES
from kvatlas.core import Check, Finding, KvatlasError, Problem, canonical, digest

#: Share of problems from which a fault is the file's and not some problems'.
MANY = 0.2
#: A reference answer that is longer and has several sentences is a solution, in characters.
SOLUTION = 200
#: Reference answers that are graded wrong themselves, after which no more are looked for.
ENOUGH = 20
#: Questions of exactly the greatest length, from which on it is a limit that cut them.
CUT = 3
#: How far from what chance gives the number of times is that a letter is right, in standard deviations.
CHANCE = 5.0

_COMMANDS = r"(?:frac|sqrt|left|right|cdot|times|text|overline|angle|mathbb|boxed|leq|geq|pi)(?![A-Za-z])"
#: What texts hold that were damaged on their way into the file.
_DAMAGE = (
    (
        r"<\|im_start\|>|<\|begin_of_text\|>|\[INST\]|<｜User｜>|['\"]role['\"]\s*:",
        "a chat template or a list of messages",
        "leave the question alone in its column: the model's own template is put around it",
    ),
    (
        r"Ã[^\sA-Za-z]|â€|â‰|Â[°±²³·½]|�",
        "characters that were decoded wrongly, as in â€™",
        "write the file again as UTF-8",
    ),
    (
        r"[\x07\x08]\w|\x0b(?:ec|ert)|\x0c(?:rac|orall)|\t(?:imes|ext|heta|an\b|riangle)|\r(?:ight|ho\b|angle)",
        r"control characters where LaTeX commands begin, such as a form feed and rac for \frac",
        "write backslashes twice in JSON and in Python texts",
    ),
    (rf"(?<!\\)\\\\{_COMMANDS}", r"LaTeX commands with two backslashes, as in \\frac", "one backslash too many"),
    (r"&(?:lt|gt|amp|quot|nbsp|#\d+);", "HTML entities, as in &lt;", "write the characters themselves"),
)
_NOTHING = re.compile(r"(?i)(?:nan|null|n/a|unknown|tbd|todo|\?+|-+|error)")
_DIRECTIVE = re.compile(r"(?i)\\boxed|(?:think|reason) step by step")
_LEAK = re.compile(r"(?:####|(?i:\banswer\s*(?:is|[:=])))\s*\$?(?P<answer>[^\n$]+?)\$?\.?\s*$")


def check(benchmark: Benchmark, length: Callable[[str], int] = len, unit: str = "characters") -> Iterator[Finding]:
    """Findings about a benchmark as they are made; `length` measures prompts in that `unit`.

    Raises KvatlasError for a file that cannot be read at all.
    """
    problems = benchmark.problems()
    if isinstance(benchmark, Questions):
        yield _columns(benchmark)
        yield _published(benchmark, problems)
        yield _damage(problems)
        yield _questions(problems)
        yield _references(problems)
        yield _choices(problems)
        yield _own_answers(benchmark, problems)
    else:
        yield Finding("problems", Check.OK, f"{len(problems)} problems (digest {_digest(problems)})")
    yield _duplicates(problems)
    lengths = [length(benchmark.prompt(problem)) for problem in problems]
    message = f"{statistics.median(lengths):,.0f} {unit} in the median, {max(lengths):,} at most"
    yield Finding("prompts", Check.OK, message)
    example = problems[0]
    yield Finding(
        "example", Check.OK, f"{example.id}, to be answered with {example.answer}:\n{benchmark.prompt(example)}"
    )


def notes_on(benchmark: Benchmark) -> list[str]:
    """What a user should know about a problem file before a sweep, as sentences; none for generated problems.

    Raises KvatlasError where the file is surely not what it is taken for.
    """
    if not isinstance(benchmark, Questions):
        return []
    findings = list(check(benchmark))
    for finding in findings:
        if finding.status is Check.FAILED:
            raise KvatlasError(f"{benchmark.name} cannot be measured with {str(benchmark.path)!r}: {finding}.")
    return [f"{benchmark.name}: {finding}." for finding in findings if finding.status is Check.WARNING]


def fingerprint(problems: Sequence[Problem]) -> str:
    """What the reference answers are, whatever their order and spelling."""
    tidy = [units.without_unit(normal.tidy(problem.answer)) for problem in problems]
    return digest(sorted(str(value if (value := normal.rational(text)) is not None else text) for text in tidy))[:12]


def _digest(problems: Sequence[Problem]) -> str:
    return digest([[p.question, p.answer, p.about.get("choices")] for p in problems])[:12]


def _columns(benchmark: Questions) -> Finding:
    """Which columns were taken, and whether another one has as good a name and says something else."""
    name, named, rows = "columns", dict(benchmark.columns), benchmark.rows
    taken, doubts = [], []
    for what, usual in (("question", tables.QUESTION), ("answer", tables.ANSWER)):
        at = named.get(what) or tables.find(rows[0], usual)
        if at is None:
            continue
        taken.append(f"{what} in {at!r}")
        others = [column for word in usual if (column := tables.find(rows[0], (word,))) and column != at]
        for other in () if what in named else others:
            differ = sum(tables.as_text(row.get(at)) != tables.as_text(row.get(other)) for row in rows)
            if differ and not (what == "answer" and tables.find(rows[0], tables.INCORRECT)):
                doubts.append(f"{other!r} could be the {what}, too, and differs from {at!r} in {_of(differ, rows)}")
    if doubts:
        advice = "name the right one with columns: {question: NAME, answer: NAME}"
        return Finding(name, Check.WARNING, "; ".join(doubts), advice)
    options = named.get("options") or tables.find(rows[0], tables.OPTIONS)
    lettered = ", ".join(tables.lettered(rows[0]))
    taken += [f"options in {option!r}" for option in (options or lettered,) if option]
    return Finding(name, Check.OK, ", ".join(taken))


def _published(benchmark: Questions, problems: Sequence[Problem]) -> Finding:
    """Number and answers beside those of the published set."""
    name, source = "problems", SOURCES.get(benchmark.name)
    message = f"{len(problems)} problems with a reference answer (digest {_digest(problems)})"
    mark = fingerprint(problems)
    other = next((source_name for source_name, source in SOURCES.items() if source.answers == mark), benchmark.name)
    if source and other != benchmark.name:
        return Finding(name, Check.FAILED, f"the reference answers are those of {other}", f"name it {other}")
    without = len(benchmark.rows) - len(problems)
    if source and source.size != len(problems):
        message = f"{len(problems)} problems with a reference answer, where the published set has {source.size}"
        advice = f"{without} without one are left out" if without else "the file is not the published set"
        return Finding(name, Check.WARNING, message, advice)
    if without:
        return Finding(name, Check.WARNING, message, f"{without} without one are left out")
    if source and source.answers not in ("", mark):
        return Finding(name, Check.WARNING, "the reference answers are not all those of the published set")
    return Finding(name, Check.OK, f"{message}, as published" if source else message)


def _damage(problems: Sequence[Problem]) -> Finding:
    texts = ["\n".join([p.question, p.answer, *p.about.get("choices", ())]) for p in problems]
    for pattern, what, advice in _DAMAGE:
        matched = [p for p, text in zip(problems, texts, strict=True) if re.search(pattern, text)]
        if matched:
            return _warning("texts", problems, matched, f"hold {what}", advice)
    return Finding("texts", Check.OK, "no sign of damage")


def _questions(problems: Sequence[Problem]) -> Finding:
    """Questions that are something else, are cut, ask for a format of their own, or say their answer."""
    name = "questions"
    numbers = [p for p in problems if re.fullmatch(r"[-+\d.,\s]*", p.question)]
    if numbers:
        return _warning(name, problems, numbers, "are a number and no question", "name the column of the question")
    told = [p for p in problems if (m := _LEAK.search(p.question)) and m["answer"].strip(" .*") == p.answer.strip("$ ")]
    if told:
        return _warning(name, problems, told, "end with their answer", "leave it out of the question")
    asking = [p for p in problems if _DIRECTIVE.search(p.question)]
    if len(asking) >= MANY * len(problems):
        advice = "the prompt format says so again; take the format plain, or leave it out of the questions"
        return _warning(name, problems, asking, "say how to answer", advice)
    longest = max(len(p.question) for p in problems)
    cut = [p for p in problems if len(p.question) == longest and re.search(r"[\w,(=+-]$", p.question)]
    if len({p.question for p in cut}) >= CUT:
        what = f"are exactly {longest} characters long, the most there are, and end in the middle"
        return _warning(name, problems, cut, what, "they seem cut")
    return Finding(name, Check.OK, f"{min(len(p.question) for p in problems)} to {longest} characters")


def _references(problems: Sequence[Problem]) -> Finding:
    """Reference answers that no answer of a model could equal."""
    name = "references"
    solutions = [p for p in problems if _is_solution(p.answer)]
    if solutions:
        advice = "name the column with the final answer: columns: {answer: NAME}"
        warning = _warning(name, problems, solutions, "have a whole solution for a reference answer", advice)
        failed = len(solutions) >= MANY * len(problems)
        return Finding(name, Check.FAILED, warning.message, advice) if failed else warning
    nothing = [p for p in problems if _NOTHING.fullmatch(p.answer)]
    if nothing:
        return _warning(
            name, problems, nothing, "have a placeholder for a reference answer", "leave their answer empty"
        )
    opened = [p for p in problems if _is_open(p.answer)]
    if opened:
        return _warning(
            name, problems, opened, "have a reference answer whose braces or $ do not close", "they seem cut"
        )
    noisy = [p for p in problems if re.fullmatch(r"-?\d+\.\d{12,}", p.answer)]
    if noisy:
        advice = "write them as they were meant"
        return _warning(name, problems, noisy, "have the rounding error of a float in their reference answer", advice)
    letters = [p for p in problems if re.fullmatch(r"\(?[A-E]\)?", p.answer) and not p.about.get("choices")]
    if len(letters) >= MANY * len(problems):
        advice = "name their column with columns: {options: NAME}, or write them into the question as A) ..., B) ..."
        return _warning(name, problems, letters, "have a letter for a reference answer and no choices", advice)
    return Finding(name, Check.OK, f"{max(len(p.answer) for p in problems)} characters at most")


def _is_solution(answer: str) -> bool:
    sentences = len(re.findall(r"[a-z)$][.!?](?:\s|$)", answer))
    return r"\boxed" in answer or "####" in answer or (len(answer) > SOLUTION and sentences > 1)


def _is_open(answer: str) -> bool:
    plain = re.sub(r"\\\\|\\[{}$]", "", answer)
    return plain.count("{") != plain.count("}") or plain.count("$") % 2 == 1


def _choices(problems: Sequence[Problem]) -> Finding:
    """Options that are missing or twice there, and letters that are right more often than chance has it."""
    name = "choices"
    asked = [p for p in problems if p.about.get("choices")]
    if not asked:
        return Finding(name, Check.OK, "none: answers are compared by meaning")
    empty = [p for p in asked if not all(p.about["choices"])]
    if empty:
        return _warning(name, asked, empty, "have an empty option")
    twice = [p for p in asked if len(set(p.about["choices"])) < len(p.about["choices"])]
    if twice:
        return _warning(name, asked, twice, "have an option twice", "no letter is right alone")
    sizes = Counter(len(p.about["choices"]) for p in asked)
    usual, most = sizes.most_common(1)[0]
    others = [p for p in asked if len(p.about["choices"]) != usual]
    if 0 < len(others) <= MANY / 4 * len(asked):
        return _warning(name, asked, others, f"do not have {usual} options as the others do")
    right = Counter(p.answer for p in asked)
    for letter in [chr(ord("A") + i) for i in range(max(sizes))]:
        shares = [1 / len(p.about["choices"]) for p in asked if ord(letter) - ord("A") < len(p.about["choices"])]
        spread = sum(share * (1 - share) for share in shares) ** 0.5
        if abs(right[letter] - sum(shares)) > CHANCE * spread:
            message = f"{letter} is the answer of {_of(right[letter], asked)}, where chance gives {sum(shares):.0f}"
            advice = "a model that has a favourite letter is rewarded for it; see whether indices count from 1"
            return Finding(name, Check.WARNING, message, advice)
    shown = ", ".join(f"{letter} {count / len(asked):.0%}" for letter, count in sorted(right.items()))
    return Finding(name, Check.OK, f"{most} of {len(asked)} with {usual} options; answers {shown}")


def _own_answers(benchmark: Questions, problems: Sequence[Problem]) -> Finding:
    """Whether the reference answers, boxed, are graded right themselves."""
    name = "own answers"
    # An integer is always the same as itself, and of those that do not close another finding speaks.
    spelled = [p for p in problems if not re.fullmatch(r"-?\d{1,9}", p.answer) and not _is_open(p.answer)]
    refused = (p for p in spelled if not benchmark.grade(p, rf"\boxed{{{p.answer}}}").correct)
    wrong = list(itertools.islice(refused, ENOUGH))
    if not wrong:
        return Finding(name, Check.OK, "every reference answer is graded right")
    many = "or more " if len(wrong) == ENOUGH else ""
    which = f"first {wrong[0].id}: {wrong[0].answer[:80]!r}"
    message = f"{len(wrong)} {many}of {len(problems)} reference answers are graded wrong themselves ({which})"
    return Finding(name, Check.FAILED if len(wrong) >= MANY * len(problems) else Check.WARNING, message)


def _duplicates(problems: Sequence[Problem]) -> Finding:
    name = "duplicates"
    groups: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        words = re.sub(r"\W+", "", problem.question).casefold() or problem.question
        groups[canonical([words, sorted(problem.about.get("choices", ()))])].append(problem)
    twice = [group for group in groups.values() if len(group) > 1]
    if not twice:
        return Finding(name, Check.OK, "every question is there once")
    again = [problem for group in twice for problem in group[1:]]
    several = sum(len({problem.answer for problem in group}) > 1 for group in twice)
    advice = f"{several} of them with different reference answers" if several else ""
    return _warning(name, problems, again, f"are there before, first {twice[0][0].id} again", advice)


def _warning(
    name: str, problems: Sequence[Problem], affected: Sequence[Problem], what: str, advice: str = ""
) -> Finding:
    return Finding(name, Check.WARNING, f"{_of(len(affected), problems)} {what} (first {affected[0].id})", advice)


def _of(count: int, everything: Sequence[object]) -> str:
    return f"{count} of {len(everything)} problems"
