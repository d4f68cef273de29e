"""Is an endpoint what the map says: it is asked the run's problems, graded by the run's grader, kept as a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvatlas import __version__, benchmarks, policies
from kvatlas.benchmarks import Benchmark
from kvatlas.core import Costs, Grade, KvatlasError, Problem, Setting, Status, Trace, digest
from kvatlas.integrations.endpoint import Answer, Endpoint
from kvatlas.integrations.inspect_logs import verdict
from kvatlas.noise import stream_key
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.store import Key
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.pairs.systems import choose, systems_of
from kvatlas.sweeps.spec import BenchmarkSpec, ModelSpec

#: How finish reasons of OpenAI's API are named where answers are graded.
_STOPS = {"length": "max_tokens"}


@dataclass(frozen=True)
class Reference:
    """A cell of a run that an endpoint is held against: its model and setting, and what its problems were."""

    run: RunData
    model: str
    setting: Setting
    cells: tuple[Expected, ...]

    @classmethod
    def of(cls, folder: Path, name: str = "") -> Reference:
        """The cell that words name (as `compare --only`), else the recommended one; KvatlasError if it is not one."""
        run = RunData.open(folder)
        if not run.manifest.spec:
            raise KvatlasError(f"{str(folder)!r} was no sweep: how its problems were asked is not known.")
        if name:
            (system,) = choose(systems_of([run], "pass@1"), [name])
            model, setting = system.model, system.setting
        else:
            model, setting = recommended(run)
        cells = tuple(cell for cell in run.manifest.expected if (cell.model, cell.setting) == (model, setting))
        return cls(run, model, setting, cells)

    @property
    def full(self) -> Setting | None:
        """The full cache of the same run; None where it has none, or is the cell itself."""
        full = Setting.of("full")
        there = any((cell.model, cell.setting) == (self.model, full) for cell in self.run.manifest.expected)
        return full if there and self.setting != full else None

    def traces(self, setting: Setting) -> dict[tuple[str, str, int], Trace]:
        """The run's traces of a setting by benchmark, problem and sample."""
        cells = [cell for cell in self.run.manifest.expected if (cell.model, cell.setting) == (self.model, setting)]
        keys = {(cell.run_key, cell.benchmark) for cell in cells}
        return {
            (trace.benchmark, trace.problem, trace.sample): trace
            for key, trace in self.run.traces
            if trace.setting == setting and (key, trace.benchmark) in keys
        }

    def benchmarks(self) -> dict[str, Benchmark]:
        """The benchmarks as the run asked them; KvatlasError where this version asks or grades otherwise."""
        recorded = {entry[0]: list(entry) for entry in self.run.manifest.provenance.get("benchmarks", ())}
        by_name = {}
        for entry in self.run.manifest.spec["benchmarks"]:
            benchmark = BenchmarkSpec(**entry).find()
            if benchmark.name in recorded and list(benchmarks.identity(benchmark)) != recorded[benchmark.name]:
                raise KvatlasError(f"{benchmark.name} is asked or graded otherwise here than in the run; sweep anew.")
            by_name[benchmark.name] = benchmarks.asked_of(benchmark, self._reads())
        return by_name

    def _reads(self) -> Callable[[str], bool]:
        for entry in self.run.manifest.spec["models"]:
            try:
                model = ModelSpec(**entry).find()
                if model.name == self.model:
                    return model.reads
            except KvatlasError:
                continue
        return lambda _: True


@dataclass(frozen=True)
class Question:
    """One problem and sample that is still to be asked."""

    cell: Expected
    problem: Problem
    sample: int
    text: str


def recommended(run: RunData) -> tuple[str, Setting]:
    """The model and the setting that a run recommends; KvatlasError where that is none or not one."""
    from kvatlas.stats.run_analysis import RunAnalysis

    settings = [
        (choice.model, choice.by_memory.setting) for choice in RunAnalysis(run).choices if choice.by_memory is not None
    ]
    if len(settings) != 1:
        there = "; ".join(f"{model} {setting}" for model, setting in settings) or "none"
        raise KvatlasError(f"The run recommends not one setting but: {there}. Name a cell.")
    return settings[0]


