"""Questions to endpoints, and the one loop that asks them: each answer is graded and stored when it arrives.

`deploy verify`, `gate` and sweeps over servers ask here. One that fails leaves the others alone, and a second start
asks only what is missing.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvatlas import __version__, benchmarks
from kvatlas.answers import reading
from kvatlas.benchmarks import Benchmark
from kvatlas.benchmarks.base import grade_reading
from kvatlas.core import SERVED, KvatlasError, Problem, Setting, Status, Trace, canonical, described, digest, grouped
from kvatlas.engines.client import Endpoint, EndpointAnswer
from kvatlas.noise import stream_key
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.records import RefusedTraceError, text_digest

#: After so many failures in a row, and as many as there are open questions, an endpoint is asked no further question.
_FAILURES = 3
#: Seconds without an answer after which the server is looked at.
_LOOK = 0.5


@dataclass(frozen=True)
class AskedCell:
    """A promised cell, the endpoint that is asked its problems, and how. `sampling` is that of `Endpoint.ask`."""

    endpoint: Endpoint
    expected: Expected
    benchmark: Benchmark
    problems: Sequence[Problem]
    sampling: Mapping[str, Any]
    seed: int

    def with_attempt(self, attempt: int) -> AskedCell:
        """Return the cell with the run key of an attempt: a digest of all that the answers depend on.

        What the problems ask is no part of it: the store keeps their contents beside the key.
        """
        expected = self.expected
        how = [expected.setting.id, benchmarks.identity(self.benchmark), dict(self.sampling), self.seed, attempt]
        return replace(self, expected=replace(expected, run_key=digest(["asked", expected.model, *how])[:32]))

    def contents(self) -> dict[str, str]:
        """Return a digest of prompt and reference of each problem."""
        return {
            problem.id: digest([benchmarks.prompt_of(self.benchmark, problem), problem.content_digest()])[:16]
            for problem in self.problems
        }


def served_setting(endpoint: Endpoint) -> Setting:
    """Return the setting that stands for an endpoint."""
    return Setting.from_parameters("served", endpoint=endpoint.url, model=endpoint.model)


@dataclass(frozen=True)
class Question:
    """One question of a cell."""

    cell: AskedCell
    problem: Problem
    sample: int

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The key of its answer in the store."""
        expected = self.cell.expected
        return expected.run_key, expected.setting.id, expected.benchmark, self.problem.id, self.sample

    def answer(self, stopped: threading.Event) -> EndpointAnswer:
        """Ask it. The seed is that of every setting, and has 31 bits, which all servers accept."""
        cell = self.cell
        seed = stream_key(cell.seed, cell.expected.benchmark, self.problem.id, self.sample) >> 32
        return cell.endpoint.ask(benchmarks.prompt_of(cell.benchmark, self.problem), cell.sampling, seed, stopped)

    def trace(self, answer: EndpointAnswer) -> Trace:
        """Return an answer with its grade as a trace; a filtered one is no answer."""
        read = reading.read_text(answer.text, cut=answer.finish == "length")
        if answer.finish == "content_filter":
            read = replace(read, answer=None, status=Status.NO_ANSWER)
        grade = grade_reading(self.cell.benchmark, self.problem, read)
        metrics = {"finish": answer.finish}
        if answer.prompt_digest:
            metrics["prompt"] = answer.prompt_digest
        made_with = {"kvatlas": __version__, "day": f"{datetime.now(UTC):%Y-%m-%d}", **answer.server}
        expected = self.cell.expected
        name = (expected.model, expected.benchmark, self.problem.id, self.sample, expected.setting)
        grade = replace(grade, metrics={**grade.metrics, **metrics})
        return Trace(*name, (), answer.text, grade, answer.costs, made_with=canonical(made_with))


#: The answer to a question, its failure, or None if it was not asked.
_Outcome = EndpointAnswer | BaseException | None
_Arrived = tuple[Question, _Outcome]


