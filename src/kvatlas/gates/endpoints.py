"""Answers of two endpoints, or of an endpoint beside a cell of a run, to the same questions with the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import __version__, benchmarks
from kvatlas.benchmarks.file_checks import notes_on
from kvatlas.class_files import permit
from kvatlas.core import KvatlasError, Setting, Trace
from kvatlas.engines.asking import (
    AskedCell,
    ask_in_folder,
    differing_prompts,
    finish_faults,
    other_models,
    served_setting,
)
from kvatlas.engines.client import LOOPBACK, Endpoint
from kvatlas.gates.outcomes import GradedAnswer, Side, SideOptions
from kvatlas.gates.runs import side_of_setting
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.manifest import contents_of
from kvatlas.results.store import FILE, check_new_folder
from kvatlas.stats.run_data import GREEDY

if TYPE_CHECKING:
    from kvatlas.deploy.engine_config import MeasuredCell

#: The default folder of the answers.
ANSWERS = Path("gate-answers")


@dataclass(frozen=True)
class Asking:
    """The questions to both endpoints: benchmarks by name, and how they are asked.

    `columns` are those of problem files with other names; `on_message` is told what to look at before
    the first question; with `again` stored answers do not count.
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
    again: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    on_message: Callable[[str], None] = lambda _: None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling as a run names it."""
        return {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": self.max_new_tokens}


def endpoint_sides(
    before: str, after: str, asking: Asking, options: SideOptions, on_trace: Callable[[int, int], None]
) -> tuple[Side, Side]:
    """Ask the questions that have no stored answer yet, both endpoints in turn, and return both sides.

    Raises KvatlasError if an endpoint cannot be reached or a question failed; stored answers are kept.
    """
    if not asking.benchmarks:
        raise KvatlasError("Two endpoints need questions: name a benchmark or a file, as MATH500@math500.jsonl.")
    if len(asking.models) > 2:
        raise KvatlasError("--served: expected one name for both endpoints, or one for each.")
    if asking.samples > 1 and not asking.temperature:
        raise KvatlasError(
            f"--samples {asking.samples}: {GREEDY}, so they would be copies; take one, or --temperature 0.6."
        )
    check_new_folder(asking.answers)
    models = asking.models or ("",)
    endpoints = (Endpoint(before, models[0], asking.key), Endpoint(after, models[-1], asking.key))
    for endpoint in endpoints:
        endpoint.check_model()
    if len({(LOOPBACK.sub("//localhost", endpoint.url), endpoint.model) for endpoint in endpoints}) == 1:
        raise KvatlasError(
            f"Both sides are the model {endpoints[0].model!r} of one endpoint ({endpoints[0].url}), so that nothing "
            "would differ; name the endpoint of the other server, or two models with --served NAME --served NAME."
        )

    if endpoints[0].model != endpoints[1].model and not asking.models:
        served = " and ".join(repr(endpoint.model) for endpoint in endpoints)
        asking.on_message(f"The endpoints serve {served}; prompts of another template need --allow prompts.")
    permit(*asking.benchmarks)
    found = [benchmarks.find(name, **asking.columns) for name in asking.benchmarks]
    cells = []
    contents = {}
    for benchmark in found:
        problems = benchmarks.problems_of(benchmark, asking.problems)
        for sentence in notes_on(benchmark, asking.problems):
            asking.on_message(f"Warning: {sentence}")
        contents[benchmark.name] = contents_of(problems)
        ids = tuple(problem.id for problem in problems)
        for endpoint in endpoints:
            setting = served_setting(endpoint)
            expected = Expected(endpoint.model, benchmark.name, setting, "", ids, asking.samples, True)
            cells.append(AskedCell(endpoint, expected, benchmark, problems, asking.sampling(), asking.seed))

    manifest = Manifest(
        axes=(),
        expected=(),
        spec={"sampling": asking.sampling(), "seed": asking.seed},
        provenance={"kvatlas": __version__, "benchmarks": [benchmarks.identity(benchmark) for benchmark in found]},
        contents=contents,
    )
    _check_same_comparison(asking.answers, manifest)
    answers, traces = ask_in_folder(
        asking.answers, manifest, cells, again=asking.again, concurrency=asking.concurrency, on_trace=on_trace
    )

    sides = []
    for endpoint in endpoints:
        setting = served_setting(endpoint)
        of_side = [trace for trace in traces if trace.setting == setting]
        notes = [other_models(of_side), finish_faults(of_side, asking.max_new_tokens)]
        # A note that both sides have stands once.
        if not answers.all_new:
            notes.append(str(answers))
        side = side_of_setting(asking.answers, endpoint.model, setting, endpoint.url, options)
        side = replace(side, kind="endpoint", notes=tuple(note.removesuffix(".") for note in notes if note))
        sides.append(_asked_side(side, traces, traces))
    return sides[0], sides[1]


def measured_sides(
    reference: MeasuredCell, setting: Setting, endpoint: Endpoint, folder: Path, traces: Sequence[Trace], name: str
) -> tuple[Side, Side]:
    """Return the sides of a setting of a run and of an endpoint that was asked the questions of that run.

    Its answers are `traces`, and stored in `folder`; `name` is that of the side of the run.
    """
    options = SideOptions()
    measured = side_of_setting(Path(reference.run.folder or ""), reference.model, setting, name, options)
    served = side_of_setting(folder, reference.model, served_setting(endpoint), endpoint.url, options)
    served = replace(served, independent=reference.sampling["temperature"] > 0)

    # Both may hold more problems than were asked now.
    both = [*traces, *reference.traces(setting).values()]
    return _asked_side(measured, traces, both), _asked_side(served, traces, both)


def _check_same_comparison(folder: Path, manifest: Manifest) -> None:
    """Raise KvatlasError if a folder holds answers to questions that were asked in another way."""
    if not (folder / FILE).is_file():
        return
    with Store.open(folder) as store:
        spec = store.manifest(manifest).spec
        has_answers = next(iter(store.traces()), None) is not None
    now = manifest.spec
    if spec == now:
        return
    if spec.keys() != now.keys():
        raise KvatlasError(f"{str(folder)!r} is a run of another command, as a sweep; name a new one with --answers.")
    if not has_answers:
        # Left by a first try that was refused.
        (folder / FILE).unlink()
        return
    changed = [f"{name} was {value}, now {now[name]}" for name, value in spec.items() if value != now[name]]
    raise KvatlasError(
        f"{str(folder)!r} holds answers of another comparison ({'; '.join(changed)}); name another folder with "
        "--answers."
    )


def _asked_side(side: Side, asked: Sequence[Trace], both: Sequence[Trace]) -> Side:
    """Return a side with the answers to the problems that were `asked`.

    They tell which of their prompts had other tokens on the other side, by the traces of both sides.
    """
    problems = {(trace.benchmark, trace.problem) for trace in asked}
    unlike = set(differing_prompts(both))

    def read() -> Iterator[GradedAnswer]:
        for answer in side.read():
            place = answer.task, answer.problem
            if place in problems:
                yield answer._replace(prompt=side.name) if place in unlike else answer

    return replace(side, read=read)