def ask(
    endpoint: Endpoint,
    reference: Reference,
    folder: Path,
    *,
    problems: int | None = None,
    samples: int | None = None,
    concurrency: int = 8,
    top_k: bool = True,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> Setting:
    """Ask what is missing and keep every answer as it comes; returns the setting under which they are stored.

    `problems` takes the first of each benchmark, `samples` the first of each problem; `top_k` is sent, too, which not
    all endpoints know. `on_trace` is told how many answers are there of how many.
    KvatlasError for an endpoint that cannot be asked: what was answered is kept, and a second call goes on.
    """
    endpoint.check_model()
    setting = Setting.of("served", endpoint=endpoint.url, model=endpoint.model)
    spec = reference.run.manifest.spec
    sampling = dict(spec["sampling"])
    asked = reference.benchmarks()
    cells = []
    for cell in reference.cells:
        ids = cell.problems[:problems]
        identity = [setting.id, endpoint.model, benchmarks.identity(asked[cell.benchmark]), sampling, top_k]
        key = digest(["verify", *identity, spec["seed"]])[:32]
        count = min(samples or cell.samples, cell.samples)
        cells.append(replace(cell, setting=setting, run_key=key, problems=ids, samples=count, baseline=True))
    with Store.create(folder, {"kvatlas": __version__}) as store:
        store.put_manifest(_manifest(store, reference, cells))
        open_ = list(_questions(cells, asked, spec["problems"], store.keys()))
        total = sum(len(cell.problems) * cell.samples for cell in cells)
        done = total - len(open_)
        for question, answer in _answers(endpoint, open_, _fields(sampling, top_k), spec["seed"], concurrency):
            store.add(question.cell.run_key, _trace(question, asked[question.cell.benchmark], answer))
            done += 1
            on_trace(done, total)
    return setting


def _fields(sampling: Mapping[str, Any], top_k: bool) -> dict[str, Any]:
    sent = {name: sampling[name] for name in ("temperature", "top_p")}
    more = {"top_k": sampling["top_k"]} if top_k and sampling["top_k"] else {}
    return {**sent, **more, "max_tokens": sampling["max_new_tokens"]}


def _manifest(store: Store, reference: Reference, cells: Sequence[Expected]) -> Manifest:
    """What the run is to hold: these cells, in place of earlier ones of the same name, and other endpoints'."""
    source = reference.run.manifest
    try:
        before = store.manifest()
    except KvatlasError:
        before = Manifest((), (), {"lose_at_most": 100 * reference.run.margin}, {"kvatlas": __version__}, source.about)
    names = {(cell.model, cell.benchmark, cell.setting) for cell in cells}
    others = tuple(cell for cell in before.expected if (cell.model, cell.benchmark, cell.setting) not in names)
    verified = {"against": str(reference.setting), "model": reference.model}
    return replace(before, expected=(*others, *cells), provenance={**before.provenance, "verified": verified})


def _questions(
    cells: Sequence[Expected], asked: Mapping[str, Benchmark], limit: int | None, done: set[Key]
) -> Iterator[Question]:
    samples = max(cell.samples for cell in cells)
    for sample in range(samples):
        for cell in cells:
            benchmark = asked[cell.benchmark]
            known = {problem.id: problem for problem in benchmark.problems(limit)}
            for id_ in cell.problems:
                if id_ not in known:
                    raise KvatlasError(f"{cell.benchmark} has no problem {id_!r} here; the run was made with others.")
                if sample < cell.samples and (cell.run_key, cell.setting.id, cell.benchmark, id_, sample) not in done:
                    yield Question(cell, known[id_], sample, benchmark.prompt(known[id_]))


def _answers(
    endpoint: Endpoint, questions: Sequence[Question], fields: Mapping[str, Any], seed: int, concurrency: int
) -> Iterator[tuple[Question, Answer]]:
    """Answers as they come, `concurrency` questions under way; after a failure those under way are still taken."""
    waiting = iter(questions)
    with ThreadPoolExecutor(concurrency) as pool:
        running: dict[Future[Answer], Question] = {}
        failed: KvatlasError | None = None
        while True:
            while failed is None and len(running) < concurrency and (asked := next(waiting, None)) is not None:
                # 31 bits: what all servers take for a seed.
                own = stream_key(seed, asked.cell.benchmark, asked.problem.id, asked.sample) >> 32
                running[pool.submit(endpoint.ask, asked.text, fields, own)] = asked
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                question = running.pop(future)
                try:
                    answer = future.result()
                except KvatlasError as error:
                    failed = failed or error
                else:
                    yield question, answer
        if failed is not None:
            raise failed


def _trace(question: Question, benchmark: Benchmark, answer: Answer) -> Trace:
    cell, cache = question.cell, answer.cache
    text = f"<think>{answer.thinking}</think>{answer.text}" if answer.thinking else answer.text
    known = {name: cache.get(name) for name in ("peak_kv_tokens", "mean_kv_tokens", "compressions")}
    numbers = {name: value if isinstance(value, int | float) else None for name, value in known.items()}
    thinking = answer.reasoning_tokens
    return Trace(
        model=cell.model,
        benchmark=cell.benchmark,
        problem=question.problem.id,
        sample=question.sample,
        setting=cell.setting,
        tokens=(),
        text=text,
        grade=replace(_graded(benchmark, question.problem, answer, text), metrics={"finish": str(answer.finish)}),
        usage=Costs(answer.prompt_tokens, answer.output_tokens, thinking, **numbers, seconds=answer.seconds),  # type: ignore[arg-type]
    )


def _graded(benchmark: Benchmark, problem: Problem, answer: Answer, text: str) -> Grade:
    if answer.finish != "length" and answer.thinking and not answer.text:
        return Grade(False, 0.0, None, Status.NO_ANSWER)
    return verdict(benchmark, problem, text, _STOPS.get(str(answer.finish), answer.finish))


def allowed(setting: Setting, prompt: int) -> int | None:
    """The greatest cache that a setting lets grow before it compresses; None for no limit or an unknown policy."""
    try:
        budget = policies.of(setting).budget
    except KvatlasError:
        return None
    return None if budget is None else budget.most(prompt)