@dataclass
class AskedAnswers:
    """The outcome of asking for what is missing.

    earlier: answers that were stored before, by the day of each. now: those that came now.
    missing: questions that had no stored answer. failures: one for each that failed.
    changed: problems that ask something else than before; their earlier answers are set aside.
    unused: answers stored under other questions, another sampling or by an earlier version.
    left_out: by address, the sampling fields that the server refused.
    """

    earlier: Mapping[str, int]
    missing: int
    now: int = 0
    failures: tuple[KvatlasError, ...] = ()
    changed: int = 0
    unused: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise KvatlasError if a question failed."""
        if self.failures and self.missing == 1:
            raise self.failures[0]
        if self.failures:
            counts = f"{len(self.failures):,} failed, {self.now:,} answers were stored"
            raise KvatlasError(f"{self.failures[0]} Of {self.missing:,} questions {counts}.")

    @property
    def all_new(self) -> bool:
        """True if nothing has to be said: all answers came now, by all fields of the requests."""
        return not (self.earlier or self.changed or self.unused or self.left_out)

    def __str__(self) -> str:
        earlier = sum(self.earlier.values())
        said = f"All {self.now:,} answers are new."
        if earlier:
            days = ", ".join(f"{count:,} of {day}" for day, count in sorted(self.earlier.items()))
            said = f"{earlier:,} of {earlier + self.now:,} answers were stored before ({days}); --again asks all anew."
        if self.changed:
            said += f" {self.changed:,} problems changed since they were asked, and were asked anew."
        if self.unused:
            said += f" {self.unused:,} stored answers are of another sampling or an earlier version, and do not count."
        for url, fields in self.left_out.items():
            said += f" {url} refuses {', '.join(fields)}, which were left out."
        return said


def ask_in_folder(
    folder: Path,
    manifest: Manifest,
    cells: Sequence[AskedCell],
    *,
    again: bool = False,
    concurrency: int = 8,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[AskedAnswers, list[Trace]]:
    """Ask what a folder of answers lacks, and return what came of it and all answers of these cells, without texts.

    `manifest` is that of a new folder; an old one gets its contents and provenance. With `again` earlier answers do not
    count, and stay in the store. Raises KvatlasError if questions failed; all answers that arrived are stored.
    """
    with Store.create(folder, {"kvatlas": __version__}) as store:
        stored = store.manifest(manifest)
        if any(cell.setting.policy != SERVED.policy for cell in stored.expected):
            raise KvatlasError(
                f"{str(folder)!r} is a measured run; expected a folder for answers of endpoints alone: name another."
            )
        if stored.spec.keys() != manifest.spec.keys():
            raise KvatlasError(f"{str(folder)!r} has answers of another command, gate or deploy verify: name another.")
        attempts = {**stored.provenance.get("attempts", {})}
        for setting_id in {cell.expected.setting.id for cell in cells}:
            attempts[setting_id] = attempts.get(setting_id, 0) + again
        cells = [cell.with_attempt(attempts[cell.expected.setting.id]) for cell in cells]

        # The cells of this attempt take the place of those before; others stay.
        promised = [cell.expected for cell in cells]
        names = {cell.name for cell in promised}
        former = {cell.run_key for cell in stored.expected if cell.name in names}
        former -= {cell.run_key for cell in promised}
        unused = 0 if again else sum(run_key in former for run_key, *_ in store.keys())  # noqa: SIM118
        stored = stored.with_cells(promised, **manifest.provenance, attempts=attempts)
        stored = replace(
            stored, about={**stored.about, **manifest.about}, contents={**stored.contents, **manifest.contents}
        )
        store.put_manifest(stored)

        answers = ask_missing(store, cells, concurrency=concurrency, on_trace=on_trace)
        answers.unused = unused
        answers.check()
        return answers, list(stored_answers(store, cells))


def stored_answers(store: Store, cells: Iterable[AskedCell]) -> Iterator[Trace]:
    """Yield the stored answers of cells that the manifest promises, without their texts."""
    keys = {(cell.expected.run_key, cell.expected.setting, cell.expected.benchmark) for cell in cells}
    for run_key, trace in store.traces(texts=False):
        if (run_key, trace.setting, trace.benchmark) in keys:
            yield trace


def questions_of(cells: Sequence[AskedCell]) -> Iterator[Question]:
    """Yield the questions of cells: the first sample of all problems, then the next; several endpoints in turn."""
    by_benchmark = grouped(cells, lambda cell: cell.expected.benchmark).values()
    for sample in range(max((cell.expected.samples for cell in cells), default=0)):
        for of_benchmark in by_benchmark:
            for place in range(max(len(cell.problems) for cell in of_benchmark)):
                for cell in of_benchmark:
                    if place < len(cell.problems) and sample < cell.expected.samples:
                        yield Question(cell, cell.problems[place], sample)


def ask_missing(
    store: Store,
    cells: Sequence[AskedCell],
    *,
    concurrency: int = 8,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
    stopped: threading.Event | None = None,
) -> AskedAnswers:
    """Ask the questions of cells that have no stored answer, and store each answer when it arrives.

    The manifest of the store promises the cells. `on_trace` is called with the numbers of present and of all answers.
    An endpoint that only fails is asked no more. Asking ends at once with Ctrl-C, and when `stopped` is set, as by the
    end of a server: what has arrived is stored, what is under way is lost.
    """
    # Stored answers to problems that ask something else now are set aside.
    contents: dict[str, dict[str, str]] = {}
    for cell in cells:
        contents.setdefault(cell.expected.run_key, {}).update(cell.contents())
    changed = store.set_aside(contents)

    stored_keys = store.keys()
    questions = list(questions_of(cells))
    missing = [question for question in questions if question.key not in stored_keys]
    earlier: Counter[str] = Counter()
    if len(missing) < len(questions):
        for trace in stored_answers(store, cells):
            earlier[str(json.loads(trace.made_with or "{}").get("day", "an unknown day"))] += 1
    answers = AskedAnswers(dict(earlier), len(missing), changed=len(changed))

    stopped = stopped or threading.Event()
    threads = _AskingThreads(missing, concurrency)
    held: list[_Arrived] = []
    awaited = len(missing)
    try:
        while awaited and not stopped.is_set():
            try:
                held.append(threads.arrived.get(timeout=_LOOK))
            except queue.Empty:
                continue
            awaited -= 1
            if _store_answer(store, answers, *held[0]):
                on_trace(len(questions) - len(missing) + answers.now, len(questions))
            held.clear()
    finally:
        # What arrived until Ctrl-C, or the end of the server, is stored.
        threads.stopped.set()
        while not threads.arrived.empty():
            held.append(threads.arrived.get())
        for question, answer in held:
            if isinstance(answer, EndpointAnswer):
                _store_answer(store, answers, question, answer)

    for cell in cells:
        if cell.endpoint.refused_fields:
            answers.left_out[cell.endpoint.url] = cell.endpoint.refused_fields
    return answers


class _AskingThreads:
    """Threads that ask questions in their order, and the answers that arrived."""

    def __init__(self, questions: Sequence[Question], concurrency: int) -> None:
        # All threads take from one iterator over a list, whose steps are atomic.
        self.waiting = iter(questions)
        self.most_failures = max(concurrency, _FAILURES)
        self.failures_in_row: Counter[str] = Counter()
        self.stopped = threading.Event()
        # Bounded, so that answers never come faster than they are stored; a stopped thread finds room for its last one.
        self.arrived: queue.Queue[_Arrived] = queue.Queue(2 * concurrency)
        for _ in range(min(concurrency, len(questions))):
            # A daemon, since a request that hangs must not keep the process from its end.
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        for question in self.waiting:
            if self.stopped.is_set():
                return
            setting = question.key[1]
            answer: _Outcome = None
            if self.failures_in_row[setting] < self.most_failures:
                try:
                    answer = question.answer(self.stopped)
                    self.failures_in_row[setting] = 0
                except BaseException as error:  # it is raised where the answers are awaited
                    answer = error
                    self.failures_in_row[setting] += 1
            self.arrived.put((question, answer))


def _store_answer(store: Store, answers: AskedAnswers, question: Question, answer: _Outcome) -> bool:
    """Store an answer and return True; else count the failure."""
    error = answer
    if isinstance(answer, EndpointAnswer):
        try:
            store.add(question.key[0], question.trace(answer))
        except RefusedTraceError as refused:
            error = refused
        else:
            answers.now += 1
            return True
    if isinstance(error, Exception):
        if not isinstance(error, KvatlasError):
            # One answer of an unforeseen form is a failure of its own; the others go on.
            error = KvatlasError(f"{question.cell.endpoint.url} was not understood ({described(error)}).")
        answers.failures = (*answers.failures, error)
    elif isinstance(error, BaseException):
        raise error
    return False


# -- what answers tell of a server -------------------------------------------------------------------------------------


def probe_seeds(
    endpoint: Endpoint, question: str, sampling: Mapping[str, Any], stopped: threading.Event | None = None
) -> str:
    """Return whether a server draws by the seed of a request: `honoured`, `ignored` or `constant`.

    One question is asked twice with one seed and once with another. Constant answers at a temperature above 0 are no
    samples.
    """
    first, again, other = (text_digest(endpoint.ask(question, sampling, seed, stopped).text) for seed in (1, 1, 2))
    if first != again:
        return "ignored"
    return "constant" if first == other else "honoured"


def differing_prompts(traces: Iterable[Trace]) -> list[tuple[str, str]]:
    """Return benchmark and problem of each prompt whose tokens differ among these answers.

    Digests of the tokens are compared where servers returned them, else their numbers: another template, system
    message or tokenizer changes both.
    """
    differing = []
    for place, answers in grouped(traces, lambda trace: (trace.benchmark, trace.problem)).items():
        digests = {str(trace.grade.metrics.get("prompt", "")) for trace in answers}
        counts = {trace.usage.prompt_tokens for trace in answers}
        if len(digests - {""}) > 1 or len(counts - {None}) > 1:
            differing.append(place)
    return differing


def other_models(traces: Iterable[Trace], asked_model: str = "") -> str:
    """Return as a sentence that answers are of another model than was asked, or "": servers may hand requests on.

    The model that was asked is by default that of the setting. A name in the other one, as of a version with its date,
    is the same model.
    """
    others: Counter[str] = Counter()
    total = 0
    for trace in traces:
        total += 1
        name = str(json.loads(trace.made_with or "{}").get("model", ""))
        asked = asked_model or str(trace.setting.values.get("model", ""))
        if name.casefold() not in asked.casefold() and asked.casefold() not in name.casefold():
            others[name] += 1
    if not others:
        return ""
    named = "; ".join(f"{count:,} {name!r}" for name, count in others.most_common(3))
    return f"Of {total:,} answers {others.total():,} are of another model than was asked, by name: {named}."


def finish_faults(traces: Iterable[Trace], most: int) -> str:
    """Return as a sentence what is wrong with finish reasons and lengths, with a limit of `most` tokens, or ""."""
    answers = [(str(trace.grade.metrics.get("finish")), trace.usage.output_tokens) for trace in traces]
    lengths = [count for _, count in answers if count is not None]
    cut_lengths = [count for name, count in answers if name == "length" and count is not None]

    # The number of answers with each fault.
    faults = {
        "have a finish reason other than stop and length": sum(name not in ("stop", "length") for name, _ in answers),
        f"were cut (finish reason length) before {most:,} tokens": sum(count < most for count in cut_lengths),
        f"are longer than the limit of {most:,} tokens": sum(count > most for count in lengths),
        "come without usage.completion_tokens": sum(count is None for _, count in answers),
    }
    bad = "; ".join(f"{count:,} {text}" for text, count in faults.items() if count)
    return f"Of {len(answers):,} answers {bad}." if bad else ""
