"""Checks that a benchmark holds the right problems: a wrong file would look like a fault of models or settings.

The checks take a few seconds at most, so that they run before every sweep.
"""

import itertools
import re
import statistics
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvatlas.answers import normal, quantities
from kvatlas.benchmarks import problem_files
from kvatlas.benchmarks.base import Benchmark, grade_answer, problems_of, prompt_of
from kvatlas.benchmarks.public import Questions
from kvatlas.benchmarks.public_data import SOURCES
from kvatlas.core import Check, CheckResult, KvatlasError, Problem, canonical, digest, grouped
from kvatlas.text import counted

Problems = Sequence[Problem]

#: The least share of problems for a fault of the whole file.
MANY = 0.2
#: A longer reference answer of several sentences is a solution, in characters.
SOLUTION = 200
#: Problems of a file that are checked before a sweep that asks for fewer: all of every public set.
CHECKED = 2000
#: The search for reference answers that are graded wrong ends after so many.
ENOUGH = 20
#: Rows that a sentence names.
_NAMED = 5
#: Words from which a text in another column may be a part of the question.
SENTENCE = 4
#: Names of columns with texts beside a question and its answer.
_BESIDE = re.compile(
    r"solution|answer|explan|rational|reason|thought|cot|step|hint|comment|note|feedback|generat|response|source|"
    r"equation|subject|subdomain|topic|type|title|author|url|id$"
)


def check_benchmark(benchmark: Benchmark, limit: int | None = None) -> Iterator[CheckResult]:
    """Yield the findings about a benchmark or its first `limit` problems; KvatlasError for an unreadable file."""
    problems = problems_of(benchmark, limit)
    if isinstance(benchmark, Questions):
        read = benchmark.read(limit)
        contents = ("context", "question", "answer", "options")
        columns = read.columns
        message = ", ".join(f"{content} in {columns[content]!r}" for content in contents if content in columns)
        named = [problem.cluster for problem in problems if problem.cluster]
        if named:
            message += f", {counted(len(named), 'problem')} in {counted(len(set(named)), 'cluster')}"
        yield _check_unread(message, read.unread, "question" in dict(benchmark.columns))

        yield _check_published(benchmark, read)
        # Those of published sets are lists of all solutions.
        yield _check_references(problems, () if benchmark.name in SOURCES else read.answer_lists)
        yield _check_own_answers(benchmark, problems)
    else:
        # A grade that cannot be stored is refused before anything is decoded.
        grade_answer(benchmark, problems[0], problems[0].answer)
        message = f"{counted(len(problems), 'problem')} (digest {_short_digest(problems)})"
        yield CheckResult("problems", Check.OK, message)
        yield _check_grader(benchmark, problems[:ENOUGH])
    yield _check_duplicates(problems)

    lengths = [len(prompt_of(benchmark, problem)) for problem in problems]
    message = f"{statistics.median(lengths):,.0f} characters in the median, {max(lengths):,} at most"
    yield CheckResult("prompts", Check.OK, message)

    example = problems[0]
    message = f"{example.id}, to be answered with {example.answer}:\n{prompt_of(benchmark, example)}"
    yield CheckResult("example", Check.OK, message)


def _check_unread(message: str, texts: Mapping[str, str], is_named: bool) -> CheckResult:
    """Name the columns of text that are not read; warn of those that may belong to the question.

    A user who named the question (`is_named`) has named all of it.
    """
    name = "columns"
    if texts:
        message += f"; not read: {', '.join(map(repr, texts))}"
    doubtful = []
    for column in texts:
        words = len(texts[column].split())
        usual = problem_files.find_column({column: ""}, *problem_files.CONTEXT) is not None
        if usual or (words >= SENTENCE and not _BESIDE.search(column.casefold())):
            doubtful.append(column)
    if is_named or not doubtful:
        return CheckResult(name, Check.OK, message)
    advice = (
        f"if {' or '.join(map(repr, doubtful))} belongs to the question name it (columns: {{context: NAME}}, or "
        "--column context=NAME), else name the question's column alone (question: NAME)"
    )
    return CheckResult(name, Check.WARNING, message, advice)


def notes_on(benchmark: Benchmark, limit: int | None = None) -> list[str]:
    """Return warnings about a problem file before a sweep, as sentences; empty for generated problems.

    Of a sweep of the first `limit` problems as many are checked, at least `CHECKED`. Raises KvatlasError for the file
    of another benchmark.
    """
    if not isinstance(benchmark, Questions):
        return []
    findings = list(check_benchmark(benchmark, None if limit is None else max(limit, CHECKED)))
    for finding in findings:
        if finding.status is Check.FAILED:
            raise KvatlasError(f"{benchmark.name} cannot be measured with {str(benchmark.path)!r}: {finding}.")
    return [f"{benchmark.name}: {finding}." for finding in findings if finding.status is Check.WARNING]


