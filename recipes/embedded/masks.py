"""Random holes in the cache for training: what a blockwise compression could have left of a trace.

Compressions fire at random intervals. At each one the thinking tokens older than a random local window stay only if
they survive, and what is gone stays gone. Survivors come from a mix of random schemes; none looks at attention, at a
learned score or at which of several copies of a result a policy would prefer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from examples import Example

Mask = npt.NDArray[np.bool_]
# For each token the first query that does not see it any more.
Until = npt.NDArray[np.int16]

PERIOD = (24, 120)
WINDOW = (8, 96)
MASKED_SHARE = 0.75
# Weights of the schemes. "copies" has the largest: only there is every result recoverable, so only there can the model
# learn to trust a few scattered survivors.
SCHEMES = {"copies": 0.5, "tokens": 0.25, "spans": 0.25}
PER_HEAD_SHARE = 0.12


def batch_holes(examples: Sequence[Example], length: int, kv_heads: int, rng: random.Random) -> Until:
    """The time for which each token of a right-padded batch is visible: [batch, 1 or KV heads, length].

    What is gone stays gone, so the first query that does not see a token says all. Heads have holes of their own in a
    share of the batches: random eviction per KV head is a published policy.
    """
    per_head = rng.random() < PER_HEAD_SHARE
    until = np.full((len(examples), kv_heads if per_head else 1, length), length, dtype=np.int16)
    for row, example in enumerate(examples):
        if rng.random() >= MASKED_SHARE:
            continue
        scheme = "tokens" if per_head else rng.choices(list(SCHEMES), list(SCHEMES.values()))[0]
        firings, window = _firings(example, rng)
        rate = rng.uniform(0.0, 0.6)
        for head in range(until.shape[1]):
            _hide(until[row, head], example, firings, window, survivors(scheme, rate, example, rng))
    return until


def unseen(example: Example, until: Until) -> list[int]:
    """Places of words that restate a result of which no copy is visible any more, nor in the prompt.

    `until` [heads, length] is the sequence's part of `batch_holes`. A model that is asked for them all the
    same learns to invent results where it sees none.
    """
    prompt = example.words[: example.prompt]
    given = {a for a, b, c in zip(prompt, prompt[1:], prompt[2:], strict=False) if b == " = " and c.isdigit()}
    stated: dict[str, list[int]] = {}
    places: list[int] = []
    for name, first, last in example.results:
        copies = stated.setdefault(name, [])
        if copies and name not in given and not (until[:, copies] > last - 2).any():
            places += range(first, last)
        copies.append(last - 1)
    return places


def undecided(example: Example, until: Until) -> list[int]:
    """Places of words that begin a line, or end the thinking, while some result stated before cannot be seen.

    What is left to do follows from what is done: a model that is asked for it without seeing that learns to stop early.
    """
    stated: dict[str, list[int]] = {}
    results = sorted(example.results, key=lambda result: result[2])
    places: list[int] = []
    for position in range(example.prompt + 1, example.thinking_end + 1):
        if example.words[position - 1] == " .\n":
            while results and results[0][2] <= position:
                name, _, last = results.pop(0)
                stated.setdefault(name, []).append(last - 1)
            if not all((until[:, copies] > position - 1).any() for copies in stated.values()):
                places.append(position)
    return places


class Scheme:
    """Which thinking tokens of one sequence survive: `keep` is asked at each firing for the older ones.

    `static` [length] marks tokens that survive; each firing thins them to a share of `thinning`; with `copies`
    one uniformly chosen copy of every result stated so far stays besides.
    """

    def __init__(self, static: Mask, thinning: float, copies: bool, example: Example, rng: random.Random) -> None:
        self.static, self.thinning, self.rng = static, thinning, rng
        self.results = _kept(example, rng) if copies else []
        self.chosen: dict[str, tuple[int, int]] = {}
        self.noise = np.random.default_rng(rng.getrandbits(64))

    def keep(self, start: int, old: int, alive: Mask) -> Mask:
        """The tokens that stay among those `alive` [length]; only [start, old) of the answer counts."""
        if self.thinning < 1.0:
            self.static &= self.noise.random(len(self.static)) < self.thinning
        stay = self.static.copy()
        places: dict[str, list[tuple[int, int]]] = {}
        for name, first, last in self.results:
            if last <= old and alive[first:last].all():
                places.setdefault(name, []).append((first, last))
        for name, at in places.items():
            if name not in self.chosen or self.rng.random() < 0.3:
                first, last = self.rng.choice(at)
                extra = self.rng.randint(0, max(0, 4 - (last - first)))
                left = self.rng.randint(0, extra)
                self.chosen[name] = (max(start, first - left), min(old, last + extra - left))
        for first, last in self.chosen.values():
            stay[first:last] = True
        return stay & alive


def survivors(scheme: str, rate: float, example: Example, rng: random.Random) -> Scheme:
    """One of SCHEMES for a sequence; `rate` is the share of tokens that survive at random."""
    length = len(example.words)
    noise = np.random.default_rng(rng.getrandbits(64))
    if scheme == "spans":
        static = np.zeros(length, dtype=bool)
        # Spans of 1 to 8 tokens, 4.5 on average, started often enough to cover a share of `rate`.
        for first in np.flatnonzero(noise.random(length) < -np.log1p(-rate) / 4.5):
            static[first : first + int(noise.integers(1, 9))] = True
    else:
        static = noise.random(length) < (rate / 3 if scheme == "copies" else rate)
    # A policy that draws anew at each compression thins its earlier survivors again.
    thins = scheme != "copies" and rng.random() < 0.3
    thinning = rng.uniform(0.5, 1.0) if thins else 1.0
    return Scheme(static, thinning, scheme == "copies", example, rng)


def _kept(example: Example, rng: random.Random) -> list[tuple[str, int, int]]:
    """The results of which a copy stays: those that the answer needs, and of the others a random share."""
    share = rng.random()
    names = {name for name, _, _ in example.results}
    kept = {name for name in sorted(names) if example.needed is None or name in example.needed or rng.random() < share}
    return [result for result in example.results if result[0] in kept]


def _firings(example: Example, rng: random.Random) -> tuple[list[int], int]:
    period, window = rng.randint(*PERIOD), rng.randint(*WINDOW)
    return list(range(example.prompt + rng.randint(1, period), len(example.words), period)), window


def _hide(until: Until, example: Example, firings: list[int], window: int, scheme: Scheme) -> None:
    """Writes down after which firing each token is gone. `until` is [length]."""
    end, prompt = example.thinking_end, example.prompt
    alive = np.ones(len(example.words), dtype=bool)
    for firing in firings:
        old = min(firing - window, end)
        if old <= prompt:
            continue
        stay = scheme.keep(prompt, old, alive)[prompt:old]
        gone = alive[prompt:old] & ~stay
        until[prompt:old][gone] = firing
        alive[prompt:old] = stay
