"""When a compression fires and how many tokens it leaves: what the budget's parameters say, as plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from kvatlas.core import KvatlasError

#: What a KV budget counts, and from where on every so many tokens are counted.
OVER, EVERY_FROM = ("cache", "thinking"), ("budget", "start", "prompt")


@dataclass(frozen=True)
class Budget:
    """The parameters `kv_budget`, `budget_over`, `every` and `every_from` of a policy (`policies/base.py`)."""

    tokens: int
    over: str
    every: int
    every_from: str

    def check(self) -> None:
        """KvatlasError for values that are not valid."""
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 0:
            raise KvatlasError(f"every is {self.every!r}; valid are whole numbers of tokens, 0 for at the budget.")
        for name, value, valid in (("budget_over", self.over, OVER), ("every_from", self.every_from, EVERY_FROM)):
            if value not in valid:
                raise KvatlasError(f"{name} is {value!r}; valid are {', '.join(map(repr, valid))}.")
        if not self.every and self.every_from != EVERY_FROM[0]:
            raise KvatlasError(f"every_from is {self.every_from!r} without every; give every, the tokens between two.")

    def tokens_with(self, prompt: int) -> int:
        """The budget as a length of the cache."""
        return self.tokens + (prompt if self.over == "thinking" else 0)

    def most(self, prompt: int) -> int:
        """The greatest length of the cache that a compression waits for, prompts below the budget assumed."""
        return self.tokens_with(prompt) + self.every

    def due(self, prompt: int, cached: int, position: int) -> int:
        """The cache length at which the next compression fires, `cached` of `position` tokens being there.

        `cached` equals `position` before the first one. What was kept above the budget (prompt and answer) delays it.
        """
        limit = self.tokens_with(prompt)
        if not self.every:
            return limit
        if self.every_from == "budget":
            return self.every + (limit if cached == position else max(limit, cached))
        # The first position that has its turn, at which more than the budget is cached.
        turn = 1 if self.every_from == "start" else prompt
        earliest = position + max(1, limit + 1 - cached)
        return cached + earliest + (turn - earliest) % self.every - position

    def chosen(self, window: int, older: int, protected: int, prompt: int) -> int:
        """With `every`: places for the competing ones of `older` tokens, `protected` others of which `prompt` are the
        prompt's."""
        counted = protected - (prompt if self.over == "thinking" else 0)
        return min(older - protected, max(0, self.tokens - window - counted))


@lru_cache(maxsize=4096)
def share(ratio: float, tokens: int) -> int:
    """floor(ratio * tokens), exact for the decimal that was written (0.3 of 10 is 3, never 2)."""
    return math.floor(Fraction(str(ratio)) * tokens)
