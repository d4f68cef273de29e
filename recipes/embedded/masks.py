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
from traces import DIGITS, END_THINK, LETTERS, VOCABULARY

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]

PERIOD = (24, 120)
WINDOW = (8, 96)
MASKED_SHARE = 0.75
# Weights of the schemes. "copies" has the largest: only there is every operand recoverable, so only there can the model
# learn to trust a few scattered survivors.
SCHEMES = {"copies": 0.5, "tokens": 0.25, "spans": 0.25}
PER_HEAD_SHARE = 0.12

_LETTER = VOCABULARY.index(LETTERS[0])
_DIGIT = VOCABULARY.index(DIGITS[0])
_EQUALS, _COMMA = VOCABULARY.index("="), VOCABULARY.index(",")
_END_THINK = VOCABULARY.index(END_THINK)


def batch_mask(
    sequences: Sequence[Ids], prompts: Sequence[int], kv_heads: int, groups: int, rng: random.Random
) -> Mask:
    """Visible(query, key) of a right-padded batch: [batch, 1 or heads, length, length].

    Heads have masks of their own in a share of the batches (random eviction per KV head is a published policy);
    `groups` query heads share each KV head.
    """
    length = max(len(ids) for ids in sequences)
    per_head = rng.random() < PER_HEAD_SHARE
    causal = np.tril(np.ones((length, length), dtype=bool))
    batch = np.broadcast_to(causal, (len(sequences), kv_heads if per_head else 1, length, length)).copy()
    for row, (ids, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        if rng.random() >= MASKED_SHARE:
            continue
        scheme = "tokens" if per_head else rng.choices(list(SCHEMES), list(SCHEMES.values()))[0]
        firings, window = _firings(len(ids), prompt, rng)
        rate = rng.uniform(0.0, 0.6)
        for head in range(batch.shape[1]):
            _hide(batch[row, head], ids, prompt, firings, window, survivors(scheme, rate, len(ids), rng))
    return np.repeat(batch, groups, axis=1) if per_head else batch


def statements(ids: Ids) -> dict[int, list[tuple[int, int]]]:
    """Where each letter's value stands, as (start, end): `q 5` anywhere, and `q = 5 ,` of a definition by a digit."""
    letter = (ids >= _LETTER) & (ids < _LETTER + len(LETTERS))
    digit = (ids >= _DIGIT) & (ids < _DIGIT + len(DIGITS))
    found: dict[int, list[tuple[int, int]]] = {}
    for i in np.flatnonzero(letter[:-1] & digit[1:]):
        found.setdefault(int(ids[i]), []).append((int(i), int(i) + 2))
    defined = letter[:-3] & (ids[1:-2] == _EQUALS) & digit[2:-1] & (ids[3:] == _COMMA)
    for i in np.flatnonzero(defined):
        found.setdefault(int(ids[i]), []).append((int(i), int(i) + 3))
    return found


class Scheme:
    """Which thinking tokens of one sequence survive: `keep` is asked at each firing for the older ones.

    `static` [length] marks tokens that survive; each firing thins them to a share of `thinning`; with `copies`
    one uniformly chosen copy of every result stated so far stays besides.
    """

    def __init__(self, static: Mask, thinning: float, copies: bool, rng: random.Random) -> None:
        self.static, self.thinning, self.copies, self.rng = static, thinning, copies, rng
        self.chosen: dict[int, tuple[int, int]] = {}
        self.noise = np.random.default_rng(rng.getrandbits(64))

    def keep(self, ids: Ids, start: int, old: int, alive: Mask) -> Mask:
        """The tokens that stay among those `alive` [length]; only [start, old) of the answer counts."""
        if self.thinning < 1.0:
            self.static &= self.noise.random(len(self.static)) < self.thinning
        stay = self.static.copy()
        if self.copies:
            for name, places in statements(ids[start:old]).items():
                at = [(start + a, start + b) for a, b in places if alive[start + a : start + b].all()]
                if at and (name not in self.chosen or self.rng.random() < 0.3):
                    first, last = self.rng.choice(at)
                    extra = self.rng.randint(0, max(0, 4 - (last - first)))
                    left = self.rng.randint(0, extra)
                    self.chosen[name] = (max(start, first - left), min(old, last + extra - left))
            for first, last in self.chosen.values():
                stay[first:last] = True
        return stay & alive


def survivors(scheme: str, rate: float, length: int, rng: random.Random) -> Scheme:
    """One of SCHEMES for a sequence of `length` tokens; `rate` is the share of tokens that survive at random."""
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
    return Scheme(static, thinning, scheme == "copies", rng)


def _firings(length: int, prompt: int, rng: random.Random) -> tuple[list[int], int]:
    period, window = rng.randint(*PERIOD), rng.randint(*WINDOW)
    return list(range(prompt + rng.randint(1, period), length, period)), window


def _hide(visible: Mask, ids: Ids, prompt: int, firings: list[int], window: int, scheme: Scheme) -> None:
    """Clears, for the queries after each firing, the keys that are gone by then. `visible` is [length, length]."""
    end = int(np.flatnonzero(ids == _END_THINK)[0])
    alive = np.ones(len(ids), dtype=bool)
    for firing in firings:
        old = min(firing - window, end)
        if old <= prompt:
            continue
        alive[prompt:old] = scheme.keep(ids, prompt, old, alive)[prompt:old]
        visible[firing:, prompt:old] &= alive[prompt:old]