def fingerprint(problems: Problems) -> str:
    """Return a digest of the reference answers that does not depend on their order and spelling."""
    texts = [quantities.without_unit(normal.tidy(problem.answer)) for problem in problems]
    return digest(sorted(str(value if (value := normal.rational(text)) is not None else text) for text in texts))[:12]


#: LaTeX that copies of one question have or lack.
_MARKUP = re.compile(
    r"\\(left|right|displaystyle|text(bf|it|rm)?|math(rm|it|bf)|operatorname|q?quad|[Bb]ig+[lr]?|[,;!:])(?![a-z])"
)
_SPELLINGS = ((r"\\[dt]frac", r"\\frac"), (r"\\([lg])eq", r"\\\1e"), ("[\u2010-\u2015\u2212]", "-"))


def problem_marks(problems: Problems) -> list[str]:
    """Return a digest of each question with its answer that does not depend on spaces and markup."""
    marks = []
    for problem in problems:
        text = _MARKUP.sub("", unicodedata.normalize("NFKC", problem.question))
        for spelling, usual in _SPELLINGS:
            text = re.sub(spelling, usual, text)
        words = re.sub(r"[^0-9a-z+\-=<>]", "", text.casefold())
        marks.append(digest([words, fingerprint([problem])])[:8])
    return marks


def _short_digest(problems: Problems) -> str:
    return digest([[p.question, p.answer, p.about.get("choices")] for p in problems])[:12]


def _warning(name: str, affected: Problems, problems: Problems, fault: str, advice: str = "") -> CheckResult:
    message = f"{len(affected)} of {counted(len(problems), 'problem')} {fault} (first {affected[0].id})"
    return CheckResult(name, Check.WARNING, message, advice)


def _check_published(benchmark: Questions, read: problem_files.ProblemFile) -> CheckResult:
    """Report the number of problems; of a published set compare number, answers and questions with it."""
    name = "problems"
    count = len(read.problems)
    message = f"{counted(count, 'problem')} with a reference answer (digest {_short_digest(read.problems)})"
    if not read.whole:
        return CheckResult(name, Check.OK, f"{message}, the first of more")
    left_out = ""
    if read.unanswered:
        rows = ", ".join(map(str, read.unanswered[:_NAMED]))
        left_out = f"left out: {len(read.unanswered)} without one (first rows: {rows})"
    source = SOURCES.get(benchmark.name)
    if source is None:
        return CheckResult(name, Check.WARNING if left_out else Check.OK, message, left_out)

    # The answers of another published set, or another number of problems.
    mark = fingerprint(read.problems)
    other = next((other for other, published in SOURCES.items() if published.answers == mark), benchmark.name)
    if other != benchmark.name:
        return CheckResult(name, Check.FAILED, f"the reference answers are those of {other}", f"name it {other}")
    if source.size != count:
        message = f"{counted(count, 'problem')} with a reference answer, where the published set has {source.size}"
        return CheckResult(name, Check.WARNING, message, left_out or "the file is not the published set")
    if left_out:
        return CheckResult(name, Check.WARNING, message, left_out)
    if source.answers not in ("", mark):
        return CheckResult(name, Check.WARNING, "the reference answers are not all those of the published set")

    # The questions of public copies.
    if not source.answers:
        return CheckResult(name, Check.OK, f"{message}, as many as in the published set")
    marks = problem_marks(read.problems)
    unlike = [problem for problem, mark in zip(read.problems, marks, strict=True) if mark not in source.problems]
    if not unlike:
        return CheckResult(name, Check.OK, f"{message}, as published")
    if len(unlike) < MANY * count:
        fault = f"{counted(len(unlike), 'question')} not in the published words (first {unlike[0].id})"
        return CheckResult(
            name, Check.WARNING, f"{message}, answers as published, {fault}", "compare with another copy"
        )
    return CheckResult(name, Check.OK, f"{message}, answers as published (questions in other words are not compared)")


