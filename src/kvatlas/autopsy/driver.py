"""The autopsy of lost answers: the evicted tokens that, put back at equal budget, restore the right answer.

A lost answer is decoded again, and from its compressions on with some of the evicted tokens put back, under the same
random numbers. First each span of evicted tokens is tried, then a span that restores the answer is halved to the
smallest set that still does, which is tested under random numbers that the search did not use. The searches of many
answers share one batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.answers.reading import read_tokens
from kvatlas.autopsy.autopsies import Autopsy, key_of, read_autopsies, writing
from kvatlas.autopsy.lost_answers import LostAnswer, lost_answers
from kvatlas.autopsy.search import AutopsySearch
from kvatlas.benchmarks import for_model, prompt_of
from kvatlas.benchmarks.base import grade_reading
from kvatlas.core import KvatlasError, Setting, grouped, is_reference
from kvatlas.models.token_texts import quick_tokenizer, token_texts
from kvatlas.noise import stream_key
from kvatlas.policies import CompressingPolicy, from_setting
from kvatlas.report.materials import RunMaterials
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import fitting_systems, names_to_choose, systems_of
from kvatlas.sweeps.plan import make_plan
from kvatlas.sweeps.spec import Spec, parse_spec

if TYPE_CHECKING:
    from kvatlas.engine import Generation, Request

#: Sequences in a batch.
BATCH = 32
#: Searches at a time: each holds the checkpoints of its trace.
OPEN_SEARCHES = 8


@dataclass(frozen=True)
class LostCell:
    """The answers of a model to a benchmark that one setting lost.

    `answers` is the number of all answers of the cell.
    """

    spec: Spec
    materials: RunMaterials
    model: str
    benchmark: str
    setting: Setting
    lost: list[LostAnswer]
    answers: int


def find_lost(folder: Path, name: str) -> list[LostCell]:
    """Return the answers that one setting of a run lost, for each model and benchmark that has it.

    `name` is that of the setting as `compare` takes it, with a model or without. Answers that were never compressed are
    left out; there are no cells without a lost answer. Raises KvatlasError for a name of several settings, if answers
    cannot be replayed, and for a policy of a file that is not permitted.
    """
    run = RunData.open(folder)
    every_system = systems_of([run], "pass@1")
    systems = fitting_systems(every_system, name)
    settings = list(dict.fromkeys(system.setting for system in systems))
    if len(settings) > 1:
        raise KvatlasError(
            f"--policy {name!r} names {len(settings)} settings; expected one: {names_to_choose(systems, every_system)}."
        )
    (setting,) = settings
    policy = from_setting(setting)
    if not isinstance(policy, CompressingPolicy):
        # By the parameters of settings, since the code of files may not be permitted to run.
        compressing = [system for system in every_system if "kv_budget" in system.setting.values]
        found = names_to_choose(compressing, every_system) or "the run has none"
        raise KvatlasError(
            f"The setting {setting} cannot be replayed: policy is {policy.setting_name!r}; expected one that "
            f"compresses by itself: {found}."
        )
    models = {system.model for system in systems}
    plan = make_plan(parse_spec(dict(run.manifest.spec)))
    materials = RunMaterials.from_manifest(run.manifest)

    with run.store() as store:
        all_lost = lost_answers(store, materials.pieces, setting)
        lost = [item for item in all_lost if item.trace.model in models and item.trace.usage.compressions != 0]
        answers: Counter[tuple[str, str]] = Counter()
        full: set[tuple[str, str]] = set()
        for _, trace in store.traces(texts=False):
            if is_reference(trace.setting):
                full.add((trace.model, trace.benchmark))
            elif trace.setting == setting:
                answers[trace.model, trace.benchmark] += 1

    if answers and full.isdisjoint(answers):
        model, benchmark = next(iter(answers))
        raise KvatlasError(
            f"The run {str(folder)!r} has no answers of the full cache of {model} on {benchmark}, so none of {setting} "
            f"can be called lost; add them: `kvatlas run {model} {benchmark} --out {folder}`, with its other options."
        )

    keys: Mapping[tuple[str, str, Setting], str] = plan.compute_keys()
    for answer in lost:
        if keys.get((answer.trace.model, answer.trace.benchmark, answer.trace.setting)) != answer.key[0]:
            raise KvatlasError(f"{setting} was decoded by other weights, prompts or versions than today's.")
        # Keys leave out the contents of problems.
        if materials.problem(answer.trace) is None:
            raise KvatlasError(
                f"The problem {answer.trace.problem!r} was changed since the run; expected {answer.trace.benchmark} as "
                "it was then."
            )

    by_cell = grouped(lost, lambda answer: (answer.trace.model, answer.trace.benchmark))
    return [LostCell(plan.spec, materials, *cell, setting, losses, answers[cell]) for cell, losses in by_cell.items()]


def perform(
    cells: Sequence[LostCell], folder: Path, most: int, on_done: Callable[[int, int], None]
) -> list[list[Autopsy]]:
    """Return for each cell the autopsies of its first `most` lost answers; those that are missing are made and written.

    `on_done` gets after each new one the number of those that are done, and that of all.
    """
    done = read_autopsies(folder)
    keys_by_cell = [list(map(key_of, cell.lost[:most])) for cell in cells]
    all_keys = set(chain.from_iterable(keys_by_cell))
    finished = len(all_keys & done.keys())

    with writing(folder) as add:
        for cell in cells:
            missing = [item for item in cell.lost[:most] if key_of(item) not in done]
            for autopsy in Replayer(cell).run(missing) if missing else ():
                add(autopsy)
                done[autopsy.key] = autopsy
                finished += 1
                on_done(finished, len(all_keys))
    return [list(map(done.__getitem__, keys)) for keys in keys_by_cell]


class Replayer:
    """The replays of the searches of a cell, in one batch."""

    def __init__(self, cell: LostCell) -> None:
        self.materials = cell.materials
        self.spec = cell.spec
        self.model = cell.materials.models[cell.model]
        self.policy = from_setting(cell.setting).bind(self.model)
        self.benchmark = for_model(cell.materials.benchmarks[cell.benchmark], self.model.reads)
        self.tokenizer = quick_tokenizer(self.model.folder) or self.model.tokenizer
        #: The replays that wait for a row, and the searches of those that are not finished, by the keys of requests.
        self.waiting: list[Request[Any]] = []
        self.opened: dict[object, AutopsySearch] = {}
        self.open_searches = 0

    def search(self, lost: LostAnswer) -> AutopsySearch:
        """Return the search of a lost answer, before its first replay."""
        trace = lost.trace
        problem = self.materials.problem(trace)
        assert problem is not None, "`find_lost` refuses changed problems"
        prompt = self.model.encode(prompt_of(self.benchmark, problem))

        def restored(generation: Generation[Any]) -> bool:
            reading = read_tokens(self.model, generation.tokens, generation.finished)
            return grade_reading(self.benchmark, problem, reading).correct

        return AutopsySearch(
            lost,
            prompt,
            stream=stream_key(self.spec.seed, self.model.stream, trace.benchmark, trace.problem, trace.sample),
            policy=self.policy,
            texts=[*token_texts(self.tokenizer, prompt), *token_texts(self.tokenizer, trace.tokens)],
            restored=restored,
            is_greedy=self.spec.sampling.sampling().temperature == 0,
        )

    def run(self, lost: Sequence[LostAnswer]) -> Iterator[Autopsy]:
        """Yield the autopsies as they finish."""
        import torch

        from kvatlas.engine import Engine

        torch.set_num_threads(1)
        engine = Engine(self.model, self.model.load(), [self.policy], self.spec.sampling.sampling(), BATCH)
        for generation in engine.run(self._requests(map(self.search, lost))):
            search = self.opened.pop(generation.key)
            search.take(generation)
            if len(search.results) == len(search.asked) and not self._resume(search):
                self.open_searches -= 1
                yield search.autopsy

    def _requests(self, searches: Iterator[AutopsySearch]) -> Iterator[Request[Any] | None]:
        """Yield replays, then those of further searches; None while all depends on replays that are not finished."""
        while True:
            if self.waiting:
                yield self.waiting.pop(0)
                continue
            search = next(searches, None) if self.open_searches < OPEN_SEARCHES else None
            if search is not None:
                self.open_searches += 1
                self._resume(search)
            elif self.opened:
                yield None
            else:
                return

    def _resume(self, search: AutopsySearch) -> bool:
        """Queue the next replays of a search; return False at its end."""
        replays = search.next_replays()
        self.opened.update((replay.key, search) for replay in replays)
        # Searches that have begun come first, so that a run that is stopped has most of its autopsies.
        self.waiting[:0] = replays
        return bool(replays)
