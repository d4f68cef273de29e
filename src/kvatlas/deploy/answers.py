"""An endpoint is asked a run's problems; its answers are graded by the run's grader and kept as a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from kvatlas import __version__, benchmarks
from kvatlas.benchmarks import Benchmark
from kvatlas.core import Costs, KvatlasError, Problem, Setting, Trace, digest
from kvatlas.deploy.endpoint import Answer, Endpoint
from kvatlas.deploy.reference import Reference
from kvatlas.noise import stream_key
from kvatlas.results import Expected, Key, Manifest, Store

#: A problem and sample that is to be asked.
Question = tuple[Expected, Problem, int]
#: Traces by benchmark, problem and sample.
Traces = Mapping[tuple[str, str, int], Trace]


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
) -> Traces:
    """Ask what is missing, keep every answer as it comes, and return all answers of this endpoint.

    `problems` takes the first of each benchmark, `samples` the first of each problem; `top_k` is sent, too, which not
    all endpoints know. `on_trace` is called with the number of answers that are there, and of all. Raises KvatlasError
    if the endpoint cannot be asked: what was answered is kept, and a second call goes on.
    """
    endpoint.check_model()
    setting = Setting.of("served", endpoint=endpoint.url, model=endpoint.model)
    spec = reference.run.manifest.spec
    sampling = dict(reference.sampling)
    asked = reference.benchmarks()
    cells = []
    for cell in reference.cells:
        identity = [setting.id, endpoint.model, benchmarks.identity(asked[cell.benchmark]), sampling, top_k]
        key = digest(["verify", *identity, spec["seed"]])[:32]
        count = min(samples or cell.samples, cell.samples)
        ids = cell.problems[:problems]
        cells.append(replace(cell, setting=setting, run_key=key, problems=ids, samples=count, baseline=True))
    fields = {name: sampling[name] for name in ("temperature", "top_p")} | {"max_tokens": sampling["max_new_tokens"]}
    if top_k and sampling["top_k"]:
        fields["top_k"] = sampling["top_k"]
    with Store.create(folder, {"kvatlas": __version__}) as store:
        store.put_manifest(_manifest(store, reference, cells))
        missing = list(_questions(cells, asked, spec["problems"], store.keys()))
        total = sum(len(cell.problems) * cell.samples for cell in cells)

        def answer(question: Question) -> Answer:
            cell, problem, sample = question
            # 31 bits: what all servers take for a seed.
            seed = stream_key(spec["seed"], cell.benchmark, problem.id, sample) >> 32
            return endpoint.ask(asked[cell.benchmark].prompt(problem), fields, seed)

        for number, (question, answered) in enumerate(_answers(answer, missing, concurrency), total - len(missing) + 1):
            store.add(question[0].run_key, _trace(question, asked[question[0].benchmark], *answered))
            on_trace(number, total)
        keys = {cell.run_key for cell in cells}
        return {(t.benchmark, t.problem, t.sample): t for key, t in store.traces() if key in keys}


def _manifest(store: Store, reference: Reference, cells: Sequence[Expected]) -> Manifest:
    """The manifest with these cells, in place of earlier ones of the same name, beside those of other endpoints."""
    source = reference.run.manifest
    try:
        before = store.manifest()
    except KvatlasError:
        before = Manifest((), (), {"lose_at_most": 100 * reference.run.margin}, {"kvatlas": __version__}, source.about)
    names = {cell.name for cell in cells}
    others = (cell for cell in before.expected if cell.name not in names)
    verified = {"against": str(reference.setting), "model": reference.model}
    return replace(before, expected=(*others, *cells), provenance={**before.provenance, "verified": verified})


def _questions(
    cells: Sequence[Expected], asked: Mapping[str, Benchmark], limit: int | None, done: set[Key]
) -> Iterator[Question]:
    for sample in range(max(cell.samples for cell in cells)):
        for cell in cells:
            known = {problem.id: problem for problem in asked[cell.benchmark].problems(limit)}
            for id_ in cell.problems:
                if id_ not in known:
                    raise KvatlasError(f"{cell.benchmark} has no problem {id_!r} here; the run was made with others.")
                if sample < cell.samples and (cell.run_key, cell.setting.id, cell.benchmark, id_, sample) not in done:
                    yield cell, known[id_], sample


def _answers(
    ask_one: Callable[[Question], Answer], questions: Sequence[Question], concurrency: int
) -> Iterator[tuple[Question, Answer]]:
    """Answers as they come, `concurrency` questions under way; after a failure those under way are still taken."""
    failures: list[KvatlasError] = []

    def answer(question: Question) -> Answer | None:
        try:
            return None if failures else ask_one(question)
        except KvatlasError as error:
            failures.append(error)
            return None

    pool = ThreadPoolExecutor(concurrency)
    try:
        running = {pool.submit(answer, question): question for question in questions}
        for future in as_completed(running):
            question, answered = running.pop(future), future.result()
            if answered is not None:
                yield question, answered
    finally:
        pool.shutdown(cancel_futures=True)
    if failures:
        raise failures[0]


def _trace(question: Question, benchmark: Benchmark, text: str, finish: str, usage: Costs) -> Trace:
    cell, problem, sample = question
    grade = replace(benchmarks.grade_text(benchmark, problem, text, finish == "length"), metrics={"finish": finish})
    return Trace(cell.model, cell.benchmark, problem.id, sample, cell.setting, (), text, grade, usage)
