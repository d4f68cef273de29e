"""Answers of two endpoints to the same questions with the same seeds, asked in turn and stored as a run.

Each answer is stored as it comes; the same command goes on from there. The client is that of `deploy verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvatlas import __version__, benchmarks
from kvatlas.answers import reading
from kvatlas.benchmarks import Benchmark
from kvatlas.benchmarks.base import grade_reading
from kvatlas.class_files import permit
from kvatlas.core import KvatlasError, Problem, Setting, Trace, digest
from kvatlas.deploy.endpoint import Endpoint, EndpointAnswer
from kvatlas.gates.outcomes import Side, SideOptions
from kvatlas.gates.runs import side_of_setting
from kvatlas.noise import stream_key
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.manifest import contents_of

#: The default folder of the answers.
ANSWERS = Path("gate-answers")


@dataclass(frozen=True)
class Asking:
    """The questions to both endpoints: benchmarks by name, and how they are asked.

    With `allow_code` the code of files that a run names may run.
    """

    benchmarks: tuple[str, ...] = ()
    problems: int | None = None
    samples: int = 1
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 16_384
    seed: int = 0
    concurrency: int = 8
    models: tuple[str, ...] = ()
    key: str | None = None
    answers: Path = ANSWERS
    allow_code: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the sampling as fields of a request."""
        return {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_new_tokens}

    def sampling(self) -> dict[str, Any]:
        """Return the sampling as a run names it."""
        return {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": self.max_new_tokens}


def endpoint_sides(
    before: str,
    after: str,
    asking: Asking,
    options: SideOptions,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Side, Side]:
    """Ask the questions that have no stored answer yet, and return both sides.

    Raises KvatlasError if an endpoint cannot be reached; stored answers are kept.
    """
    if not asking.benchmarks:
        raise KvatlasError("Two endpoints need questions: name a benchmark or a file, as MATH500@math500.jsonl.")
    if len(asking.models) > 2:
        raise KvatlasError("--served: expected one name for both endpoints, or one for each.")
    models = asking.models or ("",)
    endpoints = (Endpoint(before, models[0], asking.key), Endpoint(after, models[-1], asking.key))
    for endpoint in endpoints:
        endpoint.check_model()
    if (endpoints[0].url, endpoints[0].model) == (endpoints[1].url, endpoints[1].model):
        raise KvatlasError(f"Both sides are the same model of the same endpoint ({endpoints[0].url}).")

    permit(*asking.benchmarks)
    questions = _GateQuestions(asking, endpoints, tuple(benchmarks.find(name) for name in asking.benchmarks))
    spec = {"sampling": asking.sampling(), "seed": asking.seed}
    contents = {each.name: contents_of(each.problems(asking.problems)) for each in questions.benchmarks}
    identities = [benchmarks.identity(each) for each in questions.benchmarks]
    new = Manifest((), (), spec, {"kvatlas": __version__, "benchmarks": identities}, contents=contents)
    with Store.create(asking.answers, {"kvatlas": __version__}) as store:
        stored = store.manifest(new)
        if stored.spec != new.spec:
            raise KvatlasError(
                f"{str(asking.answers)!r} holds answers of another comparison ({dict(stored.spec)}; now: {spec}); name "
                "another folder with --answers."
            )
        cells = questions.cells()
        manifest = replace(stored.with_cells(cells), contents={**stored.contents, **contents})
        store.put_manifest(replace(manifest, provenance={**manifest.provenance, "benchmarks": identities}))
        _ask_missing(store, questions, cells, on_trace)

    sides = []
    for endpoint in endpoints:
        setting = questions.setting(endpoint)
        side = side_of_setting(asking.answers, endpoint.model, setting, endpoint.url, options)
        sides.append(replace(side, kind="endpoint"))
    return sides[0], sides[1]


def _ask_missing(
    store: Store, questions: _GateQuestions, cells: Sequence[Expected], on_trace: Callable[[int, int], None]
) -> None:
    """Ask for the missing answers, both endpoints in turn, and store each as it comes."""
    stored = store.keys()
    missing = [
        question
        for question in questions.all(cells)
        if (question.cell.run_key, question.cell.setting.id, question.cell.benchmark, question.problem.id,
            question.sample) not in stored
    ]  # fmt: skip
    total = sum(len(cell.problems) * cell.samples for cell in cells)
    done = total - len(missing)

    failures: list[KvatlasError] = []
    with ThreadPoolExecutor(questions.asking.concurrency) as pool:
        running = {pool.submit(questions.answer, question): question for question in missing}
        for future in as_completed(running):
            if future.cancelled():
                continue
            question = running[future]
            try:
                store.add(question.cell.run_key, questions.trace(question, future.result()))
            except KvatlasError as error:
                failures.append(error)
                # Answers on their way still arrive, and are stored.
                for waiting in running:
                    waiting.cancel()
                continue
            done += 1
            on_trace(done, total)

    if failures:
        raise failures[0]


@dataclass(frozen=True)
class _GateQuestion:
    """A question to an endpoint: the cell of its answer, its problem, and the index of the sample."""

    endpoint: Endpoint
    cell: Expected
    benchmark: Benchmark
    problem: Problem
    sample: int


@dataclass(frozen=True)
class _GateQuestions:
    """The questions to both endpoints, and the traces of their answers."""

    asking: Asking
    endpoints: tuple[Endpoint, ...]
    benchmarks: tuple[Benchmark, ...]

    def setting(self, endpoint: Endpoint) -> Setting:
        """Return the setting that stands for an endpoint."""
        return Setting.from_parameters("served", endpoint=endpoint.url, model=endpoint.model)

    def cells(self) -> list[Expected]:
        """Return the cells of both endpoints, benchmark by benchmark."""
        cells = []
        for benchmark in self.benchmarks:
            ids = tuple(problem.id for problem in benchmark.problems(self.asking.problems))
            for endpoint in self.endpoints:
                setting = self.setting(endpoint)
                identity = [setting.id, benchmarks.identity(benchmark), self.asking.sampling(), self.asking.seed]
                run_key = digest(["gate", *identity])[:32]
                cells.append(Expected(endpoint.model, benchmark.name, setting, run_key, ids, self.asking.samples, True))
        return cells

    def all(self, cells: Sequence[Expected]) -> Iterator[_GateQuestion]:
        """Yield all questions: the first sample of all problems, then the next; both endpoints in turn."""
        by_place = {(cell.benchmark, cell.setting.id): cell for cell in cells}
        for sample in range(self.asking.samples):
            for benchmark in self.benchmarks:
                for problem in benchmark.problems(self.asking.problems):
                    for endpoint in self.endpoints:
                        cell = by_place[benchmark.name, self.setting(endpoint).id]
                        yield _GateQuestion(endpoint, cell, benchmark, problem, sample)

    def answer(self, question: _GateQuestion) -> EndpointAnswer:
        """Ask one question."""
        # All servers accept seeds of 31 bits.
        place = (question.benchmark.name, question.problem.id, question.sample)
        seed = stream_key(self.asking.seed, *place) >> 32
        prompt = question.benchmark.prompt(question.problem)
        return question.endpoint.ask(prompt, self.asking.fields(), seed)

    def trace(self, question: _GateQuestion, answer: EndpointAnswer) -> Trace:
        """Return an answer with its grade as a trace."""
        read = reading.read_text(answer.text, cut=answer.finish == "length")
        grade = grade_reading(question.benchmark, question.problem, read)
        graded = replace(grade, metrics={"finish": answer.finish})
        cell = question.cell
        name = (cell.model, cell.benchmark, question.problem.id, question.sample, cell.setting)
        return Trace(*name, (), answer.text, graded, answer.costs)


def run_and_endpoint_sides(
    run: str, address: str, asking: Asking, options: SideOptions, on_trace: Callable[[int, int], None]
) -> tuple[Side, Side]:
    """Return the sides of a cell of a run, RUN@CELL, and of an endpoint that is asked the questions of that run."""
    from kvatlas.deploy.endpoint import ask
    from kvatlas.deploy.engine_config import MeasuredCell

    folder, _, cell = run.partition("@")
    reference = MeasuredCell.from_run(Path(folder), cell, asking.allow_code)
    endpoint = Endpoint(address, next(iter(asking.models), ""), asking.key)
    ask(
        endpoint,
        reference,
        asking.answers,
        problems=asking.problems,
        concurrency=asking.concurrency,
        top_k=bool(reference.sampling.get("top_k")),
        on_trace=on_trace,
    )
    served = Setting.from_parameters("served", endpoint=endpoint.url, model=endpoint.model)
    first = side_of_setting(Path(folder), reference.model, reference.setting, run, options)
    second = side_of_setting(asking.answers, reference.model, served, endpoint.url, options)
    sampling = reference.sampling
    return first, replace(second, kind="endpoint", independent=sampling["temperature"] > 0)
