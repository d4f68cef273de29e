"""The autopsy of lost answers: the evicted tokens that, put back at equal budget, restore the right answer.

A lost answer is decoded again with some of its evicted tokens put back, under the same random numbers. First each span
of evicted tokens is tried, then a span that restores the answer is halved to the smallest set that still does. The
searches of many answers share one batch. Each finished autopsy is one line of a file beside the run's store.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.benchmarks import for_model
from kvatlas.benchmarks.reading import grade, read_tokens
from kvatlas.core import KvatlasError, Setting, Trace
from kvatlas.models.pieces import quick_tokenizer, token_texts
from kvatlas.noise import stream_key
from kvatlas.policies import CompressingPolicy, Signal, from_setting
from kvatlas.policies.put_back import PutBack
from kvatlas.results import Store
from kvatlas.results.store import lock
from kvatlas.stats.deaths import Lost, lost_traces

if TYPE_CHECKING:
    from kvatlas.engine import Generation, Request
    from kvatlas.sweeps.plan import Plan

#: Rises with every change of the search: autopsies of another version are made again.
VERSION = 1
#: The file of a run's autopsies.
FILE = "autopsy.jsonl"
#: The share of the competing slots that a span may take.
SPAN_SHARE = 0.5
#: The most replays of one search, without the controls.
MOST_REPLAYS = 200
#: Random sets for each cause.
RANDOM_SETS = 4
#: Sequences in a batch.
BATCH = 32

#: Positions of tokens.
Tokens = tuple[int, ...]
#: What searches yield to learn for each whether it restores the right answer.
Trials = list[PutBack]


@dataclass(frozen=True)
class SavingToken:
    """A token whose return restores the answer, with others.

    `distance` counts the tokens from it to the compression that evicted it, `rank` the competing tokens with higher
    scores there, of which `slots` stay; `evicted` is the number of tokens that this compression evicted.
    """

    position: int
    text: str
    distance: int
    rank: float
    slots: int
    evicted: int


@dataclass(frozen=True)
class Autopsy:
    """The autopsy of one lost answer.

    `reproduced` is False if decoding again gave other tokens than the stored ones; then nothing was tried. `tokens` are
    the smallest set found, empty without one. Of `spans` tried, `saving` restored the answer. `random` has for each
    random set of as many tokens at like distances whether it does. `full` tells whether the answer is right if no
    compression takes place until the death; None if nothing was tried.
    """

    key: tuple[str, ...]
    death: str
    token: int | None
    reproduced: bool
    tokens: tuple[SavingToken, ...] = ()
    spans: int = 0
    saving: int = 0
    replays: int = 1
    random: tuple[bool, ...] = ()
    full: bool | None = None
    version: int = VERSION

    @property
    def cause_text(self) -> str:
        """The tokens that restore the answer, or why there are none."""
        if not self.reproduced:
            return "other tokens than the stored ones were decoded"
        if not self.tokens:
            return f"no span of {self.spans} restores the answer"
        return "restored by " + " ".join(repr(token.text) for token in self.tokens)

    @classmethod
    def from_json(cls, text: str) -> Autopsy:
        """Return the autopsy of a line of the file."""
        values = json.loads(text)
        tokens = tuple(SavingToken(**token) for token in values.pop("tokens"))
        key = tuple(values.pop("key"))
        return cls(**{**values, "tokens": tokens, "key": key, "random": tuple(values["random"])})


def key_of(lost: Lost) -> tuple[str, ...]:
    """Return the key of a lost answer as texts."""
    return tuple(map(str, lost.key))


def read_autopsies(folder: Path) -> dict[tuple[str, ...], Autopsy]:
    """Return the autopsies of a run by the key of their trace; a line that was not written to its end is left out."""
    path = folder / FILE
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        if line.endswith("\n") and f'"version": {VERSION}' in line:
            autopsy = Autopsy.from_json(line)
            found[autopsy.key] = autopsy
    return found


def _drop_half_line(path: Path) -> None:
    """Remove what a killed process wrote behind the last whole line of a file."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