def _check_references(problems: Problems, lists: Problems) -> CheckResult:
    """Look for solutions in place of answers, for letters without choices, and for `lists` of answers."""
    name = "references"
    solutions = []
    for problem in problems:
        sentences = re.findall(r"[a-z)$][.!?](?:\s|$)", problem.answer)
        is_long = len(problem.answer) > SOLUTION and len(sentences) > 1
        if r"\boxed" in problem.answer or "####" in problem.answer or is_long:
            solutions.append(problem)
    if solutions:
        advice = "name the column with the final answer: columns: {answer: NAME}"
        warning = _warning(name, solutions, problems, "have a whole solution for a reference answer", advice)
        return replace(warning, status=Check.FAILED) if len(solutions) >= MANY * len(problems) else warning

    flags = [p for p in problems if p.answer in ("True", "False")]
    if flags:
        advice = "write the text that the model is to give, as yes"
        return _warning(name, flags, problems, "have true or false for a reference answer", advice)
    commas = [p for p in problems if re.fullmatch(r"-?\d+,\d{1,2}", p.answer)]
    if len(commas) >= MANY * len(problems):
        advice = "write the decimal point of English, as 1.5"
        return _warning(name, commas, problems, "have a comma for a decimal point", advice)

    letters = [p for p in problems if re.fullmatch(r"\(?[A-E]\)?", p.answer) and not p.about.get("choices")]
    if len(letters) >= MANY * len(problems):
        advice = 'put them into one column options as a list, ["red", "blue"], or into the question as A) ..., B) ...'
        return _warning(name, letters, problems, "have a letter for a reference answer and no choices", advice)
    if lists:
        fault = "have a list for a reference answer, and only an answer with all its members is right"
        return _warning(name, lists, problems, fault, "of several right answers keep one")
    return CheckResult(name, Check.OK, f"{max(len(p.answer) for p in problems)} characters at most")


#: A number before words or brackets that say of what it is one.
_COUNTED = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s+(?!(?:and|or|to|mod)\b)\(?[^\W\d_]{3,}[^\d=<>+*^\\]*")


def _check_own_answers(benchmark: Questions, problems: Problems) -> CheckResult:
    """Look for reference answers that, boxed, are graded wrong, whole or without the words behind their number."""
    name = "own answers"

    def refused() -> Iterator[tuple[Problem, str]]:
        for problem in problems:
            # Integers are always graded right.
            if re.fullmatch(r"-?\d{1,9}", problem.answer):
                continue
            spellings = [problem.answer]
            if counted_things := _COUNTED.fullmatch(normal.tidy(problem.answer)):
                spellings.append(counted_things[1])
            for text in spellings:
                if not benchmark.grade(problem, rf"\boxed{{{text}}}").correct:
                    yield problem, text

    wrong = list(itertools.islice(refused(), ENOUGH))
    if not wrong:
        return CheckResult(name, Check.OK, "every reference answer is graded right")
    many = "or more " if len(wrong) == ENOUGH else ""
    problem, text = wrong[0]
    first = f"first {problem.id}: {text[:80]!r}" + ("" if text == problem.answer else f" for {problem.answer[:80]!r}")
    message = f"{len(wrong)} {many}of {len(problems)} reference answers are graded wrong themselves ({first})"
    return CheckResult(name, Check.FAILED if len(wrong) >= MANY * len(problems) else Check.WARNING, message)


def _check_grader(benchmark: Benchmark, problems: Problems) -> CheckResult:
    """Look for reference answers that the grader of a class refuses in every usual form."""
    name = "own answers"
    forms = ("{}", r"\boxed{{{}}}", "The answer is {}.", "Answer: {}")

    def is_right(problem: Problem) -> bool:
        return any(grade_answer(benchmark, problem, form.format(problem.answer)).correct for form in forms)

    wrong = [problem for problem in problems if not is_right(problem)]
    if not wrong:
        return CheckResult(name, Check.OK, f"the first {counted(len(problems), 'reference answer')} graded right")
    return _warning(name, wrong, problems, "have a reference answer that is graded wrong, in whatever form")


def _check_duplicates(problems: Problems) -> CheckResult:
    """Look for questions that are there twice, and for different answers to them."""

    def content(problem: Problem) -> str:
        words = re.sub(r"\W+", "", problem.question).casefold() or problem.question
        return canonical([words, sorted(problem.about.get("choices", ()))])

    repeated = [group for group in grouped(problems, content).values() if len(group) > 1]
    if not repeated:
        return CheckResult("duplicates", Check.OK, "every question is there once")
    later: list[Problem] = []
    several = 0
    for group in repeated:
        later += group[1:]
        several += any(problem.answer != group[0].answer for problem in group)
    advice = f"{several} of them with different reference answers" if several else ""
    return _warning("duplicates", later, problems, f"are there before, first {repeated[0][0].id} again", advice)
