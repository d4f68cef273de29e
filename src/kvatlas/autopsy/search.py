"""The search of one autopsy: which evicted tokens restore a lost answer, and how often under other random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol

from kvatlas.autopsy.autopsies import Autopsy, SavingToken, key_of, token_kind
from kvatlas.autopsy.lost_answers import LostAnswer
from kvatlas.core import Trace
from kvatlas.noise import stream_key
from kvatlas.policies.selection import PutBack

if TYPE_CHECKING:
    from kvatlas.engine import Checkpoint, Generation, Request
    from kvatlas.policies import Policy

#: The share of the competing slots that a span may take.
SPAN_SHARE = 0.5
#: The most replays of one search, without those of the held-out test.
MOST_REPLAYS = 200
#: Random sets for each cause under the stored random numbers.
RANDOM_SETS = 4
#: The random streams of the held-out test, which no search uses.
HELD_OUT_STREAMS = 16
#: More new tokens than a trace has.
NEVER = 2**31

#: Positions of tokens.
Tokens = tuple[int, ...]


class ReplayTask(Protocol):
    """A decoding that a search asks for, and what it learns from its generation."""

    def request(self) -> Request[Any]:
        """Return the request to decode."""

    def result(self, generation: Generation[Any]) -> bool:
        """Return the answer to the question of the search."""


#: What searches yield; they get the results in the same order.
ReplayTasks = Sequence[ReplayTask]


@dataclass
class Case:
    """A stored trace that is decoded again, and the tokens of it as texts.

    `base` has the choices of its policy, and `checkpoints` the rows before its compressions, after the `Trunk`.
    """

    trace: Trace
    prompt: tuple[int, ...]
    stream: int
    policy: Policy
    prompt_pieces: Sequence[str]
    pieces: Sequence[str]
    restored: Callable[[Generation[Any]], bool]
    base: PutBack = field(default_factory=PutBack)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)

    def request(self, key: object, **values: Any) -> Request[Any]:
        """Return a request for this prompt."""
        from kvatlas.engine import Request

        return Request(key, self.prompt, **{"stream": self.stream, "policies": (self.policy,), **values})

    def close(self) -> None:
        """Give back the pages of the checkpoints."""
        for checkpoint in self.checkpoints.values():
            checkpoint.drop()
        self.checkpoints.clear()

    def text(self, position: int) -> str:
        """Return the text of a token of the prompt or of a new one."""
        new = position - len(self.prompt)
        return self.pieces[new] if new >= 0 else self.prompt_pieces[position]


@dataclass(frozen=True, eq=False)
class Trunk:
    """The stored trace decoded again: is it the stored one token for token?"""

    case: Case

    def request(self) -> Request[Any]:
        """Return the request, which leaves checkpoints."""
        return self.case.request(self, put_back=self.case.base, checkpoints=self.case.checkpoints)

    def result(self, generation: Generation[Any]) -> bool:
        """Return whether the tokens are the stored ones."""
        return generation.tokens == self.case.trace.tokens


@dataclass(frozen=True, eq=False)
class Fork:
    """A decoding from the compression at `length` tokens on: is the answer right if these tokens are put back?

    Its random numbers are the stored ones, or those of the held-out `stream`, counted from 0.
    """

    case: Case
    put_back: PutBack
    length: int
    stream: int | None = None

    def request(self) -> Request[Any]:
        """Return the request, which starts at a checkpoint of the trunk."""
        stream = self.case.stream
        if self.stream is not None:
            stream = stream_key(stream, "held out", self.stream)
        return self.case.request(self, stream=stream, put_back=self.put_back, start=self.case.checkpoints[self.length])

    def result(self, generation: Generation[Any]) -> bool:
        """Return whether the answer is right."""
        return self.case.restored(generation)


# -- evictions ---------------------------------------------------------------------------------------------------------


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


def evictions_of_case(case: Case) -> list[Eviction]:
    """Return what the compressions of a trace evicted, the latest first."""
    trace = case.trace
    assert trace.eviction_trace is not None
    found = []
    evicted_at = trace.eviction_trace.evicted_at
    for length, choice in sorted(case.base.choices.items(), reverse=True):
        # The newest token of a compression has not been through the model.
        new_tokens = length - len(case.prompt) + 1
        tokens = tuple(position for position, step in enumerate(evicted_at) if step == new_tokens)
        if tokens and choice.slots:
            ranks = {position: float(choice.ranks[position]) for position in tokens}
            found.append(Eviction(length, tokens, choice.slots, ranks))
    return found


def similar_tokens(
    positions: Sequence[int], eviction: Eviction, rng: random.Random, is_like: Callable[[int, int], bool]
) -> Tokens:
    """Return other evicted tokens for some of an eviction, each at half to twice the distance of its own.

    `is_like` tells whether a token may stand for another one. There are fewer tokens if the eviction has too few. The
    logarithms of distances are drawn alike, so that tokens are neither nearer nor farther than their own on average.
    """
    chosen: list[int] = []
    for position in positions:
        distance = eviction.length - position
        free = [token for token in eviction.tokens if token not in chosen and is_like(position, token)]
        near = [token for token in free if distance / 2 <= eviction.length - token <= 2 * distance]
        if free:
            weights = [1 / (eviction.length - token) for token in near or free]
            chosen += rng.choices(near or free, weights)
    return tuple(chosen)


# -- the search --------------------------------------------------------------------------------------------------------


def shrink(
    tokens: Tokens, beside: Tokens, left: Callable[[], int], fork: Callable[[Tokens], ReplayTask]
) -> Generator[ReplayTasks, list[bool], Tokens]:
    """Return a smallest part of `tokens` that restores the answer together with those `beside`, which all of them do.

    It stops halving when fewer than two replays are `left`. `fork` returns the replay with tokens put back.
    """
    if len(tokens) == 1 or left() < 2:
        return tokens

    half = len(tokens) // 2
    first = tokens[:half]
    second = tokens[half:]
    first_saves, second_saves = yield [fork(beside + first), fork(beside + second)]
    if first_saves:
        return (yield from shrink(first, beside, left, fork))
    if second_saves:
        return (yield from shrink(second, beside, left, fork))
    of_second = yield from shrink(second, beside + first, left, fork)
    of_first = yield from shrink(first, beside + of_second, left, fork)
    return of_first + of_second


@dataclass
class AutopsySearch:
    """The autopsy of a lost answer: its cause, and the held-out test of it.

    An answer that `is_greedy`, decoded at temperature 0, has no held-out test.
    """

    lost: LostAnswer
    case: Case
    is_greedy: bool = False
    replays: int = 0
    autopsy: Autopsy = field(init=False)

    def __post_init__(self) -> None:
        death = self.lost.death
        self.autopsy = Autopsy(key_of(self.lost), death.kind.value, death.token)

    def left(self) -> int:
        """Return how many replays the search may still take."""
        return MOST_REPLAYS - self.replays

    def run(self) -> Generator[ReplayTasks, list[bool], Autopsy]:
        """Look for the smallest set of evicted tokens that restores the answer, and test it."""
        autopsy = self.autopsy
        (autopsy.reproduced,) = yield [Trunk(self.case)]
        if autopsy.reproduced:
            found = yield from self._cause()
            autopsy.replays = self.replays
            if found:
                yield from self._test(*found)

        self.case.close()
        return autopsy

    def _death(self) -> int:
        """Return the number of new tokens at the death."""
        token = self.lost.death.token
        return len(self.lost.trace.tokens) if token is None else token

    def _no_compression_until_death(self) -> PutBack:
        # A compression at `length` tokens has one new token more than have been through the model.
        return PutBack(until=self._death() + 2)

    def _cause(self) -> Generator[ReplayTasks, list[bool], tuple[Tokens, Eviction] | None]:
        """Look for a cause; note the spans, and whether the answer is right without compression until the death."""
        # A statement begins with its name at the death: its value comes with the next token.
        last = len(self.case.prompt) + self._death()
        by_span: dict[Tokens, Eviction] = {}
        for eviction in evictions_of_case(self.case):
            if eviction.length <= last:
                by_span |= dict.fromkeys(eviction.spans(), eviction)
        spans = list(by_span)[: self.left()]
        if not spans:
            return None

        without = self._no_compression_until_death()
        forks = [Fork(self.case, PutBack(span), by_span[span].length) for span in spans]
        self.autopsy.full, *results = yield [Fork(self.case, without, min(self.case.checkpoints)), *forks]
        saving = [span for span, saves in zip(spans, results, strict=True) if saves]
        self.autopsy.spans = len(spans)
        self.autopsy.saving = len(saving)
        if not saving:
            return None

        eviction = by_span[saving[0]]
        cause = yield from shrink(
            saving[0], (), self.left, lambda tokens: Fork(self.case, PutBack(tokens), eviction.length)
        )
        saving_tokens = []
        for position in sorted(cause):
            text = self.case.text(position)
            distance = eviction.length - position
            rank = eviction.ranks[position]
            saving_tokens.append(SavingToken(position, text, distance, rank, eviction.slots, len(eviction.tokens)))
        self.autopsy.tokens = tuple(saving_tokens)
        return cause, eviction

    def _test(self, cause: Tokens, eviction: Eviction) -> Generator[ReplayTasks, list[bool], None]:
        """Try random sets, and the cause under held-out random numbers."""
        rng = random.Random(repr(self.autopsy.key))
        sets = [self._random_set(cause, eviction, rng) for _ in range(RANDOM_SETS)]
        forks = [Fork(self.case, PutBack(tokens), eviction.length) for tokens in sets if len(tokens) == len(cause)]
        self.autopsy.random = tuple((yield forks))

        # A random set for each stream, of any tokens and of tokens of the cause's kinds.
        streams = range(HELD_OUT_STREAMS)
        sets = [self._random_set(cause, eviction, rng) for _ in streams]
        like_sets = [self._set_of_kinds(cause, eviction, rng) for _ in streams]
        if not self.is_greedy and all(len(tokens) == len(cause) for tokens in (*sets, *like_sets)):
            after_death = len(self.case.prompt) + self._death() + 1
            arms = {
                "nothing": [PutBack() for _ in streams],
                "random": [PutBack(tokens) for tokens in sets],
                "kind": [PutBack(tokens) for tokens in like_sets],
                "cause": [PutBack(cause) for _ in streams],
                "no_compression": [PutBack(until=NEVER) for _ in streams],
                "cause_until_death": [PutBack(cause, released_at=after_death) for _ in streams],
                "no_compression_until_death": [self._no_compression_until_death() for _ in streams],
            }
            forks = []
            for put_backs in arms.values():
                forks += [
                    Fork(self.case, put_back, eviction.length, stream) for stream, put_back in enumerate(put_backs)
                ]
            results = iter((yield forks))
            self.autopsy.held_out = {arm: tuple(islice(results, HELD_OUT_STREAMS)) for arm in arms}

    def _random_set(self, cause: Tokens, eviction: Eviction, rng: random.Random) -> Tokens:
        return similar_tokens(cause, eviction, rng, lambda _, token: token not in cause)

    def _set_of_kinds(self, cause: Tokens, eviction: Eviction, rng: random.Random) -> Tokens:
        """Return other tokens of the cause's kinds that the same compression evicted, at like distances."""

        def is_like(own: int, token: int) -> bool:
            return token not in cause and token_kind(self.case.text(token)) == token_kind(self.case.text(own))

        return similar_tokens(cause, eviction, rng, is_like)