# -- the search --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Eviction:
    """The tokens that one compression evicted, in their order; `length` counts all tokens before it."""

    length: int
    tokens: Tokens
    slots: int
    ranks: Mapping[int, float]

    def spans(self) -> list[Tokens]:
        """Return the tokens in spans of equal sizes, the nearest first."""
        most = max(1, int(self.slots * SPAN_SHARE))
        count = -(-len(self.tokens) // most)
        bounds = [len(self.tokens) * index // count for index in range(count + 1)]
        spans = [self.tokens[start:stop] for start, stop in pairwise(bounds)]
        return spans[::-1]


def evictions_before(trace: Trace, death: int, choices: PutBack) -> list[Eviction]:
    """Return what the compressions up to the new token `death` evicted, the latest first."""
    assert trace.eviction_trace is not None
    assert trace.usage.prompt_tokens is not None
    found = []
    evicted_at = trace.eviction_trace.evicted_at
    for length, choice in sorted(choices.choices.items(), reverse=True):
        # The newest token of a compression has not been through the model.
        new_tokens = length - trace.usage.prompt_tokens + 1
        tokens = tuple(position for position, step in enumerate(evicted_at) if step == new_tokens)
        # A statement begins with its name at `death`: its value comes with the next token.
        if tokens and new_tokens <= death + 1 and choice.slots:
            ranks = {position: float(choice.ranks[position]) for position in tokens}
            found.append(Eviction(length, tokens, choice.slots, ranks))
    return found


def shrink(tokens: Tokens, beside: Tokens, left: Callable[[], int]) -> Generator[Trials, list[bool], Tokens]:
    """Return a smallest part of `tokens` that restores the answer together with those `beside`, which all of them do.

    It stops halving when fewer than two replays are `left`.
    """
    if len(tokens) == 1 or left() < 2:
        return tokens
    half = len(tokens) // 2
    first = tokens[:half]
    second = tokens[half:]
    first_saves, second_saves = yield [PutBack(beside + first), PutBack(beside + second)]
    if first_saves:
        return (yield from shrink(first, beside, left))
    if second_saves:
        return (yield from shrink(second, beside, left))
    of_second = yield from shrink(second, beside + first, left)
    of_first = yield from shrink(first, beside + of_second, left)
    return of_first + of_second


@dataclass
class Case:
    """A lost answer in work: what is replayed, and the tokens of its trace as texts."""

    lost: Lost
    requests: Callable[[PutBack], Request[Any]]
    restored: Callable[[Generation[Any]], bool]
    pieces: Sequence[str]
    replays: int = 0
    spans: int = 0
    saving: int = 0
    base: PutBack = field(default_factory=PutBack)

    def left(self) -> int:
        """Return how many replays the search may still take."""
        return MOST_REPLAYS - self.replays

    def search(self) -> Generator[Trials, list[bool], Autopsy]:
        """Look for the smallest set of evicted tokens that restores the answer, then try the controls."""
        trace = self.lost.trace
        finding = self.lost.finding
        death = len(trace.tokens) if finding.token is None else finding.token
        evictions = evictions_before(trace, death, self.base)
        by_span: dict[Tokens, Eviction] = {}
        for eviction in evictions:
            by_span |= dict.fromkeys(eviction.spans(), eviction)
        spans = list(by_span)[: self.left()]
        full, *results = yield [PutBack(until=death + 1), *map(PutBack, spans)]
        saving = [span for span, saves in zip(spans, results, strict=True) if saves]
        self.spans = len(spans)
        self.saving = len(saving)
        if not saving:
            return self._autopsy((), (), full)
        cause = yield from shrink(saving[0], (), self.left)
        eviction = by_span[saving[0]]
        # Controls are no part of the search.
        replays = self.replays
        sets = random_sets(cause, eviction, random.Random(repr(self.lost.key)))
        controls = yield list(map(PutBack, sets))
        self.replays = replays
        return self._autopsy(self._tokens(cause, eviction), tuple(controls), full)

    def _tokens(self, cause: Tokens, eviction: Eviction) -> tuple[SavingToken, ...]:
        prompt = self.lost.trace.usage.prompt_tokens or 0
        found = []
        for position in sorted(cause):
            text = self.pieces[position - prompt] if position >= prompt else ""
            distance = eviction.length - position
            rank = eviction.ranks[position]
            found.append(SavingToken(position, text, distance, rank, eviction.slots, len(eviction.tokens)))
        return tuple(found)

    def _autopsy(self, tokens: tuple[SavingToken, ...], controls: tuple[bool, ...], full: bool) -> Autopsy:
        finding = self.lost.finding
        return Autopsy(
            key=key_of(self.lost),
            death=finding.death.value,
            token=finding.token,
            reproduced=True,
            tokens=tokens,
            spans=self.spans,
            saving=self.saving,
            replays=self.replays,
            random=controls,
            full=full,
        )


def random_sets(cause: Tokens, eviction: Eviction, rng: random.Random) -> list[Tokens]:
    """Return sets of as many other evicted tokens, each at half to twice the distance of the one that it stands for."""
    sets = [_random_set(cause, eviction, rng) for _ in range(RANDOM_SETS)]
    return [chosen for chosen in sets if len(chosen) == len(cause)]


def _random_set(cause: Tokens, eviction: Eviction, rng: random.Random) -> Tokens:
    """Return one such set; a smaller one if the compression evicted too few tokens."""
    chosen: list[int] = []
    for position in cause:
        distance = eviction.length - position
        free = [token for token in eviction.tokens if token not in cause and token not in chosen]
        near = [token for token in free if distance / 2 <= eviction.length - token <= 2 * distance]
        if free:
            chosen.append(rng.choice(near or free))
    return tuple(chosen)


# -- replays -----------------------------------------------------------------------------------------------------------


class Replayer:
    """The replays of the searches of one model's cell, in one batch."""

    def __init__(self, plan: Plan, traces: Sequence[Lost]) -> None:
        first = traces[0].trace
        self.plan = plan
        self.model = next(model for model in plan.models if model.name == first.model)
        self.policy = from_setting(first.setting).bind(self.model)
        if not isinstance(self.policy, CompressingPolicy) or Signal.ANSWER in self.policy.observes:
            raise KvatlasError(f"{first.setting} cannot be replayed; expected a policy that compresses by itself.")
        self.benchmark = for_model(
            next(item for item in plan.benchmarks if item.name == first.benchmark), self.model.reads
        )
        self.problems = {problem.id: problem for problem in plan.problems[first.benchmark]}
        self.tokenizer = quick_tokenizer(self.model.folder) or self.model.tokenizer

    def case(self, lost: Lost) -> Case:
        """Return a lost answer ready to be replayed."""
        from kvatlas.engine import Request

        trace = lost.trace
        problem = self.problems[trace.problem]
        prompt = self.model.encode(self.benchmark.prompt(problem))
        stream = stream_key(self.plan.spec.seed, self.model.stream, trace.benchmark, trace.problem, trace.sample)

        def request(put_back: PutBack) -> Request[Any]:
            return Request(put_back, prompt, stream, (self.policy,), put_back=put_back)

        def restored(generation: Generation[Any]) -> bool:
            reading = read_tokens(self.model, generation.tokens, generation.finished)
            return grade(self.benchmark, problem, reading).correct

        return Case(lost, request, restored, token_texts(self.tokenizer, trace.tokens))

    def run(self, cases: Iterable[Case]) -> Iterator[Autopsy]:
        """Yield the autopsies of all cases as they finish."""
        import torch

        from kvatlas.engine import Engine

        torch.set_num_threads(1)
        sampling = self.plan.spec.sampling.sampling()
        engine = Engine(self.model, self.model.load(), [self.policy], sampling, BATCH)
        board = _Board(iter(cases))
        for generation in engine.run(board.requests()):
            yield from board.take(generation)


class _Board:
    """The searches that wait for replays, and the replays that wait for a row."""

    def __init__(self, cases: Iterator[Case]) -> None:
        self.cases = cases
        self.waiting: list[Request[Any]] = []
        self.owner: dict[PutBack, _Open] = {}

    def requests(self) -> Iterator[Request[Any] | None]:
        """Yield replays, then further cases; None while all depends on replays that are not finished."""
        while True:
            if self.waiting:
                yield self.waiting.pop(0)
                continue
            case = next(self.cases, None)
            if case is not None:
                opened = _Open(case)
                self.owner[case.base] = opened
                yield case.requests(case.base)
            elif self.owner:
                yield None
            else:
                return

    def take(self, generation: Generation[Any]) -> Iterator[Autopsy]:
        """Give the result of a replay to its search; yield the autopsy if that was the last."""
        put_back = generation.key
        opened = self.owner.pop(put_back)
        case = opened.case
        case.replays += 1
        if put_back is case.base:
            if generation.tokens != case.lost.trace.tokens:
                finding = case.lost.finding
                yield Autopsy(key_of(case.lost), finding.death.value, finding.token, False)
                return
            yield from self._next(opened, None)
            return
        opened.results[put_back] = case.restored(generation)
        if len(opened.results) == len(opened.asked):
            yield from self._next(opened, [opened.results[item] for item in opened.asked])

    def _next(self, opened: _Open, results: list[bool] | None) -> Iterator[Autopsy]:
        """Continue a search with its results; a search that asks for nothing gets nothing."""
        try:
            trials = next(opened.search) if results is None else opened.search.send(results)
            while not trials:
                trials = opened.search.send([])
        except StopIteration as finished:
            yield finished.value
            return
        opened.results = {}
        opened.asked = trials
        for put_back in opened.asked:
            self.owner[put_back] = opened
        # Searches that have begun come first, so that a run that is stopped has most of its autopsies.
        self.waiting[:0] = map(opened.case.requests, opened.asked)


class _Open:
    """A case whose search has begun."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.search = case.search()
        self.asked: Trials = []
        self.results: dict[PutBack, bool] = {}


def find_lost(folder: Path, setting: Setting) -> tuple[Plan, list[Lost]]:
    """Return the plan of a run, and the answers that one setting lost; KvatlasError if they cannot be replayed."""
    from kvatlas.sweeps.plan import make_plan
    from kvatlas.sweeps.spec import parse_spec

    with Store.open(folder) as store:
        manifest = store.manifest()
        plan = make_plan(parse_spec(dict(manifest.spec)))
        tokenizers = {model.name: quick_tokenizer(model.folder) or model.tokenizer for model in plan.models}

        def pieces(model: str, tokens: tuple[int, ...]) -> list[str]:
            return token_texts(tokenizers[model], tokens)

        settings = dict.fromkeys(cell.setting for cell in manifest.expected)
        named = [item for item in settings if _is_named(item, setting)]
        if len(named) != 1:
            listed = "; ".join(map(str, named or settings))
            raise KvatlasError(
                f"The cell {setting} names {len(named)} settings of the run; expected one. There are: {listed}."
            )
        lost = list(lost_traces(store, pieces, named[0]))
    keys = plan.compute_keys()
    for item in lost:
        if keys.get((item.trace.model, item.trace.benchmark, item.trace.setting)) != item.key[0]:
            raise KvatlasError(f"{named[0]} was decoded by other weights, prompts or versions than today's.")
    return plan, lost


def _is_named(setting: Setting, wanted: Setting) -> bool:
    """Return whether a setting has the policy and all parameters of the `wanted` one."""
    values = setting.values
    return setting.policy == wanted.policy and all(values.get(name) == value for name, value in wanted.parameters)


def perform(
    plan: Plan, folder: Path, lost: Sequence[Lost], on_autopsy: Callable[[Autopsy, int, int], None]
) -> list[Autopsy]:
    """Return the autopsies of lost answers of a run, in their order; those that are missing are made and written.

    `on_autopsy` gets each new one, the number of those that are done, and that of all.
    """
    done = read_autopsies(folder)
    missing = [item for item in lost if key_of(item) not in done]
    finished = len(lost) - len(missing)
    held = lock(folder)
    try:
        _drop_half_line(folder / FILE)
        with (folder / FILE).open("a", encoding="utf-8") as file:
            for _, group in groupby(missing, lambda item: item.key[:3]):
                cell = list(group)
                replayer = Replayer(plan, cell)
                for autopsy in replayer.run(map(replayer.case, cell)):
                    file.write(json.dumps(asdict(autopsy)) + "\n")
                    file.flush()
                    done[autopsy.key] = autopsy
                    finished += 1
                    on_autopsy(autopsy, finished, len(lost))
    finally:
        if held is not None:
            held.release()
    return [done[key_of(item)] for item in lost]
