"""The search of one autopsy: which evicted tokens restore a lost answer, and how often under other random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from kvatlas.autopsy.autopsies import Autopsy, SavingToken, key_of, token_kind
from kvatlas.autopsy.lost_answers import LostAnswer
from kvatlas.noise import stream_key
from kvatlas.policies.selection import CompressionChoice, PutBack

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


# -- evictions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Eviction:
    """The tokens that one compression evicted, in their order; `length` counts all tokens before its `choice`."""

    length: int
    tokens: Tokens
    choice: CompressionChoice

    def spans(self) -> list[Tokens]:
        """Return the tokens in spans of equal sizes, the nearest first."""
        most = max(1, int(self.choice.slots * SPAN_SHARE))
        count = -(-len(self.tokens) // most)
        bounds = [len(self.tokens) * index // count for index in range(count + 1)]
        spans = [self.tokens[start:stop] for start, stop in pairwise(bounds)]
        return spans[::-1]


def similar_tokens(cause: Tokens, eviction: Eviction, rng: random.Random, kinds: Mapping[int, str]) -> Tokens:
    """Return other evicted tokens for those of a cause, each at half to twice the distance of its own.

    Each has the kind of its own in `kinds`, which is empty for tokens of any kind. There are fewer tokens if the
    eviction has too few. The logarithms of distances are drawn alike, so that tokens are neither nearer nor farther
    than their own on average.
    """
    chosen: list[int] = []
    for position in cause:
        others = [token for token in eviction.tokens if token not in chosen and token not in cause]
        free = [token for token in others if kinds.get(token) == kinds.get(position)]
        distance = eviction.length - position
        near = [token for token in free if distance / 2 <= eviction.length - token <= 2 * distance]
        candidates = near or free
        if candidates:
            chosen += rng.choices(candidates, [1 / (eviction.length - token) for token in candidates])
    return tuple(chosen)


# -- the search --------------------------------------------------------------------------------------------------------


def shrink(
    tokens: Tokens, beside: Tokens, left: Callable[[], int], fork: Callable[[Tokens], Request[Any]]
) -> Generator[list[Request[Any]], list[bool], Tokens]:
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


@dataclass(eq=False)
class AutopsySearch:
    """The autopsy of a lost answer: its cause, and the held-out test of it.

    `texts` are those of the tokens, prompt included; `restored` tells whether the answer of a generation is right. An
    answer that `is_greedy`, decoded at temperature 0, has no held-out test. `base` has the choices of the policy, and
    `checkpoints` the rows before its compressions, after the `trunk`.
    """

    lost: LostAnswer
    prompt: tuple[int, ...]
    stream: int
    policy: Policy
    texts: Sequence[str]
    restored: Callable[[Generation[Any]], bool]
    is_greedy: bool = False
    base: PutBack = field(default_factory=PutBack)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    #: The replays that the search waits for, and the results so far by the keys of their requests.
    asked: list[Request[Any]] = field(default_factory=list)
    results: dict[object, bool] = field(default_factory=dict)
    replays: int = 0

    def __post_init__(self) -> None:
        self._running = self._run()
        death = self.lost.death
        self.autopsy = Autopsy(key_of(self.lost), death.kind.value, death.token)
        #: The number of new tokens at the death.
        self.death = len(self.lost.trace.tokens) if death.token is None else death.token

    def request(self, key: object, **values: Any) -> Request[Any]:
        """Return a request for this prompt."""
        from kvatlas.engine import Request

        return Request(key, self.prompt, **{"stream": self.stream, "policies": (self.policy,), **values})

    def trunk(self) -> Request[Any]:
        """Return the stored trace decoded again, which leaves checkpoints."""
        return self.request(self, put_back=self.base, checkpoints=self.checkpoints)

    def fork(self, put_back: PutBack, length: int, stream: int | None = None) -> Request[Any]:
        """Return a decoding from the compression at `length` tokens on, with these tokens put back.

        Its random numbers are the stored ones, or those of the held-out `stream`, counted from 0.
        """
        random_stream = self.stream if stream is None else stream_key(self.stream, "held out", stream)
        return self.request(object(), stream=random_stream, put_back=put_back, start=self.checkpoints[length])

    def take(self, generation: Generation[Any]) -> None:
        """Note whether the answer of a fork is right, or whether the trunk is the stored trace token for token."""
        is_trunk = generation.key is self
        is_stored = generation.tokens == self.lost.trace.tokens
        self.results[generation.key] = is_stored if is_trunk else self.restored(generation)

    def close(self) -> None:
        """Give back the pages of the checkpoints."""
        for checkpoint in self.checkpoints.values():
            checkpoint.drop()
        self.checkpoints.clear()

    def left(self) -> int:
        """Return how many replays the search may still take."""
        return MOST_REPLAYS - self.replays

    def next_replays(self) -> list[Request[Any]]:
        """Return the replays that the search needs after the `results` of those `asked` for, none at its end."""
        results = [self.results[replay.key] for replay in self.asked]
        self.replays += len(results)
        self.results = {}
        try:
            self.asked = self._running.send(results) if results else next(self._running)
        except StopIteration:
            self.asked = []
        return self.asked

    def _run(self) -> Generator[list[Request[Any]], list[bool], None]:
        """Look for the smallest set of evicted tokens that restores the answer, and test it."""
        (self.autopsy.reproduced,) = yield [self.trunk()]
        if self.autopsy.reproduced:
            found = yield from self._cause()
            self.autopsy.replays = self.replays
            if found:
                yield from self._test(*found)
        self.close()

    def _no_compression_until_death(self) -> PutBack:
        # A compression at `length` tokens has one new token more than have been through the model.
        return PutBack(until=self.death + 2)

    def _cause(self) -> Generator[list[Request[Any]], list[bool], tuple[Tokens, Eviction] | None]:
        """Look for a cause; note the spans, and whether the answer is right without compression until the death."""
        # A statement begins with its name at the death: its value comes with the next token.
        last = len(self.prompt) + self.death
        by_span: dict[Tokens, Eviction] = {}
        for eviction in self._evictions():
            if eviction.length <= last:
                by_span |= dict.fromkeys(eviction.spans(), eviction)
        spans = list(by_span)[: self.left()]
        if not spans:
            return None

        without = self._no_compression_until_death()
        forks = [self.fork(PutBack(span), by_span[span].length) for span in spans]
        self.autopsy.full, *results = yield [self.fork(without, min(self.checkpoints)), *forks]
        saving = [span for span, saves in zip(spans, results, strict=True) if saves]
        self.autopsy.spans = len(spans)
        self.autopsy.saving = len(saving)
        if not saving:
            return None

        eviction = by_span[saving[0]]
        cause = yield from shrink(saving[0], (), self.left, lambda tokens: self.fork(PutBack(tokens), eviction.length))
        saving_tokens = []
        for position in sorted(cause):
            text = self.texts[position]
            distance = eviction.length - position
            rank = float(eviction.choice.ranks[position])
            saving_tokens.append(
                SavingToken(position, text, distance, rank, eviction.choice.slots, len(eviction.tokens))
            )
        self.autopsy.tokens = tuple(saving_tokens)
        return cause, eviction

    def _evictions(self) -> Iterator[Eviction]:
        """Yield what the compressions of the trace evicted, the latest first."""
        assert self.lost.trace.eviction_trace is not None
        evicted_at = self.lost.trace.eviction_trace.evicted_at
        for length, choice in sorted(self.base.choices.items(), reverse=True):
            # The newest token of a compression has not been through the model.
            new_tokens = length - len(self.prompt) + 1
            tokens = tuple(position for position, step in enumerate(evicted_at) if step == new_tokens)
            if tokens and choice.slots:
                yield Eviction(length, tokens, choice)

    def _test(self, cause: Tokens, eviction: Eviction) -> Generator[list[Request[Any]], list[bool], None]:
        """Try random sets, and the cause under held-out random numbers."""
        rng = random.Random(repr(self.autopsy.key))
        sets = [similar_tokens(cause, eviction, rng, {}) for _ in range(RANDOM_SETS)]
        forks = [self.fork(PutBack(tokens), eviction.length) for tokens in sets if len(tokens) == len(cause)]
        if forks:
            self.autopsy.random = tuple((yield forks))

        # A random set for each stream, of any tokens and of tokens of the cause's kinds.
        streams = range(HELD_OUT_STREAMS)
        kinds = {token: token_kind(self.texts[token]) for token in eviction.tokens}
        sets = [similar_tokens(cause, eviction, rng, {}) for _ in streams]
        like_sets = [similar_tokens(cause, eviction, rng, kinds) for _ in streams]
        if not self.is_greedy and all(len(tokens) == len(cause) for tokens in (*sets, *like_sets)):
            after_death = len(self.prompt) + self.death + 1
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
                forks += [self.fork(put_back, eviction.length, stream) for stream, put_back in enumerate(put_backs)]
            results = iter((yield forks))
            self.autopsy.held_out = {arm: tuple(islice(results, HELD_OUT_STREAMS)) for arm in arms}
